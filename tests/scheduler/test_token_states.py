"""States of tokens come once each and in order, however prompts are cut, cached, retracted or mixed with decodes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from msgspec.structs import replace as replace_struct

from jaxsgl.batch.buckets import BucketSet, Capacity
from jaxsgl.config.engine import SchedulingConfig
from jaxsgl.errors import InvalidRequest
from jaxsgl.requests.outputs import StatesSpec, hidden_states, routed_experts
from jaxsgl.requests.request import Request, SamplingParams, check_request
from jaxsgl.scheduler.loop import run_loop
from jaxsgl.testing.engine import FakeEngine, RetractEvery, ScriptedMailbox
from jaxsgl.testing.outputs import hidden_state
from tests.checked import CheckedScheduler
from tests.scheduler.drafters import knowing
from tests.scheduler.serving import VOCAB, Script, capacity, expected, request

SPEC = StatesSpec(hidden=True, experts=True, hidden_size=1, num_layers=1, top_k=2)
PROMPT = list(range(50))


def states_capacity(**sizes: Any) -> Capacity:
    return replace(capacity(**sizes), states=SPEC)


def asking(request_id: str, prompt: list[int], max_tokens: int = 6, n: int = 1) -> Request:
    params = SamplingParams(
        temperature=0.0, max_tokens=max_tokens, n=n, return_hidden_states=True, return_routed_experts=True
    )
    return Request(request_id, prompt, params)


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("retract", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("max_drafts", [0, 4])
def test_each_token_but_the_last_has_its_state_once(mixed: bool, retract: bool, overlap: bool, max_drafts: int) -> None:
    sizes = states_capacity(max_extend_tokens=16)
    config = SchedulingConfig(enable_mixed_chunk=mixed)
    also = RetractEvery(5) if retract else None
    buckets = BucketSet.derive(sizes, decode_steps=4, max_drafts=max_drafts)
    drafter_of = knowing(lambda asked: expected(asked.prompt_ids, asked.sampling.max_tokens or 0), "half", VOCAB)
    scheduler = CheckedScheduler(sizes, buckets, (), config, retract_also=also, drafter_of=drafter_of)
    script: Script = [[request("plain", PROMPT, 12)], [], [asking("a", PROMPT), asking("b", PROMPT[:9], n=2)]]
    mailbox = ScriptedMailbox(script)
    run_loop(scheduler, FakeEngine(sizes), mailbox, int(overlap), check_every_step=True)
    for request_id, index, prompt in (("a", 0, PROMPT), ("b", 0, PROMPT[:9]), ("b", 1, PROMPT[:9])):
        replies = [reply for reply in mailbox.replies if (reply.request_id, reply.index) == (request_id, index)]
        sequence = [*prompt, *(token for reply in replies for token in reply.token_ids)]
        assert sequence == [*prompt, *expected(prompt, 6)]
        parts = [reply.states for reply in replies if reply.states is not None]
        hidden = [hidden_state(sequence[: end + 1]) for end in range(len(sequence) - 1)]
        assert hidden_states(parts, SPEC)[:, 0].tolist() == hidden
        assert routed_experts(parts, SPEC)[:, 0].tolist() == [[i, token] for i, token in enumerate(sequence[:-1])]
    assert mailbox.output_ids("plain") == expected(PROMPT, 12)
    assert not any(reply.states for reply in mailbox.replies if reply.request_id == "plain")
    assert bool(scheduler.state.totals.retractions) == retract
    assert bool(scheduler.load(0).speculation.accepted_tokens) == bool(max_drafts)


def test_without_the_flag_no_program_yields_states() -> None:
    assert not any(bucket.states for bucket in BucketSet.derive(capacity()).all())
    with_states = BucketSet.derive(states_capacity()).all()
    assert {replace(bucket, states=False) for bucket in with_states if bucket.states} == {
        bucket for bucket in with_states if not bucket.states
    }


def test_steps_without_such_requests_run_the_plain_programs() -> None:
    sizes = states_capacity()
    scheduler = CheckedScheduler(sizes, BucketSet.derive(sizes), ())
    run_loop(scheduler, FakeEngine(sizes), ScriptedMailbox([[request("a", PROMPT)]]), depth=1)
    assert not any(inputs.bucket.states for inputs in scheduler.launched)


def test_states_that_a_server_does_not_return_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="--enable-return-hidden-states"):
        check_request(asking("a", PROMPT), capacity().limits)
    only_hidden = replace(capacity(), states=replace_struct(SPEC, experts=False)).limits
    with pytest.raises(InvalidRequest, match="--enable-return-routed-experts, and serve a model with a mixture"):
        check_request(asking("a", PROMPT), only_hidden)
    wide = replace(capacity(), states=replace_struct(SPEC, hidden_size=1 << 20)).limits
    with pytest.raises(InvalidRequest, match="the states of 56 tokens may be"):
        check_request(asking("a", PROMPT), wide)
    with pytest.raises(InvalidRequest, match="must be true or false"):
        SamplingParams(return_hidden_states=1)  # type: ignore[arg-type]
