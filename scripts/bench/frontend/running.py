"""The front end with the fake engine, as a process of its own.

Called by what loads it: bench_frontend.py, and the measurement of the load generator.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bench.frontend.plan import MODEL, PATIENCE_S, Plan
from bench.processes import ROOT, python_path, wait_until_ready

STOP_S = 10.0
READY = re.compile(r"ready: .* on (\S+) \(gRPC\) and (\S+) \(HTTP\)")


@dataclass(frozen=True)
class Server:
    """A running server."""

    process: subprocess.Popen[bytes]
    grpc_address: str
    http_address: str


@contextlib.contextmanager
def server(plan: Plan) -> Iterator[Server]:
    """Runs the front end with the fake engine inside the block."""
    log_path = Path(plan.folder) / "server.log"
    command = [sys.executable, "-m", "bench.frontend.server", str(plan.save()), "--served-model-name", MODEL]
    command += ["--tokenizer-worker-num", str(plan.num_workers)]
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            [*command, "--port", "0", "--grpc-port", "0"],
            cwd=ROOT,
            env=environment(),
            stderr=log,
        )
    try:
        ready = wait_until_ready(lambda: READY.search(log_path.read_text()), process, PATIENCE_S, log_path)
        assert ready is not None
        yield Server(process, *ready.groups())
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()


def environment() -> dict[str, str]:
    """This process's, with the project and `bench` on the path."""
    return os.environ | {"PYTHONPATH": python_path()}
