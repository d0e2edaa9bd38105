"""A server without files, or on a full disk: it goes on serving, uses no CPU time for it and writes little."""

from __future__ import annotations

import contextlib
import resource
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from http_calls import connect, generate_body
from server_process import ServerProcess, ids_request, wait_for

FILES = 200
FLOOD = 300  # connections, more than there are files
LOOK_S = 3.0


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
