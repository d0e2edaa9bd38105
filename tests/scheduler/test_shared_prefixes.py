"""A prefix that requests share is computed once, also if they arrive together; and none waits too long for it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from jaxsgl.batch.buckets import BucketSet, Capacity
from jaxsgl.config.engine import POLICIES, SchedulingConfig
from jaxsgl.messages.orders import Abort
from jaxsgl.requests.request import Request, SamplingParams
from jaxsgl.scheduler.loop import run_loop
from jaxsgl.scheduler.policy import MAX_OVERTAKEN
from jaxsgl.testing.engine import FakeEngine, ScriptedMailbox
from tests.checked import CheckedScheduler
from tests.scheduler.serving import VOCAB, expected

COMMON = [7 * i % 900 for i in range(512)]
CONFIGS = [{"schedule_policy": policy} for policy in POLICIES] + [
    {"enable_priority_scheduling": True},
    {"enable_mixed_chunk": True},
    {"decode_first": True},
]


def prompt_of(i: int) -> list[int]:
    return [*COMMON, *range(i, i + 32)]


def scheduler_for(chunk: int, rows: int = 64, radix: bool = True, **config: Any) -> tuple[CheckedScheduler, FakeEngine]:
    sizes = Capacity(16, 2000, rows, 1024, chunk, VOCAB)
    scheduler = CheckedScheduler(sizes, BucketSet.derive(sizes), (), SchedulingConfig(**config), radix_cache=radix)
    return scheduler, FakeEngine(sizes)


def ask(name: str, prompt: list[int], max_tokens: int = 2) -> Request:
    return Request(name, prompt, SamplingParams(temperature=0.0, max_tokens=max_tokens))


@pytest.mark.parametrize("chunk", [2048, 128])
@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: "-".join(map(str, config.values())))
def test_64_requests_compute_their_512_common_tokens_once(config: dict[str, Any], chunk: int) -> None:
    """Also when the prefix takes four steps: each request waits until all that it shares is computed."""
    scheduler, engine = scheduler_for(chunk, **config)
    mailbox = ScriptedMailbox([[ask(f"r{i}", prompt_of(i)) for i in range(64)]])
    run_loop(scheduler, engine, mailbox, 1)
    totals = scheduler.load(0).totals
    assert totals.prompt_tokens - totals.cached_prompt_tokens == 512 + 64 * 32
    for i in range(64):
        assert mailbox.output_ids(f"r{i}") == expected(prompt_of(i), 2)


def test_the_device_is_told_of_a_cached_prefix_once() -> None:
    scheduler, engine = scheduler_for(2048)
    mailbox = ScriptedMailbox([[ask("first", prompt_of(0))], *[[]] * 4, [ask("second", prompt_of(1), 40)]])
    run_loop(scheduler, engine, mailbox, 1)
    (told,) = [inputs for inputs in scheduler.launched if inputs.table_changes]
    (changes,) = told.table_changes
    assert told.bucket.kind == "extend" and np.count_nonzero(changes[2]) == 512 // 16
    assert mailbox.output_ids("second") == expected(prompt_of(1), 40)


def test_a_request_that_is_held_back_lets_other_requests_pass() -> None:
    scheduler, _ = scheduler_for(2048)
    scheduler.receive([ask("first", prompt_of(0)), ask("same", prompt_of(1)), ask("other", [5] * 100)])
    scheduler.launch()
    assert scheduler.last_plan is not None
    assert [entry.req.request_id for entry in scheduler.last_plan.admit] == ["first", "other"]
    scheduler.launch()
    assert [(entry.req.request_id, entry.cached_tokens) for entry in scheduler.last_plan.admit] == [("same", 512)]


def test_a_request_goes_on_by_itself_when_the_one_that_computes_its_prefix_is_aborted() -> None:
    scheduler, _ = scheduler_for(128)
    scheduler.receive([ask("first", prompt_of(0)), ask("same", prompt_of(1))])
    scheduler.launch()
    scheduler.receive([Abort("first")])
    scheduler.launch()
    assert scheduler.last_plan is not None
    assert [(entry.req.request_id, entry.cached_tokens) for entry in scheduler.last_plan.admit] == [("same", 128)]


@pytest.mark.parametrize("policy", POLICIES)
def test_without_a_prefix_cache_no_request_is_held_back(policy: str) -> None:
    scheduler, _ = scheduler_for(2048, radix=False, schedule_policy=policy)
    scheduler.receive([ask(f"r{i}", prompt_of(i)) for i in range(3)])
    inputs = scheduler.launch()
    assert inputs is not None and inputs.num_seqs == 3


def test_less_than_32_common_tokens_are_computed_again() -> None:
    scheduler, _ = scheduler_for(2048)
    scheduler.receive([ask(f"r{i}", [*COMMON[:31], *range(i, i + 32)]) for i in range(3)])
    inputs = scheduler.launch()
    assert inputs is not None and inputs.num_seqs == 3


def test_a_request_that_is_held_back_is_overtaken_a_limited_number_of_times() -> None:
    """The first prompt is computed a page at a time, and short requests keep coming."""
    sizes = Capacity(4, 2000, 4, 4096, 8, VOCAB)
    scheduler, engine = CheckedScheduler(sizes, BucketSet.derive(sizes), ()), FakeEngine(sizes)
    long = [i * i % 900 for i in range(4000)]
    scheduler.receive([ask("first", [*long, 1]), ask("held back", [*long, 2])])
    admitted: list[str] = []
    for i in range(3 * MAX_OVERTAKEN):
        scheduler.receive([ask(f"short {i}", [i % 900], 1)])
        inputs = scheduler.launch()
        assert inputs is not None and scheduler.last_plan is not None
        scheduler.collect(engine.submit(inputs).tokens())
        admitted += [entry.req.request_id for entry in scheduler.last_plan.admit]
        if "held back" in admitted:
            break
    assert MAX_OVERTAKEN <= admitted.index("held back") <= MAX_OVERTAKEN + 3
