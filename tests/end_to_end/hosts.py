"""Several hosts of one model as a user starts them, here as processes of one machine with virtual devices each."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx

from tests.end_to_end.servers import START_TIMEOUT_S
from tests.hosts.world import free_port

GONE_S = 15.0
SERVER = "jaxsgl.serve"


class Host:
    """A server process and its log."""

    def __init__(self, folder: Path, rank: int, flags: Sequence[str], module: str) -> None:
        self.log_path = folder / f"host{rank}.log"
        command = [sys.executable, "-m", module, "--grpc-port", "0", "--port", "0", *flags]
        with self.log_path.open("wb") as out:
            self.process = subprocess.Popen(
                [*command, "--node-rank", str(rank)], stdout=out, stderr=out, start_new_session=True
            )

    @property
    def log(self) -> str:
        return self.log_path.read_text()

    @property
    def url(self) -> str:
        (address,) = re.findall(r"(?:and|metrics on) (\S+:\d+)(?: \(HTTP\), loading|$)", self.log, re.MULTILINE)
        return f"http://{address}"

    @property
    def engine_pid(self) -> int:
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        (pid,) = (pid for pid in children if b"engine_process" in Path(f"/proc/{pid}/cmdline").read_bytes())
        return int(pid)

    def send(self, number: signal.Signals, to_engine: bool) -> None:
        os.kill(self.engine_pid if to_engine else self.process.pid, number)


class Hosts:
    """Hosts that share a model, each started as `module`."""

    def __init__(self, folder: Path, number: int, flags: Sequence[str], module: str = SERVER) -> None:
        at = f"127.0.0.1:{free_port(number)}"
        address = ("--nnodes", str(number), "--dist-init-addr", at, "--dist-timeout", "300")
        self.hosts = [Host(folder, rank, (*flags, *address), module) for rank in range(number)]
        self.url = ""

    def wait_for_log(self, text: str, patience_s: float = 2 * START_TIMEOUT_S) -> None:
        """Waits until all hosts have logged `text`."""
        deadline_s = time.monotonic() + patience_s
        while not all(text in host.log for host in self.hosts):
            logs = "\n".join(host.log for host in self.hosts)
            assert all(host.process.poll() is None for host in self.hosts) and time.monotonic() < deadline_s, logs
            time.sleep(0.05)
        self.url = self.hosts[0].url

    @property
    def grpc_address(self) -> str:
        """Of host 0, once it has reported ready."""
        (address,) = re.findall(r"ready: .* on (\S+:\d+) \(gRPC\)", self.hosts[0].log)
        return str(address)

    def ask(self, timeout_s: float = 300.0, **body: object) -> httpx.Response:
        return httpx.post(f"{self.url}/generate", json=body, timeout=timeout_s)

    def metric(self, name: str) -> dict[str, float]:
        """Values by --node-rank, as host 0 sees them."""
        text = httpx.get(f"{self.url}/metrics", timeout=60).text
        found = re.findall(rf'^{name}\{{.*node_rank="(\d+)"\}} (\S+)$', text, re.MULTILINE)
        return {rank: float(value) for rank, value in found}

    def statuses(self, limit_s: float = GONE_S) -> list[int]:
        """Waits until all have ended; their exit statuses."""
        deadline_s = time.monotonic() + limit_s
        return [host.process.wait(max(deadline_s - time.monotonic(), 0.01)) for host in self.hosts]

    def kill(self) -> None:
        for host in self.hosts:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(host.process.pid, signal.SIGKILL)
            host.process.wait()


@contextlib.contextmanager
def running_hosts(
    folder: Path, number: int, flags: Sequence[str], until: str = "ready: ", module: str = SERVER
) -> Iterator[Hosts]:
    """Starts hosts and waits until all have logged `until`; kills what is left at the end."""
    hosts = Hosts(folder, number, flags, module)
    try:
        hosts.wait_for_log(until)
        yield hosts
    finally:
        hosts.kill()
