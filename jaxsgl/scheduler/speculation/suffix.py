"""`SuffixLookup` (SUFFIX): proposes the likeliest continuation of the longest match, in the request and past answers.

The idea is that of SuffixDecoding (Oliaro et al. 2025): a longer match is trusted further, so as many tokens are
drafted as have matched; and of several continuations the most frequent one is taken, as far as it is likely enough.
`PastAnswers` keeps what requests of the same salt and adapter have answered, within a bound of memory.

    matched            continuations       drafted
    ... the cat   ->   sat on the mat      sat on the: "sat" 2 of 3, "on" 2 of 2, "the" 1 of 2
                       sat on a chair
                       ran
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from typing import TypeAlias

from jaxsgl.scheduler.speculation.occurrences import Occurrences

Owner: TypeAlias = tuple[str, str]  # salt and adapter

SHORTEST = 2  # tokens of a match
LEAST_COMPARED, MOST_COMPARED = 8, 24
TRUST = 1.0  # tokens drafted for each one that matched
LEAST_LIKELY = 0.1  # product of the shares of the tokens drafted
MOST_PLACES = 64  # that are looked at
SHORTEST_IN_ANSWERS = 3
PLACES_IN_ANSWERS = 16  # that are known of equal tokens
BYTES_A_TOKEN = 260  # of past answers, measured
END = -1  # after each past answer


class SuffixLookup:
    """A `Source`.

    Args:
      most: drafts of a step.
      prompt_len: tokens that come before the answer.
      answers: of other requests; this one's joins them at its end.
      owner: whose answers may be looked up.
    """

    def __init__(self, most: int, prompt_len: int, answers: PastAnswers, owner: Owner) -> None:
        self._compared = min(max(most, LEAST_COMPARED), MOST_COMPARED)
        self._text = Occurrences(SHORTEST, self._compared)
        self._prompt_len = prompt_len
        self._answers, self._owner = answers, owner

    def extend(self, tokens: Sequence[int]) -> None:
        """See `Source`."""
        self._text.extend(tokens)

    def propose(self, most: int) -> tuple[int, ...]:
        """See `Source`."""
        text = self._text
        context = text.tokens[-self._compared :]
        length, places = text.find(context, MOST_PLACES)
        for past in self._answers.of(self._owner):
            past_length, past_places = past.find(context, MOST_PLACES)
            if past_length > length:
                length, places, text = past_length, past_places, past
        return _likeliest(text.tokens, places, min(most, int(TRUST * length)))

    def end(self) -> None:
        """See `Source`."""
        self._answers.add(self._owner, self._text.tokens[self._prompt_len :])


class PastAnswers:
    """The answers of requests that have ended, by owner. The oldest of the owner that came least recently go first.

    Args:
      max_bytes: of all; 0: nothing is kept.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_tokens = max_bytes // BYTES_A_TOKEN
        self._num_tokens = 0
        self._by_owner: OrderedDict[Owner, list[Occurrences]] = OrderedDict()

    @property
    def num_bytes(self) -> int:
        """Memory that they take, about."""
        return self._num_tokens * BYTES_A_TOKEN

    def of(self, owner: Owner) -> Sequence[Occurrences]:
        """What may be looked up for `owner`: several texts, the oldest first."""
        return self._by_owner.get(owner, ())

    def add(self, owner: Owner, answer: Sequence[int]) -> None:
        """Keeps an answer; of a long one its last tokens."""
        part = self._max_tokens // 2
        if not part or len(answer) <= SHORTEST_IN_ANSWERS:
            return
        texts = self._by_owner.setdefault(owner, [])
        self._by_owner.move_to_end(owner)
        if not texts or len(texts[-1].tokens) + len(answer) > part:
            texts.append(Occurrences(SHORTEST_IN_ANSWERS, MOST_COMPARED, PLACES_IN_ANSWERS))
        added = [*answer[-(part - 1) :], END]
        texts[-1].extend(added)
        self._num_tokens += len(added)
        while self._num_tokens > self._max_tokens:
            first, oldest = next(iter(self._by_owner.items()))
            self._num_tokens -= len(oldest.pop(0).tokens)
            if not oldest:
                del self._by_owner[first]


def _likeliest(tokens: Sequence[int], places: Sequence[int], most: int) -> tuple[int, ...]:
    """Up to `most` tokens that stand from most of `places` on, one after the other, as far as they are likely.

    Of several that are as frequent the one that came last is taken.
    """
    places = sorted(places, reverse=True)
    drafts: list[int] = []
    likely, num_tokens = 1.0, len(tokens)
    while places and len(drafts) < most:
        after = len(drafts)
        nexts = [
            tokens[place + after] if place + after < num_tokens else drafts[place + after - num_tokens]
            for place in places
        ]
        (token_id, count), *_ = Counter(nexts).most_common(1)
        likely *= count / len(places)
        if likely < LEAST_LIKELY or token_id == END:
            break
        drafts.append(token_id)
        if count < len(places):
            places = [place for place, other in zip(places, nexts, strict=True) if other == token_id]
    return tuple(drafts)
