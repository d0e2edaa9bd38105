"""A file of sizes is taken as it is as far as it fits, and refused with what is wrong with it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jaxsgl.batch.buckets import BucketSet, Capacity, buckets_of
from jaxsgl.config import EngineConfig
from jaxsgl.errors import ConfigError

SIZES = Capacity(page_size=4, num_pages=40, num_rows=6, context_length=24, max_extend_tokens=32, vocab_size=100)


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
def test_a_file_that_can_not_be_used_says_why(tmp_path: Path, content: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        from_file(tmp_path / "b.json", content)


def test_a_file_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--auto-buckets .*none\.json can't be read"):
        buckets_of(EngineConfig(auto_buckets=str(tmp_path / "none.json")), SIZES)
