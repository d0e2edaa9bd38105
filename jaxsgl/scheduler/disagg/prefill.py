"""`PrefillRooms`: the prefill legs of requests, from their arrival until decode has their pages.

Owns which room is in which state, and what staging memory is promised, being filled and on its way out. Events in,
actions out; see rooms.py. A prompt is computed only once decode has granted memory for its pages, so that what is
computed can leave at once and no page is held for a decode worker that doesn't come.
"""

from __future__ import annotations

import enum
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from jaxsgl.cache.embeddings import HostRows
from jaxsgl.messages.replies import Refusal, RefusalKind
from jaxsgl.requests.media import images_hash
from jaxsgl.requests.request import Request
from jaxsgl.scheduler.disagg.images import send_images
from jaxsgl.scheduler.disagg.rooms import (
    NO_VERSION,
    Action,
    Answer,
    Drop,
    Gather,
    Refuse,
    RoomLimits,
    Send,
    Start,
    Version,
    lost,
    refusal_of,
    taken,
    too_many,
)
from jaxsgl.scheduler.request_table import waited
from jaxsgl.transfer.frames import FRAME_BYTES, Done, Fail, Grant, Room, Rows, page_frames
from jaxsgl.transfer.wire import Peer, Sent

CHANGED = ""  # the version of pages that were computed while weights or adapters were exchanged: that of none
MAX_ENDED = 1024  # rooms of each side that ended before the other one's leg came, and are remembered


class PrefillState(enum.Enum):
    """Where a prefill leg stands."""

    BOOTSTRAPPING = "bootstrapping"  # waits for decode's grant
    WAITING = "waiting"  # granted; waits for staging memory
    EXTENDING = "extending"  # the scheduler has it
    SENDING = "sending"  # computed; pages are on their way, or not acknowledged yet


@dataclass(slots=True)
class Leg:
    """A prefill leg. Pages up to `end` of its prompt go to `peer`; those before `next` are being copied or sent.

    The first `cached_tokens` of the prompt were not computed for it.
    """

    request: Request
    room: Room
    since_s: float
    state: PrefillState = PrefillState.BOOTSTRAPPING
    peer: Peer | None = None
    version: Version = NO_VERSION  # when it was started
    next: int = 0
    end: int = 0
    num_gathering: int = 0
    cached_tokens: int = 0
    answered_s: float | None = None  # when the scheduler had computed it
    acked: bool = False  # by decode
    wanted: set[bytes] = field(default_factory=set)  # images whose embeddings decode lacks


@dataclass(slots=True)
class Orphan:
    """What decode has said of a room whose request has not come from the gateway yet."""

    peer: Peer
    since_s: float
    images: int | None  # the hash of those of decode's request; None: it lacks them
    grant: Grant | None = None


class PrefillRooms:
    """All prefill legs.

    Args:
      limits: what they may take.
      version_of: gives the version of weights and adapter that compute a request now.
      clock: gives seconds, as those of the wire's events.

    Attributes:
      hidden_bytes: of pages that left before their prompt was computed.
    """

    def __init__(
        self, limits: RoomLimits, version_of: Callable[[Request], Version], clock: Callable[[], float]
    ) -> None:
        self._limits = limits
        self._version_of = version_of
        self._clock = clock
        self._legs: dict[Room, Leg] = {}
        self._rooms: dict[str, Room] = {}
        self._num_in: Counter[PrefillState] = Counter()
        self._tokens_in: Counter[PrefillState] = Counter()  # of their prompts
        self._orphans: OrderedDict[Room, Orphan] = OrderedDict()  # in order of time
        self._refused: OrderedDict[Room, Fail] = OrderedDict()  # here, before decode has asked for them
        self._failed: OrderedDict[Room, Fail] = OrderedDict()  # by decode, before their request has come
        self._queue: deque[Room] = deque()  # WAITING, in order of their grants
        self._promised = 0  # pages that started requests may still have copied
        self._gathering = 0  # pages that are being copied, of ended requests too
        self._unsent: Counter[Peer] = Counter()  # bytes that wires hold
        self.hidden_bytes = 0

    @property
    def num_rooms(self) -> int:
        """Requests here, and rooms whose request has not come. Each kind has `max_rooms` of its own."""
        return len(self._legs) + len(self._orphans)

    @property
    def num_bootstrapping(self) -> int:
        """Requests that are not computed yet, since decode has not granted them memory, or there is none here."""
        return self._num_in[PrefillState.BOOTSTRAPPING] + self._num_in[PrefillState.WAITING]

    @property
    def num_waiting_tokens(self) -> int:
        """Prompt tokens of these."""
        return self._tokens_in[PrefillState.BOOTSTRAPPING] + self._tokens_in[PrefillState.WAITING]

    @property
    def num_sending(self) -> int:
        """Requests that are computed, and whose pages are not all acknowledged."""
        return self._num_in[PrefillState.SENDING]

    @property
    def staged_bytes(self) -> int:
        """Staging memory that is taken or promised."""
        return (self._promised + self._gathering) * self._limits.page_bytes + self._unsent.total()

    def state_of(self, request_id: str) -> PrefillState | None:
        """Where the request stands; None: it has no room here."""
        room = self._rooms.get(request_id)
        return None if room is None else self._legs[room].state

    def request_ids(self) -> list[str]:
        """Of all requests here."""
        return list(self._rooms)

    # The request.

    def arrived(self, request: Request, room: Room) -> list[Action]:
        """The gateway has sent the prefill leg of a request."""
        if room in self._legs:
            return [Refuse(request.request_id, taken(room))]
        failed = self._failed.pop(room, None)
        if failed is not None:
            return [Refuse(request.request_id, _of_decode(failed))]
        refusal = self._limits.refusal(len(self._legs), self.num_waiting_tokens)
        if refusal is not None:
            return [*self.refused_at_arrival(room, refusal), Refuse(request.request_id, refusal)]
        self._refused.pop(room, None)
        leg = self._legs[room] = Leg(request, room, self._clock())
        self._rooms[request.request_id] = room
        self._count(leg, 1)
        orphan = self._orphans.pop(room, None)
        if orphan is None:
            return []
        leg.peer = orphan.peer
        actions = self._compare_images(leg, orphan.images)
        return actions if orphan.grant is None or room not in self._legs else self._grant(leg, orphan.grant)

    def aborted(self, request_id: str) -> list[Action]:
        """The client has left."""
        leg = self._leg_of(request_id)
        return (
            []
            if leg is None
            else [*self._give_up(leg, "the client has left", None), Drop(request_id, leg.request.sampling.n)]
        )

    def refused_at_arrival(self, room: Room, refusal: Refusal) -> list[Action]:
        """A request of `room` was refused before it had a leg: decode must not wait for it, nor generate.

        Another one that runs in that room goes on.
        """
        if room in self._legs or self._failed.pop(room, None) is not None:
            return []
        orphan = self._orphans.pop(room, None)
        return self._tell(None if orphan is None else orphan.peer, Fail(room, refusal.text, refusal.kind.value))

    def refused(self, request_id: str, refusal: Refusal) -> list[Action]:
        """The scheduler has refused or failed the request, and tells its client so; decode must not generate."""
        leg = self._leg_of(request_id)
        return [] if leg is None else self._give_up(leg, refusal.text, refusal.kind.value)

    def launched(self, request_id: str, num_pages: int, is_last: bool, cached_tokens: int) -> list[Action]:
        """A step is launched after which the first `num_pages` pages of the prompt are full; perhaps all of it.

        The first `cached_tokens` were cached before.
        """
        leg = self._leg_of(request_id)
        if leg is None or leg.state is not PrefillState.EXTENDING:
            return []
        actions: list[Action] = []
        stop = min(num_pages, leg.end)
        if stop > leg.next:  # fewer after a retraction, when what was sent is computed again
            actions.append(Gather(leg.room, request_id, leg.next, stop))
            leg.num_gathering += 1
            self._promised -= stop - leg.next
            self._gathering += stop - leg.next
            leg.next = stop
        if is_last:
            leg.cached_tokens = cached_tokens
            self._move(leg, PrefillState.SENDING)
            self._promised -= leg.end - leg.next
            leg.end = leg.next
            actions += self._done(leg)
        return actions

    def ended(self, request_id: str) -> bool:
        """The scheduler has answered the request; returns whether the answer must wait for decode."""
        leg = self._leg_of(request_id)
        if leg is None:
            return False
        leg.answered_s = self._clock()
        if leg.acked:
            self._remove(leg)
        return not leg.acked

    # The pages.

    def gathered(self, room: Room, request_id: str, first: int, data: np.ndarray) -> list[Action]:
        """Pages from `first` on, `[n, ...]`, are on the host."""
        self._gathering -= len(data)
        leg = self._leg_of(request_id)
        if leg is None or leg.room != room:
            return self._start_waiting()
        assert leg.peer is not None
        per_frame = max(FRAME_BYTES // self._limits.page_bytes, 1)
        self._unsent[leg.peer] += len(data) * self._limits.page_bytes
        leg.num_gathering -= 1
        frames = page_frames(room, first, data, per_frame)
        return [*(Send(leg.peer, message, payload) for message, payload in frames), *self._done(leg)]

    def wanted(self, request_id: str) -> frozenset[bytes]:
        """Images of a request whose embeddings are still to be sent."""
        leg = self._leg_of(request_id)
        return frozenset() if leg is None else frozenset(leg.wanted)

    def rows(self, digest: bytes, rows: HostRows | None) -> list[Action]:
        """Embeddings of an image have come; None: they are those of weights of the past."""
        actions: list[Action] = []
        for leg in list(self._legs.values()):
            is_begun = leg.state in (PrefillState.EXTENDING, PrefillState.SENDING)
            if not is_begun or digest not in leg.wanted:
                continue
            if rows is not None:
                leg.wanted.discard(digest)
                actions += self._send_rows(leg, digest, rows)
            elif leg.version.name != self._version_of(leg.request).name:
                leg.wanted.discard(digest)  # decode is told so
            actions += self._done(leg)
        return actions

    def sending_without(self, digest: bytes) -> list[str]:
        """Requests that are computed, and for which embeddings of that image are still to be sent."""
        legs = self._legs.values()
        return [leg.request.request_id for leg in legs if leg.state is PrefillState.SENDING and digest in leg.wanted]

    def sent(self, sent: Sent) -> list[Action]:
        """Pages have left this process."""
        if sent.peer in self._unsent:
            self._unsent[sent.peer] -= sent.num_bytes
        leg = self._legs.get(sent.room)
        if leg is not None and leg.peer == sent.peer and (leg.answered_s is None or sent.at_s <= leg.answered_s):
            self.hidden_bytes += sent.num_bytes
        return self._start_waiting()

    # The other leg.

    def opened(self, peer: Peer, room: Room, images: int | None) -> list[Action]:
        """Decode has the request, too, with images of that hash, or without those that its prompt stands for.

        Rooms whose request has not come are bounded; beyond that, the peer that holds most of them loses one.
        """
        known = self._legs.get(room) or self._orphans.get(room)
        if isinstance(known, Leg) and known.peer is None:
            known.peer = peer
            return self._compare_images(known, images)
        if known is not None:
            return [] if known.peer == peer else [_fail(peer, room, taken(room))]
        refused = self._refused.pop(room, None)
        if refused is not None:
            return [Send(peer, refused)]
        actions: list[Action] = []
        if len(self._orphans) >= self._limits.max_rooms:
            held = Counter(orphan.peer for orphan in self._orphans.values())
            greediest = max(held, key=lambda other: held[other])
            if held[peer] >= held[greediest]:
                return [_fail(peer, room, too_many(self._limits.max_rooms))]
            oldest = next(other for other, orphan in self._orphans.items() if orphan.peer == greediest)
            del self._orphans[oldest]
            actions.append(_fail(greediest, oldest, too_many(self._limits.max_rooms)))
        self._orphans[room] = Orphan(peer, self._clock(), images)
        return actions

    def granted(self, peer: Peer, grant: Grant) -> list[Action]:
        """Decode has memory for pages of the prompt. It may say so before the request is here."""
        leg, orphan = self._legs.get(grant.room), self._orphans.get(grant.room)
        if leg is not None and leg.peer == peer:
            return self._grant(leg, grant)
        if orphan is not None and orphan.peer == peer:
            orphan.grant = grant
            return []
        return [_fail(peer, grant.room, lost(f"the prefill worker has no room {grant.room.number} any more"))]

    def acked(self, peer: Peer, room: Room) -> list[Action]:
        """Decode has all pages: the client gets the answer as soon as the scheduler has one."""
        leg = self._legs.get(room)
        if leg is None or leg.peer != peer or leg.state is not PrefillState.SENDING:
            return []
        leg.acked = True
        if leg.answered_s is None:
            return []
        self._remove(leg)
        return [Answer(leg.request.request_id)]

    def failed(self, peer: Peer, fail: Fail) -> list[Action]:
        """Decode has given the request up, perhaps before it asked for the room, or before the request came here."""
        leg, orphan = self._legs.get(fail.room), self._orphans.get(fail.room)
        known = leg or orphan
        if known is not None and known.peer not in (peer, None):
            return []
        if leg is not None:
            self._remove(leg)
            return [Refuse(leg.request.request_id, _of_decode(fail)), *self._start_waiting()]
        self._orphans.pop(fail.room, None)
        if self._refused.pop(fail.room, None) is None:
            _remember(self._failed, fail)
        return []

    def left(self, peer: Peer) -> list[Action]:
        """There is no connection to `peer` any more."""
        self._unsent.pop(peer, None)
        for room in [room for room, orphan in self._orphans.items() if orphan.peer == peer]:
            del self._orphans[room]
        legs = [leg for leg in self._legs.values() if leg.peer == peer]
        for leg in legs:
            self._remove(leg)
        refusal = lost("the connection to the decode server failed")
        return [*(Refuse(leg.request.request_id, refusal) for leg in legs), *self._start_waiting()]

    def expire(self) -> list[Action]:
        """Ends legs that decode has not opened, and rooms that no request came for, within `partner_s`.

        A leg that decode has opened may wait for its grant as long as decode lives, unless the queue has a time limit.
        """
        now_s = self._clock()
        actions = self._end_strangers(now_s)
        for leg in list(self._legs.values()):
            refusal = self._overdue(leg, now_s - leg.since_s)
            if refusal is not None:
                told = self._give_up(leg, refusal.text, refusal.kind.value)
                actions += [*told, Refuse(leg.request.request_id, refusal)]
        due_s, text = now_s - self._limits.partner_s, f"within {self._limits.partner_s:g} s"
        while self._orphans and next(iter(self._orphans.values())).since_s <= due_s:
            room, orphan = self._orphans.popitem(last=False)
            actions.append(
                _fail(orphan.peer, room, lost(f"the prefill worker got no request for room {room.number} {text}"))
            )
        return actions

    # Within.

    def _leg_of(self, request_id: str) -> Leg | None:
        room = self._rooms.get(request_id)
        return None if room is None else self._legs[room]

    def _end_strangers(self, now_s: float) -> list[Action]:
        """Ends overdue legs that decode has under the same number, but with another prompt: they are of one request."""
        alone = {leg.room.number: leg for leg in self._legs.values() if leg.peer is None}
        actions: list[Action] = []
        for room, orphan in list(self._orphans.items()):
            leg = alone.get(room.number)
            if leg is None or now_s - min(leg.since_s, orphan.since_s) < self._limits.partner_s:
                continue
            del alone[room.number], self._orphans[room]
            self._remove(leg)
            text = (
                f"the prompt of bootstrap_room {room.number} has other tokens at prefill than at decode: give both "
                "servers the same tokenizer and chat template"
            )
            refusal = Refusal(RefusalKind.PEER, text)
            actions += [_fail(orphan.peer, room, refusal), Refuse(leg.request.request_id, refusal)]
        return actions

    def _overdue(self, leg: Leg, waited_s: float) -> Refusal | None:
        """Why a leg that is `waited_s` seconds old must end; None: it may go on."""
        limit_s, partner_s = self._limits.queue_timeout_s, self._limits.partner_s
        is_waiting = leg.state in (PrefillState.BOOTSTRAPPING, PrefillState.WAITING)
        if is_waiting and limit_s is not None and waited_s > limit_s:
            return waited(limit_s)
        if leg.peer is None and waited_s >= partner_s:
            number = leg.room.number
            return lost(f"no decode worker has asked for bootstrap_room {number} within {partner_s:g} s")
        return None

    def _compare_images(self, leg: Leg, images: int | None) -> list[Action]:
        """Sends its images to a decode worker that lacks them; refuses the request if that worker has others."""
        assert leg.peer is not None
        if images is None:
            return [*send_images(leg.peer, leg.room, leg.request.media)]
        if images == images_hash(leg.request.media):
            return []
        refusal = Refusal(RefusalKind.INVALID, "the request has other images at prefill than at decode: send it again")
        actions = self._give_up(leg, refusal.text, refusal.kind.value)
        return [*actions, Refuse(leg.request.request_id, refusal)]

    def _grant(self, leg: Leg, grant: Grant) -> list[Action]:
        if leg.state is not PrefillState.BOOTSTRAPPING:
            return []  # said twice
        version = self._version_of(leg.request).name
        if grant.weight_version != version:
            text = f"the weights are {version} at prefill, but {grant.weight_version} at decode: update both"
            refusal = lost(text)
            actions = self._give_up(leg, refusal.text, refusal.kind.value)
            return [*actions, Refuse(leg.request.request_id, refusal)]
        media = leg.request.media
        leg.wanted = {media[place].digest for place in grant.images if 0 <= place < len(media)}
        leg.next = max(grant.first_page, 0)
        leg.end = leg.next + min(max(grant.num_pages, 0), self._limits.staging_pages)
        self._move(leg, PrefillState.WAITING)
        self._queue.append(leg.room)
        return self._start_waiting()

    def _start_waiting(self) -> list[Action]:
        """Starts legs in order while there is staging memory for all that they will send."""
        actions: list[Action] = []
        while self._queue:
            leg = self._legs[self._queue[0]]
            num_bytes = (leg.end - leg.next) * self._limits.page_bytes
            if num_bytes and self.staged_bytes + num_bytes > self._limits.staging_bytes:
                break
            self._queue.popleft()
            self._promised += leg.end - leg.next
            self._move(leg, PrefillState.EXTENDING)
            leg.version = self._version_of(leg.request)  # the adapter stays the same from now on
            actions.append(Start(leg.request, leg.since_s))
        return actions

    def _done(self, leg: Leg) -> list[Action]:
        """Says so, once the prompt is computed and its last pages are handed to the wire."""
        if leg.state is not PrefillState.SENDING or leg.num_gathering or leg.wanted:
            return []
        assert leg.peer is not None
        version = leg.version.name if leg.version == self._version_of(leg.request) else CHANGED
        return [Send(leg.peer, Done(leg.room, leg.end, version, leg.cached_tokens))]

    def _send_rows(self, leg: Leg, digest: bytes, rows: HostRows) -> list[Action]:
        assert leg.peer is not None
        self._unsent[leg.peer] += rows.nbytes
        place = next(place for place, item in enumerate(leg.request.media) if item.digest == digest)
        parts = (rows.reshape(-1)[start : start + FRAME_BYTES] for start in range(0, rows.nbytes, FRAME_BYTES))
        return [Send(leg.peer, Rows(leg.room, place), part) for part in parts]

    def _give_up(self, leg: Leg, text: str, kind: str | None) -> list[Action]:
        """Removes a leg and tells decode."""
        self._remove(leg)
        return [*self._tell(leg.peer, Fail(leg.room, text, kind)), *self._start_waiting()]

    def _tell(self, peer: Peer | None, fail: Fail) -> list[Action]:
        """Tells decode of the end of a room: now, or when it asks for it."""
        if peer is not None:
            return [Send(peer, fail)]
        _remember(self._refused, fail)
        return []

    def _count(self, leg: Leg, sign: int) -> None:
        self._num_in[leg.state] += sign
        self._tokens_in[leg.state] += sign * len(leg.request.prompt_ids)

    def _move(self, leg: Leg, state: PrefillState) -> None:
        self._count(leg, -1)
        leg.state = state
        self._count(leg, 1)

    def _remove(self, leg: Leg) -> None:
        self._count(leg, -1)
        del self._legs[leg.room], self._rooms[leg.request.request_id]
        if leg.state is PrefillState.WAITING:
            self._queue.remove(leg.room)
        elif leg.state is PrefillState.EXTENDING:
            self._promised -= leg.end - leg.next


def _of_decode(fail: Fail) -> Refusal:
    return refusal_of(fail.kind, f"decode: {fail.text}")


def _remember(ended: OrderedDict[Room, Fail], fail: Fail) -> None:
    ended[fail.room] = fail
    if len(ended) > MAX_ENDED:
        ended.popitem(last=False)


def _fail(peer: Peer, room: Room, refusal: Refusal) -> Send:
    return Send(peer, Fail(room, refusal.text, refusal.kind.value))
