"""What stands at the mailbox of the serving loop, as a protocol."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeAlias

from jaxsgl.batch.inputs import StepInputs
from jaxsgl.config.engine import DEFAULT_WEIGHT_VERSION
from jaxsgl.messages.orders import Abort
from jaxsgl.messages.replies import Load, Reply
from jaxsgl.requests.request import Request
from jaxsgl.scheduler.ranks import RankedScheduler
from jaxsgl.scheduler.scheduler import Scheduler

AnyScheduler: TypeAlias = Scheduler | RankedScheduler


class Serving(Protocol):
    """What stands at the mailbox: a scheduler, or the side of a server that computes one side of each request.

    Steps are collected by the scheduler itself, and operators' orders are about it.
    """

    @property
    def scheduler(self) -> AnyScheduler:
        """What plans steps."""
        ...

    @property
    def wake_fd(self) -> int | None:
        """A file descriptor that is readable when there is news besides messages; None: there never is."""
        ...

    @property
    def is_idle(self) -> bool:
        """Whether nothing can happen before the next message, before `wake_fd` is readable, or within `due_in_s`."""
        ...

    @property
    def due_in_s(self) -> float:
        """Seconds until a request has waited or run for too long, unless it ends before; infinity: none will have."""
        ...

    def receive(self, messages: Sequence[Request | Abort]) -> None:
        """Takes new requests and aborts."""
        ...

    def launch(self) -> StepInputs | None:
        """Decides the next step; see `Scheduler.launch`."""
        ...

    def take_replies(self) -> list[Reply]:
        """All replies since the last call."""
        ...

    def load(self, recompiles: int, leaks: int = 0, weight_version: str = DEFAULT_WEIGHT_VERSION) -> Load:
        """How busy it is, and what the caller knows."""
        ...

    def abort_all(self) -> None:
        """Ends every request."""
        ...
