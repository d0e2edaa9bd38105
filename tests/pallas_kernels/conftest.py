"""Fixtures for tests of the native kernels, which need a compiler and a processor that has them."""

import ctypes
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest

from pallas_kernels.native import library
from pallas_kernels.target import processor_flags
from tests.pallas_kernels.native_builds import PARTS, WHOLE, compile_library, compile_product, imitation
from tests.pallas_kernels.native_cases import WAYS

INTEGERS = ("INT8_PRODUCT", "GROUPED_INT8_PRODUCT", "GROUPED_PACKED_PRODUCT")
ALL = ("PAGED_ATTENTION", "ROWS_PRODUCT", "GROUPED_PRODUCT", "GROUPED_KEPT_PRODUCT", *INTEGERS)
# Of ways whose kernels are compiled in another way: the fixture that brings them, and the names of those.
OTHER_BUILDS = {
    "narrow": ("narrow_kernels", ALL),
    "narrow bytes": ("narrow_bytes", INTEGERS),
    "tiles": ("imitated", ALL),
}


@pytest.fixture(scope="session")
def native_runs_here() -> None:
    """Skips where the machine has no native kernels; fails where their source is at fault."""
    reason = library.load(*PARTS)
    if reason is not None and "made no library" in reason:
        pytest.fail(reason)  # an error in the source isn't this machine's fault
    if reason is not None:
        pytest.skip(reason)


@pytest.fixture(scope="session")
def narrow_kernels(native_runs_here: None) -> str:
    """What ends XLA's names of the kernels compiled for a processor that has AVX2 only."""
    path = compile_library("-mno-avx512f")
    library._register(ctypes.CDLL(str(path)), WHOLE, "_narrow")
    return "_narrow"


@pytest.fixture(scope="session")
def narrow_bytes(native_runs_here: None) -> str:
    """The same of products with int8, compiled for a processor that multiplies bytes in registers of 256 bits."""
    if not {"avx512_vnni", "avx512vl"} <= processor_flags():
        pytest.skip("the processor has no avx512_vnni")
    kernels = ctypes.CDLL(str(compile_product("-mno-avx512bf16", source="product_int8.cc")))
    assert kernels.multiplies_bytes()
    for name in INTEGERS:
        function = jax.ffi.pycapsule(getattr(kernels, getattr(library, name).removeprefix("jaxsgl_")))
        jax.ffi.register_ffi_target(f"{getattr(library, name)}_narrow_bytes", function, platform="cpu")
    return "_narrow_bytes"


@pytest.fixture(scope="session")
def imitated_kernels(native_runs_here: None) -> Path:
    """The kernels with AMX in plain C++ instead of the instructions."""
    if not library.has_pairs():
        pytest.skip("kernels with tiles need avx512_bf16 beside them")
    return compile_library(*imitation())


@pytest.fixture(scope="session")
def imitated(imitated_kernels: Path) -> str:
    """What ends XLA's names of these kernels."""
    kernels = ctypes.CDLL(str(imitated_kernels))
    assert library.tile_refusal(kernels) is None
    library._register(kernels, WHOLE, "_imitated")
    return "_imitated"


@pytest.fixture(scope="module", params=WAYS)
def each_way(request: pytest.FixtureRequest, native_runs_here: None) -> Iterator[None]:
    """Runs a module's native kernels with each way to multiply, whichever is faster on this processor."""
    if request.param == "paired" and not library.has_pairs():
        pytest.skip("the processor has no avx512_bf16")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "widens", lambda: request.param != "paired")
        patch.setattr(library, "product_way", lambda: {"narrow": "widened"}.get(request.param, request.param))
        if request.param == "narrow":
            patch.setattr(library, "has_pairs", lambda: False)
        if request.param in OTHER_BUILDS:
            fixture, constants = OTHER_BUILDS[request.param]
            suffix = request.getfixturevalue(fixture)
            for constant in constants:
                patch.setattr(library, constant, f"{getattr(library, constant)}{suffix}")
        jax.clear_caches()  # the way is chosen while tracing
        yield
    jax.clear_caches()
