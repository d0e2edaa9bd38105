"""Steps in flight, from launch until their tokens are collected: which requests get these, and how long steps take.

apply.py makes an `InFlightStep` and asks it who gets what it yields. `Stopwatch` measures steps. `Speculation` hears of
each step from its plan on, and says whether those in flight must be read before the next plan; a server that doesn't
speculate has the one here.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from jaxsgl.batch.inputs import Bucket, StepInputs
from jaxsgl.messages.replies import STEP_BOUNDS_S, BucketTimes, Load, Run, pack_times
from jaxsgl.requests.request import Request
from jaxsgl.scheduler.grammars.constraint import NO_BOUND, Bound
from jaxsgl.scheduler.outputs import StepPart
from jaxsgl.scheduler.plan import StepPlan
from jaxsgl.scheduler.req import Req
from jaxsgl.scheduler.speculation.drafter import NO_DRAFTS, Drafter

NEWS_S = 1.0
ReadDrafts: TypeAlias = Callable[[], npt.NDArray[np.int32]]  # `[S, k]`, see `StepHandle.drafts`


class InFlightStep(msgspec.Struct, frozen=True):
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
    bounds: dict[int, Bound] = msgspec.field(default_factory=dict)

    @property
    def extend_tokens(self) -> int:
        """Tokens of the chunks, which come before those of the requests that decode."""
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


class Stopwatch:
    """How long steps take, for metrics; decides nothing.

    A decode step costs two looks at the clock and one count; the message of all counts is made anew once in `NEWS_S`
    seconds, and when the engine becomes idle. `clock` gives seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._in_flight: deque[tuple[Bucket, float]] = deque()
        self._last_end_s = 0.0
        self._times: dict[tuple[str, int, int, int, int], BucketTimes] = {}
        self._told = b""
        self._told_s = 0.0
        self._has_news = False

    def launched(self, bucket: Bucket) -> None:
        """Notes a step that goes to the device."""
        self._in_flight.append((bucket, self._clock()))

    def collected(self) -> float:
        """Returns the seconds of the oldest step in flight, which has ended, and counts them.

        It began at its launch or when the one before ended.
        """
        bucket, launched_s = self._in_flight.popleft()
        began_s, self._last_end_s = max(launched_s, self._last_end_s), self._clock()
        seconds = self._last_end_s - began_s
        key = (bucket.kind, bucket.num_tokens, bucket.num_seqs, bucket.num_steps, bucket.mlp_tokens)
        times = self._times.get(key)
        if times is None:
            counts = [0] * (len(STEP_BOUNDS_S) + 1)
            times = self._times[key] = BucketTimes(bucket.kind, bucket_name(bucket), counts, 0.0)
        times.counts[bisect_left(STEP_BOUNDS_S, seconds)] += 1
        times.seconds += seconds
        self._has_news = True
        return seconds

    def bucket_times(self) -> list[BucketTimes]:
        """The times of all steps that have ended."""
        return [*self._times.values()]

    def step_times(self, is_idle: bool) -> bytes:
        """Returns the times of all steps, as `Load.step_times`; up to `NEWS_S` old unless the engine `is_idle`."""
        if self._has_news and (is_idle or self._last_end_s - self._told_s >= NEWS_S):
            self._told = pack_times([*self._times.values()])
            self._told_s, self._has_news = self._last_end_s, False
        return self._told


def bucket_name(bucket: Bucket) -> str:
    """The shape in short: rows of a decode step (x steps, if there are several); tokens x sequences of others.

    Of ranks it is the shape of each, and after a slash the tokens of all together in MLPs, if those are fewer.
    """
    of_all = f"/{bucket.mlp_tokens}" if bucket.mlp_tokens else ""
    if bucket.kind == "decode":
        return f"{bucket.num_seqs}{of_all}" if bucket.num_steps == 1 else f"{bucket.num_seqs}x{bucket.num_steps}"
    return f"{bucket.num_tokens}x{bucket.num_seqs}{of_all}"


class Drafts(NamedTuple):
    """What a step verifies.

    Attributes:
      tokens: of each request that decodes; () if nothing is verified.
      num_pages: that they take besides those of a token each.
      dropped: requests that proposed drafts for which there is no room.
    """

    tokens: tuple[tuple[int, ...], ...] = ()
    num_pages: int = 0
    dropped: frozenset[Req] = frozenset()


NOTHING = Drafts()


class Speculation:
    """Of a server that doesn't speculate. `Speculating` is the other.

    Attributes:
      reads_first: whether the step in flight is to be read before the next one is planned.
      in_lockstep: whether each decode step yields one token of each request, as forecasts of ends suppose.
    """

    reads_first = False
    in_lockstep = True

    def drafter_of(self, request: Request) -> Drafter:
        """The drafter of a sample of `request`."""
        return NO_DRAFTS

    def drafts(self, decodes: Sequence[Req], steps_in_flight: int, num_pages: int) -> Drafts:
        """What the next step verifies if `decodes` decode in it.

        Args:
          decodes: the requests.
          steps_in_flight: those that are not read.
          num_pages: that may be taken besides those of a token each.
        """
        return NOTHING

    def asking(self, inputs: StepInputs, reqs: Sequence[Req]) -> StepInputs:
        """`inputs` of a step that chooses a token for each of `reqs`; it drafts on the device if they ask for it."""
        return inputs

    def launched(self, plan: StepPlan) -> None:
        """A step of `plan` is launched."""

    def collected(self, step: InFlightStep, runs: Sequence[tuple[Req, int, Run]], drafts: ReadDrafts) -> None:
        """The oldest step in flight is read; `runs`: (request, drafts accepted, run) of those that it verified.

        `drafts` waits for what it has drafted on the device, if it was to.
        """

    def ended(self, req: Req) -> None:
        """`req` has ended, perhaps by tokens of a step that is being collected."""

    def add_to(self, load: Load) -> Load:
        """`load` with counts of drafts."""
        return load
