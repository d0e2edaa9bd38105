"""One HTTP call and its engine requests: they start together, the first that fails ends all, and so does the client.

Knows no format: endpoints pass in prepared requests and get pieces back. Choices are numbered prompt by prompt: the
number of a choice is its prompt's number times n, plus its sample's number.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Sequence
from typing import TypeVar

from starlette.requests import Request as HttpRequest
from starlette.types import Receive

from jaxsgl.errors import InvalidRequest
from jaxsgl.frontend.generation import Generation, Generator, Pause
from jaxsgl.frontend.http.errors import ClientGone
from jaxsgl.requests.request import Request
from jaxsgl.text.sample import Piece

MAX_CHOICES = 1024  # of one HTTP call: prompts times n

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

    `rank` is the replica that must serve them; None: any. Special tokens of `visible` have their names in texts.
    """
    generations: list[Generation] = []
    pause = Pause()
    with contextlib.ExitStack() as stack:
        for request in requests:
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


async def until_gone(request: HttpRequest, answer: Awaitable[AnswerT]) -> AnswerT:
    """Returns the result of `answer`; if the client leaves first, cancels it and raises `ClientGone`.

    For endpoints whose body has been read: only the disconnect can still arrive then.
    """
    try:
        async with asyncio.timeout(None) as cut:
            watcher = asyncio.create_task(cut_when_gone(request.receive, cut))
            try:
                return await answer
            finally:
                watcher.cancel()
    except TimeoutError:
        if not cut.expired():
            raise
        raise ClientGone from None


async def cut_when_gone(receive: Receive, cut: asyncio.Timeout) -> None:
    """Ends the block of `cut` when the client leaves."""
    while (await receive())["type"] != "http.disconnect":
        pass
    cut.reschedule(0.0)  # a time long past, so the block ends now
