"""Runs the engine requests of one HTTP request together: they start together, and one that fails ends all.

Knows no format. A choice's number is its prompt's times n, plus its sample's.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterator, Sequence

from jaxsgl.frontend.generation import Generation, Generator
from jaxsgl.request import Request
from jaxsgl.text.sample import Piece


@contextlib.contextmanager
def start_all(generator: Generator, requests: Sequence[Request]) -> Iterator[list[Generation]]:
    """Submits prepared requests; leaving the block before their end aborts them. Errors as `Generator.start`."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(generator.start(request)) for request in requests]


async def whole(generations: Sequence[Generation]) -> list[Piece]:
    """All choices, each as one piece, in the order of their numbers."""
    tasks = [asyncio.create_task(generation.whole()) for generation in generations]
    try:
        return [piece for pieces in await asyncio.gather(*tasks) for piece in pieces]
    finally:
        await _end(tasks)


async def pieces(generations: Sequence[Generation], n: int) -> AsyncGenerator[tuple[int, Piece], None]:
    """Pieces with the numbers of their choices, as they come."""
    if len(generations) == 1:
        async for piece in generations[0]:
            yield piece.index, piece
        return
    news: asyncio.Queue[tuple[int, Piece] | Exception] = asyncio.Queue(maxsize=len(generations))

    async def forward(number: int, generation: Generation) -> None:
        try:
            async for piece in generation:
                await news.put((number * n + piece.index, piece))
        except Exception as error:  # raised below, where the pieces are read
            await news.put(error)

    tasks = [asyncio.create_task(forward(*numbered)) for numbered in enumerate(generations)]
    try:
        running = len(generations) * n
        while running:
            got = await news.get()
            if isinstance(got, Exception):
                raise got
            if got[1].end is not None:
                running -= 1
            yield got
    finally:
        await _end(tasks)


async def _end(tasks: Sequence[asyncio.Task[object]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
