"""A model's name is a local folder or a hub id; the error says how both attempts ended."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.utils import filter_repo_objects
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from jaxsgl.engine.start import opening
from jaxsgl.errors import CheckpointError
from jaxsgl.models import arch_from_folder
from jaxsgl.offline.llm import LLM
from jaxsgl.weights import resolve_model_folder
from tests.text.small_tokenizers import save

RESOLVE = "import sys; from jaxsgl.weights import resolve_model_folder; print(resolve_model_folder(*sys.argv[1:]))"
# The folder and the ids of "a" for each revision.
RESOLVE_AND_ENCODE = """
import sys
from jaxsgl.text.tokenizer import load_tokenizer
from jaxsgl.weights import resolve_model_folder
for revision in (None, *sys.argv[2:]):
    print(resolve_model_folder(sys.argv[1], revision), *load_tokenizer(sys.argv[1], revision).encode("a"))
"""
COMMIT, OLDER = "0123456789abcdef0123456789abcdef01234567", "89abcdef0123456789abcdef0123456789abcdef"


def run_offline(program: str, hub_cache: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs Python with a hub's cache in a process of its own, because the hub's settings are read at import."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(hub_cache)}
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, timeout=120)


def snapshot_of(hub_cache: Path, commit: str, ref: str) -> Path:
    """An empty snapshot in the cache, at a commit that `ref` names."""
    repository = hub_cache / "models--someone--some-model"
    snapshot = repository / "snapshots" / commit
    for folder in (snapshot, repository / "refs"):
        folder.mkdir(parents=True, exist_ok=True)
    (snapshot / "config.json").write_text("{}")
    (repository / "refs" / ref).write_text(commit)
    return snapshot


def test_a_local_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    assert resolve_model_folder(str(tmp_path)) == tmp_path


@pytest.mark.parametrize("name", ["/no/such/folder", "./missing", "~/missing/model", "a/b/c", ""])
def test_a_path_that_is_no_folder_is_not_looked_up_on_the_hub(name: str) -> None:
    with pytest.raises(CheckpointError, match=r"is not a folder.*not a hub id"):
        resolve_model_folder(name)


def test_what_is_no_checkpoint_is_named(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").touch()
    with pytest.raises(CheckpointError, match="is a file: name a GGUF file, a folder with a checkpoint"):
        resolve_model_folder(str(tmp_path / "adapter_config.json"))
    with pytest.raises(CheckpointError, match=r"but an adapter: serve its base model"):
        arch_from_folder(tmp_path)
    with pytest.raises(CheckpointError, match=r"it has no config.json; name a checkpoint's folder"):
        (tmp_path / "empty").mkdir()
        arch_from_folder(tmp_path / "empty")
    with pytest.raises(CheckpointError, match=r"no.gguf is not a folder, there is no such file: check the path"):
        resolve_model_folder(str(tmp_path / "no.gguf"))


def test_a_platform_that_jax_lacks_names_what_brings_it(tmp_path: Path) -> None:
    program = "from jaxsgl.engine.start.memory import start_jax; start_jax()"
    root = Path(__file__).parents[2]
    environment = {**os.environ, "JAX_PLATFORMS": "cuda", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", program], env=environment, cwd=root, capture_output=True, text=True)
    assert "ConfigError: JAX finds no device of JAX_PLATFORMS=cuda" in done.stderr
    assert "pip install 'jaxsgl[cuda13]'" in done.stderr


def test_a_hub_id_that_cannot_be_fetched_reports_both_attempts(tmp_path: Path) -> None:
    done = run_offline(RESOLVE, tmp_path, "someone/some-model")
    last_line = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 1
    assert "CheckpointError: model someone/some-model:" in last_line
    assert "is not a folder" in last_line and "fetching hub id someone/some-model failed:" in last_line


def test_a_hub_id_in_the_cache_needs_no_network(tmp_path: Path) -> None:
    snapshot = snapshot_of(tmp_path, COMMIT, "main")
    done = run_offline(RESOLVE, tmp_path, "someone/some-model")
    assert done.stdout.strip() == str(snapshot), done.stderr


def test_weights_are_fetched_once_though_a_repository_has_them_in_other_layouts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: dict[str, list[str]] = {}

    def download(name: str, **options: Any) -> str:
        asked.update(options)
        return name

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    resolve_model_folder("someone/some-model")
    once = ["config.json", "model-00001-of-00002.safetensors", "tokenizer.json", "1_Pooling/config.json"]
    again = [
        "original/model.safetensors",
        "original/params.json",
        "metal/model.safetensors",
        "consolidated.safetensors",
    ]
    patterns = {key: asked[key] for key in ("allow_patterns", "ignore_patterns")}
    assert list(filter_repo_objects([*once, *again, "model.bin"], **patterns)) == once


def test_weights_and_tokenizer_are_of_the_revision(tmp_path: Path) -> None:
    snapshots = snapshot_of(tmp_path, COMMIT, "main"), snapshot_of(tmp_path, OLDER, "v1")
    for letters, snapshot in zip(("ab", "ba"), snapshots, strict=True):
        save(Tokenizer(WordLevel({letter: i for i, letter in enumerate(letters)}, unk_token="b")), snapshot)
    done = run_offline(RESOLVE_AND_ENCODE, tmp_path, "someone/some-model", "v1", OLDER)
    assert done.stdout.splitlines() == [f"{snapshots[0]} 0", f"{snapshots[1]} 1", f"{snapshots[1]} 1"], done.stderr


def test_a_revision_that_cannot_be_fetched_is_named() -> None:
    with pytest.raises(CheckpointError, match="fetching hub id someone/some-model at revision v9 failed"):
        resolve_model_folder("someone/some-model", "v9")


def test_the_engine_looks_for_the_revision_that_the_flag_names(monkeypatch: pytest.MonkeyPatch) -> None:
    def resolve(*arguments: object) -> Path:
        raise CheckpointError(repr(arguments))

    monkeypatch.setattr(opening, "resolve_model_folder", resolve)
    with pytest.raises(CheckpointError, match=re.escape("('someone/some-model', 'v1')")):
        LLM("someone/some-model", revision="v1")


def test_a_revision_of_a_local_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=rf"--revision is v1, but {tmp_path} is a local folder: leave it out"):
        resolve_model_folder(str(tmp_path), "v1")
