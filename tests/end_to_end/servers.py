"""Real servers as a user starts them: `python -m jaxsgl.serve` in a process of its own."""

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

from tests.end_to_end.precision import EXACT_FLAGS

START_TIMEOUT_S = 270.0  # beside other work; a test may take 300
# Sizes of servers of the bundled model whose tests need no others: they compile the same programs, which are kept.
COMMON_FLAGS = (
    *EXACT_FLAGS, "--page-size", "16", "--max-total-tokens", "16384", "--max-running-requests", "8",
    "--decode-buckets", "8", "--extend-buckets", "256", "--chunked-prefill-size", "256",
)  # fmt: skip


class RunningServer:
    """A server that has reported ready, and its log."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self.process = process
        self.log = log

    @property
    def address(self) -> str:
        """The address of its gRPC port."""
        (address,) = re.findall(r"ready: .* on (\S+:\d+) \(gRPC\)", self.log.read_text())
        return str(address)

    @property
    def http_address(self) -> str:
        (address,) = re.findall(r"ready: .* and (\S+:\d+) \(HTTP\)", self.log.read_text())
        return str(address)

    @property
    def engine_pid(self) -> int:
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        for pid in children:
            if b"engine_process" in Path(f"/proc/{pid}/cmdline").read_bytes():
                return int(pid)
        raise AssertionError(f"no engine among the children {children}")

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(timeout=30)


@contextlib.contextmanager
def running_server(
    folder: Path, flags: Sequence[str] = (), program: Sequence[str] = ("-m", "jaxsgl.serve")
) -> Iterator[RunningServer]:
    """Starts a server on a free port and waits until it is ready; kills what is left of it at the end.

    `program` are Python's arguments before the server's own.
    """
    log = folder / "server.log"
    command = [sys.executable, *program, "--grpc-port", "0", "--port", "0", "--log-level", "debug", *flags]
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, start_new_session=True)
    try:
        deadline = time.monotonic() + START_TIMEOUT_S
        while "ready: " not in log.read_text():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
        yield RunningServer(process, log)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def check_log(server: RunningServer) -> None:
    """Checks that the log holds no error, no exception and no forgotten task."""
    lines = server.log.read_text().splitlines()
    signs = ("Traceback", "ERROR", "CRITICAL", "Warning", "never retrieved", "never awaited", "was destroyed")
    found = [number for number, line in enumerate(lines) if any(sign in line for sign in signs)]
    assert not found, "\n".join(lines[found[0] - 3 : found[0] + 40])


def client(server: RunningServer, *args: str) -> subprocess.CompletedProcess[str]:
    """Runs `python -m jaxsgl.client` against `server`."""
    return subprocess.run(
        [sys.executable, "-m", "jaxsgl.client", "--addr", server.address, *args],
        capture_output=True,
        text=True,
        timeout=120,
    )
