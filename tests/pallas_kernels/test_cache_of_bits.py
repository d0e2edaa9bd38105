"""A cache kept as the bits of bfloat16 means what the same cache of bfloat16 means, in each op."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import PagedKv, paged_decode_attention, paged_extend_attention, store_kv
from pallas_kernels.paged_kv import to_bits, to_numbers
from tests.grids import daily

NUM_PAGES, K, G, H = 24, 2, 3, 16
LENGTHS = np.array([1, 40, 0, 63, 64], np.int32)


def pages_of(page_size: int, seed: int) -> jax.Array:
    """Random numbers; the last page, which no sequence has, holds NaN."""
    numbers = jax.random.normal(jax.random.key(seed), (NUM_PAGES, K, page_size, H), jnp.bfloat16)
    return numbers.at[-1].set(jnp.nan)


def table_of(page_size: int) -> jax.Array:
    """Pages of each sequence, the first two shared by the longest; entries past them name the page of NaN."""
    rng = np.random.default_rng(page_size)
    table = np.full((len(LENGTHS), -(-64 // page_size) + 1), NUM_PAGES - 1)
    for row, length in enumerate(LENGTHS):
        count = -(-int(length) // page_size)
        table[row, :count] = rng.integers(0, NUM_PAGES - 1, count)
    table[4, :2] = table[3, :2]
    return jnp.asarray(table, jnp.int32)


@pytest.mark.parametrize(
    ("page_size", "op"), daily([(size, op) for size in (16, 32, 64) for op in ("decode", "extend")][::-1], every=2)
)
def test_attention_over_bits_is_attention_over_the_numbers(op: str, page_size: int) -> None:
    k, v, table, lengths = pages_of(page_size, 1), pages_of(page_size, 2), table_of(page_size), jnp.asarray(LENGTHS)
    num_tokens = len(LENGTHS) if op == "decode" else 20
    q = jax.random.normal(jax.random.key(3), (num_tokens, K * G, H), jnp.float32)
    offsets = jnp.array([0, 1, 8, 8, 17, 20], jnp.int32)

    @functools.partial(jax.jit, static_argnames="backend")
    def attend(k: jax.Array, v: jax.Array, backend: str) -> jax.Array:
        kv = PagedKv(k, v, table, lengths)
        if op == "decode":
            return paged_decode_attention(q, kv, backend=backend)
        return paged_extend_attention(q, offsets, kv, backend=backend)

    expected = attend(k, v, "reference")
    np.testing.assert_array_equal(attend(to_bits(k), to_bits(v), "reference"), expected)
    # Over bits, queries and keys are multiplied in bfloat16.
    np.testing.assert_allclose(attend(to_bits(k), to_bits(v), "xla"), expected, atol=2e-2)


@pytest.mark.parametrize("backend", ["xla", "reference"])
def test_a_store_rounds_to_bfloat16(backend: str) -> None:
    k, v = pages_of(16, 1), pages_of(16, 2)
    new_k, new_v = jax.random.normal(jax.random.key(4), (2, 3, K, H), jnp.float32)
    slots = jnp.array([0, 17, 100], jnp.int32)
    tables = table_of(16), jnp.asarray(LENGTHS)
    stored = store_kv(PagedKv(to_bits(k), to_bits(v), *tables), new_k, new_v, slots, backend=backend)
    expected = store_kv(PagedKv(k, v, *tables), new_k, new_v, slots, backend="reference")
    for bits, numbers in ((stored.k, expected.k), (stored.v, expected.v)):
        assert bits.dtype == jnp.uint16
        np.testing.assert_array_equal(to_numbers(bits).astype(jnp.float32), numbers.astype(jnp.float32))


def test_a_store_happens_in_place() -> None:
    k, v = to_bits(pages_of(16, 1)), to_bits(pages_of(16, 2))
    new, slots = jnp.ones((3, K, H), jnp.float32), jnp.array([0, 17, 100], jnp.int32)

    def store(k: jax.Array, v: jax.Array, new: jax.Array, slots: jax.Array) -> tuple[jax.Array, jax.Array]:
        stored = store_kv(PagedKv(k, v, table_of(16), jnp.asarray(LENGTHS)), new, new, slots)
        return stored.k, stored.v

    compiled = jax.jit(store, donate_argnums=(0, 1)).lower(k, v, new, slots).compile()
    memory = compiled.memory_analysis()
    assert memory is not None
    assert memory.alias_size_in_bytes == k.nbytes + v.nbytes
    assert memory.temp_size_in_bytes < k.nbytes
