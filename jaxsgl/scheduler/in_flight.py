"""`InFlightStep`: a step that is launched and not collected, and which requests get what it yields.

A request that ended or was retracted since the launch gets nothing: its lease has another number then. Never knows
plans; apply.py makes these values and hands out what steps yield.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from jaxsgl.scheduler.outputs import StepPart
from jaxsgl.scheduler.req import Req


@dataclass(frozen=True, slots=True)
class InFlightStep:
    """A step that is launched and not collected.

    Attributes:
      reqs: the requests of the batch, in its order.
      lease_numbers: their lease numbers at the launch.
      starts: the position of the first token that the step computes of each.
      offsets: tokens offsets[i] .. offsets[i + 1] - 1 of the step are those of request i.
      silent: requests whose chunk isn't their last, so that its token means nothing.
      num_chunks: how many of `reqs`, from the first, are extended; the others decode.
    """

    reqs: Sequence[Req]
    lease_numbers: Sequence[int]
    starts: Sequence[int]
    offsets: Sequence[int]
    silent: frozenset[Req] = frozenset()
    num_chunks: int = 0

    @property
    def extend_tokens(self) -> int:
        """By which requests are extended."""
        return self.offsets[self.num_chunks]

    def yielded(self, tokens: npt.NDArray[np.int32]) -> Iterator[tuple[int, Req, tuple[int, ...]]]:
        """(place in the batch, request, its tokens) of each request that still has the lease of the launch.

        A request that has ended or was retracted since the launch is left out, even if it ended while earlier items of
        this iterator were handled. `tokens` are `[..., num_seqs]`; those behind the one that ends a request are
        included.
        """
        by_request = zip(*tokens.reshape(-1, len(self.reqs)).tolist(), strict=True)
        for place, (req, number, ids) in enumerate(zip(self.reqs, self.lease_numbers, by_request, strict=True)):
            if req.lease_number == number:
                yield place, req, ids

    def part(self, place: int) -> StepPart:
        """What it computes of the request at `place`."""
        first = self.offsets[place]
        is_last = self.reqs[place] not in self.silent
        return StepPart(place, first, self.offsets[place + 1] - first, self.starts[place], is_last)
