"""Where drafts come from: `PromptLookup` (NGRAM), `Prediction` of what a client expects (OpenAI's `prediction`), and
`FromDevice`, what weights draft (EAGLE3, NEXTN, STANDALONE).

A source follows one request's tokens and proposes what may come next; how often it was right, and so how much it may
propose, is pace.py's. suffix.py has one more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from jaxsgl.scheduler.speculation.drafter import NO_DEVICE_DRAFTS, DeviceDrafts
from jaxsgl.scheduler.speculation.occurrences import Occurrences

PREDICTION_CONTEXT = (2, 8)  # tokens that must agree for an answer to be found again in its prediction, and that count


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
    """

    def __init__(self, shortest: int, longest: int) -> None:
        self._text = Occurrences(shortest, longest)
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


class Prediction:
    """Proposes what a prediction of the whole answer goes on with.

    It begins at the prediction's first token. Where the answer differs, it takes up the prediction again where the
    answer's last tokens stand in it: at the first such place after the one where it left, or at the last before.

    Args:
      ids: the prediction.
      prompt_len: tokens that come before the answer.
    """

    def __init__(self, ids: Sequence[int], prompt_len: int) -> None:
        self._ids = Occurrences(*PREDICTION_CONTEXT)
        self._ids.extend(ids)
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
        return tuple(self._ids.tokens[self._next : self._next + most]) if self._follows else ()

    def end(self) -> None:
        """See `Source`."""

    def _take(self, token_id: int) -> None:
        ids = self._ids.tokens
        self._last = [*self._last[1 - PREDICTION_CONTEXT[1] :], token_id]
        if self._follows and self._next < len(ids) and ids[self._next] == token_id:
            self._next += 1
            return
        _, places = self._ids.find(self._last)
        self._follows = bool(places)
        if places:
            after = [place for place in places if place >= self._next]
            self._next = min(after) if after else max(places)
