"""Turns errors into HTTP answers, in OpenAI's shape: {"error": {"message", "type", "param", "code"}}.

Below /v1/messages they have Anthropic's: {"type": "error", "error": {"type", "message"}}, with `details` for the one
code that Anthropic's client acts on. Below /api they have Ollama's: {"error": "..."}. Owns the status and the body of
every refusal over HTTP. Knows no endpoint. app.py registers the handlers; code that answers outside of them
(middleware, streams) calls `answer_to` and `event_of`.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from jaxsgl.errors import RETRY_AFTER_S, InvalidRequest, JaxsglError
from jaxsgl.logs import OF_CLIENTS
from jaxsgl.requests.request import TOO_LONG

CLIENT_CLOSED_REQUEST = 499  # nginx's number; the client has left and reads no answer
MAX_SHOWN_PROBLEMS = 3
MAX_MESSAGE_CHARS = 2000
MAX_PARAM_CHARS = 200
RETRY_STATUSES = (429, 503)
LOGGED_STATUSES = (400, 403, 404, 405, 413)  # by mistakes of clients, which their authors look for in the log
MAX_LOGGED_CHARS = 300
UNION_TAG = "|"  # begins the tags of members of unions, which are no part of a field's name

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    422: "server_error",
    429: "rate_limit_error",
}
_CODES = {401: "invalid_api_key"}
_ANTHROPIC_PATHS = "/v1/messages"
_OLLAMA_PATHS = "/api/"
THREAD_UNSUPPORTED = "thread_unsupported_request"  # at which Anthropic's client sends the conversation as a whole
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}

logger = logging.getLogger(__name__)


class ErrorDetail(BaseModel):
    """What went wrong; `param` is the field that is to blame, if it is known."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """The body of every answer that is no success."""

    error: ErrorDetail


# For `FastAPI(responses=...)`: any operation may answer so. "4XX" also keeps FastAPI from announcing its 422.
RESPONSES: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorBody, "description": "The request is refused"},
    "5XX": {"model": ErrorBody, "description": "The server failed, is not ready or takes too long"},
}


class ClientGone(Exception):
    """The client left before its answer was complete."""


def _count_none(request: Request, error: Exception) -> None:
    pass


def add_handlers(app: FastAPI, count: Callable[[Request, Exception], None] = _count_none) -> None:
    """Makes `app` answer the errors that its endpoints raise, once `count` has heard of them."""

    async def on_error(request: Request, error: Exception) -> Response:
        count(request, error)
        return answer_to(error)

    async def on_invalid_body(request: Request, error: Exception) -> Response:
        return await on_error(request, _invalid(error))

    async def on_http_error(request: Request, error: Exception) -> Response:
        cause = error.__cause__
        if isinstance(cause, ValueError | RecursionError):  # of the JSON parser: none, too deep, or too long a number
            return await on_error(request, InvalidRequest(f"the body can't be read: {cause}"))
        return await _on_http_error(request, error)

    app.add_exception_handler(JaxsglError, on_error)
    app.add_exception_handler(RequestValidationError, on_invalid_body)
    app.add_exception_handler(HTTPException, on_http_error)
    for gone in (ClientGone, ClientDisconnect):
        app.add_exception_handler(gone, _on_client_gone)


def body_of(path: str, status: int, message: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """Returns the JSON body that goes with `status`, in the shape of the API that `path` belongs to."""
    message = _shortened(message, MAX_MESSAGE_CHARS)  # it may quote the request
    if path.startswith(_OLLAMA_PATHS):
        return {"error": message}
    if path.startswith(_ANTHROPIC_PATHS):
        message = f"prompt is too long: {message}" if code == TOO_LONG else message  # by which clients know it
        kind = _ANTHROPIC_TYPES.get(status, "invalid_request_error" if status < 500 and status != 422 else "api_error")
        error: dict[str, Any] = {"type": kind, "message": message}
        if code == THREAD_UNSUPPORTED:
            error["details"] = {"error_code": code, "unsupported": [param]}
        return {"type": "error", "error": error}
    param = None if param is None else _shortened(param, MAX_PARAM_CHARS)
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code or _CODES.get(status)}}


def _shortened(text: str, most: int) -> str:
    return text if len(text) <= most else text[:most] + "..."


def error_of(error: Exception) -> tuple[int, str, str | None, str | None]:
    """Returns HTTP status, message, param and code. Foreign exceptions are logged and not shown to the client."""
    if isinstance(error, JaxsglError):
        return error.http_status, str(error), error.param, error.code
    logger.error("a request failed by our own fault", exc_info=error)
    return 500, f"internal error: {type(error).__name__}; the server's log says more", None, None


def answer_to(error: Exception) -> Response:
    """Returns the whole answer for `error`."""
    return answer(*error_of(error))


def answer(status: int, message: str, param: str | None = None, code: str | None = None) -> Response:
    """Returns the answer that refuses a request with `status`."""
    headers = {"retry-after": str(RETRY_AFTER_S)} if status in RETRY_STATUSES else {}
    if status == HTTPStatus.INTERNAL_SERVER_ERROR:
        headers["x-should-retry"] = "false"  # OpenAI's clients would send it again, to fail again
    if status == HTTPStatus.UNAUTHORIZED:
        headers["www-authenticate"] = "Bearer"
    return Refusal(status, headers, message, param, code)


class Refusal(Response):
    """The answer to a request that is refused. Its body is written once the path is known."""

    media_type = "application/json"

    def __init__(self, status: int, headers: dict[str, str], message: str, param: str | None, code: str | None) -> None:
        super().__init__(None, status, headers)
        self._error = (status, message, param, code)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """An ASGI application."""
        status, message = self._error[:2]
        if status in LOGGED_STATUSES:
            path, words = ascii(scope["path"][:MAX_LOGGED_CHARS])[1:-1], ascii(message[:MAX_LOGGED_CHARS])
            logger.info("%s %s: %d, %s", scope["method"], path, status, words, extra=OF_CLIENTS)
        # Starlette's JSONResponse would fail at half a surrogate pair, which a message may quote from the request.
        self.body = json.dumps(body_of(scope["path"], *self._error)).encode()
        self.headers["content-length"] = str(len(self.body))
        await super().__call__(scope, receive, send)


async def _on_http_error(request: Request, error: Exception) -> Response:
    """Answers an unknown path or method, and what middleware raises while a body is read."""
    assert isinstance(error, HTTPException)
    if isinstance(error.__cause__, ClientDisconnect):  # while FastAPI read the body
        return await _on_client_gone(request, error)
    message = error.detail
    if error.status_code == HTTPStatus.NOT_FOUND:
        message = f"no such path: {request.method} {request.url.path}{_meant(request)}"
    elif error.status_code == HTTPStatus.METHOD_NOT_ALLOWED and message == HTTPStatus.METHOD_NOT_ALLOWED.phrase:
        allowed = (error.headers or {}).get("Allow")
        message = f"{request.url.path} doesn't know the method {request.method}" + (
            f": send {allowed}" if allowed else ""
        )
    refused = answer(error.status_code, message)
    refused.headers.update(error.headers or {})
    return refused


def _meant(request: Request) -> str:
    """Returns which path may be meant by one that has a part too many or too few before it, as /v1; else nothing."""
    path, known = request.url.path.rstrip("/"), getattr(request.app.state, "paths", ())
    within = [each for each in known if each != "/" and path.endswith(each)]
    beyond = [each for each in known if path and each.endswith(path)]
    if not (within or beyond):
        return ""
    return f": send it to {max(within, key=len) if within else min(beyond, key=len)}"


def _invalid(error: Exception) -> InvalidRequest:
    """Returns the error for fields that pydantic refuses: a client's mistake, and the first few problems."""
    assert isinstance(error, RequestValidationError)
    problems = error.errors()
    shown = [_problem(problem) for problem in problems[:MAX_SHOWN_PROBLEMS]]
    if len(problems) > len(shown):
        shown.append(f"and {len(problems) - len(shown)} more problems")
    invalid = InvalidRequest("; ".join(shown))
    invalid.param = _param(problems[0]["loc"])
    return invalid


async def _on_client_gone(request: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED_REQUEST)


def _problem(problem: dict[str, Any]) -> str:
    if problem["type"] == "json_invalid":
        return f"the body is no JSON: {problem['ctx']['error']} at character {problem['loc'][-1]}"
    param = _param(problem["loc"])
    if param is None:
        return "the body is no JSON object: send one, with the header content-type: application/json"
    return f"{param}: {problem['msg']}"


def _param(loc: Sequence[int | str]) -> str | None:
    """Returns `messages.0.role` for `body.messages.0.role`; None for the whole body, or a place in its text."""
    names = [name for part in loc[1:] if not (name := str(part)).startswith(UNION_TAG)]
    return ".".join(names) if names and not names[0].isdigit() else None


def event_of(path: str, error: Exception) -> bytes:
    """Returns the last event of a stream of `path` that `error` ends."""
    body = json.dumps(body_of(path, *error_of(error))).encode()
    if path.startswith(_OLLAMA_PATHS):
        return body + b"\n"
    name = b"event: error\n" if path.startswith(_ANTHROPIC_PATHS) else b""
    return name + b"data: " + body + b"\n\n"
