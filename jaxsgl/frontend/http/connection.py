"""A client's HTTP connection: how long it may stay in each state, how much it may send ahead, and how it ends.

`Connection` is uvicorn's protocol with the bounds that uvicorn lacks; what it answers past the cap is `ProbesOnly`.
Knows no endpoint. app.py gives it to uvicorn; acceptor.py counts it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import select
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, NoReturn

import httptools
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from jaxsgl.frontend.http.errors import answer, body_of
from jaxsgl.frontend.http.middleware import OPEN_PATHS

MAX_HEAD_BYTES = 64 << 10
MAX_PIPELINED = 64  # requests that arrived before the answers to those ahead of them
MIN_BYTES_PER_S = 1024  # a client that takes less of an answer that waits for it counts as not reading
# Longer than clients and load balancers keep a connection that is idle (httpx and so OpenAI's library 5 s, AWS 60 s):
# the side that ends it must be the one that sends requests, or one that is on its way is lost.
KEEP_ALIVE_S = 75
PROBE_S = 5.0  # for each wait on a connection past the cap
LEFT_S = 1.0  # between looks for the end of a client whose further requests wait unread
# How what is sent to the wrong port begins, and what its sender should do.
OTHER_PROTOCOLS = (
    (b"PRI * HTTP/2", "what came is HTTP/2, which gRPC speaks: call the port of --grpc-port, or send HTTP/1.1"),
    (b"\x16\x03", "what came is TLS, but the server has no certificate: use http://, or start it with --ssl-certfile"),
)
_LEFT = getattr(select, "POLLRDHUP", 0) | select.POLLHUP

logger = logging.getLogger(__name__)


class Connection(HttpToolsProtocol):
    """A client's connection, which ends if its client stops in the middle of anything.

    | state | how long |
    |---|---|
    | a request's head is incomplete; the first one's wait counts too | `head_s` from its first byte |
    | the body is incomplete | `BodyLimit`, which reads it |
    | the answer was sent before the body had come | `linger_s`, then the connection ends |
    | the answer waits for the client to read | `stall_s` without progress |
    | between requests | `KEEP_ALIVE_S` |

    While a request is being answered its client may be silent: generation.py bounds that time.

    Attributes:
      head_s: seconds that a request's head may take, including the wait for a connection's first request.
      stall_s: seconds in which a client must read what waits for it, or `MIN_BYTES_PER_S`.
      linger_s: seconds in which the rest of a body is thrown away after its early answer. Closing at once would reset
        the connection, and the client might lose the answer.
      on_lost: called when the connection ends, right before its socket is closed.
    """

    head_s = 60.0
    stall_s = 60.0
    linger_s = 5.0
    on_lost: Callable[[], object] | None = None
    _client: _Transport
    _head_bytes = 0
    _head_timer: asyncio.TimerHandle | None = None
    _read_timer: asyncio.TimerHandle | None = None
    _linger_timer: asyncio.TimerHandle | None = None
    _left_timer: asyncio.TimerHandle | None = None
    _refusal: tuple[int, str] | None = None  # of what has come, with the status that says so
    _receiving = False  # a request has begun and is not complete
    _may_keep_alive = False  # after the answer to the request that is being received
    _running: RequestResponseCycle | None = None  # the request being answered; those in `pipeline` wait

    def serve_probes_only(self) -> None:
        """Refuses all but probes, ends with the first answer, and waits less for it. Called before the connection."""
        self.head_s = self.stall_s = PROBE_S
        self.app = ProbesOnly(self.app)

    @property
    def silent(self) -> bool:
        """Whether no request is being answered."""
        return self._running is None

    @property
    def owes(self) -> bool:
        """Whether a request is being answered, or an answer waits for its client to read it."""
        return self._running is not None or self._client.get_write_buffer_size() > 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Starts waiting for the first head."""
        self._client = _Transport(transport, self._end)
        super().connection_made(self._client)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Tells the request being answered, too."""
        for timer in (self._head_timer, self._read_timer, self._linger_timer, self._left_timer):
            if timer is not None:
                timer.cancel()
        self._leave_running()
        self._client.close_now()
        super().connection_lost(exc)
        if self.on_lost is not None:
            self.on_lost()
        self.on_lost = self._running = None  # no cycle is left for the garbage collector
        self._client.forget()

    def data_received(self, data: bytes) -> None:
        """Parses `data`; throws it away if the connection is ending."""
        if self._client.is_closing():
            return
        self._unset_keepalive_if_required()
        try:
            self._parse(data)
        except httptools.HttpParserError as error:
            other = next((words for begin, words in OTHER_PROTOCOLS if data.startswith(begin)), None)
            status, words = self._refusal or (400, other or f"what came is no HTTP request: {error}")
            logger.warning("refusing what a client has sent, and ending its connection: %s", words)
            self._answer_and_end(status, words)
        if self._running is None and self._head_timer is None and not self._client.is_closing():
            self._await_head()  # uvicorn has stopped its own timer, be it for an empty line

    def _parse(self, data: bytes) -> None:
        """Parses `data`. A request that would change the protocol is answered as if it didn't say so (RFC 9110, 7.8).

        httptools takes such a request to end with its head, and its body for something else: it gets the head again,
        without that header, and then the body.
        """
        while True:
            try:
                return self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as wish:
                version = self.parser.get_http_version().encode()
                lines = [b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, version)]
                lines += [b"%s: %s" % header for header in self.headers if header[0] != b"upgrade"]
                data = b"\r\n".join([*lines, b"", data[wish.args[0] :]])
                self.parser = self._new_parser()  # the old one takes no more after `connection: close`

    def _new_parser(self) -> httptools.HttpRequestParser:
        """Returns one as uvicorn makes it."""
        parser = httptools.HttpRequestParser(self)
        with contextlib.suppress(AttributeError):  # httptools before 0.6.3
            parser.set_dangerous_leniencies(lenient_data_after_close=True)
        return parser

    def on_message_begin(self) -> None:
        """A request starts."""
        if len(self.pipeline) >= MAX_PIPELINED:
            self._refuse(400, f"more than {MAX_PIPELINED} requests wait for their answers: read those first")
        super().on_message_begin()
        self._head_bytes = 0
        self._receiving = True
        if self._running is None:
            self._end_head()
            self._await_head()

    def on_url(self, url: bytes) -> None:
        """Counts a part of the URL."""
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Counts a header."""
        self._count(len(name) + len(value))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The head is complete."""
        if self.parser.get_method() == b"CONNECT":
            self._refuse(400, "this server is no proxy: send requests to it without CONNECT")
        if self.parser.should_upgrade():
            return  # `_parse` has the head come again
        self._end_head()
        super().on_headers_complete()
        if self.scope["http_version"] == "1.0":
            self.cycle.__class__ = _UntilClose
        self._may_keep_alive = self.cycle.keep_alive
        self.cycle.keep_alive = False  # an answer before the body ends the connection
        if self.pipeline:
            self._watch_leaving()
        else:
            self._running = self.cycle

    def on_message_complete(self) -> None:
        """The request is complete."""
        if self.parser.should_upgrade():
            return  # it isn't: `_parse` goes on with it
        self._receiving = False
        if not self.cycle.response_started:
            self.cycle.keep_alive = self._may_keep_alive
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """The answer is written completely; the client may not have read it yet."""
        self._running = self.pipeline[-1][0] if self.pipeline else None
        super().on_response_complete()
        self._watch_reading()

    def _refuse(self, status: int, words: str) -> NoReturn:
        """Ends the parsing; `data_received` answers."""
        self._refusal = (status, words)
        raise ValueError(words)

    def _answer_and_end(self, status: int, words: str) -> None:
        """Answers what is no request, of which more may be on its way."""
        self._receiving = True
        body = json.dumps(body_of("", status, words)).encode()
        headers = [*self.server_state.default_headers, (b"content-type", b"application/json")]
        headers += [(b"content-length", b"%d" % len(body)), (b"connection", b"close")]
        lines = [b"HTTP/1.1 %d %s" % (status, HTTPStatus(status).phrase.encode())]
        self.transport.write(b"\r\n".join([*lines, *(b"%s: %s" % header for header in headers), b"", body]))
        self.transport.close()

    def shutdown(self) -> None:
        """Ends the connection, with the answer that is being written."""
        self._may_keep_alive = False
        if self._running is None:
            self._close()
        else:
            super().shutdown()

    def pause_writing(self) -> None:
        """Much of an answer waits for its client."""
        super().pause_writing()
        self._watch_reading()

    def _watch_reading(self) -> None:
        unread = self._client.get_write_buffer_size()
        if unread and self._read_timer is None:
            self._read_timer = self.loop.call_later(self.stall_s, self._look_again, unread, self._client.num_read)

    def _look_again(self, unread: int, num_read: int) -> None:
        self._read_timer = None
        if self._client.num_read - num_read < min(unread, self.stall_s * MIN_BYTES_PER_S):
            logger.warning("a client has not read for %.0f s: breaking its connection", self.stall_s)
            self._client.abort()
        else:
            self._watch_reading()

    def _watch_leaving(self) -> None:
        """Looks for the client's end: uvicorn reads nothing while a request waits, so that it would not be seen."""
        if self._left_timer is None:
            self._left_timer = self.loop.call_later(LEFT_S, self._look_for_end)

    def _look_for_end(self) -> None:
        self._left_timer = None
        if self.pipeline and _has_left(self._client.get_extra_info("socket").fileno()):
            self._client.abort()
        elif self.pipeline:
            self._watch_leaving()

    def _end(self) -> None:
        """Closes the connection in the client's time: it may still be sending, or reading."""
        self._end_head()
        self._leave_running()
        if self._receiving:
            self._client.finish()
            self.flow.resume_reading()
            self._linger_timer = self.loop.call_later(self.linger_s, self._close)
            self._watch_reading()
        else:
            self._close()

    def _leave_running(self) -> None:
        if self._running is not None:
            self._running.disconnected = True
            self._running.message_event.set()

    def _close(self) -> None:
        self._client.close_now()
        self._watch_reading()

    def _count(self, num_bytes: int) -> None:
        self._head_bytes += num_bytes
        if self._head_bytes > MAX_HEAD_BYTES:
            self._refuse(431, f"the request's head has more than {MAX_HEAD_BYTES} bytes: send shorter headers")

    def _await_head(self) -> None:
        self._head_timer = self.loop.call_later(self.head_s, self._close)

    def _end_head(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None


def _has_left(fd: int) -> bool:
    """Whether the other end of a socket sends nothing more, though what it has sent may be still to read."""
    poll = select.poll()
    poll.register(fd, _LEFT)
    return bool(poll.poll(0))


class _UntilClose(RequestResponseCycle):
    """An answer to HTTP/1.0, which knows no chunks: a body whose length is not known ends with the connection."""

    _is_unsized = False

    async def send(self, message: Any) -> None:
        """Of ASGI."""
        if message["type"] == "http.response.start":
            self._is_unsized = all(name.lower() != b"content-length" for name, _ in message.get("headers", ()))
            if self._is_unsized:
                self.chunked_encoding = False
        elif self._is_unsized:
            self.expected_content_length = len(message.get("body", b""))  # each part is as long as it is
        await super().send(message)


class _Transport(asyncio.Transport):
    """The transport as uvicorn sees it. It counts what the client has taken, and `close` is the connection's `end`."""

    def __init__(self, transport: asyncio.Transport, end: Callable[[], None]) -> None:
        super().__init__()
        self._transport = transport
        self._end = end
        self._ending = False
        self._num_written = 0

    @property
    def num_read(self) -> int:
        """Bytes that have left for the client's machine."""
        return self._num_written - self._transport.get_write_buffer_size()

    def write(self, data: Any) -> None:
        """Sends bytes, or keeps them until there is room. Those after the end are dropped, as asyncio does."""
        if self._ending:
            return
        self._num_written += len(data)
        self._transport.write(data)

    def close(self) -> None:
        """Has the connection end itself."""
        if not self._ending:
            self._ending = True
            self._end()

    def finish(self) -> None:
        """Tells the client that nothing more comes, if that is possible without closing (under TLS it isn't)."""
        if self._transport.can_write_eof():
            self._transport.write_eof()

    def close_now(self) -> None:
        """Closes as soon as all that was written is sent."""
        self._ending = True
        self._transport.close()

    def abort(self) -> None:
        """Closes at once."""
        self._ending = True
        self._transport.abort()

    def forget(self) -> None:
        """The connection is lost, and is not needed any more."""
        self._end = _nothing

    def is_closing(self) -> bool:
        """Whether nothing more may be written."""
        return self._ending or self._transport.is_closing()

    def get_write_buffer_size(self) -> int:
        """Bytes that wait for the client to read."""
        return self._transport.get_write_buffer_size()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """Returns what asyncio knows of the connection."""
        return self._transport.get_extra_info(name, default)

    def pause_reading(self) -> None:
        """Stops `data_received`."""
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        """Starts it again."""
        self._transport.resume_reading()


def _nothing() -> None:
    pass


class ProbesOnly:
    """What a connection past the cap serves: probes and scrapers, once. All other requests are sent away."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """An ASGI application."""

        async def send_last(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (b"connection", b"close")]
            await send(message)

        if scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send_last)
        else:
            words = "the server has as many connections as it may have (--max-connections): close some, or try later"
            await answer(503, words)(scope, receive, send_last)
