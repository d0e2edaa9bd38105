from __future__ import annotations

import random
import time
from collections.abc import Sequence

import pytest

from jaxsgl.scheduler.speculation import occurrences
from jaxsgl.scheduler.speculation.occurrences import NEWEST, Occurrences


def naive(text: list[int], context: Sequence[int], shortest: int, longest: int) -> tuple[int, list[int]]:
    """The longest end of `context` that stands in `text` with a token after it, and the places of that token."""
    for length in range(min(longest, len(context)), shortest - 1, -1):
        end = list(context[len(context) - length :])
        places = [place for place in range(length, len(text)) if text[place - length : place] == end]
        if places:
            return length, places
    return 0, []


@pytest.mark.parametrize("seed", range(60))
def test_the_longest_match_is_found_with_all_its_places_however_the_text_came(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(occurrences, "NEWEST", 10_000)
    chance = random.Random(seed)
    shortest = chance.randint(1, 4)
    longest = shortest + chance.randint(0, 8)
    vocab_size = chance.choice([2, 3, 10, 1000])
    known, text = Occurrences(shortest, longest), list[int]()
    for _ in range(chance.randint(1, 10)):
        new = [chance.randrange(vocab_size) for _ in range(chance.choice([1, 1, 3, 90, 300]))]
        if text and chance.random() < 0.4:
            new = text[-chance.randint(1, 30) :]
        known.extend(new)
        text += new
        other = [chance.randrange(vocab_size) for _ in range(chance.randint(0, longest + 3))]
        for context in (text[-longest - 2 :], text[: longest + 1], other):
            length, places = known.find(context)
            expected = naive(text, context, shortest, longest)
            assert (length, sorted(places)) == expected
            assert known.last(context) == (expected[0], max(expected[1], default=0))


def test_the_first_and_the_last_token_id_can_be_looked_up() -> None:
    for of_prompt in (2, 600):
        known = Occurrences(2, 4)
        known.extend([0, (1 << 21) - 2] * of_prompt + [7, 0])
        assert known.last([7, 0]) == (0, 0)
        assert known.last([0, (1 << 21) - 2])[1] == 2 * of_prompt
        assert known.last([(1 << 21) - 2, 7]) == (2, 2 * of_prompt + 1)


def test_a_thousand_tokens_of_a_prompt_take_a_millisecond_and_thirty_kilobytes_at_most() -> None:
    prompt = [random.Random(3).randrange(50_000) for _ in range(16_000)]
    seconds = []
    for _ in range(5):
        start_s = time.thread_time()
        known = Occurrences(2, 4)
        known.extend(prompt)
        seconds.append(time.thread_time() - start_s)
    assert min(seconds) < 16e-3
    assert known.num_bytes < 16 * 30_000


def test_of_new_tokens_that_repeat_the_newest_places_are_looked_at_alone() -> None:
    for before in (0, 5000):
        known = Occurrences(2, 8)
        known.extend(range(before))
        known.extend([5] * 200)
        length, places = known.find([5] * 8)
        assert length == 8 and len(places) <= NEWEST
        assert known.last([5] * 8) == (8, before + 199)


def test_looking_up_does_not_take_longer_in_a_text_that_repeats_one_token() -> None:
    known = Occurrences(2, 4)
    known.extend([5] * 100_000)
    known.extend([5] * 1000)
    start_s = time.thread_time()
    for _ in range(20):
        assert known.last([5, 5, 5, 5])[0] == 4
    assert (time.thread_time() - start_s) / 20 < 2e-3
