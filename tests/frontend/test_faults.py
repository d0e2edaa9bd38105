"""A server without files, or on a full disk: it goes on serving, uses no CPU time for it and writes little."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from http_calls import connect, generate_body
from server_process import PATIENCE_S, ROOT, ServerProcess, ids_request, wait_for

from tests.grids import NIGHTLY

FAKE = Path(__file__).parent / "serve_fake.py"
FILES = 200
FLOOD = 300  # connections, more than there are files
LOOK_S = 3.0
FULL_DISK = """
import resource, runpy, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (1024, resource.RLIM_INFINITY))
program = sys.argv.pop(1)
run = runpy.run_path if program.endswith(".py") else runpy.run_module
run(program, run_name="__main__")
"""


def cpu_s(pid: int) -> float:
    """CPU time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100


def open_files(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


@contextlib.contextmanager
def few_files(pid: int, files: int) -> Iterator[None]:
    """Lets a process open no file beyond `files` meanwhile."""
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (files, before[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)


def check_both_ports(server: ServerProcess) -> None:
    with connect(server) as http:
        assert http.post("/generate", json=generate_body(5, max_new_tokens=2)).json()["output_ids"] == [5, 5]
    with server.stub() as stub:
        (reply,) = stub.Generate(ids_request(5, stream=False, max_tokens=2))
        assert list(reply.token_ids) == [5, 5]


def assert_calm(server: ServerProcess) -> None:
    """Health answers, and the process uses little CPU time and log for a while."""
    log_bytes, used_s = len(server.log), cpu_s(server.process.pid)
    end_s = time.monotonic() + LOOK_S
    while time.monotonic() < end_s:
        assert httpx.get(f"http://{server.http_address}/health", timeout=10.0).status_code == 200
        time.sleep(0.2)
    assert cpu_s(server.process.pid) - used_s < 0.3 * LOOK_S
    assert len(server.log) - log_bytes < 20_000


@pytest.mark.parametrize("port", ["http", "grpc"])
def test_health_answers_when_clients_hold_all_files(start_server: Callable[..., ServerProcess], port: str) -> None:
    """The files run out under a cap on connections that was chosen for more of them."""
    server = start_server()
    server.wait_until_ready()
    host, _, number = (server.http_address if port == "http" else server.address).rpartition(":")
    check_both_ports(server)
    with few_files(server.process.pid, FILES), contextlib.ExitStack() as stack:
        for _ in range(FLOOD):
            stack.enter_context(socket.create_connection((host, int(number))))
        wait_for(lambda: open_files(server.process.pid) >= FILES - 1, "use of all files")
        assert_calm(server)
    check_both_ports(server)


def test_the_default_cap_fits_into_the_limit_of_open_files(start_server: Callable[..., ServerProcess]) -> None:
    """The files never run out, and neither port takes those of the other."""
    server = start_server()
    resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, (400, 400))  # long before it has imported gRPC
    server.wait_until_ready()
    with contextlib.ExitStack() as stack:
        for address in (server.http_address, server.address):
            host, _, number = address.rpartition(":")
            for _ in range(FLOOD):
                stack.enter_context(socket.create_connection((host, int(number))))
        assert_calm(server)
        assert open_files(server.process.pid) < 390
    check_both_ports(server)


def test_the_limit_of_open_files_is_raised(start_server: Callable[..., ServerProcess]) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 1000), hard))
    try:
        server = start_server()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    server.wait_until_ready()
    assert resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE)[0] == hard
    with grpc.insecure_channel(server.address) as channel:
        health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


@contextlib.contextmanager
def on_a_full_disk(program: str, *flags: str) -> Iterator[str]:
    """Runs a server whose log has no room from the start on, and whose other files none beyond 1 KiB.

    Yields its HTTP address once it is ready, and ends it.
    """
    port = free_port()
    command = [sys.executable, "-c", FULL_DISK, program, "--grpc-port", "0", "--port", str(port), *flags]
    with Path("/dev/full").open("w") as full:
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        process = subprocess.Popen(command, env=environment, stderr=full, stdout=full, stdin=subprocess.PIPE)

    def is_ready() -> bool:
        assert process.poll() is None
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200
        return False

    try:
        wait_for(is_ready, "server")
        yield f"http://127.0.0.1:{port}"
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_S) == 0
    finally:
        process.kill()
        process.communicate()


def test_a_server_whose_log_is_full_serves(tmp_path: Path) -> None:
    with on_a_full_disk(str(FAKE), "--model", str(tmp_path), "--log-level", "debug") as url:
        for _ in range(20):
            answer = httpx.post(f"{url}/generate", json=generate_body(5, max_new_tokens=2))
            assert answer.json()["output_ids"] == [5, 5]
            assert httpx.post(f"{url}/generate", content=b"junk").status_code == 400


def test_a_log_that_fills_up_goes_on_when_there_is_room(start_server: Callable[..., ServerProcess]) -> None:
    server = start_server()
    server.wait_until_ready()
    with contextlib.ExitStack() as stack:
        for pid in (server.process.pid, server.engine_pid):
            before = resource.prlimit(pid, resource.RLIMIT_FSIZE)
            stack.callback(resource.prlimit, pid, resource.RLIMIT_FSIZE, before)
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (server.log_path.stat().st_size, before[1]))
        full = server.log
        check_both_ports(server)
        assert server.log == full
    check_both_ports(server)
    wait_for(lambda: server.log != full, "line in the log")


@pytest.mark.skipif(not NIGHTLY, reason="compiles a model's programs twice")
@pytest.mark.timeout(900)
def test_compiled_programs_that_find_no_room_are_no_error(tmp_path: Path) -> None:
    """Neither for the server that compiles them nor for the next, which finds half a program in the cache."""
    flags = (
        *("--max-running-requests", "4", "--decode-buckets", "4", "--extend-buckets", "64", "--max-total-tokens"),
        *("2048", "--chunked-prefill-size", "64", "--compilation-cache-dir", str(tmp_path)),
    )
    for _ in range(2):
        with on_a_full_disk("jaxsgl.serve", *flags) as url:
            body = generate_body(5, 6, 7, max_new_tokens=4)
            assert len(httpx.post(f"{url}/generate", json=body, timeout=PATIENCE_S).json()["output_ids"]) == 4
        assert max(file.stat().st_size for file in tmp_path.rglob("*")) <= 4096
