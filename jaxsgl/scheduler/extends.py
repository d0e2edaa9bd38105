"""Decides steps that extend prompts: whose next chunks, and who is admitted. The scheduler calls it and launches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from jaxsgl.batch.buckets import BucketSet, Capacity
from jaxsgl.cache.manager import CacheManager
from jaxsgl.config import SchedulingConfig
from jaxsgl.scheduler.admit import Chunk, NoRoom, PrefillAdder
from jaxsgl.scheduler.live import Live
from jaxsgl.scheduler.pace import Pace
from jaxsgl.scheduler.policy import Policy
from jaxsgl.scheduler.preempt import victims
from jaxsgl.scheduler.req import Req
from jaxsgl.scheduler.reserve import NewTokenRatio
from jaxsgl.scheduler.retract import Retraction
from jaxsgl.scheduler.running import Running
from jaxsgl.scheduler.states import State
from jaxsgl.scheduler.totals import Totals
from jaxsgl.scheduler.waiting import WaitingQueue


@dataclass(slots=True)
class Extends:
    """Extend steps, one after the other; made of the scheduler's parts.

    Attributes:
      num_admitted: admissions so far.
      no_room: why admission stopped at the last step, None if nobody had to wait.
    """

    capacity: Capacity
    buckets: BucketSet
    config: SchedulingConfig
    cache: CacheManager
    waiting: WaitingQueue
    running: Running
    live: Live
    policy: Policy
    pace: Pace
    retraction: Retraction
    ratio: NewTokenRatio
    totals: Totals
    num_admitted: int = 0
    no_room: NoRoom | None = None

    def decide(self, riders: Sequence[Req], in_flight: bool) -> list[Chunk]:
        """Fills an extend step: requests between chunks, then the queue in its order, in what `riders` leave.

        Takes rows and prefixes for those that it admits, and may take others back to the queue for them.

        Args:
          riders: requests that decode in the same step.
          in_flight: whether a step is, which may end somebody.
        """
        continuing = list(self.running.extending.values())
        self.no_room = self._lack() if self.waiting else None
        waiting: list[Req] = []
        if self.waiting and self.no_room is None:
            waiting = self.policy.order(list(self.waiting.in_turn()), self.num_admitted)
        if not (continuing or waiting):
            return []
        adder = PrefillAdder(
            self.cache,
            self.running.admitted.values(),
            self.ratio.value,
            self.pace.allowance(
                min(self.capacity.max_extend_tokens - len(riders), self.config.max_prefill_tokens),
                self.running.decoding.values(),
                continuing,
                riders,
            ),
            max_seqs=self.capacity.num_rows - len(riders),
            sizes=[size - len(riders) for size in self.buckets.extend_sizes if size > len(riders)],
            pages_taken=self.retraction.pages_to_decode(riders),
        )
        adder.add_continuations(continuing, others_wait=bool(waiting))
        for req in takewhile(adder.add_waiting, waiting):
            self.waiting.remove(req)
            self.running.file(req)
            self.live.admitted(req)
            self.totals.admitted(req)
            self.num_admitted += 1
        if adder.no_room in (NoRoom.TOKENS, NoRoom.ROWS) and self._preempt(waiting, adder.pages_short):
            return self.decide([req for req in riders if req.can_launch], in_flight)
        self.no_room = self.no_room or adder.no_room
        adder.add_leftovers(continuing)
        chunks = adder.chunks()
        if not chunks and continuing and not (self.running.decoding or in_flight):
            self.retraction.one_of(self.running.retractable)  # each holds pages that the others wait for
            return self.decide(riders, in_flight)
        return chunks

    def _preempt(self, waiting: Sequence[Req], pages_short: int) -> bool:
        """Takes requests of lower priority back to the queue if that makes room for the first that waits."""
        if not self.config.enable_priority_scheduling:
            return False
        first = next(req for req in waiting if req.state is State.WAITING)
        threshold = self.config.priority_scheduling_preemption_threshold
        chosen = victims(self.policy.rank, first, self.running.retractable, threshold, pages_short, self.cache)
        for req in chosen:
            self.retraction.take_back(req)
        return bool(chosen)

    def _lack(self) -> NoRoom | None:
        """Why nobody can be admitted, so that it isn't worth while to put the queue in order."""
        if self.retraction.closed:
            return NoRoom.TOKENS
        preempts = self.config.enable_priority_scheduling
        return None if self.cache.table.num_free_rows or preempts else NoRoom.ROWS
