"""Malformed HTTP: bodies, heads and connections that are wrong in many ways."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re
from collections.abc import Callable
from typing import Any

GOOD_BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": [5, 6, 7], "max_tokens": 2, "n": 2, "logprobs": 1, "stop": ["a"]},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2, "logprobs": True},
    "/generate": {"text": "Hi", "sampling_params": {"max_new_tokens": 2, "temperature": 0}, "rid": "r"},
    "/tokenize": {"prompt": "Hi"},
    "/v1/tokenize": {"messages": [{"role": "user", "content": "Hi"}], "tools": []},
    "/detokenize": {"tokens": [5, 6, 7]},
    "/abort_request": {"rid": "x"},
    "/v1/embeddings": {"input": [[5, 6], [7]], "dimensions": 3},
    "/v1/score": {"text_1": "Hi", "text_2": ["Ho", "Hi"]},
    "/v1/rerank": {"query": "Hi", "documents": ["Ho", {"text": "Hi"}], "top_n": 1},
    "/classify": {"input": "Hi"},
    "/encode": {"input_ids": [5, 6]},
    "/v1/responses": {"input": "Hi", "max_output_tokens": 2},
    "/v1/responses/input_tokens": {"input": "Hi"},
    "/v1/messages": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "Hi"}]},
    "/api/chat": {"messages": [{"role": "user", "content": "Hi"}], "options": {"num_predict": 2}, "think": False},
    "/api/generate": {"prompt": "Hi", "raw": True, "options": {"num_predict": 2, "stop": ["a"]}, "logprobs": True},
    "/api/embed": {"input": ["Hi", "Ho"], "truncate": True},
    "/api/embeddings": {"prompt": "Hi"},
    "/api/show": {"model": "default"},
}
PATHS = (
    *GOOD_BODIES,
    "/health",
    "/metrics",
    "/v1/models",
    "/v1/models/x",
    "/get_server_info",
    "/",
    "/docs",
    "/nowhere",
)
METHODS = ("GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH", "TRACE", "BREW", "get")
TYPES = (
    "application/json", "text/plain", "multipart/form-data; boundary=x", "application/x-www-form-urlencoded", "",
    "application/json; charset=utf-16", "application/json; charset=nonsense", "image/png", "é", ";;;",
)  # fmt: skip
# Given as JSON text, since some of them aren't valid JSON.
VALUES = (
    "null", "true", "-1", "0", "1e999", "NaN", "9" * 400, "9" * 5000, "[]", "{}", '""', '"\\ud800"', '"\\u0000"',
    "[[[]]]", "[" * 300 + "]" * 300, '"x"', "0.5", "-0.0", "[null]", '{"a": {}}', "[5, -1]", "[99999]", '"é🎉"',
    "2147483648",
)  # fmt: skip
URLS = (
    "/%00", "/%ff", "/v1/models/%2e%2e%2f", "//", "/v1//models", "/é", "http://x/health", "*", "/" + "a" * 9000,
    "/?" + "a=b&" * 99,
)  # fmt: skip
HEADERS = (
    "x: " + "y" * 100_000, "\r\n".join(f"h{i}: {i}" for i in range(3000)), "no colon", ": empty", "a b: c", "\0: 1",
    "content-length: -1", "content-length: 99999999999999999999", "content-length: 5", "transfer-encoding: gzip",
    "transfer-encoding: chunked", "expect: 100-continue", "upgrade: websocket\r\nconnection: upgrade",
    "x-request-id: " + "é" * 99, "x-request-id: a\0b", "authorization: Bearer é", "accept-encoding: *;q=x",
    "cookie: " + "=;" * 500, "range: bytes=5-1", "host: y", "origin: null", "content-encoding: gzip",
)  # fmt: skip
BAD_CHUNKS = (b"zz\r\nabc", b"-1\r\n\r\n", b"ffffffffffffffffff\r\n", b"0\r\n\r\n")
OTHER_STARTS = (
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"GET /health\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"SSH-2.0-x\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01" * 40, b"\r\n\r\n\r\n\r\nGET\r\n\r\n", b"POST / HTTP/1.1\r\n\r\n\r\nxxx",
)  # fmt: skip
GONE_S = 0.02
SILENCE_S = 60.0

Junk = list[bytes]  # what goes over one connection, piece by piece


def junk_request(rng: random.Random) -> Junk:
    """One connection's bytes."""
    return rng.choice(KINDS)(rng)


async def exchange(address: str, junk: Junk, leave: bool) -> list[int]:
    """Sends `junk`, and unless it leaves at once, reads until the server closes. Returns the statuses of all answers.

    Raises `TimeoutError` if the server neither says anything nor closes the connection.
    """
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    answer = b""
    with contextlib.suppress(ConnectionError):
        for piece in junk:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(GONE_S if len(junk) > 1 else 0)
        while not leave:
            async with asyncio.timeout(SILENCE_S):
                part = await reader.read(1 << 16)
            if not part:
                break
            answer += part
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()
    return [int(status) for status in re.findall(rb"HTTP/1\.[01] (\d{3}) ", answer)]


def request(method: str, path: str, body: bytes = b"", headers: str = "", kind: str = "application/json") -> bytes:
    """A request after which the server closes the connection."""
    head = f"{method} {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: {len(body)}\r\n"
    return (head + (f"content-type: {kind}\r\n" if kind else "") + headers + "\r\n").encode() + body


def _good(rng: random.Random) -> tuple[str, bytes]:
    path = rng.choice(list(GOOD_BODIES))
    return path, json.dumps(GOOD_BODIES[path] | ({"stream": True} if rng.random() < 0.3 else {})).encode()


def _random_bytes(rng: random.Random) -> Junk:
    return [rng.randbytes(rng.randrange(1, 2000)) + b"\r\n\r\n"]


def _random_body(rng: random.Random) -> Junk:
    return [request("POST", rng.choice(list(GOOD_BODIES)), rng.randbytes(rng.randrange(300)), kind=rng.choice(TYPES))]


def _cut_json(rng: random.Random) -> Junk:
    path, body = _good(rng)
    return [request("POST", path, body[: rng.randrange(len(body))])]


def _wrong_value(rng: random.Random) -> Junk:
    """A good body in which one value is replaced by another."""
    path, _ = _good(rng)
    body = dict(GOOD_BODIES[path])
    names = [*body, "temperature", "seed", "top_p", "stream", "logit_bias", "model", "echo", "tools", "stream_options"]
    names += ["bootstrap_port", "bootstrap_room"]
    for name in rng.sample(names, rng.randint(1, 2)):
        body[name] = "JUNK"
    text = re.sub('"JUNK"', lambda _: rng.choice(VALUES), json.dumps(body))
    return [request("POST", path, text.encode())]


def _wrong_type(rng: random.Random) -> Junk:
    path, body = _good(rng)
    return [request("POST", path, body, kind=rng.choice(TYPES))]


def _wrong_method(rng: random.Random) -> Junk:
    return [request(rng.choice(METHODS), rng.choice(PATHS), b"{}" if rng.random() < 0.5 else b"")]


def _wrong_path(rng: random.Random) -> Junk:
    return [request(rng.choice(METHODS), rng.choice(URLS))]


def _wrong_head(rng: random.Random) -> Junk:
    path, body = _good(rng)
    return [request("POST", path, body, headers=rng.choice(HEADERS) + "\r\n")]


def _chunked(rng: random.Random) -> Junk:
    path, body = _good(rng)
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-type: application/json\r\n"
    good = b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
    return [head.encode() + b"transfer-encoding: chunked\r\n\r\n", rng.choice((good, *BAD_CHUNKS))]


def _slow(rng: random.Random) -> Junk:
    path, body = _good(rng)
    whole = request("POST", path, body)
    cuts = sorted(rng.sample(range(1, len(whole)), 4))
    return [whole[start:end] for start, end in zip([0, *cuts], [*cuts, len(whole)], strict=True)]


def _pipelined(rng: random.Random) -> Junk:
    several = [request("POST", *_good(rng)).replace(b"connection: close\r\n", b"") for _ in range(rng.randint(1, 3))]
    return [b"".join([*several, request("GET", "/health")])]


def _other_protocol(rng: random.Random) -> Junk:
    return [rng.choice(OTHER_STARTS) + b"x" * rng.choice((0, 10, 5000)) + b"\r\n\r\n"]


KINDS: tuple[Callable[[random.Random], Junk], ...] = (
    _random_bytes, _random_body, _cut_json, _wrong_value, _wrong_value, _wrong_type, _wrong_method, _wrong_path,
    _wrong_head, _chunked, _slow, _pipelined, _other_protocol,
)  # fmt: skip
