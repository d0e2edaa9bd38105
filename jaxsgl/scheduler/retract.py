"""Takes running requests back to the queue: when pages run out (SGLang's retraction), or when somebody asks for it.

What was retracted gives its pages back at once and keeps its output, so that its client sees no difference. Called by
the scheduler.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from jaxsgl.cache.manager import CacheManager
from jaxsgl.scheduler.req import Req
from jaxsgl.scheduler.reserve import NewTokenRatio
from jaxsgl.scheduler.running import Running
from jaxsgl.scheduler.totals import Totals
from jaxsgl.scheduler.waiting import WaitingQueue


class Retraction:
    """Makes room.

    Args:
      cache, running, waiting, ratio, totals: the scheduler's.

    Attributes:
      closed: nobody is admitted. Since pages ran out, until a request ends: whoever was retracted would only come
        again.
    """

    def __init__(
        self, cache: CacheManager, running: Running, waiting: WaitingQueue, ratio: NewTokenRatio, totals: Totals
    ) -> None:
        self._cache = cache
        self._running = running
        self._waiting = waiting
        self._ratio = ratio
        self._totals = totals
        self.closed = False

    def with_room(self, decoding: list[Req]) -> list[Req]:
        """Those of `decoding` that can store their next token, after retracting as many others as that takes.

        None of them for now, if the last token of another request is in flight: its pages are about to come back.
        """
        if self.pages_to_decode(decoding) <= self._cache.num_available:
            self._ratio.decoded()
            return decoding
        while self.pages_to_decode(decoding) > self._cache.num_available:
            candidates = self._running.retractable
            if len(candidates) < len(self._running):
                return []
            assert len(candidates) > 1, f"{decoding[0].key} runs alone and lacks pages: it was checked on arrival"
            self.one_of(candidates)
            decoding = list(self._running.decoding.values())
        self._ratio.retracted(self._running.admitted.values())
        return decoding

    def pages_to_decode(self, reqs: Sequence[Req]) -> int:
        """Pages that one more token of each of `reqs` takes; an upper bound where that is surely enough."""
        if len(reqs) <= self._cache.num_available:
            return len(reqs)
        return sum(self._cache.pages_for(req.kv_len + 1) > req.lease.num_pages for req in reqs if req.lease)

    def one_of(self, candidates: Collection[Req]) -> None:
        """Takes back the one who loses least, and lets nobody in for now."""
        self.closed = True
        self.take_back(in_order_of_loss(candidates)[0])

    def take_back(self, req: Req) -> None:
        """From the running ones to the head of the queue; its pages come free at once.

        The last one opens admission again: nobody is left whose end could.
        """
        self._cache.drop(req.retract())
        self._running.file(req)
        self._waiting.put_back(req)
        self._totals.retractions += 1
        self.closed = self.closed and len(self._running) > 0

    def everybody(self) -> None:
        """Takes all back; they go first again, in order of admission. No step may be in flight."""
        for req in reversed(list(self._running.admitted.values())):
            self.take_back(req)
        self._ratio.reset()

    def for_tests(self) -> None:
        """Takes one back without need; only who has got further since it was admitted, or nobody might ever end."""
        candidates = [
            req for req in self._running.decoding.values() if req.prompt_len + len(req.output_ids) > req.extend_to
        ]
        if candidates:
            self.take_back(in_order_of_loss(candidates)[0])


def in_order_of_loss(reqs: Collection[Req]) -> list[Req]:
    """`reqs` (in order of admission), first whom to retract first.

    That is who loses least: fewest tokens generated, then the longest input, since it frees most; among equals who came
    last. So the oldest request with most output goes on, and the whole makes progress.
    """
    newest_first = reversed(list(reqs))
    return sorted(newest_first, key=lambda req: (len(req.output_ids), -req.prompt_len))
