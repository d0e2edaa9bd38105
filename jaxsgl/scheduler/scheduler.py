"""The scheduler: a core without I/O and without a device. loop.py calls it, an engine runs what it launches.

    receive(messages)  ->  launch() -> StepInputs  ->  collect(tokens)  ->  take_replies()
                           = plan_step + apply

Steps may be launched before the tokens of the steps before are collected: a plan follows from what has been
launched, not from tokens. If a request turns out to have ended, or was retracted, its extra token is dropped. Pages
that are freed while a step is in flight may be handed out at once, since steps run in order.
"""

from __future__ import annotations

import enum
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from jaxsgl.batch.buckets import BucketSet, Capacity
from jaxsgl.batch.build import BatchBuilder
from jaxsgl.batch.engine_api import Insert, PageEngine
from jaxsgl.batch.inputs import StepInputs
from jaxsgl.batch.outputs import NO_OUTPUTS, HostOutputs
from jaxsgl.batch.sampling import MAX_EOS_TOKEN_IDS, SamplingRows
from jaxsgl.cache.embeddings import EmbeddingRows
from jaxsgl.cache.host_pages import HostPage
from jaxsgl.cache.manager import CacheManager, SnapshotBooks
from jaxsgl.cache.pages import IntArray, Lease, PageTable
from jaxsgl.cache.prefix import NaiveCache, PrefixCache
from jaxsgl.cache.radix import RadixCache
from jaxsgl.cache.snapshots import SnapshotCache, Snapshots
from jaxsgl.cache.tiers import HostTier, LowerTier
from jaxsgl.config.engine import DEFAULT_WEIGHT_VERSION, SchedulingConfig
from jaxsgl.errors import CheckpointError
from jaxsgl.mask_mark import NoMark
from jaxsgl.messages.orders import Abort
from jaxsgl.messages.replies import BucketTimes, Load, RankLoad, Refusal, Reply, Totals
from jaxsgl.requests.grammar_work import Mark
from jaxsgl.requests.placement import PlaceLoad
from jaxsgl.requests.request import Request
from jaxsgl.scheduler.apply import Applier, Builder, MakeBuilder
from jaxsgl.scheduler.arrivals import Arrivals, QueueLimits
from jaxsgl.scheduler.budget import NewTokenRatio, Timing, pages_held_for
from jaxsgl.scheduler.engine_ops import EngineOps
from jaxsgl.scheduler.failure import RequestFailure
from jaxsgl.scheduler.grammars.constraint import Words
from jaxsgl.scheduler.grammars.queue import Grammars, NoGrammars
from jaxsgl.scheduler.in_flight import ReadDrafts, Stopwatch
from jaxsgl.scheduler.latency import Latency
from jaxsgl.scheduler.plan import StepPlan
from jaxsgl.scheduler.planner import plan_step
from jaxsgl.scheduler.policy import Policy
from jaxsgl.scheduler.req import State
from jaxsgl.scheduler.request_table import AllAtOnce, RequestTable
from jaxsgl.scheduler.resources.adapters import AdapterTable
from jaxsgl.scheduler.resources.host_tier import HostCopies, LoadRule
from jaxsgl.scheduler.resources.images import Images, KeptImages
from jaxsgl.scheduler.resources.resource import Resource
from jaxsgl.scheduler.resources.states import States
from jaxsgl.scheduler.speculation.drafter import DrafterOf, drafts_nothing
from jaxsgl.scheduler.speculation.pace import StepCosts
from jaxsgl.scheduler.speculation.speculation import speculation_of
from jaxsgl.scheduler.state import RetractAlso, SchedulerState

GRAMMAR_WAIT_S = 0.001  # that an idle turn waits for a grammar, so that the loop doesn't spin
WARNING_INTERVAL_S = 10.0


class PauseReason(enum.Enum):
    """Why nothing is launched; each reason ends by itself."""

    OPERATOR = "an operator paused generation"
    UPDATE = "the weights are being exchanged"
    RELEASED = "memory is released"


logger = logging.getLogger(__name__)


def nothing_drafted() -> npt.NDArray[np.int32]:
    """What a step yields that was not to draft; never called."""
    raise AssertionError("the step was not to draft")


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
      tier: of the cache, in host memory; None: there is none.
      loads: when loading from `tier` pays.
      max_loaded_loras: adapters that may be loaded; None: any number.
      grammars: compiles the grammars of requests, or refuses them.
      mark: notes whose grammar is worked on.
      drafter_of: makes the drafter of each sample, if `buckets` have programs that verify drafts.
      step_costs: says how many drafts pay.
      turns: which running requests decode in a step.

    Attributes:
      queue_limits: what the queue takes.
      tier: see above.
      state: what plans are made from.
      last_plan: of the last step that was decided.
      wake_fd: None: there is no news besides messages.

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
        tier: HostTier | None = None,
        loads: LoadRule | None = None,
        max_loaded_loras: int | None = None,
        grammars: Grammars = NoGrammars(),
        mark: Mark = NoMark(),
        drafter_of: DrafterOf = drafts_nothing,
        step_costs: StepCosts = StepCosts(),
        turns: AllAtOnce = AllAtOnce(),
    ) -> None:
        assert (tier is None) == (loads is None) and (tier is None or radix_cache)
        self.queue_limits = QueueLimits(capacity.limits, max_queued_requests, max_queued_tokens)
        ops, requests = EngineOps(), RequestTable(config, clock)
        self.tier = tier
        cache, snapshots = _make_cache(capacity, radix_cache, LowerTier() if tier is None else tier)
        adapters = AdapterTable(
            ops, capacity.num_rows, capacity.max_adapters, capacity.adapter_columns, max_loaded_loras
        )
        self.state = SchedulerState(
            config=config,
            capacity=capacity,
            buckets=buckets,
            policy=Policy(config, cache, random_seed),
            retract_also=retract_also,
            requests=requests,
            cache=cache,
            ops=ops,
            ratio=NewTokenRatio(config.schedule_conservativeness),
            timing=_timing_of(config, capacity, buckets),
            turns=turns,
            totals=Totals(),
            adapters=adapters,
            speculation=speculation_of(buckets, drafter_of, cache, step_costs),
        )
        self.state.images = _make_images(self.state)
        states = None if snapshots is None else States(cache, snapshots, capacity.num_rows)
        self.state.resources = _resources_of(self.state, tier, loads, states, clock)
        self.last_plan: StepPlan | None = None
        self.wake_fd: int | None = None
        self._requests, self._resources = requests, self.state.resources
        self._retraction_warning = RetractionWarning(capacity, config.schedule_conservativeness, clock)
        self._stopwatch = Stopwatch(clock)
        sampling = SamplingRows(capacity.num_rows)
        of_adapters = (adapters.rows,) if capacity.max_adapters else ()
        of_states = {} if states is None else {"borders": states.borders}
        builder = make_builder(buckets, cache.table, sampling, capacity.page_size, *of_adapters, **of_states)
        self._applier = Applier(self.state, builder, sampling, self._stopwatch)
        eos = _checked_eos(eos_token_ids)
        self._arrivals = Arrivals(self.state, self.queue_limits, eos, random_seed, self._applier, grammars, mark)
        self._grammars = grammars
        self._replies: list[Reply] = []
        self._pauses: set[PauseReason] = set()

    def go_on_from(self, former: Scheduler) -> None:
        """Takes the place of `former`: seeds are drawn and exchanges of weights are counted on."""
        self.cache.go_on_from(former.cache)
        self._arrivals.go_on_from(former._arrivals)

    @property
    def scheduler(self) -> Scheduler:
        """Itself; see `Serving`."""
        return self

    @property
    def ranks(self) -> tuple[Scheduler, ...]:
        """Itself, as the only one; see `RankedScheduler`."""
        return (self,)

    @property
    def buckets(self) -> BucketSet:
        """Shapes that the engine has compiled."""
        return self.state.buckets

    @property
    def builder(self) -> Builder:
        """Builds its batches; ranks that share steps get another one."""
        return self._applier.builder

    @builder.setter
    def builder(self, builder: Builder) -> None:
        self._applier.builder = builder

    @property
    def cache(self) -> CacheManager:
        """Pages, rows and prefixes."""
        return self.state.cache

    @property
    def kept_images(self) -> KeptImages | None:
        """What is copied to host memory of the pool of embeddings; None: nothing is."""
        images, tower = self.state.images, self.state.capacity.tower
        return images.kept if images is not None and tower is not None and tower.host_bytes else None

    @property
    def is_idle(self) -> bool:
        """Whether nothing can happen before the next message, or within `due_in_s`."""
        has_work = (self._requests.waiting or self._requests.admitted) and not self._pauses
        for resource in self._resources:
            has_work = has_work or resource.has_work(bool(self._pauses))
        ops = self.state.ops
        return not (has_work or ops.queued or ops.waiting or self.state.steps_in_flight or self._replies)

    @property
    def due_in_s(self) -> float:
        """See `Serving`."""
        return self._requests.due_in_s

    @property
    def is_paused(self) -> bool:
        """Whether nothing is launched until an order ends that; the moment of an exchange of weights doesn't count."""
        return bool(self._pauses - {PauseReason.UPDATE})

    @property
    def may_launch(self) -> bool:
        """Whether steps are launched now."""
        return not self._pauses

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

    @property
    def steps_in_flight(self) -> int:
        """Steps that are launched and not collected."""
        return self.state.steps_in_flight

    @property
    def has_replies(self) -> bool:
        """Whether `take_replies` would return any."""
        return bool(self._replies)

    @property
    def num_pending_tokens(self) -> int:
        """Prompt tokens that are not launched yet, cached or not."""
        return self._requests.num_waiting_tokens + sum(req.extend_left for req in self._requests.extending.values())

    @property
    def place_load(self) -> PlaceLoad:
        """How busy it is, for the choice between ranks."""
        usage = self.cache.used_tokens / self.state.capacity.pool_tokens
        return PlaceLoad(self.num_running + self.num_waiting, self.num_waiting, usage)

    @property
    def rank_load(self) -> RankLoad:
        """The part of its load that is shown of each rank."""
        requests, cache = self._requests, self.cache
        return RankLoad(
            len(requests.admitted),
            len(requests.waiting),
            requests.num_waiting_tokens,
            cache.used_tokens,
            cache.cached_tokens,
        )

    def receive(self, messages: Sequence[Request | Abort], since_s: float | None = None) -> None:
        """Queues new requests (or refuses them) and ends aborted ones. One for which that fails is ended alone.

        New ones wait since now, or elsewhere since `since_s`.
        """
        for message in messages:
            try:
                self._replies += self._arrivals.receive(message, since_s)
            except Exception as error:
                self._fail(message.request_id, error)

    def refusal(self, request: Request) -> Refusal | None:
        """Why `request` can't be queued now, or None if it can."""
        return self._arrivals.refusal(request)

    def expect(self, request: Request) -> None:
        """Compiles the grammar of a request that is to come; `forget` it if it doesn't."""
        if request.sampling.masked:
            self._grammars.ask(request.request_id, request.sampling.grammar)

    def forget(self, request_id: str) -> None:
        """Takes `expect` back."""
        self._grammars.forget(request_id)

    def has(self, request_id: str) -> bool:
        """Whether a sample of the request is here that has not ended."""
        return bool(self._requests.samples_of(request_id))

    def end(self, request_id: str) -> None:
        """Ends a request wherever it is, if it is here; what it computed may be shared. No reply says so."""
        for req in self._requests.samples_of(request_id):
            self._applier.end(req)

    def room_for(self, request: Request) -> bool:
        """Whether a request that isn't here yet would soon be admitted, so that its prefix is not evicted before.

        An empty pool takes any request, as in planning. What is held for running requests counts as taken. A row for
        one sample is enough: it keeps the prefix for the others, which wait for rows like any request.
        """
        return self._has_room(len(request.prompt_ids), 1)

    def _has_room(self, prompt_len: int, num_samples: int) -> bool:
        requests, cache = self._requests, self.cache
        if not (requests.waiting or requests.admitted):
            return True
        if len(requests.waiting) + num_samples > cache.table.num_free_rows:
            return False
        held = pages_held_for(list(requests.admitted.values()), self.state.ratio.value, cache)
        held += sum(cache.pages_for(req.prompt_len + 1) for req in requests.waiting.values())
        return held + cache.pages_for(prompt_len + 1) <= cache.num_available

    def first_to_move(self) -> str | None:
        """The request that waits longest and of which no sample was ever admitted, if it may be, and in any rank."""
        request_id = self._requests.first_never_admitted()
        if request_id is None:
            return None
        leader = self._requests.samples_of(request_id)[0]
        return request_id if leader.may_start and not (leader.stays or self._requests.admission_paused) else None

    def takes_over(self, other: Scheduler, request_id: str) -> bool:
        """Whether it has room for a request that waits in the queue of `other`; then that moves to its own queue."""
        samples = other._requests.samples_of(request_id)
        if not self._has_room(samples[0].prompt_len, len(samples)):
            return False
        since_s = other._requests.withdraw(request_id)
        self._arrivals.take_over(samples, since_s)
        return True

    def num_cached(self, ids: IntArray, namespace: bytes) -> int:
        """Leading full pages of a prompt that the pool has, or that host memory has and that had better be loaded."""
        num_pages = self.cache.peek(ids, namespace).num_pages
        return num_pages + sum(resource.num_to_load(ids, namespace, num_pages) for resource in self._resources)

    def land(self, ids: IntArray, first_page: int, num_pages: int, owner: str, namespace: bytes) -> IntArray:
        """Caches KV that was computed elsewhere, `num_pages` pages from `first_page` on, as a prefix.

        Returns the pages that the caller is to fill, which stand for the last ones of those. What host memory has of
        the prefix before them is loaded. See `CacheManager.land`.
        """
        pages, loaded = self.cache.land(ids, first_page, num_pages, owner, namespace)
        if loaded is None:
            return pages
        self.state.ops.submit(Insert(tuple(pages[: len(loaded)].tolist()), loaded))
        return pages[len(loaded) :]

    def pages_of(self, request_id: str, first: int, stop: int) -> tuple[int, ...]:
        """The pages first .. stop - 1 of a running request of one sample."""
        (req,) = self._requests.samples_of(request_id)
        assert req.lease is not None
        return tuple(self.cache.table.pages[req.lease.row, first:stop].tolist())

    def limit_cached_tokens(self, request_id: str, num_tokens: int) -> None:
        """Has a request that waits compute its prompt from token `num_tokens` on, or from an earlier one."""
        for req in self._requests.samples_of(request_id):
            most = req.prompt_len if req.max_cached_tokens is None else req.max_cached_tokens
            req.max_cached_tokens = min(num_tokens, most)

    def limit_found_tokens(self, request_id: str, num_tokens: int) -> None:
        """Has a request that waits report at most `num_tokens` as cached: more of its prompt was computed for it."""
        for req in self._requests.samples_of(request_id):
            req.max_found_tokens = num_tokens

    def launch(self) -> StepInputs | None:
        """Decides the next step and counts it as launched; None if there is nothing to do before `collect`.

        A request for which that fails is ended, and the step decided again without it.
        """
        self._end_overdue()
        if not self._grammars.num_waiting:
            return self._launch()
        self._replies += self._arrivals.take_grammars()
        inputs = self._launch()
        if inputs is None and not (self.state.steps_in_flight or self._replies):
            self._grammars.wait(GRAMMAR_WAIT_S)
        return inputs

    def _launch(self) -> StepInputs | None:
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
        self.state.speculation.launched(plan)
        if plan.retract and self.state.retract_also is None:
            self._retraction_warning.retracted(len(plan.retract))
        self._applier.share_prefixes(plan)
        return inputs

    def collect(
        self,
        tokens: Sequence[int] | np.ndarray,
        outputs: HostOutputs = NO_OUTPUTS,
        drafts: ReadDrafts = nothing_drafted,
    ) -> None:
        """Takes what the oldest step in flight yields, as `StepHandle.tokens` and `outputs` give it.

        `drafts` is called once that is needed, if the step drafts.
        """
        num_failed = self.state.totals.failed_requests
        self._replies += self._applier.collect(np.asarray(tokens), outputs, drafts)
        if self.state.totals.failed_requests != num_failed:
            self.check()

    def masks(self, num_choices: int) -> Words:
        """`[num_choices, ceil(V / 32)]` which tokens the step launched last may choose, for a `masked` step.

        `num_choices` is that of its bucket. The steps before it that had its requests must be collected.
        """
        words, replies = self._applier.masks(num_choices)
        self._replies += replies
        return words

    @property
    def reads_first(self) -> bool:
        """Whether steps in flight are to be collected before `launch`, since drafts follow their tokens."""
        return self.state.speculation.reads_first

    @property
    def ops(self) -> EngineOps:
        """What the engine is to do before the step that was launched last."""
        return self.state.ops

    def before_exit(self, engine: PageEngine) -> None:
        """Does what is left to do before the engine ends: copies all that is cached to the host tier."""
        for resource in self._resources:
            resource.before_exit(engine)

    def take_replies(self) -> list[Reply]:
        """All replies since the last call."""
        replies, self._replies = self._replies, []
        return replies

    def bucket_times(self) -> list[BucketTimes]:
        """How long the steps of each bucket took since the start."""
        return self._stopwatch.bucket_times()

    def load(self, recompiles: int, leaks: int = 0, weight_version: str = DEFAULT_WEIGHT_VERSION) -> Load:
        """How busy the scheduler is, and what the caller knows. Cost is independent of the queue."""
        cache, requests = self.state.cache, self._requests
        load = Load(
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
            num_blocked=requests.num_without_grammar,
        )
        for resource in self._resources:
            load = resource.add_to(load)
        return self.state.speculation.add_to(load)

    def pause(self, reason: PauseReason = PauseReason.OPERATOR) -> None:
        """Launches nothing until `resume`. Requests queue up, aborts work; steps in flight are still to collect."""
        self._pauses.add(reason)

    def resume(self, reason: PauseReason = PauseReason.OPERATOR) -> None:
        """Launches again, unless there is another reason to pause."""
        self._pauses.discard(reason)

    def pause_admission(self, paused: bool) -> None:
        """Admits no sample of a request that has not begun, from now on; or admits them again."""
        self._requests.pause_admission(paused)

    def retract_all(self) -> None:
        """Takes all running requests back to the queue, in their order; while paused, with no step in flight."""
        assert self._pauses and not self.state.steps_in_flight
        for req in reversed(list(self._requests.admitted.values())):
            self._applier.take_back(req)
        self.state.admission_closed = False
        self.state.ratio.reset()

    def abort_all(self) -> None:
        """Ends every request."""
        self._replies += self._arrivals.abort(self._requests.all())

    def retire_cache(self) -> None:
        """Lets no later request find KV that is cached now; running requests keep theirs. For new weights."""
        for resource in self._resources:
            resource.retire_cached()
        self.cache.retire(self._leases())

    def flush_cache(self) -> None:
        """Drops every cached prefix that no request uses."""
        for resource in self._resources:
            resource.flush()
        self.cache.flush()

    def leaks(self) -> list[str]:
        """Pages, rows and locks that are lost or in two places, each in words; [] if all is well."""
        return self.cache.leaks(self._leases(), self._loading())

    def check(self) -> None:
        """Integrity of requests, rows and pages; raises AssertionError."""
        self._requests.check()
        self.cache.check(self._leases(), self._loading())
        for resource in self._resources:
            resource.check(self._requests)
        for req in self._requests.admitted.values():
            assert req.lease is not None and req.kv_len <= req.lease.num_tokens, f"{req.name} stores more than it holds"

    def _leases(self) -> Iterator[Lease]:
        return (req.lease for req in self._requests.admitted.values() if req.lease)

    def _loading(self) -> Iterator[HostPage]:
        return (page for req in self._requests.prefetching.values() for page in req.to_load)

    def _end_overdue(self) -> None:
        for resource in self._resources:
            resource.advance()
        self._replies += self._arrivals.end_overdue()

    def _fail(self, request_id: str, error: BaseException | None) -> None:
        """Ends a request for which our work raised `error`. Raises AssertionError if that has damaged the state."""
        self._replies.append(self._applier.fail(request_id, error))
        self.check()


def _checked_eos(eos_token_ids: Iterable[int]) -> frozenset[int]:
    """The ids, each once. Raises `CheckpointError` if they are too many."""
    ids = frozenset(eos_token_ids)
    if len(ids) > MAX_EOS_TOKEN_IDS:
        raise CheckpointError(
            f"the model has {len(ids)} EOS tokens, but {MAX_EOS_TOKEN_IDS} are the most: shorten eos_token_id in its "
            "generation_config.json"
        )
    return ids


def _make_cache(capacity: Capacity, radix_cache: bool, tier: LowerTier) -> tuple[CacheManager, Snapshots | None]:
    """An empty cache, and its snapshots of states; None: the model keeps none, or prefixes are not shared."""
    prefixes: PrefixCache = NaiveCache()
    snapshots: Snapshots | None = None
    if radix_cache and capacity.num_snapshots is None:
        prefixes = RadixCache(capacity.page_size)
    elif radix_cache and capacity.num_snapshots:
        prefixes = SnapshotCache(capacity.page_size, capacity.num_rows + 1, capacity.num_snapshots)
        snapshots = Snapshots(prefixes, capacity.page_size)
    table = PageTable(capacity.num_rows, capacity.max_pages_per_seq)
    books = snapshots or SnapshotBooks()
    return CacheManager(capacity.num_pages, capacity.page_size, table, prefixes, tier, books), snapshots


def _timing_of(config: SchedulingConfig, capacity: Capacity, buckets: BucketSet) -> Timing:
    """What says how long steps may take."""
    if config.max_itl_ms is None:
        return Timing()
    return Latency(config.max_itl_ms / 1000, buckets, capacity.page_size)


def _make_images(state: SchedulerState) -> Images | None:
    """The embeddings of images; None: the model has no tower."""
    capacity = state.capacity
    if capacity.tower is None:
        return None
    pool = EmbeddingRows(capacity.tower.num_rows)
    return Images(pool, capacity.tower, state.buckets, state.totals, state.ops, state.timing, capacity.sees_ahead)


def _resources_of(
    state: SchedulerState,
    tier: HostTier | None,
    loads: LoadRule | None,
    states: States | None,
    clock: Callable[[], float],
) -> tuple[Resource, ...]:
    """What requests hold besides KV pages, in the order in which plans draft it."""
    resources: list[Resource] = []
    if tier is not None and loads is not None:
        resources.append(HostCopies(state.cache, tier, loads, state.requests, state.ops, state.totals, clock))
    if state.images is not None:
        resources.append(state.images)
    if state.capacity.max_adapters:
        resources.append(state.adapters)
    if states is not None:
        resources.append(states)
    return tuple(resources)


class RetractionWarning:
    """Reports in the log that pages ran out, and which flags to change.

    A retracted request computes its prompt and its output so far again, so a server that retracts often is slower than
    it need be. Retractions come in bursts: one line stands for all of at least `WARNING_INTERVAL_S` seconds.

    Args:
      capacity: of the pool and the batch.
      conservativeness: --schedule-conservativeness.
      clock: gives seconds.
    """

    def __init__(self, capacity: Capacity, conservativeness: float, clock: Callable[[], float]) -> None:
        self._capacity = capacity
        self._conservativeness = conservativeness
        self._clock = clock
        self._since_s = self._next_s = clock()
        self._count = 0

    def retracted(self, count: int) -> None:
        """Counts `count` requests that a step has retracted for want of pages; logs them if it is time."""
        now_s = self._clock()
        if not self._count:
            self._since_s = now_s
        self._count += count
        if now_s < self._next_s:
            return
        logger.warning(
            "the KV pool of %d tokens ran out: %d running requests were retracted within %.0f s and start over later; "
            "raise --schedule-conservativeness (now %g) or lower --max-running-requests (now %d), or enlarge the pool "
            "(--mem-fraction-static, --max-total-tokens)",
            self._capacity.pool_tokens, self._count, now_s - self._since_s, self._conservativeness,
            self._capacity.num_rows,
        )  # fmt: skip
        self._next_s, self._count = now_s + WARNING_INTERVAL_S, 0
