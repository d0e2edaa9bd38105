"""The decode for Hopper in its interpreter: shapes that TMA and wgmma take, and the edges of tiles and splits."""

import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call  # the detector's verdict has no public name

from pallas_kernels import paged_decode_attention, tuning
from pallas_kernels.hopper.decode import refuse_decode
from pallas_kernels.specs import ArgSpec
from tests.grids import count, daily
from tests.pallas_kernels.cases import Case, assert_close, build_case, cases
from tests.pallas_kernels.lower_everything import on_a_device
from tests.pallas_kernels.test_attention import check, compiled, run_examples

# A tile is 64 tokens: several pages, one, a part of one, and one whose size no tile is a multiple of.
SPECS = {
    spec.name: spec
    for spec in (
        ArgSpec("page_16", 3, 3, 9, 16, 2, 2, 64, dtype=jnp.bfloat16),
        ArgSpec("page_64_groups_7", 2, 2, 3, 64, 1, 7, 64, dtype=jnp.float16),
        ArgSpec("page_128_groups_16", 2, 2, 2, 128, 1, 16, 64, dtype=jnp.bfloat16),
        ArgSpec("page_24", 2, 2, 7, 24, 1, 1, 64, dtype=jnp.bfloat16),
        ArgSpec("head_dim_128_cap", 2, 2, 9, 16, 1, 4, 128, dtype=jnp.bfloat16, logit_soft_cap=3.0),
        ArgSpec("head_dim_256", 2, 2, 2, 64, 1, 2, 256, dtype=jnp.float16),
        ArgSpec("window", 3, 3, 20, 16, 1, 2, 64, dtype=jnp.bfloat16, sliding_window=70),
        ArgSpec("sinks", 3, 3, 20, 16, 1, 3, 64, jnp.bfloat16, 70, 9.0, sm_scale=0.2, has_sinks=True),
        ArgSpec("float8", 2, 2, 9, 16, 2, 2, 64, dtype=jnp.bfloat16, float8_cache=True),
        ArgSpec("float8_head_dim_128", 2, 2, 4, 64, 1, 2, 128, dtype=jnp.float16, float8_cache=True, sliding_window=70),
    )
}


def splitting(programs_at_once: int):
    """Calls traced inside cut long sequences, as on a chip that runs so many programs at once."""
    sizes = {"programs_per_core": programs_at_once, "min_split_tokens": 64}
    return tuning.override("paged_decode_attention", "mosaic_gpu", sizes)


def check_without_races(case: Case) -> None:
    check(paged_decode_attention, case, "mosaic_gpu")
    assert not interpret_pallas_call.get_races().races_found


@pytest.mark.parametrize("name", daily(list(SPECS), every=4))
def test_equals_the_reference(name: str) -> None:
    run_examples(check_without_races, cases(SPECS[name], decode=True), count(2, 3))


def test_a_ring_goes_round_several_times() -> None:
    """There are more tiles than stages, so every barrier is waited for repeatedly, and the last round isn't full."""
    spec = ArgSpec("long", 1, 1, 40, 16, 1, 2, 64, dtype=jnp.bfloat16)
    with splitting(1):
        for length in (640, 64 * 7 + 1):
            check_without_races(build_case(spec, [length], [1], 0, seed=length))


def test_tokens_before_the_window_are_not_read() -> None:
    """NaN stands before the window, within its first page and its first tile."""
    spec = SPECS["window"]
    case = build_case(spec, [200, 71, 320], [1, 1, 1], 0, seed=4)
    expected = compiled(paged_decode_attention, spec, "reference")(*case.decode_args())
    for length, pages in zip(case.lengths, case.page_table, strict=True):
        for position in range(length - spec.sliding_window):
            page, offset = pages[position // spec.page_size], position % spec.page_size
            case.k_pages[page, :, offset] = case.v_pages[page, :, offset] = np.nan
    actual = compiled(paged_decode_attention, spec, "mosaic_gpu")(*case.decode_args())
    assert_close(actual, expected, spec.dtype)


@pytest.mark.parametrize(("window", "most", "has_sinks"), daily([(200, 3, True), (None, 4, False)], every=2))
def test_splits_equal_the_reference(window: int | None, most: int, has_sinks: bool) -> None:
    """Splits of several tiles, of one tile and of none; and a sequence without tokens."""
    spec = ArgSpec("splits", 4, 4, 20, 16, 1, 2, 64, dtype=jnp.float16, sliding_window=window, has_sinks=has_sinks)
    q, kv = args = build_case(spec, [320, 0, 1, 129], [1, 0, 1, 1], 1, seed=5).decode_args()
    expected = paged_decode_attention(q, kv, **spec.attention, backend="reference")
    with splitting(4):
        run = jax.jit(functools.partial(paged_decode_attention, backend="mosaic_gpu", interpret=True, **spec.attention))
        assert f"f16[2,{most},4,1,8,64]" in str(run.trace(*args).jaxpr)  # a value and a remainder of each split
        actual = run(*args)
    assert_close(actual, expected, spec.dtype)
    assert not interpret_pallas_call.get_races().races_found
    assert (np.asarray(actual[1]) == 0).all()


@pytest.mark.parametrize(
    ("page_size", "extras"),
    daily([(64, {"float8_cache": True}), (64, {"has_sinks": True}), (16, {"sliding_window": 100})], every=2),
)
def test_items_of_a_chain_follow_each_other(page_size: int, extras: dict[str, Any]) -> None:
    """One program computes sequences of many tiles, of fewer than a ring holds, and of none."""
    spec = ArgSpec("chain", 7, 7, 448 // page_size, page_size, 1, 2, 64, dtype=jnp.bfloat16, **extras)
    lengths = [65, 448, 0, 64, 1, 257, 0]
    with splitting(1):
        check_without_races(build_case(spec, lengths, [int(length > 0) for length in lengths], 1, seed=6))


def test_a_chain_may_hold_splits() -> None:
    """More items than two rounds of programs, among them parts of a long sequence."""
    spec = ArgSpec("chained_splits", 6, 6, 5, 64, 1, 2, 64, dtype=jnp.bfloat16)
    with splitting(2):
        check_without_races(build_case(spec, [320, 1, 64, 0, 70, 1], [1, 1, 1, 0, 1, 1], 1, seed=7))


def test_the_merge_of_splits_rounds_once() -> None:
    """The mean of V over two splits is the float32 mean, rounded to bfloat16 at the very end and not in each split."""
    spec = ArgSpec("exact", 1, 1, 8, 16, 1, 2, 64, dtype=jnp.bfloat16)
    q, kv = build_case(spec, [128], [1], 0, seed=2).decode_args()
    kv = dataclasses.replace(kv, k=jnp.zeros_like(kv.k), v=jnp.nan_to_num(kv.v))
    with splitting(2):
        run = functools.partial(paged_decode_attention, backend="mosaic_gpu", interpret=True)
        actual = run(q, kv)
    used = np.asarray(kv.v[kv.page_table[0]], np.float64).reshape(128, 64)
    expected = jnp.asarray(used.mean(axis=0), jnp.bfloat16)
    assert (actual[0] == expected).mean() > 0.97


@pytest.mark.parametrize("groups", [2, 4, 7, 8, 16])
def test_the_chip_reads_queries_and_writes_results_as_they_are(groups: int) -> None:
    """TMA clips what reaches behind a group's last row; interpreters don't, so there arrays are padded and sliced."""
    spec = ArgSpec("", 256, 256, 64, 64, 8, groups, 128, dtype=jnp.bfloat16)
    decode = functools.partial(paged_decode_attention, backend="mosaic_gpu")
    with on_a_device("cuda", "NVIDIA H200", 132):
        jaxpr = str(jax.make_jaxpr(decode)(*spec.decode_args()))
    assert f"bf16[256,8,{groups},128]" in jaxpr
    assert not re.search(r"bf16\[[^]]*\] = (pad|slice)\[", jaxpr)


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (ArgSpec("", 2, 2, 4, 16, 1, 1, 64), "q has dtype float32"),
        (ArgSpec("", 2, 2, 4, 16, 1, 1, 64, float8_cache=True), "q has dtype float32"),
        (ArgSpec("", 2, 2, 4, 16, 1, 1, 80, dtype=jnp.bfloat16), "head size is 80"),
        (ArgSpec("", 2, 2, 4, 1, 1, 1, 64, dtype=jnp.bfloat16), "page_size is 1; TMA copies 8 tokens"),
        (ArgSpec("", 2, 2, 4, 16, 1, 65, 64, dtype=jnp.bfloat16), "65 query heads share a kv head"),
    ],
)
def test_shapes_that_the_chip_cannot_take_are_refused(spec: ArgSpec, reason: str) -> None:
    q, kv = spec.decode_args()
    assert reason in (refuse_decode(q, kv) or "")
