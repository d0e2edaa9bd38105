"""`PrefillSide`: has prompts computed, and sends their pages and the embeddings of their images to decode servers.

Embeddings that host memory or the pool has are sent when the request starts; an image that neither has is encoded
again, for which its part of the prompt is computed again.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from jaxsgl.batch.engine_api import Gather as GatherOp
from jaxsgl.batch.engine_api import HostPages
from jaxsgl.batch.inputs import StepInputs
from jaxsgl.cache.embeddings import HostRows
from jaxsgl.cache.pages import full_pages
from jaxsgl.config.engine import DEFAULT_WEIGHT_VERSION
from jaxsgl.messages.orders import Abort
from jaxsgl.messages.replies import Load, Refusal, Reply, TransferLoad
from jaxsgl.requests.request import FinishReason, Request
from jaxsgl.scheduler.disagg.prefill import PrefillRooms
from jaxsgl.scheduler.disagg.rooms import Action, Answer, Drop, Gather, Refuse, lost
from jaxsgl.scheduler.disagg.sides import Side, room_of_request, with_rooms
from jaxsgl.transfer.frames import Ack, Fail, Grant, Open
from jaxsgl.transfer.wire import Event, Left, News, Sent


class PrefillSide(Side):
    """Has prompts computed, and sends their pages to decode servers."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.rooms: PrefillRooms = PrefillRooms(self._limits, self._kv_names.version, self._clock)
        self._held: dict[str, Reply] = {}  # answers that wait for decode
        self._ended: set[str] = set()  # requests that this side has ended since replies were taken
        self._images = self.scheduler.state.images
        if self.scheduler.kept_images is not None:
            self.scheduler.kept_images.on_rows = self._rows_came

    def launch(self) -> StepInputs | None:
        """Starts legs, decides the next step, and has the pages that it completes copied after it."""
        self._hear()
        inputs = self.scheduler.launch()
        if inputs is not None:
            self._gather_chunks()
        return inputs

    def load(self, recompiles: int, leaks: int = 0, weight_version: str = DEFAULT_WEIGHT_VERSION) -> Load:
        """The scheduler's, and that of the legs around it."""
        waiting, sending = self.rooms.num_bootstrapping, self.rooms.num_sending
        load = self.scheduler.load(recompiles, leaks, weight_version)
        moved = self._num_bytes, self.rooms.hidden_bytes
        transfer = TransferLoad("prefill", waiting, sending, self.rooms.staged_bytes, *moved)
        return with_rooms(load, waiting, self.rooms.num_waiting_tokens, transfer)

    def _passes(self, reply: Reply) -> bool:
        """Whether a reply may leave now; the state machine hears what it means."""
        state = self.rooms.state_of(reply.request_id)
        if state is None:
            return reply.request_id not in self._ended
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
        """Has the pages copied that the step just launched completes."""
        assert self.scheduler.last_plan is not None
        for req, _ in self.scheduler.last_plan.chunks:
            num_pages = full_pages(min(req.kv_len, req.prompt_len), self.scheduler.cache.page_size)
            is_last = req.kv_len >= req.prompt_len
            self._carry_out(self.rooms.launched(req.request_id, num_pages, is_last, req.cached_tokens))
            if is_last:
                self._end_without_rows(req.request_id)

    def _rows_came(self, digest: bytes, rows: HostRows | None) -> None:
        self._carry_out(self.rooms.rows(digest, rows))
        for request_id in self.rooms.sending_without(digest) if rows is None else ():
            self._end_without_rows(request_id)

    def _end_without_rows(self, request_id: str) -> None:
        """Ends a request that is computed if rows that decode lacks are nowhere, and don't come any more."""
        wanted, images = self.rooms.wanted(request_id), self._images
        if images is not None and any(not images.kept.is_coming(digest, also_old=True) for digest in wanted):
            refusal = lost("embeddings of its images are lost")
            self._carry_out([*self.rooms.refused(request_id, refusal), Refuse(request_id, refusal)])

    def _carry_out_other(self, action: Gather | Answer) -> None:
        if isinstance(action, Answer):
            self._replies.append(self._held.pop(action.request_id))
            return
        pages = self.scheduler.pages_of(action.request_id, action.first, action.stop)
        self.scheduler.ops.submit(GatherOp(pages), partial(self._gathered, action), after_step=True)

    def _gathered(self, action: Gather, data: HostPages) -> None:
        self._carry_out(self.rooms.gathered(action.room, action.request_id, action.first, data))

    def _end(self, request_id: str, replies: list[Reply]) -> None:
        """Its token may have been read in the same turn, as one that `_held` would keep."""
        self._held.pop(request_id, None)
        self._ended.add(request_id)
        super()._end(request_id, replies)

    def take_replies(self) -> list[Reply]:
        """All replies since the last call."""
        replies = super().take_replies()
        self._ended.clear()
        return replies

    def _start(self, request: Request, since_s: float) -> None:
        """Sends rows that are there already of images that decode lacks, and has those of others computed."""
        super()._start(request, since_s)
        images = self._images
        if images is None or not self.scheduler.has(request.request_id):
            return
        kept, wanted = images.kept, self.rooms.wanted(request.request_id)
        for item in request.media:
            if item.digest not in wanted:
                continue
            rows, held = kept.host.find(item.digest), images.pool.find(item.digest)
            if rows is not None:
                kept.host.used(item.digest)
                self._carry_out(self.rooms.rows(item.digest, rows))
            elif kept.is_coming(item.digest):
                continue
            elif held is not None and held.encoded:
                kept.gather(held)
            else:
                self.scheduler.limit_cached_tokens(request.request_id, item.offset)

    def _aborted(self, abort: Abort) -> bool:
        actions = self.rooms.aborted(abort.request_id)
        self._carry_out(actions)
        return bool(actions)

    def _arrived(self, request: Request) -> list[Action]:
        return self.rooms.arrived(request, room_of_request(request))

    def _refused_at_arrival(self, request: Request, refusal: Refusal) -> list[Action]:
        return self.rooms.refused_at_arrival(room_of_request(request), refusal)

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
