"""One profile at a time: asked for, recorded for some steps or until it is stopped, then written beside the steps.

A trace of a few hundred steps may take many seconds to write, in which requests must not stand still: a thread of its
own does it, and the answer comes when it is done. Knows nothing of what a trace holds. Called by commands.py.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait

from jaxsgl.batch.engine_api import StepEngine
from jaxsgl.messages import Answer, StartProfile

HEAD_START_S = 0.5  # a small trace is written within this, and its steps are the last that it holds

logger = logging.getLogger(__name__)


class Profiling:
    """The profile in progress, if any.

    Args:
      engine: records and writes.
      answer: takes the answers.
    """

    def __init__(self, engine: StepEngine, answer: Callable[[Answer], None]) -> None:
        self._engine = engine
        self._answer = answer
        self._thread = ThreadPoolExecutor(1, "write-profile")
        self._folder: str | None = None  # from start until it is written
        self._steps_left: int | None = None  # to collect until it ends by itself
        self._writing: Future[None] | None = None
        self._asked_by: int | None = None  # the command that waits for what is being written

    @property
    def is_writing(self) -> bool:
        """Whether `poll` will have news without anybody asking."""
        return self._writing is not None

    def start(self, command: StartProfile, num_in_flight: int) -> None:
        """Records from now on, and answers; steps in flight began before, and don't count."""
        self._answer(self._started(command, num_in_flight))

    def stop(self, number: int) -> None:
        """Ends the recording; answers when it is written, or at once that there is none."""
        if self._folder is None:
            self._answer(Answer(number, False, "no profile is being recorded"))
        elif self._writing is not None:
            self._answer(Answer(number, False, f"the profile ended, and is being written to {self._folder}"))
        else:
            self._write(number)

    def step_collected(self) -> None:
        """Ends a profile that has seen its steps."""
        if self._steps_left is not None:
            self._steps_left -= 1
            if self._steps_left == 0:
                self._write(asked_by=None)

    def poll(self, wait_s: float) -> None:
        """Finds out whether a profile is written, waiting at most `wait_s` seconds for that, and answers."""
        if self._writing is None or not wait([self._writing], wait_s).done:
            return
        error, self._writing = self._writing.exception(), None
        if error is None:
            text, self._folder = self._folder or "", None
        else:  # still there, so that whoever mends the cause can stop it again
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
        self.poll(HEAD_START_S)
