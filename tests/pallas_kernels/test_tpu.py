"""The TPU kernels in their interpreter: it starts copies late, fills unwritten memory with NaN and can detect races."""

import dataclasses
import functools
import re
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call  # the detector's verdict has no public name
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import (
    KernelChoice,
    PagedKv,
    paged_decode_attention,
    paged_extend_attention,
    store_and_decode,
    store_kv,
    tuning,
)
from pallas_kernels.dispatch import BACKEND_OF_NAME
from pallas_kernels.specs import ArgSpec
from pallas_kernels.tpu import store as tpu_store
from pallas_kernels.tpu.attention import refuse_attention, refuse_store_and_decode
from pallas_kernels.tpu.store_runs import token_runs
from tests import grids
from tests.pallas_kernels.cases import Case, assert_close, build_case, cases, random_store
from tests.pallas_kernels.lower_everything import TARGETS, on_a_device
from tests.pallas_kernels.test_attention import compiled, run_examples

# One per form of a page, and between them every option and dtype.
SPECS = {
    spec.name: spec
    for spec in (
        ArgSpec("rows", 4, 24, 5, 16, 2, 2, 128),
        ArgSpec("rows_float8_groups_3_window", 3, 20, 5, 16, 1, 3, 128, jnp.bfloat16, 33, None, True),
        ArgSpec("single_tokens_cap", 3, 20, 40, 1, 2, 2, 128, jnp.bfloat16, None, 3.0),
        ArgSpec("rows_sinks_and_cap", 4, 24, 5, 16, 2, 4, 128, jnp.bfloat16, None, 3.0, has_sinks=True),
        ArgSpec("columns_window_and_cap", 3, 20, 2, 128, 1, 2, 64, jnp.float32, 90, 2.0, sm_scale=0.2, has_sinks=True),
    )
}
FUSED = ("rows_float8_groups_3_window", "rows", "single_tokens_cap", "rows_sinks_and_cap")
DECODE, EXTEND = "paged_decode_attention", "paged_extend_attention"


def check(op, case: Case, run=None) -> None:
    """One program at a time: the interpreter calls back into JAX, which a second program in flight may block."""
    args = case.decode_args() if op is paged_decode_attention else case.extend_args()
    expected = jax.block_until_ready(compiled(op, case.spec, "reference")(*args))
    actual = jax.block_until_ready((run or compiled(op, case.spec, "mosaic_tpu"))(*args))
    assert actual.dtype == args[0].dtype
    assert_close(actual, expected, case.spec.dtype)


def interpreted(op, spec: ArgSpec):
    """A fresh compilation of `op`, for tests that trace inside a context."""
    return jax.jit(functools.partial(op, backend="mosaic_tpu", interpret=True, **spec.attention))


def small_tiles(op: str, **sizes: int):
    """KV tiles of 128 tokens, the fewest, so that a few hundred tokens go round the ring."""
    return tuning.override(op, "mosaic_tpu", {"tile_kib": 1, "num_buffers": 2, **sizes})


@pytest.mark.parametrize("name", grids.daily(list(SPECS), every=3))
def test_decode_equals_the_reference(name: str) -> None:
    strategy = cases(SPECS[name], decode=True)
    run_examples(lambda case: check(paged_decode_attention, case), strategy, grids.count(2, 4))


@pytest.mark.parametrize("name", grids.daily(list(SPECS)[::-1], every=4))
def test_extend_equals_the_reference(name: str) -> None:
    run_examples(lambda case: check(paged_extend_attention, case), cases(SPECS[name]), grids.count(2, 4))


def detecting_races():
    return pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan"))


def found_races() -> bool:
    races = interpret_pallas_call.races
    assert races is not None
    return races.races_found


def test_mixed_batches_over_many_tiles_have_no_races() -> None:
    """Query tiles of 32 and of 1, parts of one also at the end of q, rings that go round across sequences' borders."""
    spec = ArgSpec("many_tiles", 4, 80, 24, 16, 1, 2, 128)
    run = interpreted(paged_extend_attention, spec)
    with small_tiles(EXTEND, tile_rows=64), detecting_races():
        for num_queries in ([75, 1, 0, 1], [1, 33, 0, 40]):
            check(paged_extend_attention, build_case(spec, [384, 303, 0, 150], num_queries, 5, seed=7), run)
            assert not found_races()


def test_a_window_skips_tiles_of_a_decode_without_races() -> None:
    spec = ArgSpec("window", 5, 5, 24, 16, 1, 2, 128, sliding_window=100)
    run = interpreted(paged_decode_attention, spec)
    with small_tiles(DECODE, num_buffers=3), detecting_races():
        check(paged_decode_attention, build_case(spec, [384, 0, 227, 1, 0], [1, 0, 1, 1, 0], 5, seed=7), run)
    assert not found_races()


def test_padding_yields_exact_zeros() -> None:
    spec = SPECS["rows"]
    case = build_case(spec, [0, 30, 0, 7], [0, 20, 0, 2], 0, seed=1)
    decode, extend = (compiled(op, spec, "mosaic_tpu") for op in (paged_decode_attention, paged_extend_attention))
    decoded = np.asarray(decode(*case.decode_args()))
    assert (decoded[[0, 2]] == 0).all() and (decoded[[1, 3]] != 0).any(axis=2).all()
    extended = np.asarray(extend(*case.extend_args()))
    assert (extended[22:] == 0).all() and (extended[:22] != 0).any(axis=2).all()
    nothing = build_case(spec, [0] * 4, [0] * 4, 0, seed=1)
    assert (np.asarray(decode(*nothing.decode_args())) == 0).all()
    assert (np.asarray(extend(*nothing.extend_args())) == 0).all()


def with_new_tokens(case: Case) -> tuple[jax.Array, jax.Array, jax.Array, PagedKv, jax.Array]:
    """Queries, keys and values of newest tokens, the cache before these are stored, and their slots.

    Sequences 0 and 1 share no newest token's page: the shorter one gets a copy of it.
    """
    size, num_seqs = case.spec.page_size, case.spec.num_seqs
    rng = np.random.default_rng(len(case.lengths))
    k_pages, v_pages, table = case.k_pages.copy(), case.v_pages.copy(), case.page_table.copy()
    last = np.maximum(case.lengths - 1, 0)
    pages_of = [set(table[s, : -(-n // size)].tolist()) for s, n in enumerate(case.lengths)]
    shorter = int(case.lengths[1] <= case.lengths[0])
    shared = table[shorter, last[shorter] // size]
    if shared in pages_of[1 - shorter]:
        table[shorter, last[shorter] // size] = copy = min(set(range(1, case.spec.num_pages)) - set().union(*pages_of))
        k_pages[copy], v_pages[copy] = k_pages[shared], v_pages[shared]
    newest = table[np.arange(num_seqs), last // size]
    real = case.lengths > 0
    for pages in (k_pages, v_pages):
        pages[newest[real], :, last[real] % size] = np.nan
    slots = np.where(real, newest * size + last % size, rng.integers(0, size, num_seqs))
    kv = dataclasses.replace(case, k_pages=k_pages, v_pages=v_pages, page_table=table).paged_kv().unscaled()
    q = case.decode_args()[0] * (case.spec.scales["k_scale"] if case.spec.float8_cache else 1)
    k, v = (jnp.asarray(rng.normal(size=(num_seqs, *kv.k.shape[1::2])), kv.dtype) for _ in range(2))
    return q.astype(case.spec.dtype), k, v, kv, jnp.asarray(slots, jnp.int32)


def storing(name: str, spec: ArgSpec) -> Callable[..., tuple[jax.Array, PagedKv]]:
    """`store_and_decode` of a backend."""
    kernel = BACKEND_OF_NAME[name].store_and_decode
    assert kernel is not None
    return functools.partial(kernel.run, **spec.attention, interpret=name == "mosaic_tpu")


def check_store_and_decode(case: Case) -> None:
    args = with_new_tokens(case)
    out, stored = jax.block_until_ready(storing("mosaic_tpu", case.spec)(*args))
    expected, right = jax.block_until_ready(storing("reference", case.spec)(*args))
    assert out.dtype == case.spec.dtype
    assert_close(out, expected, case.spec.dtype)
    assert (np.asarray(out)[case.lengths == 0] == 0).all()
    for pages, others in ((stored.k, right.k), (stored.v, right.v)):
        np.testing.assert_array_equal(np.asarray(pages, np.float32)[1:], np.asarray(others, np.float32)[1:])


@pytest.mark.parametrize("name", grids.daily(FUSED, every=2))
def test_a_decode_that_stores_equals_a_store_and_a_decode(name: str) -> None:
    run_examples(check_store_and_decode, cases(SPECS[name], decode=True), grids.count(2, 4))


@pytest.mark.parametrize("page_size", grids.daily([16, 1], every=2))
def test_decodes_that_store_in_rings_that_go_round_have_no_races(page_size: int) -> None:
    """Lengths around tiles of 128 tokens and around pages, and pages that two sequences share."""
    lengths = [384, 384, 0, 227, 1, 128, 129, 0]
    spec = ArgSpec("many_tiles", len(lengths), len(lengths), 384 // page_size, page_size, 2, 1, 128)
    with small_tiles(DECODE), detecting_races():
        check_store_and_decode(build_case(spec, lengths, [min(n, 1) for n in lengths], 200, seed=7))
    assert not found_races()


def test_a_tokens_slot_in_the_dummy_page_is_not_written() -> None:
    spec = SPECS["rows"]
    *new, kv, slots = with_new_tokens(build_case(spec, [20, 30, 0, 7], [1, 1, 0, 1], 0, seed=1))
    _, stored = jax.block_until_ready(storing("mosaic_tpu", spec)(*new, kv, slots.at[1].set(3)))
    page, place = kv.page_table[1, 1], int(slots[1]) % 16
    assert jnp.isnan(stored.k[page, :, place]).all() and not jnp.isnan(stored.k[page, :, :place]).any()


@pytest.mark.parametrize(
    ("parts", "kernels"),
    [
        (KernelChoice(), ["paged_store_and_decode_attention"]),
        (KernelChoice.of_attention("mosaic_tpu"), ["paged_store_and_decode_attention"]),
        (KernelChoice(paged_decode_attention="xla"), ["store_kv"]),
        (KernelChoice(store_kv="xla"), ["paged_decode_attention"]),
        (KernelChoice(store_and_decode="xla"), ["store_kv", "paged_decode_attention"]),
    ],
)
def test_a_tpu_stores_in_the_decode_unless_a_part_is_asked_of_another_backend(
    parts: KernelChoice, kernels: list[str]
) -> None:
    kv, qkv, slots = SPECS["rows"].store_and_decode_args()
    with on_a_device("tpu", *TARGETS["tpu"][:2]):
        step = functools.partial(store_and_decode, backend=parts.store_and_decode, parts=parts)
        text = jax.jit(step).trace(qkv, kv, slots).lower(lowering_platforms=("tpu",)).as_text()
    assert re.findall(r'kernel_name = "(\w+)"', text) == kernels


STORES = (
    ArgSpec("rows_float8", 3, 70, 2, 64, 1, 1, 128, jnp.bfloat16, float8_cache=True),
    ArgSpec("rows", 3, 40, 4, 16, 2, 1, 128),
    ArgSpec("rows_bfloat16", 3, 40, 4, 16, 1, 1, 128, jnp.bfloat16),
    ArgSpec("columns", 3, 140, 2, 128, 1, 1, 64),
    ArgSpec("single_tokens", 3, 40, 40, 1, 2, 1, 128, jnp.bfloat16),
)


@pytest.mark.parametrize("spec", grids.daily(STORES, every=3), ids=lambda spec: spec.name)
def test_stores_in_any_order_equal_the_reference_without_races(spec: ArgSpec) -> None:
    """Tokens of one tile far apart, in chunks of 32 with fewer buffers than tiles; runs; repeated slots of page 0."""
    num_slots = spec.num_pages * spec.page_size
    rng = np.random.default_rng(0)
    scales = {"k_scale": 0.5, "v_scale": 2.0} if spec.float8_cache else {}
    kv, k, v = random_store(spec, rng, **scales)
    free = np.arange(spec.page_size, num_slots)
    store = jax.jit(functools.partial(store_kv, backend="mosaic_tpu", interpret=True))
    for kind in ("shuffled", "runs"):
        slots = rng.permutation(free) if kind == "shuffled" else np.roll(free, -spec.page_size - 3)
        slots = slots[: spec.num_tokens]
        slots[rng.integers(0, spec.num_tokens, 5)] = rng.integers(0, spec.page_size, 5)
        args = (kv, k, v, jnp.asarray(slots, jnp.int32))
        with tuning.override("store_kv", "mosaic_tpu", {"chunk_tokens": 32, "num_buffers": 4}), detecting_races():
            stored = jax.block_until_ready(store(*args))
        assert not found_races()
        reference = jax.block_until_ready(store_kv(*args, backend="reference"))
        for actual, expected in ((stored.k, reference.k), (stored.v, reference.v)):
            assert (np.asarray(actual, np.float32)[1:] == np.asarray(expected, np.float32)[1:]).all()


def test_more_tokens_than_a_work_list_holds_are_stored_by_several_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tpu_store, "_MOST_TOKENS", 16)
    spec = ArgSpec("three_kernels", 3, 37, 4, 16, 1, 1, 128)
    rng = np.random.default_rng(0)
    kv, k, v = random_store(spec, rng)
    slots = jnp.asarray(16 + rng.permutation(100)[:37], jnp.int32)
    stored = jax.block_until_ready(store_kv(kv, k, v, slots, backend="mosaic_tpu", interpret=True))
    reference = jax.block_until_ready(store_kv(kv, k, v, slots, backend="reference"))
    for actual, expected in ((stored.k, reference.k), (stored.v, reference.v)):
        assert (actual == expected).all()


@pytest.mark.parametrize(
    ("num_tokens", "chunk_tokens", "tile_slots"), [(40, 16, 8), (37, 37, 32), (40, 7, 32), (1, 1, 8)]
)
def test_runs_hold_every_token_once_and_no_tile_twice(num_tokens: int, chunk_tokens: int, tile_slots: int) -> None:
    for seed in range(6):
        check_runs(num_tokens, chunk_tokens, tile_slots, seed)


def check_runs(num_tokens: int, chunk_tokens: int, tile_slots: int, seed: int) -> None:
    page_size = 32
    slots = np.random.default_rng(seed).permutation(96)[:num_tokens]
    slots = np.sort(slots) if seed % 2 else slots
    compiled_runs = jax.jit(token_runs, static_argnums=(1, 2, 3))
    runs = jax.tree.map(np.asarray, compiled_runs(jnp.asarray(slots, jnp.int32), chunk_tokens, tile_slots, page_size))
    seen = []
    for chunk, count in enumerate(runs.num_entries):
        start = min(chunk * chunk_tokens, num_tokens - chunk_tokens)
        tiles, entry = [], 0
        while entry < count:
            tiles.append(runs.slot[chunk, entry] // tile_slots)
            run = entry
            while run < runs.tile_end[chunk, entry]:
                for i in range(run, runs.run_end[chunk, run]):
                    assert runs.slot[chunk, i] // tile_slots == tiles[-1]
                    assert runs.slot[chunk, i] - runs.slot[chunk, run] == i - run
                    assert runs.token[chunk, i] - runs.token[chunk, run] == i - run
                    assert slots[start + runs.token[chunk, i]] == runs.slot[chunk, i]
                    seen.append(runs.slot[chunk, i])
                run = runs.run_end[chunk, run]
            entry = runs.tile_end[chunk, entry]
        assert len(set(tiles)) == len(tiles)
    assert sorted(seen) == sorted(slots[slots >= page_size])


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (ArgSpec("float16", 2, 2, 2, 16, 8, 1, 128, jnp.float16), "no float16"),
        (ArgSpec("float16_queries", 2, 2, 2, 16, 8, 1, 128, jnp.float16, float8_cache=True), "no float16"),
        (ArgSpec("head_dim_64", 2, 2, 2, 64, 8, 1, 64), "padded to 128 lanes"),
        (ArgSpec("page_size_12", 2, 2, 2, 12, 8, 1, 128), "multiples of 8"),
        (ArgSpec("one_packed_head", 2, 2, 2, 1, 1, 1, 128, jnp.bfloat16), "don't fill whole tiles"),
        (ArgSpec("wide_single_tokens", 2, 2, 2, 1, 8, 1, 256), "isn't one tile wide"),
    ],
    ids=lambda value: value.name if isinstance(value, ArgSpec) else "",
)
def test_shapes_that_would_copy_the_cache_are_refused(spec: ArgSpec, reason: str) -> None:
    q, kv = spec.decode_args()
    assert reason in str(refuse_attention(q, kv))
    kv, qkv, _ = spec.store_and_decode_args()
    assert reason in str(refuse_store_and_decode(qkv, kv))


def test_a_decode_does_not_store_where_a_page_is_written_as_a_whole() -> None:
    kv, qkv, _ = SPECS["columns_window_and_cap"].store_and_decode_args()
    assert "a page is written as a whole" in str(refuse_store_and_decode(qkv, kv))
