"""What both legs of a request share: actions, limits and the words for clients.

The two state machines, prefill.py and decode.py, take events and return actions; the sides, prefill_side.py and
decode_side.py, carry the actions out. The machines know no sockets, no pages' ids and no threads, and read no clock but
the one that they are given.

    decode                                            prefill
    LACKING        --Open(no images)--------------->  BOOTSTRAPPING    only if the gateway sent decode no images
        |          <-Media, Media, ..---------------
    BOOTSTRAPPING  --Open-------------------------->  BOOTSTRAPPING    until decode has memory for the pages
        | staging memory, and room for images' embeddings
    RECEIVING      --Grant(what it lacks)---------->  WAITING          until there is staging memory here, too
        |                                             EXTENDING        in the scheduler; pages leave after each chunk
        |          <-Pages, Rows, Pages, ..---------
        |          <-Done---------------------------  SENDING
    READY          --Ack--------------------------->  (answered)
        | pages into the prefix cache
    (in the scheduler, like any request)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias

from jaxsgl.messages.replies import Refusal, RefusalKind
from jaxsgl.requests.request import Request
from jaxsgl.transfer.frames import Message, Room
from jaxsgl.transfer.wire import Bytes, Peer


class Version(NamedTuple):
    """What computes a request's KV at this moment.

    Attributes:
      name: of weights and adapter, equal on servers that compute the same.
      exchange: how often weights were exchanged here before. A name may come back, with what others computed between.
    """

    name: str
    exchange: int = 0


NO_VERSION = Version("")  # of a leg that has not begun


class Start(NamedTuple):
    """Give `request` to the scheduler, as one that waits since `since_s`."""

    request: Request
    since_s: float


class Send(NamedTuple):
    """Send `message`, with the bytes of its pages if it has any."""

    peer: Peer
    message: Message
    payload: Bytes | None = None


class Gather(NamedTuple):
    """Copy pages first .. stop - 1 of the request's prompt to the host, after the steps launched so far."""

    room: Room
    request_id: str
    first: int
    stop: int


class Refuse(NamedTuple):
    """End the request, wherever it is, and tell its client why."""

    request_id: str
    refusal: Refusal


class Drop(NamedTuple):
    """End all samples of the request as aborted."""

    request_id: str
    num_samples: int


class Answer(NamedTuple):
    """Let the client have the replies that were held back."""

    request_id: str


Action: TypeAlias = Start | Send | Gather | Refuse | Drop | Answer


@dataclass(frozen=True)
class RoomLimits:
    """What rooms may take.

    Attributes:
      page_bytes: of one page on the host.
      staging_bytes: of pages on the host at once, on their way.
      max_rooms: requests that wait for their other leg, or are being sent or received.
      partner_s: seconds that a leg waits for a sign of the other one.
      max_tokens: a request that finds prompts of so many tokens waiting here is refused; None: no limit.
      queue_timeout_s: seconds that a request waits for its admission, in its room and in the scheduler's queue; None:
        no limit.
    """

    page_bytes: int
    staging_bytes: int
    max_rooms: int
    partner_s: float
    max_tokens: int | None = None
    queue_timeout_s: float | None = None

    @property
    def staging_pages(self) -> int:
        """The most pages that one request may have in staging memory; the rest it computes itself."""
        return self.staging_bytes // self.page_bytes

    def refusal(self, num_rooms: int, num_tokens: int) -> Refusal | None:
        """Why a request is refused that finds so many here, and so many prompt tokens waiting; None: it is taken."""
        if num_rooms >= self.max_rooms:
            return too_many(self.max_rooms)
        if self.max_tokens is not None and num_tokens >= self.max_tokens:
            text = (
                f"prompts of {num_tokens} tokens wait for prefill or decode, and --max-queued-tokens is "
                f"{self.max_tokens}: try again later"
            )
            return Refusal(RefusalKind.OVERLOADED, text)
        return None


class Rooms(Protocol):
    """What both state machines have in common."""

    def request_ids(self) -> list[str]:
        """Of all requests that have a room."""
        ...

    def aborted(self, request_id: str) -> list[Action]:
        """The client of a request, which may have a room, has left."""
        ...

    def expire(self) -> list[Action]:
        """Ends what has waited for too long."""
        ...


def lost(reason: str) -> Refusal:
    """The refusal of a request whose other leg is gone."""
    return Refusal(RefusalKind.PEER, f"{reason}: send the request again")


def too_many(max_rooms: int) -> Refusal:
    """The refusal of a request beyond the limit."""
    text = f"{max_rooms} requests wait for prefill or decode (--max-queued-requests): try again later"
    return Refusal(RefusalKind.OVERLOADED, text)


def taken(room: Room) -> Refusal:
    """The refusal of a second request with the same room and prompt."""
    return Refusal(RefusalKind.INVALID, f"bootstrap_room {room.number} is taken by a running request: draw another")


def refusal_of(kind: str | None, text: str) -> Refusal:
    """The refusal that the other leg has sent. A kind that this version doesn't know counts as a loss."""
    known = {known.value: known for known in RefusalKind}
    return Refusal(known.get(kind or "", RefusalKind.PEER), text)
