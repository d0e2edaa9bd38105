"""`jaxsgl chat --url`: any server that speaks OpenAI's API, in the form of our gRPC stub.

`HttpStub` has the two methods of `JaxsglStub` that chat.py calls, so the conversation knows one kind of server. It
turns `GenerateRequest` into a body of /v1/chat/completions, and the events of its stream into `GenerateReply`.
"""

from __future__ import annotations

import argparse
import json
import ssl
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from http.client import HTTPException
from typing import Any

from jaxsgl.frontend.listen import is_loopback
from jaxsgl.frontend.proto import jaxsgl_pb2 as pb
from jaxsgl.terminal import POLL_S, ClientError, HttpError

LEAST_S = 2.0  # that a server far away, or busy, has to answer, however short the wait

BROKEN = (OSError, HTTPException)  # a connection that fails, or an answer that is cut or no HTTP
UNKNOWN_LENGTH = 2**31 - 1  # of the context, of servers that don't say it
_REASONS = {"length": pb.FINISH_REASON_LENGTH, "abort": pb.FINISH_REASON_ABORT}


class HttpStub:
    """A server at `--url`. Making one waits until it is ready. Raises `ClientError`."""

    def __init__(self, args: argparse.Namespace) -> None:
        if not args.url.startswith(("http://", "https://")):
            raise ClientError(f"--url is {args.url}, but must begin with http:// or https://")
        self._base = args.url.rstrip("/").removesuffix("/v1") + "/v1"
        self._headers = {"content-type": "application/json"}
        if args.api_key is not None:
            self._headers["authorization"] = f"Bearer {args.api_key}"
        try:
            trusted = None if args.ca is None else ssl.create_default_context(cafile=args.ca)
        except OSError as error:
            raise ClientError(f"--ca {args.ca} can't be read: {error.strerror or error}") from None
        # A proxy that the environment names has a loopback address of its own.
        proxies = [urllib.request.ProxyHandler({})] if _is_here(args.url) else []
        self._opener = urllib.request.build_opener(urllib.request.HTTPSHandler(context=trusted), *proxies)
        self._model = self._wait_for_model(args.url, args.wait_s)

    def GetModelInfo(self, request: pb.GetModelInfoRequest) -> pb.ModelInfo:
        """What the server says of its first model. Whether it takes turns shows with the first one."""
        length = self._model.get("max_model_len") or UNKNOWN_LENGTH
        return pb.ModelInfo(
            model_path=self._model["id"], context_length=length, pool_tokens=length, has_chat_template=True
        )

    def Generate(self, request: pb.GenerateRequest) -> HttpCall:
        """A call that begins when it is read."""
        body: dict[str, Any] = {
            "model": self._model["id"],
            "messages": [{"role": turn.role, "content": turn.content} for turn in request.chat.messages],
            "stream": True,
            "stream_options": {"include_usage": True},
            "separate_reasoning": False,  # it is shown as the model writes it
        }
        for field, value in request.sampling.ListFields():
            body[field.name] = list(value) if field.name == "stop" else value
        return HttpCall(self, body)

    def open(self, path: str, body: dict[str, Any] | None = None, timeout_s: float | None = None) -> Any:
        """Returns the response. Raises `HttpError`, status 0 if nothing answers."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._base + path, data, self._headers)
        try:
            return self._opener.open(request, timeout=timeout_s)
        except urllib.error.HTTPError as error:
            with error:
                raise HttpError(error.code, _message_of(error)) from None
        except BROKEN as error:
            raise HttpError(0, f"no answer from {self._base}: {_cause(error)}") from None

    def _wait_for_model(self, url: str, wait_s: float) -> dict[str, Any]:
        deadline_s = time.monotonic() + wait_s
        while True:
            left_s = deadline_s - time.monotonic()
            try:
                return dict(self._models(max(left_s, LEAST_S))["data"][0])
            except HttpError as error:
                if error.status not in (0, 502, 503, 504):
                    raise
                if left_s <= 0:
                    raise ClientError(
                        f"no server is ready at {url} after {wait_s:g} s ({error}): give the address of its HTTP port "
                        "in --url, or wait longer with --wait-s"
                    ) from None
            except (ValueError, LookupError, TypeError):
                raise ClientError(f"{self._base}/models lists no models: is {url} a server of OpenAI's API?") from None
            time.sleep(min(POLL_S, max(left_s, 0)))

    def _models(self, timeout_s: float) -> Any:
        with self.open("/models", timeout_s=timeout_s) as response:
            try:
                return json.load(response)
            except BROKEN as error:
                raise HttpError(0, f"the answer of {self._base} broke off: {_cause(error)}") from None


class HttpCall:
    """One streamed answer, as an iterator of replies; the last one says how it ended."""

    def __init__(self, stub: HttpStub, body: dict[str, Any]) -> None:
        self._stub = stub
        self._body = body
        self._response: Any = None

    def __iter__(self) -> Iterator[pb.GenerateReply]:
        """Raises `HttpError`."""
        self._response = self._stub.open("/chat/completions", self._body)
        end, is_done = pb.GenerateReply(), False
        try:
            for line in self._response:
                if line.strip() == b"data: [DONE]":
                    is_done = True
                elif line.startswith(b"data: "):
                    yield from _replies(json.loads(line.removeprefix(b"data: ")), end)
        except (*BROKEN, ValueError) as error:
            raise HttpError(0, f"the answer broke off: {_cause(error)}") from None
        if not is_done and not end.finish_reason:  # http.client takes a chunk that never came for the end
            raise HttpError(0, "the answer broke off")
        yield end

    def cancel(self) -> None:
        """Ends the call, if it runs."""
        if self._response is not None:
            self._response.close()


def _is_here(url: str) -> bool:
    """Whether only this machine can reach `url`. Raises `ClientError` if it is no URL."""
    try:
        parts = urllib.parse.urlsplit(url)
        return parts.port != 0 and is_loopback(parts.hostname or "")  # reading the port checks it
    except ValueError as error:
        raise ClientError(f"--url is {url}, which is no URL: {error}") from None


def _replies(event: dict[str, Any], end: pb.GenerateReply) -> Iterator[pb.GenerateReply]:
    """Yields the text of an event, and notes in `end` what it says of the end."""
    if "error" in event:
        raise HttpError(0, str(event["error"].get("message", event["error"])))
    if usage := event.get("usage"):
        end.usage.prompt_tokens, end.usage.completion_tokens = usage["prompt_tokens"], usage["completion_tokens"]
    for choice in event.get("choices", ()):
        if text := choice["delta"].get("content"):
            yield pb.GenerateReply(text=text)
        if reason := choice.get("finish_reason"):
            end.finish_reason = _REASONS.get(reason, pb.FINISH_REASON_STOP)


def _cause(error: Exception) -> str:
    """Returns what went wrong; with its kind where that says more than the text, as of bytes that are no HTTP."""
    return repr(error) if isinstance(error, HTTPException) else str(getattr(error, "reason", error))


def _message_of(response: urllib.error.HTTPError) -> str:
    """Returns the message of an error in OpenAI's form, or its beginning."""
    try:
        body = response.read()
    except BROKEN as error:
        return _cause(error)
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return body[:200].decode(errors="replace")
