"""Measures how fast KV pages travel between a prefill and a decode process of this machine, over TCP.

    python scripts/bench_transfer.py --mib 2048 --page-kib 9216

Sends the pages of one prompt after the other, as prefill and decode servers do, and prints bytes per second of wall
time and of each side's CPU time. On a busy machine only the latter mean anything.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from multiprocessing.connection import Connection

import numpy as np

from jaxsgl.transfer.frames import Geometry, Grant, Room, page_frames
from jaxsgl.transfer.tcp import TcpWire
from jaxsgl.transfer.wire import Event, News, Sent

ROUND_PAGES = 32  # of one prompt


def geometry(page_bytes: int) -> Geometry:
    """Returns that of pages of so many bytes."""
    return Geometry(64, "bfloat16", (page_bytes // 2,), page_bytes, "benchmark")


def wait_for(wire: TcpWire, kind: type[News] | type[Sent], count: int) -> list[Event]:
    """Returns the events until `count` of that kind have come."""
    events: list[Event] = []
    while sum(isinstance(event, kind) for event in events) < count:
        wire.wait(1.0)
        events += wire.poll()
    return events


def receive(port: int, page_bytes: int, rounds: int, result: Connection) -> None:
    """The decode side; sends (seconds, CPU seconds) to `result`."""
    wire = TcpWire("decode", geometry(page_bytes))
    peer = wire.connect("127.0.0.1", port)
    wire.send(peer, Grant(Room(0, 0), 0, rounds * ROUND_PAGES, ""))
    frames = rounds * -(-ROUND_PAGES // geometry(page_bytes).pages_per_frame)
    start_s, start_cpu_s, num_frames = time.perf_counter(), time.process_time(), 0
    while num_frames < frames:  # payloads are dropped at once, as after an insert
        wire.wait(1.0)
        num_frames += sum(isinstance(event, News) for event in wire.poll())
    result.send((time.perf_counter() - start_s, time.process_time() - start_cpu_s))
    wire.close()


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=2048, help="of pages to send")
    parser.add_argument(
        "--page-kib", type=int, default=9216, help="of a page (9216: 64 tokens of Qwen3-8B in bfloat16)"
    )
    args = parser.parse_args()
    page_bytes = args.page_kib << 10
    rounds = max((args.mib << 20) // (page_bytes * ROUND_PAGES), 1)
    wire = TcpWire("prefill", geometry(page_bytes), ("127.0.0.1", 0))
    ours, theirs = multiprocessing.Pipe()
    decode = multiprocessing.get_context("spawn").Process(target=receive, args=(wire.port, page_bytes, rounds, theirs))
    decode.start()
    (granted,) = wait_for(wire, News, 1)
    assert isinstance(granted, News)
    data = np.ones((ROUND_PAGES, page_bytes // 2), dtype=np.uint16)
    start_cpu_s = time.process_time()
    for number in range(rounds):
        frames = page_frames(Room(0, 0), number * ROUND_PAGES, data, geometry(page_bytes).pages_per_frame)
        for message, payload in frames:
            wire.send(granted.peer, message, payload)
        wait_for(wire, Sent, len(frames))
    cpu_s = time.process_time() - start_cpu_s
    wall_s, their_cpu_s = ours.recv()
    decode.join()
    wire.close()
    gb = rounds * data.nbytes / 1e9
    print(f"{gb:.2f} GB in pages of {page_bytes / 1e6:.2f} MB: {gb / wall_s:.2f} GB/s")
    print(f"per CPU second: {gb / cpu_s:.2f} GB sent, {gb / their_cpu_s:.2f} GB received")


if __name__ == "__main__":
    main()
