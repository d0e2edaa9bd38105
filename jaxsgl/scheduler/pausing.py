"""Pausing and continuing generation, as trainers do that change the weights.

Nothing is launched from the command on, so the same turn of the loop reads the step in flight; at its end the pause is
complete. commands.py calls this.
"""

from __future__ import annotations

from collections.abc import Callable

from jaxsgl.messages import Answer, ContinueGeneration, PauseGeneration, PauseMode
from jaxsgl.scheduler.scheduler import Scheduler


class Pausing:
    """Owns the pauses that began in this turn.

    Args:
      scheduler: what is paused.
      answer: takes answers.
    """

    def __init__(self, scheduler: Scheduler, answer: Callable[[Answer], None]) -> None:
        self._scheduler = scheduler
        self._answer = answer
        self._begun: list[PauseGeneration] = []

    def pause(self, command: PauseGeneration) -> None:
        """Launches nothing from now on. May come again, with another mode."""
        if command.mode is PauseMode.ABORT:
            self._scheduler.abort_all()
        self._scheduler.pause()
        self._begun.append(command)

    def resume(self, command: ContinueGeneration) -> None:
        """Goes on, whether it was paused or not. A pause of the same turn has failed."""
        for begun in self._begun:
            self._answer(Answer(begun.number, False, "generation was continued before the step in flight was read"))
        self._begun.clear()
        self._scheduler.resume()
        self._answer(Answer(command.number, True))

    def turn_ends(self) -> None:
        """Completes pauses."""
        for begun in self._begun:
            if begun.mode is PauseMode.RETRACT:
                self._scheduler.retract_all()
            self._answer(Answer(begun.number, True))
        self._begun.clear()
