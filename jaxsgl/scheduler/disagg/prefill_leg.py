"""What is known of one prefill leg: its state, and what of it is still to be sent. prefill.py changes it."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from jaxsgl.requests.request import Request
from jaxsgl.transfer.frames import Grant, Room
from jaxsgl.transfer.wire import Peer


class PrefillState(enum.Enum):
    """Where a prefill leg stands."""

    BOOTSTRAPPING = "bootstrapping"  # waits for decode's grant
    WAITING = "waiting"  # granted; waits for staging memory
    EXTENDING = "extending"  # the scheduler has it
    SENDING = "sending"  # computed; pages are on their way, or not acknowledged yet


@dataclass(slots=True)
class Leg:
    """A prefill leg. Pages up to `end` of its prompt go to `peer`; those before `next` are being copied or sent."""

    request: Request
    room: Room
    since_s: float
    state: PrefillState = PrefillState.BOOTSTRAPPING
    peer: Peer | None = None
    version: str = ""  # of weights and adapter, when it was started
    next: int = 0
    end: int = 0
    num_gathering: int = 0
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
