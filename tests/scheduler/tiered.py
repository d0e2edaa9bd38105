"""A scheduler with a host tier over a fake engine, behind the real loop: what the tests of the tier drive."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxsgl.batch.buckets import BucketSet, Capacity
from jaxsgl.cache.host_pages import HostPages, extend_names
from jaxsgl.cache.manager import CacheManager
from jaxsgl.cache.tiers import WRITE_THROUGH, HostTier
from jaxsgl.config.engine import SchedulingConfig
from jaxsgl.messages.orders import Abort, ToEngine
from jaxsgl.requests.media import FIRST_HASH_ID
from jaxsgl.requests.request import FinishReason, Request
from jaxsgl.scheduler.loop import run_loop
from jaxsgl.scheduler.resources.host_tier import LoadRule
from jaxsgl.testing.engine import FakeEngine, FakeHandle, ScriptedMailbox
from tests.checked import CheckedScheduler, WatchedScheduler
from tests.scheduler.serving import capacity


def tier_of(sizes: Capacity, host_pages: int = 100, policy: str = WRITE_THROUGH, most_pages: int = 4) -> HostTier:
    layout = FakeEngine(sizes).page_layout
    arena = np.full(layout.shape(host_pages), -7, layout.host_dtype)
    return HostTier(HostPages(arena), policy, most_pages)


def tiered_scheduler(
    sizes: Capacity,
    tier: HostTier | None,
    *,
    timeout_s: float = 60.0,
    checked: type[CheckedScheduler] = WatchedScheduler,
    max_drafts: int = 0,
    **kwargs: Any,
) -> CheckedScheduler:
    rule = None if tier is None else LoadRule(0.0, timeout_s, least_tokens=1)
    kwargs.setdefault("config", SchedulingConfig())
    buckets = BucketSet.derive(sizes, max_drafts=max_drafts)
    return checked(sizes, buckets, (), tier=tier, loads=rule, **kwargs)


def serve_tiered(
    sizes: Capacity, script: Sequence[Sequence[ToEngine]], tier: HostTier, *, overlap: bool = True, **kwargs: Any
) -> tuple[ScriptedMailbox, CheckedScheduler]:
    """Runs the loop over `script` until all is served and written."""
    scheduler = tiered_scheduler(sizes, tier, **kwargs)
    mailbox, engine = ScriptedMailbox(script), FakeEngine(sizes)
    run_loop(scheduler, engine, mailbox, int(overlap), check_every_step=True)
    assert scheduler.is_idle and not tier.is_writing
    assert scheduler.cache.num_available == sizes.num_pages - 1
    return mailbox, scheduler


class Stepper:
    """Turns of the loop one by one, with gathers that end when the test says so.

    Attributes:
      scheduler, tier, engine: what is driven.
      holds_gathers: while True, gathers do not end.
      outputs, cached: tokens of each request, and prompt tokens that it did not compute, by request id.
      ended: how requests ended, by request id.
      now_s: the scheduler's clock.
    """

    def __init__(self, sizes: Capacity, tier: HostTier | None, **kwargs: Any) -> None:
        self.now_s = 0.0
        self.scheduler = tiered_scheduler(sizes, tier, clock=lambda: self.now_s, **kwargs)
        self.engine = FakeEngine(sizes)
        self.holds_gathers = False
        self.outputs: dict[str, list[int]] = {}
        self.cached: dict[str, int] = {}
        self.ended: dict[str, FinishReason] = {}
        self._in_flight: deque[FakeHandle] = deque()

    @property
    def tier(self) -> HostTier:
        """That of the scheduler, which has one."""
        tier = self.scheduler.tier
        assert tier is not None
        return tier

    @property
    def num_in_flight(self) -> int:
        """Steps that are launched and not read."""
        return len(self._in_flight)

    def receive(self, *messages: Request | Abort) -> None:
        self.scheduler.receive(messages)
        self.scheduler.check()
        self.settle()

    def turn(self, collects: bool = True) -> None:
        if self._in_flight and self.scheduler.reads_first:
            self._collect()
        inputs = self.scheduler.launch()
        for number, op in self.scheduler.ops.take():
            self.engine.apply(op, number)
        if inputs is not None:
            self._in_flight.append(self.engine.submit(inputs))
        is_alone = len(self._in_flight) == 1
        collects = collects and bool(self._in_flight)
        if collects and not is_alone:
            self._collect()
        if inputs is not None and inputs.masked:
            self._in_flight[-1].choose(self.scheduler.masks(inputs.bucket.num_choices))
        if collects and is_alone:
            self._collect()
        if self.scheduler.ops.waiting and not self.holds_gathers:
            self.scheduler.ops.finished(self.engine.poll())
            self.scheduler.check()
        self.settle()

    def run(self, *messages: Request | Abort, turns: int = 500) -> None:
        """Takes turns until nothing is left to do but wait for gathers that are held back."""
        self.receive(*messages)
        while not (self.scheduler.is_idle and not self._in_flight):
            has_requests = self.scheduler.num_waiting or self.scheduler.num_running or self._in_flight
            if self.holds_gathers and not (has_requests or self.tier.has_to_write):
                return
            self.turn()
            turns -= 1
            assert turns, "a request waits forever"

    def _collect(self) -> None:
        step = self._in_flight.popleft()
        self.scheduler.collect(step.tokens(), step.outputs(), step.drafts)

    def settle(self) -> None:
        """Takes the replies. Launches and collects have checked all accounts."""
        for reply in self.scheduler.take_replies():
            assert reply.refusal is None, reply.refusal
            self.outputs.setdefault(reply.request_id, []).extend(reply.token_ids)
            self.cached[reply.request_id] = reply.cached_tokens
            if reply.finish_reason is not None:
                assert reply.request_id not in self.ended
                self.ended[reply.request_id] = reply.finish_reason


def small(num_pages: int = 21, **changes: Any) -> Capacity:
    """A pool of 20 pages of 4 tokens."""
    return capacity(**{"num_pages": num_pages, "rows": 4, "context": 64, "max_extend_tokens": 32, **changes})


def check_names(tier: HostTier, cache: CacheManager) -> None:
    """Checks that names are those of the tokens, and that what is on the host is the KV of these tokens."""
    tokens_of: dict[bytes, tuple[int, ...]] = {}
    for entry in tier.host.all():
        before = () if entry.parent is None else tokens_of[entry.parent.name]
        if entry.tokens is None:
            tokens_of[entry.name] = ()
            continue
        tokens_of[entry.name] = (*before, *entry.tokens.tolist())
        names: list[bytes] = []
        extend_names(names, np.array(tokens_of[entry.name], np.int32).reshape(-1, cache.page_size), b"")
        assert entry.name == names[-1], "a page has another page's name"
        if entry.is_written:
            keys = tier.host.arena[entry.slot, 0, 0, 0]
            is_text = entry.tokens < FIRST_HASH_ID
            assert (keys[:, 0] == entry.tokens)[is_text].all(), "a page on the host holds other tokens"
            assert keys[-1, 1] == len(tokens_of[entry.name]) - 1, "a page on the host is of another place"
