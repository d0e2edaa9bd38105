"""`Profiling`: one profile at a time, recorded for some steps or until it is stopped, then written beside the steps.

A trace of a few hundred steps may take many seconds to write, in which requests must not stand still: a thread of its
own writes it, and the answer comes when that is done. Knows nothing of what a trace holds. Called by control.py.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait

from jaxsgl.batch.engine_api import StepEngine
from jaxsgl.messages import Answer, StartProfile

HEAD_START_S = 0.5  # a small trace is written within this, and its steps are the last that it holds
IDLE_POLL_S = 0.05

logger = logging.getLogger(__name__)


class Profiling:
    """The profile in progress, if any; an `Order` from its start until it is written.

    Args:
      engine: records and writes.
      answer: takes the answers.
      is_idle: whether the scheduler has nothing to do.
    """

    def __init__(self, engine: StepEngine, answer: Callable[[Answer], None], is_idle: Callable[[], bool]) -> None:
        self._engine = engine
        self._answer = answer
        self._is_idle = is_idle
        self._thread = ThreadPoolExecutor(1, "write-profile")
        self._folder: str | None = None  # from start until it is written
        self._steps_left: int | None = None  # to collect until it ends by itself
        self._writing: Future[None] | None = None
        self._asked_by: int | None = None  # the command that waits for what is being written

    @property
    def is_writing(self) -> bool:
        """Whether the trace is being written, so that `after_turn` will have news."""
        return self._writing is not None

    def start(self, command: StartProfile, num_in_flight: int) -> bool:
        """Records from now on, and answers; steps in flight began before and don't count. False if it can't."""
        answer = self._started(command, num_in_flight)
        self._answer(answer)
        return answer.ok

    def stop(self, number: int) -> None:
        """Ends the recording; answers when it is written, or at once that there is none."""
        if self._folder is None:
            self._answer(Answer(number, False, "no profile is being recorded"))
        elif self._writing is not None:
            self._answer(Answer(number, False, f"the profile ended, and is being written to {self._folder}"))
        else:
            self._write(number)

    def after_turn(self, collected: bool) -> bool:
        """Ends a profile that has seen its steps, and answers once it is written; False if there is none any more."""
        if collected and self._steps_left is not None:
            self._steps_left -= 1
            if self._steps_left == 0:
                self._write(asked_by=None)
        self._poll(IDLE_POLL_S if self._is_idle() else 0)
        return self._folder is not None

    def _poll(self, wait_s: float) -> None:
        """Finds out whether the trace is written, waiting at most `wait_s` seconds for that."""
        if self._writing is None or not wait([self._writing], wait_s).done:
            return
        error, self._writing = self._writing.exception(), None
        if error is None:
            text, self._folder = self._folder or "", None
        else:  # it is kept, so that it can be stopped again once the cause is removed
            text = f"the profile can't be written to {self._folder!r}: {error}; mend that and stop it again"
        logger.log(logging.INFO if error is None else logging.ERROR, "profile: %s", text)
        if self._asked_by is not None:
            self._answer(Answer(self._asked_by, error is None, text))

    def _started(self, command: StartProfile, num_in_flight: int) -> Answer:
        number, folder, num_steps = command.number, command.folder, command.num_steps
        if self._writing is not None:
            return Answer(number, False, f"the last profile is still being written to {self._folder}: try again later")
        if self._folder is not None:
            return Answer(number, False, f"a profile is being recorded to {self._folder}: stop it first")
        if num_steps is not None and num_steps < 1:
            return Answer(number, False, f"num_steps is {num_steps}, but must be 1 and more")
        try:
            self._engine.start_profile(folder)
        except (OSError, RuntimeError, ValueError) as error:
            return Answer(number, False, f"the profile can't be recorded to {folder!r}: {error}")
        self._folder = folder
        self._steps_left = None if num_steps is None else num_steps + num_in_flight
        return Answer(number, True, folder)

    def _write(self, asked_by: int | None) -> None:
        self._steps_left, self._asked_by = None, asked_by
        self._writing = self._thread.submit(self._engine.stop_profile)
        self._poll(HEAD_START_S)
