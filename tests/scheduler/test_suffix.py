from __future__ import annotations

import random
import tracemalloc
from array import array

import pytest

from jaxsgl.config.features import SpeculationConfig
from jaxsgl.requests.request import Request, SamplingParams
from jaxsgl.scheduler.speculation.proposing import Drafters
from jaxsgl.scheduler.speculation.sources import BYTES_A_TOKEN, PastAnswers, SuffixLookup

OWNER = ("", "")
NOBODY = PastAnswers(0)


def lookup(text: list[int], most: int = 7, answers: PastAnswers = NOBODY) -> SuffixLookup:
    source = SuffixLookup(most, 0, answers, OWNER)
    source.extend(text)
    return source


def request(prompt: list[int], salt: str = "", adapter: str = "") -> Request:
    return Request("r", prompt, SamplingParams(), cache_salt=salt, adapter=adapter)


@pytest.mark.parametrize("padding", [0, 400])
def test_the_most_frequent_continuation_is_drafted_and_of_equal_ones_the_last(padding: int) -> None:
    before = [100 + i for i in range(padding)]
    text = [*before, 9, 1, 2, 3, 40, 41, 9, 1, 2, 3, 40, 42, 9, 1, 2, 3, 50, 51, 9, 1, 2, 3]
    assert lookup(text).propose(2) == (40, 42)


def test_as_many_tokens_are_drafted_as_have_matched() -> None:
    run = list(range(60, 80))
    for matched in (2, 3, 6):
        text = [*run, 5, *run[4 : 4 + matched]]
        assert lookup(text).propose(7) == tuple(run[4 + matched :][:matched])
    assert lookup([*run, 5, run[4]]).propose(7) == ()


def test_drafts_end_where_their_continuation_becomes_unlikely() -> None:
    text: list[int] = []
    for other in range(20):
        text += [1, 2, 3, 4, 5, 6, 200 + other, 7]
    assert lookup([*text, 1, 2, 3, 4]).propose(7) == (5, 6)


def test_a_draft_goes_on_with_itself_where_the_match_overlaps_the_end() -> None:
    assert lookup([8, 9, 8, 9, 8, 9, 8, 9]).propose(5) == (8, 9, 8, 9, 8)


def test_past_answers_are_looked_up_by_requests_of_the_same_salt_and_adapter_alone() -> None:
    chance = random.Random(0)
    answer = [chance.randrange(900) for _ in range(60)]
    drafters = Drafters(SpeculationConfig("SUFFIX", speculative_suffix_cache_mib=1))
    first = drafters(request([1, 2]))
    first.extend([1, 2])
    first.extend(answer)
    during = drafters(request([3, *answer[:6]]))
    during.extend([3, *answer[:6]])
    assert during.propose(4) == (), "it has not ended yet"
    first.end()
    assert during.propose(4) == tuple(answer[6:10])
    for salt, adapter in (("other", ""), ("", "poet")):
        stranger = drafters(request([3, *answer[:6]], salt, adapter))
        stranger.extend([3, *answer[:6]])
        assert stranger.propose(4) == ()


def test_prompts_and_the_end_of_an_answer_are_no_continuations() -> None:
    answers = PastAnswers(1 << 20)
    source = SuffixLookup(7, 4, answers, OWNER)
    source.extend([70, 71, 72, 73])
    source.extend([1, 2, 3, 4, 5])
    source.end()
    assert lookup([9, 1, 2, 3], answers=answers).propose(7) == (4, 5)
    assert lookup([70, 71, 72], answers=answers).propose(7) == ()
    assert lookup([2, 3, 4, 5], answers=answers).propose(7) == ()


def test_without_memory_nothing_is_kept() -> None:
    NOBODY.add(OWNER, [1, 2, 3, 4, 5])
    assert not NOBODY.of(OWNER) and not NOBODY.num_bytes


def test_the_oldest_answers_go_first_and_memory_stays_bounded() -> None:
    most = 1000 * BYTES_A_TOKEN
    answers, chance = PastAnswers(most), random.Random(0)
    written = [[chance.randrange(50_000) for _ in range(90)] for _ in range(40)]
    for number, answer in enumerate(written):
        answers.add(("a" if number < 4 else "b", ""), answer)
        assert answers.num_bytes <= most
        assert answers.num_bytes == BYTES_A_TOKEN * sum(
            len(text.tokens) for owner in "ab" for text in answers.of((owner, ""))
        )

    def knows(answer: list[int]) -> bool:
        return any(text.find(answer[:10])[0] == 10 for text in answers.of(("b", "")))

    assert not answers.of(("a", ""))
    assert knows(written[-1]) and knows(written[-4]) and not knows(written[5])
    answers.add(("b", ""), [chance.randrange(50_000) for _ in range(5000)])
    assert answers.num_bytes <= most


@pytest.mark.parametrize("vocab_size", [200, 50_000])
def test_answers_take_no_more_memory_than_they_may(vocab_size: int) -> None:
    chance, most = random.Random(0), 4 << 20
    written = [array("i", [chance.randrange(vocab_size) for _ in range(500)]) for _ in range(60)]
    tracemalloc.start()
    try:
        answers = PastAnswers(most)
        for answer in written:
            answers.add(OWNER, answer)
        assert tracemalloc.get_traced_memory()[0] < most
    finally:
        tracemalloc.stop()


def test_a_common_context_is_known_by_its_newest_places() -> None:
    answers = PastAnswers(1 << 20)
    for number in range(100):
        answers.add(OWNER, [1, 2, 3, 1000 + number])
    (text,) = answers.of(OWNER)
    assert sorted(text.tokens[place] for place in text.find([1, 2, 3])[1]) == list(range(1084, 1100))
