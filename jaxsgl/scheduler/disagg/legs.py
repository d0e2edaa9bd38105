"""`PrefillScheduler` and `DecodeScheduler`: the scheduler of a worker that computes one leg of each request.

Each puts the state machine of its legs in front of `Scheduler`, which knows nothing of them: a request with a room
enters the scheduler when its legs agree, and a prefill leg's answer leaves when decode has the pages. They carry out
the machine's actions, on a wire and on the engine's pages. A request without a room is served whole. The loop calls
them like any scheduler; a server without --disaggregation-mode never imports this module.
"""

from __future__ import annotations

import itertools
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec
import numpy as np

from jaxsgl.batch.engine_api import PageEngine, StepScores
from jaxsgl.batch.engine_ops import Gather as GatherOp
from jaxsgl.batch.engine_ops import Insert as InsertOp
from jaxsgl.batch.inputs import StepInputs
from jaxsgl.cache.pages import full_pages
from jaxsgl.config.disaggregation import TransferLoad
from jaxsgl.config.engine import DEFAULT_WEIGHT_VERSION
from jaxsgl.messages.load import Load
from jaxsgl.messages.orders import Abort
from jaxsgl.messages.replies import Refusal, Reply
from jaxsgl.requests.request import FinishReason, Request
from jaxsgl.scheduler.budget import pages_held_for
from jaxsgl.scheduler.disagg.decode import DecodeRooms, Received
from jaxsgl.scheduler.disagg.kv_names import KvNames
from jaxsgl.scheduler.disagg.prefill import PrefillRooms
from jaxsgl.scheduler.disagg.rooms import Action, Answer, Drop, Gather, Refuse, RoomLimits, Send, Start
from jaxsgl.scheduler.scheduler import NO_SCORES, Scheduler
from jaxsgl.transfer.frames import Ack, Done, Fail, Grant, Media, Open, Pages, Room, room_of
from jaxsgl.transfer.wire import Event, Left, News, Sent, Wire

EXPIRE_S = 0.5  # between two looks for rooms that have waited too long


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
        self._op_ids = itertools.count()
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
                case Send(peer, message, payload):
                    self.wire.send(peer, message, payload)
                    self._num_bytes += payload.nbytes if isinstance(message, Pages) and payload is not None else 0
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

    @abstractmethod
    def _heard(self, event: Event) -> list[Action]: ...

    def _carry_out_other(self, action: Gather | Answer) -> None:
        raise AssertionError(f"{action} is none of this leg's")


class PrefillScheduler(LegScheduler):
    """Computes prompts, and sends their pages to decode workers."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.rooms = PrefillRooms(self._room_limits, self._kv_names.version, self._clock)
        self._held: dict[str, Reply] = {}  # answers that wait for decode
        self._behind_step: list[GatherOp] = []  # to submit behind the step that was launched last
        self._gathers: dict[int, Gather] = {}  # that are submitted, or about to be
        self._expire_s = 0.0

    @property
    def is_idle(self) -> bool:
        """Whether nothing can happen before the next message, or the next news of the wire."""
        return super().is_idle and not self._gathers

    def launch(self) -> StepInputs | None:
        """Sends pages that are on the host, starts legs, and decides the next step."""
        self._submit_gathers()
        self._hear()
        if self._clock() >= self._expire_s:
            self._carry_out(self.rooms.expire())
            self._expire_s = self._clock() + EXPIRE_S
        self._take_gathered(wait=False)
        inputs = super().launch()
        if inputs is not None:
            self._gather_chunks()
        elif not self.state.steps_in_flight and self._gathers:
            self._take_gathered(wait=True)
        return inputs

    def collect(self, tokens: Sequence[int] | np.ndarray, scores: StepScores = NO_SCORES) -> None:
        """Submits the gathers behind the step that was submitted last, whose pages may come free now."""
        self._submit_gathers()
        super().collect(tokens, scores)

    def take_replies(self) -> list[Reply]:
        """All replies that needn't wait for decode."""
        for reply in super().take_replies():
            if self._passes(reply):
                self._replies.append(reply)
        return super().take_replies()

    def abort_all(self) -> None:
        """Ends every request."""
        super().abort_all()
        for request_id in self.rooms.request_ids():
            self._carry_out(self.rooms.aborted(request_id))

    def load(self, recompiles: int, leaks: int = 0, weight_version: str = DEFAULT_WEIGHT_VERSION) -> Load:
        """The scheduler's, and that of the legs around it."""
        waiting, sending = self.rooms.num_bootstrapping, self.rooms.num_sending
        load = super().load(recompiles, leaks, weight_version)
        moved = self._num_bytes, self.rooms.hidden_bytes
        transfer = TransferLoad("prefill", waiting, sending, self.rooms.staged_bytes, *moved)
        return msgspec.structs.replace(load, num_waiting=load.num_waiting + waiting, transfer=transfer)

    def _passes(self, reply: Reply) -> bool:
        """Whether a reply may leave now; tells the state machine what it means."""
        state = self.rooms.state_of(reply.request_id)
        if state is None:
            return True
        if reply.refusal is not None:
            self._carry_out(self.rooms.refused(reply.request_id, reply.refusal))
            return True
        if reply.finish_reason is FinishReason.ABORT:
            self._carry_out(action for action in self.rooms.aborted(reply.request_id) if not isinstance(action, Drop))
            return True
        if reply.finish_reason is not None and self.rooms.ended(reply.request_id):
            self._held[reply.request_id] = reply
            return False
        return True

    def _gather_chunks(self) -> None:
        """Files copies of the pages that the step just launched completes."""
        assert self.last_plan is not None
        for chunk in self.last_plan.chunks:
            req = chunk.req
            num_pages = full_pages(min(req.kv_len, req.prompt_len), self.cache.page_size)
            self._carry_out(self.rooms.launched(req.request_id, num_pages, req.kv_len >= req.prompt_len))

    def _submit_gathers(self) -> None:
        for op in self._behind_step:
            self._engine.apply(op)
        self._behind_step.clear()

    def _take_gathered(self, wait: bool) -> None:
        if not self._gathers:
            return
        self._submit_gathers()
        for op_id, data in self._engine.poll_gathers(wait):
            room, request_id, first, _ = self._gathers.pop(op_id)
            self._carry_out(self.rooms.gathered(room, request_id, first, data))

    def _carry_out_other(self, action: Gather | Answer) -> None:
        if isinstance(action, Answer):
            self._replies.append(self._held.pop(action.request_id))
            return
        (req,) = self._requests.samples_of(action.request_id)
        assert req.lease is not None
        op_id = next(self._op_ids)
        pages: list[int] = self.cache.table.pages[req.lease.row, action.first : action.stop].tolist()
        self._gathers[op_id] = action
        self._behind_step.append(GatherOp(op_id, tuple(pages)))

    def _end_leg(self, request_id: str, replies: list[Reply]) -> None:
        self._held.pop(request_id, None)
        super()._end_leg(request_id, replies)

    def _aborted(self, abort: Abort) -> bool:
        actions = self.rooms.aborted(abort.request_id)
        self._carry_out(actions)
        return bool(actions)

    def _arrived(self, request: Request) -> list[Action]:
        return self.rooms.arrived(request, _room_of(request))

    def _refused_at_arrival(self, request: Request, refusal: Refusal) -> list[Action]:
        return self.rooms.refused_at_arrival(_room_of(request), refusal)

    def _heard(self, event: Event) -> list[Action]:
        match event:
            case Sent() as sent:
                return self.rooms.sent(sent)
            case Left(peer, reason):
                return self.rooms.left(peer, reason)
            case News(peer, Open(room, images)):
                return self.rooms.opened(peer, room, images)
            case News(peer, Grant() as grant):
                return self.rooms.granted(peer, grant)
            case News(peer, Ack(room)):
                return self.rooms.acked(peer, room)
            case News(peer, Fail() as fail):
                return self.rooms.failed(peer, fail)
        return []


class DecodeScheduler(LegScheduler):
    """Gets the pages of prompts from prefill workers, and generates."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        media = self.state.capacity.media
        self.rooms = DecodeRooms(self._room_limits, self._num_cached, self._kv_names.version, media)
        self._aborts: dict[str, list[Abort]] = {}  # of single samples of requests that have a room

    @property
    def is_idle(self) -> bool:
        """Whether nothing can happen before the next message, or the next news of the wire."""
        return super().is_idle and (not self.rooms.has_ready or bool(self._pauses))

    def launch(self) -> StepInputs | None:
        """Takes pages that have come, and decides the next step."""
        self._hear()
        while not self._pauses and (received := self.rooms.ready()) is not None and self._has_room_for(received):
            self._take(received)
        return super().launch()

    def abort_all(self) -> None:
        """Ends every request."""
        super().abort_all()
        for request_id in self.rooms.request_ids():
            self._carry_out(self.rooms.aborted(request_id))

    def load(self, recompiles: int, leaks: int = 0, weight_version: str = DEFAULT_WEIGHT_VERSION) -> Load:
        """The scheduler's, and that of the legs before it."""
        waiting, receiving = self.rooms.num_bootstrapping, self.rooms.num_receiving
        load = super().load(recompiles, leaks, weight_version)
        transfer = TransferLoad("decode", waiting, receiving, self.rooms.staged_bytes, self._num_bytes)
        return msgspec.structs.replace(load, num_waiting=load.num_waiting + waiting + receiving, transfer=transfer)

    def _has_room_for(self, received: Received) -> bool:
        """Whether the request would soon be admitted, so that its pages are not evicted before.

        An empty pool takes any request, as in planning. What is held for running requests counts as taken.
        """
        request, requests, cache = received.request, self._requests, self.cache
        if not (requests.waiting or requests.admitted):
            return True
        if len(requests.waiting) + request.sampling.n > cache.table.num_free_rows:
            return False
        held = pages_held_for(list(requests.admitted.values()), self.state.ratio.value, cache)
        held += sum(cache.pages_for(req.prompt_len + 1) for req in requests.waiting.values())
        return held + cache.pages_for(len(request.prompt_ids) + 1) <= cache.num_available

    def _take(self, received: Received) -> None:
        """Copies the pages to the pool, as a prefix, and gives the request to the scheduler."""
        request, layout = received.request, self._engine.page_layout
        ids, namespace = self._kv_names.ids_and_namespace(request)
        pages = self.cache.land(ids, received.first, received.num_pages, request.request_id, namespace).tolist()
        missing_from = received.first + received.num_pages - len(pages)  # the cache has got those before meanwhile
        place = received.first
        for part in received.parts:
            count = len(part) // layout.page_bytes
            skipped = min(max(missing_from - place, 0), count)
            if skipped < count:
                data = part.view(layout.host_dtype).reshape(layout.shape(count))[skipped:]
                start = place + skipped - missing_from
                self._engine.apply(InsertOp(next(self._op_ids), tuple(pages[start : start + len(data)]), data))
            place += count
            self._num_bytes += part.nbytes
        self.state.failed_admission = None
        self._carry_out([Start(request), *self.rooms.taken(request.request_id)])
        super(LegScheduler, self).receive(self._aborts.pop(request.request_id, ()))

    def _num_cached(self, request: Request) -> int:
        return self.cache.peek(*self._kv_names.ids_and_namespace(request)).num_pages

    def _end_leg(self, request_id: str, replies: list[Reply]) -> None:
        self._aborts.pop(request_id, None)
        if self._grammars is not None:
            self._grammars.forget(request_id)
        super()._end_leg(request_id, replies)

    def _aborted(self, abort: Abort) -> bool:
        request = self.rooms.request(abort.request_id)
        if request is None:
            return False
        if abort.index is None or request.sampling.n == 1:
            self._carry_out(self.rooms.aborted(abort.request_id))
        else:
            self._aborts.setdefault(abort.request_id, []).append(abort)  # once there are samples
        return True

    def _arrived(self, request: Request) -> list[Action]:
        assert request.room is not None
        room = _room_of(request)
        refused = self.rooms.check(request, room)
        if refused:
            return refused
        if request.sampling.masked and self._grammars is not None:
            self._grammars.ask(request.request_id, request.sampling.grammar)  # compiles while prefill computes
        peer = self.wire.connect(request.room.host, request.room.port)
        return self.rooms.arrived(request, room, peer, full_pages(len(request.prompt_ids) - 1, self.cache.page_size))

    def _heard(self, event: Event) -> list[Action]:
        match event:
            case Left(peer, reason):
                return self.rooms.left(peer, reason)
            case News(peer, Pages() as pages, payload) if payload is not None:
                return self.rooms.pages(peer, pages, payload)
            case News(peer, Media() as media, payload) if payload is not None:
                return self.rooms.media(peer, media, payload)
            case News(peer, Done() as done):
                return self.rooms.done(peer, done)
            case News(peer, Fail() as fail):
                return self.rooms.failed(peer, fail)
        return []


def _room_of(request: Request) -> Room:
    assert request.room is not None
    return room_of(request.room.number, request.prompt_ids)
