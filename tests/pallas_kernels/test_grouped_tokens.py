"""Entries of groups of tokens are the same however steps cut sequences, and queries attend to whole groups alone."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import AttentionOptions, GroupedCache, GroupedQkv, GroupParts, attend_to_groups, dispatch, tuning
from pallas_kernels.grouped_tokens import num_sums
from pallas_kernels.specs import GROUPED_SPECS, GroupedSpec
from tests.grids import daily, singly
from tests.pallas_kernels.lower_everything import on_a_device
from tests.plain_model import plain_grouped_attention

HEADS, HEAD, KEY, INDEX_HEADS = 3, 16, 16, 11
PAGE, PAGES = 12, 5
LENGTHS = (37, 12, 2, 60)
OPTIONS = AttentionOptions(sm_scale=0.4, sliding_window=7)
# Tokens of each sequence in steps one after another: alone, in chunks, by tokens, across ends of groups and pages.
STEPS = {
    "at once": (LENGTHS,),
    "in chunks": ((5, 12, 1, 24), (7, 0, 0, 24), (25, 0, 1, 12)),
    "by tokens": ((34, 10, 0, 58), (1, 1, 1, 1), (1, 0, 0, 0), (1, 1, 1, 1)),
}


def tokens(size: int, parts: int, *, has_index: bool) -> list[GroupedQkv]:
    """Those of each sequence."""
    rng = np.random.default_rng(4)
    width = HEAD + (KEY if has_index else 0)

    def random(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    bias, scales, turns = random(size, parts, width), random(width), jnp.asarray([0.7, 0.1], jnp.float32)
    made = []
    for length in LENGTHS:
        queries, weights = random(length, INDEX_HEADS, KEY), random(length, INDEX_HEADS)
        groups = GroupParts(
            random(length, parts, width), 3 * random(length, parts, width), bias, scales, turns,
            queries if has_index else None, weights if has_index else None, 1e-6, 4,
        )  # fmt: skip
        made.append(GroupedQkv(random(length, HEADS, HEAD), random(length, HEAD), groups))
    return made


def of_tokens(qkv: GroupedQkv, begin: int, end: int) -> GroupedQkv:
    if qkv.groups is None:
        return GroupedQkv(qkv.queries[begin:end], qkv.entries[begin:end], None)
    by_token = "numbers", "gates", "index_queries", "index_weights"
    found = {name: getattr(qkv.groups, name) for name in by_token}
    cut: dict[str, Any] = {name: None if each is None else each[begin:end] for name, each in found.items()}
    return GroupedQkv(qkv.queries[begin:end], qkv.entries[begin:end], dataclasses.replace(qkv.groups, **cut))


def joined(kept: list[GroupedQkv]) -> GroupedQkv:
    """Tokens one after another."""
    shared = {"bias", "scales", "frequencies"}
    queries, entries = (jnp.concatenate([getattr(each, name) for each in kept]) for name in ("queries", "entries"))
    groups = [each.groups for each in kept]
    first = groups[0]
    if first is None:
        return GroupedQkv(queries, entries, None)
    fields: dict[str, Any] = {
        field.name: jnp.concatenate([getattr(each, field.name) for each in groups])
        for field in dataclasses.fields(first)
        if field.name not in shared and isinstance(getattr(first, field.name), jax.Array)
    }
    return GroupedQkv(queries, entries, dataclasses.replace(first, **fields))


# Tokens of a group, parts of an entry, and whether an index chooses.
GROUPS = [(3, 2, True), (12, 1, False)]
WINDOW_ALONE = (0, 1, False)
# Sizes of the Triton kernel: whole, and in splits.
WHOLE = {"tile_tokens": 16, "programs_per_core": 1}
SPLIT = {"tile_tokens": 16, "programs_per_core": 1000, "min_split_tokens": 16}


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("groups", GROUPS, ids=str)
def test_queries_attend_as_if_sequences_were_computed_at_once(groups: tuple[int, int, bool], steps: str) -> None:
    check(groups, steps)


@pytest.mark.parametrize(
    ("groups", "steps", "sizes", "window"), singly([*GROUPS, WINDOW_ALONE], list(STEPS), [SPLIT, WHOLE], [7, 100])
)
def test_so_they_do_by_the_triton_kernels(
    groups: tuple[int, int, bool], steps: str, sizes: dict[str, int], window: int
) -> None:
    with tuning.override("attend_to_groups", "triton", sizes):
        found = check(groups, steps, window, backend="triton", index_backend="triton", interpret=True)
    assert ("merge_splits" in found) == (sizes is SPLIT)
    assert ("score_tokens" in found) == groups[2]


def check(groups: tuple[int, int, bool], steps: str, window: int = 7, **choice: Any) -> str:
    """That the outputs of steps one after another are those of whole sequences; returns the last step's program.

    Pages hold NaN before, but for sums, which hold numbers of others.
    """
    size, parts, has_index = groups
    made = tokens(size or 1, parts, has_index=has_index)
    if not size:
        made = [dataclasses.replace(each, groups=None) for each in made]
    options = dataclasses.replace(OPTIONS, sliding_window=window)
    sinks = jnp.asarray([0.3, -1.0, 2.0], jnp.float32)
    width = HEAD + (KEY if has_index else 0)
    rng = np.random.default_rng(1)
    table = 1 + rng.permutation(len(LENGTHS) * PAGES).reshape(len(LENGTHS), PAGES)
    cache = GroupedCache(
        jnp.full((1 + table.size, 1, PAGE, HEAD), jnp.nan).at[0].set(0),
        jnp.full((1 + table.size, 1, PAGE // size, width), jnp.nan).at[0].set(0) if size else None,
        jnp.asarray(rng.normal(size=(1 + table.size, num_sums(parts), width)), jnp.float32) if size else None,
        jnp.asarray(table, jnp.int32),
        jnp.zeros(len(LENGTHS), jnp.int32),
    )

    def attend(
        qkv: GroupedQkv, cache: GroupedCache, slots: jax.Array, offsets: jax.Array | None
    ) -> tuple[jax.Array, GroupedCache]:
        return attend_to_groups(qkv, cache, slots, offsets, options, sinks, **choice)

    found: list[list[np.ndarray]] = [[] for _ in LENGTHS]
    before = np.zeros(len(LENGTHS), int)
    for counts in STEPS[steps]:
        after = before + counts
        of_step = [of_tokens(each, *ends) for each, *ends in zip(made, before, after, strict=True)]
        at: list[tuple[int, int] | None] = [(s, p) for s in range(len(LENGTHS)) for p in range(before[s], after[s])]
        padding = of_tokens(made[0], 0, 1)
        is_decode = max(counts) == 1
        if is_decode:  # rows without a token are padding
            of_step = [each if len(each.queries) else padding for each in of_step]
            at = [(s, before[s]) if counts[s] else None for s in range(len(LENGTHS))]
        else:
            of_step, at = [*of_step, padding, padding], [*at, None, None]
        qkv = joined(of_step)
        slots = [0 if each is None else table[each[0], each[1] // PAGE] * PAGE + each[1] % PAGE for each in at]
        lengths = np.where(np.asarray(counts) > 0, after, 0)  # those without a token are not in the step
        cache = dataclasses.replace(cache, lengths=jnp.asarray(lengths, jnp.int32))
        offsets = None if is_decode else jnp.asarray(np.cumsum([0, *counts]), jnp.int32)
        args = qkv, cache, jnp.asarray(slots, jnp.int32), offsets
        out, cache = attend(*args)
        for each, row in zip(at, np.asarray(out), strict=True):
            if each is not None:
                found[each[0]].append(row)
        before = after
    for qkv, rows in zip(made, found, strict=True):
        np.testing.assert_allclose(np.stack(rows), plain_grouped_attention(qkv, options, sinks), atol=2e-5)
    return str(jax.make_jaxpr(attend)(*args))


@pytest.mark.parametrize("kind", ["NVIDIA H200", "NVIDIA A100-SXM4-80GB"])
@pytest.mark.parametrize("spec", daily(GROUPED_SPECS, every=5), ids=lambda spec: spec.name)
def test_auto_attends_by_a_kernel_on_a_gpu(kind: str, spec: GroupedSpec, caplog: pytest.LogCaptureFixture) -> None:
    for op, args, options in spec.calls():
        with on_a_device("cuda", kind, 132):
            traced = jax.jit(functools.partial(op, **options)).trace(*args)
            text = traced.lower(lowering_platforms=("cuda",)).as_text()
        assert "triton" in text and "stablehlo.while" not in text
    assert "XLA computes" not in caplog.text


def test_auto_leaves_heads_that_the_kernel_refuses_to_xla(caplog: pytest.LogCaptureFixture) -> None:
    spec = dataclasses.replace(GROUPED_SPECS[0], head_dim=520 + 16, num_seqs=2)
    (op, args, options), _ = spec.calls()
    dispatch._log_once.cache_clear()
    with on_a_device("cuda", "NVIDIA H200", 132):
        jax.jit(functools.partial(op, **options)).trace(*args)
    assert "attend_to_groups: not using triton: head size is 536" in caplog.text
    assert "XLA computes it: entries gathered into arrays" in caplog.text
    with pytest.raises(ValueError, match="backend 'triton' is impossible here: it needs a gpu"):
        jax.eval_shape(functools.partial(op, backend="triton", **options), *args)


def test_a_choice_in_a_long_context_reads_what_it_chose_and_no_other_entries() -> None:
    """At DeepSeek V4's sizes: a step of 16 rows in contexts of a million tokens, whose entries have 5 GB."""
    rows, pages, page, size, width = 16, 8192, 128, 4, 640

    def shape(*lengths: int, dtype: Any = jnp.float32) -> Any:
        return jax.ShapeDtypeStruct(lengths, dtype)

    groups = GroupParts(
        shape(rows, 2, width), shape(rows, 2, width), shape(size, 2, width), shape(width), shape(32),
        shape(rows, 64, 128), shape(rows, 64), 1e-6, 512,
    )  # fmt: skip
    qkv = GroupedQkv(shape(rows, 64, 512), shape(rows, 512), groups)
    cache = GroupedCache(
        shape(pages + 1, 1, page, 512, dtype=jnp.uint16), shape(pages + 1, 1, page // size, width, dtype=jnp.uint16),
        shape(pages + 1, num_sums(2), width), shape(rows, pages, dtype=jnp.int32), shape(rows, dtype=jnp.int32),
    )  # fmt: skip

    def attend(qkv: GroupedQkv, cache: GroupedCache, slots: jax.Array) -> tuple[jax.Array, GroupedCache]:
        return attend_to_groups(qkv, cache, slots, None, AttentionOptions(sliding_window=128))

    step = jax.jit(attend, donate_argnums=1).lower(qkv, cache, shape(rows, dtype=jnp.int32))
    memory: Any = step.compile().memory_analysis()
    assert memory.temp_size_in_bytes < 2 * 10**8


def test_pages_that_cut_groups_are_refused() -> None:
    (qkv, *_) = tokens(5, 2, has_index=False)
    cache = GroupedCache(
        jnp.zeros((2, 1, PAGE, HEAD)), jnp.zeros((2, 1, 2, HEAD)), jnp.zeros((2, 9, HEAD)),
        jnp.ones((1, 1), jnp.int32), jnp.ones(1, jnp.int32),
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"pages of 12 tokens .* don't hold groups of 5"):
        attend_to_groups(
            of_tokens(qkv, 0, 1), cache, jnp.full(1, PAGE, jnp.int32), jnp.arange(2, dtype=jnp.int32), OPTIONS
        )
