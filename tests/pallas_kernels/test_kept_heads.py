"""A cache that keeps heads side by side, or wider than they are, gives what one of the model's own heads gives."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import PagedKv, paged_decode_attention, paged_extend_attention, rotate_and_store, store_kv
from pallas_kernels.kept_heads import KeptHeads
from pallas_kernels.specs import ArgSpec
from tests.grids import daily
from tests.pallas_kernels.cases import assert_close, random_qkv

PAIRS, PADDED, FOURS = KeptHeads(4, 2, 128), KeptHeads(2, 1, 128), KeptHeads(4, 1, 128)


def caches(heads: KeptHeads, head_dim: int, **spec: bool) -> tuple[ArgSpec, PagedKv, PagedKv]:
    """The spec of a model, an empty cache of its own heads, and one that keeps them otherwise."""
    model = ArgSpec("", 3, 24, 4, 16, heads.num_kv_heads, 2, head_dim, jnp.float32, **spec)
    shape = (model.num_pages, heads.num_kv_heads, model.page_size, head_dim)
    pages = jnp.full(shape, jnp.nan, model.cache_dtype)
    lengths = jnp.asarray([20, 0, 4], jnp.int32)
    table = jnp.asarray(1 + np.random.default_rng(0).permutation(12).reshape(3, 4), jnp.int32)
    own = PagedKv(pages, pages, table, lengths, **model.scales)
    other = jnp.full((shape[0], heads.kept_heads, shape[2], heads.width), jnp.nan, model.cache_dtype)
    return model, own, dataclasses.replace(own, k=other, v=other)


@pytest.mark.parametrize(
    ("heads", "head_dim", "is_float8"),
    daily([(PAIRS, 64, False), (PAIRS, 64, True), (PADDED, 48, True), (FOURS, 32, False)], every=2),
)
def test_attention_after_a_store_is_that_over_the_models_own_heads(
    heads: KeptHeads, head_dim: int, is_float8: bool
) -> None:
    model, own, other = caches(heads, head_dim, float8_cache=is_float8)
    qkv = random_qkv(model, np.random.default_rng(1))
    sequence = np.repeat([0, 2], [20, 4])
    position = np.concatenate([np.arange(20), np.arange(4)])
    slots = jnp.asarray(np.asarray(own.page_table)[sequence, position // 16] * 16 + position % 16, jnp.int32)
    offsets = jnp.asarray([0, 20, 20, 24], jnp.int32)
    sinks = jnp.linspace(-3.0, 3.0, 2 * heads.num_kv_heads)
    extend = functools.partial(paged_extend_attention, options=model.options.for_heads(head_dim), sinks=sinks)
    q, own = rotate_and_store(qkv, own, slots, backend="xla")
    kept_q, other = rotate_and_store(qkv, other, slots, backend="xla")
    expected = extend(q, offsets, own, backend="reference")
    for backend in ("xla", *(["mosaic_tpu"] if heads == PAIRS and not is_float8 else [])):
        out = jax.block_until_ready(extend(kept_q, offsets, other, backend=backend, interpret=backend == "mosaic_tpu"))
        assert_close(heads.own_numbers(out, head_dim), expected, jnp.float32)
    last = jnp.asarray([19, 0, 23])
    decoded = paged_decode_attention(kept_q[last], other, model.options.for_heads(head_dim), sinks, backend="xla")
    assert_close(heads.own_numbers(decoded, head_dim)[0::2], expected[last[0::2]], jnp.float32)


def test_a_store_of_keys_and_values_takes_the_models_heads() -> None:
    _, own, other = caches(PAIRS, 64)
    k, v = (jnp.asarray(np.random.default_rng(i).normal(size=(5, 4, 64)), jnp.float32) for i in range(2))
    slots = jnp.arange(16, 21, dtype=jnp.int32)
    narrow, paired = store_kv(own, k, v, slots), store_kv(other, k, v, slots)
    for wide, pages in ((paired.k, narrow.k), (paired.v, narrow.v)):
        rows = jnp.swapaxes(pages[1, :, :5], 0, 1).reshape(5, 2, 128)
        np.testing.assert_array_equal(jnp.swapaxes(wide[1, :, :5], 0, 1), rows)


@pytest.mark.parametrize(
    ("heads", "head_dim"), [(KeptHeads(4, 3, 128), 64), (KeptHeads(4, 2, 128), 80), (KeptHeads(3, 1, 128), 32)]
)
def test_heads_that_do_not_lie_in_the_caches_are_refused(heads: KeptHeads, head_dim: int) -> None:
    _, _, other = caches(heads, head_dim)
    k = jnp.zeros((5, heads.num_kv_heads, head_dim))
    with pytest.raises(ValueError, match="or with heads that lie side by side in that"):
        store_kv(other, k, k, jnp.arange(16, 21, dtype=jnp.int32))


def test_a_gpus_rotation_that_cannot_join_heads_is_refused() -> None:
    model, _, other = caches(PAIRS, 64)
    qkv = random_qkv(model, np.random.default_rng(1))
    with pytest.raises(ValueError, match="keeps 4 kv heads as 2"):
        rotate_and_store(qkv, other, jnp.arange(24, dtype=jnp.int32), backend="triton", interpret=True)
