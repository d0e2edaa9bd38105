"""`PrefillScheduler`: computes prompts, and sends their pages and the embeddings of their images to decode workers."""

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec

from jaxsgl.batch.engine_ops import Gather as GatherOp
from jaxsgl.batch.engine_ops import HostPages
from jaxsgl.batch.inputs import StepInputs
from jaxsgl.cache.pages import full_pages
from jaxsgl.config.engine import DEFAULT_WEIGHT_VERSION
from jaxsgl.messages.orders import Abort
from jaxsgl.messages.replies import Load, Refusal, Reply, TransferLoad
from jaxsgl.requests.request import FinishReason, Request
from jaxsgl.scheduler.disagg.legs import LegScheduler, room_of_leg
from jaxsgl.scheduler.disagg.prefill import PrefillRooms
from jaxsgl.scheduler.disagg.rooms import Action, Answer, Drop, Gather, Refuse, lost
from jaxsgl.scheduler.disagg.rows import lost_rows, started
from jaxsgl.transfer.frames import Ack, Fail, Grant, Open
from jaxsgl.transfer.wire import Event, Left, News, Sent

EXPIRE_S = 0.5  # between two looks for rooms that have waited too long


class PrefillScheduler(LegScheduler):
    """Computes prompts, and sends their pages to decode workers."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.rooms = PrefillRooms(self._room_limits, self._kv_names.version, self._clock)
        self._held: dict[str, Reply] = {}  # answers that wait for decode
        self._expire_s = 0.0
        if self.kept_images is not None:
            self.kept_images.on_rows = lambda digest, rows: self._carry_out(self.rooms.rows(digest, rows))

    def launch(self) -> StepInputs | None:
        """Starts legs, and decides the next step."""
        self._hear()
        if self._clock() >= self._expire_s:
            self._carry_out(self.rooms.expire())
            self._expire_s = self._clock() + EXPIRE_S
        inputs = super().launch()
        if inputs is not None:
            self._gather_chunks()
        return inputs

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
        for req, _ in self.last_plan.chunks:
            num_pages = full_pages(min(req.kv_len, req.prompt_len), self.cache.page_size)
            is_last = req.kv_len >= req.prompt_len
            self._carry_out(self.rooms.launched(req.request_id, num_pages, is_last))
            if is_last and self.state.images is not None and lost_rows(self.rooms, self.state.images, req.request_id):
                refusal = lost("embeddings of its images are lost")
                self._carry_out([*self.rooms.refused(req.request_id, refusal), Refuse(req.request_id, refusal)])

    def _carry_out_other(self, action: Gather | Answer) -> None:
        if isinstance(action, Answer):
            self._replies.append(self._held.pop(action.request_id))
            return
        (req,) = self._requests.samples_of(action.request_id)
        assert req.lease is not None
        pages: list[int] = self.cache.table.pages[req.lease.row, action.first : action.stop].tolist()
        self.ops.submit(GatherOp(tuple(pages)), partial(self._gathered, action), after_step=True)

    def _gathered(self, action: Gather, data: HostPages) -> None:
        self._carry_out(self.rooms.gathered(action.room, action.request_id, action.first, data))

    def _end_leg(self, request_id: str, replies: list[Reply]) -> None:
        self._held.pop(request_id, None)
        super()._end_leg(request_id, replies)

    def _started(self, request: Request) -> None:
        if request.media and self.state.images is not None:
            samples = self._requests.samples_of(request.request_id)
            self._carry_out(started(self.rooms, self.state.images, samples))

    def _aborted(self, abort: Abort) -> bool:
        actions = self.rooms.aborted(abort.request_id)
        self._carry_out(actions)
        return bool(actions)

    def _arrived(self, request: Request) -> list[Action]:
        return self.rooms.arrived(request, room_of_leg(request))

    def _refused_at_arrival(self, request: Request, refusal: Refusal) -> list[Action]:
        return self.rooms.refused_at_arrival(room_of_leg(request), refusal)

    def _heard(self, event: Event) -> list[Action]:
        match event:
            case Sent() as sent:
                return self.rooms.sent(sent)
            case Left(peer):
                return self.rooms.left(peer)
            case News(peer, Open(room, images)):
                return self.rooms.opened(peer, room, images)
            case News(peer, Grant() as grant):
                return self.rooms.granted(peer, grant)
            case News(peer, Ack(room)):
                return self.rooms.acked(peer, room)
            case News(peer, Fail() as fail):
                return self.rooms.failed(peer, fail)
        return []
