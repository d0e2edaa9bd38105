"""Frames over loopback: pages arrive as they were, unlike workers are refused, silence is death, memory is bounded."""

from __future__ import annotations

import contextlib
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest

from jaxsgl.errors import StartupError
from jaxsgl.transfer.frames import (
    Ack,
    Done,
    Fail,
    Geometry,
    Grant,
    Media,
    Open,
    Pages,
    Ping,
    Rows,
    encode,
    page_frames,
    room_of,
)
from jaxsgl.transfer.listener import MAX_PENDING, MAX_REASON_CHARS
from jaxsgl.transfer.tcp import MAX_LINKS_OF_HOST, MAX_UNPOLLED, MAX_UNSENT, TcpWire
from jaxsgl.transfer.wire import Event, Left, News, Sent
from tests.transfer.strangers import Relay, greet

SHAPE = (2, 2, 2, 16, 8)
GEOMETRY = Geometry(16, "bfloat16", SHAPE, math.prod(SHAPE) * 2, "tiny", 64)
ROOM = room_of(7, [1, 2, 3])
PATIENCE_S = 30.0


def until(wire: TcpWire, enough: Callable[[list[Event]], bool]) -> list[Event]:
    """What happens until it is enough."""
    events: list[Event] = []
    deadline_s = time.monotonic() + PATIENCE_S
    while not enough(events):
        assert time.monotonic() < deadline_s, events
        wire.wait(0.1)
        events += wire.poll()
    return events


def logged(caplog: pytest.LogCaptureFixture, words: str) -> str:
    """The first line of the log with `words`, once it is there."""
    deadline_s = time.monotonic() + PATIENCE_S
    while not (found := [line for record in caplog.records if words in (line := record.getMessage())]):
        assert time.monotonic() < deadline_s, caplog.text
        time.sleep(0.01)
    return found[0]


def messages(events: Sequence[Event]) -> list[object]:
    return [event.message for event in events if isinstance(event, News)]


def left(events: list[Event]) -> bool:
    return any(isinstance(event, Left) for event in events)


def reason(events: list[Event]) -> str:
    (reason,) = [event.reason for event in events if isinstance(event, Left)]
    return reason


WITH_NIXL = "JAXSGL_TEST_NIXL" in os.environ  # in the process of test_nixl.py
OVER_NIXL = msgspec.structs.replace(GEOMETRY, backend="nixl")
over_both = pytest.mark.parametrize(
    "geometry", [GEOMETRY, *([OVER_NIXL] if WITH_NIXL else [])], ids=lambda geometry: geometry.backend
)


@contextlib.contextmanager
def pair(
    theirs: Geometry = GEOMETRY, mode: str = "decode", timeout_s: float = 5.0, mine: Geometry = GEOMETRY
) -> Iterator[tuple[TcpWire, TcpWire]]:
    prefill = TcpWire("prefill", mine, ("127.0.0.1", 0), timeout_s)
    decode = TcpWire(mode, theirs, None, timeout_s)
    try:
        yield prefill, decode
    finally:
        prefill.close()
        decode.close()


@over_both
def test_pages_arrive_in_order_with_their_bytes_and_the_sender_learns_that_they_left(geometry: Geometry) -> None:
    rng = np.random.default_rng(0)
    data = rng.integers(0, 1 << 16, (9, *SHAPE), dtype=np.uint16)
    with pair(geometry, mine=geometry) as (prefill, decode):
        peer = decode.connect("127.0.0.1", prefill.port)
        assert decode.connect("127.0.0.1", prefill.port) == peer
        decode.send(peer, Open(ROOM))
        decode.send(peer, Grant(ROOM, 3, 9, "v1"))
        opened = until(prefill, lambda events: len(messages(events)) == 2)
        assert messages(opened) == [Open(ROOM), Grant(ROOM, 3, 9, "v1")]
        at_prefill = opened[0].peer
        for message, payload in page_frames(ROOM, 3, data, 4):
            prefill.send(at_prefill, message, payload)
        prefill.send(at_prefill, Done(ROOM, 12, "v1"))
        got = until(decode, lambda events: len(messages(events)) == 4)
        assert messages(got) == [Pages(ROOM, 3, 4), Pages(ROOM, 7, 4), Pages(ROOM, 11, 1), Done(ROOM, 12, "v1")]
        payloads = [event.payload for event in got if isinstance(event, News) and event.payload is not None]
        assert np.concatenate(payloads).tobytes() == data.tobytes()
        sent = until(prefill, lambda events: sum(isinstance(event, Sent) for event in events) == 3)
        assert sum(event.num_bytes for event in sent if isinstance(event, Sent)) == data.nbytes


@over_both
def test_pages_beyond_a_grant_take_no_memory(geometry: Geometry) -> None:
    data = np.zeros((4, *SHAPE), dtype=np.uint16)
    with pair(geometry, mine=geometry) as (prefill, decode):
        peer = decode.connect("127.0.0.1", prefill.port)
        decode.send(peer, Grant(ROOM, 0, 4, "v1"))
        at_prefill = until(prefill, lambda events: bool(messages(events)))[0].peer
        for room in (room_of(8, [1]), ROOM, ROOM):
            for message, payload in page_frames(room, 0, data, 4):
                prefill.send(at_prefill, message, payload)
        prefill.send(at_prefill, Done(ROOM, 4, "v1"))
        got = until(decode, lambda events: Done(ROOM, 4, "v1") in messages(events))
        assert messages(got) == [Pages(ROOM, 0, 4), Done(ROOM, 4, "v1")]
        decode.send(peer, Grant(ROOM, 0, 4, "v1"))
        decode.send(peer, Fail(ROOM, "the client has left"))
        until(prefill, lambda events: len(messages(events)) == 2)
        prefill.send(at_prefill, *page_frames(ROOM, 0, data, 4)[0])
        prefill.send(at_prefill, Open(ROOM))
        assert messages(until(decode, lambda events: bool(messages(events)))) == [Open(ROOM)]


@over_both
def test_images_come_only_to_rooms_that_lack_them(geometry: Geometry) -> None:
    data = np.arange(100, dtype=np.uint8)
    with pair(geometry, mine=geometry) as (prefill, decode):
        peer = decode.connect("127.0.0.1", prefill.port)
        decode.send(peer, Open(ROOM, None))
        at_prefill = until(prefill, lambda events: bool(messages(events)))[0].peer
        for room in (room_of(8, [1]), ROOM):
            for start in (0, 60):
                prefill.send(at_prefill, Media(room, start, 100), data[start : start + 60])
        got = until(decode, lambda events: len(messages(events)) == 2)
        assert messages(got) == [Media(ROOM, 0, 100), Media(ROOM, 60, 100)]
        payloads = [event.payload for event in got if isinstance(event, News) and event.payload is not None]
        assert np.concatenate(payloads).tobytes() == data.tobytes()
        decode.send(peer, Fail(ROOM, "the client has left"))
        until(prefill, lambda events: bool(messages(events)))
        prefill.send(at_prefill, Media(ROOM, 0, 100), data)
        prefill.send(at_prefill, Media(ROOM, 60, 100), data)  # beyond the end
        assert "bytes follow" in reason(until(decode, left))


@over_both
def test_embeddings_of_images_are_taken_if_a_grant_named_some(geometry: Geometry) -> None:
    data = np.arange(100, dtype=np.uint8).reshape(5, 20)
    with pair(geometry, mine=geometry) as (prefill, decode):
        peer = decode.connect("127.0.0.1", prefill.port)
        decode.send(peer, Grant(room_of(8, [1]), 0, 0, "v"))
        decode.send(peer, Grant(ROOM, 0, 0, "v", (2,)))
        at_prefill = until(prefill, lambda events: len(messages(events)) == 2)[0].peer
        for room in (room_of(8, [1]), ROOM):
            prefill.send(at_prefill, Rows(room, 2), data)
        prefill.send(at_prefill, Done(ROOM, 0, "v"))
        prefill.send(at_prefill, Rows(ROOM, 2), data)
        prefill.send(at_prefill, Ack(ROOM))
        got = until(decode, lambda events: Ack(ROOM) in messages(events))
        assert messages(got) == [Rows(ROOM, 2), Done(ROOM, 0, "v"), Ack(ROOM)]
        assert isinstance(got[0], News) and got[0].payload is not None and got[0].payload.tobytes() == data.tobytes()
        sent = until(prefill, lambda events: any(isinstance(event, Sent) for event in events))
        assert sum(event.num_bytes for event in sent if isinstance(event, Sent)) % 100 == 0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"page_size": 64}, ("page size", "16", "64", "--page-size")),
        ({"dtype": "fp8_e4m3"}, ("dtype", "bfloat16", "fp8_e4m3", "--kv-cache-dtype")),
        ({"page_shape": (2, 2, 4, 16, 8)}, ("shape", "(2, 2, 2, 16, 8)", "(2, 2, 4, 16, 8)")),
        ({"weights": "other"}, ("model", "tiny", "other")),
        ({"backend": "other"}, ("backend", "tcp", "other", "--disaggregation-transfer-backend")),
        ({"image_row_bytes": 128}, ("image", "64", "128", "--dtype")),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_workers_that_differ_are_refused_on_both_sides_with_both_values(
    change: dict[str, Any], words: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    with pair(msgspec.structs.replace(GEOMETRY, **change)) as (prefill, decode):
        decode.connect("127.0.0.1", prefill.port)
        text = reason(until(decode, left))
        assert all(word in text for word in words)
        of_prefill = logged(caplog, "the decode worker at")
        assert all(word in of_prefill for word in words)
        assert not prefill.poll(), "who has not greeted is told of to no scheduler"


def test_two_workers_of_one_mode_and_strangers_are_refused(caplog: pytest.LogCaptureFixture) -> None:
    with pair(mode="prefill") as (prefill, other):
        other.connect("127.0.0.1", prefill.port)
        assert "--disaggregation-mode prefill" in reason(until(other, left))
        logged(caplog, "the decode worker at")
    caplog.clear()
    with pair() as (prefill, _):
        for junk in (b"GET / HTTP/1.1\r\n\r\n" * 9, encode(Open(ROOM)) * 9, b"JKVG\xff\xff" + bytes(50)):
            with socket.create_connection(("127.0.0.1", prefill.port), timeout=PATIENCE_S) as stranger:
                stranger.sendall(junk)
                with contextlib.suppress(ConnectionError):  # it leaves without reading all
                    while stranger.recv(100):
                        pass
                logged(caplog, "is refused")
                caplog.clear()
        assert not prefill.poll()


def test_a_frame_that_announces_too_much_is_refused_before_memory_is_taken() -> None:
    with pair() as (prefill, _), socket.create_connection(("127.0.0.1", prefill.port)) as stranger:
        greet(stranger, "decode", GEOMETRY)
        stranger.sendall(encode(Pages(ROOM, 0, 1 << 30), 1 << 40))
        assert "are the most" in reason(until(prefill, left))


def test_a_worker_that_says_nothing_is_dead_and_one_that_only_waits_is_not() -> None:
    with pair(timeout_s=1.5) as (prefill, decode):
        decode.connect("127.0.0.1", prefill.port)
        with socket.create_connection(("127.0.0.1", prefill.port)) as silent:
            greet(silent, "decode", GEOMETRY)
            assert "nothing was heard for 1.5 s" in reason(until(prefill, left))
        assert not left(list(decode.poll()))


def test_a_connection_that_breaks_is_told_and_made_anew() -> None:
    with pair() as (prefill, decode):
        peer = decode.connect("127.0.0.1", prefill.port)
        decode.send(peer, Open(ROOM))
        until(prefill, lambda events: bool(messages(events)))
        port = prefill.port
        prefill.close()
        assert f"127.0.0.1:{port}" in reason(until(decode, left))
        decode.send(peer, Open(ROOM))  # dropped
        again = TcpWire("prefill", GEOMETRY, ("127.0.0.1", port))
        other = decode.connect("127.0.0.1", port)
        assert other != peer
        decode.send(other, Open(ROOM))
        assert messages(until(again, lambda events: bool(messages(events)))) == [Open(ROOM)]
        again.close()


def test_a_worker_that_is_not_there_is_told_at_once() -> None:
    with pair() as (prefill, decode):
        port = prefill.port
        prefill.close()
        decode.connect("127.0.0.1", port)
        assert "not reachable" in reason(until(decode, left))


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")
def test_a_port_at_all_addresses_of_ipv6_takes_those_of_ipv4_too() -> None:
    """As the ports for clients do with --host ::."""
    prefill = TcpWire("prefill", GEOMETRY, ("::", 0), secret=SECRET)
    for host in ("127.0.0.1", "::1"):
        with contextlib.closing(TcpWire("decode", GEOMETRY, secret=SECRET)) as decode:
            decode.send(decode.connect(host, prefill.port), Open(ROOM))
            assert messages(until(prefill, lambda events: bool(messages(events)))) == [Open(ROOM)]
    prefill.close()


def test_a_port_that_is_taken_fails_the_start() -> None:
    with pair() as (prefill, _), pytest.raises(StartupError, match="--disaggregation-bootstrap-port"):
        TcpWire("prefill", GEOMETRY, ("127.0.0.1", prefill.port))


def test_the_port_listens_on_if_there_was_no_thread_for_a_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    with pair() as (prefill, decode):
        start = threading.Thread.start

        def fail(thread: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        monkeypatch.setattr(threading.Thread, "start", fail)
        with socket.create_connection(("127.0.0.1", prefill.port), timeout=PATIENCE_S) as stranger:
            greet(stranger, "decode", GEOMETRY)
            assert "can't start new thread" in reason(until(prefill, left))
            assert stranger.recv(1) == b""
        decode.connect("127.0.0.1", prefill.port)
        assert "can't start new thread" in reason(until(decode, left))
        monkeypatch.setattr(threading.Thread, "start", start)
        peer = decode.connect("127.0.0.1", prefill.port)
        decode.send(peer, Open(ROOM))
        assert messages(until(prefill, lambda events: bool(messages(events)))) == [Open(ROOM)]


def test_strangers_of_one_address_take_no_connection_from_a_worker_at_another() -> None:
    with pair() as (prefill, decode), contextlib.ExitStack() as stack:
        for _ in range(MAX_LINKS_OF_HOST + 20):
            stranger = socket.create_connection(("127.0.0.1", prefill.port), source_address=("127.0.0.2", 0))
            greet(stack.enter_context(stranger), "decode", GEOMETRY)
        ended = until(prefill, lambda events: sum(isinstance(event, Left) for event in events) >= 20)
        refused = [event for event in ended if isinstance(event, Left) and "the most" in event.reason]
        assert len(refused) == 20
        decode.send(decode.connect("127.0.0.1", prefill.port), Open(ROOM))
        assert Open(ROOM) in messages(until(prefill, lambda events: bool(messages(events))))


def test_texts_that_are_no_text_and_long_ones_end_the_connection_in_few_words(caplog: pytest.LogCaptureFixture) -> None:
    with pair() as (prefill, _):
        broken = encode(Fail(ROOM, "???")).replace(b"???", b"\xff\xfe\xfd")
        for junk in (encode(Pages(ROOM, 0, 1), 8), broken):
            with socket.create_connection(("127.0.0.1", prefill.port)) as stranger:
                greet(stranger, "decode", GEOMETRY)
                stranger.sendall(junk)
                text = reason(until(prefill, left))
                assert "refused" in text and len(text) <= MAX_REASON_CHARS
    assert not any(record.exc_info for record in caplog.records)


SECRET = b"s" * 32


@contextlib.contextmanager
def secured(secret_of_decode: bytes = SECRET) -> Iterator[tuple[TcpWire, TcpWire]]:
    prefill = TcpWire("prefill", GEOMETRY, ("127.0.0.1", 0), secret=SECRET)
    decode = TcpWire("decode", GEOMETRY, secret=secret_of_decode)
    try:
        yield prefill, decode
    finally:
        prefill.close()
        decode.close()


def test_workers_with_one_secret_serve_and_one_with_another_gets_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with secured() as (prefill, decode):
        decode.send(decode.connect("127.0.0.1", prefill.port), Open(ROOM))
        assert messages(until(prefill, lambda events: bool(messages(events)))) == [Open(ROOM)]
    for secret in (b"t" * 32, b""):
        with secured(secret) as (prefill, decode):
            decode.send(decode.connect("127.0.0.1", prefill.port), Open(ROOM))
            until(decode, left)
            assert "secret" in logged(caplog, "the decode worker at")
            assert not prefill.poll()
            caplog.clear()


def test_a_stranger_that_passes_the_greeting_on_gets_no_connection(caplog: pytest.LogCaptureFixture) -> None:
    """Else it could be named as a prefill server, have both sides prove themselves, and then say what it likes."""
    with secured() as (prefill, decode), Relay(prefill.port) as relay:
        decode.send(decode.connect("127.0.0.1", relay.port), Open(ROOM))
        until(decode, left)
        assert "passed on" in logged(caplog, "the decode worker at")
        assert not prefill.poll()
        assert relay.carried[0] and not any(b"bfloat16" in data for data in relay.carried)


def test_connections_that_do_not_greet_take_no_thread_and_no_place_from_a_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("jaxsgl.transfer.listener.GREETING_S", 60.0)
    with secured() as (prefill, decode), contextlib.ExitStack() as stack:
        before = threading.active_count()
        for _ in range(MAX_PENDING + 50):
            stranger = socket.create_connection(("127.0.0.1", prefill.port), source_address=("127.0.0.2", 0))
            stack.enter_context(stranger)
        decode.send(decode.connect("127.0.0.1", prefill.port), Open(ROOM))
        assert messages(until(prefill, lambda events: bool(messages(events)))) == [Open(ROOM)]
        assert threading.active_count() - before <= 4, "two threads for each side of the one true connection"


def test_a_greeting_has_a_time_in_all_however_slowly_it_comes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("jaxsgl.transfer.listener.GREETING_S", 0.5)
    caplog.set_level("INFO")
    with secured() as (prefill, _), socket.create_connection(("127.0.0.1", prefill.port)) as slow:
        with contextlib.suppress(ConnectionError):
            for byte in b"JKVG" * 5:
                slow.sendall(bytes([byte]))
                time.sleep(0.1)
        assert "more than 0.5 s" in logged(caplog, "greeting took")


def test_a_worker_that_says_too_often_that_it_lives_is_refused() -> None:
    with pair() as (prefill, _), socket.create_connection(("127.0.0.1", prefill.port)) as stranger:
        greet(stranger, "decode", GEOMETRY)
        stranger.sendall(encode(Ping()) * 100)
        assert "times a second" in reason(until(prefill, left))


def test_messages_that_are_not_polled_are_not_read_either() -> None:
    """A worker's memory doesn't grow with what another one sends while it is busy."""
    num_sent = 4 * MAX_UNPOLLED
    with pair() as (prefill, _), socket.create_connection(("127.0.0.1", prefill.port)) as stranger:
        greet(stranger, "decode", GEOMETRY)
        sender = threading.Thread(target=lambda: stranger.sendall(encode(Open(ROOM)) * num_sent))
        sender.start()
        prefill.wait(PATIENCE_S)
        time.sleep(0.3)
        first = len(messages(prefill.poll()))
        assert 0 < first <= MAX_UNPOLLED + 1
        until(prefill, lambda events: first + len(messages(events)) == num_sent)
        sender.join()


def test_a_worker_that_reads_nothing_is_refused_before_what_waits_for_it_fills_the_memory() -> None:
    with pair() as (prefill, _), socket.create_connection(("127.0.0.1", prefill.port)) as stranger:
        greet(stranger, "decode", GEOMETRY)
        stranger.sendall(encode(Open(ROOM)))
        at_prefill = until(prefill, lambda events: bool(messages(events)))[0].peer
        for _ in range(MAX_UNSENT + 20_000):  # more than the system's buffers hold besides
            prefill.send(at_prefill, Fail(ROOM, "x" * 1000))
        assert "reads none" in reason(until(prefill, left))
