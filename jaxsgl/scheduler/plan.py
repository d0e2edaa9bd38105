"""What the scheduler decides about a step. Values only: planner.py makes plans, apply.py carries them out."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NamedTuple

from jaxsgl.scheduler.adapters import Placement
from jaxsgl.scheduler.budget import PageCount
from jaxsgl.scheduler.failed_admission import FailedAdmission
from jaxsgl.scheduler.req import Req


class NoRoom(enum.Enum):
    """Why no more requests were admitted."""

    TOKENS = "tokens"  # the pool is held for running requests
    ROWS = "rows"  # all rows are taken
    CHUNK = "chunk"  # the step is full
    ADAPTERS = "adapters"  # the adapters of running requests take all places on the device


class Chunk(NamedTuple):
    """Extend `req` by its next `num_tokens` known tokens."""

    req: Req
    num_tokens: int


class Admission(NamedTuple):
    """Give `req` a row and lock its cached prefix of `cached_tokens` tokens, behind which it loads `load_pages`."""

    req: Req
    cached_tokens: int
    load_pages: int = 0


class Write(NamedTuple):
    """Copy `pages` of the pool to the host tier."""

    pages: tuple[int, ...]


class Ahead(NamedTuple):
    """Encode the next `num_layers` layers of the image `place` of `req`, ahead of the step that reads it."""

    req: Req
    place: int
    num_layers: int


class LoadPages(NamedTuple):
    """Load the next `num_pages` pages of the prefix of `req` from the host tier."""

    req: Req
    num_pages: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What happens in the next step, in this order.

    Attributes:
      retract: requests that go back to the queue because pages ran out.
      preempt: requests that go back to the queue for one of higher priority.
      placements: adapters that go to the device.
      admit: waiting requests that get a row and their prefix.
      copies: pages to the host tier and from it, before the step.
      recompute: requests that stop loading, since there is no room for the next page.
      chunks: what is extended.
      decodes: requests that decode, in the step of the chunks if there are any.
      num_steps: decode steps of the program.
      out_of_pages: whether the next tokens of the running requests lacked pages, so that some are retracted.
      admission_closed, blocked, failed_admission: see `SchedulerState`; their values after the step.
      ahead: part of an image that is encoded before the step; None: none is.
      pages: what is free and evictable once the plan is carried out, before computed pages are shared.
    """

    retract: tuple[Req, ...]
    preempt: tuple[Req, ...]
    placements: tuple[Placement, ...]
    admit: tuple[Admission, ...]
    copies: tuple[Write | LoadPages, ...]
    recompute: tuple[Req, ...]
    chunks: tuple[Chunk, ...]
    decodes: tuple[Req, ...]
    num_steps: int
    out_of_pages: bool
    admission_closed: bool
    blocked: NoRoom | None
    failed_admission: FailedAdmission | None
    pages: PageCount
    ahead: Ahead | None = None

    def __str__(self) -> str:
        """One line: `extend a/0+128 b/0+17 | decode 14 | admit b/0 (64 cached) | 210 free 30 evictable pages`."""
        parts = [
            ("extend", " ".join(f"{_name(chunk.req)}+{chunk.num_tokens}" for chunk in self.chunks)),
            ("decode", f"{len(self.decodes)}" if self.decodes else ""),
            ("steps", f"{self.num_steps}" if self.num_steps > 1 else ""),
            ("admit", " ".join(f"{_name(entry.req)} ({entry.cached_tokens} cached)" for entry in self.admit)),
            ("write", " ".join(str(len(copy.pages)) for copy in self.copies if isinstance(copy, Write))),
            ("load", " ".join(f"{_name(c.req)}+{c.num_pages}" for c in self.copies if isinstance(c, LoadPages))),
            ("encode", f"{self.ahead.num_layers} layers of {_name(self.ahead.req)}" if self.ahead else ""),
            ("retract", " ".join(map(_name, self.retract))),
            ("preempt", " ".join(map(_name, self.preempt))),
            ("place", " ".join(placement.adapter.name for placement in self.placements)),
            ("blocked by", self.blocked.value if self.blocked else ""),
        ]
        said = [f"{what} {text}" for what, text in parts if text] or ["no step"]
        return " | ".join([*said, f"{self.pages.free} free {self.pages.evictable} evictable pages"])


def _name(req: Req) -> str:
    return f"{req.request_id}/{req.index}"
