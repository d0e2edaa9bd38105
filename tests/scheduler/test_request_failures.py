"""A fault of ours in the work for one request ends that request; all others get their tokens, and no page is lost."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import pytest

from jaxsgl.batch.buckets import BucketSet
from jaxsgl.batch.build import BatchBuilder, Work
from jaxsgl.batch.inputs import StepInputs
from jaxsgl.cache.manager import CacheManager
from jaxsgl.cache.pages import IntArray
from jaxsgl.config.engine import SchedulingConfig
from jaxsgl.messages.replies import RefusalKind
from jaxsgl.requests.request import Request, SamplingParams
from jaxsgl.scheduler.loop import run_loop
from jaxsgl.scheduler.outputs import PromptLogprobs
from jaxsgl.scheduler.policy import Policy
from jaxsgl.scheduler.req import Req
from jaxsgl.testing.engine import FakeEngine, ScriptedMailbox
from tests.checked import CheckedScheduler
from tests.scheduler.serving import Script, capacity, expected, request

POISON = "poison"
POISON_PROMPT = list(range(700, 745))  # three chunks; longer than any other sequence gets
POISON_TOKEN = 720
OTHERS = {f"r{i}": list(range(20 * i, 20 * i + 9 + 7 * i)) for i in range(4)}
both_loops = pytest.mark.parametrize("overlap", [True, False])


class Planted(Exception):
    """The fault."""


class FaultyBuilder(BatchBuilder):
    """Fails for a batch that computes the poisoned token, or decodes behind the poisoned prompt."""

    def extend(self, works: Sequence[Work]) -> StepInputs:
        if any(POISON_TOKEN in work.token_ids for work in works):
            raise Planted
        return super().extend(works)


class FaultyDecodeBuilder(BatchBuilder):
    """Fails for a decode step that holds a sequence of the poisoned request's length."""

    def decode(
        self, rows: IntArray, positions: IntArray, steps: IntArray | None = None, token_ids: IntArray | None = None
    ) -> StepInputs:
        if len(POISON_PROMPT) + 1 in positions:
            raise Planted
        return super().decode(rows, positions, steps, token_ids)


def failing_method(owner: type, name: str, of: Callable[..., Req | Request | str], when: Callable[[Any], bool]) -> Any:
    """`owner.name`, but it raises for the poisoned request."""
    plain = getattr(owner, name)

    def call(self: Any, *args: Any, **named: Any) -> Any:
        victim = of(self, *args)
        request_id = victim if isinstance(victim, str) else victim.request_id
        if request_id.startswith(POISON) and when(victim):
            raise Planted
        return plain(self, *args, **named) if callable(plain) else plain.fget(self)

    return call if callable(plain) else property(call)


def always(victim: Any) -> bool:
    return True


# Where the fault is: what fails, and for which request a call of it works.
STAGES: dict[str, tuple[type, str, Callable[..., Any], Callable[[Any], bool]]] = {
    "arrival": (Req, "__init__", lambda self, request, *rest: request, always),
    "second sample's arrival": (
        Req, "__init__", lambda self, request, *rest: request.request_id if len(rest) > 3 else "", always
    ),
    "plan": (Req, "matchable_ids", lambda self: self, always),
    "admission": (CacheManager, "acquire", lambda self, match, owner, *_: owner, always),
    "first chunk": (Req, "rope_positions", lambda self, *_: self, always),
    "second chunk": (Req, "rope_positions", lambda self, *_: self, lambda req: req.kv_len > 0),
    "last chunk": (Req, "edit_setup", lambda self, *_: self, always),
    "first token": (Req, "take", lambda self, *_: self, always),
    "third token": (Req, "take", lambda self, *_: self, lambda req: len(req.output_ids) == 2),
    "what is asked of a chunk": (PromptLogprobs, "ask", lambda *_: POISON, always),
    "scores of the prompt": (PromptLogprobs, "take", lambda *_: POISON, always),
    "reply with the scores of the prompt": (PromptLogprobs, "add_to", lambda *_: POISON, always),
    "what the end shares": (Req, "stored_ids", lambda self: self, lambda req: len(req.output_ids) == 6),
}  # fmt: skip


def run(
    overlap: bool, config: SchedulingConfig = SchedulingConfig(), make_builder: Any = BatchBuilder, n: int = 2
) -> tuple[ScriptedMailbox, CheckedScheduler]:
    sizes = capacity(max_extend_tokens=16)
    scheduler = CheckedScheduler(sizes, BucketSet.derive(sizes), (), config, make_builder=make_builder)
    scored = SamplingParams(temperature=0.0, max_tokens=6, n=n, prompt_logprobs=1, min_tokens=1, logprobs=0)
    script: Script = [
        [request("r0", OTHERS["r0"], 12), request("r1", OTHERS["r1"], 12)],
        [],
        [Request(POISON, POISON_PROMPT, scored), request("r2", OTHERS["r2"], 12)],
        [],
        [request("r3", OTHERS["r3"], 12)],
    ]
    mailbox = ScriptedMailbox(script)
    run_loop(scheduler, FakeEngine(sizes), mailbox, int(overlap), check_every_step=True)
    return mailbox, scheduler


def check(mailbox: ScriptedMailbox, scheduler: CheckedScheduler) -> None:
    of_poison = [reply for reply in mailbox.replies if reply.request_id == POISON]
    refusals = [reply.refusal for reply in of_poison if reply.refusal is not None]
    assert [refusal.kind for refusal in refusals] == [RefusalKind.FAILED]
    assert "Planted" in refusals[0].text
    assert of_poison[-1].refusal is not None, "nothing comes after it"
    for key, prompt in OTHERS.items():
        assert mailbox.output_ids(key) == expected(prompt, 12)
    assert mailbox.loads[-1].totals.failed_requests == 1
    assert scheduler.is_idle
    assert not scheduler.leaks()
    assert scheduler.cache.num_available == scheduler.cache.num_pages - 1


@both_loops
@pytest.mark.parametrize("stage", list(STAGES))
def test_a_fault_at_any_stage_ends_its_request_alone(
    stage: str, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, name, *_ = STAGES[stage]
    monkeypatch.setattr(owner, name, failing_method(*STAGES[stage]))
    check(*run(overlap))


@both_loops
@pytest.mark.parametrize("policy", ["lpm", "dfs-weight"])
def test_a_fault_in_the_order_of_the_queue_ends_its_request_alone(
    policy: str, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Req, "matchable_ids", failing_method(*STAGES["plan"]))
    check(*run(overlap, SchedulingConfig(schedule_policy=policy)))


@both_loops
@pytest.mark.parametrize("mixed", [False, True])
def test_a_fault_in_the_building_of_a_batch_ends_its_request_alone(mixed: bool, overlap: bool) -> None:
    check(*run(overlap, SchedulingConfig(enable_mixed_chunk=mixed), FaultyBuilder))


@both_loops
def test_a_fault_in_the_building_of_a_decode_step_ends_its_request_alone(overlap: bool) -> None:
    check(*run(overlap, make_builder=FaultyDecodeBuilder, n=1))


@both_loops
def test_a_batch_that_is_dropped_has_told_the_device_nothing(overlap: bool) -> None:
    """The heir's cached pages must reach the device with the batch that is launched in its place."""
    sizes, prefix = capacity(max_extend_tokens=16), list(range(40, 60))
    scheduler = CheckedScheduler(sizes, BucketSet.derive(sizes), (), make_builder=FaultyBuilder)
    poisoned = request(POISON, [POISON_TOKEN, 1], 5)
    heir, other = request("heir", [*prefix, 1], 6), request("other", OTHERS["r0"], 12)  # which takes the first's row
    script: Script = [[request("first", prefix, 3)], *[[]] * 8, [other], [], [heir, poisoned]]
    mailbox = ScriptedMailbox(script)
    run_loop(scheduler, FakeEngine(sizes), mailbox, int(overlap), check_every_step=True)
    assert mailbox.loads[-1].totals.failed_requests == 1
    assert mailbox.loads[-1].totals.cached_prompt_tokens >= 16
    assert mailbox.output_ids("heir") == expected([*prefix, 1], 6)


def test_a_fault_that_no_request_is_to_blame_for_ends_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Policy, waiting: Iterable[Req], *rest: Any) -> Iterator[Req]:
        reqs = list(waiting)
        if len(reqs) > 1:
            raise Planted
        return iter(reqs)

    monkeypatch.setattr(Policy, "order", fail)
    with pytest.raises(Planted):
        run(True)


def test_a_fault_that_loses_pages_ends_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The state can't be trusted any more."""
    plain = CacheManager.acquire

    def fail(self: CacheManager, match: Any, owner: str = "", *rest: Any) -> Any:
        lease = plain(self, match, owner, *rest)
        if owner.startswith(POISON):
            raise Planted
        return lease

    monkeypatch.setattr(CacheManager, "acquire", fail)
    with pytest.raises(AssertionError, match="row"):
        run(True)
