"""`Profiling`: one order to profile at a time: for some steps, by stage, or until it is stopped; then it is written.

A recording ends by itself after its steps or its seconds, or when it has taken too much memory. Writing a trace of a
few hundred steps takes seconds, in which requests must not stand still: a thread of its own writes it, and the answer
comes when that is done. A trace that can't be written is dropped, so that the next one can be recorded. Knows nothing
of what a trace holds, nor who may order one (frontend/profiles.py). Called by control.py.
"""

from __future__ import annotations

import logging
import os
import resource
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

from jaxsgl.batch.engine_api import StepEngine
from jaxsgl.messages.orders import Answer, StartProfile

STAGES = ("extend", "decode")  # of a profile by stage: one trace each, in folders of these names
HEAD_START_S = 0.5  # a small trace is written within this, and its steps are the last that it holds
IDLE_POLL_S = 0.05
# Writing a trace takes several times the memory that recording it took: 5 to 8 times, measured with JAX 0.10 on CPUs.
WRITING_FACTOR = 8

logger = logging.getLogger(__name__)


def resident_bytes() -> int:
    """Memory of this process."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:  # macOS, where the largest size so far must do
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


class Profiling:
    """The profile in progress, if any; an `Order` from its start until it is written.

    Args:
      engine: records and writes.
      answer: takes the answers.
      is_idle: whether the scheduler has nothing to do.
      clock: gives seconds.
      memory: gives the bytes that the process holds.
    """

    def __init__(
        self,
        engine: StepEngine,
        answer: Callable[[Answer], None],
        is_idle: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
        memory: Callable[[], int] = resident_bytes,
    ) -> None:
        self._engine = engine
        self._answer = answer
        self._is_idle = is_idle
        self._clock = clock
        self._memory = memory
        self._thread = ThreadPoolExecutor(1, "write-profile")
        self._order: StartProfile | None = None  # from start until all is written
        self._deadline_s = 0.0
        self._stages: list[str] = []  # of which no trace is recorded yet
        self._stage: str | None = None  # that is being recorded
        self._launches_left = 0  # steps of that stage
        self._recording = False
        self._steps_left: int | None = None  # to collect until the recording ends by itself
        self._most_bytes = 0  # of the process
        self._writing: Future[None] | None = None
        self._asked_by: int | None = None  # the command that waits for what is being written

    @property
    def is_writing(self) -> bool:
        """Whether a trace is being written, so that `after_turn` will have news."""
        return self._writing is not None

    def start(self, command: StartProfile, num_in_flight: int) -> bool:
        """Records from now on, and answers; steps in flight began before and don't count. False if it can't."""
        reason = self._reason_against(command)
        if reason is None:
            self._order = command
            self._deadline_s = self._clock() + command.max_s
            if command.by_stage:
                self._stages = list(STAGES)
            else:
                reason = self._record(command.folder)
                if reason is not None:
                    self._order = None
                elif command.num_steps is not None:
                    self._steps_left = command.num_steps + num_in_flight
        self._answer(Answer(command.number, reason is None, reason or command.folder))
        return reason is None

    def stop(self, number: int) -> None:
        """Ends the profile; answers when it is written, or at once that there is none."""
        if self._order is None:
            self._answer(Answer(number, False, "no profile is being recorded"))
        elif self._writing is not None:
            self._stages = []
            self._answer(Answer(number, False, f"the profile ended, and is being written to {self._order.folder}"))
        else:
            self._stages = []
            if self._recording:
                self._write("it was stopped", number)
            else:
                self._answer(Answer(number, True, self._order.folder))
                self._order = None

    def before_step(self, stage: str, num_in_flight: int) -> None:
        """A step of `stage` is about to be launched, which `num_in_flight` counts. Starts the stage's recording."""
        order = self._order
        if order is None or not order.by_stage or self._writing is not None or order.num_steps is None:
            return
        if not self._recording and stage in self._stages:
            self._stages.remove(stage)
            reason = self._record(f"{order.folder}/{stage}")
            if reason is not None:
                logger.error("%s", reason)
                return
            self._stage, self._launches_left = stage, order.num_steps
        if self._recording and stage == self._stage and self._launches_left:
            self._launches_left -= 1
            if not self._launches_left:
                self._steps_left = num_in_flight

    def after_turn(self, collected: bool) -> bool:
        """Ends a recording that has all it may hold, and answers once it is written; False if no order is left."""
        if collected and self._steps_left is not None:
            self._steps_left -= 1
            if self._steps_left == 0:
                self._write("it has its steps", asked_by=None)
        if self._order is not None and self._writing is None:
            self._end_at_limits(self._order, collected)
        self._poll(IDLE_POLL_S if self._is_idle() else 0)
        return self._order is not None

    def _end_at_limits(self, order: StartProfile, collected: bool) -> None:
        if self._clock() >= self._deadline_s:
            self._stages = []
            if self._recording:
                self._write(f"its {order.max_s:g} seconds are over", asked_by=None)
            else:
                logger.info("profile: no more steps within %g s, %s is complete", order.max_s, order.folder)
                self._order = None
        elif self._recording and collected and self._memory() > self._most_bytes:
            self._stages = []
            self._write(f"writing more would take {order.max_mb} MB of memory", asked_by=None)

    def _poll(self, wait_s: float) -> None:
        """Finds out whether the trace is written, waiting at most `wait_s` seconds for that."""
        if self._writing is None or self._order is None or not wait([self._writing], wait_s).done:
            return
        error, self._writing = self._writing.exception(), None
        text = self._order.folder
        if error is not None:
            text = f"the profile can't be written to {text!r} and is dropped: {error}"
            self._stages = []
        logger.log(logging.INFO if error is None else logging.ERROR, "profile: %s", text)
        if self._asked_by is not None:
            self._answer(Answer(self._asked_by, error is None, text))
        if not self._stages:
            self._order = None

    def _reason_against(self, command: StartProfile) -> str | None:
        """Why no profile can be started now, or none so, or None."""
        if self._writing is not None and self._order is not None:
            return f"the last profile is still being written to {self._order.folder}: try again later"
        if self._order is not None:
            return f"a profile is being recorded to {self._order.folder}: stop it first"
        if command.num_steps is not None and command.num_steps < 1:
            return f"num_steps is {command.num_steps}, but must be 1 and more"
        if command.by_stage and command.num_steps is None:
            return "a profile by stage needs num_steps: send it"
        return None

    def _record(self, folder: str) -> str | None:
        """Starts to record to `folder`; returns why not if it can't."""
        assert self._order is not None
        try:
            self._engine.start_profile(folder)
        except (OSError, RuntimeError, ValueError) as error:
            return f"the profile can't be recorded to {folder!r}: {error}"
        self._recording = True
        self._most_bytes = self._memory() + self._order.max_mb * 10**6 // WRITING_FACTOR
        return None

    def _write(self, reason: str, asked_by: int | None) -> None:
        logger.info("profile: recording ends, %s", reason)
        self._recording, self._steps_left, self._stage, self._asked_by = False, None, None, asked_by
        self._writing = self._thread.submit(self._engine.stop_profile)
        self._poll(HEAD_START_S)
