"""`LegScheduler`: what the schedulers of workers share that compute one leg of each request.

Each kind, `PrefillScheduler` and `DecodeScheduler`, puts the state machine of its legs in front of `Scheduler`, which
knows nothing of them: a request with a room enters the scheduler when its legs agree, and a prefill leg's answer leaves
when decode has the pages. They carry out the machine's actions, on a wire and on the engine's pages. A request without
a room is served whole. The loop calls them like any scheduler; a server without --disaggregation-mode never imports
this module.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from jaxsgl.batch.engine_api import PageEngine
from jaxsgl.messages.orders import Abort
from jaxsgl.messages.replies import Refusal, Reply
from jaxsgl.requests.request import FinishReason, Request
from jaxsgl.scheduler.disagg.kv_names import KvNames
from jaxsgl.scheduler.disagg.rooms import Action, Answer, Drop, Gather, Refuse, RoomLimits, Send, Start
from jaxsgl.scheduler.scheduler import Scheduler
from jaxsgl.transfer.frames import Pages, Room, Rows, room_of
from jaxsgl.transfer.wire import Event, Wire


class LegScheduler(Scheduler, ABC):
    """What both kinds share.

    Args:
      args, kwargs: those of `Scheduler`.
      engine: copies pages.
      wire: leads to the other workers.
      limits: of rooms and their memory.
      weight_version: gives the version of the weights now.
      clock: gives seconds.
    """

    def __init__(
        self,
        *args: Any,
        engine: PageEngine,
        wire: Wire,
        limits: RoomLimits,
        weight_version: Callable[[], str],
        clock: Callable[[], float] = time.monotonic,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, clock=clock, **kwargs)
        self.wire = wire
        self._clock = clock
        self._engine = engine
        self._room_limits = limits
        self._kv_names = KvNames(self.state.adapters, weight_version)
        self._num_bytes = 0  # of pages moved so far

    def receive(self, messages: Sequence[Request | Abort]) -> None:
        """Takes requests and aborts; those with a room go to the state machine."""
        for message in messages:
            if isinstance(message, Abort):
                if not self._aborted(message):
                    super().receive([message])
            elif message.room is None:
                super().receive([message])
            elif (refusal := self._arrivals.refusal(message)) is not None:
                self._replies.append(Reply(message.request_id, refusal=refusal))
                self._carry_out(self._refused_at_arrival(message, refusal))
            else:
                self._carry_out(self._arrived(message))

    def _hear(self) -> None:
        """Takes what the wire has."""
        for event in self.wire.poll():
            self._carry_out(self._heard(event))

    def _carry_out(self, actions: Iterable[Action]) -> None:
        for action in actions:
            match action:
                case Start(request):
                    super().receive([request])
                    self._started(request)
                case Send(peer, message, payload):
                    self.wire.send(peer, message, payload)
                    self._num_bytes += (
                        payload.nbytes if isinstance(message, Pages | Rows) and payload is not None else 0
                    )
                case Refuse(request_id, refusal):
                    self._end_leg(request_id, [Reply(request_id, refusal=refusal)])
                case Drop(request_id, num_samples):
                    ends = (Reply(request_id, (), FinishReason.ABORT, index=index) for index in range(num_samples))
                    self._end_leg(request_id, list(ends))
                case Gather() | Answer():
                    self._carry_out_other(action)

    def _end_leg(self, request_id: str, replies: list[Reply]) -> None:
        """Ends a request wherever it is; `replies` tell its client."""
        for req in self._requests.samples_of(request_id):
            self._applier.end(req)
        self._replies += replies

    @abstractmethod
    def _aborted(self, abort: Abort) -> bool:
        """Ends a request that has a room; False if it has none."""

    @abstractmethod
    def _arrived(self, request: Request) -> list[Action]: ...

    def _refused_at_arrival(self, request: Request, refusal: Refusal) -> list[Action]:
        return []

    def _started(self, request: Request) -> None:
        """The scheduler has got a request, or has refused it."""

    @abstractmethod
    def _heard(self, event: Event) -> list[Action]: ...

    def _carry_out_other(self, action: Gather | Answer) -> None:
        raise AssertionError(f"{action} is none of this leg's")


def room_of_leg(request: Request) -> Room:
    """The room of a request that has one."""
    assert request.room is not None
    return room_of(request.room.number, request.prompt_ids)
