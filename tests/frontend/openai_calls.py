"""What tests of the OpenAI endpoints share: plain HTTP to a server, and streams read event by event."""

from __future__ import annotations

import json
from typing import Any

import httpx
from server_process import PATIENCE_S, ServerProcess


def connect(server: ServerProcess) -> httpx.Client:
    return httpx.Client(base_url=f"http://{server.http_address}", timeout=PATIENCE_S)


def post(http: httpx.Client, path: str, **body: Any) -> Any:
    """The answer to a body that must be fine."""
    answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def refusal(http: httpx.Client, path: str, **body: Any) -> dict[str, Any]:
    """What is said to a body that must be refused as the client's mistake."""
    answer = http.post(path, json=body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    return dict(error)


def chunks(http: httpx.Client, path: str, **body: Any) -> list[dict[str, Any]]:
    """All chunks of a streamed answer; it must end as OpenAI's do."""
    with http.stream("POST", path, json=body | {"stream": True}) as answer:
        assert answer.status_code == 200, answer.read()
        assert answer.headers["content-type"].startswith("text/event-stream")
        events = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert events.pop() == "[DONE]"
    return [json.loads(event) for event in events]


def say(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]
