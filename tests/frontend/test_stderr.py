"""Standard error never makes a process wait, and lines stay whole."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from http_calls import generate_body
from server_process import PATIENCE_S, ROOT, ServerProcess, wait_for

from jaxsgl.stderr import LineWriter, new_pipe, read_lines

Start = Callable[..., ServerProcess]


def dropped(count: int) -> bytes:
    return b"%d dropped\n" % count


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    reading, writing = os.pipe()
    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 4096)
    yield reading, writing
    os.close(reading)  # ends the writer's thread, should it wait
    os.close(writing)


def test_lines_arrive_in_order(pipe: tuple[int, int]) -> None:
    reading, writing = pipe
    writer = LineWriter(writing, dropped)
    for number in range(100):
        writer.put(b"%d\n" % number)
    assert writer.flush(PATIENCE_S)
    assert os.read(reading, 4096) == b"".join(b"%d\n" % number for number in range(100))


@pytest.mark.parametrize("blocking", [True, False])
def test_a_reader_that_stalls_costs_lines_but_no_time(pipe: tuple[int, int], blocking: bool) -> None:
    reading, writing = pipe
    os.set_blocking(writing, blocking)
    writer = LineWriter(writing, dropped, max_bytes=50_000)
    line = b"x" * 99 + b"\n"
    for _ in range(2000):
        writer.put(line)
    assert not writer.flush(0.01)
    num_lost = writer.counts["dropped"]
    assert 2000 - 50_000 // 100 - 4096 // 100 - 1 <= num_lost < 2000
    got = b""
    while b"dropped" not in got:
        got += os.read(reading, 65536)
    assert writer.flush(PATIENCE_S)
    assert got == line * (2000 - num_lost) + dropped(num_lost)
    writer.put(b"and on\n")
    assert os.read(reading, 100) == b"and on\n"


def test_a_writer_outlives_its_reader() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    writer = LineWriter(writing, dropped)
    writer.put(b"unread\n")
    assert writer.flush(PATIENCE_S)
    os.close(writing)


def test_a_pipe_hands_over_whole_lines_and_never_blocks() -> None:
    reading, writing = new_pipe()
    lines: list[bytes] = []
    may_read = threading.Event()

    def take(line: bytes) -> None:
        may_read.wait()
        lines.append(line)

    thread = read_lines(reading, take)
    os.write(writing, b"one\ntw")
    os.write(writing, b"o\n\n\r 50%")
    with pytest.raises(BlockingIOError):
        for _ in range(1000):
            os.write(writing, b"x" * 65536)
    os.close(writing)
    may_read.set()
    thread.join(PATIENCE_S)
    assert lines[:3] == [b"one\n", b"two\n", b"\n"]
    assert lines[3].startswith(b"\r 50%"), "a progress bar does not wait for the end of its line"


@contextlib.contextmanager
def unread_server(tmp_path: Path, *flags: str) -> Iterator[tuple[subprocess.Popen[str], dict[str, str]]]:
    """A server whose standard error is a small pipe that is read until the server is ready, and then no more."""
    (tmp_path / "model").mkdir()
    command = [sys.executable, str(Path(__file__).parent / "serve_fake.py"), "--model", str(tmp_path / "model")]
    command += ["--grpc-port", "0", "--port", "0", "--log-level", "debug", *flags]
    reading, writing = os.pipe()
    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 4096)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, stderr=writing, stdin=subprocess.PIPE, env=environment, text=True)
    os.close(writing)
    try:
        log = ""
        while "ready: " not in log:
            log += os.read(reading, 4096).decode()
        at = re.search(r"listening on (\S+) \(gRPC\) and (\S+) \(HTTP\)", log)
        assert at
        yield process, {"grpc": at[1], "http": f"http://{at[2]}"}
    finally:
        process.kill()
        process.communicate(timeout=PATIENCE_S)  # closes its standard input
        os.close(reading)


def test_a_server_goes_on_while_nothing_reads_its_standard_error(tmp_path: Path) -> None:
    with unread_server(tmp_path) as (process, at), httpx.Client(base_url=at["http"], timeout=30.0) as http:
        for number in range(100):  # each writes a line of more than 500 bytes
            headers = {"x-request-id": f"{number:0250}"}
            body = generate_body(5, max_new_tokens=1) | {"rid": f"{number:0250}"}
            assert http.post("/generate", json=body, headers=headers).status_code == 200
        assert http.get("/health_generate").status_code == 200
        assert "jaxsgl:log_lines_dropped_total{" in http.get("/metrics").text
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0


def test_what_native_code_and_children_print_is_a_json_line(start_server: Start) -> None:
    """SIGUSR1 has Python's fault handler write to file descriptor 2 of a process, as native libraries do."""
    server = start_server("--log-format", "json")
    server.wait_until_ready()
    for pid in (server.process.pid, server.engine_pid):
        os.kill(pid, signal.SIGUSR1)
    wait_for(lambda: server.log.count("most recent call first") >= 2, "stacks of both processes")
    server.interrupt()
    assert server.wait_for_exit() == 0
    lines = [json.loads(line) for line in server.log.splitlines()]
    assert {line["process"] for line in lines if line["logger"] == "stderr"} == {"server", "engine"}


JUNK = (
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # a TLS hello that breaks off
    b"\x16\x03\x01\x00\x00",
    b"\x15\x03\x01\x00\x02\x02\x28",  # a TLS alert
    b"\x80\x2e\x01\x00\x02",
    b"\x00" * 100,
    b"GET / HTTP/1.1\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
)
UPGRADE = b"GET / HTTP/1.1\r\nhost: x\r\nupgrade: websocket\r\nconnection: upgrade\r\n\r\n"


def send_junk(address: str, junk: bytes, until: bytes | None = None) -> None:
    """Sends `junk`, and reads until the server closes or has sent `until`."""
    host, _, port = address.rpartition(":")
    connection = socket.create_connection((host, int(port)), timeout=PATIENCE_S)
    with connection, contextlib.suppress(OSError):
        connection.sendall(junk)
        if until is None:
            connection.shutdown(socket.SHUT_WR)
        got = b""
        while (part := connection.recv(4096)) and (until is None or until not in got + part):
            got += part


def grpc_call(headers: list[tuple[bytes, bytes]]) -> bytes:
    """The bytes of an HTTP/2 connection that opens a call with any `headers`, which gRPC's own client would refuse."""
    block = b"".join(b"\x00" + b"".join(bytes([len(part)]) + part for part in header) for header in headers)
    frames = [(4, 0, 0, b""), (1, 5, 1, block)]  # SETTINGS, HEADERS: type, flags, stream, payload
    written = [
        len(data).to_bytes(3) + bytes([kind, flags]) + stream.to_bytes(4) + data for kind, flags, stream, data in frames
    ]
    return b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"".join(written)


def test_tls_junk_leaves_json_lines_whole_and_few(start_server: Start, certificate: tuple[str, str]) -> None:
    certfile, keyfile = certificate
    server = start_server("--log-format", "json", "--ssl-certfile", certfile, "--ssl-keyfile", keyfile)
    server.wait_until_ready()
    for address in (server.address, server.http_address):
        for junk in JUNK * 10:
            send_junk(address, junk)
    trusting = ssl.create_default_context(cafile=certfile)
    assert httpx.get(f"https://{server.http_address}/health", verify=trusting).status_code == 200
    server.interrupt()
    assert server.wait_for_exit() == 0
    lines = [json.loads(line) for line in server.log.splitlines()]
    assert len([line for line in lines if line["level"] in ("warning", "error")]) <= 40


def test_malformed_requests_are_logged_a_few_times_and_metadata_never(start_server: Start) -> None:
    server = start_server("--log-format", "json", "--api-key", "sk-of-the-server")
    server.wait_until_ready()
    call = grpc_call(
        [
            (b":method", b"POST"),
            (b":scheme", b"http"),
            (b":path", b"/jaxsgl.v1.Jaxsgl/GetModelInfo"),
            (b":authority", b"x"),
            (b"te", b"trailers"),
            (b"content-type", b"application/grpc"),
            (b"authorization", b"Bearer sk-of-a-client\xff"),
        ]
    )
    for _ in range(60):
        send_junk(server.http_address, b"\x00\r\n\r\n")
        send_junk(server.http_address, UPGRADE)
        send_junk(server.address, call, until=b"grpc-status")
    server.interrupt()
    assert server.wait_for_exit() == 0
    lines = [json.loads(line) for line in server.log.splitlines()]
    assert "Invalid encoding on <22 bytes>" in server.log
    assert "sk-of" not in server.log
    assert len([line for line in lines if line["level"] in ("warning", "error")]) <= 40
