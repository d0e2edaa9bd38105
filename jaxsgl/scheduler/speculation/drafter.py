"""`Drafter`: proposes the tokens that may follow those of one request; a step then verifies them.

    extend(tokens)        tokens were appended to the request: its prompt first, then what each step yielded
    propose(most)         up to `most` drafts to verify in the next step; a question, which changes nothing
    judge(drafted, kept)  so many drafts were verified, and so many of them are the request's tokens now
    take(drafts)          what the device drafted after its newest token, if it `asks` for that

The scheduler calls `extend` with the prompt when the first token has come, then with the tokens of each step, and
then, if the step verified drafts, `judge`. `propose` may be asked several times for a step, or never. A request that is
retracted keeps its drafter, since its tokens stay. `Scheduler(drafter_of=...)` makes the drafter of each sample.

A request holds one from its arrival to its end; `NO_DRAFTS` where it doesn't speculate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from jaxsgl.requests.request import Request


class DeviceDrafts:
    """What a step has drafted after the newest token of one of its sequences.

    Args:
      read: waits for the device; `[S, k]` of all sequences.
      place: of the sequence in the step.
    """

    def __init__(self, read: Callable[[], npt.NDArray[np.int32]], place: int) -> None:
        self._read, self._place = read, place

    def tokens(self, most: int) -> tuple[int, ...]:
        """The first `most` of them."""
        return tuple(self._read()[self._place, :most].tolist())


NO_DEVICE_DRAFTS = DeviceDrafts(lambda: np.zeros((1, 0), np.int32), 0)


class Drafter:
    """Proposes nothing. Others propose."""

    def extend(self, tokens: Sequence[int]) -> None:
        """Takes tokens that were appended to the request's known ones."""

    def propose(self, most: int) -> tuple[int, ...]:
        """Up to `most` tokens that may come next, in order; () where nothing is likely."""
        return ()

    def judge(self, drafted: int, kept: int) -> None:
        """Takes how many drafts a step verified, and how many of them the request kept."""

    @property
    def asks(self) -> bool:
        """Whether the next step is to draft on the device."""
        return False

    def take(self, drafts: DeviceDrafts) -> None:
        """Takes drafts of the device that follow the newest token; later tokens make them void."""

    def end(self) -> None:
        """Nothing more is asked: the request has ended."""

    @property
    def rests(self) -> bool:
        """Whether it proposes nothing for some tokens to come, whatever they are."""
        return False

    @property
    def probability(self) -> float:
        """That a draft which was proposed last is kept, if all before it are."""
        return 1.0

    @property
    def of_prediction(self) -> bool:
        """Whether the drafts that were proposed last are those of the request's prediction."""
        return False


class NoDrafts(Drafter):
    """Of a request that doesn't speculate."""

    @property
    def rests(self) -> bool:
        """Always."""
        return True


NO_DRAFTS = NoDrafts()

DrafterOf: TypeAlias = Callable[[Request], Drafter]  # of each sample of the request


def drafts_nothing(request: Request) -> Drafter:
    """The drafter of a server that doesn't speculate."""
    return NO_DRAFTS
