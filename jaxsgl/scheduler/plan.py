"""What the scheduler decides about a step. Values only: planner.py makes plans, apply.py carries them out."""

from __future__ import annotations

import enum
from typing import NamedTuple, Protocol, TypeAlias

import msgspec

from jaxsgl.scheduler.budget import FailedAdmission, PageCount
from jaxsgl.scheduler.req import Req

Part: TypeAlias = tuple[Req, int]  # so many tokens of a request: known ones to extend, or new ones to decode


class WhyNot(enum.Enum):
    """Why no more requests were admitted."""

    TOKENS = "tokens"  # the pool is held for running requests
    ROWS = "rows"  # all rows are taken
    CHUNK = "chunk"  # the step is full
    ADAPTERS = "adapters"  # the adapters of running requests take all places on the device


class Admission(NamedTuple):
    """Give `req` a row and lock its cached prefix of `cached_tokens` tokens."""

    req: Req
    cached_tokens: int


class Action(Protocol):
    """What one resource is to do for the step; `str` says it without its `verb`."""

    @property
    def verb(self) -> str:
        """What it does, in the plan's line."""
        ...


class StepPlan(msgspec.Struct, frozen=True):
    """What happens in the next step, in this order.

    Attributes:
      retract: requests that go back to the queue because pages ran out.
      preempt: requests that go back to the queue for one of higher priority.
      admit: waiting requests that get a row and their prefix.
      actions: what resources do before requests are admitted or after it, each in order; their owners know which.
      chunks: what is extended.
      decodes: requests that decode, in the step of the chunks if there are any.
      num_steps: decode steps of the program; no request decodes more tokens than that, unless drafts are verified.
      drafts: of each of `decodes`, the tokens to verify, which its tokens are besides one; () if there are none at all.
      dropped: requests that proposed drafts for which there is no room.
      out_of_pages: whether the next tokens of the running requests lacked pages, so that some are retracted.
      admission_closed, blocked, failed_admission: see `SchedulerState`; their values after the step.
      pages: what is free and evictable once the plan is carried out, before computed pages are shared.
    """

    retract: tuple[Req, ...]
    preempt: tuple[Req, ...]
    admit: tuple[Admission, ...]
    actions: tuple[Action, ...]
    chunks: tuple[Part, ...]
    decodes: tuple[Part, ...]
    num_steps: int
    drafts: tuple[tuple[int, ...], ...]
    dropped: frozenset[Req]
    out_of_pages: bool
    admission_closed: bool
    blocked: WhyNot | None
    failed_admission: FailedAdmission | None
    pages: PageCount

    def __str__(self) -> str:
        """One line: `extend a/0+128 b/0+17 | decode 14 | admit b/0 (64 cached) | 210 free 30 evictable pages`."""
        of_actions: dict[str, list[str]] = {}
        for action in self.actions:
            of_actions.setdefault(action.verb, []).append(str(action))
        parts = [
            ("extend", " ".join(f"{short_name(req)}+{num_tokens}" for req, num_tokens in self.chunks)),
            ("decode", f"{len(self.decodes)}" if self.decodes else ""),
            ("steps", f"{self.num_steps}" if self.num_steps > 1 else ""),
            ("verify", f"{sum(map(len, self.drafts))} drafts" if self.drafts else ""),
            ("admit", " ".join(f"{short_name(entry.req)} ({entry.cached_tokens} cached)" for entry in self.admit)),
            *((verb, " ".join(texts)) for verb, texts in of_actions.items()),
            ("retract", " ".join(map(short_name, self.retract))),
            ("preempt", " ".join(map(short_name, self.preempt))),
            ("blocked by", self.blocked.value if self.blocked else ""),
        ]
        said = [f"{what} {text}" for what, text in parts if text] or ["no step"]
        return " | ".join([*said, f"{self.pages.free} free {self.pages.evictable} evictable pages"])


def short_name(req: Req) -> str:
    """A request and its sample in a plan's line."""
    return f"{req.request_id}/{req.index}"
