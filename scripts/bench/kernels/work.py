"""What a call has to do at least: the one definition of the bytes and FLOPs that all figures are made from.

Counted is useful work only, from real lengths: what masks, padding, tiles or a second reading add is the kernel's
loss. Each input is read once and each output written once, whatever a cache may hide:

- attention bytes: K and V of the tokens that some query of the sequence sees, the queries, the output, and the
  page ids of those tokens (4 bytes each). Pages shared by sequences count for each.
- attention FLOPs: 4 * H for each pair of a query head and a KV token that it sees (2 for the score, 2 for the output);
  the softmax is left out, so causality halves a whole prompt.
- store bytes: the new K and V read in their dtype and written in the cache's, and 4 for each slot. No FLOPs.

Never knows how anything is computed.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np

from bench.kernels.cases import STORE, KernelCase


@dataclasses.dataclass(frozen=True)
class Work:
    """Bytes through device memory and floating-point operations of one call."""

    num_bytes: int
    flops: int


@dataclasses.dataclass(frozen=True)
class Roofline:
    """What this device was seen to do: a copy's bytes per second, read plus written, and a matrix product's FLOP/s."""

    bytes_per_s: float
    flops_per_s: float

    def floor_s(self, work: Work) -> float:
        """No version of the work runs faster than this."""
        return max(work.num_bytes / self.bytes_per_s, work.flops / self.flops_per_s)

    def bound(self, work: Work) -> str:
        """Which of the two the floor comes from."""
        return "memory" if work.num_bytes / self.bytes_per_s >= work.flops / self.flops_per_s else "compute"


def work_of(case: KernelCase) -> Work:
    """The useful work of one call."""
    spec = case.spec
    width, cache_width = jnp.dtype(spec.dtype).itemsize, jnp.dtype(spec.cache_dtype).itemsize
    kv_row = 2 * case.num_kv_heads * case.head_dim  # elements of K and V of one token
    if case.op == STORE:
        return Work(sum(case.new) * (kv_row * (width + cache_width) + 4), 0)
    seen_tokens, seen_pages, pairs = _seen(case)
    num_heads = case.num_kv_heads * case.num_groups
    queries_and_output = 2 * sum(case.new) * num_heads * case.head_dim * width
    num_bytes = seen_tokens * kv_row * cache_width + queries_and_output + 4 * seen_pages
    return Work(num_bytes, 4 * case.head_dim * num_heads * pairs)


def _seen(case: KernelCase) -> tuple[int, int, int]:
    """KV tokens that some query sees, the pages they lie in, and (query, token) pairs."""
    window = case.sliding_window or int(case.lengths.max()) + 1
    tokens = pages = pairs = 0
    for cached, new in zip(case.cached, case.new, strict=True):
        if new == 0:
            continue
        first = max(0, cached - window + 1)
        tokens += cached + new - first
        pages += -(-(cached + new) // case.page_size) - first // case.page_size
        pairs += int(np.minimum(np.arange(cached, cached + new) + 1, window).sum())
    return tokens, pages, pairs
