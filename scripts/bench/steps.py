"""Full steps for an engine, built as the scheduler builds them. Lengths are given; the token ids don't matter.

Called by the benchmarks that time single steps. Pages come from all over the pool, in random order. The device gets the
pages of a step's sequences when the step runs for the first time: `first_run`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from jaxsgl.batch.buckets import Capacity
from jaxsgl.batch.build import BatchBuilder, Work
from jaxsgl.batch.inputs import StepInputs
from jaxsgl.batch.sampling import SamplingRows
from jaxsgl.cache.pages import IntArray, PageTable, pages_for
from jaxsgl.engine.engine import Engine
from jaxsgl.errors import ConfigError
from jaxsgl.requests.request import SamplingParams

GREEDY = SamplingParams(temperature=0.0)
STEPS = "BENCH_STEPS"  # variable of the environment: what a variant of bench step measures, as JSON


@dataclass(frozen=True)
class Seq:
    """A sequence in a step.

    Attributes:
      new: tokens that the step computes.
      cached: tokens before them, whose KV is in the cache.
      shared: how many of the cached tokens lie in pages of the sequence `leader`.
      leader: place in the step of the sequence that owns the shared pages.
    """

    new: int
    cached: int
    shared: int = 0
    leader: int = 0

    @property
    def length(self) -> int:
        """Tokens after the step."""
        return self.new + self.cached


def parse_step(text: str) -> list[Seq]:
    """Reads COUNTxNEW+CACHED@SHARED:GROUP; + and @ may be missing, and a comma joins several such parts.

    32x1+499@384:4 is 32 sequences with 1 new token behind 499 cached ones; each four of them share the first 384.

    Raises:
      ConfigError: the text is no such step, or shares more tokens than are cached.
    """
    seqs: list[Seq] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)x(\d+)(?:\+(\d+))?(?:@(\d+):(\d+))?", part)
        if not match:
            raise ConfigError(f"{part!r} is no step: write COUNTxNEW+CACHED@SHARED:GROUP, as 32x1+499@384:4 or 1x512")
        count, new, cached, shared, group = (int(number or 0) for number in match.groups())
        if new < 1 or shared > cached:
            raise ConfigError(f"{part!r} has {new} new tokens and shares {shared} of {cached}: 1 and more, and no more")
        first = len(seqs)
        seqs += [Seq(new, cached, shared, first + i // group * group if group else first + i) for i in range(count)]
    return seqs


def build_step(
    engine: Engine, seqs: Sequence[Seq], params: SamplingParams, rng: np.random.Generator, *, decode: bool
) -> StepInputs:
    """A step of all `seqs`, sequence i in row i. With `decode`, each sequence has one new token."""
    capacity = engine.capacity
    sampling = SamplingRows(capacity.num_rows)
    for row in range(len(seqs)):
        sampling.set(row, params, seed=row)
    table = unsent_table(page_tables(capacity, seqs, rng))
    builder = BatchBuilder(engine.buckets, table, sampling, capacity.page_size)
    if decode:
        return builder.decode(np.arange(len(seqs), dtype=np.int32), np.array([seq.cached for seq in seqs], np.int32))
    return builder.extend(
        [Work(row, np.ones(seq.new, np.int32), seq.cached, sample=True) for row, seq in enumerate(seqs)]
    )


def unsent_table(pages: IntArray) -> PageTable:
    """A page table `[rows, P]` of which the device knows nothing."""
    table = PageTable(*pages.shape)
    for row, entries in enumerate(pages):
        table.put(row, 0, entries)
    return table


def first_run(engine: Engine, inputs: StepInputs) -> StepInputs:
    """Runs a step of `build_step`. Returns it as it is while the device's page table has the pages of its sequences."""
    engine.submit(inputs).tokens()
    return replace(inputs, table_changes=())


def page_tables(capacity: Capacity, seqs: Sequence[Seq], rng: np.random.Generator) -> IntArray:
    """Page tables `[rows, P]`. If the pool is too small, some pages stand twice; the step takes as long with them."""
    needed = [pages_for(seq.length, capacity.page_size) for seq in seqs]
    pages = rng.permutation(np.arange(1, capacity.num_pages, dtype=np.int32))
    pages = np.resize(pages, sum(needed))
    tables = np.zeros((capacity.num_rows, capacity.max_pages_per_seq), dtype=np.int32)
    for row, mine in enumerate(np.split(pages, np.cumsum(needed)[:-1])):
        shared = seqs[row].shared // capacity.page_size
        tables[row, : len(mine)] = mine
        tables[row, :shared] = tables[seqs[row].leader, :shared]
    return tables
