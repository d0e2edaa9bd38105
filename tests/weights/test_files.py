"""Which files are a model's weights, and what a note of them tells apart."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from jaxsgl.weights import note_of_files, weight_files


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("config.json", "kv_scales.safetensors", "params/a/0", "params/b/0", "params/b/1", "tokenizer.json"):
        path = tmp_path / "model" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{}")
    return tmp_path / "model"


def test_weights_are_files_of_tensors_and_all_that_a_converted_checkpoint_holds(folder: Path) -> None:
    (folder / "b.safetensors").write_text("")
    (folder / "a.gguf").write_text("")
    (folder / "gone.safetensors").symlink_to("nowhere")
    names = [str(path.relative_to(folder)) for path in weight_files(folder)]
    of_tensors = ["b.safetensors", "kv_scales.safetensors", "a.gguf"]
    assert names == [*of_tensors, "params/a/0", "params/b/0", "params/b/1"]


@pytest.mark.parametrize("changed", ["config.json", "kv_scales.safetensors", "params/b/1"])
def test_a_note_tells_files_of_another_text_size_or_time_apart(folder: Path, changed: str) -> None:
    before, path = note_of_files(folder), folder / changed
    status = path.stat()
    path.write_text('{"other": 1}')
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    by_size = note_of_files(folder)
    path.write_text("[]")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    assert len({before, by_size, note_of_files(folder)}) == 3


def test_a_note_tells_other_weights_that_draft_apart(folder: Path, tmp_path: Path) -> None:
    draft = tmp_path / "draft"
    draft.mkdir()
    (draft / "model.safetensors").write_text("1")
    alone, before = note_of_files(folder), note_of_files(folder, draft)
    (draft / "model.safetensors").write_text("22")
    assert len({alone, before, note_of_files(folder, draft)}) == 3
    assert note_of_files(folder) == alone
