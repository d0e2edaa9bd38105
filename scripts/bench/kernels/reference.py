"""The error of an output, against attention in float64 by NumPy on the same inputs, for a sample of tokens.

Owns the definition of the error in every table: ||output - right|| / ||right||, over sampled tokens and all heads.
Shares no code with pallas_kernels.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import jax
import numpy as np

from bench.kernels.cases import DECODE, KernelCase
from bench.kernels.inputs import Inputs, Layer
from pallas_kernels.paged_kv import FLOAT8, numbers_dtype

# Pairs of a query and a KV token, for one head: about a second on one core.
_MAX_PAIRS = 1 << 17


def attention_error(inputs: Inputs, layer: Layer, out: jax.Array) -> float:
    """Relative error of `out` `[T, N, H]`; NaN if an element is not finite, infinite if padding is not zero."""
    case = inputs.case
    actual = np.asarray(out).astype(np.float32)
    if not np.isfinite(actual).all():
        return float("nan")
    _, tokens = _real_tokens(case)
    padding = np.delete(actual, tokens, axis=0)
    if padding.any():
        return float("inf")
    difference = total = 0.0
    for sampled, rows in _right_samples(inputs, layer):
        right = rows[..., : case.value_dim]
        difference += float(np.square(actual[sampled] - right).sum())
        total += float(np.square(right).sum())
    return (difference / total) ** 0.5 if total else 0.0


def store_error(inputs: Inputs, layer: Layer, stored: tuple[jax.Array, jax.Array]) -> float:
    """Relative error of the two cache arrays after a store, over all pages but the dummy page.

    Infinite if a place changed that no token was written to.
    """
    case = inputs.case
    num_real = sum(case.new)
    slots = inputs.slots[:num_real]
    page, offset = slots // case.page_size, slots % case.page_size
    untouched = np.ones((case.spec.num_pages, case.page_size), bool)
    untouched[page, offset] = False
    untouched[0] = False
    difference = total = 0.0
    scales = [case.spec.scales.get(name) for name in ("k_scale", "v_scale")]
    before = (layer.k_pages, layer.v_pages)
    for old, after, new, scale in zip(before, stored, (layer.k, layer.v), scales, strict=True):
        old_bits, after_bits = (np.asarray(a).view(f"u{a.dtype.itemsize}") for a in (old, after))
        if (old_bits != after_bits).any(axis=(1, 3))[untouched].any():
            return float("inf")
        right = np.asarray(new)[:num_real].astype(np.float64)
        if scale is not None:
            right /= np.broadcast_to(np.asarray(scale, np.float64), case.num_kv_heads)[:, None]
        if numbers_dtype(after.dtype) == FLOAT8:
            right = np.clip(right, -448, 448).astype(FLOAT8).astype(np.float64)
        actual = _numbers(after)[page, :, offset].astype(np.float64)
        difference += float(np.square(actual - right).sum())
        total += float(np.square(right).sum())
    return (difference / total) ** 0.5 if total else 0.0


def _real_tokens(case: KernelCase) -> tuple[np.ndarray, np.ndarray]:
    """The sequence of each real token, and the token's place in q."""
    owners = np.repeat(np.arange(len(case.new)), case.new)
    return owners, owners if case.op == DECODE else np.arange(len(owners))


@functools.lru_cache(maxsize=1)  # all contenders of a case are compared with the same samples
def _right_samples(inputs: Inputs, layer: Layer) -> list[tuple[np.ndarray, np.ndarray]]:
    """Sampled tokens by sequence, with their right outputs `[t, N, H]`."""
    owners, tokens = _real_tokens(inputs.case)
    samples = _sample(inputs.case, owners, tokens, np.random.default_rng(0))
    return [(sampled, _attend(inputs, layer, s, sampled)) for s, sampled in samples]


def _sample(
    case: KernelCase, owners: np.ndarray, tokens: np.ndarray, rng: np.random.Generator
) -> Iterator[tuple[int, np.ndarray]]:
    """Yields sequences in random order with some of their tokens, always the first and the last, up to `_MAX_PAIRS`."""
    pairs = 0
    for s in rng.permutation(np.unique(owners)):
        mine = tokens[owners == s]
        wanted = max(2, min(64, (_MAX_PAIRS - pairs) // int(case.lengths[s])))
        chosen = np.unique([mine[0], mine[-1], *rng.choice(mine, min(wanted, len(mine)), replace=False)])
        yield int(s), chosen
        pairs += len(chosen) * int(case.lengths[s])
        if pairs >= _MAX_PAIRS:
            return


def _attend(inputs: Inputs, layer: Layer, s: int, sampled: np.ndarray) -> np.ndarray:
    """The right output `[len(sampled), N, H]` for tokens of sequence s."""
    case = inputs.case
    length = int(inputs.lengths[s])
    pages = inputs.page_table[s, : -(-length // case.page_size)]
    scales = (case.spec.scales.get(name, 1.0) for name in ("k_scale", "v_scale"))
    k, v = (
        _flat(array[pages], length)[..., : case.head_dim]
        * np.broadcast_to(np.asarray(scale, np.float64), case.num_kv_heads)[:, None, None]
        for array, scale in zip((layer.k_pages, layer.v_pages), scales, strict=True)
    )
    q = np.asarray(layer.q[sampled]).astype(np.float64)
    last = sampled if case.op == DECODE else inputs.query_offsets[s + 1] - 1
    position = length - 1 - (last - sampled)
    rows = q.reshape(len(sampled), case.num_kv_heads, -1).swapaxes(0, 1)  # [K, t, G * H]
    rows = rows.reshape(case.num_kv_heads, -1, case.head_dim)
    attention = case.spec.attention
    scores = rows @ k.swapaxes(1, 2) * attention["options"].scale(case.head_dim)  # [K, t * G, L]
    if case.logit_soft_cap is not None:
        scores = case.logit_soft_cap * np.tanh(scores / case.logit_soft_cap)
    behind = np.repeat(position, case.num_groups)[:, None] - np.arange(length)
    scores[:, (behind < 0) | (behind >= (case.sliding_window or length))] = -np.inf
    sinks = np.full(case.num_kv_heads * case.num_groups, -np.inf)
    if case.has_sinks:
        sinks = np.asarray(attention["sinks"], np.float64)
    sinks = np.tile(sinks.reshape(case.num_kv_heads, -1), (1, len(sampled)))[..., None]  # [K, t * G, 1]
    top = np.maximum(scores.max(axis=-1, keepdims=True), sinks)
    weights = np.exp(scores - top)
    weights /= weights.sum(axis=-1, keepdims=True) + np.exp(sinks - top)
    out = (weights @ v).reshape(case.num_kv_heads, len(sampled), -1, case.head_dim)
    right: np.ndarray = out.swapaxes(0, 1).reshape(q.shape)
    return right


def _numbers(pages: jax.Array) -> np.ndarray:
    array = np.asarray(pages)
    return array.view(numbers_dtype(array.dtype))


def _flat(pages: jax.Array, length: int) -> np.ndarray:
    """Turns `[P, K, page_size, H]` into float64 `[K, length, H]`, without the places behind the length."""
    array = _numbers(pages).astype(np.float64)
    _, num_kv_heads, _, head_dim = array.shape
    flat: np.ndarray = array.swapaxes(0, 1).reshape(num_kv_heads, -1, head_dim)
    return flat[:, :length]
