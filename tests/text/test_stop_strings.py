from __future__ import annotations

import itertools
import random
import re
import time
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxsgl.errors import InvalidRequest
from jaxsgl.messages.replies import Reply
from jaxsgl.requests.request import FinishReason, Request, SamplingParams
from jaxsgl.text.detokenizer import NoText
from jaxsgl.text.sample import Piece, Sample, StopStrings, join
from jaxsgl.text.stop_regex import StopRegex, check_patterns
from jaxsgl.text.tokenizer import Tokenizer, load_tokenizer
from tests.text.small_tokenizers import KINDS, save


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    folder = tmp_path_factory.mktemp("tokenizers")
    return {kind: load_tokenizer(save(make(), folder / kind)) for kind, make in KINDS.items()}


def cut(text: str, stops: Sequence[str], keep: bool, skipped: int = 0) -> tuple[str, str | None]:
    """The right text: read by characters, it ends at the first complete stop string, the longest of several.

    Those that are complete within the first `skipped` characters don't count.
    """
    for end in range(skipped + 1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            stop = max(complete, key=len)
            return text[: end if keep else end - len(stop)], stop
    return text, None


def read(pieces: Sequence[str], stops: Sequence[str], keep: bool) -> tuple[str, str | None]:
    reader, out = StopStrings(stops, keep), []
    for piece in pieces:
        out.append(reader.feed(piece))
        if reader.matched is not None:
            return "".join(out), reader.matched
    return "".join(out) + reader.finish(), None


texts = st.text(alphabet="ab\n", max_size=30)


@settings(max_examples=500)
@given(
    text=texts,
    stops=st.lists(st.text(alphabet="ab\n", min_size=1, max_size=5), max_size=4),
    cuts=st.lists(st.integers(0, 30), max_size=8),
    keep=st.booleans(),
)
def test_text_ends_at_the_first_stop_string_however_it_is_cut(
    text: str, stops: list[str], cuts: list[int], keep: bool
) -> None:
    places = sorted({0, *(min(place, len(text)) for place in cuts), len(text)})
    pieces = [text[a:b] for a, b in itertools.pairwise(places)]
    # A piece may hold characters behind the stop string; only those before it count.
    assert read(pieces, stops, keep) == read(list(text), stops, keep) == cut(text, stops, keep)


def test_only_what_may_become_a_stop_string_is_held_back() -> None:
    reader = StopStrings(("###", "\n\nUser:"), keep=False)
    assert [reader.feed(piece) for piece in ("a#", "#", "b\n", "c\n\nUs", "age", "\n\nUser", ":x")] == [
        "a", "", "##b", "\nc", "\n\nUsage", "", "",
    ]  # fmt: skip
    assert reader.matched == "\n\nUser:"


def test_without_stop_strings_text_flows_on() -> None:
    reader = StopStrings((), keep=False)
    assert [reader.feed("abc"), reader.finish(), reader.matched] == ["abc", "", None]


PATTERNS = ("b+a", "(a|b)\n", "[^a]{3}", "a.b", "(ab)+b")


@settings(max_examples=60)
@given(
    text=texts,
    patterns=st.lists(st.sampled_from(PATTERNS), max_size=3, unique=True),
    stops=st.lists(st.text(alphabet="ab\n", min_size=1, max_size=5), max_size=2),
    size=st.integers(1, 4),
    min_tokens=st.just(0) | st.integers(1, 12),
)
def test_text_ends_behind_the_first_match_unless_a_stop_string_comes_before(
    text: str, patterns: list[str], stops: list[str], size: int, min_tokens: int
) -> None:
    def match(end: int) -> str | None:
        return next((pattern for pattern in patterns if re.search(rf"(?:{pattern})\Z", text[:end])), None)

    found = next((end for end in range(min_tokens + 1, len(text) + 1) if match(end)), None)
    kept, matched = cut(text[:found], stops, False, min_tokens)
    if matched is None and found:
        matched = match(found)
    params = SamplingParams(stop=tuple(stops), stop_regex=tuple(patterns), min_tokens=min_tokens)
    sample = Sample(Request("r", [5], params), 0, Characters())
    ids, pieces = [ord(character) for character in text] or [0], []
    for place in range(0, len(ids), size):
        reason = FinishReason.LENGTH if place + size >= len(ids) else None
        pieces.append(sample.take([Reply("r", tuple(ids[place : place + size]), reason)]))
        if sample.ended:
            break
    answer = join(pieces)
    assert answer.end is not None
    assert (answer.text.replace("\0", ""), answer.end.matched_stop) == (kept, matched)
    if matched is not None:
        assert len(answer.token_ids) == len(kept) + (len(matched) if matched in stops else 0)


class Characters(NoText):
    """A detokenizer of characters."""

    def feed(self, token_ids: Sequence[int]) -> str:
        return "".join(map(chr, token_ids))


@pytest.mark.parametrize("pattern", ["(a|b", "a)|(b", "^a", r"\bword", "(?=a)", r"(a)\1", "a*", "", "x" * 257])
def test_a_pattern_that_would_end_every_answer_or_that_is_none_is_refused(pattern: str) -> None:
    with pytest.raises(InvalidRequest, match="stop_regex"):
        check_patterns(SamplingParams(stop_regex=(pattern,)).stop_regex)


def test_a_hostile_pattern_ends_its_answer_soon() -> None:
    reader, dice = StopRegex(["(.{0,30}a.{0,30}b){20}c"]), random.Random(1)
    start_s = time.thread_time()
    with pytest.raises(InvalidRequest, match="simplify it"):
        for _ in range(100_000):
            reader.feed("".join(dice.choices("ab", k=4)))
    assert time.thread_time() - start_s < 2.0
    assert StopRegex(["b{3}"]).feed("aabbbb") == "aabbb"


def run(tokenizer: Tokenizer, ids: list[int], sizes: list[int], reason: FinishReason, params: SamplingParams) -> Piece:
    """The whole answer of a sample, behind a special token, whose replies come in portions of `sizes`."""
    last = len(ids) - 1
    replies = [Reply("r", (token,), reason if i == last else None) for i, token in enumerate(ids)]
    sample = Sample(Request("r", [0], params), 0, tokenizer.detokenizer())
    pieces = []
    while replies and not sample.ended:
        size = sizes.pop(0) if sizes else 1
        pieces.append(sample.take(replies[:size]))
        replies = replies[size:]
    return join(pieces)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=150)
@given(data=st.data())
def test_streamed_and_whole_answers_are_the_same_with_stop_strings_across_tokens(
    kind: str, tokenizers: dict[str, Tokenizer], data: st.DataObject
) -> None:
    tokenizer = tokenizers[kind]
    text = data.draw(st.sampled_from(["hello world, hello you. I'm fine", "x 🦊 naïve 龘 café 🙂", "The quick fox"]))
    ids = tokenizer.encode(text) + data.draw(st.lists(st.integers(0, 400), max_size=6))
    whole = tokenizer.decode(ids)
    start = data.draw(st.integers(0, max(len(whole) - 1, 0)))
    stop = whole[start : start + data.draw(st.integers(1, 6))] or "x"
    keep = data.draw(st.booleans())
    params = SamplingParams(stop=("never here", stop), include_stop_str_in_output=keep)
    sizes = data.draw(st.lists(st.integers(1, 5), max_size=12))
    streamed = run(tokenizer, ids, sizes, FinishReason.LENGTH, params)
    at_once = run(tokenizer, ids, [len(ids)], FinishReason.LENGTH, params)
    assert streamed == at_once
    expected, matched = cut(whole, params.stop, keep)
    assert streamed.text == expected
    assert streamed.end is not None
    assert streamed.end.matched_stop == matched
    if matched is not None:
        assert streamed.end.reason is FinishReason.STOP
        assert streamed.end.completion_tokens == len(streamed.token_ids)


@settings(max_examples=100)
@given(start=st.integers(0, 25), length=st.integers(1, 6), sizes=st.lists(st.integers(1, 5), min_size=30, max_size=30))
def test_an_answer_ends_at_the_same_token_however_many_come_in_one_reply(
    tokenizers: dict[str, Tokenizer], start: int, length: int, sizes: list[int]
) -> None:
    tokenizer = tokenizers["byte_level"]
    ids = tokenizer.encode("hello world, hello you. I'm fine")
    params = SamplingParams(stop=(tokenizer.decode(ids)[start : start + length],))
    sample = Sample(Request("r", [5], params), 0, tokenizer.detokenizer())
    pieces, left = [], ids
    while not sample.ended:
        size = sizes.pop(0)
        taken, left = tuple(left[:size]), left[size:]
        pieces.append(sample.take([Reply("r", taken, None if left else FinishReason.STOP)]))
    assert join(pieces) == run(tokenizer, ids, [], FinishReason.STOP, params)


def test_no_stop_string_is_looked_for_before_min_tokens(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["byte_level"]
    ids = tokenizer.encode("hello world") * 2
    half = len(ids) // 2
    params = SamplingParams(stop=("world",), min_tokens=half)
    answer = run(tokenizer, ids, [], FinishReason.LENGTH, params)
    assert answer.text == "hello worldhello "
    assert answer.end is not None
    assert answer.end.matched_stop == "world"


@pytest.mark.parametrize(
    ("fields", "min_tokens", "text", "matched"),
    [
        ({"stop": ("bcd",)}, 3, "a", "bcd"),
        ({"stop": ("bcd",)}, 4, "abcdefgh", None),
        ({"stop": ("bcdef", "cd")}, 3, "ab", "cd"),
        ({"stop": ("bcdef", "cd")}, 4, "a", "bcdef"),
        ({"stop": ("ghi",)}, 8, "abcdefgh", None),
        ({"stop_regex": ("b.d",)}, 3, "abcd", "b.d"),
        ({"stop_regex": ("b.d",)}, 4, "abcdefgh", None),
        ({"stop_regex": ("b.*[df]",)}, 4, "abcdef", "b.*[df]"),
    ],
)
def test_what_begins_before_min_tokens_ends_the_answer_if_it_is_complete_behind_it(
    fields: dict[str, Any], min_tokens: int, text: str, matched: str | None
) -> None:
    request = Request("r", [5], SamplingParams(min_tokens=min_tokens, **fields))
    replies = [Reply("r", (ord(letter),), FinishReason.LENGTH if letter == "h" else None) for letter in "abcdefgh"]
    at_once = Sample(request, 0, Characters()).take(replies)
    assert at_once.end is not None
    assert (at_once.text, at_once.end.matched_stop) == (text, matched)
    streamed, pieces = Sample(request, 0, Characters()), list[Piece]()
    while not streamed.ended:
        pieces.append(streamed.take(replies[len(pieces) : len(pieces) + 1]))
    assert join(pieces) == at_once


@pytest.mark.parametrize("keep", [False, True])
def test_a_stop_tokens_text_is_left_in_if_asked_for(tokenizers: dict[str, Tokenizer], keep: bool) -> None:
    tokenizer = tokenizers["byte_level"]
    ids = [*tokenizer.encode("hello"), tokenizer.encode(" world")[0]]
    params = SamplingParams(stop_token_ids=(ids[-1],), include_stop_str_in_output=keep)
    answer = run(tokenizer, ids, [], FinishReason.STOP, params)
    assert answer.text == tokenizer.decode(ids if keep else ids[:-1])
    assert answer.token_ids == ids
    assert answer.end is not None
    assert answer.end.matched_stop == ids[-1]
