"""An index chooses the tokens of the largest scores, exactly as many as asked, and queries attend to these alone."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import AttentionOptions, PagedKv, TokenIndex, attend_to_chosen, choose_tokens, tuning
from pallas_kernels.paged_kv import BITS, to_bits, to_numbers
from pallas_kernels.xla import chosen as xla

HEADS, KEY, LATENT, PADDING = 3, 6, 4, 2  # query heads; H and C of entries; numbers after the index's key
OPTIONS = AttentionOptions(sm_scale=0.7, value_dim=LATENT)


class Batch:
    """Sequences with shuffled pages, NaN wherever no token is, and whole numbers in the index, so that scores tie."""

    def __init__(
        self, lengths: Sequence[int], queries: Sequence[int], page: int, heads: int, size: int, dtype: Any = jnp.float32
    ) -> None:
        rng = np.random.default_rng(8)
        self.lengths, self.queries, self.size, padded = lengths, queries, size, sum(queries) + 3
        pages = 2 + max(lengths) // page
        table = rng.permutation(np.arange(1, 1 + len(lengths) * pages)).reshape(len(lengths), pages)
        entries = np.full((1 + table.size, 1, page, KEY + size + PADDING), np.nan, np.float32)
        for row, length in zip(table, lengths, strict=True):
            for at in range(length):
                whole = rng.integers(-2, 3, size)
                entry = np.concatenate([rng.normal(size=KEY), whole, np.full(PADDING, 7)])
                entries[row[at // page], 0, at % page] = entry
        stored = jnp.asarray(entries)
        stored = to_bits(stored) if dtype == BITS else stored.astype(dtype)
        self.kv = PagedKv(stored, stored, jnp.asarray(table, jnp.int32), jnp.asarray(lengths, jnp.int32))
        asked = rng.integers(-2, 3, (padded, heads, size)), rng.integers(-3, 4, (padded, heads))
        keys = jnp.zeros((padded, size))
        self.index = TokenIndex(jnp.asarray(asked[0], jnp.float32), jnp.asarray(asked[1], jnp.float32), keys)
        self.q = jnp.asarray(rng.normal(size=(padded, HEADS, KEY)), jnp.float32)
        self.offsets = jnp.asarray(np.cumsum([0, *queries]), jnp.int32)

    def entries(self, seq: int) -> np.ndarray:
        page, table = self.kv.page_size, np.asarray(self.kv.page_table)
        at = np.arange(self.lengths[seq])
        return np.asarray(to_numbers(self.kv.k), np.float64)[table[seq, at // page], 0, at % page]

    def wanted(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Sorted positions `[T, count]`, -1 first, and outputs `[T, N, C]`, in float64."""
        chosen = np.full((len(self.q), count), -1)
        out = np.zeros((len(self.q), HEADS, LATENT))
        token = 0
        for seq, number in enumerate(self.queries):
            entries = self.entries(seq)
            for position in range(self.lengths[seq] - number, self.lengths[seq]):
                seen = entries[: position + 1]
                keys = seen[:, KEY : KEY + self.size]
                of_heads = np.maximum(np.asarray(self.index.queries[token], np.float64) @ keys.T, 0)
                scores = np.asarray(self.index.weights[token], np.float64) @ of_heads
                best = np.sort(np.argsort(-scores, kind="stable")[:count])
                chosen[token, count - len(best) :] = best
                of_tokens = 0.7 * np.asarray(self.q[token], np.float64) @ seen[best, :KEY].T
                weights = np.exp(of_tokens - of_tokens.max(axis=1, keepdims=True))
                out[token] = weights / weights.sum(axis=1, keepdims=True) @ seen[best, :LATENT]
                token += 1
        return chosen, out


# Lengths, queries, page size, the index's heads and numbers, tokens to choose, and the cache's format.
CASES: dict[str, tuple[Sequence[int], Sequence[int], int, int, int, int, Any]] = {
    "extend": ((40, 0, 7, 23), (19, 0, 7, 1), 4, 5, 3, 8, jnp.float32),
    "decode": ((40, 0, 7, 23, 9), (1, 0, 1, 1, 1), 1, 5, 3, 8, jnp.float32),
    "bits": ((33, 12), (5, 2), 16, 2, 4, 6, BITS),
    "in pieces": ((2500,), (20,), 16, 64, 4, 100, jnp.float32),
}


@pytest.mark.parametrize("case", CASES)
def test_chosen_tokens_and_attention_to_them_equal_numpys(case: str) -> None:
    lengths, queries, page, heads, size, count, dtype = CASES[case]
    batch = Batch(lengths, queries, page, heads, size, dtype)
    found = choose_tokens(batch.index, batch.offsets, batch.kv, KEY, count)
    chosen, out = batch.wanted(count)
    assert (chosen >= 0).all(axis=1).any() and found.dtype == jnp.int32
    np.testing.assert_array_equal(np.sort(found, axis=1), chosen)
    read = attend_to_chosen(batch.q, found, batch.offsets, batch.kv, OPTIONS)
    np.testing.assert_allclose(read, out, atol=2e-2 if dtype == BITS else 1e-5)


# Query heads, H, C, numbers after a key, the cache's format, and the kernel's sizes.
WHOLE = {"tile_tokens": 16, "programs_per_core": 1}
SPLIT = {"tile_tokens": 16, "programs_per_core": 1000, "min_split_tokens": 16}
KERNELS: list[tuple[int, int, int, int, Any, dict[str, int]]] = [
    (20, 48, 32, 6, jnp.float32, SPLIT),
    (16, 576, 512, 128, jnp.bfloat16, SPLIT),
    (3, 32, 24, 0, jnp.float32, WHOLE),
    (40, 48, 32, 16, jnp.float32, WHOLE | {"head_rows": 32}),
]


@pytest.mark.parametrize(("heads", "key", "latent", "index", "dtype", "sizes"), KERNELS)
def test_the_kernel_attends_to_what_is_chosen_whole_and_in_splits(
    heads: int, key: int, latent: int, index: int, dtype: Any, sizes: dict[str, int]
) -> None:
    """Tokens choose any number, some of them none; choices have holes, and every other place of the cache is NaN."""
    rng = np.random.default_rng(5)
    lengths, queries, page, count = (61, 0, 5, 90), (3, 0, 2, 1), 8, 50
    table = rng.permutation(np.arange(1, 49)).reshape(4, 12)
    pages = np.full((49, 1, page, key + index), np.nan, np.float32)
    for row, length in zip(table, lengths, strict=True):
        for at in range(length):
            pages[row[at // page], 0, at % page] = rng.normal(size=key + index)
    chosen = np.full((8, count), -1)
    of_token = [seq for seq, number in enumerate(queries) for _ in range(number)]
    for token, seq in enumerate(of_token[:-1]):  # the last one has none, as the two of padding
        some = rng.permutation(lengths[seq])[: count - 7]
        chosen[token, rng.permutation(count)[: len(some)]] = some
    chosen[1, 20:] = -1
    stored = jnp.asarray(pages, dtype)
    kv = PagedKv(stored, stored, jnp.asarray(table, jnp.int32), jnp.asarray(lengths, jnp.int32))
    q = jnp.asarray(rng.normal(size=(8, heads, key)), dtype)
    args = q, jnp.asarray(chosen, jnp.int32), jnp.asarray(np.cumsum([0, *queries]), jnp.int32), kv
    options = AttentionOptions(sm_scale=key**-0.5, value_dim=latent)
    with tuning.override("attend_to_chosen", "triton", sizes):
        attend = functools.partial(attend_to_chosen, options=options, backend="triton", interpret=True)
        assert ("merge_splits" in str(jax.make_jaxpr(attend)(*args))) == (sizes is SPLIT)
        found = attend(*args)
    wide = dataclasses.replace(kv, k=kv.k.astype(jnp.float32), v=kv.v.astype(jnp.float32))
    wanted = attend_to_chosen(q.astype(jnp.float32), *args[1:3], wide, options, backend="xla")
    assert found.shape == (8, heads, latent) and found.dtype == dtype
    assert (np.asarray(found)[5:] == 0).all() and not (np.asarray(found)[:5] == 0).all(axis=(1, 2)).any()
    np.testing.assert_allclose(np.asarray(found, np.float32), wanted, atol=2e-2 if dtype == jnp.bfloat16 else 1e-5)


@pytest.mark.parametrize(
    ("queries", "heads", "dtype", "page"), [((19, 0, 7), 5, jnp.float32, 4), ((1, 0, 1), 20, jnp.bfloat16, 16)]
)
def test_scores_of_the_kernel_choose_the_same_tokens(
    queries: tuple[int, ...], heads: int, dtype: Any, page: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numbers are small and whole, so that no format rounds them; in one round, and in as many as there are tiles."""
    batch = Batch((200, 0, 7), queries, page, heads, 16, dtype)
    index = dataclasses.replace(batch.index, queries=batch.index.queries.astype(dtype))
    with tuning.override("score_tokens", "triton", {"tile_tokens": 32}):
        for kept in (xla._MOST_KEPT, 1):
            monkeypatch.setattr(xla, "_MOST_KEPT", kept)
            jax.clear_caches()
            found = choose_tokens(index, batch.offsets, batch.kv, KEY, 30, backend="triton", interpret=True)
            np.testing.assert_array_equal(np.sort(found, axis=1), batch.wanted(30)[0])


def test_a_choice_of_long_texts_takes_little_memory() -> None:
    """At DeepSeek V3.2's sizes: 2,048 queries on 65,536 tokens take 37 MB of entries and 17 MB of choices, no mask."""
    num_tokens, count = 2048, 2048

    def shape(*lengths: int, dtype: Any = jnp.float32) -> Any:
        return jax.ShapeDtypeStruct(lengths, dtype)

    pages = shape(1025, 1, 64, 704, dtype=jnp.uint16)
    kv = PagedKv(pages, pages, shape(1, 1024, dtype=jnp.int32), shape(1, dtype=jnp.int32))
    index = TokenIndex(shape(num_tokens, 64, 128), shape(num_tokens, 64), shape(num_tokens, 128))
    q = shape(num_tokens, 16, 576)

    def layer(index: TokenIndex, q: jax.Array, kv: PagedKv) -> jax.Array:
        offsets = jnp.asarray([0, num_tokens], jnp.int32)
        chosen = choose_tokens(index, offsets, kv, 576, count)
        return attend_to_chosen(q, chosen, offsets, kv, AttentionOptions(sm_scale=0.1, value_dim=512))

    memory: Any = jax.jit(layer).lower(index, q, kv).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 10**8


def test_what_does_not_fit_is_refused() -> None:
    batch = Batch((9,), (2,), 4, 2, 3)
    with pytest.raises(ValueError, match="count is 16; it must be 1 to 15"):
        choose_tokens(batch.index, batch.offsets, batch.kv, KEY, 16)
    with pytest.raises(ValueError, match="keys of 3 numbers from 9 on don't fit into entries of 11"):
        choose_tokens(batch.index, batch.offsets, batch.kv, 9, 4)
    with pytest.raises(ValueError, match="takes a value_dim, no window and no soft cap"):
        attend_to_chosen(batch.q, jnp.zeros((5, 2), jnp.int32), batch.offsets, batch.kv, AttentionOptions())
