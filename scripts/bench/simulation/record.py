"""Measures steps of the real engine on this machine's device, for `fit.py`. Every compiled size, at several lengths.

Batches are made of whole prompts or of their ends, with pages of their own; what the tokens are doesn't matter. Called
by `simulate.py --record`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from bench.simulation.cost import equal_pairs
from jaxsgl.batch.buckets import Capacity
from jaxsgl.batch.build import BatchBuilder, Work
from jaxsgl.batch.inputs import StepInputs
from jaxsgl.batch.sampling import SamplingRows
from jaxsgl.cache.pages import pages_for, tokens_in
from jaxsgl.engine.engine import Engine

LENGTHS = (1, 1 / 4, 1 / 16)  # of sequences, as shares of what fits
SEQS = (1, 8)  # of extend steps


def record(engine: Engine, repeats: int = 5) -> Iterator[dict[str, Any]]:
    """Runs each step `repeats` times and yields the fastest of them: what else runs only adds."""
    capacity = engine.capacity
    pages = np.arange(1, capacity.num_pages, dtype=np.int32)
    for kind, seqs, count, length in dict.fromkeys(_cases(engine)):
        tables = np.zeros((capacity.num_rows, capacity.max_pages_per_seq), dtype=np.int32)
        each = pages_for(length, capacity.page_size)
        tables[:seqs, :each] = pages[: seqs * each].reshape(seqs, each)
        builder = BatchBuilder(engine.buckets, tables, SamplingRows(capacity.num_rows), capacity.page_size)
        if kind == "decode":
            inputs = builder.decode(np.arange(seqs, dtype=np.int32), np.full(seqs, length - 1, dtype=np.int32))
        else:
            ids = np.ones(count, dtype=np.int32)
            inputs = builder.extend([Work(row, ids, length - count, True) for row in range(seqs)])
        yield {
            "kind": kind,
            "tokens": inputs.bucket.num_tokens,
            "seqs": seqs,
            "kv_tokens": seqs * length,
            "pairs": equal_pairs(seqs * count, seqs, seqs * length),
            "seconds": _fastest(engine, inputs, repeats),
        }


def _cases(engine: Engine) -> Iterator[tuple[str, int, int, int]]:
    """Kind, sequences, and new tokens and length of each."""
    capacity = engine.capacity
    for share in LENGTHS:
        wanted = max(1, int(share * capacity.context_length))
        for size in engine.buckets.decode_sizes:
            yield "decode", size, 1, min(wanted, _most(capacity, size))
        for size in engine.buckets.extend_sizes:
            for seqs in (min(seqs, size, capacity.num_rows) for seqs in SEQS):
                count, most = size // seqs, _most(capacity, seqs)
                if count <= most:
                    yield "extend", seqs, count, min(max(wanted, count), most)


def _most(capacity: Capacity, seqs: int) -> int:
    """Tokens that each of `seqs` sequences can have at once."""
    return min(capacity.context_length, tokens_in((capacity.num_pages - 1) // seqs, capacity.page_size))


def _fastest(engine: Engine, inputs: StepInputs, repeats: int) -> float:
    """Seconds; a first run warms up."""
    seconds = []
    for _ in range(1 + repeats):
        start_s = time.perf_counter()
        engine.submit(inputs).tokens()
        seconds.append(time.perf_counter() - start_s)
    return min(seconds[1:])
