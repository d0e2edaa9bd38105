"""How prompts and decoding share the steps."""

from __future__ import annotations

import pytest

from jaxsgl.batch.buckets import BucketSet
from jaxsgl.config.engine import SchedulingConfig
from jaxsgl.errors import ConfigError
from jaxsgl.requests.request import Request
from jaxsgl.scheduler.loop import run_loop
from jaxsgl.testing.engine import FakeEngine, ScriptedMailbox
from tests.checked import CheckedScheduler
from tests.scheduler.serving import capacity, expected, request


def steps_and_mailbox(
    config: SchedulingConfig, script: list[list[Request]]
) -> tuple[CheckedScheduler, ScriptedMailbox]:
    sizes = capacity(num_pages=400, context=512, max_extend_tokens=32)
    scheduler = CheckedScheduler(sizes, BucketSet.derive(sizes), (), config)
    mailbox = ScriptedMailbox(script)
    run_loop(scheduler, FakeEngine(sizes), mailbox, depth=1)
    return scheduler, mailbox


SCRIPT = [[request("short", range(8), 40)], [], [], [request("long", range(100, 400), 4)]]


def longest_wait(scheduler: CheckedScheduler) -> int:
    """The most steps in a row in which request "short", in whichever row, could have got a token and got none."""
    waits = [0]
    for step in scheduler.launched[2:]:
        arrays = step.arrays
        positions = arrays.positions[: step.num_tokens]
        decodes = (arrays.token_ids[: step.num_tokens] < 0) & (positions < 48)
        if decodes.any():
            waits.append(0)
        else:
            waits[-1] += 1
    return max(waits[:-1])


def test_prompts_go_before_decode_steps_by_default() -> None:
    scheduler, mailbox = steps_and_mailbox(SchedulingConfig(), SCRIPT)
    assert longest_wait(scheduler) >= 300 // 32
    assert mailbox.output_ids("long") == expected(range(100, 400), 4)


def test_in_mixed_steps_running_requests_never_stall() -> None:
    scheduler, mailbox = steps_and_mailbox(SchedulingConfig(enable_mixed_chunk=True), SCRIPT)
    assert longest_wait(scheduler) == 0
    assert mailbox.output_ids("short") == expected(range(8), 40)
    assert mailbox.output_ids("long") == expected(range(100, 400), 4)
    assert all(step.num_tokens <= 32 for step in scheduler.launched)


def test_running_requests_that_a_mixed_step_has_no_room_for_go_first_in_the_next() -> None:
    """20 run, and steps have 16 tokens, one of which is a prompt's."""
    sizes = capacity(page_size=4, num_pages=2000, rows=24, context=240, max_extend_tokens=16)
    config = SchedulingConfig(enable_mixed_chunk=True)
    scheduler = CheckedScheduler(sizes, BucketSet.derive(sizes), (), config)
    running = [request(f"r{i}", [i + 1] * 4, 200) for i in range(20)]
    mailbox = ScriptedMailbox([running, *[[]] * 20, [request("p", range(300, 370), 1)]])
    run_loop(scheduler, FakeEngine(sizes), mailbox, depth=1)
    told = [reply.request_id for reply in mailbox.replies]
    told = told[max(told.index(f"r{i}") for i in range(20)) : told.index("p")]
    shares = [told.count(f"r{i}") for i in range(20)]
    assert min(shares) > 40 and max(shares) - min(shares) <= 4, shares


def test_decode_first_puts_a_decode_step_between_two_chunks() -> None:
    scheduler, mailbox = steps_and_mailbox(SchedulingConfig(decode_first=True), SCRIPT)
    assert longest_wait(scheduler) == 1
    assert mailbox.output_ids("short") == expected(range(8), 40)


def test_short_prompts_are_not_stuck_behind_a_long_one() -> None:
    script = [[request("long", range(100, 500), 1)], [], [request(f"s{i}", range(i, i + 10), 1) for i in range(3)]]
    _, mailbox = steps_and_mailbox(SchedulingConfig(), script)
    ends = [reply.request_id for reply in mailbox.replies if reply.finish_reason]
    assert ends == ["s0", "s1", "s2", "long"]


def test_long_prompts_beside_each_other_advance_in_equal_shares() -> None:
    script = [[request("a", range(200), 1), request("b", range(300, 500), 1)]]
    scheduler, mailbox = steps_and_mailbox(SchedulingConfig(), script)
    ends = [reply.request_id for reply in mailbox.replies if reply.finish_reason]
    assert sorted(ends) == ["a", "b"]
    shared = [step for step in scheduler.launched if step.num_seqs == 2]
    assert len(shared) >= 10, "they advance together"


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize(("most", "num_steps"), [(None, 1), (3, 3), (1, 8)])
def test_a_step_extends_the_prompts_of_so_many_requests_at_most(mixed: bool, most: int | None, num_steps: int) -> None:
    """All prompts together would get into one step; running requests don't count."""
    sizes = capacity(num_pages=400)
    config = SchedulingConfig(enable_mixed_chunk=mixed, prefill_max_requests=most)
    scheduler, engine = CheckedScheduler(sizes, BucketSet.derive(sizes), (), config), FakeEngine(sizes)
    scheduler.receive([request(f"r{i}", range(50 * i, 50 * i + 16), 20) for i in range(8)])
    prompts_of_steps = []
    while not scheduler.is_idle:
        inputs = scheduler.launch()
        assert inputs is not None and scheduler.last_plan is not None
        scheduler.collect(engine.submit(inputs).tokens())
        scheduler.take_replies()
        prompts_of_steps.append(len(scheduler.last_plan.chunks))
    assert max(prompts_of_steps) <= (most or 8)
    assert sum(count > 0 for count in prompts_of_steps) == num_steps


def test_a_limit_on_prompts_of_a_step_is_at_least_one() -> None:
    with pytest.raises(ConfigError, match="--prefill-max-requests is 0, but must be 1 and more"):
        SchedulingConfig(prefill_max_requests=0)
