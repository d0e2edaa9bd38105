"""`RequestTable`: every request that has not ended, by id and by state. The only writer of membership.

`moved(req)` files a request again after its state or lengths changed; everything else is a query. A request waits until
the first of its samples is admitted, and runs from then on until all samples have ended, retracted or not. Time that
passes while generation is paused counts like any other. Knows no pages; called by scheduler.py, apply.py and
planner.py.

Turns say which running requests decode in the next step, and what a step knows of their newest tokens:

    AllAtOnce   one stage: all decode in each step; the newest tokens are on the device, read one step late
    InTurns     pipeline stages: each step decodes those whose tokens are read, its share of all of them

With stages several steps are in flight, one on each stage (`engine/stages/engine.py`), and a request is in at most one
of them, so that its newest token is known when it decodes: nothing on the device links the last stage with the first,
grammars make masks at once, and no token is computed after a stop. Shares are equal: where requests end, the next steps
even them out. `RequestTable.decoding` is in the order in which requests were launched last, so those that wait longest
go first.
"""

from __future__ import annotations

import itertools
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from jaxsgl.cache.pages import IntArray
from jaxsgl.config.engine import SchedulingConfig
from jaxsgl.messages.replies import Refusal, RefusalKind, StageTimes
from jaxsgl.scheduler.req import Key, Req, State


class RequestTable:
    """Requests between arrival and end.

    Args:
      config: the timeouts; None: no limit.
      clock: gives seconds.

    Attributes:
      waiting: WAITING requests in their order: retracted ones first, then by arrival.
      admitted: requests that hold a lease, in order of admission.
      prefetching: of those, the PREFETCHING ones.
      extending: of those, the EXTENDING ones: some of their known tokens are not launched yet.
      decoding: of those, the RUNNING ones that may decode another token; see `decoded` for their order.
      num_waiting_tokens: prompt tokens of the waiting requests.
      admission_paused: whether requests of which no sample has been admitted must wait, while the others end.
      epoch: rises when rows and pages may have come free, or another request may be the first of the queue.
    """

    def __init__(self, config: SchedulingConfig, clock: Callable[[], float]) -> None:
        self.waiting: OrderedDict[Key, Req] = OrderedDict()
        self.admitted: dict[Key, Req] = {}
        self.prefetching: dict[Key, Req] = {}
        self.extending: dict[Key, Req] = {}
        self.decoding: dict[Key, Req] = {}
        self.num_waiting_tokens = 0
        self.admission_paused = False
        self.epoch = 0
        self._retracted: set[Key] = set()
        self._without_grammar: set[Key] = set()
        self._samples: dict[str, list[Req]] = {}
        self._queue_timeout_s = config.queue_timeout_s
        self._running_timeout_s = config.running_timeout_s
        self._clock = clock
        self._waiting_since: OrderedDict[str, float] = OrderedDict()  # both in order of time: the first is due first
        self._running_since: OrderedDict[str, float] = OrderedDict()
        self._arrived_s: dict[Key, float] = {}  # of samples without a token
        self._queue_s: dict[Key, float] = {}  # of those, the admitted ones

    @property
    def num_retracted(self) -> int:
        """Waiting requests that have run before."""
        return len(self._retracted)

    @property
    def num_begun(self) -> int:
        """Requests that have not ended, and of which a sample was admitted."""
        return len(self._running_since)

    @property
    def num_without_grammar(self) -> int:
        """Waiting requests whose grammars are still being compiled."""
        return len(self._without_grammar)

    def add(self, samples: list[Req], since_s: float | None = None) -> None:
        """Adds all samples of a request that has arrived, now or `since_s`, at the end of the queue."""
        request_id, since = samples[0].request_id, self._waiting_since
        self._samples[request_id] = samples
        arrived_s = self._clock() if since_s is None else since_s
        younger = list(itertools.takewhile(lambda other: since[other] > arrived_s, reversed(since)))
        since[request_id] = arrived_s
        for other in reversed(younger):  # which stay after it: the first is due first
            since.move_to_end(other)
        for req in samples:
            self._arrived_s[req.key] = arrived_s
            self._enqueue(req)

    def withdraw(self, request_id: str) -> float:
        """Takes away a request of which no sample was admitted; returns since when it waits."""
        for req in self._samples.pop(request_id):
            self._leave_queue(req)
            del self._arrived_s[req.key]
        self.epoch += 1
        return self._waiting_since.pop(request_id)

    def first_never_admitted(self) -> str | None:
        """The oldest request of which no sample was admitted yet."""
        return next(iter(self._waiting_since), None)

    def moved(self, req: Req) -> None:
        """Files `req` by its state and lengths, which have just changed; if it was retracted, at the queue's head."""
        key = req.key
        if req.state is State.RUNNING:
            self.extending.pop(key, None)
            if req.can_launch:
                self.decoding[key] = req
            else:
                self.decoding.pop(key, None)
        elif req.state is State.EXTENDING:
            self._leave_queue(req)
            if self.prefetching.pop(key, None) is not None:
                self.epoch += 1  # it has a prompt in progress now, or will share what it has loaded
            self.admitted[key] = self.extending[key] = req
        elif req.state is State.PREFETCHING:
            self.extending.pop(key, None)
            self.admitted[key] = self.prefetching[key] = req
        else:
            self.epoch += 1
            for reqs in (self.admitted, self.prefetching, self.extending, self.decoding):
                reqs.pop(key, None)
            if req.state is State.WAITING:
                self._enqueue(req)
                self.waiting.move_to_end(key, last=False)
                self._retracted.add(key)
            else:
                self._leave_queue(req)
                self._remove(req)

    def decoded(self, reqs: Iterable[Req]) -> None:
        """Puts those of `reqs` that may decode another token at the end of `decoding`, as launched last."""
        for req in reqs:
            if self.decoding.pop(req.key, None) is not None:
                self.decoding[req.key] = req

    def constrained(self, samples: Iterable[Req]) -> None:
        """Notes that waiting `samples` have got their grammar."""
        self._without_grammar.difference_update(req.key for req in samples)

    def pause_admission(self, paused: bool) -> None:
        """Has requests of which no sample was admitted wait from now on, or be admitted again."""
        self.admission_paused = paused
        self.epoch += 1

    def reordered(self) -> None:
        """A request may be admitted from now on that goes before one that has found no room."""
        self.epoch += 1

    def in_turn(self) -> Iterator[Req]:
        """Waiting requests that may be admitted, in their order; a sample may not until its leader is launched."""
        reqs = (req for req in self.waiting.values() if req.may_start)
        return (req for req in reqs if req.request_id in self._running_since) if self.admission_paused else reqs

    def samples_of(self, request_id: str) -> list[Req]:
        """Samples of the request that have not ended; [] if the request is unknown."""
        return list(self._samples.get(request_id, ()))

    def all(self) -> list[Req]:
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

    def first_token(self, key: Key) -> StageTimes | None:
        """Returns the times of a sample whose token has just been read; None if it had one before."""
        arrived_s, queue_s = self._arrived_s.pop(key, None), self._queue_s.pop(key, None)
        if arrived_s is None or queue_s is None:
            return None
        return StageTimes(queue_s, self._clock() - arrived_s - queue_s)

    def overdue(self) -> list[tuple[str, Refusal]]:
        """The requests that have waited or run for too long, each with what to tell its client."""
        found: list[tuple[str, Refusal]] = []
        for limit_s, since, refuse in self._timeouts():
            for request_id, since_s in since.items():
                if self._clock() - since_s <= limit_s:
                    break
                found.append((request_id, refuse(limit_s)))
        return found

    @property
    def due_in_s(self) -> float:
        """Seconds until a request is overdue, 0 if one is; infinity: none will be."""
        firsts = ((limit_s, next(iter(since.values()), math.inf)) for limit_s, since, _ in self._timeouts())
        return max(min((since_s + limit_s - self._clock() for limit_s, since_s in firsts), default=math.inf), 0.0)

    def _timeouts(self) -> Iterator[tuple[float, OrderedDict[str, float], Callable[[float], Refusal]]]:
        """Each limit that is set, since when requests are subject to it, and how they are refused."""
        if self._queue_timeout_s is not None:
            yield self._queue_timeout_s, self._waiting_since, waited
        if self._running_timeout_s is not None:
            yield self._running_timeout_s, self._running_since, _ran

    def check(self) -> None:
        """Raises AssertionError if a request is missing, stands where it doesn't belong, or is miscounted."""
        for req in self.all():
            assert req.state is not State.FINISHED, f"{req.name} has ended, but is still in the table"
            assert (req.state is State.WAITING) == (self.waiting.get(req.key) is req), f"{req.name} is misfiled"
            assert (req.lease is not None) == (self.admitted.get(req.key) is req), f"{req.name} is misfiled"
            assert (req.state is State.PREFETCHING) == (self.prefetching.get(req.key) is req), f"{req.name} is misfiled"
            assert (req.state is State.PREFETCHING) == bool(req.to_load), f"{req.name} loads nothing"
            assert (req.state is State.EXTENDING) == (self.extending.get(req.key) is req), f"{req.name} is misfiled"
            assert req.can_launch == (self.decoding.get(req.key) is req), f"{req.name} is misfiled"
        known = {req.key for req in self.all()}
        for name, keys in (("waiting", self.waiting), ("admitted", self.admitted), ("decoding", self.decoding)):
            assert keys.keys() <= known, f"{name} holds requests that have ended: {keys.keys() - known}"
        assert self.extending.keys() | self.prefetching.keys() <= known
        assert self.num_waiting_tokens == sum(req.prompt_len for req in self.waiting.values()), "waiting tokens"
        lacking = {key for key, req in self.waiting.items() if req.lacks_grammar}
        assert self._without_grammar == lacking, "requests without their grammar"
        assert self._retracted <= self.waiting.keys(), "a retracted request doesn't wait"
        assert self._queue_s.keys() <= self._arrived_s.keys() <= known, "times of requests that have ended"
        assert self._waiting_since.keys() | self._running_since.keys() == self._samples.keys(), "a request has no time"

    def _enqueue(self, req: Req) -> None:
        self.waiting[req.key] = req
        self.num_waiting_tokens += req.prompt_len
        if req.lacks_grammar:
            self._without_grammar.add(req.key)

    def _leave_queue(self, req: Req) -> None:
        """Takes `req` off the queue, if it waits. The first admission of any of its samples begins its running time."""
        if self.waiting.pop(req.key, None) is None:
            return
        self.num_waiting_tokens -= req.prompt_len
        self._retracted.discard(req.key)
        self._without_grammar.discard(req.key)
        if req.lease is None:
            return
        now_s = self._clock()
        if self._waiting_since.pop(req.request_id, None) is not None:
            self._running_since[req.request_id] = now_s
        if req.key in self._arrived_s and req.key not in self._queue_s:
            self._queue_s[req.key] = now_s - self._arrived_s[req.key]

    def _remove(self, req: Req) -> None:
        self._arrived_s.pop(req.key, None)
        self._queue_s.pop(req.key, None)
        samples = self._samples[req.request_id]
        samples.remove(req)
        if not samples:
            del self._samples[req.request_id]
            self._waiting_since.pop(req.request_id, None)
            self._running_since.pop(req.request_id, None)


def waited(limit_s: float) -> Refusal:
    """The refusal of a request that was not admitted within `limit_s` seconds."""
    text = f"the request waited for admission longer than {limit_s:g} s (--queue-timeout-s): try again later"
    return Refusal(RefusalKind.WAITED, text)


def _ran(limit_s: float) -> Refusal:
    return Refusal(RefusalKind.RAN, f"the request ran longer than {limit_s:g} s (--running-timeout-s): ask for less")


class AllAtOnce:
    """Turns of one stage.

    Attributes:
      in_lockstep: whether each decode step has all running requests, as forecasts of ends suppose.
    """

    in_lockstep = True

    def to_decode(self, requests: RequestTable) -> list[Req]:
        """The requests that decode in the next step, if it decodes."""
        return list(requests.decoding.values())

    def token_ids(self, reqs: Sequence[Req], rows: IntArray) -> IntArray:
        """`[n]` the newest token of each of `reqs`, of `rows [n]`, as steps embed it: the device knows it by row."""
        ids: IntArray = ~rows
        return ids

    def launched(self, requests: RequestTable, reqs: Sequence[Req]) -> None:
        """A step is launched in which `reqs` decode."""


class InTurns(AllAtOnce):
    """Turns of several stages.

    Args:
      num_steps: steps among which the running requests are shared out: the stages, and those that wait for the first.
    """

    in_lockstep = False

    def __init__(self, num_steps: int) -> None:
        self._num_steps = num_steps

    def to_decode(self, requests: RequestTable) -> list[Req]:
        """Those whose tokens are read; of all running ones a step's share at most, the longest waiting first."""
        running = requests.decoding.values()
        share = -(-len(running) // self._num_steps)
        return [req for req in running if req.is_read][:share]

    def token_ids(self, reqs: Sequence[Req], rows: IntArray) -> IntArray:
        """See `AllAtOnce`: they are read."""
        return np.array([req.output_ids[-1] for req in reqs], dtype=np.int32)

    def launched(self, requests: RequestTable, reqs: Sequence[Req]) -> None:
        """Moves `reqs` after those that wait for their turn."""
        requests.decoded(reqs)
