"""A server with an OpenAI API that differs from ours as the servers of other projects do."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Foreign:
    """A server's abilities, and the requests that it got. Each word, letter of an answer, and id is a token.

    Attributes:
      models: the list of /v1/models; None: that call fails.
      takes_ids: prompts may be token ids.
      refused: fields that it refuses.
      usage: whether it counts tokens.
      done: whether streams end with [DONE].
      most: tokens of an answer, whatever was asked for.
      replies: answers to POST on other paths.
      url: its address.
      sent: path and body of each request.
    """

    models: list[str] | None = field(default_factory=lambda: ["m"])
    takes_ids: bool = True
    refused: tuple[str, ...] = ()
    usage: bool = True
    done: bool = True
    most: int = 1000
    replies: Mapping[str, bytes] = field(default_factory=dict)
    url: str = ""
    sent: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    def prompts(self, path: str = "/v1/completions") -> list[Any]:
        """The prompts of streamed requests to `path`."""
        return [body.get("prompt") for to, body in self.sent if to == path and body.get("stream")]

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, bytes]:
        """Returns status and body."""
        path = path.partition("?")[0]
        if path in self.replies:
            return 200, self.replies[path]
        if path == "/tokenize":  # like llama.cpp's server, which ignores a `prompt`
            return 200, json.dumps({"tokens": [ord(letter) for letter in body.get("content", "")]}).encode()
        if path not in ("/v1/completions", "/v1/chat/completions"):
            return 404, b"Not Found"
        if body["model"] not in (self.models or ["m"]):
            return 404, b"there is no such model"
        if refused := [name for name in self.refused if name in body]:
            return 422, f"Unexpected fields: {refused}".encode()
        prompt = body["prompt"] if "prompt" in body else " ".join(part["content"] for part in body["messages"])
        if not self.takes_ids and not isinstance(prompt, str):
            return 400, f"prompt must be a string, not {prompt}".encode()
        return 200, self._completed(body, len(prompt.split() if isinstance(prompt, str) else prompt))

    def _completed(self, body: dict[str, Any], input_len: int) -> bytes:
        output_len = min(body["max_tokens"], self.most)
        counts = {"prompt_tokens": input_len, "completion_tokens": output_len} if self.usage else None
        end = {"choices": [{"text": "", "delta": {}, "finish_reason": "length"}], "usage": counts}
        if not body.get("stream"):
            return json.dumps(end).encode()
        role = {"choices": [{"delta": {"role": "assistant", "content": None}}]}
        letters = [{"choices": [{"text": "a"} if "prompt" in body else {"delta": {"content": "a"}}]}] * output_len
        events = [json.dumps(event) for event in (role, *letters, end)] + ["[DONE]"] * self.done
        return "".join(f"data: {event}\n\n" for event in events).encode()


@contextmanager
def running(foreign: Foreign) -> Iterator[Foreign]:
    """Serves on a free port."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/v1/models" and foreign.models is not None:
                self._send(200, json.dumps({"data": [{"id": name} for name in foreign.models]}).encode())
            else:
                self._send(500 if self.path == "/v1/models" else 404, b"Internal Server Error")

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"] or 0)) or "{}")
            foreign.sent.append((self.path, body))
            self._send(*foreign.answer(self.path, body))

        def _send(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    foreign.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield foreign
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
