"""Pads what the scheduler decided into the fixed shapes of a bucket. Sees small values, never a scheduler's request.

Padding tokens read and write the dummy page; padding sequences have length 0 and sample into the dummy row. The
scheduler calls it once per step. It reads the page table and changes nothing: whether a batch is launched is decided
later.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np

from jaxsgl.batch.buckets import BucketSet
from jaxsgl.batch.inputs import (
    TABLE_CHANGES,
    Bucket,
    StepArrays,
    StepFeatures,
    StepInputs,
    packed_len,
    unpack,
)
from jaxsgl.batch.sampling import NEUTRAL_BITS, AdapterRows, SamplingRows, neutral_edits, row_setup
from jaxsgl.cache.pages import DUMMY_PAGE, IntArray, PageTable, slots_at, slots_of
from jaxsgl.requests.outputs import Pooling


@dataclass(frozen=True, slots=True)
class Work:
    """Part of a sequence to extend.

    Attributes:
      row: row of the sequence.
      token_ids: `[n]` the tokens to compute, at positions start .. start + n - 1.
      start: tokens before them, whose KV is stored or in flight.
      sample: whether the last of them yields the sequence's next token (not so for a chunk that isn't the last).
      targets: `[n]` the prompt token that follows each of them, if its log-probability is wanted.
      setup: what must be in the row's edit tables before the row samples for the first time, if it edits logits.
      pooling: what the request asks for, if hidden states of these tokens are to be pooled.
      rope_positions: `[3, n]` of the tokens, where they differ from their indices.
      pool_rows: `[n]` where the embeddings of images' tokens are, 0 for text; None: there are no images.
      seen: `[n]` of how many tokens, from the sequence's first, each sees none after; None: of those up to itself.
      states: whether what is computed for these tokens is wanted.
      state_from: the place of the snapshot at which they begin; None: the row itself.
      snapshots: (tokens, place) of each state to keep: after how many tokens of the chunk, and where.
    """

    row: int
    token_ids: IntArray
    start: int
    sample: bool
    targets: IntArray | None = None
    setup: IntArray | None = None
    pooling: Pooling | None = None
    rope_positions: IntArray | None = None
    pool_rows: IntArray | None = None
    seen: IntArray | None = None
    states: bool = False
    state_from: int | None = None
    snapshots: tuple[tuple[int, int], ...] = ()


def _rows_and_counts(works: Sequence[Work]) -> tuple[IntArray, list[int]]:
    """The row of each of `works`, and its tokens."""
    return np.array([work.row for work in works], dtype=np.int32), [len(work.token_ids) for work in works]


def empty_step(bucket: Bucket, num_rows: int, vocab_size: int) -> StepInputs:
    """A step of padding only, which runs the programs of `bucket` and writes the dummy page and the dummy row only."""
    packed, features = _empty(bucket, num_rows), None
    if bucket.featured:
        neutral = row_setup(num_rows, neutral_edits(), np.zeros(vocab_size, np.int32))
        edit_rows = np.full(bucket.num_choices, num_rows, np.int32)
        features = StepFeatures(edit_rows, row_setups=(neutral,), logprobs=True)
    changes = _table_changes(np.array([[num_rows], [0], [DUMMY_PAGE]], dtype=np.int32), num_rows)
    return StepInputs(bucket, packed, num_seqs=0, num_tokens=0, features=features, table_changes=changes)


def _padding(bucket: Bucket, dummy_row: int) -> tuple[IntArray, StepArrays[Any]]:
    """A new buffer of padding only; the device may still be reading the last one."""
    packed = _empty(bucket, dummy_row).copy()
    return packed, unpack(packed, bucket)


@cache
def _empty(bucket: Bucket, dummy_row: int) -> IntArray:
    """The buffer of a step without sequences."""
    packed = np.zeros(packed_len(bucket), dtype=np.int32)
    arrays = unpack(packed, bucket)
    arrays.rows[:] = arrays.sample_rows[:] = dummy_row
    if arrays.token_rows is not None:
        arrays.token_rows[:] = dummy_row
    for places in (arrays.state_from, arrays.snapshot_to):
        if places is not None:
            places[:] = dummy_row
    arrays.sampling[:] = NEUTRAL_BITS[:, None]
    packed.flags.writeable = False
    return packed


def _table_changes(entries: IntArray, dummy_row: int) -> tuple[IntArray, ...]:
    """`entries [3, n]` of the page table in arrays of one size."""
    parts = []
    for first in range(0, entries.shape[1], TABLE_CHANGES):
        part = entries[:, first : first + TABLE_CHANGES]
        padded = np.zeros((3, TABLE_CHANGES), dtype=np.int32)
        padded[0] = dummy_row
        padded[:, : part.shape[1]] = part
        padded.flags.writeable = False
        parts.append(padded)
    return tuple(parts)


def _fill_rope(arrays: StepArrays[Any], part: slice, work: Work) -> None:
    """Writes what queries and keys of a sequence's tokens turn with, and where images' embeddings are."""
    assert arrays.rope_positions is not None
    positions = arrays.positions[part] if work.rope_positions is None else work.rope_positions
    if arrays.pool_rows is None:
        arrays.rope_positions[part] = positions if positions.ndim == 1 else positions[0]
        return
    arrays.rope_positions[:, part] = positions
    if work.pool_rows is not None:
        arrays.pool_rows[part] = work.pool_rows


def _fill_states(arrays: StepArrays[Any], s: int, work: Work) -> None:
    """Writes where the state of sequence s begins, and where it is kept on the way."""
    assert arrays.state_from is not None and arrays.snapshot_at is not None and arrays.snapshot_to is not None
    arrays.state_from[s] = work.row if work.state_from is None else work.state_from
    for i, (num_tokens, place) in enumerate(work.snapshots):
        arrays.snapshot_at[i, s], arrays.snapshot_to[i, s] = num_tokens, place


class BatchBuilder:
    """Builds `StepInputs` from what it has as attributes; all of it is the scheduler's.

    So are `adapters`, and `borders` of states by row (`scheduler/resources/states.py`); None: there are none.
    """

    def __init__(
        self,
        buckets: BucketSet,
        table: PageTable,
        sampling: SamplingRows,
        page_size: int,
        adapters: AdapterRows | None = None,
        borders: IntArray | None = None,
    ) -> None:
        self.buckets = buckets
        self.table = table
        self.sampling = sampling
        self.page_size = page_size
        self._adapters = adapters
        self.borders = borders
        self._dummy_row = len(table.pages)

    def decode(
        self, rows: IntArray, positions: IntArray, steps: IntArray | None = None, token_ids: IntArray | None = None
    ) -> StepInputs:
        """Decodes one token for each row `[S]`: the row's last sampled token, which goes to `positions [S]`.

        These are `token_ids [S]`, where ~row stands for one that only the device knows; None: all are such.
        With `steps [S]`, uses the program of several steps: each row takes that many, and its pages must reach as far.
        """
        n = len(rows)
        num_steps = 1 if steps is None else self.buckets.decode_steps
        variant = self.sampling.variant(rows)
        columns = self._columns(rows)
        bucket = self.buckets.decode(n, variant, num_steps=num_steps, columns=columns)
        if self.buckets.states and num_steps == 1 and self.sampling.any_states(rows):
            bucket = replace(bucket, states=True)
        if self.buckets.index_covers:
            bucket = self.buckets.for_longest(bucket, int(positions.max()) + num_steps)
        packed, arrays = _padding(bucket, self._dummy_row)
        arrays.token_ids[:n] = ~rows if token_ids is None else token_ids
        arrays.positions[:n] = positions
        if arrays.rope_positions is not None:
            arrays.rope_positions[:n] = positions + self.sampling.rope_deltas[rows]
        arrays.lengths[:n] = positions + 1
        arrays.query_offsets[:] = np.minimum(np.arange(bucket.num_seqs + 1), n)
        arrays.rows[:n] = arrays.sample_rows[:n] = rows
        if arrays.snapshot_to is not None and self.borders is not None:
            arrays.snapshot_to[:n] = self.borders[rows]
        if steps is None:
            arrays.slots[:n] = self._slots_at(rows, positions)
        else:
            assert arrays.steps is not None
            arrays.steps[:n] = steps
            step = np.arange(num_steps, dtype=np.int32)[:, None]
            takes_part = step < steps
            slots = self._slots_at(rows, np.where(takes_part, positions + step, 0))
            arrays.slots[:, :n] = np.where(takes_part, slots, 0)
        return self._finish(bucket, packed, arrays, rows, n if steps is None else int(steps.sum()), (), rows)

    def verify(self, works: Sequence[Work]) -> StepInputs:
        """Extends the sequences of `works` by their last known token and drafts, and chooses a token after each."""
        rows, counts = _rows_and_counts(works)
        bucket = self.buckets.verify(sum(counts), self.sampling.variant(rows), columns=self._columns(rows))
        if self.buckets.states and self.sampling.any_states(rows):
            bucket = replace(bucket, states=True)
        return self._filled(bucket, works, rows, counts, np.repeat(rows, counts))

    def extend(self, works: Sequence[Work]) -> StepInputs:
        """Extends the sequences of `works` by their tokens, in the order of `works`."""
        rows, counts = _rows_and_counts(works)
        num_tokens = sum(counts)
        sampling_rows = rows[[work.sample for work in works]]
        variant = self.sampling.variant(sampling_rows)
        columns = self._columns(rows)
        if any(work.targets is not None for work in works):
            bucket = self.buckets.score(num_tokens, variant, columns=columns)
        elif not self.buckets.generates or any(work.pooling is not None for work in works):
            bucket = self.buckets.pool(num_tokens, len(works), variant, columns=columns)
        else:
            bucket = self.buckets.extend(num_tokens, len(works), variant, columns=columns)
        if any(work.pool_rows is not None for work in works):
            bucket = self.buckets.with_images(bucket)
        if self.buckets.states and (any(work.states for work in works) or self.sampling.any_states(sampling_rows)):
            bucket = replace(bucket, states=True)
        return self._filled(bucket, works, rows, counts, rows)

    def _filled(
        self, bucket: Bucket, works: Sequence[Work], rows: IntArray, counts: Sequence[int], choosers: IntArray
    ) -> StepInputs:
        """The batch of `works`, in `bucket`; `choosers` are the rows of the tokens to choose."""
        num_tokens = sum(counts)
        if self.buckets.index_covers:
            longest = max(work.start + count for work, count in zip(works, counts, strict=True))
            bucket = self.buckets.for_longest(bucket, longest)
        packed, arrays = _padding(bucket, self._dummy_row)
        assert arrays.token_rows is not None
        arrays.rows[: len(works)] = rows
        arrays.token_rows[:num_tokens] = np.repeat(rows, counts)
        offset = 0
        for s, (work, count) in enumerate(zip(works, counts, strict=True)):
            stop, end = work.start + count, offset + count
            arrays.token_ids[offset:end] = work.token_ids
            arrays.positions[offset:end] = np.arange(work.start, stop)
            arrays.slots[offset:end] = slots_of(self.table.pages[work.row], work.start, stop, self.page_size)
            arrays.lengths[s] = stop
            arrays.query_offsets[s] = offset
            arrays.sample_rows[s] = work.row if work.sample else self._dummy_row
            if arrays.rope_positions is not None:
                _fill_rope(arrays, slice(offset, end), work)
            if arrays.seen is not None:
                arrays.seen[offset:end] = np.arange(work.start + 1, stop + 1) if work.seen is None else work.seen
            if arrays.state_from is not None:
                _fill_states(arrays, s, work)
            if work.targets is not None:
                assert arrays.targets is not None
                arrays.targets[offset:end] = work.targets
            if work.pooling is not None and work.pooling.label_ids:
                assert arrays.label_ids is not None
                arrays.label_ids[s, : len(work.pooling.label_ids)] = work.pooling.label_ids
            offset = end
        arrays.query_offsets[len(works) :] = offset
        return self._finish(bucket, packed, arrays, rows, num_tokens, works, choosers)

    def _columns(self, rows: IntArray) -> int:
        """The columns of the adapters' pool that the sequences of `rows` need, from the first."""
        return 0 if self._adapters is None else self._adapters.columns_of(rows)

    def _slots_at(self, rows: IntArray, positions: IntArray) -> IntArray:
        return slots_at(self.table.pages, rows, positions, self.page_size)

    def _finish(
        self,
        bucket: Bucket,
        packed: IntArray,
        arrays: StepArrays[Any],
        rows: IntArray,
        num_tokens: int,
        works: Sequence[Work],
        choosers: IntArray,
    ) -> StepInputs:
        if bucket.sampled:
            arrays.sampling[:, : len(choosers)] = self.sampling.bits(choosers)
        if bucket.adapter_columns:
            assert self._adapters is not None and arrays.adapters is not None and arrays.column_owners is not None
            token_rows = arrays.rows if arrays.token_rows is None else arrays.token_rows
            arrays.adapters[:] = self._adapters.number_of_row[token_rows]
            arrays.column_owners[:] = self._adapters.column_owners[: bucket.adapter_columns]
        chosen_for = arrays.sample_rows
        if bucket.kind == "verify":
            assert arrays.token_rows is not None
            chosen_for = arrays.token_rows
        features = self._features(chosen_for, works) if bucket.featured else None
        packed.flags.writeable = False
        masked = bucket.sampled and self.sampling.any_masked(arrays.sample_rows)
        return StepInputs(bucket, packed, len(rows), num_tokens, features, self.table_changes(rows), masked)

    def table_changes(self, rows: IntArray) -> tuple[IntArray, ...]:
        """`StepInputs.table_changes` of a batch of `rows`."""
        return _table_changes(self.table.unsent(rows), self._dummy_row)

    def _features(self, sample_rows: IntArray, works: Sequence[Work]) -> StepFeatures:
        """A sequence whose token is dropped has the dummy row already, and so edits and counts nothing."""
        edit_rows = self.sampling.edit_rows(sample_rows)
        row_setups = tuple(work.setup for work in works if work.setup is not None)
        for array in (edit_rows, *row_setups):
            array.flags.writeable = False
        return StepFeatures(edit_rows, row_setups, self.sampling.any_logprobs(sample_rows))
