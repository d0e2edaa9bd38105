"""Requests for pooling end with their prompt: chunked, cached, retracted and beside generation they yield the same."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from jaxsgl.batch.buckets import BucketSet, Capacity
from jaxsgl.config.engine import SchedulingConfig
from jaxsgl.errors import InvalidRequest
from jaxsgl.messages.orders import Abort
from jaxsgl.requests.outputs import Pooling, PoolingKind, PoolingSpec
from jaxsgl.requests.request import POOLING_SAMPLING, Request, SamplingParams, check_request
from jaxsgl.scheduler.loop import run_loop
from jaxsgl.testing.engine import FakeEngine, ScriptedMailbox
from jaxsgl.testing.outputs import hidden_state, label_logit
from tests.checked import CheckedScheduler
from tests.scheduler.serving import Script, capacity, expected, last_reply, request

PROMPT = list(range(100))


def pooling_capacity(kind: PoolingKind = "last", generates: bool = True, **sizes: Any) -> Capacity:
    return replace(capacity(**sizes), pooling=PoolingSpec(kind=kind, dimension=1), generates=generates)


def pooled(request_id: str, prompt: list[int], *label_ids: int, priority: int = 0) -> Request:
    return Request(request_id, prompt, POOLING_SAMPLING, priority, pooling=Pooling(label_ids))


def serve(sizes: Capacity, script: Script, **config: Any) -> tuple[ScriptedMailbox, CheckedScheduler]:
    scheduler = CheckedScheduler(sizes, BucketSet.derive(sizes), (), SchedulingConfig(**config))
    mailbox = ScriptedMailbox(script)
    run_loop(scheduler, FakeEngine(sizes), mailbox, depth=1, check_every_step=True)
    assert scheduler.cache.num_available == sizes.num_pages - 1
    return mailbox, scheduler


def hidden(mailbox: ScriptedMailbox, request_id: str) -> float:
    answer = last_reply(mailbox, request_id).pooled
    assert answer is not None
    return float(np.frombuffer(answer.hidden, np.float32)[0])


def expected_hidden(prompt: list[int], kind: PoolingKind) -> float:
    states = [hidden_state(prompt[: end + 1]) for end in range(len(prompt))]
    return states[-1] if kind == "last" else float(np.float32(sum(states) / len(states)))


@pytest.mark.parametrize("kind", ["last", "mean"])
@pytest.mark.parametrize("generates", [True, False])
def test_chunked_whole_and_cached_prompts_pool_the_same(kind: PoolingKind, generates: bool) -> None:
    for max_extend_tokens in (16, 128):
        sizes = pooling_capacity(kind, generates, max_extend_tokens=max_extend_tokens)
        script: Script = [[pooled("a", PROMPT)], *[[]] * 12, [pooled("b", PROMPT), pooled("c", PROMPT[:50])]]
        mailbox, _ = serve(sizes, script)
        assert hidden(mailbox, "a") == hidden(mailbox, "b") == expected_hidden(PROMPT, kind)
        assert hidden(mailbox, "c") == expected_hidden(PROMPT[:50], kind)
        cached = [last_reply(mailbox, name).cached_tokens for name in "abc"]
        assert cached == ([0, 96, 48] if kind == "last" else [0, 0, 0]), "a mean needs all tokens"


def test_pooled_prompts_next_to_decodes_leave_a_tail_instead_of_padding() -> None:
    """Next to the decodes 508 tokens are a few too many for 512: those come in the next step."""
    sizes = pooling_capacity(num_pages=1000, context=600, max_extend_tokens=2048)
    running: Script = [[request(f"g{i}", [i, 2], 9) for i in range(6)], [], []]
    _, scheduler = serve(sizes, [*running, [pooled("e", list(range(508)))]], enable_mixed_chunk=True)
    mixed = [step for step in scheduler.launched if step.bucket.kind == "extend" and step.num_tokens > 400]
    assert [(step.num_tokens > 500, step.bucket.num_tokens) for step in mixed] == [(True, 512)]


@pytest.mark.parametrize("mixed", [False, True])
def test_pooling_and_generation_share_steps_and_prefixes(mixed: bool) -> None:
    scored = Request("scored", PROMPT, SamplingParams(temperature=0.0, max_tokens=3, prompt_logprobs=0))
    script: Script = [[request("g1", PROMPT, 9)], [pooled("e1", PROMPT), pooled("l1", PROMPT, 7, 8), scored], [],
                      [pooled("e2", [5, 6]), request("g2", PROMPT[:60], 6)]]  # fmt: skip
    mailbox, scheduler = serve(pooling_capacity(max_extend_tokens=32), script, enable_mixed_chunk=mixed)
    assert mailbox.output_ids("g1") == expected(PROMPT, 9)
    assert mailbox.output_ids("g2") == expected(PROMPT[:60], 6)
    assert mailbox.output_ids("scored") == expected(PROMPT, 3)
    assert [hidden(mailbox, name) for name in ("e1", "e2")] == [hidden_state(PROMPT), hidden_state([5, 6])]
    assert last_reply(mailbox, "e1").cached_tokens > 0
    labels = last_reply(mailbox, "l1").pooled
    assert labels is not None and labels.logits == (label_logit(PROMPT, 7), label_logit(PROMPT, 8))
    assert scheduler.state.totals.output_tokens == 9 + 6 + 3, "pooling yields no tokens"


def test_a_server_for_embeddings_runs_programs_that_pool_alone() -> None:
    sizes = pooling_capacity(generates=False, max_extend_tokens=32)
    buckets = BucketSet.derive(sizes).all()
    assert buckets and all(bucket.pools and bucket.kind == "extend" and not bucket.sampled for bucket in buckets)
    mailbox, scheduler = serve(sizes, [[pooled("a", PROMPT)]])
    assert {inputs.bucket for inputs in scheduler.launched} <= set(buckets)
    assert hidden(mailbox, "a") == hidden_state(PROMPT)


def test_without_the_flag_no_program_pools() -> None:
    assert not any(bucket.pools for bucket in BucketSet.derive(capacity()).all())


@pytest.mark.parametrize("kind", ["last", "mean"])
def test_a_preempted_request_pools_its_prompt_anew(kind: PoolingKind) -> None:
    sizes = pooling_capacity(kind, rows=1, max_extend_tokens=16)
    script: Script = [[pooled("low", PROMPT)], [], [], [pooled("high", PROMPT[:9], priority=99)]]
    mailbox, scheduler = serve(sizes, script, enable_priority_scheduling=True)
    assert scheduler.state.totals.retractions == 1
    assert hidden(mailbox, "low") == expected_hidden(PROMPT, kind)
    assert hidden(mailbox, "high") == expected_hidden(PROMPT[:9], kind)


def test_an_aborted_request_for_pooling_leaves_nothing_behind() -> None:
    script: Script = [[pooled("a", PROMPT), pooled("b", PROMPT[:40])], [], [Abort("a")]]
    mailbox, _ = serve(pooling_capacity(max_extend_tokens=16), script)
    assert last_reply(mailbox, "a").pooled is None
    assert hidden(mailbox, "b") == hidden_state(PROMPT[:40])


def test_a_prompt_for_pooling_may_fill_the_context() -> None:
    sizes = pooling_capacity(context=128)
    whole = pooled("a", list(range(128)))
    check_request(whole, sizes.limits)
    mailbox, _ = serve(sizes, [[whole]])
    assert hidden(mailbox, "a") == hidden_state(range(128))
    with pytest.raises(InvalidRequest, match=r"the prompt has 129 tokens, .* length is 128 tokens"):
        check_request(pooled("a", list(range(129))), sizes.limits)


@pytest.mark.parametrize(
    ("request_", "sizes", "words"),
    [
        (pooled("a", [1]), capacity(), "start it with --enable-embeddings"),
        (request("a", [1]), pooling_capacity(generates=False), "generates no tokens"),
        (pooled("a", [1], *range(17)), pooling_capacity(), "17 label tokens are given, but 16 are the most"),
        (pooled("a", [1], 1000), pooling_capacity(), "a label token is 1000, but ids go from 0 to 999"),
    ],
)
def test_what_a_server_does_not_serve_is_refused(request_: Request, sizes: Capacity, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        check_request(request_, sizes.limits)
