"""Where drafts come from: `PromptLookup` (NGRAM), `SuffixLookup` (SUFFIX), `Prediction` of what a client expects (its
field `prediction`, OpenAI's), and `FromDevice`, what weights draft (EAGLE3, NEXTN, STANDALONE).

A source follows one request's tokens and proposes what may come next; how often it was right, and so how much it may
propose, is pace.py's. `PastAnswers` keeps what requests of the same salt and adapter have answered, for `SuffixLookup`.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Sequence
from typing import Protocol, TypeAlias

from jaxsgl.scheduler.speculation.drafter import NO_DEVICE_DRAFTS, DeviceDrafts
from jaxsgl.scheduler.speculation.occurrences import Bulk, Occurrences, SharedBulk

PREDICTION_CONTEXT = (2, 8)  # tokens that must agree for an answer to be found again in its prediction, and that count
SHORTEST = 2  # tokens of a match that `SuffixLookup` finds
LEAST_COMPARED, MOST_COMPARED = 8, 24
TRUST = 1.0  # tokens drafted for each one that matched
LEAST_LIKELY = 0.1  # product of the shares of the tokens drafted
MOST_PLACES = 64  # that are looked at
SHORTEST_IN_ANSWERS = 3
PLACES_IN_ANSWERS = 16  # that are known of equal tokens
BYTES_A_TOKEN = 260  # of past answers, measured
END = -1  # after each past answer
Owner: TypeAlias = tuple[str, str]  # salt and adapter


class Source(Protocol):
    """Follows the tokens of one request and guesses the next ones. `propose` changes nothing."""

    def extend(self, tokens: Sequence[int]) -> None:
        """Takes tokens that were appended: the prompt first, then what each step yielded."""
        ...

    def propose(self, most: int) -> tuple[int, ...]:
        """Up to `most` tokens that may come next; () where it knows none."""
        ...

    def end(self) -> None:
        """The request has ended."""
        ...


class PromptLookup:
    """Proposes what followed the last occurrence of the longest match of the text's end, in prompt and output.

    Where that overlaps the end, what it proposes goes on with itself: after "a b a b" comes "a b a b a ...".

    Args:
      shortest, longest: tokens of a match.
      prompt: shared by the samples of the request.
    """

    def __init__(self, shortest: int, longest: int, prompt: SharedBulk | None = None) -> None:
        self._text = Occurrences(shortest, longest, beginning=prompt)
        self._longest = longest

    def extend(self, tokens: Sequence[int]) -> None:
        """See `Source`."""
        self._text.extend(tokens)

    def propose(self, most: int) -> tuple[int, ...]:
        """See `Source`."""
        tokens = self._text.tokens
        length, place = self._text.last(tokens[-self._longest :])
        if not length:
            return ()
        period = len(tokens) - place
        if most <= period:
            return tuple(tokens[place : place + most])
        return tuple(tokens[place + i % period] for i in range(most))

    def end(self) -> None:
        """See `Source`."""


class FromDevice:
    """Proposes what a step has drafted on the device after the newest token. Any token after it makes that void."""

    def __init__(self) -> None:
        self._drafts = NO_DEVICE_DRAFTS

    def extend(self, tokens: Sequence[int]) -> None:
        """See `Source`."""
        self._drafts = NO_DEVICE_DRAFTS

    def take(self, drafts: DeviceDrafts) -> None:
        """See `Drafter`."""
        self._drafts = drafts

    def propose(self, most: int) -> tuple[int, ...]:
        """See `Source`. Waits for the device the first time."""
        return self._drafts.tokens(most)

    def end(self) -> None:
        """See `Source`."""


class PredictedText:
    """What a client expects, as its samples share it.

    Args:
      ids: the tokens, one at least.

    Attributes:
      tokens: `ids`.
    """

    def __init__(self, ids: Sequence[int]) -> None:
        self.tokens = array("i", ids)
        self._places = Bulk(self.tokens, PREDICTION_CONTEXT[1])

    def goes_on_at(self, answer: Sequence[int], start: int) -> int | None:
        """Where the text goes on after the end of `answer`: the first place from `start` on, or the last one."""
        match = self._places.find(answer)
        return self._places.first_from(match, start) if match.length >= PREDICTION_CONTEXT[0] else None


class Prediction:
    """Proposes what a prediction of the whole answer goes on with.

    It begins at the prediction's first token. Where the answer differs, it takes up the prediction again where the
    answer's last tokens stand in it: at the first such place after the one where it left, or at the last before.

    Args:
      text: the prediction.
      prompt_len: tokens that come before the answer.
    """

    def __init__(self, text: PredictedText, prompt_len: int) -> None:
        self._text = text
        self._prompt_left = prompt_len
        self._next = 0
        self._follows = True
        self._last: list[int] = []

    def extend(self, tokens: Sequence[int]) -> None:
        """See `Source`."""
        skipped = min(self._prompt_left, len(tokens))
        self._prompt_left -= skipped
        for token_id in tokens[skipped:]:
            self._take(token_id)

    def propose(self, most: int) -> tuple[int, ...]:
        """See `Source`."""
        return tuple(self._text.tokens[self._next : self._next + most]) if self._follows else ()

    def end(self) -> None:
        """See `Source`."""

    def _take(self, token_id: int) -> None:
        ids = self._text.tokens
        self._last = [*self._last[1 - PREDICTION_CONTEXT[1] :], token_id]
        if self._follows and self._next < len(ids) and ids[self._next] == token_id:
            self._next += 1
            return
        place = self._text.goes_on_at(self._last, self._next)
        self._follows = place is not None
        if place is not None:
            self._next = place


class SuffixLookup:
    """Proposes the likeliest continuation of the longest match, in the request and past answers; a `Source`.

    The idea is that of SuffixDecoding (Oliaro et al. 2025): a longer match is trusted further, so as many tokens are
    drafted as have matched; and of several continuations the most frequent one is taken, as far as it is likely enough.

        matched            continuations       drafted
        ... the cat   ->   sat on the mat      sat on the: "sat" 2 of 3, "on" 2 of 2, "the" 1 of 2
                           sat on a chair
                           ran

    Args:
      most: drafts of a step.
      prompt_len: tokens that come before the answer.
      answers: of other requests; this one's joins them at its end.
      owner: whose answers may be looked up.
      prompt: shared by the samples of the request.
    """

    def __init__(
        self, most: int, prompt_len: int, answers: PastAnswers, owner: Owner, prompt: SharedBulk | None = None
    ) -> None:
        self._compared = min(max(most, LEAST_COMPARED), MOST_COMPARED)
        self._text = Occurrences(SHORTEST, self._compared, beginning=prompt)
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
