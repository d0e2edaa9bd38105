"""Drafters that know what their request will yield, and propose it, something else, or a part of it."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import TypeAlias

from jaxsgl.requests.request import Request
from jaxsgl.scheduler.speculation.drafter import NO_DEVICE_DRAFTS, DeviceDrafts, Drafter, DrafterOf
from jaxsgl.testing.engine import NUM_DRAFTS, likely_next

Truth: TypeAlias = Callable[[Request], list[int]]
KINDS = ("right", "wrong", "half", "seldom")


class Knowing(Drafter):
    """Proposes by `kind`: what comes, another token each time, what comes up to a place, or that in a few places alone.

    Goes on after the end of the output, where any token will do. Checks that it is told its request's tokens in order.
    """

    def __init__(self, prompt: Sequence[int], truth: Sequence[int], kind: str, vocab_size: int) -> None:
        self._prompt, self._truth, self._kind, self._vocab_size = list(prompt), list(truth), kind, vocab_size
        self.known: list[int] = []
        self.verdicts: list[tuple[int, int]] = []
        self.ended = False

    def extend(self, tokens: Sequence[int]) -> None:
        assert not self.ended, "a drafter gets its last tokens before its end"
        self.known += tokens
        whole = [*self._prompt, *self._truth]
        assert self.known == whole[: len(self.known)], "a drafter is told what its request has"

    def propose(self, most: int) -> tuple[int, ...]:
        place = len(self.known) - len(self._prompt)
        if place < 1 or (self._kind == "seldom" and self._dice(place) % 8):
            return ()
        drafts = [*self._truth[place:], *range(most)][:most]
        right = {"right": most, "wrong": 0, "half": self._dice(place) % (most + 1), "seldom": most}[self._kind]
        return tuple([token if i < right else (token + 1) % self._vocab_size for i, token in enumerate(drafts)])

    def judge(self, drafted: int, kept: int) -> None:
        assert 0 <= kept <= drafted and not self.ended
        self.verdicts.append((drafted, kept))

    def end(self) -> None:
        assert not self.ended
        self.ended = True

    def _dice(self, place: int) -> int:
        return zlib.crc32(f"{self._prompt} {place}".encode())


class FromFake(Knowing):
    """Proposes what `FakeEngine` drafts, and checks that this follows the tokens that the request has."""

    drafts: DeviceDrafts | None = None

    def extend(self, tokens: Sequence[int]) -> None:
        super().extend(tokens)
        self.drafts = None

    @property
    def asks(self) -> bool:
        return bool(self._dice(len(self.known)) % 4)

    def take(self, drafts: DeviceDrafts) -> None:
        assert self.drafts is None and not self.ended
        self.drafts = drafts

    def propose(self, most: int) -> tuple[int, ...]:
        if self.drafts is None:
            return ()
        drafts = self.drafts.tokens(most)
        assert list(drafts) == likely_next(self.known, NUM_DRAFTS, self._vocab_size)[:most], "drafts of other tokens"
        return drafts


class Asking(Drafter):
    """Proposes what the device drafts, however seldom that is right."""

    def __init__(self) -> None:
        self.known: list[int] = []
        self.drafts = NO_DEVICE_DRAFTS

    def extend(self, tokens: Sequence[int]) -> None:
        self.known += tokens
        self.drafts = NO_DEVICE_DRAFTS

    @property
    def asks(self) -> bool:
        return True

    def take(self, drafts: DeviceDrafts) -> None:
        self.drafts = drafts

    def propose(self, most: int) -> tuple[int, ...]:
        return self.drafts.tokens(most)


class Judge(Asking):
    """Checks that what the device drafts is what its weights draft after the request's whole text at once."""

    def __init__(self, expected: Callable[[list[int]], list[int]]) -> None:
        super().__init__()
        self._expected, self.judged = expected, 0

    def propose(self, most: int) -> tuple[int, ...]:
        drafts = super().propose(most)
        if drafts:
            self.judged += 1
            assert list(drafts) == self._expected(self.known)[:most]
        return drafts


def knowing(truth: Truth, kind: str, vocab_size: int) -> DrafterOf:
    """Drafters of a `kind` for requests that yield what `truth` says."""
    return lambda request: Knowing(request.prompt_ids, truth(request), kind, vocab_size)
