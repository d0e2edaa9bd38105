"""The step that is filled for all ranks at once is the one that is put together of the batches of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace

import numpy as np
import pytest

from jaxsgl.batch.buckets import BucketSet, Capacity
from jaxsgl.batch.build import BatchBuilder, Work
from jaxsgl.batch.inputs import StepInputs, unpack
from jaxsgl.batch.joint import common_bucket, joined
from jaxsgl.batch.joint_builder import JointBuilder
from jaxsgl.batch.sampling import SamplingArrays, SamplingRows
from jaxsgl.cache.pages import IntArray, PageTable
from jaxsgl.requests.request import SamplingParams

RANKS, ROWS, PAGES = 3, 6, 8
SIZES = Capacity(page_size=4, num_pages=40, num_rows=ROWS, context_length=32, max_extend_tokens=32, vocab_size=100)
BUCKETS = BucketSet.derive(SIZES, num_ranks=RANKS)
WITH_INDEX = BucketSet.derive(replace(SIZES, index_covers=20), num_ranks=RANKS)
WITH_STATES = BucketSet.derive(replace(SIZES, num_snapshots=4), num_ranks=RANKS)
GREEDY = SamplingParams(temperature=0.0)
TEMPERATURE = [field.name for field in fields(SamplingArrays)].index("temperature")
DRAWN = SamplingParams(temperature=0.7, top_p=0.9, top_k=5)


def builders(
    seed: int, asked: Sequence[SamplingParams] = (GREEDY,), buckets: BucketSet = BUCKETS
) -> list[BatchBuilder]:
    """Of ranks with random pages, whose rows have what is `asked`, in turns; some states are kept, if any are."""
    rng, made = np.random.default_rng(seed), []
    for _ in range(RANKS):
        table, sampling = PageTable(ROWS, PAGES), SamplingRows(ROWS)
        table.pages[:] = rng.integers(1, 40, table.pages.shape)
        for row in range(ROWS):
            sampling.set(row, asked[row % len(asked)], seed=int(rng.integers(2**32)))
        borders = np.where(rng.random(ROWS + 1) < 0.5, rng.integers(7, 11, ROWS + 1), ROWS).astype(np.int32)
        borders[ROWS] = ROWS
        made.append(BatchBuilder(buckets, table, sampling, page_size=4, borders=borders if buckets.snapshots else None))
    return made


def put_together(
    seed: int, asked: Sequence[SamplingParams], counts: Sequence[int], buckets: BucketSet
) -> tuple[StepInputs, StepInputs]:
    """The step of ranks that decode so many sequences: of their own batches, and filled at once."""
    rng = np.random.default_rng(seed)
    rows = [rng.permutation(ROWS)[:count].astype(np.int32) for count in counts]
    positions = [rng.integers(0, 32, count).astype(np.int32) for count in counts]
    alone = [
        builder.decode(*parts) if len(parts[0]) else None
        for builder, *parts in zip(builders(seed, asked, buckets), rows, positions, strict=True)
    ]
    bucket = common_bucket(buckets, [batch for batch in alone if batch is not None])
    joint = JointBuilder(builders(seed, asked, buckets), SIZES.vocab_size)
    said = [
        builder.decode(*parts) if len(parts[0]) else None
        for builder, *parts in zip(joint.of_ranks, rows, positions, strict=True)
    ]
    return joined(bucket, alone, ROWS, SIZES.vocab_size), joint.step(said)


def said_of(part: StepInputs) -> IntArray:
    """Its numbers; those by which a greedy row would be drawn are not looked at."""
    packed = part.packed.copy()
    sampling = unpack(packed, part.bucket).sampling
    sampling[:, sampling[TEMPERATURE] == 0] = 0
    return packed


@pytest.mark.parametrize("buckets", [BUCKETS, WITH_INDEX, WITH_STATES])
@pytest.mark.parametrize("asked", [(GREEDY,), (DRAWN,), (GREEDY, DRAWN), (GREEDY, SamplingParams(logprobs=2))])
@pytest.mark.parametrize("counts", [(1, 1, 1), (6, 6, 6), (2, 0, 5), (0, 0, 1)])
def test_a_step_filled_at_once_is_that_of_the_batches_of_each_rank(
    asked: Sequence[SamplingParams], counts: Sequence[int], buckets: BucketSet
) -> None:
    for seed in range(5):
        one_by_one, at_once = put_together(seed, asked, counts, buckets)
        assert at_once.bucket == one_by_one.bucket
        for alone, part in zip(one_by_one.of_ranks, at_once.of_ranks, strict=True):
            assert np.array_equal(said_of(part), said_of(alone))
        assert (at_once.num_seqs, at_once.num_tokens) == (sum(counts), sum(counts))
        assert [part.num_seqs for part in at_once.of_ranks] == list(counts)
        assert all(part.bucket == at_once.bucket for part in at_once.of_ranks)
        assert not at_once.packed.flags.writeable


def test_a_rank_that_decodes_next_to_one_that_extends_computes_chunks_of_one() -> None:
    joint = JointBuilder(builders(0), SIZES.vocab_size)
    ids = np.array([7, 8, 9], np.int32)
    first = joint.of_ranks[0].extend([Work(2, ids, 4, sample=True)])
    second = joint.of_ranks[1].decode(np.array([1, 5], np.int32), np.array([9, 3], np.int32))
    step = joint.step([first, second, None])
    assert step.bucket.kind == "extend" and [part.num_tokens for part in step.of_ranks] == [3, 2, 0]
    arrays = step.of_ranks[1].arrays
    assert arrays.token_ids[:2].tolist() == [~1, ~5]
    assert arrays.lengths[:2].tolist() == [10, 4]
    assert arrays.query_offsets[:3].tolist() == [0, 1, 2]


def test_pages_of_other_requests_are_sent_once() -> None:
    of_ranks = builders(0)
    joint = JointBuilder(of_ranks, SIZES.vocab_size)
    table = of_ranks[1].table
    table.put(3, 0, np.array([11, 12], np.int32))
    rows, positions = np.array([3], np.int32), np.array([8], np.int32)
    batch = joint.of_ranks[1].decode(rows, positions)
    table.sent([3])
    step = joint.step([None, batch, None])
    (changes,) = step.table_changes
    width = changes.shape[1] // RANKS
    assert changes[:, width : width + 2].tolist() == [[3, 3], [0, 1], [11, 12]]
    assert (changes[0, :width] == ROWS).all() and (changes[0, 2 * width :] == ROWS).all()
