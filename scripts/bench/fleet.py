"""Servers behind the gateway `smg`, as processes: how they are started, each on a core, and what they use.

Knows no load. Called by benchmarks that compare ways to share a machine among servers.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.processes import children, cpu_s, free_ports, python_path, wait_until_ready

START_S = 600.0
MODEL_NAME = "model"


@dataclass(frozen=True)
class Server:
    """A server that runs.

    Attributes:
      process: its first process; the engine's is a child of it.
      url: of its HTTP port.
      address: of its gRPC port.
      bootstrap: port for decode servers; None unless it is a prefill server.
    """

    process: subprocess.Popen[bytes]
    url: str
    address: str
    bootstrap: int | None


class Fleet:
    """Servers, and the gateway over them.

    Args:
      name: for reports.
      servers: all of them ready.
      gateway: its process.
      url: of the gateway.
    """

    def __init__(self, name: str, servers: Sequence[Server], gateway: subprocess.Popen[bytes], url: str) -> None:
        self.name, self.url = name, url
        self._servers, self._gateway = servers, gateway

    def cpu_s(self) -> float:
        """Seconds of processor time of the servers with their engines, and of the gateway, so far."""
        pids = [server.process.pid for server in self._servers]
        return sum(map(cpu_s, [*pids, *(child for pid in pids for child in children(pid)), self._gateway.pid]))

    def transfer(self) -> dict[str, Any] | None:
        """What the prefill server says of its transfers; None if there is none."""
        for server in self._servers:
            if server.bootstrap is not None:
                state: dict[str, Any] = _get(f"{server.url}/get_server_info")["internal_states"][0]["transfer"]
                return state
        return None


def start_server(
    stack: contextlib.ExitStack, folder: Path, flags: Sequence[str], core: int | None, mode: str
) -> Server:
    """Starts a server on free ports and waits until it is ready.

    Servers that start one after the other find the programs that the first one has compiled.

    Args:
      stack: ends it.
      folder: for its log; made here.
      flags: of `jaxsgl.serve`, but ports and mode.
      core: its only core; None: all.
      mode: of --disaggregation-mode.
    """
    folder.mkdir(parents=True)
    http, grpc, bootstrap = free_ports(3)
    command = [
        sys.executable, "-m", "jaxsgl.serve", "--port", str(http), "--grpc-port", str(grpc),
        "--served-model-name", MODEL_NAME, "--disaggregation-mode", mode,
        "--disaggregation-bootstrap-port", str(bootstrap), *flags,
    ]  # fmt: skip
    log = folder / "server.log"
    with _only_on(core):
        process = _start(stack, command, log)
    url = f"http://127.0.0.1:{http}"
    wait_until_ready(lambda: _get(f"{url}/health") is not None, process, START_S, log)
    return Server(process, url, f"127.0.0.1:{grpc}", bootstrap if mode == "prefill" else None)


def start_fleet(stack: contextlib.ExitStack, folder: Path, name: str, servers: Sequence[Server]) -> Fleet:
    """Starts a gateway over `servers` that takes them in turns, and waits until it sees them; `stack` ends it."""
    prefills = [server for server in servers if server.bootstrap is not None]
    if prefills:
        urls = ["--pd-disaggregation"]
        urls += [part for s in prefills for part in ("--prefill", f"grpc://{s.address}", str(s.bootstrap))]
        urls += [part for s in servers if s.bootstrap is None for part in ("--decode", f"grpc://{s.address}")]
    else:
        urls = ["--worker-urls", *(f"grpc://{server.address}" for server in servers)]
    port, metrics = free_ports(2)
    command = [
        str(Path(sys.executable).parent / "smg"), "launch", *urls, "--policy", "round_robin", "--host", "127.0.0.1",
        "--port", str(port), "--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics),
        "--shutdown-grace-period-secs", "1", "--worker-startup-check-interval", "1",
        "--health-success-threshold", "1", "--health-check-interval-secs", "1", "--disable-retries",
    ]  # fmt: skip
    log, url = folder / f"{name}.gateway.log", f"http://127.0.0.1:{port}"
    gateway = _start(stack, command, log)
    wait_until_ready(lambda: _num_healthy(url) == len(servers), gateway, START_S, log)
    return Fleet(name, servers, gateway, url)


@contextlib.contextmanager
def _only_on(core: int | None) -> Iterator[None]:
    """Processes that are started meanwhile run on `core` only."""
    if core is None:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _start(stack: contextlib.ExitStack, command: list[str], log: Path) -> subprocess.Popen[bytes]:
    env = os.environ | {"PYTHONPATH": python_path(os.environ.get("PYTHONPATH")), "NO_COLOR": "1"}
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, start_new_session=True, env=env)
    stack.callback(_end, process)
    return process


def _end(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _num_healthy(url: str) -> int:
    workers = _get(f"{url}/workers") or {"workers": ()}
    return sum(bool(worker["is_healthy"]) for worker in workers["workers"])


def _get(url: str) -> Any:
    """The JSON at `url`, or its text; None while nothing answers, or it answers with an error."""
    try:
        with urllib.request.urlopen(url, timeout=START_S) as answer:
            text = answer.read()
    except (urllib.error.URLError, OSError):
        return None
    with contextlib.suppress(ValueError):
        return json.loads(text)
    return text
