"""Sends each request when it is due, and each later turn of a conversation when the turn before has been answered."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jaxsgl.bench.backend import Answer, Backend, BackendError, Turn
from jaxsgl.bench.requests import Ask, prompt_pieces

WARM_UP_SEED = (1 << 62) - 1  # gives a prompt that shares nothing with the prompts of the run
WARM_UP_OUTPUT_LEN = 32  # at most


@dataclass(frozen=True)
class Outcome:
    """The result of a run.

    Attributes:
      answers: in the order in which requests were sent.
      duration_s: seconds from the start to the end of the last answer.
      cpu_s: processor time of this process meanwhile. If it is near `duration_s`, this process limits the figures.
    """

    answers: list[Answer]
    duration_s: float
    cpu_s: float


class Run:
    """One run against one server.

    Args:
      backend: the server.
      vocab_size: ids of prompts are below this.
      salt: makes the prompts differ from those of another run.
      max_concurrency: largest number of open requests; further ones wait here, which counts in no latency. None: no
        limit.
    """

    def __init__(self, backend: Backend, vocab_size: int, salt: int, max_concurrency: int | None = None) -> None:
        self._backend = backend
        self._vocab_size = vocab_size
        self._salt = salt
        self._room = contextlib.nullcontext() if max_concurrency is None else asyncio.Semaphore(max_concurrency)
        self._answers: list[Answer] = []

    async def warm_up(self, like: Ask, count: int) -> None:
        """Sends `count` requests of the size of `like`. Raises `BackendError` if all of them fail."""
        ask = Ask(0.0, (WARM_UP_SEED,), (sum(like.lengths),), min(like.output_len, WARM_UP_OUTPUT_LEN))
        answers = [Answer() for _ in range(count)]
        await asyncio.gather(*(self._backend.generate(self._turn(ask, []), answer) for answer in answers))
        if answers and all(answer.error for answer in answers):
            raise BackendError(f"the warm-up failed: {answers[0].error}")

    async def send(self, asks: Sequence[Ask], on_end: Callable[[int], object]) -> Outcome:
        """Sends all of `asks` in order of time, the first one at once.

        Args:
          asks: the requests, at least one, each with its later turns. Turns after a failed one are not sent.
          on_end: called with 1 whenever a request has ended.
        """
        tasks = []
        start_s, start_cpu_s = time.monotonic(), time.process_time()
        gc.disable()  # it would walk through all answers kept so far, again and again
        try:
            for ask in asks:
                wait_s = start_s + ask.at_s - asks[0].at_s - time.monotonic()
                await asyncio.sleep(
                    max(wait_s, 0.0)
                )  # even for 0 s, so that making prompts does not delay arriving events
                tasks.append(asyncio.create_task(self._converse(ask, on_end)))
            await asyncio.gather(*tasks)
        finally:
            gc.enable()
        end_s = max(answer.end_s for answer in self._answers)
        return Outcome(self._answers, end_s - start_s, time.process_time() - start_cpu_s)

    async def _converse(self, ask: Ask, on_end: Callable[[int], object]) -> None:
        """Sends a request and its later turns."""
        answers: list[Answer] = []
        turn: Ask | None = ask
        while turn is not None:
            async with self._room:
                answer = Answer(sent_s=time.monotonic(), end_s=time.monotonic(), asked_len=turn.output_len)
                self._answers.append(answer)
                await self._backend.generate(self._turn(turn, answers), answer)
            on_end(1)
            answers.append(answer)
            turn = None if answer.error else turn.then
            if turn is not None and turn.at_s:
                await asyncio.sleep(turn.at_s)

    def _turn(self, ask: Ask, answers: Sequence[Answer]) -> Turn:
        return Turn(prompt_pieces(ask, self._vocab_size, self._salt), answers, ask.output_len)
