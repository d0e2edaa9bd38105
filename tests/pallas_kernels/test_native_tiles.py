"""Kernels with AMX: the order and the error of sums, what the instructions demand, and when there are no tiles.

Where the processor has no AMX its instructions are imitated (`imitated_tiles.h`); that the kernels compile to the real
ones, and to how many, is read from the machine code.
"""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.native import library, packed_product
from pallas_kernels.native.product import rows_product
from pallas_kernels.packed import INT4, INT8
from tests.grids import NIGHTLY
from tests.pallas_kernels.native_builds import compile_library, compile_product
from tests.pallas_kernels.native_cases import RAGGED, attend, build
from tests.pallas_kernels.test_native_packed import matrix, packed_matrix, rows
from tests.pallas_kernels.test_native_product import rows_and_weights

SHAPES = [(1, 16, 32), (8, 48, 96), (33, 48, 96), (17, 80, 544), (300, 48, 1056), (520, 16, 64)]  # rows, out, in


@pytest.fixture(scope="module")
def imitated_product(imitated: str) -> str:
    """XLA's name of the imitated product."""
    return f"{library.ROWS_PRODUCT}{imitated}"


def imitate(name: str, x: jax.Array, weights: jax.Array) -> np.ndarray:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "ROWS_PRODUCT", name)
        return np.asarray(rows_product(x, weights, way="tiles"))


def operands(x: jax.Array, weights: jax.Array) -> tuple[np.ndarray, np.ndarray]:
    """What is multiplied, exactly."""
    return np.asarray(x.astype(jnp.bfloat16), np.float64), np.asarray(weights, np.float64)


def sums_of_tiles(x: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Of each 32 inputs, the even ones in order and the odd ones, then both sums, then all 32 to the total.

    Float64 holds a product and the float32 it's added to exactly for numbers of like size, so this rounds once a step.
    """
    total = np.zeros((len(x), len(weights)), np.float32)
    for begin in range(0, x.shape[1], 32):
        halves = np.zeros((2, *total.shape), np.float32)
        for i in range(begin, begin + 32):
            halves[i % 2] += np.outer(x[:, i], weights[:, i])
        total = total + (halves[0] + halves[1])
    return total


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sums_are_added_up_in_the_order_of_the_instruction(imitated_product: str, shape: tuple[int, int, int]) -> None:
    """Whatever the blocks: a prompt in chunks gets the same products as in one piece."""
    x, weights = rows_and_weights(*shape)
    wanted = sums_of_tiles(*operands(x, weights))
    np.testing.assert_array_equal(imitate(imitated_product, x, weights), wanted)


def test_a_sum_is_as_near_to_float64_as_its_rounded_steps_allow(imitated_product: str) -> None:
    """An input passes 16 steps within its half line, two after it, and one for each later line of 32."""
    for num_rows in (8, 40):
        x, weights = rows_and_weights(num_rows, 64, 3072)
        exact_x, exact_weights = operands(x, weights)
        sizes = np.abs(exact_x) @ np.abs(exact_weights).T
        off = np.abs(imitate(imitated_product, x, weights) - exact_x @ exact_weights.T)
        assert (off <= (3072 / 32 + 18) * 2**-24 * sizes).all()
        assert (off > 0).any()


def test_denormals_are_zeros(imitated_product: str) -> None:
    """The instruction takes and returns none."""
    smallest = 2.0**-126
    x = jnp.zeros((9, 32), jnp.float32).at[:, 0].set(1.0)
    weights = jnp.zeros((32, 32), jnp.bfloat16).at[:, 0].set(smallest).at[0, 0].set(smallest / 2)
    out = imitate(imitated_product, x, weights)
    np.testing.assert_array_equal(out[:, 0], 0)
    np.testing.assert_array_equal(out[:, 1:], np.float32(smallest))
    np.testing.assert_array_equal(imitate(imitated_product, x / 2, weights), 0)


@pytest.fixture
def processor_has_tiles() -> None:
    if reason := library.refuse_tiles():
        pytest.skip(reason)


def assert_imitated(compute: Callable[[], jax.Array | np.ndarray], target: str, suffix: str) -> None:
    """`compute`, which calls the kernel whose name is `library`'s `target`, gets the same bits from its imitation."""
    out = np.asarray(compute())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, target, f"{getattr(library, target)}{suffix}")
        jax.clear_caches()
        np.testing.assert_array_equal(out, np.asarray(compute()))
    jax.clear_caches()


@pytest.mark.usefixtures("processor_has_tiles")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_processor_does_what_its_imitation_does(imitated: str, shape: tuple[int, int, int]) -> None:
    x, weights = rows_and_weights(*shape)
    assert_imitated(lambda: rows_product(x, weights, way="tiles"), "ROWS_PRODUCT", imitated)


@pytest.mark.usefixtures("processor_has_tiles")
@pytest.mark.parametrize("packing", [INT8, INT4])
@pytest.mark.parametrize("shape", [(9, 64, 128, 0), (33, 96, 1056, 0), (70, 32, 320, 64), (17, 32, 160, 32)], ids=str)
def test_so_it_does_with_bytes(imitated: str, packing: str, shape: tuple[int, int, int, int]) -> None:
    num_rows, num_out, num_in, group = shape
    weights = packed_matrix(packing, *matrix(packing, (), num_out, num_in, group, True), group, True)
    x = jnp.asarray(rows(num_rows, num_in))
    assert_imitated(lambda: packed_product.product(x, weights, row_bits=8), "GROUPED_PACKED_PRODUCT", imitated)


@pytest.mark.usefixtures("processor_has_tiles")
@pytest.mark.parametrize("head_dim", [64, 96])
def test_so_it_does_in_attention(imitated: str, head_dim: int) -> None:
    case = build(RAGGED, 16, group=2, head_dim=head_dim, seed=1, most_new=40)
    assert_imitated(lambda: attend(case), "PAGED_ATTENTION", imitated)


@pytest.fixture(scope="module")
def loops(native_runs_here: None) -> list[list[str]]:
    """The innermost loops of the real kernels that multiply tiles: their instructions' names."""
    if not library.has_pairs() or shutil.which("objdump") is None:
        pytest.skip("needs avx512_bf16 and objdump")
    path = compile_product("-mamx-tile", "-mamx-bf16", "-mamx-int8")
    text = subprocess.run(["objdump", "-d", "--no-show-raw-insn", path], capture_output=True, text=True, check=True)
    code = [(int(at, 16), name, to) for at, name, to in re.findall(r"^ +(\w+):\t(\w+) *(\S*)", text.stdout, re.M)]
    places = {at: i for i, (at, _, _) in enumerate(code)}
    found = []
    for i, (at, name, to) in enumerate(code):
        begin = places.get(int(to, 16), i) if name.startswith("j") and re.fullmatch("[0-9a-f]+", to) else i
        if begin < i and code[begin][0] < at:
            names = [name for _, name, _ in code[begin : i + 1]]
            if "tdpbf16ps" in names and names.count("tilestored") == 0:
                found.append(names)
    return found


@pytest.mark.skipif(not NIGHTLY, reason="another compilation of the library, for its speed alone")
def test_the_compiled_loops_load_one_tile_of_weights_for_a_group_of_tokens(loops: list[list[str]]) -> None:
    counts = {(names.count("tileloadd"), names.count("tdpbf16ps")) for names in loops}
    assert counts == {(4, 3), (3, 2), (2, 1)}


@pytest.mark.parametrize(
    ("system", "reason"),
    [
        ("absent", "the processor or the system has no tiles"),
        ("refuses", "the system refuses tiles: Operation not permitted"),
        ("forgets", "the system loses what is in tiles when it switches threads"),
        ("as it should be", None),
    ],
)
def test_a_system_without_tiles_gets_avx512_and_the_log_says_why(
    imitated_kernels: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    system: str,
    reason: str | None,
) -> None:
    monkeypatch.setenv("IMITATED_SYSTEM", system)
    monkeypatch.setattr(
        library, "processor_flags", lambda: frozenset({"amx_tile", "amx_bf16", "amx_int8", "avx512_bf16"})
    )
    monkeypatch.setattr(library, "_kernels", lambda part: ctypes.CDLL(str(imitated_kernels)))
    monkeypatch.setattr(library, "refuse_tiles", library.refuse_tiles.__wrapped__)
    assert library.refuse_tiles() == reason
    assert (reason is None) or f"AVX-512 instead of AMX, which the processor has: {reason}" in caplog.text
    assert (library.product_way() == "tiles") is (reason is None)
    monkeypatch.setenv(library.AMX_VARIABLE, "0")
    assert library.refuse_tiles() == "JAXSGL_AMX is 0" and library.product_way() != "tiles"


def test_a_process_that_did_not_ask_gets_an_error(imitated_kernels: Path, tmp_path: Path) -> None:
    """The instruction would end it."""
    kernels = ctypes.CDLL(str(shutil.copy(imitated_kernels, tmp_path)))
    jax.ffi.register_ffi_target("not_asked", jax.ffi.pycapsule(kernels.rows_product), platform="cpu")
    with pytest.raises(jax.errors.JaxRuntimeError, match="this process was not granted tiles"):
        imitate("not_asked", *rows_and_weights(9, 16, 32))


def test_a_compiler_without_amx_and_a_processor_without_it_are_told_apart(
    native_runs_here: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    narrow = ctypes.CDLL(str(compile_library("-mno-avx512f")))  # which others use too
    assert library.tile_refusal(narrow) == "the compiler knows no AMX"
    monkeypatch.setattr(library, "processor_flags", lambda: frozenset({"amx_tile"}))
    assert library.refuse_tiles.__wrapped__() == "the processor has no amx_bf16 and no amx_int8"


FAULTS = {  # what the program does, and why the processor would fault
    "_tile_zero(0);": "no tiles are configured",
    "config.palette = 2; _tile_loadconfig(&config);": "there is no such palette",
    "config.reserved[3] = 1; _tile_loadconfig(&config);": "reserved bytes aren't zero",
    "config.rows[0] = 17; _tile_loadconfig(&config);": "a tile has 16 rows of 64 bytes at most",
    "config.row_bytes[7] = 65; _tile_loadconfig(&config);": "a tile has 16 rows of 64 bytes at most",
    "config.rows[2] = 0; _tile_loadconfig(&config);": "a tile has rows but no columns",
    "config.rows[8] = 1; _tile_loadconfig(&config);": "there are 8 tiles",
    "config.rows[2] = config.row_bytes[2] = 0; _tile_loadconfig(&config); _tile_zero(2);": "the tile isn't configured",
    "_tile_loadconfig(&config); _tile_zero(8);": "there are 8 tiles",
    "_tile_loadconfig(&config); _tile_dpbf16ps(0, 1, 1);": "the three tiles must differ",
    "config.rows[1] = 8; _tile_loadconfig(&config); _tile_dpbf16ps(0, 1, 2);": "other rows than the left side",
    "config.row_bytes[1] = 60; _tile_loadconfig(&config); _tile_dpbf16ps(0, 1, 2);": "different numbers of pairs",
    "config.row_bytes[2] = 32; _tile_loadconfig(&config); _tile_dpbf16ps(0, 1, 2);": "other columns than the right",
    "config.row_bytes[1] = 62; _tile_loadconfig(&config); _tile_dpbf16ps(0, 1, 2);": "a row ends within a pair",
    "_tile_loadconfig(&config); _tile_release(); _tile_stored(0, &config, 0);": "no tiles are configured",
}


@pytest.fixture(scope="module")
def faults(native_runs_here: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A program that does one of `FAULTS`, by its number."""
    if not library.has_pairs():
        pytest.skip("products with tiles need avx512_bf16 beside them")
    folder = tmp_path_factory.mktemp("faults")
    cases = "".join(f"case {i}: {code} break;\n" for i, code in enumerate(FAULTS))
    (folder / "faults.cc").write_text(
        f'#define JAXSGL_IMITATED_TILES "{Path(__file__).with_name("imitated_tiles.h")}"\n#include "tiles.h"\n'
        f"int main(int, char** argv) {{\n"
        f"jaxsgl::TileConfig config = jaxsgl::kWholeTiles;\nswitch (std::atoi(argv[1])) {{\n{cases}}}\n}}\n"
    )
    compiler = library.compiler()
    assert compiler is not None
    options = ["-std=c++17", "-march=native", "-w", f"-I{Path(library.__file__).parent}"]
    subprocess.run([compiler, *options, folder / "faults.cc", "-o", folder / "faults"], check=True)
    return folder / "faults"


@pytest.mark.parametrize("code", FAULTS)
def test_the_imitation_faults_where_the_processor_does(faults: Path, code: str) -> None:
    done = subprocess.run([faults, str(list(FAULTS).index(code))], capture_output=True, text=True, check=False)
    assert done.returncode < 0 and FAULTS[code] in done.stderr, (done.returncode, done.stderr)
