"""The scheduler: a core without I/O and without a device. loop.py calls it, an engine runs what it launches.

    receive(messages)  ->  launch() -> StepInputs  ->  collect(tokens)  ->  take_replies()
                           = plan_step + apply

One step may be launched before the tokens of the step before are collected: a plan follows from what has been
launched, not from tokens. If a request turns out to have ended, or was retracted, its extra token is dropped. Pages
that are freed while a step is in flight may be handed out at once, since steps run in order.
"""

from __future__ import annotations

import enum
import logging
import random
import time
from collections.abc import Callable, Iterable, Sequence

import msgspec
import numpy as np

from jaxsgl.batch.buckets import BucketSet, Capacity
from jaxsgl.batch.build import BatchBuilder
from jaxsgl.batch.engine_api import StepScores
from jaxsgl.batch.inputs import StepInputs
from jaxsgl.batch.sampling import MAX_EOS_TOKEN_IDS, SamplingRows
from jaxsgl.cache.manager import CacheManager
from jaxsgl.cache.pages import PageTable
from jaxsgl.cache.prefix import NaiveCache
from jaxsgl.cache.radix import RadixCache
from jaxsgl.config import DEFAULT_WEIGHT_VERSION, SchedulingConfig
from jaxsgl.errors import CheckpointError, InvalidRequest
from jaxsgl.messages import Abort, Load, Refusal, RefusalKind, Reply, Totals
from jaxsgl.request import FinishReason, Request, check_request, max_new_tokens
from jaxsgl.scheduler.apply import Applier, MakeBuilder
from jaxsgl.scheduler.budget import NewTokenRatio
from jaxsgl.scheduler.failure import RequestFailure
from jaxsgl.scheduler.latency import Latency
from jaxsgl.scheduler.plan import RetractAlso, SchedulerState, StepPlan
from jaxsgl.scheduler.planner import plan_step
from jaxsgl.scheduler.policy import Policy
from jaxsgl.scheduler.req import Req, State
from jaxsgl.scheduler.request_table import RequestTable
from jaxsgl.scheduler.retraction_warning import RetractionWarning
from jaxsgl.scheduler.stopwatch import Stopwatch

NO_SCORES = StepScores()


class PauseReason(enum.Enum):
    """Why nothing is launched; each reason ends by itself."""

    OPERATOR = "an operator paused generation"
    UPDATE = "the weights are being exchanged"
    RELEASED = "memory is released"


logger = logging.getLogger(__name__)


class Scheduler:
    """Owns all requests between arrival and end, and through the cache manager all pages and rows.

    Args:
      capacity: sizes of pool, rows, context and steps.
      buckets: shapes that the engine has compiled.
      eos_token_ids: tokens that end every request that doesn't ignore them.
      config: what runs when.
      radix_cache: share prefixes between requests.
      random_seed: seed for the seeds of requests that bring none.
      max_queued_requests: a request that finds this many samples waiting is refused; None: no limit.
      max_queued_tokens: likewise, by the prompt tokens of all waiting samples.
      retract_also: names running requests to retract without need; for tests.
      make_builder: makes what builds batches, for a simulator that needs no arrays.
      clock: gives seconds.

    Attributes:
      state: what plans are made from.
      last_plan: of the last step that was decided.
      wake_fd: a file descriptor that is readable when there is news besides messages; None: there never is.

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
        max_queued_tokens: int | None = None,
        retract_also: RetractAlso | None = None,
        make_builder: MakeBuilder = BatchBuilder,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limits = capacity.limits
        self._eos_token_ids = frozenset(eos_token_ids)
        self._seeds = random.Random(random_seed)
        self._max_queued = max_queued_requests
        self._max_queued_tokens = max_queued_tokens
        if len(self._eos_token_ids) > MAX_EOS_TOKEN_IDS:
            raise CheckpointError(
                f"the model has {len(self._eos_token_ids)} EOS tokens, but {MAX_EOS_TOKEN_IDS} are the most: shorten "
                "eos_token_id in its generation_config.json"
            )
        table = PageTable(capacity.num_rows, capacity.max_pages_per_seq)
        prefixes = RadixCache(capacity.page_size) if radix_cache else NaiveCache()
        cache = CacheManager(capacity.num_pages, capacity.page_size, table, prefixes)
        max_itl_ms = config.max_itl_ms
        self.state = SchedulerState(
            config=config,
            capacity=capacity,
            buckets=buckets,
            policy=Policy(config, cache, random_seed),
            retract_also=retract_also,
            requests=RequestTable(config, clock),
            cache=cache,
            ratio=NewTokenRatio(config.schedule_conservativeness),
            latency=None if max_itl_ms is None else Latency(max_itl_ms / 1000, buckets, capacity.page_size),
            totals=Totals(),
        )
        self.last_plan: StepPlan | None = None
        self.wake_fd: int | None = None
        self._requests = self.state.requests
        self._retraction_warning = RetractionWarning(capacity, config.schedule_conservativeness, clock)
        sampling = SamplingRows(capacity.num_rows)
        self._stopwatch = Stopwatch(clock)
        builder = make_builder(buckets, table, sampling, capacity.page_size)
        self._applier = Applier(self.state, builder, sampling, self._stopwatch)
        self._replies: list[Reply] = []
        self._pauses: set[PauseReason] = set()

    @property
    def cache(self) -> CacheManager:
        """Pages, rows and prefixes."""
        return self.state.cache

    @property
    def is_idle(self) -> bool:
        """Whether nothing can happen before the next message."""
        has_work = (self._requests.waiting or self._requests.admitted) and not self._pauses
        return not (has_work or self.state.steps_in_flight or self._replies)

    @property
    def is_paused(self) -> bool:
        """Whether nothing is launched until an order ends that; the moment of an exchange of weights doesn't count."""
        return bool(self._pauses - {PauseReason.UPDATE})

    @property
    def num_begun(self) -> int:
        """Requests that have not ended, and of which a sample was admitted."""
        return self._requests.num_begun

    @property
    def num_waiting(self) -> int:
        """Samples in the queue."""
        return len(self._requests.waiting)

    @property
    def num_running(self) -> int:
        """Samples that hold a row."""
        return len(self._requests.admitted)

    @property
    def num_steps(self) -> int:
        """Steps launched so far."""
        return self.state.totals.steps

    def receive(self, messages: Sequence[Request | Abort]) -> None:
        """Queues new requests (or refuses them) and ends aborted ones. One for which that fails is ended alone."""
        for message in messages:
            try:
                if isinstance(message, Abort):
                    self._abort(message)
                else:
                    self._enqueue(message)
            except Exception as error:
                self._fail(message.request_id, error)

    def launch(self) -> StepInputs | None:
        """Decides the next step and counts it as launched; None if there is nothing to do before `collect`.

        A request for which that fails is ended, and the step decided again without it.
        """
        self._end_overdue()
        while not self._pauses:
            try:
                return self.apply(plan_step(self.state))
            except RequestFailure as failure:
                if failure.req.state is State.FINISHED:
                    raise  # it was ended before, which did not help
                self._fail(failure.req.request_id, failure.__cause__)
        return None

    def apply(self, plan: StepPlan) -> StepInputs | None:
        """Carries out `plan`, which must have been made from the current state. Raises `RequestFailure`."""
        self.last_plan = plan
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug("plan: %s", plan)
        inputs = self._applier.apply(plan)
        if plan.retract and self.state.retract_also is None:
            self._retraction_warning.retracted(len(plan.retract))
        self._applier.share_prefixes(plan)
        return inputs

    def collect(self, tokens: Sequence[int] | np.ndarray, scores: StepScores = NO_SCORES) -> None:
        """Takes what the oldest step in flight yields: tokens as `StepHandle.tokens` gives them, and scores."""
        num_failed = self.state.totals.failed_requests
        self._replies += self._applier.collect(np.asarray(tokens), scores)
        if self.state.totals.failed_requests != num_failed:
            self.check()

    def take_replies(self) -> list[Reply]:
        """All replies since the last call."""
        replies, self._replies = self._replies, []
        return replies

    def load(self, recompiles: int, leaks: int = 0, weight_version: str = DEFAULT_WEIGHT_VERSION) -> Load:
        """How busy the scheduler is, and what the caller knows. Cost is independent of the queue."""
        cache, requests = self.state.cache, self._requests
        return Load(
            num_running=len(requests.admitted),
            num_waiting=len(requests.waiting),
            waiting_tokens=requests.num_waiting_tokens,
            used_tokens=cache.used_tokens,
            cached_tokens=cache.cached_tokens,
            num_retracted=requests.num_retracted,
            paused=self.is_paused,
            totals=msgspec.structs.replace(self.state.totals, recompiles=recompiles, leaks=leaks),
            step_times=self._stopwatch.step_times(self.is_idle),
            weight_version=weight_version,
        )

    def pause(self, reason: PauseReason = PauseReason.OPERATOR) -> None:
        """Launches nothing until `resume`. Requests queue up, aborts work; steps in flight are still to collect."""
        self._pauses.add(reason)

    def resume(self, reason: PauseReason = PauseReason.OPERATOR) -> None:
        """Launches again, unless there is another reason to pause."""
        self._pauses.discard(reason)

    def hold_new(self, holds: bool) -> None:
        """Admits no sample of a request that has not begun, from now on; or admits them again."""
        self._requests.holds_new = holds
        self.state.failed_admission = None

    def retract_all(self) -> None:
        """Takes all running requests back to the queue, in their order; while paused, with no step in flight."""
        assert self._pauses and not self.state.steps_in_flight
        for req in reversed(list(self._requests.admitted.values())):
            self._applier.take_back(req)
        self.state.admission_closed, self.state.failed_admission = False, None
        self.state.ratio.reset()

    def abort_all(self) -> None:
        """Ends every request."""
        for req in self._requests.all():
            self._end(req, FinishReason.ABORT)

    def retire_cache(self) -> None:
        """Lets no later request find KV that is cached now; running requests keep theirs. For new weights."""
        self.cache.retire(req.lease for req in self._requests.admitted.values() if req.lease)
        self.state.failed_admission = None

    def flush_cache(self) -> None:
        """Drops every cached prefix that no request uses."""
        self.cache.flush()
        self.state.failed_admission = None

    def leaks(self) -> list[str]:
        """Pages, rows and locks that are lost or in two places, each in words; [] if all is well."""
        return self.cache.leaks(req.lease for req in self._requests.admitted.values() if req.lease)

    def check(self) -> None:
        """Integrity of requests, rows and pages; raises AssertionError."""
        self._requests.check()
        self.cache.check(req.lease for req in self._requests.admitted.values() if req.lease)
        for req in self._requests.admitted.values():
            assert req.lease is not None and req.kv_len <= req.lease.num_tokens, f"{req.name} stores more than it holds"

    def _enqueue(self, request: Request) -> None:
        refusal = self._refusal(request)
        if refusal is not None and refusal.kind is RefusalKind.OVERLOADED and self._make_way(request, refusal):
            refusal = None
        if refusal is not None:
            self._replies.append(Reply(request.request_id, refusal=refusal))
            return
        samples = self._samples(request)
        for i, req in enumerate(samples):
            req.num_ahead = self.state.num_admitted + len(self._requests.waiting) + i
        failed = self.state.failed_admission
        if failed is not None and self.state.policy.may_precede(samples[0], failed.head, self._requests.in_turn()):
            self.state.failed_admission = None
        self._requests.add(samples)
        self._stopwatch.arrived(req.key for req in samples)

    def _refusal(self, request: Request) -> Refusal | None:
        """Why `request` can't be taken. The queue holds samples, but a request is taken or refused as a whole."""
        try:
            check_request(request, self._limits)
        except InvalidRequest as error:
            return Refusal(RefusalKind.INVALID, str(error))
        waits = [
            (self._max_queued, len(self._requests.waiting), "", "--max-queued-requests"),
            (self._max_queued_tokens, self._requests.num_waiting_tokens, " prompt tokens", "--max-queued-tokens"),
        ]
        for most, count, what, flag in waits:
            if most is not None and count >= most:
                text = f"the queue is full: {count}{what} wait for admission, and {flag} is {most}: try again later"
                return Refusal(RefusalKind.OVERLOADED, text)
        return None

    def _samples(self, request: Request) -> list[Req]:
        """All samples of a request that was not refused; sample 0 leads the others."""
        sampling = request.sampling
        seed = sampling.seed if sampling.seed is not None else self._seeds.getrandbits(32)
        max_new = max_new_tokens(request, self._limits)
        leader = Req(request, max_new, self._eos_token_ids, seed)
        others = (Req(request, max_new, self._eos_token_ids, seed, index, leader) for index in range(1, sampling.n))
        return [leader, *others]

    def _make_way(self, request: Request, refusal: Refusal) -> bool:
        """Refuses a waiting request of lower priority than `request` in its place; False if there is none."""
        if not self.state.config.enable_priority_scheduling:
            return False
        policy = self.state.policy
        lowest = policy.lowest(self._requests.never_admitted())
        if lowest is None or policy.rank(lowest) <= policy.rank(request):
            return False
        self._refuse(lowest.request_id, refusal)
        return True

    def _end_overdue(self) -> None:
        """Refuses requests that have waited too long, and ends those that have run too long."""
        for request_id, refusal in self._requests.overdue():
            self._refuse(request_id, refusal)

    def _refuse(self, request_id: str, refusal: Refusal) -> None:
        """Ends all samples of a request that have not ended."""
        self._replies.append(Reply(request_id, refusal=refusal))
        for req in self._requests.samples_of(request_id):
            self._applier.end(req)

    def _abort(self, message: Abort) -> None:
        for req in self._requests.samples_of(message.request_id):
            if message.index is None or message.index == req.index:
                self._end(req, FinishReason.ABORT)

    def _fail(self, request_id: str, error: BaseException | None) -> None:
        """Ends a request for which our work raised `error`. Raises AssertionError if that has damaged the state."""
        self._replies.append(self._applier.fail(request_id, error))
        self.check()

    def _end(self, req: Req, reason: FinishReason) -> None:
        self._replies.append(Reply(req.request_id, (), reason, req.cached_tokens, index=req.index))
        self._applier.end(req)
