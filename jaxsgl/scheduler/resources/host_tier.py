"""The host tier of the KV pool as a resource: what plans write to host memory, and what requests load from it.

`LoadRule` compares the measured costs of loading a page and of computing its tokens. `HostDraft` decides what one step
writes and loads, `HostCopies` carries it out. A load grows the lease of its request as a chunk does, so retraction,
abort and eviction treat loaded pages as computed ones, and no ticket holds a page of the pool. cache/tiers.py keeps the
books of both tiers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import msgspec
import numpy.typing as npt

from jaxsgl.batch.engine_api import Gather, Insert, PageEngine
from jaxsgl.cache.host_pages import HostPage, extend_names
from jaxsgl.cache.manager import CacheManager
from jaxsgl.cache.pages import IntArray, as_pages
from jaxsgl.cache.prefix import Peek
from jaxsgl.cache.tiers import HostTier
from jaxsgl.messages.replies import HostLoad, Load, Totals
from jaxsgl.scheduler.engine_ops import EngineOps
from jaxsgl.scheduler.plan import Action, short_name
from jaxsgl.scheduler.req import Req, State
from jaxsgl.scheduler.request_table import RequestTable
from jaxsgl.scheduler.resources.resource import PlanInTheMaking, Resource, ResourceDraft

LEAST_TOKENS = 32  # a load costs a turn of the loop at least
_SMOOTHING = 0.1  # weight of the newest step


class LoadRule:
    """When to load instead of computing.

    Args:
      load_token_s: seconds that a token takes from host memory to the pool, as measured at the start.
      timeout_s: seconds that a request waits for its pages; then it computes what it lacks.
      least_tokens: fewer are computed.
    """

    def __init__(self, load_token_s: float, timeout_s: float, least_tokens: int = LEAST_TOKENS) -> None:
        self.timeout_s = timeout_s
        self._load_token_s = load_token_s
        self._least_tokens = least_tokens
        self._compute_token_s: float | None = None
        self._turn_token_s: float | None = None  # of loading, in turns that compute as well

    def pays(self, num_tokens: int) -> bool:
        """Whether `num_tokens` tokens should be loaded; supposed to, as long as no prompt was computed."""
        if num_tokens < self._least_tokens:
            return False
        return self._compute_token_s is None or self._load_token_s <= self._compute_token_s

    def computed(self, num_tokens: int, seconds: float) -> None:
        """Takes the time of a step that extended prompts by `num_tokens` tokens."""
        self._compute_token_s = _smoothed(self._compute_token_s, seconds / num_tokens)

    def begins_in_time(self, num_ahead: int) -> bool:
        """Whether a request will have loaded something before it has waited too long, after `num_ahead` tokens."""
        return self._turn_token_s is None or num_ahead * self._turn_token_s < self.timeout_s

    def loaded(self, num_tokens: int, seconds: float) -> None:
        """Takes the time of a turn that loaded `num_tokens` tokens, and computed whatever else."""
        self._turn_token_s = _smoothed(self._turn_token_s, seconds / num_tokens)


def _smoothed(known: float | None, newest: float) -> float:
    return newest if known is None else known + _SMOOTHING * (newest - known)


@dataclass(frozen=True, slots=True)
class Write:
    """Copy `pages` of the pool to the host tier."""

    verb: ClassVar[str] = "write"
    pages: tuple[int, ...]

    def __str__(self) -> str:
        return str(len(self.pages))


@dataclass(frozen=True, slots=True)
class BeginLoad:
    """Have `req`, which is admitted, wait for the next `num_pages` pages of its prefix."""

    verb: ClassVar[str] = "prefetch"
    req: Req
    num_pages: int

    def __str__(self) -> str:
        return f"{short_name(self.req)}+{self.num_pages}"


@dataclass(frozen=True, slots=True)
class LoadPages:
    """Load the next `num_pages` pages of the prefix of `req` from the host tier."""

    verb: ClassVar[str] = "load"
    req: Req
    num_pages: int

    def __str__(self) -> str:
        return f"{short_name(self.req)}+{self.num_pages}"


@dataclass(frozen=True, slots=True)
class StopLoad:
    """Have `req` compute what it has not loaded, since there is no room for the next page."""

    verb: ClassVar[str] = "recompute"
    req: Req

    def __str__(self) -> str:
        return short_name(self.req)


class HostCopies(Resource):
    """Writes to the host tier, and loads from it.

    Args:
      cache: whose tier it is.
      tier: of `cache`.
      rule: when to load.
      requests, ops, totals: of the scheduler.
      clock: gives seconds.
    """

    def __init__(
        self,
        cache: CacheManager,
        tier: HostTier,
        rule: LoadRule,
        requests: RequestTable,
        ops: EngineOps,
        totals: Totals,
        clock: Callable[[], float],
    ) -> None:
        self.cache, self.tier, self.rule, self.requests = cache, tier, rule, requests
        self._ops = ops
        self._totals = totals
        self._host_totals = HostLoad()  # as far as they are not those of the tier
        self._clock = clock
        self._last_load: tuple[float, int] | None = None  # when, and how many tokens, if the last plan loaded some

    def draft(self, plan: PlanInTheMaking) -> HostDraft:
        """See `Resource`."""
        return HostDraft(self, plan)

    def advance(self) -> None:
        """Has requests compute what they have waited for too long."""
        if self.requests.prefetching:
            now_s = self._clock()
            for req in list(self.requests.prefetching.values()):
                if now_s > req.load_until_s:
                    self._stop(req)

    def num_to_load(self, ids: IntArray, namespace: bytes, first: int) -> int:
        """See `Resource`; 0 if computing them costs less."""
        names: list[bytes] = []
        extend_names(names, as_pages(ids[:-1], self.cache.page_size), namespace)
        num_pages = len(self.tier.run_of(names, first))
        return num_pages if self.rule.pays(self.cache.tokens_of(num_pages)) else 0

    def arrived(self, samples: Sequence[Req]) -> None:
        """Names the pages of their prompt."""
        leader, *others = samples
        self._name_pages(leader)
        for req in others:
            req.page_names = leader.page_names.copy()

    def carry_out(self, actions: Iterable[Action]) -> None:
        """Begins writes and loads, and stops those for which there is no room."""
        actions = tuple(actions)
        self._time_loads(sum(action.num_pages for action in actions if isinstance(action, LoadPages)))
        for action in actions:
            match action:
                case Write():
                    self._write(action)
                case BeginLoad():
                    self._begin_load(action)
                case LoadPages():
                    self._load(action)
                case StopLoad(req):
                    self._stop(req)

    def _time_loads(self, num_pages: int) -> None:
        """Measures the turn from one load to the next."""
        now_s = self._clock()
        if num_pages and self._last_load is not None and self.requests.prefetching:  # loads went on in between
            then_s, num_tokens = self._last_load
            self.rule.loaded(num_tokens, now_s - then_s)
        self._last_load = (now_s, self.cache.tokens_of(num_pages)) if num_pages else None

    def carried_out(self, actions: Iterable[Action]) -> None:
        """Gives loaded pages to the prefix cache."""
        for action in actions:
            if isinstance(action, LoadPages):
                assert action.req.lease is not None
                self.cache.share(action.req.lease, action.req.stored_ids())

    def collected(self, extend_tokens: int, seconds: float) -> None:
        """Learns what it costs to compute tokens."""
        if extend_tokens:
            self.rule.computed(extend_tokens, seconds)

    def left(self, req: Req, ends: bool) -> None:
        """Unpins what a request was loading; one that comes back may load all that it has computed."""
        pages, req.to_load = req.to_load, []
        self.tier.host.end_load(pages)
        if not ends:
            self._name_pages(req)

    def retire_cached(self) -> None:
        """Has all requests compute what they were loading."""
        for req in list(self.requests.prefetching.values()):
            self._stop(req)

    def has_work(self, paused: bool) -> bool:
        """Whether the next plan writes pages."""
        return self.tier.has_to_write and not paused

    def before_exit(self, engine: PageEngine) -> None:
        """Copies all that is cached to the host, as far as there is room, and waits for it."""
        edges = self.cache.prefixes.edges()
        self.tier.write_all(page for edge in edges for page in edge.pages.tolist())
        ops = self._ops
        while self.tier.has_to_write or ops.queued or ops.waiting:
            if self.tier.has_to_write:
                self._write(Write(self.tier.to_write()))
            for number, op in ops.take():
                engine.apply(op, number)
            if ops.waiting:
                ops.finished(engine.poll(wait=True))

    def add_to(self, load: Load) -> Load:
        """Says how full the tier is, and what was copied so far."""
        host, tokens_of = self.tier.host, self.cache.tokens_of
        of_host = msgspec.structs.replace(
            self._host_totals,
            total_tokens=tokens_of(host.num_pages),
            used_tokens=tokens_of(host.num_used),
            written_tokens=tokens_of(self.tier.num_written),
            loaded_tokens=tokens_of(self.tier.num_loaded),
            evicted_tokens=tokens_of(host.num_evicted),
            not_written_tokens=tokens_of(self.tier.num_not_written),
        )
        return msgspec.structs.replace(load, host=of_host)

    def _name_pages(self, req: Req) -> None:
        """Names the full pages of all that is known of `req`."""
        extend_names(req.page_names, as_pages(req.hash_ids, self.cache.page_size), req.namespace)

    def _begin_load(self, load: BeginLoad) -> None:
        """Pins the pages that a request is to load."""
        req = load.req
        first = self.cache.pages_for(req.kv_len)
        pages = self.tier.run_of(req.page_names[: first + load.num_pages], first)
        assert len(pages) == load.num_pages, f"{req.name}: the host tier changed since the plan"
        self.tier.host.begin_load(pages)
        req.begin_loading(pages, self._clock() + self.rule.timeout_s)
        self.requests.moved(req)

    def _stop(self, req: Req) -> None:
        """Has a request compute what it has not loaded."""
        self.tier.host.end_load(req.stop_loading())
        self.requests.moved(req)
        self._host_totals.given_up += 1

    def _write(self, write: Write) -> None:
        entries, pages = self.tier.begin_write(write.pages)
        if pages:
            self._ops.submit(Gather(pages), partial(self._written, entries))

    def _written(self, entries: list[HostPage], data: npt.NDArray[Any]) -> None:
        self.tier.end_write(entries, data)

    def _load(self, load: LoadPages) -> None:
        req = load.req
        assert req.lease is not None
        host_pages = req.to_load[: load.num_pages]
        pages = self.cache.grow_loaded(req.lease, load.num_pages)
        self._ops.submit(Insert(tuple(pages.tolist()), self.tier.load(host_pages)))
        self.tier.host.end_load(host_pages)
        before = req.cached_tokens
        req.loaded(load.num_pages, self.cache.tokens_of(load.num_pages))
        self._totals.cached_prompt_tokens += req.cached_tokens - before
        if req.state is State.EXTENDING:
            self.requests.moved(req)


class HostDraft(ResourceDraft):
    """What one plan writes to the host tier and loads from it."""

    def __init__(self, copies: HostCopies, plan: PlanInTheMaking) -> None:
        self._copies = copies
        self._plan = plan
        self._begun: dict[Req, int] = {}  # requests that the plan admits, with the pages that they are to load

    @property
    def is_working(self) -> bool:
        """Whether a request waits for pages of the host tier."""
        return bool(self._begun or (self._copies.requests.prefetching and self._loading()))

    def defers(self, req: Req, prefix: Peek) -> bool:
        """Whether `req` is to load what follows its cached `prefix`."""
        return self._pages_to_load(req, prefix) > 0

    def admit(self, req: Req, prefix: Peek) -> None:
        """Notes what `req` is to load."""
        num_pages = self._pages_to_load(req, prefix)
        if num_pages:
            self._begun[req] = num_pages

    def actions(self, decodes: bool) -> tuple[Action, ...]:
        """What is written and loaded, and the requests that must stop loading; takes the pages off the ledger."""
        tier = self._copies.tier
        actions: list[Action] = [BeginLoad(req, num_pages) for req, num_pages in self._begun.items()]
        if tier.has_to_write:
            actions.append(Write(tier.to_write()))
        if self.is_working:
            ledger = self._plan.ledger
            loads, stuck = plan_loads(self._loading(), self._begun, tier.most_pages, ledger.available)
            for req, num_pages in loads:
                ledger.take(num_pages)
                actions.append(LoadPages(req, num_pages))
            actions += map(StopLoad, stuck)
        return tuple(actions)

    def _loading(self) -> list[Req]:
        taken_back = self._plan.taken_back
        return [req for req in self._copies.requests.prefetching.values() if req not in taken_back]

    def _pages_to_load(self, req: Req, prefix: Peek) -> int:
        """Pages after the cached `prefix` of `req` that it should load."""
        cache, rule = self._copies.cache, self._copies.rule
        if req.computes_prompt:
            return 0
        most = cache.pages_for(cache.page_floor(len(req.matchable_ids) - 1))  # a token is left to compute
        count = len(self._copies.tier.run_of(req.page_names[:most], prefix.num_pages))
        if not rule.pays(cache.tokens_of(count)):
            return 0
        num_ahead = sum(len(other.to_load) for other in self._loading()) + sum(self._begun.values())
        return count if rule.begins_in_time(cache.tokens_of(num_ahead)) else 0


def plan_loads(
    loading: Iterable[Req], admitted: Mapping[Req, int], most_pages: int, available: int
) -> tuple[list[tuple[Req, int]], list[Req]]:
    """The pages that each request loads next, in order, and the requests that must compute instead.

    Args:
      loading: PREFETCHING requests.
      admitted: requests that this plan admits, with the pages that they are to load.
      most_pages: of one step.
      available: pages of the pool that are left.
    """
    wanted = [*((req, len(req.to_load)) for req in loading), *admitted.items()]
    loads: list[tuple[Req, int]] = []
    stuck: list[Req] = []
    for req, num_pages in wanted:
        count = min(num_pages, most_pages, available)
        if count:
            loads.append((req, count))
            most_pages, available = most_pages - count, available - count
        elif not available:
            stuck.append(req)
    return loads, stuck
