"""`RankedScheduler`: the ranks of an engine with data-parallel attention, whose steps are one.

    receive(messages)   each new request goes to one rank (`requests/placement.py`)
    launch()            each rank plans and applies its own batch; batch/joint_builder.py makes one step of all
    collect(tokens)     each rank gets what its batch yields

A rank is a `Scheduler` with pages, rows, a prefix cache and a queue of its own, on devices of its own; experts and MLPs
are all devices' (`models/tensor_parallel.py`). One process decides for all of them, in the same turn of the loop: no
rank asks another, and none waits for another, since a rank without work computes padding. Steps are mixed: running
requests decode in each step, whether their own rank extends prompts in it or another.

A request stays in its rank from its first admission on. One that waits there for pages or rows goes to a rank with an
empty queue that has room for it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from jaxsgl.batch.build import BatchBuilder
from jaxsgl.batch.engine_api import PageEngine
from jaxsgl.batch.inputs import StepInputs
from jaxsgl.batch.joint_builder import JointBuilder
from jaxsgl.batch.outputs import NO_OUTPUTS, HostOutputs, by_rank
from jaxsgl.cache.manager import namespace_of
from jaxsgl.cache.pages import full_pages
from jaxsgl.config.engine import DEFAULT_WEIGHT_VERSION
from jaxsgl.messages.orders import Abort
from jaxsgl.messages.replies import BucketTimes, Load, RankLoad, Reply, Totals
from jaxsgl.requests import placement
from jaxsgl.requests.media import hash_ids
from jaxsgl.requests.request import Request
from jaxsgl.scheduler.engine_ops import EngineOps
from jaxsgl.scheduler.grammars.constraint import ALL, Words
from jaxsgl.scheduler.grammars.queue import Grammars, NoGrammars
from jaxsgl.scheduler.in_flight import ReadDrafts, Stopwatch
from jaxsgl.scheduler.plan import WhyNot
from jaxsgl.scheduler.scheduler import GRAMMAR_WAIT_S, PauseReason, Scheduler, nothing_drafted

STEP_TOTALS = ("steps", "decode_rows", "decode_rows_padded", "extend_tokens", "extend_tokens_padded")


class RankedScheduler:
    """Several schedulers with one step. Has the methods of a `Scheduler` that the loop and operators' orders call.

    Args:
      ranks: by their numbers; of equal capacity, with one set of buckets, and without what holds more than pages. They
        mix decodes into steps that extend prompts, or each prompt makes the rank's own decodes wait.
      grammars: the queue that the ranks share.
      clock: gives seconds.

    Attributes:
      wake_fd: None: there is no news besides messages.
      ops: nothing is ever in it.
      reads_first: never.
    """

    reads_first = False

    def __init__(
        self,
        ranks: Sequence[Scheduler],
        grammars: Grammars = NoGrammars(),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.ranks = tuple(ranks)
        self.wake_fd: int | None = None
        self.ops = EngineOps()
        state = self.ranks[0].state
        self.buckets = state.buckets
        self._capacity = state.capacity
        self._grammars = grammars
        self._stopwatch = Stopwatch(clock)
        builders = [rank.builder for rank in self.ranks if isinstance(rank.builder, BatchBuilder)]
        self._builder = JointBuilder(builders, state.capacity.vocab_size)
        for rank, builder in zip(self.ranks, self._builder.of_ranks, strict=True):
            rank.builder = builder
        self._in_flight: deque[StepInputs] = deque()
        self._steps = Totals()  # what belongs to no rank: steps, and what they are padded to

    @property
    def scheduler(self) -> RankedScheduler:
        """Itself; see `Serving`."""
        return self

    @property
    def is_idle(self) -> bool:
        """Whether nothing can happen before the next message, or within `due_in_s`."""
        return not self._in_flight and all(rank.is_idle for rank in self.ranks)

    @property
    def due_in_s(self) -> float:
        """See `Serving`."""
        return min(rank.due_in_s for rank in self.ranks)

    @property
    def is_paused(self) -> bool:
        """See `Scheduler`; all ranks pause together."""
        return self.ranks[0].is_paused

    @property
    def num_begun(self) -> int:
        """Requests that have not ended, and of which a sample was admitted."""
        return sum(rank.num_begun for rank in self.ranks)

    @property
    def num_waiting(self) -> int:
        """Samples in the queues."""
        return sum(rank.num_waiting for rank in self.ranks)

    @property
    def num_running(self) -> int:
        """Samples that hold a row."""
        return sum(rank.num_running for rank in self.ranks)

    @property
    def num_steps(self) -> int:
        """Steps launched so far."""
        return self._steps.steps

    @property
    def steps_in_flight(self) -> int:
        """Steps that are launched and not collected."""
        return len(self._in_flight)

    @property
    def last_plan(self) -> str | None:
        """The plans of the step that was decided last, rank by rank."""
        plans = [f"{number}: {rank.last_plan}" for number, rank in enumerate(self.ranks) if rank.last_plan]
        return " || ".join(plans) or None

    def receive(self, messages: Sequence[Request | Abort]) -> None:
        """Gives each new request to a rank, and aborts to all: the one that has the request ends it."""
        for message in messages:
            if isinstance(message, Abort):
                for rank in self.ranks:
                    rank.receive([message])
            else:
                self.ranks[self._place(message)].receive([message])

    def _place(self, request: Request) -> int:
        """The rank for `request`: what it asks for, else by cached prefix and loads of those whose queue takes it."""
        if request.rank is not None and request.rank < len(self.ranks):
            return request.rank
        try:
            ids = hash_ids(request.prompt_ids, request.media)
        except (OverflowError, TypeError, ValueError):
            return 0  # which refuses the request in words
        namespace = namespace_of(request.cache_salt, None, request.kv_source)
        cached = [rank.cache.peek(ids, namespace).num_pages for rank in self.ranks]
        loads = [rank.place_load for rank in self.ranks]
        busy = [(rank.num_pending_tokens, load.num_requests) for rank, load in zip(self.ranks, loads, strict=True)]
        full = [rank.queue_limits.full(rank.state.requests) is not None for rank in self.ranks]
        usable = [None if skip else load for skip, load in zip(full, loads, strict=True)]
        num_pages = full_pages(len(ids), self._capacity.page_size)
        return placement.choose(num_pages, cached, loads if all(full) else usable, busy)

    def launch(self) -> StepInputs | None:
        """Decides the next step of all ranks and counts it as launched; None if no rank has anything to do."""
        self._even_out()
        batches = [rank.launch() for rank in self.ranks]
        if all(batch is None for batch in batches):
            if self._grammars.num_waiting and self._has_nothing_to_do:
                self._grammars.wait(GRAMMAR_WAIT_S)
            return None
        inputs = self._builder.step(batches)
        self._in_flight.append(inputs)
        self._stopwatch.launched(inputs.bucket)
        self._count(inputs)
        return inputs

    @property
    def _has_nothing_to_do(self) -> bool:
        return not (self._in_flight or any(rank.has_replies for rank in self.ranks))

    def _count(self, inputs: StepInputs) -> None:
        totals = self._steps
        totals.steps += 1
        if inputs.bucket.kind == "decode":
            totals.decode_rows += inputs.num_tokens
            totals.decode_rows_padded += inputs.padded_tokens
        else:
            totals.extend_tokens += inputs.num_tokens
            totals.extend_tokens_padded += inputs.padded_tokens

    def _even_out(self) -> None:
        """Moves a request of each rank that lacks pages or rows to a rank that has both and whose queue is empty."""
        for crowded in self.ranks:
            if crowded.state.blocked not in (WhyNot.TOKENS, WhyNot.ROWS) or not crowded.num_waiting:
                continue
            request_id = crowded.first_to_move()
            if request_id is None:
                continue
            for other in self.ranks:
                if not other.num_waiting and other.takes_over(crowded, request_id):
                    break

    def collect(
        self,
        tokens: Sequence[int] | np.ndarray,
        outputs: HostOutputs = NO_OUTPUTS,
        drafts: ReadDrafts = nothing_drafted,
    ) -> None:
        """Takes what the oldest step in flight yields: what its batches do, rank after rank."""
        step = self._in_flight.popleft()
        self._stopwatch.collected()
        tokens = np.asarray(tokens)
        found = [NO_OUTPUTS] * len(self.ranks) if outputs is NO_OUTPUTS else by_rank(outputs, step)
        first = 0
        for rank, batch, of_rank in zip(self.ranks, step.of_ranks, found, strict=True):
            if batch.num_seqs:
                rank.collect(tokens[first : first + batch.num_seqs], of_rank)
            first += batch.num_seqs

    def masks(self, num_choices: int) -> Words:
        """`[R num_choices, ceil(V / 32)]`; see `Scheduler`."""
        step = self._in_flight[-1]
        words = [
            rank.masks(num_choices)
            if batch.masked
            else np.full((num_choices, -(-self._capacity.vocab_size // 32)), ALL, dtype=np.uint32)
            for rank, batch in zip(self.ranks, step.of_ranks, strict=True)
        ]
        return np.concatenate(words)

    def before_exit(self, engine: PageEngine) -> None:
        """Has nothing left to do."""

    def take_replies(self) -> list[Reply]:
        """All replies since the last call."""
        return [reply for rank in self.ranks for reply in rank.take_replies()]

    def bucket_times(self) -> list[BucketTimes]:
        """How long the steps of each bucket took since the start."""
        return self._stopwatch.bucket_times()

    def load(self, recompiles: int, leaks: int = 0, weight_version: str = DEFAULT_WEIGHT_VERSION) -> Load:
        """How busy all ranks are together, and each one."""
        each = [rank.rank_load for rank in self.ranks]
        return Load(
            **msgspec.structs.asdict(RankLoad(*_sums(each))),
            num_retracted=sum(rank.state.requests.num_retracted for rank in self.ranks),
            paused=self.is_paused,
            totals=self._totals(recompiles, leaks),
            step_times=self._stopwatch.step_times(self.is_idle),
            weight_version=weight_version,
            ranks=tuple(each),
            num_blocked=sum(rank.state.requests.num_without_grammar for rank in self.ranks),
        )

    def _totals(self, recompiles: int, leaks: int) -> Totals:
        totals = Totals(*_sums([rank.state.totals for rank in self.ranks]))
        for name in STEP_TOTALS:
            setattr(totals, name, getattr(self._steps, name))
        totals.recompiles, totals.leaks = recompiles, leaks
        return totals

    def pause(self, reason: PauseReason = PauseReason.OPERATOR) -> None:
        """See `Scheduler`, as for all below."""
        for rank in self.ranks:
            rank.pause(reason)

    def resume(self, reason: PauseReason = PauseReason.OPERATOR) -> None:
        """Launches again, unless there is another reason to pause."""
        for rank in self.ranks:
            rank.resume(reason)

    def pause_admission(self, paused: bool) -> None:
        """Admits no sample of a request that has not begun, from now on; or admits them again."""
        for rank in self.ranks:
            rank.pause_admission(paused)

    def retract_all(self) -> None:
        """Takes all running requests back to their queues."""
        for rank in self.ranks:
            rank.retract_all()

    def abort_all(self) -> None:
        """Ends every request."""
        for rank in self.ranks:
            rank.abort_all()

    def retire_cache(self) -> None:
        """Lets no later request find KV that is cached now."""
        for rank in self.ranks:
            rank.retire_cache()

    def flush_cache(self) -> None:
        """Drops every cached prefix that no request uses."""
        for rank in self.ranks:
            rank.flush_cache()

    def leaks(self) -> list[str]:
        """Pages, rows and locks that are lost or in two places, each in words; [] if all is well."""
        return [f"rank {number}: {leak}" for number, rank in enumerate(self.ranks) for leak in rank.leaks()]

    def check(self) -> None:
        """Integrity of requests, rows and pages; raises AssertionError."""
        for rank in self.ranks:
            rank.check()


def _sums(structs: Sequence[msgspec.Struct]) -> list[int]:
    """The sum of each field over `structs`, in the order of the fields."""
    return [sum(values) for values in zip(*map(msgspec.structs.astuple, structs), strict=True)]
