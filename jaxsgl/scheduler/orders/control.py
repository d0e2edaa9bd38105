"""`Control`: what operators order: ping, pause, flush, profile, watch the cache, change the weights.

`handle(command)` does at once what can be done at once, and files the rest in one list of orders, normally empty.
`after_turn` advances those orders and returns the news of this turn: one answer for each command that is done. loop.py
calls it only while there is something to do, so a turn without orders passes none of this code. A command that fails
is answered with the reason; the loop goes on.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Protocol

import msgspec

from jaxsgl.batch.inputs import StepInputs
from jaxsgl.messages.orders import (
    Answer,
    Command,
    ContinueGeneration,
    DumpState,
    FlushCache,
    ListAdapters,
    LoadAdapter,
    News,
    PauseGeneration,
    PauseMode,
    Ping,
    ReleaseMemory,
    ResumeMemory,
    SetWeightVersion,
    StartProfile,
    StopProfile,
    UnloadAdapter,
    UpdateWeights,
    WatchCache,
    WatchEngine,
    Withdraw,
)
from jaxsgl.messages.replies import CacheEvents
from jaxsgl.scheduler.orders.adapters import AdapterOrders
from jaxsgl.scheduler.orders.inspection import LeakCheck, dump_scheduler
from jaxsgl.scheduler.orders.journal import CacheJournal
from jaxsgl.scheduler.orders.profiling import Profiling
from jaxsgl.scheduler.orders.view import EngineWatch
from jaxsgl.scheduler.orders.weights import WeightOrders
from jaxsgl.scheduler.served_engine import ServedEngine
from jaxsgl.scheduler.serving import AnyScheduler, Serving


class Order(Protocol):
    """An order that takes some turns of the loop."""

    def after_turn(self, collected: bool) -> bool:
        """Advances it after a turn, in which a step was `collected` or not; False once it is done."""
        ...


class Control:
    """Carries out commands between two steps.

    Args:
      serving, engine: what the commands are about.
      leak_check: looks for leaks.
      clock: gives seconds.
      loader: reads weights and adapters while steps run; threads do if it is None. With one that reads at once, turns
        repeat exactly.

    Attributes:
      is_active: whether `after_turn` has something to do.
      is_polling: whether `after_turn` will have news although no message comes, so that the loop must not block.
    """

    def __init__(
        self,
        serving: Serving,
        engine: ServedEngine,
        leak_check: LeakCheck,
        clock: Callable[[], float] = time.monotonic,
        loader: Executor | None = None,
    ) -> None:
        self.is_active = False
        self.is_polling = False
        self._serving, self._scheduler = serving, serving.scheduler
        self._leak_check = leak_check
        self._clock = clock
        self._orders: list[Order] = []
        self._news: list[News] = []
        self._journals: tuple[CacheJournal, ...] = ()  # of each rank, once the cache is watched
        self._profiling = Profiling(engine, self._answer, lambda: serving.is_idle, clock)
        self._engine_watch = EngineWatch(self._scheduler, clock)
        self._weights = WeightOrders(serving, engine.weight_store, self._answer, loader)
        self._adapters = AdapterOrders(serving, engine.adapters, self._answer, loader)

    def handle(self, command: Command | Withdraw) -> None:
        """Does what `command` says, or begins it. Its answer comes with `after_turn`, of this turn or a later one."""
        self.is_active = True
        match command:
            case Ping(number):
                self._answer(Answer(number, True))
            case FlushCache():
                self._begin(_Flush(command, self._scheduler, self._clock, self._answer))
            case PauseGeneration():
                self._pause(command)
            case ContinueGeneration(number):
                self._resume(number)
            case DumpState(number, check):
                self._answer(Answer(number, True, self._dump(check)))
            case WatchEngine(number):
                self._answer(Answer(number, True, msgspec.json.encode(self._engine_watch.look(command)).decode()))
                if self._engine_watch not in self._orders:
                    self._orders.append(self._engine_watch)
            case StartProfile():
                started = self._profiling.start(command, self._scheduler.steps_in_flight)
                if started and self._profiling not in self._orders:
                    self._orders.append(self._profiling)
            case StopProfile(number):
                self._profiling.stop(number)
            case WatchCache(number):
                self._watch(number)
            case UpdateWeights() | SetWeightVersion() | ReleaseMemory() | ResumeMemory():
                self._weights.handle(command)
                if self._weights not in self._orders:
                    self._orders.append(self._weights)
            case LoadAdapter() | UnloadAdapter() | ListAdapters():
                self._adapters.handle(command)
                if self._adapters not in self._orders:
                    self._orders.append(self._adapters)
            case Withdraw(number):
                self._weights.withdraw(number)
                self._adapters.withdraw(number)
                self._orders = [
                    order for order in self._orders if not (isinstance(order, _Flush) and order.number == number)
                ]

    def before_step(self, inputs: StepInputs) -> None:
        """A step is about to be launched; the loop calls it only while there is something to do."""
        stage = "decode" if inputs.bucket.kind in ("decode", "verify") else "extend"
        self._profiling.before_step(stage, self._scheduler.steps_in_flight)
        self._engine_watch.before_step(inputs)

    def after_turn(self, collected: bool) -> list[News]:
        """Advances all orders after a turn of the loop, in which a step was `collected` or not; returns the news."""
        self._orders = [order for order in self._orders if order.after_turn(collected)]
        self._report_cache_events()
        self.is_active = bool(self._orders or self._journals)
        self.is_polling = self._profiling.is_writing or self._weights.is_active or self._adapters.is_active
        news, self._news = self._news, []
        return news

    def _answer(self, answer: Answer) -> None:
        """Files an answer after the cache events that led to it."""
        self._report_cache_events()
        self._news.append(answer)

    def _begin(self, order: Order) -> None:
        if order.after_turn(False):
            self._orders.append(order)

    def _pause(self, command: PauseGeneration) -> None:
        """Launches nothing from now on, so that turns collect the steps in flight. A second pause may follow."""
        if command.mode is PauseMode.ABORT:
            self._serving.abort_all()
        self._scheduler.pause()
        self._orders.insert(0, _Pause(command, self._scheduler, self._answer))  # before flushes that wait for it

    def _resume(self, number: int) -> None:
        """Ends operators' pauses, if there are any. A pause of the same turn has failed."""
        for order in [order for order in self._orders if isinstance(order, _Pause)]:
            self._orders.remove(order)
            text = "generation was continued before the step in flight was read"
            self._answer(Answer(order.command.number, False, text))
        self._scheduler.resume()
        self._answer(Answer(number, True, self._weights.why_paused))

    def _dump(self, check: bool) -> str:
        scheduler = self._scheduler
        state = dump_scheduler(scheduler)
        if check:
            state["leaks"] = self._leak_check.run()
        state["leaks_total"] = self._leak_check.num_leaks
        return msgspec.json.encode(state).decode()

    def _watch(self, number: int) -> None:
        if not self._journals:
            self._journals = tuple(CacheJournal(rank.cache) for rank in self._scheduler.ranks)
        self._report_cache_events()  # the snapshots hold them already
        for rank, journal in enumerate(self._journals):
            self._news.append(CacheEvents(journal.snapshot(), number, rank))

    def _report_cache_events(self) -> None:
        for rank, journal in enumerate(self._journals):
            events = journal.take()
            if events:
                self._news.append(CacheEvents(events, rank=rank))


class _Pause:
    """A pause of generation, as trainers order it to change the weights; complete once no step is in flight."""

    def __init__(self, command: PauseGeneration, scheduler: AnyScheduler, answer: Callable[[Answer], None]) -> None:
        self.command = command
        self._scheduler = scheduler
        self._answer = answer

    def after_turn(self, collected: bool) -> bool:
        """Completes the pause once nothing is in flight: each turn launches nothing and collects a step."""
        if self._scheduler.steps_in_flight:
            return True
        if self.command.mode is PauseMode.RETRACT:
            self._scheduler.retract_all()
        self._answer(Answer(self.command.number, True))
        return False


class _Flush:
    """A flush of the prefix cache: at once if no request uses it, or when the last one has ended.

    New requests are admitted meanwhile; to drain a server, its operator keeps them away.
    """

    def __init__(
        self,
        command: FlushCache,
        scheduler: AnyScheduler,
        clock: Callable[[], float],
        answer: Callable[[Answer], None],
    ) -> None:
        self.number = command.number
        self._deadline_s = clock() + command.timeout_s
        self._scheduler = scheduler
        self._clock = clock
        self._answer = answer

    def after_turn(self, collected: bool) -> bool:
        """Flushes if nothing is in the way; gives up at the deadline, or if a pause keeps requests from ending."""
        obstacle = self._obstacle()
        is_pausing = bool(self._scheduler.steps_in_flight)  # the pause is to give pages back
        waits = is_pausing if self._scheduler.is_paused else self._clock() < self._deadline_s
        if obstacle is not None and waits:
            return True
        if obstacle is None:
            self._scheduler.flush_cache()
        self._answer(Answer(self.number, obstacle is None, obstacle or ""))
        return False

    def _obstacle(self) -> str | None:
        """Why it can't flush now, or None. Waiting requests count, unless paused: the next step gives them pages."""
        waiting, running = self._scheduler.num_waiting, self._scheduler.num_running
        if self._scheduler.is_paused:
            if not running:
                return None
            return f"generation is paused, and {running} requests hold pages: pause in the mode retract or abort"
        if not (waiting or running):
            return None
        return f"{waiting} requests wait and {running} run: the cache is flushed only when there are none"
