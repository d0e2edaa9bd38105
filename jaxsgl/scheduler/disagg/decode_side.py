"""`DecodeSide`: takes the pages of prompts, and the embeddings of their images, and has the scheduler generate."""

from __future__ import annotations

from typing import Any

import msgspec

from jaxsgl.batch.engine_api import Insert as InsertOp
from jaxsgl.batch.inputs import StepInputs
from jaxsgl.cache.pages import full_pages
from jaxsgl.config.engine import DEFAULT_WEIGHT_VERSION
from jaxsgl.messages.orders import Abort
from jaxsgl.messages.replies import Load, Refusal, Reply, TransferLoad
from jaxsgl.requests.media import without_pixels
from jaxsgl.requests.request import Request
from jaxsgl.scheduler.disagg.decode import DecodeRooms, Received
from jaxsgl.scheduler.disagg.images import LackingRows
from jaxsgl.scheduler.disagg.rooms import Action, Refuse, Start
from jaxsgl.scheduler.disagg.sides import Side, room_of_request, with_rooms
from jaxsgl.transfer.frames import Done, Fail, Media, Pages, Rows
from jaxsgl.transfer.wire import Event, Left, News


class DecodeSide(Side):
    """Gets the pages of prompts from prefill servers, and has the scheduler generate."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        capacity, kept_images = self.scheduler.state.capacity, self.scheduler.kept_images
        self._host_images = None if kept_images is None else kept_images.host
        rows = None
        if capacity.tower is not None and self._host_images is not None and not capacity.tower.encodes:
            rows = LackingRows(self._host_images, capacity.tower.row_bytes)
        self.rooms: DecodeRooms = DecodeRooms(
            self._limits, self._num_cached, self._kv_names.version, self._clock, capacity.media, rows
        )
        self._ended: set[str] = set()  # requests with a last reply, of one sample at least, that may hold images
        self._aborts: dict[str, list[Abort]] = {}  # of single samples of requests that have a room

    @property
    def is_idle(self) -> bool:
        """Whether nothing can happen before the next message, or the next news of the wire."""
        return super().is_idle and not (self.rooms.has_ready and self.scheduler.may_launch)

    def launch(self) -> StepInputs | None:
        """Takes pages that have come, and decides the next step."""
        self._hear()
        while self.scheduler.may_launch and (received := self.rooms.ready()) is not None:
            if not self.scheduler.room_for(received.request):
                break
            self._take(received)
        return self.scheduler.launch()

    def load(self, recompiles: int, leaks: int = 0, weight_version: str = DEFAULT_WEIGHT_VERSION) -> Load:
        """The scheduler's, and that of the legs before it.

        Those that have all their pages wait for requests that the scheduler has, which counts the steps it owes them.
        """
        waiting, receiving = self.rooms.num_bootstrapping, self.rooms.num_receiving
        load = self.scheduler.load(recompiles, leaks, weight_version)
        transfer = TransferLoad("decode", waiting, receiving, self.rooms.staged_bytes, self._num_bytes)
        return with_rooms(load, waiting + receiving, self.rooms.num_waiting_tokens, transfer)

    def take_replies(self) -> list[Reply]:
        """All replies since the last call. Images that ended requests held may leave host memory then."""
        replies = super().take_replies()
        if self._host_images is None or not self._host_images.num_holders:
            return replies
        self._ended.update(reply.request_id for reply in replies if reply.finish_reason is not None or reply.refusal)
        for request_id in list(self._ended):
            if not self.scheduler.has(request_id) and self.rooms.request(request_id) is None:
                self._ended.remove(request_id)
                if self._host_images.drop(request_id):
                    self._carry_out(self.rooms.memory_freed())
        return replies

    def _take(self, received: Received) -> None:
        """Copies the pages to the pool, as a prefix, and gives the request to the scheduler."""
        request, layout = received.request, self._layout
        ids, namespace = self._kv_names.ids_and_namespace(request)
        pages = self.scheduler.land(ids, received.first, received.num_pages, request.request_id, namespace).tolist()
        missing_from = received.first + received.num_pages - len(pages)  # the cache has got those before meanwhile
        place = received.first
        for part in received.parts:
            count = len(part) // layout.page_bytes
            skipped = min(max(missing_from - place, 0), count)
            if skipped < count:
                data = part.view(layout.host_dtype).reshape(layout.shape(count))[skipped:]
                start = place + skipped - missing_from
                self.scheduler.ops.submit(InsertOp(tuple(pages[start : start + len(data)]), data))
            place += count
            self._num_bytes += part.nbytes
        self._carry_out([Start(request, received.since_s), *self.rooms.taken(request.request_id)])
        if received.cached_tokens is not None:  # what has come was computed for this request, unless prefill found it
            num_found = max(received.cached_tokens, self.scheduler.cache.tokens_of(received.first))
            self.scheduler.limit_found_tokens(request.request_id, num_found)
        self.scheduler.receive(self._aborts.pop(request.request_id, ()))

    def _num_cached(self, request: Request) -> int:
        return self.scheduler.num_cached(*self._kv_names.ids_and_namespace(request))

    def _end(self, request_id: str, replies: list[Reply]) -> None:
        self._aborts.pop(request_id, None)
        self.scheduler.forget(request_id)
        super()._end(request_id, replies)

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
        room = room_of_request(request)
        refusal = self.rooms.refusal(room)
        if refusal is not None:
            return [*self._refused_at_arrival(request, refusal), Refuse(request.request_id, refusal)]
        self.scheduler.expect(request)  # compiles its grammar while prefill computes
        host, port = request.room.host, request.room.port
        peer = self.wire.connect(host, port)
        source = "" if self.wire.proves_peers else f"{host} {port}"
        request = msgspec.structs.replace(request, media=without_pixels(request.media), kv_source=source)
        page_size = self.scheduler.cache.page_size
        return self.rooms.arrived(request, room, peer, full_pages(len(request.prompt_ids) - 1, page_size))

    def _refused_at_arrival(self, request: Request, refusal: Refusal) -> list[Action]:
        assert request.room is not None
        peer = self.wire.connect(request.room.host, request.room.port)
        return self.rooms.refused_at_arrival(room_of_request(request), peer, refusal)

    def _heard(self, event: Event) -> list[Action]:
        match event:
            case Left(peer):
                return self.rooms.left(peer)
            case News(peer, Pages() as pages, payload) if payload is not None:
                return self.rooms.pages(peer, pages, payload)
            case News(peer, Media() as media, payload) if payload is not None:
                return self.rooms.media(peer, media, payload)
            case News(peer, Rows() as rows, payload) if payload is not None:
                self._num_bytes += payload.nbytes
                return self.rooms.rows(peer, rows, payload)
            case News(peer, Done() as done):
                return self.rooms.done(peer, done)
            case News(peer, Fail() as fail):
                return self.rooms.failed(peer, fail)
        return []
