"""What an operator may ask of the running engine, besides requests: each command gets exactly one answer.

Owns the journal of the prefix cache once somebody watches it. Called by the loop between two launches, so that a
command sees the scheduler at rest. A command that fails is answered with why; the loop goes on.
"""

from __future__ import annotations

from collections.abc import Callable

from jaxsgl.batch.engine_api import StepEngine
from jaxsgl.messages import (
    Answer,
    CacheEvents,
    Command,
    FlushCache,
    News,
    Ping,
    StartProfile,
    StopProfile,
    WatchCache,
)
from jaxsgl.scheduler.cache_journal import CacheJournal
from jaxsgl.scheduler.profiling import Profiling
from jaxsgl.scheduler.scheduler import Scheduler

IDLE_POLL_S = 0.05


class Commands:
    """Obeys commands.

    Args:
      scheduler, engine: what the commands are about.
      send: takes answers and cache events, on their way to the front end.
    """

    def __init__(self, scheduler: Scheduler, engine: StepEngine, send: Callable[[News], None]) -> None:
        self._scheduler = scheduler
        self._send = send
        self._journal: CacheJournal | None = None
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
            case FlushCache(number):
                answer = self._flush(number)
                self._tell_cache_events()  # whoever reads the answer finds them told
                self._send(answer)
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
        """Tells what happened to the prefix cache in this turn of the loop, and answers what took longer."""
        self._tell_cache_events()
        self._profiling.poll(IDLE_POLL_S if self._scheduler.is_idle else 0)

    def _flush(self, number: int) -> Answer:
        waiting, running = self._scheduler.num_waiting, self._scheduler.num_running
        if waiting or running:
            text = f"{waiting} requests wait and {running} run: the cache is flushed only when there are none"
            return Answer(number, False, text)
        self._scheduler.flush_cache()
        return Answer(number, True)

    def _watch(self, number: int) -> None:
        if self._journal is None:
            self._journal = CacheJournal(self._scheduler.cache)
        self._tell_cache_events()  # what follows holds them already
        self._send(CacheEvents(self._journal.snapshot(), number))

    def _tell_cache_events(self) -> None:
        events = self._journal.take() if self._journal is not None else []
        if events:
            self._send(CacheEvents(events))
