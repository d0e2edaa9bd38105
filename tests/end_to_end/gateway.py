"""The real gateway, `smg`, in a process of its own over real workers; and a worker as its own metrics describe it."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import httpx
import openai
from bench.processes import free_ports

from tests.end_to_end.servers import START_TIMEOUT_S, RunningServer

SMG = Path(sys.executable).parent / "smg"
PATIENCE_S = 120.0  # for things that take a second on an idle machine

ValueT = TypeVar("ValueT")


def wait_for(look: Callable[[], ValueT | None], what: str, limit_s: float = PATIENCE_S) -> ValueT:
    """Polls until `look` gives a true value."""
    deadline_s = time.monotonic() + limit_s
    while not (value := look()):
        assert time.monotonic() < deadline_s, f"no {what} within {limit_s} s"
        time.sleep(0.02)
    return value


class Worker:
    """A worker, seen by its own HTTP port and not by the gateway."""

    def __init__(self, server: RunningServer) -> None:
        self.server = server
        self.address, self.http = server.address, server.http_address

    @property
    def running(self) -> int:
        """Samples in the batch, and those that wait for it."""
        return self._metric("sglang:num_running_reqs") + self._metric("sglang:num_queue_reqs")

    @property
    def ended(self) -> int:
        """Samples that ended since the start, aborted ones included."""
        return self._metric("sglang:num_requests_total")

    @property
    def aborted(self) -> int:
        return self._metric("sglang:num_aborted_requests_total")

    @property
    def failed(self) -> int:
        """Requests at which the scheduler failed."""
        return self._metric("jaxsgl:failed_requests_total")

    @property
    def output_tokens(self) -> int:
        return self._metric("sglang:generation_tokens_total")

    @property
    def loaded_tokens(self) -> int:
        """Tokens of KV that it has loaded from host memory."""
        return next(n for labels, n in _metrics(self.http, "jaxsgl:host_kv_tokens_total").items() if "loaded" in labels)

    def count(self, name: str) -> int:
        """A counter of its metrics, by the name without "_total"."""
        return self._metric(f"{name}_total")

    def _metric(self, name: str) -> int:
        (value,) = _metrics(self.http, name).values()
        return value


class Gateway:
    """A gateway that listens."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, metrics_port: int, log: Path) -> None:
        self.process = process
        self.url = f"http://127.0.0.1:{port}"
        self.log = log
        self._metrics_address = f"127.0.0.1:{metrics_port}"

    def workers(self) -> dict[str, Any]:
        """What the gateway knows of each worker, by gRPC address."""
        workers = httpx.get(f"{self.url}/workers", timeout=PATIENCE_S).json()["workers"]
        return {worker["url"].removeprefix("grpc://"): worker for worker in workers}

    def healthy(self) -> list[str]:
        return sorted(address for address, worker in self.workers().items() if worker["is_healthy"])

    def known_pages(self, worker: Worker) -> int:
        """How many pages of this worker's prefix cache the gateway knows from the worker's events."""
        return self.count("smg_kv_index_blocks", worker.address)

    def count(self, name: str, *of: str) -> int:
        """One of the gateway's metrics, summed over all labels that hold the texts `of`."""
        counts = _metrics(self._metrics_address, name)
        return sum(count for labels, count in counts.items() if all(text in labels for text in of))

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=PATIENCE_S)


@contextlib.contextmanager
def running_gateway(folder: Path, workers: Sequence[str], flags: Sequence[str] = ()) -> Iterator[Gateway]:
    """Starts a gateway over workers' gRPC addresses, which needn't be ready; ends it by its process id.

    Without `workers`, `flags` say which there are.
    """
    log = folder / "gateway.log"
    port, metrics_port = free_ports(2)
    command = [
        str(SMG), "launch", *(("--worker-urls", *(f"grpc://{worker}" for worker in workers)) if workers else ()),
        "--host", "127.0.0.1", "--port", str(port),
        "--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics_port),
        "--shutdown-grace-period-secs", "1", "--worker-startup-check-interval", "1", *flags,
    ]  # fmt: skip
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=os.environ | {"NO_COLOR": "1"})
    gateway = Gateway(process, port, metrics_port, log)
    try:
        wait_for(lambda: _listens(gateway), "gateway that listens", START_TIMEOUT_S)
        yield gateway
    finally:
        process.kill()
        process.wait()


def _metrics(address: str, name: str) -> dict[str, int]:
    """The values of one Prometheus metric, by its labels."""
    text = httpx.get(f"http://{address}/metrics", timeout=PATIENCE_S).text
    found = re.findall(rf"^{re.escape(name)}({{.*}})? (\S+)$", text, re.MULTILINE)
    return {labels: int(float(value)) for labels, value in found}


def client_of(url: str, stack: contextlib.ExitStack) -> openai.OpenAI:
    """A client with connections of its own, which end with `stack`."""
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S)
    return stack.enter_context(client)


def _listens(gateway: Gateway) -> bool:
    assert gateway.process.poll() is None, gateway.log.read_text()
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(f"{gateway.url}/liveness", timeout=PATIENCE_S).is_success
    return False
