"""Pages that NIXL carries: a worker that dies, stands still, or says nonsense ends its connection, and nothing else.

test_nixl.py runs this file, and of test_tcp.py what both backends share, in a process of their own: NIXL and UCX start
threads that stay, and then no test after these could fork.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxsgl.errors import StartupError
from jaxsgl.transfer import nixl
from jaxsgl.transfer.frames import Geometry, Grant, Memory, Message, Open, Pages, Ping, Taken, encode, room_of
from jaxsgl.transfer.nixl import NUM_SLOTS, InMemory, Nixl, Region
from jaxsgl.transfer.tcp import TcpWire
from jaxsgl.transfer.wire import Event, News
from tests.grids import daily
from tests.transfer.strangers import greet
from tests.transfer.test_tcp import left, messages, reason, until

pytestmark = pytest.mark.server

PAGE_BYTES = 4 << 20
GEOMETRY = Geometry(16, "bfloat16", (PAGE_BYTES // 2,), PAGE_BYTES, "tiny", backend="nixl")
ROOM = room_of(7, [1, 2, 3])
TIMEOUT_S = 1.5
OVER_TCP = {"UCX_TLS": "tcp"}  # where the other worker takes part in each read


def serve(value: int, num_frames: int, environment: dict[str, str], port: Connection) -> None:
    """A prefill worker that answers each Grant with frames of one page."""
    os.environ |= environment
    wire = TcpWire("prefill", GEOMETRY, ("127.0.0.1", 0))
    port.send(wire.port)
    page = np.full(PAGE_BYTES, value, dtype=np.uint8)
    while True:
        wire.wait(1.0)
        for event in wire.poll():
            if isinstance(event, News) and isinstance(event.message, Grant):
                for number in range(num_frames):
                    wire.send(event.peer, Pages(ROOM, number, 1), page)


class Prefill:
    """Such a worker in a process of its own."""

    def __init__(self, process: BaseProcess, port: int) -> None:
        self.process = process
        self.port = port

    def signal(self, number: signal.Signals) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)


@contextlib.contextmanager
def prefill(value: int, num_frames: int, environment: dict[str, str] | None = None) -> Iterator[Prefill]:
    ours, theirs = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=serve, args=(value, num_frames, environment or {}, theirs), daemon=True)
    process.start()
    try:
        yield Prefill(process, ours.recv())
    finally:
        process.kill()
        process.join()


@pytest.fixture(params=daily([OVER_TCP, {}], every=2), ids=lambda chosen: "tcp" if chosen else "any transport")
def environment(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    chosen: dict[str, str] = request.param
    for name, value in chosen.items():
        monkeypatch.setenv(name, value)
    return chosen


@pytest.fixture
def decode(environment: dict[str, str]) -> Iterator[TcpWire]:
    with contextlib.closing(TcpWire("decode", GEOMETRY, timeout_s=TIMEOUT_S)) as wire:
        yield wire


def ask(decode: TcpWire, port: int, num_pages: int) -> None:
    decode.send(decode.connect("127.0.0.1", port), Grant(ROOM, 0, num_pages, "v"))


def payloads(events: list[Event]) -> list[np.ndarray]:
    return [event.payload for event in events if isinstance(event, News) and event.payload is not None]


def test_a_worker_that_is_killed_while_pages_are_read_has_left_and_another_one_serves(
    decode: TcpWire, environment: dict[str, str]
) -> None:
    with prefill(3, 10_000, environment) as victim, prefill(4, 20, environment) as other:
        ask(decode, victim.port, 10_000)
        got = payloads(until(decode, lambda events: len(payloads(events)) >= 5))
        victim.signal(signal.SIGKILL)
        start_s = time.monotonic()
        until(decode, left)
        assert time.monotonic() - start_s < TIMEOUT_S + 5.0
        ask(decode, other.port, 20)
        got += payloads(until(decode, lambda events: len(payloads(events)) == 20))
    assert {int(value) for payload in got for value in np.unique(payload)} == {3, 4}


def test_a_worker_that_stands_still_is_dead_and_writes_to_nobodys_pages_when_it_goes_on(
    decode: TcpWire, environment: dict[str, str]
) -> None:
    with prefill(3, 10_000, environment) as victim, prefill(4, 20, environment) as other:
        ask(decode, victim.port, 10_000)
        until(decode, lambda events: len(payloads(events)) >= 5)
        victim.signal(signal.SIGSTOP)
        ended = until(decode, left)
        assert "for 1.5 s" in reason(ended) or "in 1.5 s" in reason(ended)
        ask(decode, other.port, 20)
        until(decode, lambda events: len(payloads(events)) >= 3)
        victim.signal(signal.SIGCONT)
        ask(decode, other.port, 20)
        got = payloads(until(decode, lambda events: len(payloads(events)) >= 20))
        time.sleep(0.5)
        assert {int(value) for payload in got for value in np.unique(payload)} == {4}


def test_a_worker_with_two_addresses_is_read_over_one_after_the_other_has_ended(
    decode: TcpWire, environment: dict[str, str]
) -> None:
    with prefill(3, 10, environment) as worker:
        peers = [decode.connect(host, worker.port) for host in ("127.0.0.1", "localhost")]
        for peer in peers:
            decode.send(peer, Grant(ROOM, 0, 10, "v"))
        until(decode, lambda events: len(payloads(events)) == 20)
        decode._links[peers[0]].end("the test ends it")
        until(decode, left)
        decode.send(peers[1], Grant(ROOM, 0, 10, "v"))
        got = payloads(until(decode, lambda events: len(payloads(events)) == 10))
    assert {int(value) for payload in got for value in np.unique(payload)} == {3}


class StandingStill:
    """Of NIXL's agent what `InMemory` calls, and of its connection; reads don't end."""

    name, timeout_s, slot_bytes, takes_payloads, has_ended = "the worker", 0.01, 64, True, False

    def __init__(self) -> None:
        self.given_back: list[Region] = []
        self.ended: list[int] = []

    def region(self, num_bytes: int) -> Region:
        return Region(np.zeros(num_bytes, np.uint8), None)

    def give_back(self, region: Region) -> None:
        self.given_back.append(region)

    def add(self, metadata: bytes) -> str:
        return "it"

    def remove(self, name: str) -> None: ...

    def start_read(self, name: str, address: int, into: np.ndarray) -> int:
        return 1

    def has_read(self, read: int) -> bool:
        return False

    def end_read(self, read: int) -> None:
        self.ended.append(read)


@pytest.mark.parametrize("begun", [True, False])
def test_memory_of_a_read_that_is_given_up_goes_to_nobody_else(begun: bool) -> None:
    there: Any = StandingStill()
    payloads_of_it = InMemory(there, there)
    payloads_of_it.hear(Memory(b"", 0, 64))
    if begun:
        with pytest.raises(OSError, match=r"could not be read in 0\.01 s"):
            payloads_of_it.take(64, is_awaited=True)
    payloads_of_it.end()
    assert (there.ended, len(there.given_back)) == (([1], 0) if begun else ([], 1))


@contextlib.contextmanager
def stranger(geometry: Geometry = GEOMETRY) -> Iterator[tuple[TcpWire, socket.socket]]:
    """A decode worker, and what it takes for a prefill worker."""
    with contextlib.ExitStack() as stack:
        wire = stack.enter_context(contextlib.closing(TcpWire("decode", geometry, timeout_s=TIMEOUT_S)))
        listening = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        ask(wire, listening.getsockname()[1], 9)
        sock = stack.enter_context(listening.accept()[0])
        greet(sock, "prefill", geometry, connects=False)
        yield wire, sock


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ([Pages(ROOM, 0, 1)], "shall be read"),
        ([Memory(b"junk", 0, PAGE_BYTES)], "NIXL can't reach"),
        ([Memory(b"", 0, PAGE_BYTES)], "NIXL can't reach"),
        ([Memory(b"junk", 0, 1 << 40)], "slots of"),
        ([Memory(b"junk", 0, 0)], "slots of"),
        ([Taken()], "not sent"),
    ],
    ids=lambda value: "-".join(type(each).__name__ for each in value) if isinstance(value, list) else "",
)
def test_nonsense_of_a_worker_ends_its_connection(said: list[Message], words: str) -> None:
    with stranger() as (wire, sock):
        for message in said:
            sock.sendall(encode(message, PAGE_BYTES if isinstance(message, Pages) else 0))
        assert words in reason(until(wire, left))


def test_memory_that_a_worker_does_not_have_is_not_read() -> None:
    with stranger() as (wire, sock):
        theirs = Nixl(serves=True, on_loopback=True)
        window = theirs.region(NUM_SLOTS * PAGE_BYTES)
        address = window.memory.ctypes.data
        sock.sendall(encode(Memory(theirs.metadata(window), address + (1 << 40), PAGE_BYTES)))
        sock.sendall(encode(Pages(ROOM, 0, 1), PAGE_BYTES))
        assert "NIXL can't read" in reason(until(wire, left))


def test_what_nobody_awaits_is_not_read_and_its_slot_is_free() -> None:
    with stranger() as (wire, sock):
        theirs = Nixl(serves=True, on_loopback=True)
        window = theirs.region(NUM_SLOTS * PAGE_BYTES)
        sock.sendall(encode(Memory(theirs.metadata(window), window.memory.ctypes.data, PAGE_BYTES)))
        for number in range(3 * NUM_SLOTS):
            sock.sendall(encode(Pages(room_of(8, [1]), number, 1), PAGE_BYTES))
        sock.sendall(encode(Open(ROOM)))
        assert messages(until(wire, lambda events: bool(messages(events)))) == [Open(ROOM)]
        wanted, got = encode(Taken()), b""
        while got.count(wanted) < 3 * NUM_SLOTS:
            got += sock.recv(1000)
        sock.sendall(encode(Ping()))


def test_a_sender_waits_for_slots_and_its_connection_still_ends() -> None:
    with contextlib.ExitStack() as stack:
        wire = stack.enter_context(contextlib.closing(TcpWire("prefill", GEOMETRY, ("127.0.0.1", 0), TIMEOUT_S)))
        sock = stack.enter_context(socket.create_connection(("127.0.0.1", wire.port)))
        greet(sock, "decode", GEOMETRY)
        sock.sendall(encode(Open(ROOM)))
        peer = until(wire, lambda events: bool(messages(events)))[0].peer
        for number in range(NUM_SLOTS + 2):
            wire.send(peer, Pages(ROOM, number, 1), np.zeros(PAGE_BYTES, np.uint8))
        assert "nothing was heard" in reason(until(wire, left))


def test_a_prefill_worker_takes_no_memory_for_payloads_of_others() -> None:
    with contextlib.ExitStack() as stack:
        wire = stack.enter_context(contextlib.closing(TcpWire("prefill", GEOMETRY, ("127.0.0.1", 0), TIMEOUT_S)))
        sock = stack.enter_context(socket.create_connection(("127.0.0.1", wire.port)))
        greet(sock, "decode", GEOMETRY)
        sock.sendall(encode(Memory(b"junk", 0, PAGE_BYTES)))
        assert "a prefill worker reads none" in reason(until(wire, left))


def test_a_worker_without_nixl_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in nixl.MODULES:
        monkeypatch.setitem(sys.modules, f"{name}._bindings", None)
    with pytest.raises(StartupError, match="pip install --no-deps nixl-cu12"):
        TcpWire("decode", GEOMETRY)


def listening() -> list[str]:
    """Addresses of IPv4 at which this process listens, as Linux writes them."""
    mine = {str(link.readlink()) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()}
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return [row[1].partition(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in mine]


def test_ucx_listens_on_loopback_alone_if_there_is_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_NET_DEVICES", "")
    monkeypatch.delenv("UCX_NET_DEVICES")
    agent = Nixl(serves=False, on_loopback=True)
    assert set(listening()) == {"0100007F"}, "127.0.0.1"
    del agent
