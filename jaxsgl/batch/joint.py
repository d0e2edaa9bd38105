"""One step of several ranks: each has built its own batch, and all of them go into one bucket, which one program runs.

Ranks decide alone what they compute (`scheduler/ranks.py`), so their batches differ in kind and size. The step has the
smallest bucket that holds each of them: it extends if any rank does, and a rank that decodes then computes its tokens
as chunks of one. A rank without work is padding. What ranks compute alone is padded to the largest batch; MLPs, which
compute the tokens of all ranks, only to the sum of the batches (`Bucket.mlp_tokens`). Each array that goes to the
device is those of the ranks one after the other, of equal lengths, so that a device gets its rank's part. Never knows
requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from functools import cache
from itertools import zip_longest
from typing import Any

import numpy as np
import numpy.typing as npt

from jaxsgl.batch.buckets import BucketSet
from jaxsgl.batch.build import empty_step
from jaxsgl.batch.inputs import Bucket, StepArrays, StepFeatures, StepInputs, unpack
from jaxsgl.batch.sampling import Variant, neutral_edits, row_setup
from jaxsgl.cache.pages import IntArray


def common_bucket(buckets: BucketSet, batches: Sequence[StepInputs]) -> Bucket:
    """The smallest of `buckets` that holds each of `batches` and their sum; there is at least one.

    They take one step, verify nothing, and have neither adapters nor images.
    """
    of_batches = {batch.bucket for batch in batches}
    kinds = {bucket.kind for bucket in of_batches}
    pools, states, chooses = (
        any(getattr(bucket, name) for bucket in of_batches) for name in ("pools", "states", "chooses")
    )
    variant = Variant(*(any(getattr(bucket, name) for bucket in of_batches) for name in Variant._fields))
    num_tokens, num_seqs = (max(getattr(batch, name) for batch in batches) for name in ("num_tokens", "num_seqs"))
    if kinds == {"decode"}:
        bucket = buckets.decode(num_seqs, variant)
    elif "score" in kinds:
        bucket = buckets.score(num_tokens, variant)
    elif pools:
        bucket = buckets.pool(num_tokens, num_seqs, variant)
    else:
        bucket = buckets.extend(num_tokens, num_seqs, variant)
    bucket = buckets.joint(bucket, sum(batch.num_tokens for batch in batches))
    return replace(bucket, states=states, chooses=chooses) if states or chooses else bucket


def joined(bucket: Bucket, batches: Sequence[StepInputs | None], num_rows: int, vocab_size: int) -> StepInputs:
    """The step of all ranks in `bucket`; of a rank without a batch it computes nothing.

    Args:
      bucket: holds each of the batches, see `common_bucket`.
      batches: by rank.
      num_rows: of each rank.
      vocab_size: V.
    """
    of_rank = replace(bucket, mlp_tokens=0)
    packed = np.tile(nothing(bucket, num_rows, vocab_size).packed, (len(batches), 1))
    for batch, own in zip(batches, packed, strict=True):
        if batch is not None and batch.bucket == of_rank:
            own[:] = batch.packed
        elif batch is not None:
            _widen(batch, bucket, own, num_rows)
    packed.flags.writeable = False
    parts = [as_part(batch, bucket, own) for batch, own in zip(batches, packed, strict=True)]
    features = None
    if bucket.featured:
        parts = _with_features(parts, num_rows)
        features = _together([part.features for part in parts if part.features], num_rows, vocab_size)
    return in_one(bucket, packed, parts, features, num_rows, vocab_size)


def as_part(batch: StepInputs | None, bucket: Bucket, packed: IntArray) -> StepInputs:
    """`batch` as a rank's part of the step in `bucket`; None: the rank computes nothing."""
    if batch is None:
        return StepInputs(bucket, packed, num_seqs=0, num_tokens=0)
    return StepInputs(
        bucket, packed, batch.num_seqs, batch.num_tokens, batch.features, batch.table_changes, batch.masked
    )


def in_one(
    bucket: Bucket,
    packed: IntArray,
    parts: Sequence[StepInputs],
    features: StepFeatures | None,
    num_rows: int,
    vocab_size: int,
) -> StepInputs:
    """The step of all ranks, of their `parts` of `packed [R, packed_len(bucket)]`."""
    changes = [part.table_changes for part in parts]
    neutral = nothing(bucket, num_rows, vocab_size).table_changes[0]
    return StepInputs(
        bucket,
        packed.reshape(-1),
        num_seqs=sum([part.num_seqs for part in parts]),
        num_tokens=sum([part.num_tokens for part in parts]),
        features=features,
        table_changes=_side_by_side(changes, neutral, axis=1) if any(changes) else (),
        masked=any(part.masked for part in parts),
        of_ranks=tuple(parts),
    )


@cache
def nothing(bucket: Bucket, num_rows: int, vocab_size: int) -> StepInputs:
    """A rank's part of a step in which it computes nothing."""
    return empty_step(bucket, num_rows, vocab_size)


def _widen(batch: StepInputs, bucket: Bucket, packed: npt.NDArray[np.int32], dummy_row: int) -> None:
    """Writes the fields of `batch` into `packed`, which is padding of `bucket`; what does not fit is padding."""
    own, wide = batch.arrays, unpack(packed, bucket)
    wide.query_offsets[:] = batch.num_tokens
    if own.token_rows is None and wide.token_rows is not None:  # it decodes, the step does not
        wide.token_rows[: batch.num_tokens] = own.rows[: batch.num_tokens]
        own = _states_of_chunks(own, wide, dummy_row)
    for field in fields(own):
        array, into = getattr(own, field.name), getattr(wide, field.name)
        if array is not None:
            part = tuple(slice(min(sizes)) for sizes in zip(array.shape, into.shape, strict=True))
            into[part] = array[part]


def _states_of_chunks(own: StepArrays[Any], wide: StepArrays[Any], dummy_row: int) -> StepArrays[Any]:
    """The fields of a batch that decodes as those of chunks of one token: where states begin and are kept."""
    if own.snapshot_to is None:
        return own
    assert wide.snapshot_at is not None and wide.snapshot_to is not None
    at, to = (np.full((len(wide.snapshot_at), len(own.rows)), value, np.int32) for value in (0, dummy_row))
    at[0], to[0] = own.snapshot_to != dummy_row, own.snapshot_to
    return replace(own, state_from=own.rows, snapshot_at=at, snapshot_to=to)


def _with_features(parts: Sequence[StepInputs], num_rows: int) -> list[StepInputs]:
    """`parts` of a featured bucket, with the dummy row for sequences that edit nothing, and scored if any is."""
    logprobs = any(part.features is not None and part.features.logprobs for part in parts)
    completed = []
    for part in parts:
        edit_rows = np.full(part.bucket.num_choices, num_rows, np.int32)
        if part.features is not None:
            edit_rows[: part.num_choices] = part.features.edit_rows[: part.num_choices]
        edit_rows.flags.writeable = False
        setups = () if part.features is None else part.features.row_setups
        completed.append(replace(part, features=StepFeatures(edit_rows, setups, logprobs)))
    return completed


def _together(of_ranks: Sequence[StepFeatures], num_rows: int, vocab_size: int) -> StepFeatures:
    edit_rows = np.concatenate([features.edit_rows for features in of_ranks])
    edit_rows.flags.writeable = False
    setups = [features.row_setups for features in of_ranks]
    return StepFeatures(
        edit_rows, _side_by_side(setups, _neutral_setup(num_rows, vocab_size), axis=0), of_ranks[0].logprobs
    )


@cache
def _neutral_setup(num_rows: int, vocab_size: int) -> IntArray:
    """Changes nothing of the edit tables but the dummy row."""
    return row_setup(num_rows, neutral_edits(), np.zeros(vocab_size, np.int32))


def _side_by_side(
    of_ranks: Sequence[tuple[npt.NDArray[Any], ...]], neutral: npt.NDArray[Any], axis: int
) -> tuple[npt.NDArray[Any], ...]:
    """The first arrays of all ranks in one, then the second ones, ..., with `neutral` where a rank has no more."""
    found = []
    for arrays in zip_longest(*of_ranks, fillvalue=neutral):
        together = np.concatenate(arrays, axis=axis)
        together.flags.writeable = False
        found.append(together)
    return tuple(found)
