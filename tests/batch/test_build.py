from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from jaxsgl.batch.buckets import BucketSet, Capacity
from jaxsgl.batch.build import BatchBuilder, Work
from jaxsgl.batch.inputs import TABLE_CHANGES, Bucket, packed_len, unpack
from jaxsgl.batch.sampling import COLUMNS, SamplingRows
from jaxsgl.cache.pages import IntArray, PageTable
from jaxsgl.requests.request import SamplingParams
from tests.checked import arrays_of, sampling_of

SIZES = Capacity(page_size=4, num_pages=40, num_rows=6, context_length=24, max_extend_tokens=32, vocab_size=100)


def ids(*values: int) -> IntArray:
    return np.array(values, dtype=np.int32)


def table_of(pages: dict[int, list[int]]) -> PageTable:
    """A page table whose rows have these pages, all of their own."""
    table = PageTable(6, 6)
    for row, own in pages.items():
        table.pages[row, : len(own)] = own
    return table


def builder(table: PageTable | None = None, decode_steps: int = 1) -> BatchBuilder:
    table = table or table_of({2: [5, 9, 7], 4: [3, 8]})
    return BatchBuilder(BucketSet.derive(SIZES, decode_steps=decode_steps), table, SamplingRows(6), page_size=4)


def test_an_extend_batch_lays_sequences_end_to_end() -> None:
    inputs = builder().extend([Work(2, ids(11, 12, 13), 7, sample=True), Work(4, ids(21, 22), 0, sample=False)])
    arrays = inputs.arrays
    assert (inputs.bucket.num_tokens, inputs.bucket.num_seqs, inputs.num_tokens, inputs.num_seqs) == (16, 6, 5, 2)
    assert arrays.token_ids[:5].tolist() == [11, 12, 13, 21, 22]
    assert arrays.positions[:5].tolist() == [7, 8, 9, 0, 1]
    assert arrays.slots[:5].tolist() == [9 * 4 + 3, 7 * 4, 7 * 4 + 1, 12, 13]
    assert arrays.lengths.tolist() == [10, 2, 0, 0, 0, 0]
    assert arrays.query_offsets.tolist() == [0, 3, 5, 5, 5, 5, 5]
    assert arrays.token_rows is not None and arrays.token_rows.tolist() == [2, 2, 2, 4, 4, *[6] * 11]
    assert arrays.rows.tolist() == [2, 4, 6, 6, 6, 6]
    assert arrays.sample_rows.tolist() == [2, 6, 6, 6, 6, 6]  # row 6 is the dummy row


def test_a_decode_batch_takes_its_tokens_from_the_device() -> None:
    inputs = builder().decode(ids(4, 2, 4), ids(5, 11, 6))
    arrays = inputs.arrays
    assert (inputs.bucket.kind, inputs.bucket.num_seqs) == ("decode", 4)
    assert arrays.token_ids.tolist() == [~4, ~2, ~4, 0]
    assert arrays.positions.tolist() == [5, 11, 6, 0]
    assert arrays.slots.tolist() == [8 * 4 + 1, 7 * 4 + 3, 8 * 4 + 2, 0]
    assert arrays.lengths.tolist() == [6, 12, 7, 0]
    assert arrays.query_offsets.tolist() == [0, 1, 2, 3, 3]
    assert arrays.rows.tolist() == arrays.sample_rows.tolist() == [4, 2, 4, 6]


def test_a_decode_batch_of_several_steps_adds_only_the_steps_of_each_sequence() -> None:
    build = builder(table_of({4: [10, 11, 12], 2: [20, 21, 22], 1: [30, 31, 32]}), decode_steps=4)
    several, one = build.decode(ids(4, 2, 1), ids(5, 8, 6), ids(4, 1, 3)), build.decode(ids(4, 2, 1), ids(5, 8, 6))
    assert (several.bucket.num_steps, several.num_seqs, several.num_tokens) == (4, 3, 8)
    assert several.bucket == replace(one.bucket, num_steps=4)
    ours, plain = vars(several.arrays), vars(one.arrays)
    assert ours.pop("steps").tolist() == [4, 1, 3, 0] and plain.pop("steps") is None
    slots = ours.pop("slots")
    assert slots[0].tolist() == plain.pop("slots").tolist() == [11 * 4 + 1, 22 * 4, 31 * 4 + 2, 0]
    assert slots[1:].tolist() == [[46, 0, 127, 0], [47, 0, 128, 0], [48, 0, 0, 0]]
    assert [array.tolist() for array in ours.pop("sampling")] == [array.tolist() for array in plain.pop("sampling")]
    for name, array in ours.items():
        assert array is plain[name] is None or array.tolist() == plain[name].tolist(), name


def test_no_input_of_a_step_grows_with_the_context() -> None:
    """256 rows of 2,560 pages would be 2.6 MB for each decode step."""
    short, long = (
        [packed_len(bucket) for bucket in BucketSet.derive(Capacity(16, 3000, 256, context, 256, 1000)).all()]
        for context in (256, 40_960)
    )
    assert short == long and max(long) < 16 * 256


def test_pages_of_other_requests_are_sent_until_a_step_that_carries_them_is_launched() -> None:
    """A batch that is built and not launched, because a request failed, has sent nothing."""
    table = table_of({2: [5, 9, 7], 4: [3, 8]})
    build = builder(table)
    assert not build.decode(ids(4, 2), ids(5, 11)).table_changes
    table.put(4, 0, ids(9, 7))
    table.put(2, 1, ids(8))
    rows, works = (ids(4), ids(5)), [Work(2, ids(11), 11, sample=True), Work(4, ids(21), 7, sample=True)]
    for _ in range(2):
        (changes,) = build.decode(*rows).table_changes
        assert changes[:, :3].T.tolist() == [[4, 0, 9], [4, 1, 7], [6, 0, 0]], "row 2 is not in the batch"
        (changes,) = build.extend(works).table_changes
        assert changes[:, :4].T.tolist() == [[2, 1, 8], [4, 0, 9], [4, 1, 7], [6, 0, 0]]
    table.sent([4])
    assert not build.decode(*rows).table_changes
    (changes,) = build.extend(works).table_changes
    assert changes[:, :2].T.tolist() == [[2, 1, 8], [6, 0, 0]]


def test_more_changes_than_one_array_holds_go_in_several() -> None:
    table = PageTable(2, 2 * TABLE_CHANGES)
    pages = np.arange(1, TABLE_CHANGES + 8, dtype=np.int32)
    table.put(1, 3, pages)
    buckets = BucketSet.derive(replace(SIZES, num_rows=2))
    inputs = BatchBuilder(buckets, table, SamplingRows(2), page_size=4).decode(ids(1), ids(20))
    assert [changes.shape for changes in inputs.table_changes] == [(3, TABLE_CHANGES)] * 2
    rows, places, sent = np.concatenate(inputs.table_changes, axis=1)
    assert sent[: len(pages)].tolist() == pages.tolist() == (places[: len(pages)] - 2).tolist()
    assert set(rows[: len(pages)]) == {1} and set(rows[len(pages) :]) == {2}  # row 2 is the dummy row


def test_padding_touches_only_the_dummy_page_and_the_dummy_row() -> None:
    inputs = builder().extend([Work(2, ids(11), 0, sample=True)])
    arrays = inputs.arrays
    assert not arrays.slots[1:].any() or (arrays.slots[1:] < 4).all()
    assert arrays.token_rows is not None and (arrays.token_rows[1:] == 6).all()
    assert (arrays.rows[1:] == 6).all() and (arrays.sample_rows[1:] == 6).all()


def test_an_index_chooses_in_steps_with_a_sequence_that_is_longer_than_what_it_chooses() -> None:
    build = builder(decode_steps=3)
    build.buckets = BucketSet.derive(replace(SIZES, index_covers=10), decode_steps=3)
    steps = [
        *(build.extend([Work(2, ids(11, 12), at, sample=True), Work(4, ids(21), 0, sample=True)]) for at in (8, 9)),
        *(build.decode(ids(4, 2), ids(3, position)) for position in (9, 10)),
        *(build.decode(ids(4, 2), ids(3, position), ids(1, 2)) for position in (7, 8)),
    ]
    assert [step.bucket.chooses for step in steps] == [False, True] * 3
    assert {step.bucket for step in steps} <= {*build.buckets.all()}
    assert all(bucket.chooses for bucket in build.buckets.largest())
    assert not any(bucket.chooses for bucket in BucketSet.derive(replace(SIZES, index_covers=24)).all())


def test_sampling_parameters_follow_their_rows() -> None:
    sampling = SamplingRows(6)
    sampling.set(2, SamplingParams(temperature=0.5, top_k=9, top_p=0.25, min_p=0.125), seed=7)
    sampling.set(4, SamplingParams(temperature=0.0), seed=8)
    build = BatchBuilder(BucketSet.derive(SIZES), PageTable(6, 6), sampling, page_size=4)
    arrays = sampling_of(build.decode(ids(4, 2), ids(0, 0)))
    assert arrays.temperature.tolist() == [0.0, 0.5]
    assert arrays.top_k.tolist() == [0, 9]
    assert arrays.top_p.tolist() == [1.0, 0.25]
    assert arrays.min_p.tolist() == [0.0, 0.125]
    assert arrays.seeds.tolist() == [8, 7]
    assert not build.decode(ids(4), ids(0)).bucket.sampled


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ([{"temperature": 0.0, "top_k": 9, "top_p": 0.5, "min_p": 0.1}], "greedy"),
        ([{}, {"temperature": 0.7}], "sampled"),
        ([{}, {"top_k": 9}], "filtered"),
        ([{"top_p": 0.5}], "filtered"),
        ([{"min_p": 0.5}], "filtered"),
        ([{}, {"top_k": 1}], "sampled"),
        ([{"temperature": 0.0, "top_p": 0.5}, {}], "sampled"),
        ([{"presence_penalty": 1.0}, {"top_p": 0.5}], "featured"),
    ],
    ids=str,
)
def test_a_batch_has_a_program_that_filters_only_if_a_row_does(params: list[dict[str, Any]], expected: str) -> None:
    sampling = SamplingRows(6)
    for row, settings in enumerate(params):
        sampling.set(row, SamplingParams(**settings), seed=0)
    build = BatchBuilder(BucketSet.derive(SIZES, decode_steps=2), table_of({}), sampling, page_size=4)
    rows = np.arange(len(params), dtype=np.int32)
    buckets = [
        build.decode(rows, 0 * rows).bucket,
        build.extend([Work(row, ids(11), 0, sample=True) for row in rows.tolist()]).bucket,
        build.extend([Work(row, ids(11), 0, sample=True, targets=ids(12)) for row in rows.tolist()]).bucket,
    ]
    assert [bucket.sampling for bucket in buckets] == [expected] * 3
    if expected != "featured":  # a program of several steps filters anyway
        several = build.decode(rows, 0 * rows, 1 + 0 * rows).bucket
        assert several.sampling == ("greedy" if expected == "greedy" else "sampled")


@pytest.mark.parametrize("sampled", [False, True])
def test_sampling_parameters_of_padding_are_neutral(sampled: bool) -> None:
    sampling = SamplingRows(6)
    sampling.set(2, SamplingParams(temperature=0.5 if sampled else 0.0, top_k=9, top_p=0.25, min_p=0.125), seed=7)
    build = BatchBuilder(BucketSet.derive(SIZES), PageTable(6, 6), sampling, page_size=4)
    arrays = sampling_of(build.extend([Work(2, ids(11), 0, sample=True)]))
    for array, column in zip(arrays, COLUMNS, strict=True):
        assert array.dtype == column.dtype
        assert array[int(sampled) :].tolist() == [column.neutral] * (len(array) - sampled)


@pytest.mark.parametrize(
    "bucket",
    [
        Bucket("extend", 16, 4, sampled=True),
        Bucket("score", 16, 4, sampled=True),
        Bucket("decode", 4, 4, sampled=True, num_steps=3),
    ],
    ids=str,
)
def test_fields_fill_the_buffer_without_gap_or_overlap(bucket: Bucket) -> None:
    packed = np.zeros(packed_len(bucket), dtype=np.int32)
    for array in vars(unpack(packed, bucket)).values():
        if array is not None:
            array += 1
    assert (packed == 1).all()


def test_a_batch_keeps_its_numbers_whatever_the_scheduler_does_next() -> None:
    """The device may read a batch's arrays as they lie, without a copy, until its tokens are there."""
    table, rows = table_of({2: [5, 9]}), SamplingRows(6)
    table.put(2, 0, ids(7))
    rows.set(2, SamplingParams(temperature=0.7, frequency_penalty=1.0), seed=3)
    build = BatchBuilder(BucketSet.derive(SIZES), table, rows, page_size=4)
    token_ids, setup, decoded = ids(11, 12), ids(2, 5, 7), (ids(2), ids(5))
    batches = [build.extend([Work(2, token_ids, 0, sample=True, setup=setup)]), build.decode(*decoded)]
    before = [[array.copy() for array in arrays_of(batch)] for batch in batches]
    assert [len(arrays) for arrays in before] == [4, 3]
    for changed in (table.pages, token_ids, *decoded):
        changed[:] = 4
    rows.set(2, SamplingParams(), seed=5)
    build.decode(ids(2), ids(5))
    for batch, arrays in zip(batches, before, strict=True):
        for array, copy in zip(arrays_of(batch), arrays, strict=True):
            assert array.tolist() == copy.tolist()
            with pytest.raises(ValueError, match="read-only"):
                array[:1] = 1
