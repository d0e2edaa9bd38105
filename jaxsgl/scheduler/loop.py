"""The serving loop: the whole life of the engine process on one screen. Blocks only when there is nothing to do.

Overlap is call order: step N + 1 is launched before the tokens of step N are read, so the host works while the device
computes. Without overlap the same body reads every step's tokens at once. Grammars need the tokens of step N for the
choice of those of step N + 1: the forward program of N + 1 is launched, then N is read, then the masks follow. While
requests speculate, N is read before N + 1 is launched, since drafts follow its tokens.
"""

from __future__ import annotations

from collections import deque
from typing import Protocol, cast

from jaxsgl.batch.engine_api import MaskedHandle, StepHandle
from jaxsgl.messages.orders import Abort, News, Shutdown, ToEngine
from jaxsgl.messages.replies import Replies
from jaxsgl.requests.request import Request
from jaxsgl.scheduler.orders.control import Control
from jaxsgl.scheduler.orders.inspection import LeakCheck
from jaxsgl.scheduler.served_engine import ServedEngine
from jaxsgl.scheduler.serving import AnyScheduler, Serving


class Mailbox(Protocol):
    """The loop's only contact with the outside."""

    def receive(self, wait_s: float) -> list[ToEngine]:
        """All messages that have come; waits up to `wait_s` seconds for at least one, 0: not at all, or infinity."""
        ...

    def send(self, news: News) -> None:
        """Sends the replies of one turn of the loop, or the answer to a command."""
        ...


def run_loop(
    serving: Serving, engine: ServedEngine, mailbox: Mailbox, depth: int, check_every_step: bool = False
) -> None:
    """Serves until a `Shutdown` message comes: gives `serving` messages, and runs the steps of its scheduler.

    `depth` steps may be in flight unread when a turn ends: 0 without overlap, 1 with it. With `check_every_step` a leak
    raises AssertionError, for tests.
    """
    scheduler = serving.scheduler
    ops = scheduler.ops
    in_flight: deque[StepHandle] = deque()
    leak_check = LeakCheck(scheduler)
    weights, control = engine.weight_store, Control(serving, engine, leak_check)
    while True:
        for message in mailbox.receive(serving.due_in_s if serving.is_idle and not control.is_polling else 0.0):
            if isinstance(message, Shutdown):
                return
            elif isinstance(message, Request | Abort):
                serving.receive([message])
            else:
                control.handle(message)
        reads_first = bool(in_flight) and scheduler.reads_first
        if reads_first:
            _collect(scheduler, in_flight)
        inputs = serving.launch()
        if ops.queued:
            for number, op in ops.take():  # before the step, which may write to the pages that they free
                engine.apply(op, number)
        if inputs is not None:
            if control.is_active:
                control.before_step(inputs)
            in_flight.append(engine.submit(inputs))
        collects = bool(in_flight) and (inputs is None or len(in_flight) > depth)
        newest_only = len(in_flight) == 1
        if collects and not newest_only:
            _collect(scheduler, in_flight)
        if inputs is not None and inputs.masked:  # while its forward program runs, now that all before it are read
            cast(MaskedHandle, in_flight[-1]).choose(scheduler.masks(inputs.bucket.num_choices))
        if collects and newest_only:
            _collect(scheduler, in_flight)
        if ops.waiting:
            ops.finished(engine.poll(wait=not (collects or reads_first or in_flight)))
        news = control.after_turn(collects or reads_first) if control.is_active else []
        replies = serving.take_replies()  # first, as the load of an idle scheduler is exact
        mailbox.send(Replies(replies, serving.load(engine.recompiles, leak_check.num_leaks, weights.weight_version)))
        for answer in news:  # after the load, so that an answer never comes before the load that it changed
            mailbox.send(answer)
        if check_every_step:
            scheduler.check()
        if serving.is_idle:
            leak_check.when_idle()


def _collect(scheduler: AnyScheduler, in_flight: deque[StepHandle]) -> None:
    step = in_flight.popleft()
    scheduler.collect(step.tokens(), step.outputs(), step.drafts)
