"""Random ragged contents for the shapes of `specs`, and the attention over them in plain NumPy.

A case is built so that mistakes show: pages are permuted and shared, table entries past a sequence's pages name
other sequences' pages, and every place of the cache that no sequence owns holds NaN.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

from pallas_kernels import AttentionOptions, FusedQkv, PagedKv
from pallas_kernels.specs import ArgSpec


@dataclasses.dataclass(frozen=True)
class Case:
    """Arguments of an extend; `decode_args` are the same with the last query of each sequence only."""

    spec: ArgSpec
    q: np.ndarray
    k_pages: np.ndarray
    v_pages: np.ndarray
    page_table: np.ndarray
    lengths: np.ndarray
    query_offsets: np.ndarray

    def paged_kv(self) -> PagedKv:
        k_scale, v_scale = (
            np.broadcast_to(self.spec.scales.get(name, 1.0), self.spec.num_kv_heads) for name in ("k_scale", "v_scale")
        )
        cache = (
            jnp.asarray(pages / scale[:, None, None], self.spec.cache_dtype)
            for pages, scale in ((self.k_pages, k_scale), (self.v_pages, v_scale))
        )
        k, v = cache
        ints = (jnp.asarray(a, jnp.int32) for a in (self.page_table, self.lengths))
        return PagedKv(k, v if self.spec.value_dim is None else k, *ints, **self.spec.scales)

    def extend_args(self):
        """q, query_offsets, kv."""
        return jnp.asarray(self.q, self.spec.dtype), jnp.asarray(self.query_offsets, jnp.int32), self.paged_kv()

    def decode_args(self):
        """q, kv."""
        return jnp.asarray(self.q, self.spec.dtype)[: self.spec.num_seqs], self.paged_kv()


@st.composite
def cases(draw, spec: ArgSpec, *, decode: bool = False) -> Case:
    """Lengths and queries of every kind that the spec's shapes admit, padding rows and padding tokens included."""
    longest = spec.pages_per_seq * spec.page_size
    length = st.one_of(
        st.integers(0, longest),
        st.sampled_from([0, 1, spec.page_size, longest]),
        st.integers(1, spec.pages_per_seq).map(lambda n: n * spec.page_size),
    )
    lengths = draw(st.lists(length, min_size=spec.num_seqs, max_size=spec.num_seqs))
    num_queries = [min(n, 1) for n in lengths]
    if not decode:
        room = spec.num_tokens - sum(num_queries)
        for s, n in enumerate(lengths):
            more = draw(st.integers(0, max(0, min(n - 1, room))))
            num_queries[s] += more
            room -= more
    shared_pages = draw(st.integers(0, spec.pages_per_seq))
    return build_case(spec, lengths, num_queries, shared_pages, draw(st.integers(0, 2**32 - 1)))


def build_case(spec: ArgSpec, lengths: list[int], num_queries: list[int], shared_pages: int, seed: int) -> Case:
    """Sequences 0 and 1 have their first `shared_pages` pages in common, as far as both own that many."""
    rng = np.random.default_rng(seed)
    shape = (spec.num_pages, spec.num_kv_heads, spec.page_size, spec.width + spec.index_size)
    k_pages, v_pages = np.full(shape, np.nan, np.float32), np.full(shape, np.nan, np.float32)

    def heads(*dims: int) -> np.ndarray:
        numbers = rng.normal(size=(*dims, spec.head_dim))
        return np.pad(numbers, ((0, 0), (0, 0), (0, spec.width - spec.head_dim)))

    free = list(1 + rng.permutation(spec.num_pages - 1))
    page_table = rng.integers(0, spec.num_pages, (spec.num_seqs, spec.pages_per_seq))
    for s, length in enumerate(lengths):
        for j in range(-(-length // spec.page_size)):
            is_shared = s == 1 and j < shared_pages and (j + 1) * spec.page_size <= min(lengths[:2])
            page = page_table[0, j] if is_shared else free.pop()
            page_table[s, j] = page
            used = min(spec.page_size, length - j * spec.page_size)
            if not is_shared:
                k_pages[page, :, :used, : spec.width] = heads(spec.num_kv_heads, used)
                v_pages[page, :, :used, : spec.width] = heads(spec.num_kv_heads, used)
                k_pages[page, :, :used, spec.width :] = 1000.0  # no key
    q = heads(max(spec.num_tokens, spec.num_seqs), spec.num_kv_heads * spec.num_groups)
    offsets = np.concatenate([[0], np.cumsum(num_queries)])
    return Case(spec, q, k_pages, v_pages, page_table, np.array(lengths), offsets)


def dense_attention(q, query_offsets, kv: PagedKv, options: AttentionOptions, sinks=None) -> np.ndarray:
    """Attention in float64, one query at a time over a sequence laid out flat. Zeros for padding."""
    q, k_pages, v_pages = (np.asarray(a, np.float64) for a in (q, kv.k, kv.v))
    k_pages, v_pages = (
        pages * np.broadcast_to(1.0 if scale is None else scale, pages.shape[1])[:, None, None]
        for pages, scale in ((k_pages, kv.k_scale), (v_pages, kv.v_scale))
    )
    page_table, lengths, query_offsets = (np.asarray(a) for a in (kv.page_table, kv.lengths, query_offsets))
    num_kv_heads = k_pages.shape[1]
    window = options.sliding_window or np.inf
    cap = options.logit_soft_cap
    sinks = np.full(q.shape[1], -np.inf) if sinks is None else np.asarray(sinks, np.float64)
    sinks = sinks.reshape(num_kv_heads, -1, 1)
    k_pages, v_pages = (pages[..., : q.shape[2]] for pages in (k_pages, v_pages))
    out = np.zeros(q.shape)
    for s, length in enumerate(lengths):
        begin, end = query_offsets[s : s + 2]
        k = np.concatenate(k_pages[page_table[s]], axis=1)[:, :length]  # [K, length, H]
        v = np.concatenate(v_pages[page_table[s]], axis=1)[:, :length]
        for token in range(begin, end):
            position = length - (end - token)
            first = int(max(0, position - window + 1, position - position % (options.chunk or position + 1)))
            queries = q[token].reshape(num_kv_heads, -1, q.shape[2])
            scores = queries @ k[:, first : position + 1].swapaxes(1, 2) * options.scale(q.shape[2])  # [K, N / K, keys]
            if cap is not None:
                scores = cap * np.tanh(scores / cap)
            top = np.maximum(scores.max(axis=2, keepdims=True), sinks)
            weights = np.exp(scores - top)
            total = weights.sum(axis=2, keepdims=True) + np.exp(sinks - top)
            out[token] = (weights / total @ v[:, first : position + 1]).reshape(q.shape[1:])
    return out[..., : options.value_dim]


def random_store(spec: ArgSpec, rng: np.random.Generator, **scales: float) -> tuple[PagedKv, jax.Array, jax.Array]:
    """kv, k and v of a store with random contents; its page table and lengths are never read."""
    shapes, k, v, _ = spec.store_args()
    k_pages, v_pages, k, v = (jnp.asarray(rng.normal(size=a.shape), a.dtype) for a in (shapes.k, shapes.v, k, v))
    table, lengths = (jnp.zeros(a.shape, jnp.int32) for a in (shapes.page_table, shapes.lengths))
    return PagedKv(k_pages, v_pages, table, lengths, scales.get("k_scale"), scales.get("v_scale")), k, v


def random_qkv(spec: ArgSpec, rng: np.random.Generator, **parts: bool) -> FusedQkv:
    """A fused product with angles of random positions; `parts` says whether it has norms and biases."""
    _, shapes, _ = spec.rotate_and_store_args(**parts)
    arrays = jax.tree.map(lambda a: jnp.asarray(rng.normal(size=a.shape), a.dtype), shapes)
    angles = rng.integers(0, 40_000, shapes.cos.shape[:2])[..., None] * 0.1 ** np.arange(shapes.cos.shape[2])
    tables = (jnp.asarray(table, jnp.float32) for table in (np.cos(angles), np.sin(angles)))
    return dataclasses.replace(arrays, **dict(zip(("cos", "sin"), tables, strict=True)))


def assert_close(actual, expected, dtype) -> None:
    """Checks to the dtype's tolerance, relative to the largest value, or to 1 where all are smaller."""
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    tolerance = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 2e-2}[jnp.dtype(dtype).name]
    np.testing.assert_allclose(actual, expected, rtol=tolerance, atol=tolerance * max(1.0, np.abs(expected).max()))
