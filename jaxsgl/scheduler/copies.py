"""`Copies`: carries out what plans copy between the pool and the host tier. Decides nothing.

A load grows the lease of its request as a chunk does, so retraction, abort and eviction treat loaded pages as computed
ones, and no ticket holds a page of the pool. apply.py calls it, if there is a host tier.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import numpy.typing as npt

from jaxsgl.batch.engine_api import PageEngine
from jaxsgl.batch.engine_ops import Gather, Insert
from jaxsgl.cache.host_pages import HostPage, extend_names
from jaxsgl.cache.pages import as_pages
from jaxsgl.cache.tiers import HostTier
from jaxsgl.messages.load import HostLoad
from jaxsgl.scheduler.plan import Admission, LoadPages, StepPlan, Write
from jaxsgl.scheduler.prefetch import LoadRule
from jaxsgl.scheduler.req import Req, State
from jaxsgl.scheduler.state import SchedulerState


class Copies:
    """Writes and loads on `state`.

    Args:
      state: the scheduler's state, whose cache has a host tier.
      tier, rule: of `state`.
      clock: gives seconds.

    """

    def __init__(self, state: SchedulerState, tier: HostTier, rule: LoadRule, clock: Callable[[], float]) -> None:
        self._state = state
        self._tier = tier
        self._rule = rule
        self._clock = clock

    def has_work(self, is_paused: bool) -> bool:
        """Whether the next plan, which isn't made while the scheduler pauses, writes pages."""
        return self._tier.has_to_write and not is_paused

    def load(self) -> HostLoad:
        """How full the tier is, and what was copied so far."""
        host, tokens_of = self._tier.host, self._state.cache.tokens_of
        return msgspec.structs.replace(
            self._state.host_totals,
            total_tokens=tokens_of(host.num_pages),
            used_tokens=tokens_of(host.num_used),
            written_tokens=tokens_of(self._tier.num_written),
            evicted_tokens=tokens_of(host.num_evicted),
            not_written_tokens=tokens_of(self._tier.num_not_written),
        )

    def name_pages(self, req: Req) -> None:
        """Names the full pages of all that is known of `req`."""
        extend_names(req.page_names, as_pages(req.hash_ids, self._state.cache.page_size), req.namespace)

    def begin_load(self, admission: Admission) -> tuple[list[HostPage], float]:
        """Pins the pages that a request is to load; returns them, and the time until which it waits for them."""
        first = self._state.cache.pages_for(admission.cached_tokens)
        names = admission.req.page_names[: first + admission.load_pages]
        pages = self._tier.run_of(names, first)
        assert len(pages) == admission.load_pages, f"{admission.req.name}: the host tier changed since the plan"
        self._tier.host.begin_load(pages)
        return pages, self._clock() + self._rule.timeout_s

    def carry_out(self, plan: StepPlan) -> None:
        """Begins the writes of `plan`, does its loads, and stops those for which there is no room."""
        for copy in plan.copies:
            if isinstance(copy, Write):
                self._write(copy)
            else:
                self._load(copy)
        for req in plan.recompute:
            self.stop(req)

    def share_loaded(self, plan: StepPlan) -> None:
        """Gives loaded pages to the prefix cache."""
        for copy in plan.copies:
            if isinstance(copy, LoadPages):
                assert copy.req.lease is not None
                self._state.cache.share(copy.req.lease, copy.req.stored_ids())

    def write_all(self, pages: PageEngine) -> None:
        """Copies all that is cached to the host, as far as there is room, and waits for it: the engine is to end."""
        edges = self._state.cache.prefixes.edges()
        self._tier.write_all(page for edge in edges for page in edge.pages.tolist())
        ops = self._state.ops
        while self._tier.has_to_write or ops.has_work:
            if self._tier.has_to_write:
                self._write(Write(self._tier.to_write()))
            for number, op in ops.take():
                pages.apply(op, number)
            if ops.waiting:
                ops.finished(pages.poll(wait=True))

    def computed(self, num_tokens: int, seconds: float) -> None:
        """A step that extended prompts by `num_tokens` tokens took so long."""
        self._rule.computed(num_tokens, seconds)

    def end_overdue(self) -> None:
        """Has requests compute what they have waited for too long."""
        if self._state.requests.prefetching:
            now_s = self._clock()
            for req in list(self._state.requests.prefetching.values()):
                if now_s > req.load_until_s:
                    self.stop(req)

    def stop(self, req: Req) -> None:
        """Has a request compute what it has not loaded."""
        self._tier.host.end_load(req.stop_loading())
        self._state.requests.moved(req)
        self._state.host_totals.given_up += 1

    def left(self, req: Req) -> None:
        """A request that was loading is retracted, or ends."""
        pages, req.to_load = req.to_load, []
        self._tier.host.end_load(pages)

    def _write(self, write: Write) -> None:
        entries, pages = self._tier.begin_write(write.pages)
        if pages:
            self._state.ops.submit(Gather(pages), partial(self._written, entries))

    def _written(self, entries: list[HostPage], data: npt.NDArray[Any]) -> None:
        self._tier.end_write(entries, data)

    def _load(self, load: LoadPages) -> None:
        req, state = load.req, self._state
        assert req.lease is not None
        host_pages = req.to_load[: load.num_pages]
        pages = state.cache.grow_loaded(req.lease, load.num_pages)
        state.ops.submit(Insert(tuple(pages.tolist()), self._tier.host.read(host_pages)))
        self._tier.host.end_load(host_pages)
        num_tokens = state.cache.tokens_of(load.num_pages)
        req.loaded(load.num_pages, num_tokens)
        if not req.output_ids:
            state.totals.cached_prompt_tokens += num_tokens
        state.host_totals.loaded_tokens += num_tokens
        if req.state is State.EXTENDING:
            state.requests.moved(req)
