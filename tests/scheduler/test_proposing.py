from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Sequence

import msgspec
import pytest

from jaxsgl.config.features import SpeculationConfig
from jaxsgl.messages.replies import Run
from jaxsgl.requests.media import MediaLimits
from jaxsgl.requests.outputs import Pooling
from jaxsgl.requests.request import POOLING_SAMPLING, Request, SamplingParams
from jaxsgl.scheduler.speculation import occurrences, sources
from jaxsgl.scheduler.speculation.drafter import NO_DRAFTS, Drafter
from jaxsgl.scheduler.speculation.occurrences import Bulk
from jaxsgl.scheduler.speculation.pace import LONGEST_WAIT, Pace, shares
from jaxsgl.scheduler.speculation.proposing import Drafters
from jaxsgl.scheduler.speculation.sources import PredictedText, Prediction, PromptLookup
from jaxsgl.text.sample import Speculated

NGRAM = SpeculationConfig("NGRAM")


def request(prompt: Sequence[int], **fields: object) -> Request:
    return Request("r", list(prompt), SamplingParams(), **fields)  # type: ignore[arg-type]


def played(drafter: Drafter, prompt: Sequence[int], answer: Sequence[int], most: int = 7) -> tuple[int, Speculated]:
    """Verifies drafts for `answer` as steps would, after `prompt`; returns its steps, and what became of the drafts."""
    told = Speculated()
    drafter.extend(prompt)
    drafter.extend(answer[:1])
    done, steps = 1, 0
    while done < len(answer):
        drafts = drafter.propose(min(most, len(answer) - done - 1))
        assert drafter.propose(min(most, len(answer) - done - 1)) == drafts
        kept = 0
        while kept < len(drafts) and drafts[kept] == answer[done + kept]:
            kept += 1
        drafter.extend(answer[done : done + kept + 1])
        if drafts:
            drafter.judge(len(drafts), kept)
            told.add(Run(len(drafts), kept, drafter.of_prediction), kept + 1)
        done, steps = done + kept + 1, steps + 1
    return steps, told


@pytest.mark.parametrize("seed", range(30))
def test_prompt_lookup_proposes_what_followed_the_last_longest_match(seed: int) -> None:
    chance = random.Random(seed)
    text = [chance.randrange(4) for _ in range(chance.choice([20, 700]))]
    lookup = PromptLookup(2, 4)
    lookup.extend(text)
    for _ in range(40):
        matches = [
            (length, place)
            for length in range(2, 5)
            for place in range(length, len(text))
            if text[place - length : place] == text[-length:]
        ]
        expected: list[int] = []
        if matches:
            longest = max(length for length, _ in matches)
            place = max(place for length, place in matches if length == longest)
            expected = [text[place + i % (len(text) - place)] for i in range(5)]
        assert lookup.propose(5) == tuple(expected)
        new = chance.randrange(4)
        lookup.extend([new])
        text.append(new)


@pytest.mark.parametrize("algorithm", ["NGRAM", "SUFFIX"])
def test_samples_of_a_request_share_what_is_sorted_of_their_prompt_and_prediction(
    algorithm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_sorted = []

    class Counted(Bulk):
        def __init__(self, tokens: array[int], longest: int) -> None:
            num_sorted.append(len(tokens))
            super().__init__(tokens, longest)

    for module in (occurrences, sources):
        monkeypatch.setattr(module, "Bulk", Counted)
    prompt, answer = list(range(1000)), list(range(300, 340))
    drafters, asked = Drafters(SpeculationConfig(algorithm)), request(prompt, prediction_ids=answer)
    asked = msgspec.structs.replace(asked, sampling=SamplingParams(n=4))
    samples = [drafters(asked) for _ in range(4)]
    for number, sample in enumerate(samples):
        sample.extend(prompt)
        sample.extend([*range(100 * number, 100 * number + 40)])
        assert sample.propose(3) == tuple(100 * number + 40 + i for i in range(3))
    assert num_sorted == [len(answer), len(prompt)]
    samples[0].extend(range(5000, 5200))
    for sample in samples[1:]:
        assert sample.propose(3)[0] < 400, "each goes on by itself"
    other = drafters(request([7, 8, 9] * 200))
    other.extend([7, 8, 9] * 200)
    assert other.propose(2) == (7, 8)


def test_a_prediction_is_proposed_from_its_beginning_and_taken_up_again_after_a_change() -> None:
    expected = list(range(100, 160))
    source = Prediction(PredictedText(expected), prompt_len=3)
    source.extend([1, 2, 3])
    assert source.propose(4) == (100, 101, 102, 103)
    source.extend([100, 101])
    assert source.propose(2) == (102, 103)
    source.extend([7])  # inserted by the model
    assert source.propose(2) == ()
    source.extend([102, 103])
    assert source.propose(2) == (104, 105)
    source.extend([120, 121])  # and left out what stood between
    assert source.propose(3) == (122, 123, 124)
    source.extend(range(122, 160))
    assert source.propose(3) == ()


def test_a_prediction_that_repeats_itself_is_followed_in_order() -> None:
    line = [1, 2, 3, 4, 5, 6, 7, 8]
    source = Prediction(PredictedText([*line, 50, *line, 60, *line, 70]), prompt_len=0)
    source.extend([*line, 50, 99, 3, 4])
    assert source.propose(5) == (5, 6, 7, 8, 60)


def test_text_that_cannot_be_guessed_costs_few_drafts_and_fewer_as_it_goes_on() -> None:
    pace = Pace()
    tried, tokens = [], 0
    while tokens < 4000:
        if pace.length:
            tried.append((tokens, pace.length))
            pace.judge(min(pace.length, 7), 0)
        pace.extend(1)
        tokens += 1
    assert len(tried) < 16
    assert sum(min(length, 7) for place, length in tried if place >= 8) == len([0 for place, _ in tried if place >= 8])
    gaps = [after - before for (before, _), (after, _) in zip(tried[-3:], tried[-2:], strict=False)]
    assert gaps == [LONGEST_WAIT, LONGEST_WAIT] or gaps == [512, LONGEST_WAIT]


def test_a_draft_that_is_kept_after_a_wait_brings_long_drafts_back_in_a_few_steps() -> None:
    pace = Pace()
    while pace.length:
        pace.judge(pace.length, 0)
    pace.extend(100)
    steps = 0
    while pace.length < 7:
        pace.judge(pace.length, pace.length)
        steps += 1
    assert steps <= 6


def test_drafts_are_as_long_as_their_last_one_is_likely() -> None:
    pace = Pace()
    for _ in range(40):
        pace.judge(4, 1)  # one of two is kept
    assert pace.probability == pytest.approx(0.5, abs=0.01)
    assert pace.length == 2
    for _ in range(40):
        pace.judge(7, 7)
    assert pace.length > 7


@pytest.mark.parametrize(
    ("wanted", "rows", "free", "given"),
    [
        ([7], 1, 16, [7]),
        ([7, 1, 0, 3], 4, 12, [4, 1, 0, 3]),
        ([7] * 8, 8, 16, [1] * 8),
        ([7] * 8, 32, 16, [0] * 8),
        ([7, 7, 7], 3, 5, [1, 1, 0]),
        ([], 5, 16, []),
    ],
)
def test_a_step_stays_within_what_is_free(wanted: list[int], rows: int, free: int, given: list[int]) -> None:
    assert shares(wanted, rows, free) == given


def test_shares_use_all_that_is_free_and_no_more_than_is_wanted() -> None:
    chance = random.Random(0)
    for _ in range(300):
        wanted = [chance.randint(0, 9) for _ in range(chance.randint(1, 12))]
        rows, free = len(wanted) + chance.randint(0, 3), chance.randint(0, 60)
        given = shares(wanted, rows, free)
        assert all(0 <= one <= most for one, most in zip(given, wanted, strict=True))
        assert sum(given) == min(sum(wanted), max(free - rows, 0))


def test_repeated_text_takes_an_eighth_of_the_steps_and_random_text_none_more() -> None:
    chance = random.Random(1)
    span = [chance.randrange(900) for _ in range(24)]
    steps, _ = played(Drafters(NGRAM)(request(span)), span * 2, span * 20)
    assert steps <= 480 / 8 + 12
    noise = [chance.randrange(3) for _ in range(600)]  # matches are always found, and are right a third of the time
    answer = [chance.randrange(900) for _ in range(600)]
    steps, told = played(Drafters(NGRAM)(request(noise)), noise, answer)
    assert steps == 599 and told.num_steps <= 12


def test_what_became_of_drafts_adds_up_to_the_tokens_of_the_answer() -> None:
    chance = random.Random(2)
    prompt = [chance.randrange(6) for _ in range(300)]
    answer = [*prompt[40:160], *(chance.randrange(6) for _ in range(200)), *prompt[100:200]]
    steps, told = played(Drafters(NGRAM)(request(prompt)), prompt, answer)
    plain = steps - told.num_steps
    assert told.accepted_tokens + told.num_steps + plain == len(answer) - 1
    assert told.accept_length == pytest.approx(1 + told.accepted_tokens / told.num_steps)
    assert 0.4 < told.accept_rate < 1


def test_tokens_of_a_prediction_are_counted_apart() -> None:
    answer = list(range(100, 140))
    wrong = [*answer[:20], 7, *answer[20:]]
    _, told = played(Drafters(NGRAM)(request([1, 2, 3], prediction_ids=wrong)), [1, 2, 3], answer)
    assert told.accepted_prediction_tokens >= 20
    assert 1 <= told.rejected_prediction_tokens <= 7
    assert told.accepted_prediction_tokens + told.rejected_prediction_tokens == told.draft_tokens


def test_a_drafter_rests_while_all_its_sources_wait() -> None:
    drafter = Drafters(NGRAM)(request([5] * 20))
    drafter.extend([5] * 20)
    assert not drafter.rests and NO_DRAFTS.rests
    while not drafter.rests:
        drafter.judge(len(drafter.propose(7)), 0)
    assert drafter.propose(7) == ()
    drafter.extend([5] * 16)
    assert not drafter.rests and drafter.propose(7) == (5,)


def test_no_more_drafts_are_proposed_than_flags_and_the_step_allow() -> None:
    drafter = Drafters(SpeculationConfig("NGRAM", 3))(request([5] * 20))
    drafter.extend([5] * 20)
    assert [len(drafter.propose(most)) for most in (0, 2, 3, 9)] == [0, 2, 3, 3]


def test_tokens_that_stand_for_images_are_never_proposed() -> None:
    ids = [1, 2, 3, 90, 90, 4, 1, 2]
    drafter = Drafters(NGRAM, MediaLimits(image_token_id=90, video_token_id=91))(request(ids))
    drafter.extend(ids)
    assert drafter.propose(5) == (3,)


@pytest.mark.parametrize(
    "without",
    [
        lambda: Drafters(SpeculationConfig())(request([1])),
        lambda: Drafters(NGRAM)(request([1], speculative=False)),
        lambda: Drafters(NGRAM)(Request("r", [1], POOLING_SAMPLING, pooling=Pooling())),
    ],
)
def test_requests_that_have_no_drafts_hold_nothing(without: Callable[[], Drafter]) -> None:
    assert without() is NO_DRAFTS
