"""Helpers for tests over HTTP: a client per server, bodies, answers and errors, streams, connections that misbehave."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import httpx
from server_process import PATIENCE_S, ServerProcess


def connect(server: ServerProcess, **options: Any) -> httpx.Client:
    return httpx.Client(base_url=f"http://{server.http_address}", timeout=PATIENCE_S, **options)


def events(body: str) -> list[dict[str, Any]]:
    """Returns the events of a stream that ended properly."""
    *data, done = [line.removeprefix("data: ") for line in body.splitlines() if line]
    assert done == "[DONE]"
    return [json.loads(event) for event in data]


def error_of(response: httpx.Response) -> dict[str, Any]:
    """Returns the error; every refusal has OpenAI's shape."""
    assert response.status_code >= 400
    assert response.headers["content-type"] == "application/json"
    (error,) = response.json().values()
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    return error


def post(http: httpx.Client, path: str, **body: Any) -> Any:
    """Returns the answer to a body that must be accepted."""
    answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def refusal(http: httpx.Client, path: str, **body: Any) -> dict[str, Any]:
    """Returns the error for a body that must be refused with 400."""
    answer = http.post(path, json=body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    return dict(error)


def chunks(http: httpx.Client, path: str, **body: Any) -> list[dict[str, Any]]:
    """Returns all chunks of a streamed answer, which must end as OpenAI's do."""
    with http.stream("POST", path, json=body | {"stream": True}) as answer:
        assert answer.status_code == 200, answer.read()
        assert answer.headers["content-type"].startswith("text/event-stream")
        events = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert events.pop() == "[DONE]"
    return [json.loads(event) for event in events]


def say(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def generate_body(*ids: int, stream: bool = False, **sampling: Any) -> dict[str, Any]:
    return {"input_ids": ids, "stream": stream, "sampling_params": sampling}


def report(client: httpx.Client) -> list[int]:
    """[running requests, requests ever seen, aborts ever seen], as the fake engine counts."""
    body = generate_body(906, max_new_tokens=3, ignore_eos=True)
    ids = client.post("/generate", json=body).json()["output_ids"]
    return [int(number) for number in ids]


async def open_stream(address: str, body: dict[str, Any]) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Returns a connection that has sent POST /generate and read nothing yet."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    payload = json.dumps(body).encode()
    head = f"POST /generate HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(payload)}\r\n"
    writer.write(head.encode() + b"content-type: application/json\r\n\r\n" + payload)
    return reader, writer


async def until(condition: Any) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline_s
        await asyncio.sleep(0.01)
