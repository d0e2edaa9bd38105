"""One HTTP call and its engine requests: they start together, the first that fails ends all, and so does the client.

Knows no format: endpoints pass in prepared requests and get pieces back, and pass in the bytes of events. Choices are
numbered prompt by prompt: the number of a choice is its prompt's number times n, plus its sample's number.

Of a stream, uvicorn's write buffer (64 KiB) does the flow control: `send` blocks while the client doesn't read. Replies
that arrive meanwhile wait in a `ReplyStream`, merged and bounded. A client that stops reading loses its connection
(connection.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, TypeVar

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from jaxsgl.errors import InvalidRequest
from jaxsgl.frontend.generation import Generation, Generator, Pause
from jaxsgl.frontend.http.errors import ClientGone, event_of
from jaxsgl.requests.request import Request
from jaxsgl.text.sample import Piece

MAX_CHOICES = 1024  # of one HTTP call: prompts times n
DONE = b"data: [DONE]\n\n"

AnswerT = TypeVar("AnswerT")


def check_num_choices(num_prompts: int, n: int) -> None:
    """Raises `InvalidRequest` if one call asks for too many choices."""
    if num_prompts * n > MAX_CHOICES:
        raise InvalidRequest(
            f"{num_prompts} prompts times {n} samples are {num_prompts * n} choices, but a request may have "
            f"{MAX_CHOICES}: send less at once"
        )


@contextlib.asynccontextmanager
async def start_all(
    generator: Generator,
    requests: Sequence[Request],
    rank: int | None = None,
    visible: frozenset[int] = frozenset(),
) -> AsyncIterator[list[Generation]]:
    """Submits prepared requests. Leaving the block before they end aborts them. Raises as `Generator.start`.

    `rank` is the replica that must serve them, or None if any may. Special tokens of `visible` have their names in
    texts.
    """
    generations: list[Generation] = []
    pause = Pause()
    with contextlib.ExitStack() as stack:
        for number, request in enumerate(requests, 1):
            with generator.telling_other_legs(requests[number:]):
                generations.append(stack.enter_context(generator.start(request, rank=rank, visible=visible)))
            await pause.after(1)
        yield generations


async def whole(generations: Sequence[Generation]) -> list[Piece]:
    """Waits for the end and returns each choice as one piece, in the order of the choices' numbers."""
    tasks = [asyncio.create_task(generation.whole()) for generation in generations]
    try:
        return [piece for pieces in await asyncio.gather(*tasks) for piece in pieces]
    finally:
        await _cancel(tasks)


async def pieces(generations: Sequence[Generation], n: int) -> AsyncGenerator[tuple[int, Piece], None]:
    """Yields (number of the choice, piece) as pieces arrive."""
    if len(generations) == 1:
        async for piece in generations[0]:
            yield piece.index, piece
        return
    arrived: asyncio.Queue[tuple[int, Piece] | Exception] = asyncio.Queue(maxsize=len(generations))

    async def forward(prompt: int, generation: Generation) -> None:
        try:
            async for piece in generation:
                await arrived.put((prompt * n + piece.index, piece))
        except Exception as error:  # raised below, where the pieces are read
            await arrived.put(error)

    tasks = [asyncio.create_task(forward(*numbered)) for numbered in enumerate(generations)]
    try:
        running = len(generations) * n
        while running:
            got = await arrived.get()
            if isinstance(got, Exception):
                raise got
            if got[1].end is not None:
                running -= 1
            yield got
    finally:
        await _cancel(tasks)


async def _cancel(tasks: Sequence[asyncio.Task[object]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


def while_connected(endpoint: Callable[..., Awaitable[AnswerT]]) -> Callable[..., Awaitable[AnswerT]]:
    """Returns a handler that cancels `endpoint` and raises `ClientGone` if the client leaves before it has returned.

    FastAPI has read the body when it calls a handler, so that only the disconnect can still arrive then. A stream that
    `endpoint` returns is cut by `EventStream`.
    """

    @functools.wraps(endpoint)
    async def handle(http: HttpRequest, **values: Any) -> AnswerT:
        try:
            async with asyncio.timeout(None) as cut:
                watcher = asyncio.create_task(_cut_when_gone(http.receive, cut))
                try:
                    return await endpoint(**values)
                finally:
                    watcher.cancel()
        except TimeoutError:
            if not cut.expired():
                raise
            raise ClientGone from None

    # What FastAPI fills in: the endpoint's own values, and the request.
    signature = inspect.signature(endpoint, eval_str=True)
    http = inspect.Parameter("http", inspect.Parameter.KEYWORD_ONLY, annotation=HttpRequest)
    parameters = [*signature.parameters.values(), http]
    handle.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return handle


async def _cut_when_gone(receive: Receive, cut: asyncio.Timeout) -> None:
    """Ends the block of `cut` when the client leaves."""
    while (await receive())["type"] != "http.disconnect":
        pass
    cut.reschedule(0.0)  # a time long past, so the block ends now


def event(data: bytes) -> bytes:
    """Returns the event that holds `data`, which must have no line break (JSON has none)."""
    return b"data: " + data + b"\n\n"


class EventStream(Response):
    """Sends `events` (each ended by an empty line, or lines of another `media_type`) as they arrive.

    The status is sent with the first event, so an error before it is answered like any other error. A later error
    becomes the last event. However the answer ends, `events` is closed first, so that the requests it holds open are
    aborted at once.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], media_type: str = media_type) -> None:
        self.media_type = media_type
        self.status_code = 200
        self.background = None
        self._events = events
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """An ASGI application."""
        try:
            async with asyncio.timeout(None) as cut:
                watcher = asyncio.create_task(_cut_when_gone(receive, cut))
                try:
                    # A task of its own: otherwise each event would wake a chain of some 20 coroutines.
                    await asyncio.create_task(self._send_all(scope["path"], send))
                finally:
                    watcher.cancel()
        except TimeoutError:
            if not cut.expired():
                raise
        finally:
            await self._events.aclose()

    async def _send_all(self, path: str, send: Send) -> None:
        events = self._events
        first = await anext(events, b"")
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": first, "more_body": True})
        try:
            async for data in events:
                await send({"type": "http.response.body", "body": data, "more_body": True})
        except Exception as error:  # the status has been sent
            await send({"type": "http.response.body", "body": event_of(path, error), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
