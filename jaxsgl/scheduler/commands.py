"""What an operator may ask of the running engine, besides requests: each command gets exactly one answer.

Owns the journal of the prefix cache once somebody watches it. Called by the loop between two launches, so that a
command sees the scheduler at rest. A command that fails is answered with why; the loop goes on.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from jaxsgl.batch.engine_api import StepEngine
from jaxsgl.messages import (
    Answer,
    CacheEvents,
    Command,
    ContinueGeneration,
    DumpState,
    FlushCache,
    News,
    PauseGeneration,
    Ping,
    StartProfile,
    StopProfile,
    WatchCache,
)
from jaxsgl.scheduler.cache_journal import CacheJournal
from jaxsgl.scheduler.checker import Checker
from jaxsgl.scheduler.flushing import Flushing
from jaxsgl.scheduler.pausing import Pausing
from jaxsgl.scheduler.profiling import Profiling
from jaxsgl.scheduler.scheduler import Scheduler

IDLE_POLL_S = 0.05


class Commands:
    """Obeys commands.

    Args:
      scheduler, engine: what the commands are about.
      send: takes answers and cache events, on their way to the front end.
      checker: looks for leaks.
      clock: gives seconds.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        engine: StepEngine,
        send: Callable[[News], None],
        checker: Checker,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._scheduler = scheduler
        self._send = send
        self._journal: CacheJournal | None = None
        self._checker = checker
        self._answers: list[Answer] = []  # of commands that change what the load tells: it goes first
        self._pausing = Pausing(scheduler, self._answers.append)
        self._flushing = Flushing(scheduler, self._answers.append, clock)
        self._profiling = Profiling(engine, send)

    @property
    def is_idle(self) -> bool:
        """Whether every command is answered, so that the loop may block."""
        return not self._profiling.is_writing

    def obey(self, command: Command) -> None:
        """Does what `command` says, and answers it, if need be later."""
        match command:
            case Ping(number):
                self._send(Answer(number, True))
            case FlushCache():
                self._flushing.flush(command)
            case PauseGeneration():
                self._pausing.pause(command)
            case ContinueGeneration():
                self._pausing.resume(command)
            case DumpState(number, check):
                self._send(Answer(number, True, self._dump(check)))
            case StartProfile():
                self._profiling.start(command, self._scheduler.num_in_flight)
            case StopProfile(number):
                self._profiling.stop(number)
            case WatchCache(number):
                self._watch(number)

    def step_collected(self) -> None:
        """A step's tokens were read."""
        self._profiling.step_collected()

    def turn_ends(self) -> None:
        """Does what has waited for its time, and tells what happened to the prefix cache in this turn of the loop."""
        self._pausing.turn_ends()
        self._flushing.turn_ends()
        self._tell_cache_events()
        self._profiling.poll(IDLE_POLL_S if self._scheduler.is_idle else 0)

    def load_told(self) -> None:
        """The front end knows the load after this turn, and may see the answers."""
        for answer in self._answers:
            self._send(answer)
        self._answers.clear()

    def _dump(self, check: bool) -> str:
        state = self._scheduler.dump()
        if check:
            state["leaks"] = self._checker.check()
        state["leaks_total"] = self._checker.num_leaks
        return msgspec.json.encode(state).decode()

    def _watch(self, number: int) -> None:
        if self._journal is None:
            self._journal = CacheJournal(self._scheduler.cache)
        self._tell_cache_events()  # what follows holds them already
        self._send(CacheEvents(self._journal.snapshot(), number))

    def _tell_cache_events(self) -> None:
        events = self._journal.take() if self._journal is not None else []
        if events:
            self._send(CacheEvents(events))
