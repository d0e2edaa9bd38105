"""Measure what the stream of engine calls costs a server of several hosts, over loopback and without a device.

    python scripts/bench hosts
    python scripts/bench hosts --hosts 4 --kib 12 200 --calls 2000 --json hosts.json

Host 0 sends steps of so many KiB to other hosts, each a process whose engine notes when a step is submitted. Prints
microseconds: "send" is what a call takes of host 0's loop, "to submit" the time from there until the last host has
submitted it (negative where host 0, on a busy machine, is the last), "cpu" the processor time of host 0's process for a
call, its signs of life included. The clock is one for all processes of a machine.
"""

from __future__ import annotations

import multiprocessing
import socket
import statistics
import time
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import numpy as np

from bench.output import figure_parser, write_figures
from jaxsgl.batch.inputs import Bucket, StepInputs
from jaxsgl.config.hosts import HostsConfig
from jaxsgl.hosts.follower import Follower
from jaxsgl.hosts.leader import Leader
from jaxsgl.hosts.playing import LeadEngine
from jaxsgl.messages.replies import HostsLoad

HEAD = f"{'KiB':>5}{'hosts':>7}{'send p50':>10}{'p99':>8}{'to submit p50':>15}{'p99':>8}{'cpu':>7}"
BUCKET = Bucket("decode", 64, 64, False)
PAUSE_S = 0.002  # between two calls, as between two steps


class Noting:
    """An engine that notes when steps are submitted; its steps have no tokens."""

    def __init__(self) -> None:
        self.at_s: list[float] = []

    def submit(self, inputs: StepInputs) -> Any:
        """Notes the time."""
        self.at_s.append(time.perf_counter())
        return SimpleNamespace(tokens=lambda: None)


class Quiet:
    """A report that only fails."""

    def hosts(self, load: HostsLoad) -> None:
        """Nobody asks."""

    def fail(self, text: str) -> None:
        """Raises the text."""
        raise RuntimeError(text)


def follow(config: HostsConfig, pipe: Connection) -> None:
    """Another host: plays all calls, then sends when they were submitted."""
    engine: Any = Noting()
    Follower(config, {}, Quiet()).play(engine)
    pipe.send(engine.at_s)


def main(arguments: list[str]) -> None:
    """Measures and prints."""
    parser = figure_parser(__doc__, __name__)
    parser.add_argument("--hosts", type=int, default=2, help="hosts, the first one included (default 2)")
    parser.add_argument("--kib", type=int, nargs="+", default=[12, 200], help="KiB of a step's inputs (default 12 200)")
    parser.add_argument("--calls", type=int, default=1000, help="calls of each size (default 1000)")
    options = parser.parse_args(arguments)
    print(HEAD)
    rows = [measured(options.hosts, kib, options.calls) for kib in options.kib]
    write_figures(options.json, rows=rows)


def measured(num_hosts: int, kib: int, num_calls: int) -> dict[str, float]:
    """Sends the calls; prints and returns the figures."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    spawn = multiprocessing.get_context("spawn")
    pipes, others = [], []
    for rank in range(1, num_hosts):
        mine, theirs = spawn.Pipe()
        pipes.append(mine)
        others.append(spawn.Process(target=follow, args=(HostsConfig(num_hosts, rank, address), theirs)))
        others[-1].start()
    leader = Leader(HostsConfig(num_hosts, 0, address), {}, Quiet())
    own: Any = Noting()
    engine = LeadEngine(own, leader.call)
    inputs = StepInputs(BUCKET, np.zeros(kib * 256, np.int32), 64, 64)
    begun_s, cpu_s = [], time.process_time()
    for _ in range(num_calls):
        begun_s.append(time.perf_counter())
        engine.submit(inputs)
        time.sleep(PAUSE_S)
    cpu_us = 1e6 * (time.process_time() - cpu_s) / num_calls
    leader.end()
    last_s = [max(each) for each in zip(*(pipe.recv() for pipe in pipes), strict=True)]
    for other in others:
        other.join()
    send_us = [1e6 * (sent - begun) for begun, sent in zip(begun_s, own.at_s, strict=True)]
    submit_us = [1e6 * (last - sent) for sent, last in zip(own.at_s, last_s, strict=True)]
    send, send_99 = statistics.median(send_us), float(np.percentile(send_us, 99))
    submit, submit_99 = statistics.median(submit_us), float(np.percentile(submit_us, 99))
    print(f"{kib:>5}{num_hosts:>7}{send:>10.0f}{send_99:>8.0f}{submit:>15.0f}{submit_99:>8.0f}{cpu_us:>7.0f}")
    return {"kib": kib, "hosts": num_hosts, "send_us": send, "submit_us": submit, "cpu_us": cpu_us}
