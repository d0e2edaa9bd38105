"""Fixtures for tests of the native kernels, which need a compiler and a processor that has them."""

import ctypes
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest

from pallas_kernels.native import library
from tests.pallas_kernels.native_builds import compile_library, compile_product, imitation
from tests.pallas_kernels.native_cases import WAYS


@pytest.fixture(scope="session")
def native_runs_here() -> None:
    """Skips where the machine has no native kernels; fails where their source is at fault."""
    reason = library.load()
    if reason is not None and "made no library" in reason:
        pytest.fail(reason)  # an error in the source isn't this machine's fault
    if reason is not None:
        pytest.skip(reason)


@pytest.fixture(scope="session")
def narrow_kernels(native_runs_here: None) -> tuple[str, str, str]:
    """XLA's names of attention, products and int8 products, compiled for a processor that has AVX2 only."""
    path = compile_library("-mno-avx512f")
    kernels = library.PAGED_ATTENTION, library.ROWS_PRODUCT, library.INT8_PRODUCT
    names = f"{kernels[0]}_narrow", f"{kernels[1]}_narrow", f"{kernels[2]}_narrow"
    library._register(ctypes.CDLL(str(path)), *names)
    return names


@pytest.fixture(scope="session")
def imitated_kernels(native_runs_here: None) -> Path:
    """The products with AMX in plain C++ instead of the instructions."""
    if not library.has_pairs():
        pytest.skip("products with tiles need avx512_bf16 beside them")
    return compile_product(*imitation())


@pytest.fixture(scope="session")
def imitated_product(imitated_kernels: Path) -> str:
    """XLA's name of these products."""
    kernels = ctypes.CDLL(str(imitated_kernels))
    assert library.tile_refusal(kernels) is None
    name = f"{library.ROWS_PRODUCT}_imitated"
    jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(kernels.rows_product), platform="cpu")
    return name


@pytest.fixture(scope="module", params=WAYS)
def each_way(request: pytest.FixtureRequest, native_runs_here: None) -> Iterator[None]:
    """Runs a module's native kernels with each way to multiply, whichever is faster on this processor."""
    if request.param == "paired" and not library.has_pairs():
        pytest.skip("the processor has no avx512_bf16")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "widens", lambda: request.param != "paired")
        patch.setattr(library, "product_way", lambda: {"narrow": "widened"}.get(request.param, request.param))
        if request.param == "tiles":
            patch.setattr(library, "ROWS_PRODUCT", request.getfixturevalue("imitated_product"))
        if request.param == "narrow":
            attention, product, int8_product = request.getfixturevalue("narrow_kernels")
            patch.setattr(library, "has_pairs", lambda: False)
            patch.setattr(library, "PAGED_ATTENTION", attention)
            patch.setattr(library, "ROWS_PRODUCT", product)
            patch.setattr(library, "INT8_PRODUCT", int8_product)
        jax.clear_caches()  # the way is chosen while tracing
        yield
    jax.clear_caches()
