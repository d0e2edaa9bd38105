"""`DecodeRooms`: the decode legs of requests, from their arrival until the scheduler has them.

Owns which room is in which state, and the staging memory in which pages arrive. Events in, actions out; see rooms.py.
Pages stay in staging memory until the scheduler can take the request: a transfer holds neither pages nor locks of the
KV pool, so none can fill it up, dead or alive. What is granted may be less than the prompt; decode computes the rest.
"""

from __future__ import annotations

import enum
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from jaxsgl.errors import InvalidRequest
from jaxsgl.messages.replies import Refusal, RefusalKind
from jaxsgl.requests.media import MediaLimits
from jaxsgl.requests.request import Request
from jaxsgl.scheduler.disagg.images import Lacking, LackingRows, hash_for_prefill, of_source
from jaxsgl.scheduler.disagg.rooms import (
    NO_VERSION,
    Action,
    Drop,
    Refuse,
    RoomLimits,
    Send,
    Version,
    lost,
    refusal_of,
    taken,
)
from jaxsgl.scheduler.request_table import waited
from jaxsgl.transfer.frames import Ack, Done, Fail, Grant, Media, Open, Pages, Room, Rows
from jaxsgl.transfer.wire import Bytes, Peer


class DecodeState(enum.Enum):
    """Where a decode leg stands."""

    LACKING = "lacking"  # waits for the images of its prompt, which the gateway gave prefill alone
    BOOTSTRAPPING = "bootstrapping"  # waits for staging memory here
    RECEIVING = "receiving"  # granted; waits for prefill's pages
    READY = "ready"  # all pages are here; waits for room in the scheduler


@dataclass(slots=True)
class _Leg:
    """A decode leg: pages first .. end - 1 of its prompt come from `peer`."""

    request: Request
    room: Room
    peer: Peer
    since_s: float
    num_pages: int  # of its prompt that may come
    state: DecodeState = DecodeState.BOOTSTRAPPING
    first: int = 0
    end: int = 0
    parts: dict[int, Bytes] = field(default_factory=dict)  # by their first page
    num_received: int = 0
    version: Version = NO_VERSION  # when it was granted
    row_bytes: int = 0  # of images' embeddings that are on their way
    done: Done | None = None


class Received(NamedTuple):
    """A request whose pages first .. first + n - 1 are here, as `parts` in their order; computed by `weight_version`.

    It waits since `since_s`. No pages if the weights have changed on the way: the scheduler computes the prompt itself
    then. Of its prompt prefill had found `cached_tokens` in its cache; None if what it has computed is not used.
    """

    request: Request
    since_s: float
    first: int
    num_pages: int
    parts: tuple[Bytes, ...]
    weight_version: str
    cached_tokens: int | None


class DecodeRooms:
    """All decode legs.

    Args:
      limits: what they may take.
      num_cached: gives how many leading pages of a request's prompt are cached now.
      version_of: gives the version of weights and adapter that would compute a request here.
      clock: gives seconds.
      media_limits: of the images that prefill may send; None: the model takes text alone.
      rows: what is held and lacking of images' embeddings; None likewise.

    Attributes:
      num_waiting_tokens: prompt tokens of all requests here.
    """

    def __init__(
        self,
        limits: RoomLimits,
        num_cached: Callable[[Request], int],
        version_of: Callable[[Request], Version],
        clock: Callable[[], float],
        media_limits: MediaLimits | None = None,
        rows: LackingRows | None = None,
    ) -> None:
        self._limits = limits
        self._num_cached = num_cached
        self._version_of = version_of
        self._clock = clock
        self._legs: dict[Room, _Leg] = {}
        self._rooms: dict[str, Room] = {}
        self._lacking = Lacking(media_limits)
        self._rows = rows
        self._queue: deque[Room] = deque()  # BOOTSTRAPPING, in order of arrival
        self._ready: OrderedDict[Room, None] = OrderedDict()  # in order of completion
        self.num_waiting_tokens = 0
        self._staged = 0  # pages that are granted and not handed over
        self._staged_rows = 0  # bytes of embeddings that are granted and not kept yet

    @property
    def num_rooms(self) -> int:
        """Requests here."""
        return len(self._legs)

    @property
    def num_bootstrapping(self) -> int:
        """Requests without a grant."""
        return len(self._queue) + len(self._lacking)

    @property
    def num_receiving(self) -> int:
        """Requests whose pages are on their way, or wait for room in the scheduler."""
        return len(self._legs) - self.num_bootstrapping

    @property
    def has_ready(self) -> bool:
        """Whether a request waits for the scheduler, with all its pages."""
        return bool(self._ready)

    @property
    def staged_bytes(self) -> int:
        """Staging memory that is taken or promised."""
        return self._staged * self._limits.page_bytes + self._staged_rows

    def state_of(self, request_id: str) -> DecodeState | None:
        """Where the request stands; None: it has no room here."""
        room = self._rooms.get(request_id)
        return None if room is None else self._legs[room].state

    def request_ids(self) -> list[str]:
        """Of all requests here."""
        return list(self._rooms)

    def request(self, request_id: str) -> Request | None:
        """The request of that id, if it has a room here."""
        leg = self._leg_of(request_id)
        return None if leg is None else leg.request

    # The request.

    def refusal(self, room: Room) -> Refusal | None:
        """Why a request can't have `room`; None: it can."""
        return taken(room) if room in self._legs else self._limits.refusal(self.num_rooms, self.num_waiting_tokens)

    def refused_at_arrival(self, room: Room, peer: Peer, refusal: Refusal) -> list[Action]:
        """A request of `room` was refused before it had a leg: prefill, at `peer`, must not wait for that.

        Another one that runs in that room goes on.
        """
        return [] if room in self._legs else [Send(peer, Fail(room, refusal.text, refusal.kind.value))]

    def arrived(self, request: Request, room: Room, peer: Peer, num_pages: int) -> list[Action]:
        """The gateway has sent the decode leg of a checked request, whose prefill is at `peer`."""
        images = hash_for_prefill(request, self._lacking.limits)
        request = msgspec.structs.replace(request, media=of_source(request.media, request.kv_source))
        leg = self._legs[room] = _Leg(request, room, peer, self._clock(), num_pages)
        self._rooms[request.request_id] = room
        self.num_waiting_tokens += len(request.prompt_ids)
        if images is None:
            leg.state = DecodeState.LACKING
            self._lacking.add(room)
        else:
            self._queue.append(room)
        return [Send(peer, Open(room, images)), *self._checked(leg)]

    def aborted(self, request_id: str) -> list[Action]:
        """The client has left."""
        leg = self._leg_of(request_id)
        if leg is None:
            return []
        return [*self._end(leg, "the client has left", None), Drop(request_id, leg.request.sampling.n)]

    def expire(self) -> list[Action]:
        """Refuses requests that have waited too long to be admitted."""
        limit_s = self._limits.queue_timeout_s
        if limit_s is None:
            return []
        due_s = self._clock() - limit_s
        late = [leg for leg in self._legs.values() if leg.since_s < due_s]
        return [action for leg in late for action in self._give_up(leg, waited(limit_s))]

    def media(self, peer: Peer, media: Media, payload: Bytes) -> list[Action]:
        """A part of the request's images has come; with the last one it waits for memory like others."""
        leg = self._leg_at(peer, media.room)
        if leg is None or leg.state is not DecodeState.LACKING:
            return []
        try:
            images = self._lacking.taken(media, payload, leg.request.prompt_ids)
        except InvalidRequest as error:
            return self._give_up(leg, Refusal(RefusalKind.INVALID, str(error)))
        if images is None:
            return []
        self._lacking.discard(leg.room)
        media_here = of_source(images, leg.request.kv_source)
        leg.request = msgspec.structs.replace(leg.request, media=media_here)
        leg.state = DecodeState.BOOTSTRAPPING
        self._queue.append(leg.room)
        return self._checked(leg)

    # The pages.

    def pages(self, peer: Peer, pages: Pages, payload: Bytes) -> list[Action]:
        """Pages have come. Twice the same are one."""
        leg = self._leg_at(peer, pages.room)
        if leg is None or leg.state is not DecodeState.RECEIVING or pages.first_page in leg.parts:
            return []
        if not leg.first <= pages.first_page <= pages.first_page + pages.num_pages <= leg.end or not pages.num_pages:
            text = (
                f"pages {pages.first_page} to {pages.first_page + pages.num_pages} came, but {leg.first} to {leg.end}"
            )
            return self._give_up(leg, lost(f"{text} were granted"))
        leg.parts[pages.first_page] = payload
        leg.num_received += pages.num_pages
        return self._completed(leg)

    def rows(self, peer: Peer, rows: Rows, payload: Bytes) -> list[Action]:
        """Embeddings of an image have come."""
        leg = self._leg_at(peer, rows.room)
        if leg is None or leg.state is not DecodeState.RECEIVING or self._rows is None:
            return []
        if not self._rows.came(leg.room, rows.image, payload):
            return self._give_up(leg, lost(f"embeddings of image {rows.image} came that were not asked for"))
        return []

    def memory_freed(self) -> list[Action]:
        """Requests have ended that held embeddings of images."""
        return self._grant_waiting()

    def done(self, peer: Peer, done: Done) -> list[Action]:
        """Prefill has computed the prompt, and sent pages up to `done.end_page`."""
        leg = self._leg_at(peer, done.room)
        if leg is None or leg.state is not DecodeState.RECEIVING:
            return []
        leg.done = done
        return self._completed(leg)

    def ready(self) -> Received | None:
        """The request that waits longest for the scheduler, with all its pages."""
        if not self._ready:
            return None
        leg = self._legs[next(iter(self._ready))]
        if leg.done is None or not self._is_of_now(leg):
            return Received(leg.request, leg.since_s, leg.first, 0, (), leg.version.name, None)
        parts, cached = tuple(leg.parts[first] for first in sorted(leg.parts)), leg.done.cached_tokens
        return Received(leg.request, leg.since_s, leg.first, leg.num_received, parts, leg.version.name, cached)

    def _is_of_now(self, leg: _Leg) -> bool:
        """Whether what has come of a leg was all computed by the weights of now: none were exchanged meanwhile."""
        is_same = leg.version == self._version_of(leg.request)
        return is_same and leg.done is not None and leg.done.weight_version == leg.version.name

    def taken(self, request_id: str) -> list[Action]:
        """The scheduler has the request now, and its pages are copied."""
        leg = self._leg_of(request_id)
        assert leg is not None and leg.state is DecodeState.READY
        self._remove(leg)
        return self._grant_waiting()

    # The other leg.

    def failed(self, peer: Peer, fail: Fail) -> list[Action]:
        """Prefill has given the request up. Once all pages are here, that doesn't matter."""
        leg = self._leg_at(peer, fail.room)
        if leg is None or leg.state is DecodeState.READY:
            return []
        self._remove(leg)
        refusal = refusal_of(fail.kind, f"prefill: {fail.text}")
        return [Refuse(leg.request.request_id, refusal), *self._grant_waiting()]

    def left(self, peer: Peer) -> list[Action]:
        """There is no connection to `peer` any more. Requests whose pages are all here go on.

        Clients get one text for all reasons, which could tell them what listens at an address; the wire logs them.
        """
        legs = [leg for leg in self._legs.values() if leg.peer == peer and leg.state is not DecodeState.READY]
        for leg in legs:
            self._remove(leg)
        refusal = lost("the connection to the prefill server failed")
        return [*(Refuse(leg.request.request_id, refusal) for leg in legs), *self._grant_waiting()]

    # Within.

    def _leg_of(self, request_id: str) -> _Leg | None:
        room = self._rooms.get(request_id)
        return None if room is None else self._legs[room]

    def _leg_at(self, peer: Peer, room: Room) -> _Leg | None:
        leg = self._legs.get(room)
        return leg if leg is not None and leg.peer == peer else None

    def _checked(self, leg: _Leg) -> list[Action]:
        """Grants memory in order, unless the images of `leg` can't ever be held."""
        too_large = None if self._rows is None else self._rows.too_large(leg.request)
        if too_large is not None:
            return self._give_up(leg, Refusal(RefusalKind.INVALID, too_large))
        return self._grant_waiting()

    def _grant_waiting(self) -> list[Action]:
        """Grants memory in order of arrival, while there is some for all pages of a request."""
        actions: list[Action] = []
        while self._queue:
            leg = self._legs[self._queue[0]]
            first = min(self._num_cached(leg.request), leg.num_pages)
            num_pages = min(leg.num_pages - first, self._limits.staging_pages)
            if num_pages and self._staged + num_pages > self._limits.staging_pages:
                break
            images: tuple[int, ...] = ()
            if self._rows is not None:
                most = self._rows.host.limit_bytes  # if none are on their way; any one request may lack so many
                if self._staged_rows:
                    most = self._limits.staging_bytes - self.staged_bytes
                lacking = self._rows.hold(leg.request, leg.room, most)
                if lacking is None:
                    break
                images = lacking
                leg.row_bytes = self._rows.bytes_to_come(leg.room)
                self._staged_rows += leg.row_bytes
            self._queue.popleft()
            self._staged += num_pages
            leg.first, leg.end, leg.version = first, first + num_pages, self._version_of(leg.request)
            leg.state = DecodeState.RECEIVING
            actions.append(Send(leg.peer, Grant(leg.room, first, num_pages, leg.version.name, images)))
        return actions

    def _completed(self, leg: _Leg) -> list[Action]:
        """Acknowledges, once all pages that prefill has sent are here."""
        if leg.done is None or leg.num_received < leg.done.end_page - leg.first:
            return []
        self._end_rows(leg)
        leg.state = DecodeState.READY
        self._ready[leg.room] = None
        return [Send(leg.peer, Ack(leg.room))]

    def _give_up(self, leg: _Leg, refusal: Refusal) -> list[Action]:
        return [*self._end(leg, refusal.text, refusal.kind.value), Refuse(leg.request.request_id, refusal)]

    def _end(self, leg: _Leg, text: str, kind: str | None) -> list[Action]:
        """Removes a leg and tells prefill, unless that has done its part."""
        self._remove(leg)
        told = [] if leg.state is DecodeState.READY else [Send(leg.peer, Fail(leg.room, text, kind))]
        return [*told, *self._grant_waiting()]

    def _end_rows(self, leg: _Leg) -> None:
        """Keeps the embeddings that have come, if weights have not been exchanged since they were asked for."""
        if self._rows is None:
            return
        self._rows.ended(leg.room, self._is_of_now(leg))
        self._staged_rows -= leg.row_bytes
        leg.row_bytes = 0

    def _remove(self, leg: _Leg) -> None:
        del self._legs[leg.room], self._rooms[leg.request.request_id]
        self.num_waiting_tokens -= len(leg.request.prompt_ids)
        self._ready.pop(leg.room, None)
        self._lacking.discard(leg.room)
        if leg.state is DecodeState.RECEIVING:
            self._end_rows(leg)
        if leg.state is DecodeState.BOOTSTRAPPING:
            self._queue.remove(leg.room)
        elif leg.state is not DecodeState.LACKING:
            self._staged -= leg.end - leg.first
