from __future__ import annotations

import os
from pathlib import Path

import pytest
from jax._src.compilation_cache import compress_executable

from tests import kept

pytestmark = pytest.mark.device


def test_whole_programs_are_kept_for_the_next_run_and_half_ones_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept, "FOLDER", tmp_path)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    program = compress_executable(os.urandom(1000))
    first = kept.Programs()
    folder = Path(os.environ["JAX_COMPILATION_CACHE_DIR"])
    (folder / "whole-cache").write_bytes(program)
    (folder / "half-cache").write_bytes(program[:500])  # the server that wrote it was killed
    first.close()
    assert not folder.exists()
    second = kept.Programs()
    folder = Path(os.environ["JAX_COMPILATION_CACHE_DIR"])
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {"whole-cache": program}
    second.close()


def test_programs_beyond_the_limit_leave_the_ones_read_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "FOLDER", tmp_path)
    monkeypatch.setattr(kept, "MOST_BYTES", 4000)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    first = kept.Programs()
    for number in range(5):
        path = Path(os.environ["JAX_COMPILATION_CACHE_DIR"]) / f"{number}-cache"
        path.write_bytes(compress_executable(os.urandom(1000)))
    first.close()
    for path in tmp_path.rglob("*-cache"):
        os.utime(path, (1000 + int(path.name[0]), 1000))
    second = kept.Programs()
    left = {path.name for path in Path(os.environ["JAX_COMPILATION_CACHE_DIR"]).iterdir()}
    second.close()
    assert left and left <= {"3-cache", "4-cache"}
