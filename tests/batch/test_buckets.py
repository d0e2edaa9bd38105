"""The shapes that an engine compiles: derived, given, or read from a file."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from jaxsgl.batch.buckets import BucketSet, Capacity, buckets_of, doubling
from jaxsgl.batch.sampling import Variant
from jaxsgl.config.engine import EngineConfig
from jaxsgl.errors import ConfigError

SIZES = Capacity(page_size=4, num_pages=40, num_rows=6, context_length=24, max_extend_tokens=32, vocab_size=100)


def test_buckets_double_up_to_the_largest_batch() -> None:
    assert doubling(1, 6) == (1, 2, 4, 6)
    buckets = BucketSet.derive(SIZES)
    assert buckets.decode_sizes == (1, 2, 4, 6)
    assert buckets.extend_sizes == (16, 32)
    everything = set(buckets.all())
    for variant in (Variant(False), Variant(True)):
        for seqs in range(1, 7):
            assert buckets.decode(seqs, variant) in everything
            for tokens in range(seqs, 33):
                bucket = buckets.extend(tokens, seqs, variant)
                assert bucket in everything
                assert bucket.num_tokens >= tokens
                assert bucket.num_seqs >= seqs


@pytest.mark.parametrize("few_sizes", [False, True])
@pytest.mark.parametrize("num_ranks", [2, 3, 8])
def test_ranks_have_a_program_with_few_more_places_in_mlps_for_every_step(num_ranks: int, few_sizes: bool) -> None:
    capacity = replace(SIZES, num_rows=12, context_length=200, max_extend_tokens=200)
    buckets = BucketSet.derive(capacity, num_ranks=num_ranks, few_sizes=few_sizes)
    compiled = set(buckets.all())
    assert set(buckets.largest()) <= compiled
    for most in range(1, 201):
        for total in {most, most + num_ranks - 1, num_ranks * most}:
            of_ranks = [buckets.extend(most, min(most, 12)), *([buckets.decode(most)] if most <= 12 else [])]
            for bucket in (buckets.joint(of_rank, total) for of_rank in of_ranks):
                assert bucket in compiled
                assert bucket.num_tokens >= most and bucket.num_seqs >= min(most, 12)
                places = bucket.mlp_tokens or num_ranks * bucket.num_tokens
                assert total <= places <= num_ranks * bucket.num_tokens
                assert few_sizes or places < max(1.5 * total, 17), "the next smaller one would have done"
    of_one = BucketSet.derive(capacity, few_sizes=few_sizes)
    assert len(compiled) <= 4 * len(of_one.all()) and not any(bucket.mlp_tokens for bucket in of_one.all())


def test_programs_of_several_steps_exist_only_where_asked_for_and_never_with_features() -> None:
    one, four = BucketSet.derive(SIZES).all(), BucketSet.derive(SIZES, decode_steps=4).all()
    more = set(four) - set(one)
    assert set(one) <= set(four) and {bucket.num_steps for bucket in one} == {1}
    assert {(b.kind, b.num_seqs, b.sampled) for b in more} == {("decode", s, d) for s in (1, 2, 4, 6) for d in (0, 1)}
    assert {(b.num_steps, b.featured, b.filtered) for b in more} == {(4, False, False)}


def test_drafts_are_verified_in_steps_of_decode_sizes_and_larger_ones_where_few_requests_run() -> None:
    def sizes(rows: int, max_drafts: int) -> tuple[int, ...]:
        return BucketSet.derive(replace(SIZES, num_rows=rows), max_drafts=max_drafts).verify_sizes

    assert sizes(6, 0) == ()
    assert sizes(1, 1) == (2,)
    assert sizes(1, 7) == (2, 4, 8)
    assert sizes(6, 3) == (2, 4, 6, 12, 24)
    assert sizes(32, 7) == (2, 4, 8, 16, 32, 64)
    assert sizes(100, 7) == (2, 4, 8, 16, 32, 64, 96, 100)


def test_programs_that_verify_exist_only_where_asked_for() -> None:
    without, buckets = BucketSet.derive(SIZES).all(), BucketSet.derive(SIZES, max_drafts=3)
    more = set(buckets.all()) - set(without)
    assert set(without) <= set(buckets.all()) and {bucket.kind for bucket in more} == {"verify"}
    for variant in (Variant(False), Variant(True), Variant(True, featured=True)):
        for tokens in range(2, 25):
            bucket = buckets.verify(tokens, variant)
            assert bucket in more and tokens <= bucket.num_tokens < 2 * tokens
            assert bucket.num_seqs == min(6, bucket.num_tokens) and bucket.num_choices == bucket.num_tokens


def test_sizes_of_large_decode_batches_grow_in_steps_of_an_eighth() -> None:
    def sizes(rows: int) -> tuple[int, ...]:
        return BucketSet.derive(replace(SIZES, num_rows=rows)).decode_sizes

    assert sizes(1) == (1,)
    assert sizes(32) == (1, 2, 4, 8, 16, 32)
    assert sizes(100) == (1, 2, 4, 8, 16, 32, 64, 96, 100)
    assert sizes(256) == (1, 2, 4, 8, 16, 32, 64, 96, 128, 160, 192, 224, 256)
    assert sizes(257) == (1, 2, 4, 8, 16, 32, 64, 128, 192, 256, 257)


def test_a_small_model_has_half_as_many_sizes_each_four_times_the_next_smaller_one() -> None:
    def sizes(rows: int, tokens: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        buckets = BucketSet.derive(replace(SIZES, num_rows=rows, max_extend_tokens=tokens), few_sizes=True)
        assert buckets.decode_sizes[0] == 1, "a request alone is padded to none"
        return buckets.decode_sizes, buckets.extend_sizes

    assert sizes(32, 512) == ((1, 8, 32), (32, 128, 512))
    assert sizes(1, 16) == ((1,), (16,))
    assert sizes(3, 9) == ((1, 3), (9,))
    assert sizes(64, 100) == ((1, 4, 16, 64), (25, 100))


def test_sizes_that_flags_give_hold_for_small_models_too() -> None:
    config = EngineConfig(decode_buckets=(2, 6), extend_buckets=(8, 32))
    assert buckets_of(config, SIZES, few_sizes=True) == buckets_of(config, SIZES)


def test_the_largest_batch_is_added_to_lists_that_end_below_it() -> None:
    buckets = BucketSet.derive(SIZES, decode_sizes=(5, 1), extend_sizes=(8,), max_drafts=1)
    assert (buckets.decode_sizes, buckets.extend_sizes) == ((1, 5, 6), (8, 32))
    assert buckets.decode(6).num_seqs == 6 and buckets.extend(9, 1).num_tokens == 32
    assert buckets == BucketSet.derive(SIZES, decode_sizes=(1, 5, 6), extend_sizes=(8, 32), max_drafts=1)


def from_file(path: Path, content: object) -> BucketSet:
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return buckets_of(EngineConfig(auto_buckets=str(path)), SIZES)


def test_sizes_come_from_the_file_and_those_beyond_the_capacity_are_left_out(tmp_path: Path) -> None:
    suggested = {"decode_buckets": [5, 3, 8, 16], "extend_buckets": [24, 32, 64], "waste": 0.1}
    buckets = from_file(tmp_path / "b.json", {"suggested": suggested, "programs": []})
    assert (buckets.decode_sizes, buckets.extend_sizes) == ((3, 5, 8), (24, 32))


def test_without_a_file_sizes_are_those_given_or_derived() -> None:
    config = EngineConfig(decode_buckets=(2, 6))
    assert buckets_of(config, SIZES) == BucketSet.derive(SIZES, decode_sizes=(2, 6))


GOOD = {"decode_buckets": [6], "extend_buckets": [32]}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "can't be read as JSON"),
        ([1], 'holds no object "suggested"'),
        ({"suggested": [1]}, 'holds no object "suggested"'),
        ({"suggested": {"decode_buckets": [6]}}, "extend_buckets is None, but must be a list"),
        ({"suggested": GOOD | {"decode_buckets": []}}, r"decode_buckets is \[\]"),
        ({"suggested": GOOD | {"decode_buckets": [6, "8"]}}, "decode_buckets is .6, '8'."),
        ({"suggested": GOOD | {"decode_buckets": [0, 6]}}, r"decode_buckets is \[0, 6\]"),
        ({"suggested": GOOD | {"decode_buckets": [1, 4]}}, "4 requests at once, .* 6: .* --max-running-requests 4"),
        ({"suggested": GOOD | {"extend_buckets": [16]}}, "16 tokens in a step, .* 32: .* --chunked-prefill-size 16"),
    ],
)
def test_an_unusable_file_is_an_error_that_says_why(tmp_path: Path, content: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        from_file(tmp_path / "b.json", content)


def test_a_file_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--auto-buckets .*none\.json can't be read"):
        buckets_of(EngineConfig(auto_buckets=str(tmp_path / "none.json")), SIZES)
