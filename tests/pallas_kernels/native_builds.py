"""The native kernels compiled in other ways than for this machine."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from pallas_kernels.native import library
from pallas_kernels.target import processor_flags

_IMITATED_TILES = Path(__file__).with_name("imitated_tiles.h")


def compile_library(*options: str) -> Path:
    """The kernels, compiled with more `options` than usually, and kept like any other library."""
    compiler = library.compiler()
    assert compiler is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "_OPTIONS", (*library._OPTIONS, *options))
        patch.setattr(library, "_LONGEST_S", 1800.0)  # sanitizers take several times as long to compile
        return library._compiled(compiler, processor_flags())


def compile_product(*options: str, source: str = "product.cc") -> Path:
    """The same without attention, which takes as long to compile again."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "_SOURCES", (library._FOLDER / source,))
        return compile_library(*options)


def imitation() -> tuple[str, str]:
    """The options that replace AMX's instructions by plain C++; the library's name depends on its text too."""
    version = hashlib.sha256(_IMITATED_TILES.read_bytes()).hexdigest()[:16]
    return f'-DJAXSGL_IMITATED_TILES="{_IMITATED_TILES}"', f"-DIMITATED_VERSION={version}"
