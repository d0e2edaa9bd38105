"""A model's name is a local folder or a hub id; the error says how both attempts ended."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxsgl.errors import CheckpointError
from jaxsgl.weights import resolve_model_folder

RESOLVE = "import sys; from jaxsgl.weights import resolve_model_folder; print(resolve_model_folder(sys.argv[1]))"


def resolve_offline(name: str, hub_cache: Path) -> subprocess.CompletedProcess[str]:
    """Resolves `name` in a process of its own, because the hub's settings are read at import."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(hub_cache)}
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", RESOLVE, name]
    return subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, timeout=120)


def test_a_local_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    assert resolve_model_folder(str(tmp_path)) == tmp_path


@pytest.mark.parametrize("name", ["/no/such/folder", "./missing", "~/missing/model", "a/b/c", ""])
def test_a_path_that_is_no_folder_is_not_looked_up_on_the_hub(name: str) -> None:
    with pytest.raises(CheckpointError, match=r"is not a folder.*not a hub id"):
        resolve_model_folder(name)


def test_a_hub_id_that_cannot_be_fetched_reports_both_attempts(tmp_path: Path) -> None:
    done = resolve_offline("someone/some-model", tmp_path)
    last_line = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 1
    assert "CheckpointError: model someone/some-model:" in last_line
    assert "is not a folder" in last_line and "fetching hub id someone/some-model failed:" in last_line


def test_a_hub_id_in_the_cache_needs_no_network(tmp_path: Path) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = tmp_path / "models--someone--some-model"
    snapshot = repository / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    done = resolve_offline("someone/some-model", tmp_path)
    assert done.stdout.strip() == str(snapshot), done.stderr
