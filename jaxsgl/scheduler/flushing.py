"""Emptying the prefix cache: at once if nobody uses it, or when those who do have ended. commands.py calls this."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from jaxsgl.messages import Answer, FlushCache
from jaxsgl.scheduler.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class _Drain:
    number: int
    deadline_s: float


class Flushing:
    """Owns the flushes that wait. Requests are let in meanwhile: whoever drains a server keeps them away himself.

    Args:
      scheduler: whose cache it is.
      answer: takes answers.
      clock: gives seconds.
    """

    def __init__(self, scheduler: Scheduler, answer: Callable[[Answer], None], clock: Callable[[], float]) -> None:
        self._scheduler = scheduler
        self._answer = answer
        self._clock = clock
        self._drains: list[_Drain] = []

    def flush(self, command: FlushCache) -> None:
        """Flushes now, or until `timeout_s` is over."""
        self._drains.append(_Drain(command.number, self._clock() + command.timeout_s))
        self.turn_ends()

    def turn_ends(self) -> None:
        """Answers the flushes that can be done now, and those that wait in vain."""
        obstacle = self._obstacle() if self._drains else None
        for drain in list(self._drains):
            # While paused nobody ends, and the loop stands still: nobody would look at the clock.
            if obstacle is not None and not self._scheduler.is_paused and self._clock() < drain.deadline_s:
                continue
            if obstacle is None:
                self._scheduler.flush_cache()
            self._answer(Answer(drain.number, obstacle is None, obstacle or ""))
            self._drains.remove(drain)

    def _obstacle(self) -> str | None:
        """Those that wait hold no pages, but will at the next step, unless generation is paused."""
        waiting, running = self._scheduler.num_waiting, self._scheduler.num_running
        if self._scheduler.is_paused:
            if not running:
                return None
            return f"generation is paused, and {running} requests hold pages: pause in the mode retract or abort"
        if not (waiting or running):
            return None
        return f"{waiting} requests wait and {running} run: the cache is flushed only when there are none"
