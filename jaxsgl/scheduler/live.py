"""The requests that have not ended, sample by sample, and how long each waits and runs. Owned by the scheduler.

A request waits until the first of its samples is admitted, and runs from then on until all have ended, retracted or
not. Time that passes while generation is paused counts like any other. Decides nothing but who is overdue.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from jaxsgl.config import SchedulingConfig
from jaxsgl.messages import Refusal, RefusalKind
from jaxsgl.scheduler.req import Req


class Live:
    """Requests between arrival and end.

    Args:
      config: its timeouts; None: no limit.
      clock: gives seconds.
    """

    def __init__(self, config: SchedulingConfig, clock: Callable[[], float]) -> None:
        self._queue_timeout_s = config.queue_timeout_s
        self._running_timeout_s = config.running_timeout_s
        self._clock = clock
        self._samples: dict[str, list[Req]] = {}
        self._waiting_since: OrderedDict[str, float] = OrderedDict()  # both in order of time: the first is due first
        self._running_since: OrderedDict[str, float] = OrderedDict()

    def __contains__(self, req: Req) -> bool:
        return req in self._samples.get(req.request_id, ())

    def add(self, samples: list[Req]) -> None:
        """All samples of a request that has arrived."""
        request_id = samples[0].request_id
        self._samples[request_id] = samples
        self._waiting_since[request_id] = self._clock()

    def admitted(self, req: Req) -> None:
        """A sample was admitted, for the first time or again."""
        if self._waiting_since.pop(req.request_id, None) is not None:
            self._running_since[req.request_id] = self._clock()

    def remove(self, req: Req) -> None:
        """A sample has ended."""
        samples = self._samples[req.request_id]
        samples.remove(req)
        if not samples:
            del self._samples[req.request_id]
            self._waiting_since.pop(req.request_id, None)
            self._running_since.pop(req.request_id, None)

    def samples_of(self, request_id: str) -> list[Req]:
        """Those that have not ended; none if the request is unknown."""
        return list(self._samples.get(request_id, ()))

    def everybody(self) -> list[Req]:
        """All samples, in order of arrival."""
        return [req for samples in self._samples.values() for req in samples]

    def never_admitted(self) -> list[Req]:
        """One sample of each request of which none was admitted yet, in order of arrival."""
        return [self._samples[request_id][0] for request_id in self._waiting_since]

    def waited_s(self, request_id: str) -> float | None:
        """Seconds since the arrival of a request that was never admitted."""
        since_s = self._waiting_since.get(request_id)
        return None if since_s is None else self._clock() - since_s

    def running_s(self, request_id: str) -> float | None:
        """Seconds since the first admission of a request."""
        since_s = self._running_since.get(request_id)
        return None if since_s is None else self._clock() - since_s

    def overdue(self) -> tuple[str, Refusal] | None:
        """A request that has waited or run for too long, and what to tell its client."""
        for limit_s, since, refuse in (
            (self._queue_timeout_s, self._waiting_since, _waited),
            (self._running_timeout_s, self._running_since, _ran),
        ):
            if limit_s is None or not since:
                continue
            request_id, since_s = next(iter(since.items()))
            if self._clock() - since_s > limit_s:
                return request_id, refuse(limit_s)
        return None


def _waited(limit_s: float) -> Refusal:
    text = f"the request waited for admission longer than {limit_s:g} s (--queue-timeout-s): try again later"
    return Refusal(RefusalKind.WAITED, text)


def _ran(limit_s: float) -> Refusal:
    return Refusal(RefusalKind.RAN, f"the request ran longer than {limit_s:g} s (--running-timeout-s): ask for less")
