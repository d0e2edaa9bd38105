"""A server in a process of its own, with the fake engine, as tests see it: address, log, exit status."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import grpc

from jaxsgl.frontend.proto import jaxsgl_pb2 as pb
from jaxsgl.frontend.proto import jaxsgl_pb2_grpc as pb_grpc

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 120.0  # for things that take a second on an idle machine

ValueT = TypeVar("ValueT")


def wait_for(look: Callable[[], ValueT | None], what: str, limit_s: float = PATIENCE_S) -> ValueT:
    """Polls until `look` gives a true value."""
    deadline_s = time.monotonic() + limit_s
    while not (value := look()):
        assert time.monotonic() < deadline_s, f"no {what} within {limit_s} s"
        time.sleep(0.01)
    return value


def is_alive(pid: int) -> bool:
    """Whether a process that is not our child still runs (a zombie doesn't)."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


ANY_FOLDER = ("--lora-root", "*", "--weights-root", "*")


class ServerProcess:
    def __init__(
        self, folder: Path, model: str, *flags: str, real_engine: bool = False, any_folder: bool = True
    ) -> None:
        """`any_folder`: orders may name any folder of adapters and weights."""
        self.log_path = folder / "server.log"
        self.temporary = Path(tempfile.mkdtemp(dir="/tmp"))  # not in `folder`: paths of sockets must be short
        program = ["-m", "jaxsgl.serve"] if real_engine else [str(Path(__file__).parent / "serve_fake.py")]
        command = [
            sys.executable,
            *program,
            "--model",
            model,
            "--log-level",
            "debug",
            "--grpc-port",
            "0",
            "--port",
            "0",
        ]
        environment = os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(self.temporary)}
        with self.log_path.open("w") as log:
            self.process = subprocess.Popen(
                [*command, "--grpc-port", "0", "--port", "0", *(ANY_FOLDER if any_folder else ()), *flags],
                env=environment,
                stderr=log,
                stdin=subprocess.PIPE,
            )

    @property
    def log(self) -> str:
        return self.log_path.read_text()

    def wait_for_log(self, pattern: str) -> re.Match[str]:
        def look() -> re.Match[str] | None:
            found = re.search(pattern, self.log)
            assert found or self.process.poll() is None, f"the server ended:\n{self.log}"
            return found

        return wait_for(look, f"{pattern!r} in the log")

    def wait_until_ready(self) -> None:
        self.wait_for_log("ready: ")

    @property
    def address(self) -> str:
        """The address of its gRPC port."""
        return self.wait_for_log(r"listening on (\S+) \(gRPC\)").group(1)

    @property
    def http_address(self) -> str:
        return self.wait_for_log(r"listening on .* and (\S+) \(HTTP\)").group(1)

    @property
    def engine_pid(self) -> int:
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        (pid,) = wait_for(lambda: children.read_text().split(), "engine process")
        return int(pid)

    def wait_for_exit(self, limit_s: float = PATIENCE_S) -> int:
        return self.process.wait(limit_s)

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)

    @contextlib.contextmanager
    def stub(self) -> Iterator[pb_grpc.JaxsglStub]:
        with grpc.insecure_channel(self.address) as channel:
            yield pb_grpc.JaxsglStub(channel)

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(PATIENCE_S)
        if self.process.stdin is not None:
            self.process.stdin.close()
        shutil.rmtree(self.temporary, ignore_errors=True)


def ids_request(*ids: int, stream: bool = True, request_id: str = "", **sampling: object) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=ids),
        stream=stream,
        request_id=request_id,
        sampling=pb.SamplingParams(**sampling),  # type: ignore[arg-type]
    )
