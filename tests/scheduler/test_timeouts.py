"""How long a request may wait for its admission, and how long it may run."""

from __future__ import annotations

import math
from collections import deque

import pytest

from jaxsgl.batch.buckets import BucketSet
from jaxsgl.config.engine import SchedulingConfig
from jaxsgl.errors import ConfigError
from jaxsgl.messages.orders import Abort, PauseGeneration, PauseMode, ToEngine
from jaxsgl.messages.replies import RefusalKind, Reply
from jaxsgl.requests.request import FinishReason, Request, SamplingParams
from jaxsgl.scheduler.loop import run_loop
from jaxsgl.scheduler.scheduler import Scheduler
from jaxsgl.testing.engine import FakeEngine, FakeHandle, ScriptedMailbox
from tests.scheduler.serving import capacity, expected, request

PROMPT = list(range(40))


class Served:
    """A scheduler, its engine and a clock that only the test moves on."""

    def __init__(self, rows: int = 1, **config: object) -> None:
        sizes = capacity(rows=rows)
        self.now_s = 0.0
        self.scheduler = Scheduler(
            sizes,
            BucketSet.derive(sizes),
            (),
            SchedulingConfig(**config),  # type: ignore[arg-type]
            clock=lambda: self.now_s,
        )
        self.engine = FakeEngine(sizes)
        self.in_flight: deque[FakeHandle] = deque()
        self.replies: list[Reply] = []

    def turns(self, count: int) -> None:
        for _ in range(count):
            inputs = self.scheduler.launch()
            if inputs is not None:
                self.in_flight.append(self.engine.submit(inputs))
            if self.in_flight and (inputs is None or len(self.in_flight) > 1):
                step = self.in_flight.popleft()
                self.scheduler.collect(step.tokens(), step.outputs())
            self.scheduler.check()
            self.replies += self.scheduler.take_replies()

    def finish(self) -> None:
        while not self.scheduler.is_idle:
            self.turns(1)

    def output(self, request_id: str) -> list[int]:
        return [token for reply in self.replies if reply.request_id == request_id for token in reply.token_ids]

    def refusals(self) -> dict[str, RefusalKind]:
        return {reply.request_id: reply.refusal.kind for reply in self.replies if reply.refusal is not None}


def test_requests_that_wait_too_long_are_refused_and_the_rest_go_on() -> None:
    served = Served(queue_timeout_s=10.0)
    served.scheduler.receive([request("runs", PROMPT, 60), request("waits", PROMPT, 5)])
    served.turns(3)
    served.now_s = 5.0
    served.scheduler.receive([request("later", PROMPT, 5)])
    served.now_s = 10.0
    served.turns(1)
    assert served.refusals() == {}, "not a moment too soon"
    served.now_s = 10.1
    served.turns(1)
    assert served.refusals() == {"waits": RefusalKind.WAITED}
    served.finish()
    (refused,) = (reply for reply in served.replies if reply.refusal is not None)
    assert refused.refusal is not None
    assert refused.refusal.text == (
        "the request waited for admission longer than 10 s (--queue-timeout-s): try again later"
    )
    assert served.output("runs") == expected(PROMPT, 60)
    assert served.output("later") == expected(PROMPT, 5)


@pytest.mark.parametrize("turns", range(1, 6))
def test_a_request_that_runs_too_long_ends_and_frees_its_pages(turns: int) -> None:
    """This holds with a step in flight or without."""
    served = Served(running_timeout_s=10.0)
    served.scheduler.receive([request("long", PROMPT, 60), request("next", [7, 8, 9], 5)])
    served.turns(turns)
    served.now_s = 10.1
    served.turns(1)
    assert served.refusals() == {"long": RefusalKind.RAN}
    served.finish()
    assert served.output("long") == expected(PROMPT, 60)[: len(served.output("long"))]
    assert served.output("next") == expected([7, 8, 9], 5), "its time began with its admission"
    assert served.scheduler.load(0).used_tokens == 0


def test_time_in_the_queue_is_not_running_time() -> None:
    served = Served(running_timeout_s=10.0)
    served.scheduler.receive([request("first", PROMPT, 20), request("second", PROMPT, 20)])
    served.turns(3)
    served.now_s = 9.0
    served.finish()
    assert served.refusals() == {}


def test_time_after_a_retraction_is_running_time() -> None:
    served = Served(queue_timeout_s=1.0, running_timeout_s=10.0)
    served.scheduler.receive([request("a", PROMPT, 20)])
    served.turns(4)
    served.scheduler.pause()
    served.turns(2)
    served.scheduler.retract_all()
    served.now_s = 5.0
    served.turns(1)
    assert served.refusals() == {}, "it has been admitted once, so it doesn't wait for its admission"
    served.now_s = 10.1
    served.turns(1)
    assert served.refusals() == {"a": RefusalKind.RAN}, "paused or not"


class Patient(ScriptedMailbox):
    """Has a clock, which moves on by as long as the loop waits after the script."""

    now_s = 0.0

    def receive(self, wait_s: float) -> list[ToEngine]:
        if self._script or wait_s in (0.0, math.inf):
            return super().receive(wait_s)
        self.now_s += wait_s + 0.001
        return []


def test_the_loop_of_a_paused_engine_wakes_when_a_request_is_due() -> None:
    script: list[list[ToEngine]] = [[request("runs", PROMPT, 60)], [], [PauseGeneration(1, PauseMode.IN_PLACE)]]
    mailbox = Patient([*script, [request("waits", PROMPT)]])
    sizes, config = capacity(), SchedulingConfig(queue_timeout_s=5.0, running_timeout_s=10.0)
    scheduler = Scheduler(sizes, BucketSet.derive(sizes), (), config, clock=lambda: mailbox.now_s)
    run_loop(scheduler, FakeEngine(sizes), mailbox, 1)
    refused = [(reply.request_id, reply.refusal.kind) for reply in mailbox.replies if reply.refusal is not None]
    assert refused == [("waits", RefusalKind.WAITED), ("runs", RefusalKind.RAN)]
    assert mailbox.now_s == pytest.approx(10.0, abs=0.01), "not later than it has to"


def test_a_request_of_several_samples_runs_from_its_first_and_ends_as_one() -> None:
    served = Served(queue_timeout_s=3.0, running_timeout_s=10.0)
    several = Request("n", PROMPT, SamplingParams(temperature=0.0, max_tokens=4, n=3))
    served.scheduler.receive([several])
    while served.scheduler.load(0).totals.output_tokens < 6:  # one row: sample 0 has ended, 1 runs, 2 waits
        served.turns(1)
    ended = [reply.index for reply in served.replies if reply.finish_reason is not None]
    served.now_s = 9.0
    served.turns(1)
    assert served.refusals() == {}, "a sample that waits while others run is not overdue"
    served.now_s = 10.1
    served.turns(1)
    assert ended == [0]
    assert served.refusals() == {"n": RefusalKind.RAN}
    assert served.scheduler.num_waiting == served.scheduler.num_running == 0


def test_a_request_that_ended_in_time_is_never_overdue() -> None:
    served = Served(rows=2, queue_timeout_s=5.0, running_timeout_s=5.0)
    served.scheduler.receive([request("a", PROMPT, 3), request("b", PROMPT, 30), request("c", PROMPT, 3)])
    served.turns(2)
    served.scheduler.receive([Abort("c"), Abort("b")])
    served.finish()
    served.now_s = 100.0
    served.turns(1)
    assert served.refusals() == {}
    assert [reply.finish_reason for reply in served.replies].count(FinishReason.ABORT) == 2


def test_without_timeouts_no_request_is_overdue() -> None:
    served = Served()
    served.scheduler.receive([request("a", PROMPT, 9), request("b", PROMPT, 9)])
    served.turns(2)
    served.now_s = 1e9
    served.finish()
    assert served.output("b") == expected(PROMPT, 9)


@pytest.mark.parametrize("name", ["queue_timeout_s", "running_timeout_s"])
def test_a_timeout_must_be_positive(name: str) -> None:
    with pytest.raises(ConfigError, match="--" + name.replace("_", "-") + " is 0.0"):
        SchedulingConfig(**{name: 0.0})  # type: ignore[arg-type]
