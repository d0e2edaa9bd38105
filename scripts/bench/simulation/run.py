"""One simulated run: the real scheduler and serving loop between simulated clients and a simulated engine.

`Clients` is the loop's `Mailbox` on the simulated clock. It sends each request of a trace when its time has come (a
later turn of a conversation: when the turn before has ended), and counts the replies. A reply to a request that is not
open is a KeyError; an idle engine with open requests is an AssertionError.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, TextIO

from bench.simulation.cost import Costs
from bench.simulation.engine import Clock, SimulatedEngine, SizesBuilder
from bench.simulation.figures import Figures, Sent
from jaxsgl.batch.buckets import Capacity, buckets_of
from jaxsgl.bench.requests import Ask, prompt_ids
from jaxsgl.config.engine import EngineConfig
from jaxsgl.messages.orders import News, Shutdown, ToEngine
from jaxsgl.messages.replies import Replies, Reply
from jaxsgl.models import ModelArch
from jaxsgl.requests.request import Request, SamplingParams
from jaxsgl.scheduler.loop import run_loop
from jaxsgl.scheduler.scheduler import Scheduler
from jaxsgl.scheduler.served_engine import StepsOnly

MAX_IDLE_CALLS = 1000  # turns of the loop in which no time passes and no message arrives


class Clients:
    """All clients of the simulated engine.

    Args:
      trace: requests in order of arrival.
      clock: moved forward when the engine has nothing to do until the next request.
      vocab_size: ids of prompts are below this.
      max_concurrency: largest number of open requests; further ones wait at the client, which counts in no latency.
        None: no limit.
    """

    def __init__(self, trace: Iterable[Ask], clock: Clock, vocab_size: int, max_concurrency: int | None = None) -> None:
        self.figures = Figures()
        self._clock = clock
        self._vocab_size = vocab_size
        self._max_open = max_concurrency or float("inf")
        self._trace = iter(trace)
        self._next = next(self._trace, None)
        self._later: list[tuple[float, int, Ask]] = []  # later turns of conversations, by time
        self._due: deque[tuple[float, Ask]] = deque()  # with the time when they became due
        self._open: dict[str, Sent] = {}
        self._numbers = itertools.count()
        self._stepped_s = 0.0
        self._full_until_s = 0.0  # until then, `max_concurrency` requests were open
        self._idle_calls = (-1.0, 0)

    def receive(self, wait_s: float) -> list[ToEngine]:
        """All requests that are due.

        If it may wait, moves the clock to the next one, or returns `Shutdown` if there is none.
        """
        self._collect_due()
        if wait_s and not self._due:
            if self.next_due_s == float("inf"):
                assert not self._open, f"the engine is idle, but {len(self._open)} requests have not ended"
                return [Shutdown()]
            self._clock.now_s = max(self._clock.now_s, self.next_due_s)
            self._collect_due()
        messages: list[ToEngine] = []
        while self._due and len(self._open) < self._max_open:
            messages.append(self._send(*self._due.popleft()))
        self._refuse_to_hang(idle=not messages)
        return messages

    @property
    def next_due_s(self) -> float:
        """When the next request is sent that isn't due yet; infinity: none is known."""
        times = [ask.at_s for ask in (self._next,) if ask is not None] + [entry[0] for entry in self._later[:1]]
        return min(times, default=float("inf"))

    def send(self, news: News) -> None:
        """Counts the replies of one step."""
        if not isinstance(news, Replies):
            return
        now_s, gaps = self._clock.now_s, Counter[float]()
        if len(self._open) >= self._max_open:
            self._full_until_s = now_s
        for reply in news.replies:
            sent = self._open[reply.request_id]
            count = len(reply.token_ids)
            if count:
                if sent.num_tokens:
                    gaps[(now_s - sent.last_s) / count] += count
                else:
                    sent.first_s = now_s
                sent.last_s = now_s
                sent.num_tokens += count
            if reply.finish_reason is not None or reply.refusal is not None:
                self._end(reply, sent)
        for gap_s, count in gaps.items():
            self.figures.itl_s.add(gap_s, count)
        if gaps:
            self.figures.step_itl_s.add(max(gaps))
        self.figures.step(news.load, self._stepped_s, now_s)
        self._stepped_s = now_s

    def _collect_due(self) -> None:
        now_s = self._clock.now_s
        while self._next is not None and self._next.at_s <= now_s:
            self._due.append((self._next.at_s, self._next))
            self._next = next(self._trace, None)
        while self._later and self._later[0][0] <= now_s:
            at_s, _, ask = heapq.heappop(self._later)
            self._due.append((at_s, ask))

    def _send(self, due_s: float, ask: Ask) -> Request:
        """A request that was sent when it was due, though the engine, busy with a step, sees it only now."""
        ids = prompt_ids(ask, self._vocab_size)
        name = str(next(self._numbers))
        self._open[name] = Sent(ask, len(ids), max(due_s, self._full_until_s))
        params = SamplingParams(temperature=0.0, max_tokens=ask.output_len, ignore_eos=True)
        return Request(name, ids, params)

    def _end(self, reply: Reply, sent: Sent) -> None:
        del self._open[reply.request_id]
        if reply.refusal is not None:
            self.figures.refused += 1
            return
        self.figures.end(sent, reply.cached_tokens, self._clock.now_s)
        if sent.ask.then is not None:
            at_s = self._clock.now_s + sent.ask.then.at_s
            heapq.heappush(self._later, (at_s, next(self._numbers), sent.ask.then))

    def _refuse_to_hang(self, idle: bool) -> None:
        """Raises RuntimeError if the scheduler holds requests but launches no step."""
        at_s, calls = self._idle_calls
        still = idle and at_s == self._clock.now_s
        self._idle_calls = (self._clock.now_s, calls + 1 if still else 0)
        if calls > MAX_IDLE_CALLS:
            raise RuntimeError(
                f"the scheduler stands still at {at_s:.3f} s with {len(self._open)} open requests: it launches nothing"
            )


def simulate(
    config: EngineConfig,
    arch: ModelArch,
    capacity: Capacity,
    costs: Costs,
    trace: Iterable[Ask],
    *,
    host_step_s: float = 0.0,
    host_seq_s: float = 0.0,
    max_concurrency: int | None = None,
    plans: TextIO | None = None,
) -> tuple[Figures, dict[str, Any]]:
    """Serves `trace` to its end. Returns the figures and a summary of them.

    Args:
      config: settings as for a real server; those that the scheduler uses have an effect.
      arch, capacity, costs: the model and the device.
      trace: requests in order of arrival.
      host_step_s, host_seq_s: seconds of the host for a step, and for each of its sequences on top.
      max_concurrency: largest number of requests that clients keep open.
      plans: takes the scheduler's plan of each step, a line each.
    """
    clock = Clock()
    buckets = buckets_of(config, capacity)
    engine = SimulatedEngine(arch, capacity, buckets, costs, clock, host_step_s, host_seq_s)
    scheduler = Scheduler(
        capacity,
        buckets,
        arch.eos_token_ids,
        config.scheduling,
        radix_cache=not config.disable_radix_cache,
        random_seed=config.made_up_seed,
        max_queued_requests=config.max_queued_requests,
        max_queued_tokens=config.max_queued_tokens,
        make_builder=SizesBuilder,
        clock=lambda: clock.now_s,
    )
    clients = Clients(trace, clock, capacity.vocab_size, max_concurrency)
    start_s = time.process_time()
    with nullcontext() if plans is None else _written_plans(plans, clock):
        run_loop(scheduler, StepsOnly(engine), clients, depth=config.unread_steps)
    cpu_s = time.process_time() - start_s
    scheduler.check()
    num_steps = sum(counts.steps for counts in engine.counts.values())
    speed = {
        "cpu_s": cpu_s,
        "simulated_s_per_cpu_s": clock.now_s / cpu_s,
        "cpu_s_per_step": cpu_s / max(num_steps, 1),
    }
    return clients.figures, clients.figures.summary(engine) | {"speed": speed}


class _SimulatedTime(logging.Formatter):
    """Puts the simulated second before a message."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock

    def format(self, record: logging.LogRecord) -> str:
        """See `logging.Formatter`."""
        return f"{self._clock.now_s:.6f} {record.getMessage()}"


@contextmanager
def _written_plans(file: TextIO, clock: Clock) -> Iterator[None]:
    """Writes the scheduler's debug log of plans to `file`, each line after the simulated second of its step."""
    logger, handler = logging.getLogger(Scheduler.__module__), logging.StreamHandler(file)
    handler.setFormatter(_SimulatedTime(clock))
    level, propagate = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = propagate
