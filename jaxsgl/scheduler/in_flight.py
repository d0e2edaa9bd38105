"""`InFlightStep`: a step that is launched and not collected. apply.py makes it, and asks it who gets what it yields."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from jaxsgl.scheduler.grammars.constraint import NO_BOUND, Bound
from jaxsgl.scheduler.outputs import StepPart
from jaxsgl.scheduler.req import Req


@dataclass(frozen=True, slots=True)
class InFlightStep:
    """A step that is launched and not collected, and which requests get what it yields.

    A request that ended or was retracted since the launch gets nothing: its lease has another number then.

    Attributes:
      reqs: the requests of the batch, in its order.
      lease_numbers: their lease numbers at the launch.
      starts: the position of the first token that the step computes of each.
      offsets: tokens offsets[i] .. offsets[i + 1] - 1 of the step are those of request i.
      silent: requests whose chunk isn't their last, so that its token means nothing.
      num_chunks: how many of `reqs`, from the first, are extended; the others decode.
      num_steps: decode steps of the program.
      drafts: of each request, what the step verifies after the request's last token; () in steps that verify nothing.
      dropped: requests that proposed drafts for which there was no room.
      drafts_after: whether it drafts on the device, after the tokens that it chooses.
      bounds: by place, how far masks let the run of a request go; see `Constraint.masks_ahead`.
    """

    reqs: Sequence[Req]
    lease_numbers: Sequence[int]
    starts: Sequence[int]
    offsets: Sequence[int]
    silent: frozenset[Req] = frozenset()
    num_chunks: int = 0
    num_steps: int = 1
    drafts: Sequence[tuple[int, ...]] = ()
    dropped: frozenset[Req] = frozenset()
    drafts_after: bool = False
    bounds: dict[int, Bound] = field(default_factory=dict)

    @property
    def extend_tokens(self) -> int:
        """By which requests are extended."""
        return self.offsets[self.num_chunks]

    def yielded(self, tokens: npt.NDArray[np.int32]) -> Iterator[tuple[int, Req, tuple[int, ...]]]:
        """(place in the batch, request, its tokens) of each request that still has the lease of the launch.

        A request that has ended or was retracted since the launch is left out, even if it ended while earlier items of
        this iterator were handled. `tokens` are `[..., num_seqs]`; those after the one that ends a request are
        included.
        """
        by_request = zip(*tokens.reshape(-1, len(self.reqs)).tolist(), strict=True)
        for place, (req, number, ids) in enumerate(zip(self.reqs, self.lease_numbers, by_request, strict=True)):
            if req.lease_number == number:
                yield place, req, ids

    def runs(self, tokens: npt.NDArray[np.int32]) -> Iterator[tuple[int, Req, tuple[int, ...]]]:
        """As `yielded`, of a step that verifies: `tokens [num_tokens]` are -1 after those that a request keeps."""
        ids = tokens.tolist()
        for place, (req, number) in enumerate(zip(self.reqs, self.lease_numbers, strict=True)):
            if req.lease_number == number:
                run = ids[self.offsets[place] : self.offsets[place + 1]]
                yield place, req, tuple(run[: run.index(-1)] if run[-1] < 0 else run)

    def choices(self, place: int) -> slice:
        """Which of the tokens that the step chooses are of the request at `place`."""
        if self.drafts:
            return slice(self.offsets[place], self.offsets[place + 1])
        return slice(place, place + 1)

    def drafts_of(self, place: int) -> tuple[int, ...]:
        """What the step verifies of the request at `place`."""
        return self.drafts[place] if self.drafts else ()

    def bound(self, place: int) -> Bound:
        """How far the run of the request at `place` may go."""
        return self.bounds.get(place, NO_BOUND)

    def part(self, place: int) -> StepPart:
        """What it computes of the request at `place`."""
        first = self.offsets[place]
        is_last = self.reqs[place] not in self.silent
        return StepPart(place, first, self.offsets[place + 1] - first, self.starts[place], is_last)

    def part_of_run(self, place: int, count: int) -> StepPart:
        """Of a step that verifies: what it computes of the `count`-th token, from 0 on, of the request's run."""
        first = self.offsets[place] + count
        return StepPart(first, first, 1, self.starts[place] + count, True)
