"""What an operator may ask of the running engine, besides requests: each command gets exactly one answer.

Owns the profile in progress, and the journal of the prefix cache once somebody watches it. Called by the loop between
two launches, so that a command sees the scheduler at rest. A command that fails is answered with why; the loop goes on.
"""

from __future__ import annotations

import logging
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
from jaxsgl.scheduler.scheduler import Scheduler

logger = logging.getLogger(__name__)


class Commands:
    """Obeys commands.

    Args:
      scheduler, engine: what the commands are about.
      send: takes answers and cache events, on their way to the front end.
    """

    def __init__(self, scheduler: Scheduler, engine: StepEngine, send: Callable[[News], None]) -> None:
        self._scheduler = scheduler
        self._engine = engine
        self._send = send
        self._journal: CacheJournal | None = None
        self._profile: str | None = None  # the folder, while one is recorded
        self._profile_steps: int | None = None  # steps to collect until it ends by itself

    def obey(self, command: Command) -> None:
        """Does what `command` says, and answers it."""
        match command:
            case Ping(number):
                self._send(Answer(number, True))
            case FlushCache(number):
                answer = self._flush(number)
                self.tell_cache_events()  # whoever reads the answer finds them told
                self._send(answer)
            case StartProfile(number, folder, num_steps):
                self._send(self._start_profile(number, folder, num_steps))
            case StopProfile(number):
                self._send(self._stop_profile(number))
            case WatchCache(number):
                self._watch(number)

    def step_collected(self) -> None:
        """Ends a profile that has seen its steps."""
        if self._profile_steps is None:
            return
        self._profile_steps -= 1
        if self._profile_steps == 0:
            answer = self._stop_profile(number=0)
            logger.log(logging.INFO if answer.ok else logging.ERROR, "profile: %s", answer.text)

    def tell_cache_events(self) -> None:
        """Sends what has happened to the prefix cache since the last call, if somebody watches."""
        events = self._journal.take() if self._journal is not None else []
        if events:
            self._send(CacheEvents(events))

    def _watch(self, number: int) -> None:
        if self._journal is None:
            self._journal = CacheJournal(self._scheduler.cache)
        self.tell_cache_events()  # what follows holds them already
        self._send(CacheEvents(self._journal.snapshot(), number))

    def _flush(self, number: int) -> Answer:
        waiting, running = self._scheduler.num_waiting, self._scheduler.num_running
        if waiting or running:
            text = f"{waiting} requests wait and {running} run: the cache is flushed only when there are none"
            return Answer(number, False, text)
        self._scheduler.flush_cache()
        return Answer(number, True)

    def _start_profile(self, number: int, folder: str, num_steps: int | None) -> Answer:
        if self._profile is not None:
            return Answer(number, False, f"a profile is being recorded to {self._profile}: stop it first")
        if num_steps is not None and num_steps < 1:
            return Answer(number, False, f"num_steps is {num_steps}, but must be 1 and more")
        try:
            self._engine.start_profile(folder)
        except (OSError, RuntimeError, ValueError) as error:
            return Answer(number, False, f"the profile can't be recorded to {folder!r}: {error}")
        self._profile = folder
        if num_steps is not None:
            self._profile_steps = num_steps + self._scheduler.num_in_flight  # those began before
        return Answer(number, True, folder)

    def _stop_profile(self, number: int) -> Answer:
        if self._profile is None:
            return Answer(number, False, "no profile is being recorded")
        folder, self._profile_steps = self._profile, None
        try:
            self._engine.stop_profile()
        except (OSError, RuntimeError) as error:
            return Answer(number, False, f"the profile can't be written to {folder!r}: {error}; mend that, stop again")
        self._profile = None
        return Answer(number, True, folder)
