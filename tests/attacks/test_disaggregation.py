"""Strangers at both ports of prefill and decode get nothing in, learn nothing, and take no place from a server."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import random
import re
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from bench.processes import free_ports

from jaxsgl.transfer.frames import Fail, Geometry, Open, Pages, Ping, WireError, encode, room_of
from jaxsgl.transfer.tcp import TcpWire
from tests.checkpoints import make_checkpoint
from tests.end_to_end.servers import COMMON_FLAGS, RunningServer, running_server
from tests.grids import count
from tests.transfer.strangers import Relay, greet

PATIENCE_S = 120.0
SHAPE = (2, 2, 2, 16, 8)
A_GEOMETRY = Geometry(16, "float32", SHAPE, math.prod(SHAPE) * 4, "guessed", 0)
NUM_CONNECTIONS = 1000
FIRST_ROOM = itertools.count(1)


class Pair:
    """A prefill and a decode server that have a secret."""

    def __init__(self, folder: Path, stack: contextlib.ExitStack) -> None:
        secret = folder / "secret"
        secret.write_text(os.urandom(32).hex())
        secret.chmod(0o600)
        (self.port,) = free_ports(1)
        model = make_checkpoint("qwen3", folder / "model")
        servers: list[RunningServer] = []
        for mode in ("prefill", "decode"):
            (folder / mode).mkdir()
            flags = (
                "--model", str(model), *COMMON_FLAGS, "--disaggregation-mode", mode,
                "--disaggregation-secret-file", str(secret),
                "--disaggregation-bootstrap-port", str(self.port), "--disaggregation-bootstrap-timeout-s", "20",
            )  # fmt: skip
            servers.append(stack.enter_context(running_server(folder / mode, flags)))
        self.prefill, self.decode = servers
        self._http = stack.enter_context(httpx.Client(timeout=PATIENCE_S))
        self._threads = stack.enter_context(ThreadPoolExecutor(2))

    def ask(self, server: RunningServer, prompt: list[int], port: int | None = None) -> httpx.Response:
        """One leg, or a whole request without a `port`."""
        body: dict[str, Any] = {"input_ids": prompt, "sampling_params": {"max_new_tokens": 4, "temperature": 0}}
        if port is not None:
            body |= {"bootstrap_host": "127.0.0.1", "bootstrap_port": port, "bootstrap_room": next(FIRST_ROOM)}
        return self._http.post(f"http://{server.http_address}/generate", json=body)

    def generate(self, prompt: list[int]) -> tuple[list[int], int]:
        """Both legs of a request: its tokens, and the bytes of pages that decode received for it."""
        room, moved = next(FIRST_ROOM), self._moved_bytes()
        body = {
            "input_ids": prompt, "sampling_params": {"max_new_tokens": 4, "temperature": 0},
            "bootstrap_host": "127.0.0.1", "bootstrap_port": self.port, "bootstrap_room": room,
        }  # fmt: skip
        urls = [f"http://{server.http_address}/generate" for server in (self.prefill, self.decode)]
        _, answer = self._threads.map(lambda url: self._http.post(url, json=body), urls)
        assert answer.status_code == 200, answer.text
        return answer.json()["output_ids"], self._moved_bytes() - moved

    def _moved_bytes(self) -> int:
        """What decode has received so far."""
        metrics = self._http.get(f"http://{self.decode.http_address}/metrics").text
        (value,) = re.findall(r"^jaxsgl:kv_moved_bytes_total(?:\{.*\})? (\S+)$", metrics, re.MULTILINE)
        return int(float(value))

    def alone(self, prompt: list[int]) -> list[int]:
        """What one server says."""
        answer = self.ask(self.prefill, prompt)
        assert answer.status_code == 200, answer.text
        ids: list[int] = answer.json()["output_ids"]
        return ids

    def check(self) -> None:
        """Nothing is left of anyone."""
        for server in (self.prefill, self.decode):
            state = self._http.get(f"http://{server.http_address}/internal_state?check=true").json()
            assert state["leaks"] == [], state
            assert "Traceback" not in server.log.read_text()


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with contextlib.ExitStack() as stack:
        yield Pair(tmp_path_factory.mktemp("pair"), stack)


def prompt_of(number: int) -> list[int]:
    return [(number * 7 + i * 13) % 240 + 5 for i in range(100)]


def heard(sock: socket.socket) -> bytes:
    """All that comes until the other side leaves."""
    got = b""
    with contextlib.suppress(ConnectionError):
        while part := sock.recv(4096):
            got += part
    return got


def junk(rng: random.Random) -> bytes:
    """What a stranger says who has no secret."""
    room = room_of(rng.randrange(1 << 20), [1, 2, 3])
    frames = (
        encode(Open(room)),
        encode(Ping()),
        encode(Fail(room, "x" * rng.choice((1, 60_000)))),
        encode(Pages(room, 0, 1), A_GEOMETRY.page_bytes),
        rng.randbytes(rng.randint(1, 500)),
        b"JKVG\x04\x00\x01\x01" + rng.randbytes(rng.choice((10, 32, 64, 300))),
        b"GET / HTTP/1.1\r\n\r\n",
    )
    return b"".join(rng.choice(frames) * rng.choice((1, 3, 100)) for _ in range(rng.randint(1, 3)))


def test_strangers_at_the_prefill_port_hear_nothing_and_take_no_place(pair: Pair) -> None:
    """Silent ones, such as say junk, and such as greet without the secret and open rooms: 1,000 at a time."""
    rng = random.Random(5)
    expected = pair.alone(prompt_of(1))
    said: list[bytes] = []
    with contextlib.ExitStack() as stack:
        silent = [
            stack.enter_context(
                socket.create_connection(("127.0.0.1", pair.port), source_address=(f"127.0.0.{2 + i % 4}", 0))
            )
            for i in range(NUM_CONNECTIONS)
        ]

        def speak(data: bytes) -> None:
            with socket.create_connection(("127.0.0.1", pair.port), timeout=PATIENCE_S) as sock:
                with contextlib.suppress(OSError):  # it is closed meanwhile
                    sock.sendall(data)
                    sock.shutdown(socket.SHUT_WR)
                said.append(heard(sock))

        def speak_all() -> None:
            for _ in range(count(200, 4_000)):
                speak(junk(rng))

        speaker = threading.Thread(target=speak_all)
        speaker.start()
        for number in range(2, 6):
            ids, moved = pair.generate(prompt_of(number))
            assert ids == pair.alone(prompt_of(number)) and moved > 0, "pages came from prefill"
        speaker.join()
        assert len(silent) == NUM_CONNECTIONS
    assert pair.alone(prompt_of(1)) == expected
    for text in said:
        assert len(text) in (0, 40), "at most the greeting's first part, which says nothing of pages"
        assert b"float32" not in text
    pair.check()


@pytest.mark.parametrize("secret", [b"", b"guessed" * 5], ids=["none", "another"])
def test_a_stranger_without_the_secret_is_refused_before_it_opens_a_room(pair: Pair, secret: bytes) -> None:
    with socket.create_connection(("127.0.0.1", pair.port), timeout=PATIENCE_S) as sock:
        with pytest.raises((EOFError, ConnectionError, WireError)):
            greet(sock, "decode", A_GEOMETRY, secret)
        assert heard(sock) == b""


class FakePrefill:
    """Listens at a port that a client names, and says `greeting` to what connects."""

    def __init__(self, greeting: bytes) -> None:
        self.heard: list[bytes] = []
        self._greeting = greeting
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._socket.settimeout(0.1)
        self.port = int(self._socket.getsockname()[1])
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._serve)

    def __enter__(self) -> FakePrefill:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join()
        self._socket.close()

    def _serve(self) -> None:
        while not self._ends.is_set():
            with contextlib.suppress(TimeoutError):
                sock, _ = self._socket.accept()
                with sock, contextlib.suppress(ConnectionError):
                    sock.settimeout(1.0)
                    sock.sendall(self._greeting)
                    got = b""
                    with contextlib.suppress(TimeoutError):
                        while part := sock.recv(4096):
                            got += part
                    self.heard.append(got)


def test_a_client_that_names_its_own_prefill_server_gets_nothing_in_and_learns_nothing(pair: Pair) -> None:
    """Whatever listens there, or does not, the client gets the same text; what listens hears a nonce and a proof."""
    prompt = prompt_of(9)
    (closed,) = free_ports(1)
    answers = [pair.ask(pair.decode, prompt, closed)]
    hello = b"JKVG\x04\x00\x00\x01" + bytes(32)
    pages = b"".join(encode(Pages(room_of(1, prompt), 0, 1), 8) for _ in range(9))
    for greeting in (b"SSH-2.0-x\r\n" * 9, b"", hello, hello + bytes(32) + pages, pages):
        with FakePrefill(greeting) as fake:
            answers.append(pair.ask(pair.decode, prompt, fake.port))
        for data in fake.heard:
            assert b"float32" not in data and len(data) <= 40 + 32, "a Hello, and a proof for those that have one"
    with Relay(pair.port) as relay:  # both sides would prove themselves to it
        answers.append(pair.ask(pair.decode, prompt, relay.port))
        assert relay.carried[0] and not any(b"float32" in data for data in relay.carried)
    with contextlib.closing(TcpWire("prefill", A_GEOMETRY, ("127.0.0.1", 0), secret=b"another" * 5)) as other:
        answers.append(pair.ask(pair.decode, prompt, other.port))
        assert not other.poll()
    assert {answer.status_code for answer in answers} == {503}
    texts = {re.sub(r"\d+", "N", answer.json()["error"]["message"]) for answer in answers}
    assert len(texts) == 1, texts
    ids, moved = pair.generate(prompt)
    assert ids == pair.alone(prompt)
    assert moved > 0, "its pages came from the true server"
    pair.check()
