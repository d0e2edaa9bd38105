"""Arrays for a case: random contents, pages in random order, several layers of cache.

Owns how a case becomes arrays. The layers stand for those of a model: each has its own queries and KV cache, and all
share lengths, page table and slots. With enough layers, no cache on the chip holds what a call reads.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

from bench.kernels.cases import DECODE, STORE, KernelCase, work_of
from pallas_kernels.paged_kv import numbers_dtype, to_bits, to_numbers
from pallas_kernels.selftest.batches import normal, pages_of, scattered_pages, slots_of, used_places

_ROTATED_BYTES = 1 << 30  # many times the largest L2, and so long a program that starting it costs nothing
_MIN_LAYERS, _MAX_LAYERS = 4, 32
_CACHED_BYTES = 200e6  # several times the L2 of a GPU


@dataclasses.dataclass(frozen=True, eq=False)
class Layer:
    """q `[T, N, H]`, the cache `[num_pages, K, page_size, H]`, and for a store the new k and v `[T, K, H]`."""

    q: jax.Array
    k_pages: jax.Array
    v_pages: jax.Array
    k: jax.Array
    v: jax.Array

    def cache_numbers(self) -> tuple[jax.Array, jax.Array]:
        """K and V pages as numbers, also where they are kept as bits."""
        return to_numbers(self.k_pages), to_numbers(self.v_pages)


@dataclasses.dataclass(frozen=True, eq=False)
class Inputs:
    """A case with its arrays. The integer arrays are on the host: `[S, P]`, `[S]`, `[S + 1]` and `[T]` int32."""

    case: KernelCase
    page_table: np.ndarray
    lengths: np.ndarray
    query_offsets: np.ndarray
    slots: np.ndarray
    layers: tuple[Layer, ...]


def layers_for(case: KernelCase, platform: str) -> int:
    """So many layers that their memory exceeds every cache; one on a CPU, where the timing overwrites other memory."""
    if platform == "cpu":
        return 1
    return min(_MAX_LAYERS, max(_MIN_LAYERS, -(-_ROTATED_BYTES // work_of(case).num_bytes)))


def layers_beyond_cache(num_bytes: float) -> int:
    """So many layers of products, which read `num_bytes` each, that no cache holds what all of them read."""
    return min(_MAX_LAYERS, max(2, math.ceil(_CACHED_BYTES / num_bytes)))


def make_inputs(case: KernelCase, num_layers: int = 1, seed: int = 0, *, adverse: bool = False) -> Inputs:
    """Makes random inputs.

    `adverse` is for checks: every place that no sequence owns holds NaN, table entries behind a sequence's pages name
    random pages, and sequences 0 and 1 share the pages that both fill.
    """
    rng = np.random.default_rng(seed)
    spec, lengths = case.spec, case.lengths
    page_table = np.zeros((spec.num_seqs, spec.pages_per_seq), np.int32)
    if adverse:
        page_table[:] = rng.integers(0, spec.num_pages, page_table.shape)
    scattered_pages(lengths, case.page_size, page_table, spec.num_pages, rng)
    if adverse and case.op != STORE and len(lengths) > 1:
        shared = int(lengths[:2].min()) // case.page_size
        page_table[1, :shared] = page_table[0, :shared]
    offsets = np.cumsum([0, *case.new], dtype=np.int32)
    used = used_places(lengths, case.page_size, page_table, spec.num_pages) if adverse else None
    keys = jax.random.split(jax.random.key(seed), num_layers)
    layers = tuple(_make_layer(case, key, used) for key in keys)
    slots = _slots(case, page_table, rng)
    return Inputs(case, page_table, lengths.astype(np.int32), offsets, slots, layers)


def _make_layer(case: KernelCase, key: jax.Array, used: np.ndarray | None) -> Layer:
    spec = case.spec
    kv, k, v, _ = spec.store_args()
    q = (spec.decode_args() if case.op == DECODE else spec.extend_args())[0]
    scales = [spec.scales.get(name, 1.0) for name in ("k_scale", "v_scale")]
    per_head = [jnp.broadcast_to(jnp.asarray(s, jnp.float32), case.num_kv_heads)[:, None, None] for s in scales]
    keys = jax.random.split(key, 5)
    dtype = numbers_dtype(spec.cache_dtype)
    pages = [
        normal(each, scale, shape=a.shape, dtype=dtype)
        for each, scale, a in zip(keys, per_head, (kv.k, kv.v), strict=False)
    ]
    if used is not None:
        pages = [pages_of(a, used, spec.cache_dtype) for a in pages]
    elif case.bits_cache:
        pages = [to_bits(a, spec.cache_dtype) for a in pages]
    pages = pages if case.value_dim is None else [pages[0], pages[0]]
    rest = [normal(each, 1.0, shape=a.shape, dtype=a.dtype) for each, a in zip(keys[2:], (q, k, v), strict=True)]
    return Layer(rest[0], *pages, *rest[1:])


def _slots(case: KernelCase, page_table: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """`[T]`: slots of the new tokens; padding goes to the dummy page."""
    slots = [
        slots_of(row, cached, cached + new, case.page_size)
        for row, cached, new in zip(page_table, case.cached, case.new, strict=True)
    ]
    padding = rng.integers(0, case.page_size, case.padding_tokens)
    return np.concatenate([*slots, padding]).astype(np.int32)
