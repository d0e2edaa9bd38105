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
    """The products with AMX in plain C++ instead of the instructions."""
    if not library.has_pairs():
        pytest.skip("products with tiles need avx512_bf16 beside them")
    return compile_product(*imitation())


@pytest.fixture(scope="session")
def imitated_products(imitated_kernels: Path) -> tuple[str, str]:
    """XLA's names of these products and grouped products."""
    kernels = ctypes.CDLL(str(imitated_kernels))
    assert library.tile_refusal(kernels) is None
    product, grouped = f"{library.ROWS_PRODUCT}_imitated", f"{library.GROUPED_PRODUCT}_imitated"
    jax.ffi.register_ffi_target(product, jax.ffi.pycapsule(kernels.rows_product), platform="cpu")
    jax.ffi.register_ffi_target(grouped, jax.ffi.pycapsule(kernels.grouped_product), platform="cpu")
    return product, grouped


@pytest.fixture(scope="session")
def imitated_product(imitated_products: tuple[str, str]) -> str:
    """XLA's name of the products alone."""
    return imitated_products[0]


@pytest.fixture(scope="module", params=WAYS)
def each_way(request: pytest.FixtureRequest, native_runs_here: None) -> Iterator[None]:
    """Runs a module's native kernels with each way to multiply, whichever is faster on this processor."""
    if request.param == "paired" and not library.has_pairs():
        pytest.skip("the processor has no avx512_bf16")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "widens", lambda: request.param != "paired")
        patch.setattr(library, "product_way", lambda: {"narrow": "widened"}.get(request.param, request.param))
        if request.param == "tiles":
            product, grouped = request.getfixturevalue("imitated_products")
            patch.setattr(library, "ROWS_PRODUCT", product)
            patch.setattr(library, "GROUPED_PRODUCT", grouped)
        if request.param == "narrow":
            suffix = request.getfixturevalue("narrow_kernels")
            patch.setattr(library, "has_pairs", lambda: False)
            for constant in ("PAGED_ATTENTION", "ROWS_PRODUCT", "GROUPED_PRODUCT", "GROUPED_KEPT_PRODUCT", *INTEGERS):
                patch.setattr(library, constant, f"{getattr(library, constant)}{suffix}")
        if request.param == "narrow bytes":
            suffix = request.getfixturevalue("narrow_bytes")
            for constant in INTEGERS:
                patch.setattr(library, constant, f"{getattr(library, constant)}{suffix}")
        jax.clear_caches()  # the way is chosen while tracing
        yield
    jax.clear_caches()
