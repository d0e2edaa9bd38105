"""Measures steps of the real engine on this machine's device, for `fit.py`. Every compiled size, at several lengths.

Batches are made of whole prompts or of their ends, with pages of their own; what the tokens are doesn't matter. Called
by `simulate.py --record`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from jaxsgl.batch.build import BatchBuilder, Work
from jaxsgl.batch.inputs import StepInputs
from jaxsgl.batch.sampling_rows import SamplingRows
from jaxsgl.cache.pages import pages_for
from jaxsgl.config import EngineConfig
from jaxsgl.engine.engine import Engine
from simulation.cost import equal_pairs

LENGTHS = (1, 1 / 4, 1 / 16)  # of sequences, as shares of what fits


def record(config: EngineConfig, repeats: int = 5) -> Iterator[dict[str, Any]]:
    """Starts the engine, measures each step `repeats` times and yields the fastest: what else runs only adds."""
    engine = Engine(config)
    capacity = engine.capacity
    pages = np.arange(1, capacity.num_pages, dtype=np.int32)

    def build(rows: int, length: int) -> tuple[BatchBuilder, int]:
        """A builder whose first `rows` rows have pages for `length` tokens, or for as many as the pool has."""
        each = min(pages_for(length, capacity.page_size), len(pages) // rows)
        tables = np.zeros((capacity.num_rows, capacity.max_pages_per_seq), dtype=np.int32)
        tables[:rows, :each] = pages[: rows * each].reshape(rows, each)
        builder = BatchBuilder(engine.buckets, tables, SamplingRows(capacity.num_rows), capacity.page_size)
        return builder, min(length, each * capacity.page_size)

    for size in engine.buckets.decode_sizes:
        for share in LENGTHS:
            builder, length = build(size, max(1, int(share * capacity.context_length)))
            inputs = builder.decode(np.arange(size, dtype=np.int32), np.full(size, length - 1, dtype=np.int32))
            yield _measured(engine, inputs, size, size * length, size * length, repeats)
    for size in engine.buckets.extend_sizes:
        for seqs in (1, min(8, size, capacity.num_rows)):
            count = size // seqs
            for share in LENGTHS:
                builder, length = build(seqs, max(count, int(share * capacity.context_length)))
                if length < count:
                    continue  # the pool is too small for so many prompts
                ids = np.ones(count, dtype=np.int32)
                inputs = builder.extend([Work(row, ids, length - count, True) for row in range(seqs)])
                pairs = equal_pairs(seqs * count, seqs, seqs * length)
                yield _measured(engine, inputs, seqs, seqs * length, pairs, repeats)
    engine.close()


def _measured(
    engine: Engine, inputs: StepInputs, seqs: int, kv_tokens: int, pairs: float, repeats: int
) -> dict[str, Any]:
    engine.submit(inputs).tokens()
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        engine.submit(inputs).tokens()
        seconds.append(time.perf_counter() - start)
    return {
        "kind": inputs.bucket.kind,
        "tokens": inputs.bucket.num_tokens,
        "seqs": seqs,
        "kv_tokens": kv_tokens,
        "pairs": pairs,
        "seconds": min(seconds),
    }
