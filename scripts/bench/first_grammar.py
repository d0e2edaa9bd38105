"""How long the first constrained requests of a server take, and how the tokens of a free stream come meanwhile.

bench grammars calls it.
"""

from __future__ import annotations

import http.client
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

from bench.processes import free_ports, python_path, wait_until_ready

FLAGS = (
    "--load-format", "dummy", "--dtype", "float32", "--max-running-requests", "64", "--max-total-tokens", "4096",
    "--decode-buckets", "1,8,64", "--extend-buckets", "256", "--chunked-prefill-size", "256",
    "--context-length", "512", "--page-size", "16", "--grpc-port", "0",
)  # fmt: skip
START_S, STREAM_TOKENS, ALONE_TOKENS, CALLS = 900.0, 400, 60, 3


def print_first_calls(folder: str) -> None:
    """Starts a server, measures and prints what was found."""
    with tempfile.TemporaryDirectory() as cache, server(folder, cache) as port:
        calls_s, alone_s, beside_s = first_calls(port)
    calls = ", ".join(f"{seconds:.2f}" for seconds in calls_s)
    gaps = [f"{1000 * statistics.median(gaps_s):.0f} ({1000 * max(gaps_s):.0f})" for gaps_s in (alone_s, beside_s)]
    print(f"the first constrained requests take {calls} s; the tokens of a free stream come every {gaps[0]} ms before,")
    print(f"{gaps[1]} ms during the first of them (median, longest)", flush=True)


@contextmanager
def server(folder: str, cache: str) -> Iterator[int]:
    """A server of the model in `folder`; its port, once it is ready."""
    (port,) = free_ports(1)
    command = [sys.executable, "-m", "jaxsgl.serve", "--model", folder, "--port", str(port), *FLAGS]
    process = subprocess.Popen(
        [*command, "--compilation-cache-dir", cache, "--log-level", "error"],
        env={**os.environ, "PYTHONPATH": python_path(os.environ.get("PYTHONPATH"))},
    )
    try:
        wait_until_ready(lambda: _is_ready(port), process, START_S)
        yield port
    finally:
        process.terminate()
        process.wait()


def first_calls(port: int) -> tuple[list[float], list[float], list[float]]:
    """Seconds of `CALLS` constrained calls, and between tokens of a free stream: before, and during the first call."""
    came_s: list[float] = []
    begun = threading.Event()

    def read() -> None:
        body = {"prompt": [5, 6, 7], "max_tokens": STREAM_TOKENS, "stream": True, "ignore_eos": True}
        for line in _post(port, body):
            if line.startswith(b"data: {"):
                came_s.append(time.perf_counter())
                if len(came_s) == ALONE_TOKENS:
                    begun.set()

    reader = threading.Thread(target=read)
    reader.start()
    begun.wait()
    times_s = [time.perf_counter()]
    for number in range(CALLS):
        schema = {"type": "object", "properties": {f"k{number}": {"type": "integer"}}, "required": [f"k{number}"]}
        for _ in _post(port, {"prompt": [5, 6, 8 + number], "max_tokens": 1, "guided_json": schema}):
            pass
        times_s.append(time.perf_counter())
    reader.join()
    gaps = list(pairwise(came_s[1:]))
    alone = [later - sooner for sooner, later in gaps if later < times_s[0]]
    beside = [later - sooner for sooner, later in gaps if later > times_s[0] and sooner < times_s[1]]
    return [later - sooner for sooner, later in pairwise(times_s)], alone, beside


def _is_ready(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


def _post(port: int, body: dict[str, Any]) -> Iterator[bytes]:
    """The lines of the answer to a completion."""
    connection = http.client.HTTPConnection("127.0.0.1", port)
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        assert answer.status == 200, answer.read()
        yield from answer
    finally:
        connection.close()
