"""Paged attention kernels for JAX: KV store, decode attention and extend attention.

Owns the arithmetic over a paged KV cache. Never knows requests, schedulers or models: it sees arrays only, and
imports JAX and NumPy only. Callers are model code, tests and benchmarks, through the three functions below.

Cache layout, the same for every backend: `k_pages` and `v_pages` are `[num_pages, K, page_size, H]`, so that the
tile of one page and one kv head is contiguous. Slot `s` is offset `s % page_size` of page `s // page_size`.
Page 0 is the dummy page: padding writes there, and what it holds never matters.
"""

from pallas_kernels.decode_attention import paged_decode_attention
from pallas_kernels.dispatch import BACKENDS, choose_backend
from pallas_kernels.extend_attention import paged_extend_attention
from pallas_kernels.store_kv import STORE_BACKENDS, store_kv

__all__ = [
    "BACKENDS",
    "STORE_BACKENDS",
    "choose_backend",
    "paged_decode_attention",
    "paged_extend_attention",
    "store_kv",
]
