"""Measures how fast KV pages travel between a prefill and a decode process of this machine, over each backend.

    python scripts/bench transfer --mib 2048 --page-kib 9216 --repeats 3

Sends the pages of one prompt after the other, as prefill and decode servers do, and prints bytes per second of wall
time and of each side's CPU time, the backends in turns. On a busy machine only the latter mean anything. UCX, which
carries NIXL's transfers, takes shared memory here; UCX_TLS=tcp has it take TCP, as between machines without RDMA.
"""

from __future__ import annotations

import multiprocessing
import time
from multiprocessing.connection import Connection
from typing import NamedTuple

import numpy as np

from bench.output import command_parser
from jaxsgl.config.features import TRANSFER_BACKENDS
from jaxsgl.transfer.frames import Geometry, Grant, Room, page_frames
from jaxsgl.transfer.tcp import TcpWire
from jaxsgl.transfer.wire import Event, Left, News, Sent

ROUND_PAGES = 32  # of one prompt


def geometry(page_bytes: int, backend: str) -> Geometry:
    """Returns that of pages of so many bytes."""
    return Geometry(64, "bfloat16", (page_bytes // 2,), page_bytes, "benchmark", backend=backend)


def wait_for(wire: TcpWire, kind: type[News] | type[Sent], count: int) -> list[Event]:
    """Returns the events until `count` of that kind have come. Raises `EOFError` if the other side leaves before."""
    events: list[Event] = []
    while sum(isinstance(event, kind) for event in events) < count:
        if lost := [event.reason for event in events if isinstance(event, Left)]:
            raise EOFError(lost[0])
        wire.wait(1.0)
        events += wire.poll()
    return events


def receive(port: int, pages: Geometry, rounds: int, result: Connection) -> None:
    """The decode side; sends (seconds, CPU seconds) to `result`, and leaves when something comes from there."""
    wire = TcpWire("decode", pages)
    peer = wire.connect("127.0.0.1", port)
    wire.send(peer, Grant(Room(0, 0), 0, rounds * ROUND_PAGES, ""))
    frames = rounds * -(-ROUND_PAGES // pages.pages_per_frame)
    start_s, start_cpu_s, num_frames = time.perf_counter(), time.process_time(), 0
    while num_frames < frames:  # payloads are dropped at once, as after an insert
        wire.wait(1.0)
        num_frames += sum(isinstance(event, News) for event in wire.poll())
    result.send((time.perf_counter() - start_s, time.process_time() - start_cpu_s))
    result.recv()  # the last frames may not have been confirmed
    wire.close()


class Rates(NamedTuple):
    """GB per second of wall time, and per CPU second of each side."""

    wall: float
    sent: float
    received: float


def measure(pages: Geometry, rounds: int) -> Rates:
    """Sends `rounds` times `ROUND_PAGES` pages to a process of its own."""
    wire = TcpWire("prefill", pages, ("127.0.0.1", 0))
    ours, theirs = multiprocessing.Pipe()
    decode = multiprocessing.get_context("spawn").Process(target=receive, args=(wire.port, pages, rounds, theirs))
    decode.start()
    (granted,) = wait_for(wire, News, 1)
    assert isinstance(granted, News)
    data = np.ones((ROUND_PAGES, pages.page_bytes // 2), dtype=np.uint16)
    start_cpu_s = time.process_time()
    for number in range(rounds):
        frames = page_frames(Room(0, 0), number * ROUND_PAGES, data, pages.pages_per_frame)
        for message, payload in frames:
            wire.send(granted.peer, message, payload)
        wait_for(wire, Sent, len(frames))
    cpu_s = time.process_time() - start_cpu_s
    wall_s, their_cpu_s = ours.recv()
    ours.send(None)
    decode.join()
    wire.close()
    gb = rounds * data.nbytes / 1e9
    return Rates(gb / wall_s, gb / cpu_s, gb / their_cpu_s)


def main(arguments: list[str]) -> None:
    """Runs the benchmark."""
    parser = command_parser(__doc__, __name__)
    parser.add_argument("--mib", type=int, default=2048, help="of pages to send")
    parser.add_argument(
        "--page-kib", type=int, default=9216, help="of a page (9216: 64 tokens of Qwen3-8B in bfloat16)"
    )
    parser.add_argument("--backends", nargs="+", choices=TRANSFER_BACKENDS, default=["tcp"], help="to measure in turns")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args(arguments)
    page_bytes = args.page_kib << 10
    rounds = max((args.mib << 20) // (page_bytes * ROUND_PAGES), 1)
    print(f"{rounds * ROUND_PAGES} pages of {page_bytes / 1e6:.2f} MB, GB/s (sent, received per CPU second)")
    for _ in range(args.repeats):
        for backend in args.backends:
            rates = measure(geometry(page_bytes, backend), rounds)
            print(f"{backend:5} {rates.wall:6.2f} ({rates.sent:.2f}, {rates.received:.2f})", flush=True)
