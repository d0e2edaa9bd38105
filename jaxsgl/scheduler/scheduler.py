"""The scheduler: a core without I/O and without a device. `loop.py` calls it, an engine runs what it launches.

    receive(messages)  ->  launch() -> StepInputs  ->  collect(tokens)  ->  take_replies()

Up to one step may be launched before the tokens of the one before are collected: everything that launch() decides
follows from what has been launched, not from tokens. A request that turns out to have ended, or was retracted, gets its
extra token dropped. Pages freed while a step is in flight may be handed out at once, since steps run in order.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from jaxsgl.batch.buckets import BucketSet, Capacity
from jaxsgl.batch.build import BatchBuilder
from jaxsgl.batch.engine_api import StepScores
from jaxsgl.batch.inputs import StepInputs
from jaxsgl.batch.sampling import SamplingRows
from jaxsgl.cache.manager import CacheManager
from jaxsgl.cache.naive import NaiveCache
from jaxsgl.cache.radix import RadixCache
from jaxsgl.cache.table import PageTable
from jaxsgl.config import SchedulingConfig
from jaxsgl.messages import Abort, Load, Refusal, RefusalKind, Reply
from jaxsgl.request import FinishReason, Request
from jaxsgl.scheduler.decode_steps import DecodeSteps
from jaxsgl.scheduler.dump import dump_cache, dump_requests
from jaxsgl.scheduler.extends import Extends
from jaxsgl.scheduler.intake import Intake
from jaxsgl.scheduler.launch import Launcher, MakeBuilder
from jaxsgl.scheduler.launched import Launched, sampled_logprob
from jaxsgl.scheduler.live import Live
from jaxsgl.scheduler.pace import Pace
from jaxsgl.scheduler.policy import Policy
from jaxsgl.scheduler.req import Req
from jaxsgl.scheduler.reserve import NewTokenRatio
from jaxsgl.scheduler.retract import Retraction
from jaxsgl.scheduler.running import Running
from jaxsgl.scheduler.totals import Totals
from jaxsgl.scheduler.waiting import WaitingQueue

NO_SCORES = StepScores()


class Scheduler:
    """Owns all requests between arrival and end, and through the cache manager all pages and rows.

    Args:
      capacity: sizes of pool, rows, context and steps.
      buckets: shapes that the engine has compiled.
      eos_token_ids: tokens that end every request that doesn't ignore them.
      config: what runs when.
      radix_cache: share prefixes between requests.
      random_seed: seeds of requests that bring none are drawn from it.
      max_queued_requests: a request that finds so many samples waiting is refused; None: none is.
      retract_every: retract a request at every so-many-th launch, whether it must be or not; for tests.
      make_builder: what makes batches, for a simulator that needs none.
      clock: gives seconds.

    Raises:
      CheckpointError: the model has more EOS tokens than the step can hold back until min_tokens.
    """

    def __init__(
        self,
        capacity: Capacity,
        buckets: BucketSet,
        eos_token_ids: Iterable[int],
        config: SchedulingConfig = SchedulingConfig(),
        *,
        radix_cache: bool = True,
        random_seed: int = 0,
        max_queued_requests: int | None = None,
        retract_every: int | None = None,
        make_builder: MakeBuilder = BatchBuilder,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._capacity = capacity
        self._buckets = buckets
        self._config = config
        self._retract_every = retract_every
        self._intake = Intake(capacity.limits, eos_token_ids, random_seed, max_queued_requests)
        table = PageTable(capacity.num_rows, capacity.max_pages_per_seq)
        prefixes = RadixCache(capacity.page_size) if radix_cache else NaiveCache()
        self.cache = CacheManager(capacity.num_pages, capacity.page_size, table, prefixes)
        self._waiting = WaitingQueue()
        self._running = Running()
        sampling = SamplingRows(capacity.num_rows)
        builder = make_builder(buckets, table.pages, sampling, capacity.page_size)
        self._launcher = Launcher(self.cache, builder, sampling, self._running, capacity.vocab_size)
        self._live = Live(config, clock)
        self._in_flight: deque[Launched] = deque()
        self._replies: list[Reply] = []
        max_itl_s = None if config.max_itl_ms is None else config.max_itl_ms / 1000
        self._pace = Pace(max_itl_s, buckets, capacity.page_size, clock)
        self._policy = Policy(config, self.cache, random_seed)
        self._ratio = NewTokenRatio(config.schedule_conservativeness)
        self._extended_last = False
        self._totals = Totals()
        self._retraction = Retraction(self.cache, self._running, self._waiting, self._ratio, self._totals)
        self._extends = Extends(
            capacity, buckets, config, self.cache, self._waiting, self._running, self._live, self._policy, self._pace,
            self._retraction, self._ratio, self._totals,
        )  # fmt: skip
        self._decode_steps = DecodeSteps(buckets.decode_steps, self.cache, self._pace)
        self._paused = False

    @property
    def is_idle(self) -> bool:
        """Whether nothing can happen before the next message."""
        has_work = (self._waiting or self._running) and not self._paused
        return not (has_work or self._in_flight or self._replies)

    @property
    def is_paused(self) -> bool:
        """Whether nothing is launched until `resume`."""
        return self._paused

    @property
    def num_waiting(self) -> int:
        """Samples in the queue."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Samples that hold a row."""
        return len(self._running)

    @property
    def num_in_flight(self) -> int:
        """Steps that are launched and not collected."""
        return len(self._in_flight)

    def receive(self, messages: Sequence[Request | Abort]) -> None:
        """Queues new requests (or refuses them) and ends aborted ones."""
        for message in messages:
            if isinstance(message, Abort):
                self._abort(message)
            else:
                self._enqueue(message)

    def launch(self) -> StepInputs | None:
        """Decides the next step and accounts for it as launched; None if there is nothing to do before `collect`.

        Prompts go first, unless a decode step is due; in mixed steps decoding requests ride along.
        """
        self._end_overdue()
        if self._paused:
            return None
        if self._retract_every is not None and (self._totals.steps + 1) % self._retract_every == 0:
            self._retraction.for_tests()
        decoding = list(self._running.decoding.values())
        if self._config.enable_mixed_chunk:
            riders = self._retraction.with_room(decoding)[: self._capacity.max_extend_tokens - 1]
            chunks = self._extends.decide(riders, bool(self._in_flight))
            riders = [req for req in riders if req.can_launch]  # unless preempted
        elif decoding and self._extended_last and (self._config.decode_first or self._pace.is_bound):
            return self._launch_decode(prompts_wait=True)
        else:
            chunks, riders = self._extends.decide([], bool(self._in_flight)), []
        if not chunks:
            return self._launch_decode(prompts_wait=bool(self._running.extending))
        if any(chunk.req.scores_prompt for chunk in chunks):
            riders = []  # the program that scores prompts is for them alone
        self._extended_last = True
        return self._launched(*self._launcher.extend(chunks, riders))

    def collect(self, tokens: Sequence[int] | np.ndarray, scores: StepScores = NO_SCORES) -> None:
        """Takes what the oldest step in flight yields: tokens as `StepHandle.tokens` gives them, and scores."""
        launched = self._in_flight.popleft()
        self._pace.collected()
        launched.take_prompt_scores(scores)
        for place, req, sampled in launched.yielded(np.asarray(tokens)):
            token_ids, reason = req.take(sampled)
            logprob, of_prompt = None, None
            if req.wants_scores:
                logprob, of_prompt = sampled_logprob(req, place, scores), req.take_prompt_logprobs()
            self._replies.append(
                Reply(req.request_id, token_ids, reason, req.cached_tokens, None, req.index, logprob, of_prompt)
            )
            self._totals.output_tokens += len(token_ids)
            if reason is not None:
                self._release(req)

    def take_replies(self) -> list[Reply]:
        """All news since the last call."""
        replies, self._replies = self._replies, []
        return replies

    def load(self, recompiles: int, leaks: int = 0) -> Load:
        """How busy it is; costs the same whatever waits or runs. Others count `recompiles` and `leaks`."""
        return self._totals.load(
            recompiles,
            leaks,
            self._paused,
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            waiting_tokens=self._waiting.num_tokens,
            used_tokens=self.cache.used_tokens,
            cached_tokens=self.cache.cached_tokens,
            num_retracted=self._waiting.num_retracted,
        )

    def pause(self) -> None:
        """Launches nothing until `resume`. Requests queue up, aborts work; steps in flight are still to collect."""
        self._paused = True

    def resume(self) -> None:
        """Goes on."""
        self._paused = False

    def retract_all(self) -> None:
        """Takes all running requests back to the queue; while paused, with no step in flight."""
        assert self._paused and not self._in_flight
        self._retraction.everybody()

    def abort_all(self) -> None:
        """Ends every request."""
        for req in self._live.everybody():
            self._end(req, FinishReason.ABORT)

    def dump(self) -> dict[str, Any]:
        """The state in plain values, as JSON takes them."""
        return {
            "paused": self._paused,
            "schedule_policy": self._config.schedule_policy,
            "new_token_ratio": self._ratio.value,
            "admission_stopped_for": self._extends.no_room.value if self._extends.no_room else None,
            "admission_closed": self._retraction.closed,
            "steps_in_flight": len(self._in_flight),
            "retractions_total": self._totals.retractions,
            "num_waiting": len(self._waiting),
            "num_retracted": self._waiting.num_retracted,
            "num_running": len(self._running),
            "cache": dump_cache(self.cache),
            "waiting": dump_requests(self._waiting, self._live),
            "running": dump_requests(self._running.admitted.values(), self._live),
        }

    def flush_cache(self) -> None:
        """Drops every cached prefix that no request uses."""
        self.cache.flush()

    def leaks(self) -> list[str]:
        """Pages, rows and locks that are lost or in two places, each in words; [] if all is well."""
        return self.cache.leaks(req.lease for req in self._running.admitted.values() if req.lease)

    def check(self) -> None:
        """Integrity of requests, rows and pages; raises AssertionError."""
        self.cache.check(req.lease for req in self._running.admitted.values() if req.lease)
        self._running.check()
        self._waiting.check()
        for req in self._running.admitted.values():
            assert req.lease is not None and self.cache.pages_for(req.kv_len) <= req.lease.num_pages, req.key
            assert req in self._live

    def _enqueue(self, request: Request) -> None:
        refusal = self._intake.refusal(request, len(self._waiting))
        if refusal is not None and refusal.kind is RefusalKind.OVERLOADED and self._make_way(request, refusal):
            refusal = None
        if refusal is not None:
            self._replies.append(Reply(request.request_id, refusal=refusal))
            return
        samples = self._intake.samples(request)
        self._live.add(samples)
        for req in samples:
            req.num_ahead = self._extends.num_admitted + len(self._waiting)
            self._waiting.add(req)

    def _make_way(self, request: Request, refusal: Refusal) -> bool:
        """Refuses a waiting request of lower priority than `request` in its place; False if there is none."""
        if not self._config.enable_priority_scheduling:
            return False
        lowest = self._policy.lowest(self._live.never_admitted())
        if lowest is None or self._policy.rank(lowest) <= self._policy.rank(request):
            return False
        self._refuse(lowest.request_id, refusal)
        return True

    def _end_overdue(self) -> None:
        """Refuses requests that have waited too long, and those that have run too long."""
        while (overdue := self._live.overdue()) is not None:
            self._refuse(*overdue)

    def _refuse(self, request_id: str, refusal: Refusal) -> None:
        """Ends all that is left of a request."""
        self._replies.append(Reply(request_id, refusal=refusal))
        for req in self._live.samples_of(request_id):
            self._release(req)

    def _abort(self, message: Abort) -> None:
        for req in self._live.samples_of(message.request_id):
            if message.index is None or message.index == req.index:
                self._end(req, FinishReason.ABORT)

    def _end(self, req: Req, reason: FinishReason) -> None:
        self._replies.append(Reply(req.request_id, (), reason, req.cached_tokens, index=req.index))
        self._release(req)

    def _launch_decode(self, prompts_wait: bool) -> StepInputs | None:
        """`prompts_wait`: the next step may extend some."""
        reqs = self._retraction.with_room(list(self._running.decoding.values()))
        if not reqs:
            return None
        self._extended_last = False
        num_steps = 1 if prompts_wait else self._decode_steps.choose(reqs)
        self._ratio.decoded(num_steps - 1)
        return self._launched(*self._launcher.decode(reqs, num_steps))

    def _launched(self, inputs: StepInputs, launched: Launched) -> StepInputs:
        self._totals.launched(inputs, self._extends.no_room)
        self._in_flight.append(launched)
        self._pace.launched(inputs.bucket, launched.kv_tokens, launched.pairs)
        return inputs

    def _release(self, req: Req) -> None:
        """Ends a request in whatever state it is; what it computed stays in the prefix cache."""
        self._waiting.remove(req)
        stored = req.stored_ids()
        lease = req.finish()
        self._running.file(req)
        self._live.remove(req)
        if lease is not None:
            self.cache.release(lease, stored)
            self._retraction.closed = False
        if not self._running:
            self._ratio.reset()
