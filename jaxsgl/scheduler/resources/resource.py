"""`Resource`: something that requests hold besides pages and rows of the KV pool, and that may keep them waiting.

Adapters on the device, rows of images' embeddings and loads from the host tier are resources: members of
`SchedulerState.resources`, which is empty on a plain server. Each one lives through the same turns:

    arrived -> [ draft: may_admit, longest, take, actions ] -> prepare -> admitted -> carry_out -> launched -> left
               the planner asks and notes; nothing changes     apply.py carries the plan out

A draft is what one resource makes of one plan: it answers what-if questions and turns what was noted into actions,
which its resource carries out. A resource leaves out the methods that say nothing about it: they are empty here.
Resources know requests, never each other.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

from jaxsgl.batch.build import Work
from jaxsgl.batch.engine_api import PageEngine
from jaxsgl.batch.inputs import StepInputs
from jaxsgl.cache.pages import IntArray
from jaxsgl.cache.prefix import Peek
from jaxsgl.messages.replies import Load
from jaxsgl.scheduler.budget import Ledger
from jaxsgl.scheduler.plan import Action, Part, WhyNot
from jaxsgl.scheduler.req import Req
from jaxsgl.scheduler.request_table import RequestTable


class PlanInTheMaking(Protocol):
    """What a resource may know of the plan that it makes a draft for.

    Attributes:
      ledger: the pages after all what-ifs.
      decoding: running requests that decode, without those taken back.
      taken_back: requests to take back to the queue.
    """

    ledger: Ledger
    decoding: list[Req]
    taken_back: dict[Req, None]


class Extent(NamedTuple):
    """A chunk may have `num_tokens` tokens, which cost `seconds` besides those of their attention."""

    num_tokens: int
    seconds: float = 0.0


class ResourceDraft:
    """What a resource makes of one plan: questions, which change nothing, and notes of what the plan takes.

    Attributes:
      seconds: what is noted costs of the step.
      is_working: whether the step brings a request on that extends nothing in it.
    """

    seconds: float = 0.0

    @property
    def is_working(self) -> bool:
        """See the class."""
        return False

    def begin_step(self) -> None:
        """The chunks of the step are chosen, perhaps anew; admissions that are noted stay."""

    def may_admit(self, req: Req) -> WhyNot | None:
        """Why `req` can't be admitted; None if it can."""
        return None

    def passed_over(self, req: Req) -> None:
        """`req` may not be admitted, and has waited too long for others to take what it needs."""

    def defers(self, req: Req, prefix: Peek) -> bool:
        """Whether `req`, of which `prefix` is cached, would have no chunk in the step that admits it."""
        return False

    def admit(self, req: Req, prefix: Peek) -> None:
        """Notes that `req`, of which `prefix` is cached, is admitted."""

    def longest(self, req: Req, start: int, count: int) -> Extent:
        """How many of the `count` tokens from `start` on may be extended now."""
        return Extent(count)

    def ends(self, req: Req, start: int, count: int, preferred: int) -> int:
        """After how many tokens from `start` on a chunk may end: `preferred`, or another number up to `count`."""
        return preferred

    def least(self, req: Req, start: int) -> int:
        """Tokens from `start` on that can only be extended together."""
        return 1

    def take(self, req: Req, start: int, count: int, wanted: int) -> None:
        """Notes that `count` tokens from `start` on are extended, of `wanted` that were asked for."""

    def actions(self, decodes: bool) -> tuple[Action, ...]:
        """What is to be done for all that is noted, in order; once pages are taken for the step, which `decodes`."""
        return ()


class Resource:
    """One resource, of which nothing is free.

    Attributes:
      epoch: rises when something comes free that a waiting request may lack. What comes free as a request leaves needs
        no mention.
    """

    epoch = 0

    def draft(self, plan: PlanInTheMaking) -> ResourceDraft:
        """Begins what-ifs for one plan."""
        return ResourceDraft()

    def advance(self) -> None:
        """Does what has come due; before each plan."""

    def num_to_load(self, ids: IntArray, namespace: bytes, first: int) -> int:
        """Full pages of a prompt, from page `first` on, that a request would get without computing them."""
        return 0

    def arrived(self, samples: Sequence[Req]) -> None:
        """All samples of a request are about to join the queue."""

    def prepare(self, actions: Iterable[Action]) -> None:
        """Carries out what must be there before requests are admitted."""

    def admitted(self, req: Req) -> None:
        """`req` has got its lease."""

    def carry_out(self, actions: Iterable[Action]) -> None:
        """Carries out the others of its own `actions`."""

    def placed(self, work: Work, req: Req) -> Work:
        """The chunk `work` of `req` with what the engine must know of this resource."""
        return work

    def not_launched(self) -> None:
        """The step isn't launched for whose chunks `placed` was called: takes back what it has taken for them."""

    def placed_decode(self, work: Work, req: Req) -> Work:
        """`work` likewise, by which `req` decodes in a step that extends prompts of others, or verifies its drafts."""
        return work

    def decoding(self, decodes: Sequence[Part]) -> None:
        """The batch that is built next decodes so many tokens of each of these, and extends none."""

    def completed(self, inputs: StepInputs) -> StepInputs:
        """The batch, which is built, with what must run on the device before it."""
        return inputs

    def launched(self, chunks: Sequence[Part]) -> None:
        """An extend step of these `chunks` is launched."""

    def carried_out(self, actions: Iterable[Action]) -> None:
        """A plan with these `actions` is carried out: what it has brought may be shared."""

    def collected(self, extend_tokens: int, seconds: float) -> None:
        """A step that extended prompts by so many tokens took so long."""

    def left(self, req: Req, ends: bool) -> None:
        """`req` is about to give back what it holds, if it holds anything: it is retracted, or `ends`."""

    def retire_cached(self) -> None:
        """Lets no later request find what was computed by the weights until now; before the cache does."""

    def flush(self) -> None:
        """Drops all that no request uses."""

    def has_work(self, paused: bool) -> bool:
        """Whether the next plan, which isn't made while the scheduler is `paused`, has something to do here."""
        return False

    def before_exit(self, engine: PageEngine) -> None:
        """The engine is about to end."""

    def add_to(self, load: Load) -> Load:
        """`load` with what operators should know of this resource."""
        return load

    def dump(self) -> dict[str, Any]:
        """Its part of the state that is dumped, in plain values."""
        return {}

    def check(self, requests: RequestTable) -> None:
        """Raises AssertionError if its accounts are not those of `requests`."""
