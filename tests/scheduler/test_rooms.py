"""Rooms that no request has come for: a peer that forges them takes none from another, nor from requests."""

from __future__ import annotations

from jaxsgl.requests.request import Request, SamplingParams
from jaxsgl.scheduler.disagg.decode import DecodeRooms
from jaxsgl.scheduler.disagg.prefill import PrefillRooms
from jaxsgl.scheduler.disagg.rooms import Action, Refuse, RoomLimits, Send, Version
from jaxsgl.transfer.frames import Fail, Room

LIMITS = RoomLimits(page_bytes=16, staging_bytes=1600, max_rooms=10, partner_s=30.0)
FORGER, REAL = 1, 2


def request(number: int) -> Request:
    return Request(f"r{number}", [1, 2, 3], SamplingParams())


def failed(actions: list[Action]) -> list[int]:
    """Peers that were told of the end of a room."""
    return [action.peer for action in actions if isinstance(action, Send) and isinstance(action.message, Fail)]


def test_forged_rooms_take_no_room_from_requests_nor_from_a_real_peer() -> None:
    rooms = PrefillRooms(LIMITS, lambda _: Version("v"), lambda: 0.0)
    told = [failed(rooms.opened(FORGER, Room(number, 0), 0)) for number in range(9000)]
    assert told[:10] == [[]] * 10 and all(each == [FORGER] for each in told[10:])
    for number in range(5):  # half of the places are its share
        assert failed(rooms.opened(REAL, Room(10_000 + number, 0), 0)) == [FORGER]
    assert failed(rooms.opened(REAL, Room(10_006, 0), 0)) == [REAL]
    for number in range(10):
        assert rooms.arrived(request(number), Room(10_000 + number, 0)) == []


def test_clients_get_one_text_for_all_reasons_of_a_lost_connection() -> None:
    rooms = DecodeRooms(LIMITS, lambda _: 0, lambda _: Version("v"), lambda: 0.0)
    texts = set()
    for number in range(2):
        rooms.arrived(request(number), Room(number, 0), peer=number, num_pages=1)
        (refused,) = rooms.left(number)
        assert isinstance(refused, Refuse)
        texts.add(refused.refusal.text)
    assert texts == {"the connection to the prefill server failed: send the request again"}
