"""Builds the steps of several ranks: `RankBuilder` for one rank's part, `JointBuilder` for the step of all.

A step in which all ranks decode is filled for all of them at once, so that it costs the host little more than a step of
one rank: a rank only says which rows it decodes (`RankDecodes`), and the page tables and sampling rows of the ranks are
parts of arrays `[R, ...]`. Any other step is built rank by rank, and `joint.py` puts the batches together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from jaxsgl.batch.build import BatchBuilder
from jaxsgl.batch.inputs import Bucket, StepInputs, unpack_ranks
from jaxsgl.batch.joint import as_part, common_bucket, in_one, joined, nothing
from jaxsgl.batch.sampling import COLUMNS, EDITS, LOGPROBS, STATES, variant_of
from jaxsgl.cache.pages import IntArray, page_of, slots_on

NOT_BUILT: IntArray = np.empty(0, np.int32)


@dataclass(frozen=True, kw_only=True)
class RankDecodes(StepInputs):
    """What one rank decodes, a token of each sequence. It is built with the other ranks' batches: `packed` is empty.

    Attributes:
      rows, positions, token_ids: `[S]`; see `BatchBuilder.decode`.
      builder: builds it alone.
    """

    rows: IntArray
    positions: IntArray
    token_ids: IntArray | None
    builder: BatchBuilder

    def alone(self) -> StepInputs:
        """The batch as the rank would launch it alone."""
        inputs = self.builder.decode(self.rows, self.positions, None, self.token_ids)
        return replace(inputs, table_changes=self.table_changes)


class RankBuilder:
    """Builds the batches of one rank; see `scheduler/apply.py`."""

    def __init__(self, builder: BatchBuilder) -> None:
        self._builder = builder
        self.extend, self.verify = builder.extend, builder.verify

    def decode(
        self, rows: IntArray, positions: IntArray, steps: IntArray | None = None, token_ids: IntArray | None = None
    ) -> StepInputs:
        """See `BatchBuilder.decode`; ranks take no several steps at once."""
        assert steps is None
        builder = self._builder
        return RankDecodes(
            builder.buckets.decode(len(rows)),
            NOT_BUILT,
            len(rows),
            len(rows),
            table_changes=builder.table_changes(rows),
            masked=builder.sampling.any_masked(rows),
            rows=rows,
            positions=positions,
            token_ids=token_ids,
            builder=builder,
        )


class JointBuilder:
    """Makes one step of the ranks' batches.

    Args:
      builders: of the ranks, by their numbers; of equal sizes.
      vocab_size: V.

    Attributes:
      of_ranks: builds each rank's batch from now on.
    """

    def __init__(self, builders: Sequence[BatchBuilder], vocab_size: int) -> None:
        self.of_ranks = [RankBuilder(builder) for builder in builders]
        first, ranks = builders[0], len(builders)
        rows, places = first.table.pages.shape
        self._buckets, self._page_size = first.buckets, first.page_size
        self._num_rows, self._vocab_size = rows, vocab_size
        self._pages: IntArray = np.zeros((ranks, rows + 1, places), np.int32)  # the dummy row has dummy pages
        self._bits: IntArray = np.zeros((ranks, len(COLUMNS), rows + 1), np.int32)
        self._needs = np.zeros((ranks, rows + 1), np.uint8)
        for rank, builder in enumerate(builders):
            builder.table.move_to(self._pages[rank, :rows])
            builder.sampling.move_to(self._bits[rank], self._needs[rank])
        self._borders = [builder.borders for builder in builders if builder.borders is not None]
        self._ranks = np.arange(ranks)[:, None]

    def step(self, batches: Sequence[StepInputs | None]) -> StepInputs:
        """The step of `batches`, by rank, in the smallest bucket that holds all; None: the rank has nothing to do."""
        decodes = [batch for batch in batches if isinstance(batch, RankDecodes)]
        if len(decodes) + batches.count(None) == len(batches):
            inputs = self._decode(batches, decodes)
            if inputs is not None:
                return inputs
        built = [batch.alone() if isinstance(batch, RankDecodes) else batch for batch in batches]
        bucket = common_bucket(self._buckets, [batch for batch in built if batch is not None])
        return joined(bucket, built, self._num_rows, self._vocab_size)

    def _decode(self, batches: Sequence[StepInputs | None], decodes: Sequence[RankDecodes]) -> StepInputs | None:
        """The step of ranks that all decode; None if it needs more than the fields that are filled here."""
        if self._buckets.rope_axes:
            return None
        n = max(batch.num_seqs for batch in decodes)
        rows = np.full((len(batches), n), self._num_rows, np.int32)
        positions = np.zeros_like(rows)
        ids = np.zeros_like(rows)
        counts = [0] * len(batches)
        for rank, batch in enumerate(batches):
            if isinstance(batch, RankDecodes):
                counts[rank] = count = batch.num_seqs
                rows[rank, :count], positions[rank, :count] = batch.rows, batch.positions
                ids[rank, :count] = ~batch.rows if batch.token_ids is None else batch.token_ids
        needs = int(np.bitwise_or.reduce(self._needs[self._ranks, rows], axis=None))
        if needs & (EDITS | LOGPROBS | STATES):
            return None
        bucket = self._buckets.joint(self._buckets.decode(n, variant_of(needs)), sum(counts))
        if self._buckets.index_covers:
            bucket = self._buckets.for_longest(bucket, int(positions.max()) + 1)
        packed = self._filled(bucket, rows, positions, ids, np.array(counts, np.int32))
        parts = [as_part(batch, bucket, own) for batch, own in zip(batches, packed, strict=True)]
        return in_one(bucket, packed, parts, None, self._num_rows, self._vocab_size)

    def _filled(self, bucket: Bucket, rows: IntArray, positions: IntArray, ids: IntArray, counts: IntArray) -> IntArray:
        """`[R, packed_len(bucket)]`, of `[R, n]` each; where a rank has fewer, the dummy row at position 0."""
        packed = np.tile(nothing(bucket, self._num_rows, self._vocab_size).packed, (len(rows), 1))
        arrays, n = unpack_ranks(packed, bucket), rows.shape[1]
        arrays.token_ids[:, :n] = ids
        arrays.positions[:, :n] = positions
        arrays.lengths[:, :n] = np.where(rows < self._num_rows, positions + 1, 0)
        arrays.query_offsets[:] = np.minimum(np.arange(bucket.num_seqs + 1), counts[:, None])
        arrays.rows[:, :n] = arrays.sample_rows[:, :n] = rows
        pages = self._pages[self._ranks, rows, page_of(positions, self._page_size)]
        arrays.slots[:, :n] = slots_on(pages, positions, self._page_size)
        if arrays.snapshot_to is not None and self._borders:
            arrays.snapshot_to[:, :n] = np.stack(self._borders)[self._ranks, rows]
        if bucket.sampled:
            arrays.sampling[:, :, :n] = np.take_along_axis(self._bits, rows[:, None], axis=2)
        packed.flags.writeable = False
        return packed
