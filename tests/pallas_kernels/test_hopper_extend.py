"""The extend for Hopper in its interpreter: what TMA and wgmma take, rings of stages, and the borders of its tiles.

Its three warpgroups are threads of the interpreter. JAX 0.10 compiles each of them again in every call, some seconds
each, so where JAX is older than 0.11 these tests run in an environment with the newest. And a warpgroup or warp that
waits at a barrier keeps a thread of XLA's pool, which has one per core: with two they would wait forever. NPROC, which
XLA reads when it starts, sets the size of the pool.
"""

import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import paged_extend_attention, tuning
from pallas_kernels.hopper.extend import refuse_extend
from pallas_kernels.specs import ArgSpec
from tests.grids import count, daily
from tests.pallas_kernels.cases import build_case, cases
from tests.pallas_kernels.elsewhere import run_with_jax
from tests.pallas_kernels.lower_everything import on_a_device
from tests.pallas_kernels.test_attention import check, compiled, run_examples

pytestmark = pytest.mark.foreign

ROOT = Path(__file__).parents[2]
INTERPRETS_THREADS = jax.__version_info__ >= (0, 11)
POOL_THREADS = int(os.environ.get("NPROC", os.cpu_count() or 1))
interpreted = pytest.mark.skipif(
    not INTERPRETS_THREADS or POOL_THREADS < 8, reason="runs in an environment with the newest JAX and NPROC=12"
)

BF16, F16 = jnp.bfloat16, jnp.float16
# Pages that are a part of a KV tile, one, and more than one; query heads that fill a tile's rows and that don't.
SPECS = {
    spec.name: spec
    for spec in (
        ArgSpec("page_16", 3, 24, 9, 16, 2, 4, 64, dtype=BF16),
        ArgSpec("page_64_groups_7", 3, 24, 3, 64, 1, 7, 64, dtype=F16),
        ArgSpec("page_128_groups_16", 2, 12, 2, 128, 1, 16, 64, dtype=BF16),
        ArgSpec("page_24_groups_1", 2, 140, 7, 24, 1, 1, 64, dtype=BF16),
        ArgSpec("groups_3_window", 3, 90, 20, 16, 1, 3, 64, dtype=BF16, sliding_window=70),
        ArgSpec("sinks", 3, 90, 20, 16, 2, 3, 64, BF16, 70, 9.0, sm_scale=0.2, has_sinks=True),
        ArgSpec("head_dim_128_cap", 2, 40, 9, 16, 1, 2, 128, dtype=F16, logit_soft_cap=3.0),
        ArgSpec("head_dim_256", 2, 40, 3, 64, 1, 2, 256, dtype=BF16),
        ArgSpec("float8", 2, 40, 10, 16, 2, 2, 64, dtype=BF16, sliding_window=70, float8_cache=True),
        ArgSpec("float8_one_stage", 1, 16, 3, 64, 1, 8, 256, dtype=F16, float8_cache=True),
    )
}


@pytest.fixture(scope="module", autouse=True)
def small_kv_tiles():
    """Makes KV tiles so small that short sequences have several."""
    with tuning.override("paged_extend_attention", "mosaic_gpu", {"tile_tokens": 64}):
        yield


def assert_no_races() -> None:
    """In kernels that were interpreted."""
    from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call

    assert not interpret_pallas_call.get_races().races_found


def check_without_races(spec: ArgSpec, case) -> None:
    check(paged_extend_attention, case, "mosaic_gpu")
    assert_no_races()


@pytest.mark.skipif(INTERPRETS_THREADS and POOL_THREADS >= 8, reason="this process runs the tests below itself")
@pytest.mark.timeout(600)
def test_the_newest_jax_passes_these_tests() -> None:
    options = ["-c", os.devnull, "--rootdir", str(ROOT), "-q", "-p", "no:cacheprovider"]
    variables = {"NPROC": "12", "PYTHONPATH": str(ROOT / "scripts")}
    files = [__file__, str(Path(__file__).with_name("test_hopper_products.py"))]
    done = run_with_jax("newest", "-m", "pytest", *options, *files, **variables)
    if isinstance(done, str):
        pytest.skip(done)
    assert " passed" in done.stdout


@interpreted
@pytest.mark.parametrize("name", daily(list(SPECS), every=5))
def test_equals_the_reference(name: str) -> None:
    spec = SPECS[name]
    run_examples(lambda case: check_without_races(spec, case), cases(spec), count(2, 3))


@interpreted
@pytest.mark.parametrize(
    ("num_programs", "num_queries"),
    daily([(n, each) for each in ([300, 1, 1], [1, 300, 1], [64, 65, 200], [1, 1, 0]) for n in (1, 3)], every=5),
)
def test_many_tiles_equal_the_reference(num_queries: list[int], num_programs: int) -> None:
    """Several items per program and several rounds of the ring; single queries beside long ones, tiles cut short."""
    spec = ArgSpec(f"many_tiles_{num_programs}", 3, 330, 32, 16, 1, 2, 64, dtype=BF16)
    with on_a_device("cuda", "NVIDIA H100 80GB HBM3", num_programs):
        check_without_races(spec, build_case(spec, [512, 303, 210], num_queries, 5, seed=7))


@interpreted
def test_a_window_that_begins_in_the_middle_of_a_tile_hides_what_is_before() -> None:
    spec = ArgSpec("window", 2, 80, 40, 16, 1, 1, 64, dtype=F16, sliding_window=100)
    for lengths in ([640, 64], [449, 163]):
        check_without_races(spec, build_case(spec, lengths, [70, 10], 0, seed=lengths[0]))


@interpreted
def test_padding_yields_exact_zeros() -> None:
    spec = SPECS["page_16"]
    for lengths, num_queries in (([0, 30, 0], [0, 20, 0]), ([0, 0, 0], [0, 0, 0])):
        args = build_case(spec, lengths, num_queries, 0, seed=1).extend_args()
        out = np.asarray(compiled(paged_extend_attention, spec, "mosaic_gpu")(*args))
        count = sum(num_queries)
        assert (out[count:] == 0).all() and (out[:count] != 0).any(axis=2).all()


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (ArgSpec("", 2, 2, 4, 16, 1, 1, 64), "q has dtype float32"),
        (ArgSpec("", 2, 2, 4, 16, 1, 1, 80, dtype=BF16), "head size is 80"),
        (ArgSpec("", 2, 2, 4, 1, 1, 1, 64, dtype=BF16), "page_size is 1; TMA copies 8 tokens"),
        (ArgSpec("", 2, 2, 4, 16, 1, 17, 64, dtype=BF16), "17 query heads share a kv head"),
    ],
)
def test_shapes_that_the_chip_cannot_take_are_refused(spec: ArgSpec, reason: str) -> None:
    q, _, kv = spec.extend_args()
    assert reason in (refuse_extend(q, kv) or "")


def test_tokens_that_are_no_multiple_of_eight_are_padded() -> None:
    spec = ArgSpec("", 3, 259, 20, 64, 8, 2, 128, dtype=BF16)
    with on_a_device("cuda", "NVIDIA H200", 132):
        call = jax.jit(lambda *a: paged_extend_attention(*a, backend="mosaic_gpu"))
        assert (
            "tensor<264x16x128xbf16>" in call.trace(*spec.extend_args()).lower(lowering_platforms=("cuda",)).as_text()
        )


def test_other_gpus_are_refused() -> None:
    q, _, kv = SPECS["page_16"].extend_args()
    with on_a_device("cuda", "NVIDIA A100-SXM4-80GB", 108):
        assert "A100-SXM4-80GB lacks" in (refuse_extend(q, kv) or "")


def test_kv_tiles_that_could_not_be_cleared_are_an_error() -> None:
    args = SPECS["page_16"].extend_args()
    with (
        tuning.override("paged_extend_attention", "mosaic_gpu", {"tile_tokens": 32}),
        pytest.raises(ValueError, match="tile_tokens is 32"),
    ):
        jax.eval_shape(lambda *a: paged_extend_attention(*a, backend="mosaic_gpu", interpret=True), *args)
