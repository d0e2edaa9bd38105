"""Cases for attention in C++, and the right results for them.

Queries of zero give all tokens in view the same weight: then the output is their mean, exactly, and no tolerance hides
a token too many or too few. With random queries the reference takes them rounded to bfloat16, as the kernel does; what
is left is the rounding of the weights.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import AttentionOptions, PagedKv, paged_decode_attention, paged_extend_attention
from pallas_kernels.native import library
from pallas_kernels.paged_kv import BITS, FLOAT8, FLOAT8_BITS, to_bits, to_format
from tests.pallas_kernels.cases import dense_attention
from tests.pallas_kernels.texts import LONGEST, NUM_SEQS, family, lay_out, own, unseen_places

K = 2
# Kernels that multiply pairs of bfloat16, that widen it, those with tiles, whose instructions are imitated, and those
# compiled for a processor that can only widen.
WAYS = ("paired", "widened", *(["tiles", "narrow"] if library.has_pairs() else []))
GATES = {
    "silu": lambda x: x / (1 + np.exp(-x)),
    "gelu_tanh": lambda x: x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),
}
MEAN_TOLERANCE, TOLERANCE = 1e-5, 1e-2  # a weight is off by 2^-9 of itself, a value is 4 at most


def gated(products: np.ndarray, activation: str) -> np.ndarray:
    """What a gated product returns where the gate's and up's are `products` `[T, 2 * out]`."""
    with np.errstate(over="ignore"):
        gate, up = np.split(products.astype(np.float64), 2, axis=1)
        return np.asarray(GATES[activation](gate) * up)


def assert_gates(
    product: Callable[[jax.Array, str | None], jax.Array], x: jax.Array, *, counts: tuple[int, ...] = (1, 2, 9, 16, 33)
) -> None:
    """`product` of rows and an activation is what it is without one, gated; a row's is the same in any company."""
    for activation in GATES:
        together = np.asarray(product(x, activation))
        exact = gated(np.asarray(product(x, None)), activation)
        np.testing.assert_allclose(together, exact, rtol=1e-5, atol=2e-7 * np.abs(exact).max())
        for count in counts:
            np.testing.assert_array_equal(np.asarray(product(x[:count], activation)), together[:count])


@dataclass(frozen=True)
class Case:
    """An extend's arguments, the pages as float32 numbers; a decode takes the last query of each sequence."""

    q: np.ndarray
    k_pages: np.ndarray
    v_pages: np.ndarray
    table: np.ndarray
    lengths: np.ndarray
    offsets: np.ndarray
    bits: jnp.dtype = BITS
    """What the pages are handed over as."""

    def decode(self) -> Case:
        """One query of each sequence, padding rows included."""
        return replace(self, q=self.q[: len(self.lengths)], offsets=np.arange(len(self.lengths) + 1))

    def of_zeros(self) -> Case:
        return replace(self, q=np.zeros_like(self.q))

    def of_float8(self) -> Case:
        """The same with its keys and values rounded to float8, and a cache of it."""
        k, v = (np.array(to_format(jnp.asarray(x), FLOAT8), np.float32) for x in (self.k_pages, self.v_pages))
        return replace(self, k_pages=k, v_pages=v, bits=FLOAT8_BITS)


def build(
    texts: list[str], page_size: int, *, group: int = 2, head_dim: int = 32, seed: int = 0, most_new: int = LONGEST
) -> Case:
    """A random number of the last tokens of each text are new: `most_new` at most, sometimes none."""
    rng = np.random.default_rng(seed)
    table, lengths = lay_out(texts, page_size, seed)
    unseen = unseen_places(table, lengths, page_size)
    shape = (len(unseen), K, page_size, head_dim)
    k_pages = np.array(jnp.asarray(rng.normal(size=shape), jnp.bfloat16).astype(jnp.float32))
    v_pages = np.round(16 * rng.normal(size=shape).clip(-4, 4)).astype(np.float32) / 16  # sums of them are exact
    for pages in (k_pages, v_pages):
        pages.swapaxes(1, 2)[unseen] = np.nan
    offsets = np.concatenate([[0], np.cumsum(rng.integers(0, np.minimum(lengths, most_new) + 1))])
    num_tokens = max(NUM_SEQS, int(offsets[-1]) + 5)
    q = rng.normal(size=(num_tokens, K * group, head_dim)) * rng.uniform(0.1, 4, (num_tokens, 1, 1))
    return Case(q.astype(np.float32), k_pages, v_pages, table, lengths, offsets)


@functools.cache
def compiled(is_decode: bool, options: AttentionOptions):
    op = paged_decode_attention if is_decode else paged_extend_attention
    return jax.jit(functools.partial(op, backend="native", options=options))


def attend(case: Case, is_decode: bool = False, **options: Any) -> np.ndarray:
    table, lengths, offsets = (jnp.asarray(a, jnp.int32) for a in (case.table, case.lengths, case.offsets))
    k, v = (to_bits(jnp.asarray(pages), case.bits) for pages in (case.k_pages, case.v_pages))
    kv = PagedKv(k, v, table, lengths, options.pop("k_scale", None), options.pop("v_scale", None))
    queries: Any = (case.q,) if is_decode else (case.q, offsets)
    sinks, seen = sinks_of(case, options.pop("has_sinks", False)), options.pop("seen", None)
    ahead = {} if seen is None else {"seen": seen}
    ahead |= {"biases": options.pop("biases")} if "biases" in options else {}
    return np.asarray(compiled(is_decode, AttentionOptions(**options))(*queries, kv, sinks=sinks, **ahead))


def sinks_of(case: Case, has_sinks: bool) -> np.ndarray | None:
    """Sinks of the query heads, below the scores and above them."""
    return 8 * np.sin(np.arange(1, case.q.shape[1] + 1, dtype=np.float32)) if has_sinks else None


def dense(case: Case, **options: Any) -> np.ndarray:
    """The float64 softmax with queries as the kernel rounds them; zeros for padding rows of a decode."""
    head_dim = case.q.shape[2]
    scaled = case.q * np.float32(options.pop("k_scale", 1)) * np.float32(options.pop("sm_scale", head_dim**-0.5))
    q = np.asarray(jnp.asarray(scaled, jnp.bfloat16).astype(jnp.float32), np.float64) * np.sqrt(head_dim)
    has_query = np.repeat(case.lengths > 0, np.diff(case.offsets))
    counts = np.diff(case.offsets) * (case.lengths > 0)
    offsets = np.concatenate([[0], np.cumsum(counts)])
    rows = np.flatnonzero(has_query)
    out = np.zeros(q.shape)
    cache: Any = (case.k_pages, case.v_pages, case.table, case.lengths, None, options.pop("v_scale", None))
    kv = PagedKv(*cache)
    sinks = sinks_of(case, options.pop("has_sinks", False))
    out[rows] = dense_attention(q[rows], offsets, kv, AttentionOptions(**options), sinks)
    return out


def check(case: Case, is_decode: bool = False, **options: Any) -> None:
    case = case.decode() if is_decode else case
    for each, tolerance in ((case.of_zeros(), MEAN_TOLERANCE), (case, TOLERANCE)):
        expected = dense(each, **options)
        scale = max(1.0, np.abs(expected).max())
        np.testing.assert_allclose(attend(each, is_decode, **options), expected, rtol=0, atol=tolerance * scale)


each_op = pytest.mark.parametrize("is_decode", [True, False], ids=["decode", "extend"])

# Empty and single tokens, whole tiles and one more or less, and several.
RAGGED = [*(own(n, n) for n in (1, 2, 15, 16, 17, 63, 64, 65, 128, 129, 200)), *family("s" * 130, 3, 1)]

# 45 sequences of 8 heads a kv head are more than two units of 128 rows; half the pages are common to all.
MANY = ["m" * 128 + own(1 + 2 * i, i) for i in range(45)]


def long_prompt(length: int, page_size: int, group: int) -> Case:
    """One sequence whose tokens are all new, on pages in random order."""
    rng = np.random.default_rng(length)
    num_pages = -(-length // page_size)
    shape = (num_pages + 1, K, page_size, 64)
    k_pages, v_pages = (np.array(jnp.asarray(rng.normal(size=shape), jnp.bfloat16), np.float32) for _ in range(2))
    table = 1 + rng.permutation(num_pages)[None]
    for pages in (k_pages, v_pages):
        pages[0] = np.nan
        pages[table[0, -1], :, length - (num_pages - 1) * page_size :] = np.nan
    q = rng.normal(size=(length, K * group, 64)).astype(np.float32)
    return Case(q, k_pages, v_pages, table, np.array([length]), np.array([0, length]))
