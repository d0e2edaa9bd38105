"""Streams of OpenAI's completions over HTTP: one connection each, read by hand, since a client library would cost more
than the server.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

from bench.frontend.plan import MODEL, Plan
from bench.frontend.received import Chunk, Received, WrongStream

END = b"0\r\n\r\n"  # of a chunked body


class _Stream(asyncio.Protocol):
    def __init__(self, request: bytes, add: Callable[[bytes], None]) -> None:
        self._request = request
        self._add = add
        self._tail = b""
        self._transport: asyncio.BaseTransport | None = None
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._add(data)
        self._tail = (self._tail + data)[-len(END) :]
        if self._tail == END and self._transport is not None:
            self._transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_result(None)


async def run(plan: Plan, address: str, received: list[Received], on_token: Callable[[], None]) -> None:
    """Fills `received`, one per stream; `on_token` is called when there are tokens, again and again."""
    host, _, port = address.rpartition(":")
    loop = asyncio.get_running_loop()

    def adder(of_stream: Received) -> Callable[[bytes], None]:
        def add(data: bytes) -> None:
            of_stream.add(data)
            if b"data:" in data:
                on_token()

        return add

    async def stream(number: int) -> None:
        request = _request(plan, number, address)
        _, protocol = await loop.create_connection(lambda: _Stream(request, adder(received[number])), host, int(port))
        await protocol.ended

    await asyncio.gather(*map(stream, range(plan.num_streams)))


def parse(received: Received) -> list[Chunk]:
    """The events with text. Raises `WrongStream` for an answer that is no complete stream."""
    data = b"".join(part for _, part in received.parts)
    head, _, _ = data.partition(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 200") or not data.endswith(END):
        raise WrongStream(f"no complete answer: {data[:500]!r}")
    chunks: list[Chunk] = []
    last = ""
    for time_s, event in _events(received, len(head) + 4):
        last = event
        if event != "[DONE]":
            choices = json.loads(event)["choices"]
            chunks.append(Chunk(time_s, choices[0]["text"] if choices else "", None))
    if last != "[DONE]":
        raise WrongStream(f"the stream ends with {last!r} instead of [DONE]")
    return chunks


def _events(received: Received, head: int) -> list[tuple[float, str]]:
    """(seconds, data) of the server-sent events. Takes the chunked coding off, however the network cut it."""
    events: list[tuple[float, str]] = []
    wire = bytearray()
    body = bytearray()
    skip = head
    for time_s, part in received.parts:
        taken = min(skip, len(part))
        skip -= taken
        wire += part[taken:]
        while (line_end := wire.find(b"\r\n")) >= 0:
            size = int(wire[:line_end], 16)
            if len(wire) < line_end + 2 + size + 2:
                break
            body += wire[line_end + 2 : line_end + 2 + size]
            del wire[: line_end + 2 + size + 2]
        while (end := body.find(b"\n\n")) >= 0:
            events.append((time_s, body[:end].decode().removeprefix("data: ")))
            del body[: end + 2]
    return events


def _request(plan: Plan, number: int, address: str) -> bytes:
    asked = {
        "model": MODEL,
        "prompt": [number, 1, 2, 3],
        "max_tokens": plan.num_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    body = json.dumps(asked).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {address}\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
