"""The calls that are measured: batches, given by the cached and the new tokens of each sequence.

Owns the lists of cases and the one definition of a call's useful work, from which all figures are made. Never knows
arrays, backends or times; `inputs` fills a case with numbers.

Work is counted from real lengths: what masks, padding, tiles or a second reading add is the kernel's loss. Each input
is read once and each output written once, whatever a cache may hide:

- attention bytes: K and V (of a latent the entry) of the tokens that some query of the sequence sees, the queries, the
  output, and the page ids of those tokens (4 bytes each). Pages shared by sequences count for each.
- attention FLOPs: for each pair of a query head and a KV token that it sees 2 * H for the score and as many for the
  output, of a latent 2 * value_dim; the softmax is left out, so causality halves a whole prompt.
- store bytes: the new K and V read in their dtype and written in the cache's, and 4 for each slot. No FLOPs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from bench.roofline import Work
from pallas_kernels import paged_decode_attention, paged_extend_attention, store_kv
from pallas_kernels.specs import ArgSpec

DEFAULT_PAGE = {"cpu": 16, "gpu": 64, "tpu": 64}  # what the engine's --page-size auto takes for heads of 128
STORE, DECODE, EXTEND = "store_kv", "paged_decode_attention", "paged_extend_attention"
FUNCTIONS: dict[str, Callable[..., Any]] = {
    STORE: store_kv,
    DECODE: paged_decode_attention,
    EXTEND: paged_extend_attention,
}


@dataclasses.dataclass(frozen=True)
class KernelCase:
    """One call of one op: sequence s has `cached[s]` tokens in the cache and `new[s]` new ones; 0 and 0 is padding."""

    name: str
    op: str
    cached: tuple[int, ...]
    new: tuple[int, ...]
    page_size: int = 16
    num_kv_heads: int = 8
    num_groups: int = 4
    head_dim: int = 128
    dtype: str = "bfloat16"
    float8_cache: bool = False
    bits_cache: bool = False
    sliding_window: int | None = None
    logit_soft_cap: float | None = None
    sm_scale: float | None = None
    has_sinks: bool = False
    value_dim: int | None = None
    index_size: int = 0
    padding_tokens: int = 0
    """Padding tokens of an extend or a store, behind those of the last sequence."""

    @property
    def label(self) -> str:
        """The name with the page size; unique within a list of cases."""
        return f"{self.name}, page {self.page_size}"

    @property
    def lengths(self) -> np.ndarray:
        """`[S]` tokens of KV, the new ones included."""
        return np.add(self.cached, self.new)

    @property
    def num_tokens(self) -> int:
        """T of the call; a decode has one token for each sequence, padding included."""
        return len(self.new) if self.op == DECODE else sum(self.new) + self.padding_tokens

    @property
    def spec(self) -> ArgSpec:
        """The call as static shapes, with dtypes, scales and options."""
        return ArgSpec(
            name=self.label,
            num_seqs=len(self.new),
            num_tokens=self.num_tokens,
            pages_per_seq=max(1, -(-int(self.lengths.max()) // self.page_size)),
            page_size=self.page_size,
            num_kv_heads=self.num_kv_heads,
            num_groups=self.num_groups,
            head_dim=self.head_dim,
            dtype=jnp.dtype(self.dtype),
            sliding_window=self.sliding_window,
            logit_soft_cap=self.logit_soft_cap,
            float8_cache=self.float8_cache,
            bits_cache=self.bits_cache,
            sm_scale=self.sm_scale,
            has_sinks=self.has_sinks,
            value_dim=self.value_dim,
            index_size=self.index_size,
        )

    @property
    def options(self) -> dict[str, Any]:
        """The keyword arguments of the op."""
        return {} if self.op == STORE else self.spec.attention


def decode(name: str, lengths: list[int], **fields: Any) -> KernelCase:
    """A decode with one new token per sequence, which `lengths` include; length 0 is a padding row."""
    cached, new = zip(*((max(n - 1, 0), min(n, 1)) for n in lengths), strict=True)
    return KernelCase(name, DECODE, cached, new, **fields)


def extend(name: str, cached: list[int], new: list[int], **fields: Any) -> KernelCase:
    """An extend of `new[s]` tokens behind `cached[s]` tokens."""
    return KernelCase(name, EXTEND, tuple(cached), tuple(new), **fields)


def store(num_tokens: int, **fields: Any) -> KernelCase:
    """A store of new tokens of sequences of up to 1024 tokens, as a prefill stores them."""
    new = (1024,) * (num_tokens // 1024) + ((num_tokens % 1024,) if num_tokens % 1024 else ())
    name = f"store {num_tokens}{' float8' if fields.get('float8_cache') else ''}"
    return KernelCase(name, STORE, (0,) * len(new), new, **fields)


def work_of(case: KernelCase) -> Work:
    """The useful work of one call."""
    spec = case.spec
    width, cache_width = jnp.dtype(spec.dtype).itemsize, jnp.dtype(spec.cache_dtype).itemsize
    kv_row = 2 * case.num_kv_heads * case.head_dim  # elements of K and V of one token
    if case.op == STORE:
        return Work(sum(case.new) * (kv_row * (width + cache_width) + 4), 0)
    seen_tokens, seen_pages, pairs = _seen(case)
    num_heads = case.num_kv_heads * case.num_groups
    key_and_value = case.head_dim + (case.value_dim or case.head_dim)
    queries_and_output = sum(case.new) * num_heads * key_and_value * width
    entry = kv_row if case.value_dim is None else kv_row // 2
    num_bytes = seen_tokens * entry * cache_width + queries_and_output + 4 * seen_pages
    return Work(num_bytes, 2 * key_and_value * num_heads * pairs)


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


RAGGED = [17, 100, 333, 1000, 2048, 3000, 4095, 8192] * 4


def _decodes(rows: int, *page_sizes: int) -> list[KernelCase]:
    return [decode(f"decode {rows} x 4096", [4096] * rows, page_size=page) for page in page_sizes]


def _extends(page: int) -> list[KernelCase]:
    return [
        extend("extend 1 x 8192", [0], [8192], page_size=page),
        extend("extend 2048 on 8192", [8192], [2048], page_size=page),
        extend("extend 32 x 256", [0] * 32, [256] * 32, page_size=page),
        extend("extend mixed", [2048] * 31 + [0], [1] * 31 + [2048], page_size=page),
    ]


def _accelerator_cases() -> tuple[KernelCase, ...]:
    """Cases with a goal come first: when time is short, the last cases are left out. Others have the default page."""
    served: dict[str, Any] = {"page_size": DEFAULT_PAGE["gpu"]}
    return (
        *_decodes(64, 64, 16),
        *_decodes(8, 64, 16),
        *_extends(64)[:1],
        *_extends(16)[:1],
        *(store(tokens, page_size=page) for page in (64, 16) for tokens in (4096, 16384, 65536)),
        *_extends(64)[1:],
        *(decode("decode 32 ragged", RAGGED, page_size=page) for page in (64, 16)),
        *_decodes(64, 128, 1),
        *_extends(16)[1:],
        *(decode("decode 64 x 4096 float8", [4096] * 64, page_size=page, float8_cache=True) for page in (64, 16)),
        extend("extend 1 x 8192 float8", [0], [8192], float8_cache=True, **served),
        store(4096, float8_cache=True, **served),
        decode("decode 1 x 32768", [32768], **served),
        decode("decode 256 x 1024", [1024] * 256, **served),
        decode("decode 32 x 1024", [1024] * 32, **served),
        decode("decode 31 x 1024, 1 x 32768", [1024] * 31 + [32768], **served),
        decode("decode 64 x 4096, 8 heads of 128 to one", [4096] * 64, num_kv_heads=4, num_groups=8, **served),
        decode("decode 64 x 4096, heads of 64", [4096] * 64, head_dim=64, **served),
        decode("decode 64 x 4096, window 1024", [4096] * 64, sliding_window=1024, **served),
        store(64, **served),
        store(4096, page_size=1),
        *_decodes(8, 128, 1),
    )


def _cpu_cases() -> tuple[KernelCase, ...]:
    """float32 in all page sizes, and what the engine uses for bfloat16 weights: float32 queries and a cache of bits."""
    formats: list[tuple[str, dict[str, Any]]] = [("", {"page_size": page}) for page in (1, 16, 64)]
    formats.append((", bits", {"page_size": 16, "bits_cache": True}))
    formats.append((", float8 bits", {"page_size": 16, "bits_cache": True, "float8_cache": True}))
    cases = []
    for suffix, extra in formats:
        fields: dict[str, Any] = {"num_groups": 2, "head_dim": 64, "dtype": "float32", **extra}
        cases += [
            decode(f"decode 32 x 512{suffix}", [512] * 32, **fields),
            decode(f"decode ragged{suffix}", [17, 33, 65, 129] * 7 + [4096] * 4, **fields),
            extend(f"extend 1 x 1024{suffix}", [0], [1024], **fields),
            extend(f"extend 32 x 20{suffix}", [0] * 32, [20] * 32, **fields),
            extend(f"extend 64 on 700{suffix}", [700], [64], **fields),
            extend(f"extend mixed{suffix}", [500] * 31 + [0], [1] * 31 + [480], **fields),
            *(
                dataclasses.replace(case, name=case.name + suffix)
                for case in (store(32, **fields), store(1024, **fields))
            ),
        ]
    return tuple(cases)


ACCELERATOR_CASES = _accelerator_cases()
CPU_CASES = _cpu_cases()

_QUICK_ACCELERATOR = ("decode 64 x 4096", "decode 8 x 4096", "extend 1 x 8192", "extend mixed", "store 4096")
_QUICK_CPU = ("decode 32 x 512", "extend 64 on 700", "store 1024")


def cases_for(platform: str, *, quick: bool = False) -> tuple[KernelCase, ...]:
    """The cases for "cpu" or for accelerators; `quick` keeps the most telling ones, in the default pages."""
    cases = CPU_CASES if platform == "cpu" else ACCELERATOR_CASES
    if not quick:
        return cases
    page_size = DEFAULT_PAGE[platform]
    names = _QUICK_CPU if platform == "cpu" else _QUICK_ACCELERATOR
    return tuple(case for case in cases if case.name in names and case.page_size == page_size and not case.float8_cache)
