"""`EngineView`: what the page at / shows of a scheduler, and `EngineWatch`, which records the steps between two looks.

A view is made of questions that change nothing, and its size is bounded whatever the pool and the queue hold: it has
counts, ids and lengths, and no token. While nobody looks, nothing here is called: the watch is one of the orders of
control.py from the first `WatchEngine` until none has come for some seconds. frontend/http/page/live.py sends them.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Any, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from jaxsgl.batch.inputs import StepInputs
from jaxsgl.cache.pages import PageState
from jaxsgl.cache.prefix import TreeNode
from jaxsgl.messages.orders import WatchEngine
from jaxsgl.messages.replies import BucketTimes
from jaxsgl.scheduler.in_flight import bucket_name
from jaxsgl.scheduler.orders.inspection import dump_requests
from jaxsgl.scheduler.req import Req
from jaxsgl.scheduler.scheduler import Scheduler
from jaxsgl.scheduler.serving import AnyScheduler

MAX_STEPS = 256  # that are kept, the newest ones
MAX_LISTED = 64  # requests of each kind
MAX_NODES = 240  # of the tree
MAX_CELLS = 1024  # of the map of pages
MAX_LINE_CHARS = 300  # of a plan

Shape: TypeAlias = tuple[str, str]  # kind and size of a bucket


class StepView(msgspec.Struct, frozen=True, array_like=True):
    """A step that has ended.

    Attributes:
      number: counts steps since the start.
      kind, bucket: the program, by kind and padded shape.
      tokens, tokens_padded: real tokens, and those of the program.
      seqs, seqs_padded: likewise sequences.
      ms: how long it took.
      plan: its plan in one line.
    """

    number: int
    kind: str
    bucket: str
    tokens: int
    tokens_padded: int
    seqs: int
    seqs_padded: int
    ms: float
    plan: str


class BucketView(msgspec.Struct, frozen=True, array_like=True):
    """A compiled shape, and what ran in it since the start: steps, and milliseconds of all of them."""

    kind: str
    bucket: str
    steps: int
    ms: float


class PagesView(msgspec.Struct, frozen=True):
    """The KV pool.

    Attributes:
      page_size: in tokens.
      free, evictable, locked, owned: pages by `PageState`.
      cells: a map of the pool, a digit for each `pages_per_cell` pages: the `PageState` that most of them have.
    """

    page_size: int
    free: int
    evictable: int
    locked: int
    owned: int
    pages_per_cell: int
    cells: str


class EngineView(msgspec.Struct, frozen=True):
    """What a scheduler holds, and the steps since the last look.

    Attributes:
      last_step: the number of the newest of `steps`, 0 without any.
      paused: nothing is launched until an operator ends that.
      blocked: why the last step that tried to admit stopped, or None.
      num_running, num_waiting: samples.
      max_running: rows that there are.
      pages: the pool.
      tree: the part of the prefix tree that was used last; `tree_pages` are the pages of all of it.
      running, waiting: the first samples of each, as `dump_requests` has them.
      steps: in order; the newest `MAX_STEPS` at most.
      buckets: every shape that is compiled.
      resources: what resources say of themselves, as adapters.
    """

    last_step: int
    paused: bool
    blocked: str | None
    num_running: int
    num_waiting: int
    max_running: int
    pages: PagesView
    tree: list[TreeNode]
    tree_pages: int
    running: list[dict[str, Any]]
    waiting: list[dict[str, Any]]
    steps: list[StepView]
    buckets: list[BucketView]
    resources: dict[str, Any]


class EngineWatch:
    """An `Order` of control.py: records steps while somebody looks.

    Args:
      scheduler: what is looked at.
      clock: gives seconds.
    """

    def __init__(self, scheduler: AnyScheduler, clock: Callable[[], float] = time.monotonic) -> None:
        self._scheduler = scheduler
        self._clock = clock
        self._until_s = 0.0
        self._launched: deque[tuple[StepInputs, int, str]] = deque()
        self._ended: deque[StepView] = deque(maxlen=MAX_STEPS)
        self._timed_s = 0.0  # of all steps that had ended by the last turn

    def look(self, order: WatchEngine) -> EngineView:
        """The view that `order` asks for; steps are recorded from now on, as long as it says."""
        now_s = self._clock()
        if now_s >= self._until_s:
            self._launched.clear()
            self._ended.clear()
            self._timed_s = self._all_s()
        self._until_s = now_s + order.seconds
        return view_of(self._scheduler, self._shapes, [step for step in self._ended if step.number > order.since])

    @cached_property
    def _shapes(self) -> list[Shape]:
        """Kind and size of all compiled programs, ascending; those that differ in how they sample are one here."""
        compiled = reversed(self._scheduler.buckets.all())
        return [*dict.fromkeys((bucket.kind, bucket_name(bucket)) for bucket in compiled)]

    def before_step(self, inputs: StepInputs) -> None:
        """Notes a step that is about to be launched."""
        plan = str(self._scheduler.last_plan)
        line = plan if len(plan) <= MAX_LINE_CHARS else f"{plan[:MAX_LINE_CHARS]} ..."
        self._launched.append((inputs, self._scheduler.num_steps, line))

    def after_turn(self, collected: bool) -> bool:
        """Notes the steps that have ended in this turn; False once nobody has looked for long enough.

        Of two steps in one turn each is noted with half of their time.
        """
        num_ended = len(self._launched) - self._scheduler.steps_in_flight
        if collected and num_ended > 0:
            all_s = self._all_s()
            ms, self._timed_s = (all_s - self._timed_s) / num_ended * 1000, all_s
            self._ended.extend(_step_view(*self._launched.popleft(), ms) for _ in range(num_ended))
        elif collected:
            self._timed_s = self._all_s()  # a step that was launched before anybody looked
        return self._clock() < self._until_s

    def _all_s(self) -> float:
        return sum(times.seconds for times in self._scheduler.bucket_times())


def view_of(scheduler: AnyScheduler, shapes: Iterable[Shape], steps: list[StepView]) -> EngineView:
    """What `scheduler`, whose programs have these `shapes`, holds now; changes nothing."""
    ranks = scheduler.ranks
    blocked = [rank.state.blocked.value for rank in ranks if rank.state.blocked]
    running, waiting = (
        [line for rank in ranks for line in dump_requests(reqs_of(rank), rank.state.requests, MAX_LISTED)][:MAX_LISTED]
        for reqs_of in (_running, _waiting)
    )
    tree, tree_pages = _tree(ranks)
    return EngineView(
        last_step=steps[-1].number if steps else 0,
        paused=scheduler.is_paused,
        blocked=blocked[0] if blocked else None,
        num_running=scheduler.num_running,
        num_waiting=scheduler.num_waiting,
        max_running=sum(rank.state.capacity.num_rows for rank in ranks),
        pages=_pages(ranks),
        tree=tree,
        tree_pages=tree_pages,
        running=running,
        waiting=waiting,
        steps=steps,
        buckets=_buckets(shapes, scheduler.bucket_times()),
        resources={
            name: value
            for rank in ranks
            for resource in rank.state.resources
            for name, value in resource.dump().items()
        },
    )


def _running(rank: Scheduler) -> Iterable[Req]:
    return rank.state.requests.admitted.values()


def _waiting(rank: Scheduler) -> Iterable[Req]:
    return rank.state.requests.waiting.values()


def _tree(ranks: Sequence[Scheduler]) -> tuple[list[TreeNode], int]:
    """The trees of all ranks next to each other, and how many pages they have."""
    nodes: list[TreeNode] = []
    for rank in ranks:
        first = len(nodes)
        nodes += [
            node if node.parent < 0 else node._replace(parent=first + node.parent)
            for node in rank.cache.prefixes.outline(MAX_NODES // len(ranks))
        ]
    return nodes, sum(rank.cache.prefixes.num_pages for rank in ranks)


def _pages(ranks: Sequence[Scheduler]) -> PagesView:
    """The pools of all ranks, one after the other."""
    states = []
    for rank in ranks:
        leases = [req.lease for req in rank.state.requests.admitted.values() if req.lease is not None]
        states.append(rank.cache.page_states(leases))
    caches = [rank.cache for rank in ranks]
    prefixes = [cache.prefixes for cache in caches]
    per_cell, cells = _cells(np.concatenate(states))
    return PagesView(
        page_size=caches[0].page_size,
        free=sum(cache.num_free for cache in caches),
        evictable=sum(each.num_evictable for each in prefixes),
        locked=sum(each.num_pages - each.num_evictable for each in prefixes),
        owned=sum(cache.num_pages - 1 - cache.num_free - cache.prefixes.num_pages for cache in caches),
        pages_per_cell=per_cell,
        cells=cells,
    )


def _cells(states: npt.NDArray[np.uint8]) -> tuple[int, str]:
    """Pages per cell, and a digit per cell: the state that most pages of the cell have."""
    per_cell = -(-len(states) // MAX_CELLS)
    firsts = np.arange(0, len(states), per_cell)
    counts = np.stack([np.add.reduceat(states == state, firsts, dtype=np.int32) for state in PageState])
    return per_cell, "".join(map(str, counts.argmax(axis=0).tolist()))


def _buckets(shapes: Iterable[Shape], times: Iterable[BucketTimes]) -> list[BucketView]:
    ran = {(each.kind, each.bucket): (sum(each.counts), each.seconds * 1000) for each in times}
    return [BucketView(*shape, *ran.get(shape, (0, 0.0))) for shape in shapes]


def _step_view(inputs: StepInputs, number: int, plan: str, ms: float) -> StepView:
    bucket = inputs.bucket
    return StepView(
        number,
        bucket.kind,
        bucket_name(bucket),
        inputs.num_tokens,
        inputs.padded_tokens,
        inputs.num_seqs,
        max(len(inputs.of_ranks), 1) * bucket.num_seqs,
        round(ms, 3),
        plan,
    )
