"""--chunked-prefill-size -1: no prompt is cut into chunks, and --max-prefill-tokens bounds steps of several prompts."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from jaxsgl.batch.buckets import BucketSet
from jaxsgl.batch.inputs import StepInputs
from jaxsgl.config.engine import EngineConfig, SchedulingConfig
from jaxsgl.errors import ConfigError
from jaxsgl.scheduler.loop import run_loop
from jaxsgl.scheduler.plan import StepPlan
from jaxsgl.testing.engine import FakeEngine, ScriptedMailbox
from tests.checked import CheckedScheduler
from tests.scheduler.serving import Script, capacity, expected, request

MAX_PREFILL, CONTEXT, ROWS = 20, 128, 8
MOST = CONTEXT + ROWS - 1  # the longest prompt, and all other rows decode


def plans_of(script: Script, *, mixed: bool, num_pages: int = 200) -> tuple[list[StepPlan], ScriptedMailbox]:
    sizes = replace(
        capacity(num_pages=num_pages, rows=ROWS, context=CONTEXT, max_extend_tokens=MOST), whole_prompts=True
    )
    plans: list[StepPlan] = []

    class Planned(CheckedScheduler):
        def apply(self, plan: StepPlan) -> StepInputs | None:
            plans.append(plan)
            return super().apply(plan)

    config = SchedulingConfig(max_prefill_tokens=MAX_PREFILL, enable_mixed_chunk=mixed)
    scheduler, mailbox = Planned(sizes, BucketSet.derive(sizes), (), config), ScriptedMailbox(script)
    run_loop(scheduler, FakeEngine(sizes), mailbox, 1)
    return [plan for plan in plans if plan.chunks], mailbox


@pytest.mark.parametrize("mixed", [False, True])
def test_a_prompt_beyond_max_prefill_tokens_is_extended_in_one_step_of_its_own(mixed: bool) -> None:
    prompts = {"short": range(12), "long": range(100, 200), "other": range(300, 308), "third": range(400, 412)}
    plans, mailbox = plans_of([[request(name, list(ids)) for name, ids in prompts.items()]], mixed=mixed)
    extended = [[(req.request_id, num_tokens) for req, num_tokens in plan.chunks] for plan in plans]
    assert extended == [[("short", 12)], [("long", 100)], [("other", 8), ("third", 12)]]
    for name, ids in prompts.items():
        assert mailbox.output_ids(name) == expected(list(ids))


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("num_pages", [200, 50])
def test_no_prompt_is_ever_cut_even_where_pages_are_short(mixed: bool, num_pages: int) -> None:
    """Retracted requests are extended whole again."""
    dice = Random(num_pages)
    prompts = {f"r{i}": [dice.randrange(900) for _ in range(dice.randint(1, 90))] for i in range(30)}
    script: Script = [[request(name, ids, 30)] for name, ids in prompts.items()]
    plans, mailbox = plans_of(script, mixed=mixed, num_pages=num_pages)
    for plan in plans:
        assert len(plan.chunks) == 1 or sum(num_tokens for _, num_tokens in plan.chunks) <= MAX_PREFILL
    admitted = sum(len(plan.admit) for plan in plans)
    assert sum(len(plan.chunks) for plan in plans) == admitted >= 30
    for name, ids in prompts.items():
        assert mailbox.output_ids(name) == expected(ids, 30)


def test_a_bound_on_inter_token_latency_needs_chunks() -> None:
    with pytest.raises(ConfigError, match=r"--max-itl-ms .* --chunked-prefill-size -1"):
        EngineConfig(chunked_prefill_size=-1, scheduling=SchedulingConfig(max_itl_ms=20.0))
