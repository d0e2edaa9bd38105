from __future__ import annotations

import os
from pathlib import Path

import pytest

from jaxsgl import json_file
from jaxsgl.errors import CheckpointError
from jaxsgl.json_file import read_object


def test_an_object_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"a": "é"}', encoding="utf-8")
    assert read_object(tmp_path / "config.json") == {"a": "é"}


@pytest.mark.timeout(20)
def test_what_is_no_file_is_refused_without_waiting_for_it(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "endless").symlink_to("/dev/zero")
    (tmp_path / "folder").mkdir()
    for name in ("pipe", "endless", "folder"):
        with pytest.raises(CheckpointError, match=f"{name} can't be read as JSON"):
            read_object(tmp_path / name)


def test_large_and_deep_files_are_refused_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "config.json"
    path.write_text("[" * 100_000 + "]" * 100_000)
    with pytest.raises(CheckpointError, match="can't be read as JSON"):
        read_object(path)
    monkeypatch.setattr(json_file, "MAX_BYTES", 10)
    with pytest.raises(CheckpointError, match="200000 bytes, but 10 are the most"):
        read_object(path)
