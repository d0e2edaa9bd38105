"""The native kernels compiled in other ways than for this machine."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from pallas_kernels.native import library
from pallas_kernels.target import processor_flags

_IMITATED_TILES = Path(__file__).with_name("imitated_tiles.h")


PARTS = (library.COMMON, library.GROUPED, library.INTEGERS, library.STATES)
# All kernels in one library.
WHOLE = library.Part(
    ("kernels.cc", "product.cc", "product_int8.cc", "states.cc"),
    tuple(target for part in PARTS for target in part.targets),
)


def compile_library(*options: str, part: library.Part = WHOLE) -> Path:
    """The kernels, compiled with more `options` than usually, and kept like any other library."""
    compiler = library.compiler()
    assert compiler is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "COMPILER_OPTIONS", (*library.COMPILER_OPTIONS, *options))
        patch.setattr(library, "_LONGEST_S", 1800.0)  # sanitizers take several times as long to compile
        return library._compiled(compiler, processor_flags(), part)


def compile_product(*options: str, source: str = "product.cc") -> Path:
    """The same without attention, which takes as long to compile again."""
    return compile_library(*options, part=library.Part((source,), ()))


def imitation() -> tuple[str, str]:
    """The options that replace AMX's instructions by plain C++; the library's name depends on its text too."""
    version = hashlib.sha256(_IMITATED_TILES.read_bytes()).hexdigest()[:16]
    return f'-DJAXSGL_IMITATED_TILES="{_IMITATED_TILES}"', f"-DIMITATED_VERSION={version}"
