"""Time paged attention on this machine: the backend that "auto" chooses against gathering pages and einsum.

Knows only pallas_kernels. Attention variants alternate within each repeat, and before each other memory is written,
so that the KV is as cold as it is between the layers of a model. The figure is the fastest repeat.
"""

import argparse
import dataclasses
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import paged_decode_attention, paged_extend_attention, store_kv

NUM_KV_HEADS, NUM_GROUPS, HEAD_DIM = 8, 2, 64


@dataclasses.dataclass(frozen=True)
class BenchCase:
    """A batch: how many tokens each sequence has cached, and how many are new."""

    name: str
    cached: Sequence[int]
    new: Sequence[int]


CASES = (
    BenchCase("decode 32 x 512", [511] * 32, [1] * 32),
    BenchCase("decode ragged", [16, 32, 64, 128] * 7 + [4095] * 4, [1] * 32),
    BenchCase("extend 1 x 1024", [0], [1024]),
    BenchCase("extend 32 x 20", [0] * 32, [20] * 32),
    BenchCase("extend 64 on 700", [700], [64]),
    BenchCase("extend mixed", [500] * 31 + [0], [1] * 31 + [480]),
)


def make_args(case: BenchCase, page_size: int) -> tuple[jax.Array, ...]:
    """q, k_pages, v_pages, page_table, lengths, query_offsets, with pages in random order, in float32."""
    rng = np.random.default_rng(0)
    lengths = np.add(case.cached, case.new)
    counts = -(-lengths // page_size)
    num_pages = 1 + int(counts.sum())
    free = 1 + rng.permutation(num_pages - 1)
    page_table = np.zeros((len(lengths), counts.max()), np.int32)
    for row, begin, count in zip(page_table, np.cumsum(counts) - counts, counts, strict=True):
        row[:count] = free[begin : begin + count]
    pages = (num_pages, NUM_KV_HEADS, page_size, HEAD_DIM)
    query_shape = (sum(case.new), NUM_KV_HEADS * NUM_GROUPS, HEAD_DIM)
    q, k_pages, v_pages = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in (query_shape, pages, pages))
    ints = (jnp.asarray(a, jnp.int32) for a in (page_table, lengths, np.cumsum([0, *case.new])))
    return q, k_pages, v_pages, *ints


def gather_and_einsum(case: BenchCase) -> Callable[..., jax.Array]:
    """The obvious way, as the baseline: every sequence padded to the longest, scores of all pairs in memory."""
    longest = max(case.new)

    def attend(
        q: jax.Array, k_pages: jax.Array, v_pages: jax.Array, page_table: jax.Array, lengths: jax.Array,
        offsets: jax.Array,
    ) -> jax.Array:  # fmt: skip
        k, v = (
            jnp.swapaxes(pages[page_table], 2, 3).reshape(len(case.new), -1, NUM_KV_HEADS, HEAD_DIM)
            for pages in (k_pages, v_pages)
        )
        index = jnp.minimum(offsets[:-1, None] + jnp.arange(longest), q.shape[0] - 1)
        queries = q[index].reshape(len(case.new), longest, NUM_KV_HEADS, NUM_GROUPS, HEAD_DIM)
        scores = jnp.einsum("sqkgh,slkh->skgql", queries, k) * HEAD_DIM**-0.5
        position = (lengths - offsets[1:] + offsets[:-1])[:, None] + jnp.arange(longest)
        seen = jnp.arange(k.shape[1]) <= position[:, :, None]
        weights = jax.nn.softmax(jnp.where(seen[:, None, None], scores, -jnp.inf))
        return jnp.einsum("skgql,slkh->sqkgh", weights, v)

    return attend


def measure(case: BenchCase, page_size: int, repeats: int) -> dict[str, Any]:
    """Milliseconds of each variant, and seconds to compile ours."""
    args = make_args(case, page_size)

    def ours(q: jax.Array, *rest: jax.Array) -> jax.Array:
        if max(case.new) == 1:
            return paged_decode_attention(q, *rest[:-1])
        return paged_extend_attention(q, *rest)

    begin = time.perf_counter()
    programs = {"ours_ms": jax.jit(ours).lower(*args).compile()}
    compile_s = time.perf_counter() - begin
    programs["gather_ms"] = jax.jit(gather_and_einsum(case)).lower(*args).compile()
    fastest = time_all({name: (program, args) for name, program in programs.items()}, repeats)
    return {"case": case.name, "page_size": page_size, **fastest, "compile_s": compile_s}


def measure_store(num_tokens: int, page_size: int, repeats: int) -> dict[str, Any]:
    """Milliseconds to store so many tokens into a donated cache of 16k slots, the same slots each time: warm."""
    num_slots = 1 << 14
    cache = jnp.zeros((num_slots // page_size, NUM_KV_HEADS, page_size, HEAD_DIM))
    new = jnp.ones((num_tokens, NUM_KV_HEADS, HEAD_DIM))
    slots = jnp.asarray(np.random.default_rng(0).permutation(num_slots)[:num_tokens], jnp.int32)
    store = jax.jit(store_kv, donate_argnums=(0, 1))
    k_pages, v_pages = jax.block_until_ready(store(cache, cache + 0, new, new, slots))
    seconds = []
    for _ in range(repeats):
        begin = time.perf_counter()
        k_pages, v_pages = jax.block_until_ready(store(k_pages, v_pages, new, new, slots))
        seconds.append(time.perf_counter() - begin)
    return {"case": f"store {num_tokens}", "page_size": page_size, "ours_ms": min(seconds) * 1e3}


def time_all(programs: dict[str, tuple[Callable[..., Any], tuple[jax.Array, ...]]], repeats: int) -> dict[str, float]:
    """Fastest milliseconds of each, the programs taking turns."""
    other_memory = np.zeros(1 << 24)
    fastest = dict.fromkeys(programs, float("inf"))
    for _ in range(repeats):
        for name, (program, args) in programs.items():
            other_memory += 1
            begin = time.perf_counter()
            jax.block_until_ready(program(*args))
            fastest[name] = min(fastest[name], (time.perf_counter() - begin) * 1e3)
    return fastest


def main() -> None:
    """Measure, print a table, and write it as JSON when asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page-sizes", type=int, nargs="+", default=[1, 16, 64], help="page sizes to measure")
    parser.add_argument("--repeats", type=int, default=10, help="runs of each variant; the fastest counts")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures here")
    options = parser.parse_args()

    print(f"{'case':<18}{'page':>5}{'ours ms':>10}{'gather ms':>11}{'ratio':>7}{'compile s':>11}")
    rows = []
    for page_size in options.page_sizes:
        for case in CASES:
            row = measure(case, page_size, options.repeats)
            rows.append(row)
            ratio = row["gather_ms"] / row["ours_ms"]
            print(
                f"{row['case']:<18}{page_size:>5}{row['ours_ms']:>10.2f}{row['gather_ms']:>11.2f}{ratio:>7.1f}"
                f"{row['compile_s']:>11.2f}"
            )
        for num_tokens in (32, 1024):
            row = measure_store(num_tokens, page_size, options.repeats)
            rows.append(row)
            print(f"{row['case']:<18}{page_size:>5}{row['ours_ms']:>10.3f}")
    if options.json:
        shape = {"num_kv_heads": NUM_KV_HEADS, "num_groups": NUM_GROUPS, "head_dim": HEAD_DIM, "dtype": "float32"}
        result = {"platform": jax.default_backend(), "jax": jax.__version__, **shape, "rows": rows}
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
