"""What stands around attention over a latent is one kernel before it and one after it, and both equal XLA."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import (
    AttentionOptions,
    LatentHeads,
    LatentQkv,
    PagedKv,
    absorb_and_store,
    decode_latents,
    paged_decode_attention,
    tuning,
)
from pallas_kernels.token_index import TokenIndex
from pallas_kernels.triton.merge_latents import merge_latents
from tests.grids import covering, daily
from tests.pallas_kernels.cases import assert_close, build_case
from tests.pallas_kernels.lower_everything import on_a_device
from tests.pallas_kernels.test_latent_attention import SPLITS, latent

BFLOAT16 = jnp.dtype(jnp.bfloat16)


def normal(rng: np.random.Generator, *shape: int, dtype: Any = jnp.float32) -> jax.Array:
    return jnp.asarray(rng.normal(size=shape), dtype)


def some_heads(rng: np.random.Generator, dtype: Any, num_heads: int = 3, sizes=(48, 16, 64)) -> LatentHeads:
    """Heads with D = 48, V = 16 and C = 64: no two alike, and D no power of two."""
    absorbing, outputs, size = sizes
    return LatentHeads(normal(rng, num_heads, absorbing + outputs, size, dtype=dtype) / 8, absorbing)


def some_qkv(num_tokens: int, dtype: Any, num_parts: int, *, joint: bool, num_rotated: int = 32) -> LatentQkv:
    """Products of random numbers, whole or in parts; columns that the kernel should not read are NaN."""
    rng = np.random.default_rng(num_tokens)
    heads = some_heads(rng, dtype)
    queries = heads.num_heads * (heads.num_absorbing + num_rotated)
    entry = heads.latent_size + num_rotated
    shape = (num_parts, num_tokens) if num_parts > 1 else (num_tokens,)
    kept = jnp.float32 if num_parts > 1 else dtype

    def product(width: int, before: int, after: int) -> jax.Array:
        numbers = normal(rng, *shape, width, dtype=kept)
        pad = [(0, 0)] * len(shape) + [(before, after)]
        return jnp.pad(numbers, pad, constant_values=jnp.nan)

    of_queries, of_entries = product(queries, 0, 5), product(entry, 7, 0)
    first = jnp.concatenate([of_queries, of_entries], axis=-1) if joint else of_queries
    angles = rng.uniform(0, 6, (num_tokens, 1, num_rotated // 2))
    cos, sin = (jnp.asarray(each(angles), jnp.float32) for each in (np.cos, np.sin))
    scales = normal(rng, heads.latent_size, dtype=dtype)
    return LatentQkv(first, None if joint else of_entries, scales, heads, cos, sin, 1e-6, jnp.dtype(dtype))


def in_float32(qkv: LatentQkv) -> LatentQkv:
    """The same numbers: XLA's library for CPUs multiplies no bfloat16 by heads."""
    wide = jax.tree.map(lambda each: each.astype(jnp.float32), qkv)
    return dataclasses.replace(wide, dtype=jnp.dtype(jnp.float32))


def some_slots(num_tokens: int, num_pages: int, page_size: int, num_padding: int) -> jax.Array:
    rng = np.random.default_rng(7)
    real = page_size + rng.permutation((num_pages - 1) * page_size)[: num_tokens - num_padding]
    return jnp.asarray(np.concatenate([real, np.arange(num_padding) % page_size]), jnp.int32)


# Fewer tokens than a tile, and more; of several tiles the last one is cut.
CASES = covering((37, 1, 300), (1, 4), (True, False), (jnp.bfloat16, jnp.float32), (16, 1))


@pytest.mark.parametrize(("num_tokens", "num_parts", "joint", "dtype", "page_size"), daily(CASES, every=2))
def test_queries_and_entries_are_those_of_xla_and_only_their_slots_change(
    num_tokens: int, num_parts: int, joint: bool, dtype: Any, page_size: int
) -> None:
    qkv = some_qkv(num_tokens, dtype, num_parts, joint=joint)
    num_pages = 2 + -(-num_tokens // page_size)
    before = jnp.full((num_pages, 1, page_size, qkv.head_dim), 7, dtype)
    num_padding = min(2, num_tokens - 1)
    slots = some_slots(num_tokens, num_pages, page_size, num_padding)
    q, pages = absorb_and_store(qkv, before, slots, backend="triton", interpret=True)
    expected_q, expected = absorb_and_store(in_float32(qkv), before.astype(jnp.float32), slots, backend="xla")
    assert q.shape == (num_tokens, 3, 96) and q.dtype == dtype
    assert_close(q, expected_q, dtype)
    assert_close(pages[1:], expected[1:], dtype)
    rows = np.asarray(pages, np.float32).reshape(-1, qkv.head_dim)
    others = np.setdiff1d(np.arange(len(rows)), np.asarray(slots))
    assert (rows[others] == 7).all()
    assert (rows[np.asarray(slots)[: num_tokens - num_padding]] != 7).any(axis=1).all()


@pytest.mark.parametrize("own_index", [True, False])
def test_keys_of_an_index_are_stored_after_entries_and_layers_that_share_a_choice_get_zeros(own_index: bool) -> None:
    """Keys of 24 numbers, which no tile of a power of two ends with; queries don't meet them."""
    num_tokens = 37
    keys = normal(np.random.default_rng(3), num_tokens, 24, dtype=jnp.bfloat16)
    index = TokenIndex(keys[:, None], jnp.ones((num_tokens, 1)), keys) if own_index else None
    qkv = dataclasses.replace(some_qkv(num_tokens, jnp.bfloat16, 1, joint=False), index=index, num_chosen=8)
    before, slots = jnp.full((4, 1, 16, qkv.head_dim + 24), 7, jnp.bfloat16), some_slots(num_tokens, 4, 16, 2)
    q, pages = absorb_and_store(qkv, before, slots, backend="triton", interpret=True)
    expected_q, expected = absorb_and_store(in_float32(qkv), before.astype(jnp.float32), slots, backend="xla")
    assert q.shape == expected_q.shape == (num_tokens, 3, 96)
    assert_close(q, expected_q, jnp.bfloat16)
    assert_close(pages[1:], expected[1:], jnp.bfloat16)
    rows = np.asarray(pages, np.float32).reshape(-1, 120)[np.asarray(slots[:-2])]
    np.testing.assert_array_equal(rows[:, 96:], np.asarray(keys, np.float32)[:-2] if own_index else 0)


def test_the_reference_stores_what_xla_does_and_a_wider_cache_gets_zeros() -> None:
    qkv = some_qkv(9, jnp.float32, 1, joint=True)
    pages = jnp.ones((3, 1, 16, 128))
    slots = some_slots(9, 3, 16, 0)
    for backend in ("xla", "reference"):
        q, stored = absorb_and_store(qkv, pages, slots, backend=backend)
        assert q.shape == (9, 3, 128) and (q[..., 96:] == 0).all()
        np.testing.assert_array_equal(stored[1:], absorb_and_store(qkv, pages, slots, backend="xla")[1][1:])
    with pytest.raises(ValueError, match="128 float32 numbers for entries of 96"):
        absorb_and_store(qkv, pages, slots, backend="triton", interpret=True)
    odd = dataclasses.replace(qkv, heads=LatentHeads(qkv.heads.weights, 24))
    with pytest.raises(ValueError, match="queries have 24 numbers without rotation; it takes multiples of 16"):
        absorb_and_store(odd, pages[..., :96], slots, backend="triton", interpret=True)


# Rows of one lane and of several: alone, a few, and more than a program has.
@pytest.mark.parametrize(("num_seqs", "most"), daily([(1, 40), (5, 7), (20, 3), (1, 1), (16, 2)], every=2))
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_merged_splits_times_the_matrices_equal_one_softmax(num_seqs: int, most: int, dtype: Any) -> None:
    rng = np.random.default_rng(most)
    heads = some_heads(rng, dtype, sizes=(48, 64, 256))
    counts = np.array([most, 0, *rng.integers(1, most + 1, max(0, num_seqs - 2))])[:num_seqs]
    lse, parts = rng.normal(size=(most, num_seqs, 3)) * 5, rng.normal(size=(most, num_seqs, 3, 256))
    is_there = np.arange(most)[:, None] < counts
    parts[~is_there] = lse[~is_there] = np.nan  # never written
    weights = np.exp2(np.where(is_there[..., None], lse, -np.inf))
    weights /= np.maximum(weights.sum(0), 1e-30)
    read = np.einsum("xsn,xsnc->snc", weights, np.nan_to_num(parts))
    expected = np.einsum("snc,nvc->snv", read, np.asarray(heads.weights, np.float64)[:, 48:])
    shape = tuning.ShapeClass(288, 4, 16, 16, num_seqs, num_seqs)
    args = (jnp.asarray(parts, jnp.float32), jnp.asarray(lse, jnp.float32), jnp.asarray(counts, jnp.int32))
    out = merge_latents(*args, heads, shape, jnp.dtype(dtype), interpret=True)
    assert out.shape == (num_seqs, 3, 64) and out.dtype == dtype
    assert_close(out, expected, dtype)
    assert (np.asarray(out, np.float32)[counts == 0] == 0).all()


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_a_decode_with_outputs_equals_attention_and_a_product(dtype: Any) -> None:
    spec = latent(20, 48, 32, dtype=dtype)
    q, kv = build_case(spec, [64, 0, 19], [1, 0, 1], 0, seed=4).decode_args()  # a cut last page, and a padding row
    heads = some_heads(np.random.default_rng(3), dtype, 20, (16, 16, 32))
    wide = LatentHeads(heads.weights.astype(jnp.float32), heads.num_absorbing)
    read = paged_decode_attention(q, kv, spec.options, backend="xla").astype(jnp.float32)
    expected = wide.outputs(read)
    call = functools.partial(decode_latents, q, kv, heads, spec.options, backend="triton", interpret=True)
    with tuning.override("paged_decode_attention", "triton", SPLITS):
        assert "merge_latents" in str(jax.make_jaxpr(call)())
        in_splits = call()
    others = [call(), decode_latents(q, kv, heads, spec.options, backend="xla")] if dtype == jnp.float32 else []
    for found in (in_splits, *others):
        assert found.shape == (3, 20, 16) and found.dtype == dtype
        assert_close(found, expected, dtype)
        assert (np.asarray(found, np.float32)[1] == 0).all()


@pytest.mark.parametrize("num_tokens", [1, 4])
def test_a_cpu_multiplies_by_matrices_in_bfloat16(num_tokens: int) -> None:
    rng = np.random.default_rng(num_tokens)
    heads = some_heads(rng, BFLOAT16)
    wide = LatentHeads(heads.weights.astype(jnp.float32), heads.num_absorbing)
    q, read = (normal(rng, num_tokens, 3, size, dtype=BFLOAT16).astype(jnp.float32) for size in (48, 64))
    assert_close(jax.jit(LatentHeads.absorbed)(heads, q), wide.absorbed(q), jnp.float32)
    assert_close(jax.jit(LatentHeads.outputs)(heads, read), wide.outputs(read), jnp.float32)


def test_matrices_that_the_kernel_does_not_take_are_xlas() -> None:
    spec = latent(3, 48, 32)
    q, kv = build_case(spec, [64, 0, 19], [1, 0, 1], 0, seed=4).decode_args()
    heads = some_heads(np.random.default_rng(3), jnp.float32, 3, (16, 24, 32))  # outputs no power of two
    call = functools.partial(decode_latents, q, kv, heads, spec.options)
    with tuning.override("paged_decode_attention", "triton", SPLITS):
        assert "merge_latents" not in str(jax.make_jaxpr(functools.partial(call, backend="triton", interpret=True))())
        assert_close(call(backend="triton", interpret=True), call(backend="xla"), jnp.float32)


def test_products_of_other_sizes_are_refused() -> None:
    qkv = some_qkv(9, jnp.float32, 1, joint=False)
    pages, slots = jnp.zeros((3, 1, 16, 96)), jnp.zeros(9, jnp.int32)
    assert qkv.entries_product is not None
    changes: tuple[tuple[dict[str, Any], str], ...] = (
        ({"product": qkv.product[:, :100]}, r"qkv\.product is .*W at least 240"),
        ({"entries_product": qkv.entries_product[:5]}, r"qkv\.entries_product is .*W at least 96"),
        ({"scales": qkv.scales[:3]}, r"qkv\.scales is .3,."),
    )
    for change, told in changes:
        with pytest.raises(ValueError, match=told):
            absorb_and_store(dataclasses.replace(qkv, **change), pages, slots)
    spec = latent(3, 48, 32)
    q, kv = build_case(spec, [64, 0, 19], [1, 0, 1], 0, seed=4).decode_args()
    with pytest.raises(ValueError, match=r"heads\.weights is"):
        decode_latents(q, kv, qkv.heads, AttentionOptions(value_dim=32))


@pytest.mark.parametrize("kind", daily(["NVIDIA H200", "NVIDIA A100-SXM4-80GB"], every=2))
def test_a_decode_of_a_layer_is_three_kernels_on_a_gpu(kind: str) -> None:
    """By "auto", between its products; the pages are the caller's, changed in place."""
    spec = dataclasses.replace(latent(16, dtype=BFLOAT16), num_seqs=32, pages_per_seq=64, page_size=64)

    def layer(pages: jax.Array, qkv: LatentQkv, slots: jax.Array, table: jax.Array, lengths: jax.Array) -> Any:
        q, pages = absorb_and_store(qkv, pages, slots)
        return decode_latents(q, PagedKv(pages, pages, table, lengths), qkv.heads, spec.options), pages

    kv = spec.paged_kv()
    with on_a_device("cuda", kind, 132):
        traced = jax.jit(layer, donate_argnums=0).trace(*spec.store_latents_args(), kv.page_table, kv.lengths)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    names = ("absorb_and_store", "paged_decode_attention", "merge_latents")
    assert text.count("stablehlo.custom_call @") == 3 and all(name in text for name in names)
    assert "stablehlo.dot_general" not in text
