"""A collector of any kind gets what steps compute of its request: part by part, and nothing of a lease that ended."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from jaxsgl.batch.buckets import BucketSet, Capacity
from jaxsgl.batch.outputs import HostOutputs
from jaxsgl.config.engine import SchedulingConfig
from jaxsgl.messages.orders import Abort
from jaxsgl.messages.replies import Reply
from jaxsgl.requests.outputs import Pooled
from jaxsgl.requests.request import FinishReason, Request
from jaxsgl.scheduler import arrivals
from jaxsgl.scheduler.loop import run_loop
from jaxsgl.scheduler.outputs import OutputCollector, StepPart
from jaxsgl.scheduler.req import Req
from jaxsgl.scheduler.state import SchedulerState
from jaxsgl.testing.engine import FakeEngine, RetractEvery, ScriptedMailbox
from tests.checked import CheckedScheduler
from tests.scheduler.serving import Script, capacity, expected, last_reply, request

PROMPT = list(range(40))
SIZES = capacity(max_extend_tokens=16)


class Probe(OutputCollector):
    """Notes what it is called with; None stands for a restart."""

    computes_prompt = True
    single_steps = True

    def __init__(self) -> None:
        self.parts: list[StepPart | None] = []
        self.replies: list[tuple[int, ...]] = []

    def take(self, outputs: HostOutputs, part: StepPart) -> None:
        self.parts.append(part)

    def add_to(self, reply: Reply) -> Reply:
        self.replies.append(reply.token_ids)
        return reply

    def restart(self) -> None:
        self.parts.append(None)

    @property
    def lives(self) -> list[list[StepPart]]:
        """The parts between restarts."""
        lives: list[list[StepPart]] = [[]]
        for part in self.parts:
            if part is None:
                lives.append([])
            else:
                lives[-1].append(part)
        return lives


class OnlyPrompt(Probe):
    """Ends its request, with the number of prompt tokens that it got."""

    ends_request = True

    def add_to(self, reply: Reply) -> Reply:
        super().add_to(reply)
        count = sum(part.num_tokens for part in self.lives[-1])
        return Reply(reply.request_id, reply.token_ids, reply.finish_reason, pooled=Pooled(b"", (float(count),)))


class Failing(Probe):
    """Fails with the second part."""

    def take(self, outputs: HostOutputs, part: StepPart) -> None:
        super().take(outputs, part)
        if len(self.parts) == 2:
            raise RuntimeError("no more")


def serve(
    probe: OutputCollector,
    monkeypatch: pytest.MonkeyPatch,
    script: Script,
    retract_every: int = 0,
    sizes: Capacity = SIZES,
    decode_steps: int = 1,
) -> tuple[ScriptedMailbox, CheckedScheduler]:
    """Serves `script`, in which `probe` collects for the request "a"."""

    def collectors_of(request: Request, index: int, spec: object) -> tuple[OutputCollector, ...]:
        return (probe,) if request.request_id == "a" else ()

    monkeypatch.setattr(arrivals, "collectors_of", collectors_of)
    also = RetractEvery(retract_every) if retract_every else None
    config = SchedulingConfig(enable_mixed_chunk=True)
    buckets = BucketSet.derive(sizes, decode_steps=decode_steps)
    scheduler = CheckedScheduler(sizes, buckets, (), config, retract_also=also)
    mailbox = ScriptedMailbox(script)
    run_loop(scheduler, FakeEngine(sizes), mailbox, depth=1, check_every_step=True)
    return mailbox, scheduler


def check_order(parts: Sequence[StepPart], num_tokens: int) -> None:
    """Parts follow one another from the first token on; once all known tokens are computed, each is a last one."""
    starts = [part.start for part in parts]
    assert starts == [sum(part.num_tokens for part in parts[:i]) for i in range(len(parts))]
    assert starts[-1] + parts[-1].num_tokens == num_tokens
    first_last = next(i for i, part in enumerate(parts) if part.is_last)
    assert all(part.is_last and part.num_tokens == 1 for part in parts[first_last + 1 :])


def test_parts_come_in_order_beside_other_requests_and_one_reply_follows_each_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    probe = Probe()
    script: Script = [[request("first", PROMPT, 9)], [], [request("a", PROMPT, 6), request("other", PROMPT[:9], 6)]]
    mailbox, _ = serve(probe, monkeypatch, script, decode_steps=4)
    (parts,) = probe.lives
    check_order(parts, 40 + 6 - 1)
    assert len([part for part in parts if part.start < 40]) > 1, "the prompt was not cut"
    assert last_reply(mailbox, "a").cached_tokens == 0, "a cached token has no part"
    assert probe.replies == [(token,) for token in expected(PROMPT, 6)] == [(t,) for t in mailbox.output_ids("a")]
    assert mailbox.output_ids("first") == expected(PROMPT, 9)


def test_a_retraction_starts_over_and_parts_in_flight_never_come(monkeypatch: pytest.MonkeyPatch) -> None:
    probe = Probe()
    mailbox, scheduler = serve(probe, monkeypatch, [[request("a", PROMPT, 12)]], retract_every=7)
    assert len(probe.lives) == 1 + scheduler.state.totals.retractions > 1
    for parts in probe.lives[:-1]:
        if parts:
            check_order(parts, parts[-1].start + parts[-1].num_tokens)
    check_order(probe.lives[-1], 40 + 12 - 1)
    assert mailbox.output_ids("a") == expected(PROMPT, 12)
    assert sum(map(len, probe.replies)) == 12, "a token has come with two replies"


def test_a_collector_may_end_the_request_with_its_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    probe = OnlyPrompt()
    mailbox, scheduler = serve(probe, monkeypatch, [[request("a", PROMPT, 6), request("b", PROMPT, 3)]])
    (reply,) = [reply for reply in mailbox.replies if reply.request_id == "a"]
    assert (reply.token_ids, reply.finish_reason) == ((), FinishReason.LENGTH)
    assert reply.pooled is not None and reply.pooled.logits == (40.0,)
    assert mailbox.output_ids("b") == expected(PROMPT, 3)
    assert scheduler.state.totals.output_tokens == 3


def test_nothing_comes_after_an_abort(monkeypatch: pytest.MonkeyPatch) -> None:
    probe = Probe()
    script: Script = [[request("a", PROMPT, 50)], [], [], [], [], [Abort("a")], [], [request("b", PROMPT, 3)]]
    mailbox, _ = serve(probe, monkeypatch, script)
    assert last_reply(mailbox, "a").finish_reason is FinishReason.ABORT
    (parts,) = probe.lives
    check_order(parts, parts[-1].start + parts[-1].num_tokens)
    assert len(probe.replies) == len(mailbox.output_ids("a")) == sum(part.is_last for part in parts) < 50


def test_a_collector_that_fails_ends_its_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    probe = Failing()
    mailbox, scheduler = serve(probe, monkeypatch, [[request("a", PROMPT, 6), request("b", PROMPT[:9], 6)]])
    assert len(probe.parts) == 2 and not mailbox.output_ids("a")
    assert last_reply(mailbox, "a").refusal is not None
    assert mailbox.output_ids("b") == expected(PROMPT[:9], 6)
    assert scheduler.state.totals.failed_requests == 1


def test_a_request_that_asks_for_tokens_alone_has_no_collectors() -> None:
    found: list[tuple[OutputCollector, ...]] = []

    def note(view: SchedulerState) -> list[Req]:
        found.extend(req.outputs for req in view.requests.all())
        return []

    scheduler = CheckedScheduler(SIZES, BucketSet.derive(SIZES), (), retract_also=note)
    run_loop(scheduler, FakeEngine(SIZES), ScriptedMailbox([[request("a", PROMPT, 6)]]), depth=1)
    assert found and all(outputs == () for outputs in found)
