"""Checks `absorb_and_store` and `decode_latents` on one backend with one spec, like `check_layer` does other ops.

Owns what is right for them, in NumPy and float64 on the same inputs: every query, every stored number, every output of
a head. Called by `check kernels`.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench.kernels.check import TOLERANCE, Check
from bench.kernels.check_layer import Array, guarded, judge, normalized
from pallas_kernels import LatentHeads, LatentQkv, PagedKv, absorb_and_store, decode_latents
from pallas_kernels.dispatch import BACKEND_OF_NAME
from pallas_kernels.selftest.batches import scattered_pages, used_places
from pallas_kernels.specs import ArgSpec


def check_latents(spec: ArgSpec, backend: str, *, runs: int, interpret: bool = False) -> list[Check]:
    """Checks both ops, as far as the backend has them."""
    checks = [guarded("decode_latents", _check_decode, spec, backend, runs, interpret)]
    if not spec.index_size and (backend == "xla" or BACKEND_OF_NAME[backend].absorb_and_store is not None):
        checks.append(guarded("absorb_and_store", _check_absorb, spec, backend, runs, interpret))
    return checks


def _check_absorb(spec: ArgSpec, backend: str, runs: int, interpret: bool) -> Check:
    """Slots are all different; the pages hold numbers everywhere, which must stay where no token is stored."""
    rng = np.random.default_rng(1)
    shapes: Any = spec.store_latents_args()[:2]
    pages, qkv = jax.tree.map(lambda a: jnp.asarray(rng.normal(size=a.shape), jnp.float32).astype(a.dtype), shapes)
    angles = rng.uniform(0, 2 * np.pi, qkv.cos.shape)
    cos, sin = (jnp.asarray(each(angles), jnp.float32) for each in (np.cos, np.sin))
    qkv = dataclasses.replace(qkv, cos=cos, sin=sin)
    slots = rng.permutation(spec.num_pages * spec.page_size)[: spec.num_seqs]
    call = jax.jit(functools.partial(absorb_and_store, backend=backend, interpret=interpret))

    def run() -> list[jax.Array]:
        return list(call(qkv, pages, jnp.asarray(slots, jnp.int32)))

    right = _absorbed(qkv, pages, slots)
    return judge("absorb_and_store", spec, backend, runs, run, right, [TOLERANCE[jnp.dtype(spec.dtype).name]] * 2)


def _absorbed(qkv: LatentQkv, pages: jax.Array, slots: Array) -> list[Array]:
    product, weights, scales, cos, sin = (
        np.asarray(a.astype(jnp.float32), np.float64)
        for a in (qkv.product, qkv.heads.weights, qkv.scales, qkv.cos, qkv.sin)
    )
    heads, rows = qkv.heads, product.sum(axis=0)
    unrotated, size = heads.num_absorbing, heads.latent_size

    def turned(numbers: Array) -> Array:
        halves = np.split(numbers, 2, axis=-1)
        both = (halves[0] + 1j * halves[1]) * (cos + 1j * sin)
        return np.concatenate([both.real, both.imag], axis=-1)

    q = rows[:, : -qkv.head_dim].reshape(len(rows), heads.num_heads, -1)
    absorbed = np.einsum("tnd,ndc->tnc", q[..., :unrotated], weights[:, :unrotated])
    entry = rows[:, None, -qkv.head_dim :]
    own = normalized(entry[..., :size], scales, qkv.eps)
    stored = np.asarray(pages.astype(jnp.float32), np.float64)
    page_size = pages.shape[2]
    stored[slots // page_size, :, slots % page_size] = np.concatenate([own, turned(entry[..., size:])], axis=-1)
    return [np.concatenate([absorbed, turned(q[..., unrotated:])], axis=-1), stored]


def _check_decode(spec: ArgSpec, backend: str, runs: int, interpret: bool) -> Check:
    """Sequences from a padding row to the longest, so that some are split and others aren't."""
    rng = np.random.default_rng(2)
    longest = spec.pages_per_seq * spec.page_size
    lengths = np.linspace(0, longest, spec.num_seqs).astype(np.int32)
    table = rng.integers(0, spec.num_pages, (spec.num_seqs, spec.pages_per_seq)).astype(np.int32)
    scattered_pages(lengths, spec.page_size, table, spec.num_pages, rng)
    used = used_places(lengths, spec.page_size, table, spec.num_pages)
    q_shape, kv_shape = (each.shape for each in (spec.decode_args()[0], spec.paged_kv().k))
    q = jnp.asarray(rng.normal(size=q_shape), spec.dtype)
    pages = jnp.asarray(np.where(used[:, None, :, None], rng.normal(size=kv_shape), np.nan), spec.dtype)
    kv = PagedKv(pages, pages, jnp.asarray(table), jnp.asarray(lengths))
    heads = spec.latent_heads()
    numbers = rng.normal(size=heads.weights.shape) / np.sqrt(heads.latent_size)
    heads = LatentHeads(jnp.asarray(numbers, spec.dtype), heads.num_absorbing)
    call = jax.jit(functools.partial(decode_latents, options=spec.options, backend=backend, interpret=interpret))
    right = _decoded(spec, q, kv, heads)
    tolerance = TOLERANCE[jnp.dtype(spec.dtype).name]
    return judge("decode_latents", spec, backend, runs, lambda: [call(q, kv, heads)], [right], [tolerance])


def _decoded(spec: ArgSpec, q: jax.Array, kv: PagedKv, heads: LatentHeads) -> Array:
    queries, pages, weights = (np.asarray(a.astype(jnp.float32), np.float64) for a in (q, kv.k, heads.weights))
    table, lengths = np.asarray(kv.page_table), np.asarray(kv.lengths)
    read = np.zeros((len(queries), heads.num_heads, heads.latent_size))
    for s, length in enumerate(lengths):
        entries = pages[table[s], 0].reshape(-1, pages.shape[-1])[:length]
        scores = queries[s] @ entries[:, : spec.width].T * spec.options.scale(spec.width)
        shares = np.exp(scores - scores.max(axis=1, keepdims=True, initial=-np.inf))
        total = np.maximum(shares.sum(axis=1, keepdims=True), 1e-300)
        read[s] = shares / total @ entries[:, : heads.latent_size]
    out: Array = np.einsum("snc,nvc->snv", read, weights[:, heads.num_absorbing :])
    return out
