"""A host that plays the calls of host 0 launches the same steps in the same order, and its devices yield the same."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest

from jaxsgl.batch.buckets import BucketSet
from jaxsgl.batch.engine_api import StepHandle
from jaxsgl.batch.inputs import StepInputs
from jaxsgl.engine_process import SHARED_BY_HOSTS
from jaxsgl.errors import ConfigError
from jaxsgl.hosts.calls import Call, Choose, Encoding, Step
from jaxsgl.hosts.playing import LeadEngine, LeadStages, play
from jaxsgl.messages.orders import Abort, MemoryTag, ToEngine
from jaxsgl.requests.grammar import Grammar
from jaxsgl.requests.request import Request, SamplingParams
from jaxsgl.scheduler.loop import run_loop
from jaxsgl.scheduler.served_engine import FixedWeights, StepsOnly
from jaxsgl.testing.engine import FakeEngine, ScriptedMailbox
from tests.checked import CheckedScheduler
from tests.scheduler.grammars import GrammarsInTurn
from tests.scheduler.serving import VOCAB, capacity, request

SIZES = capacity(num_pages=40, rows=4, max_extend_tokens=32)


class Recorded(FakeEngine):
    """Keeps what was submitted, and the tokens of each step."""

    def __init__(self) -> None:
        super().__init__(SIZES)
        self.steps: list[StepInputs] = []
        self.tokens: list[list[Any]] = []

    def submit(self, inputs: StepInputs) -> Any:
        self.steps.append(inputs)
        handle = super().submit(inputs)
        read = handle.tokens

        def tokens() -> Any:
            found = read()
            self.tokens.append(found.tolist())
            return found

        handle.tokens = tokens  # type: ignore[method-assign]
        return handle


def sampled(name: str, prompt: Sequence[int], **params: Any) -> Request:
    return Request(name, list(prompt), SamplingParams(max_tokens=6, **params))


def served(script: list[list[ToEngine]], engine_of: Callable[[FakeEngine], Any]) -> tuple[Recorded, ScriptedMailbox]:
    """Serves with retraction, chunks and grammars."""
    grammars = GrammarsInTurn(VOCAB, lambda: 0.0)
    scheduler = CheckedScheduler(SIZES, BucketSet.derive(SIZES), (), grammars=grammars)
    engine, mailbox = Recorded(), ScriptedMailbox(script)
    run_loop(scheduler, StepsOnly(engine_of(engine)), mailbox, 1)
    return engine, mailbox


def script() -> list[list[ToEngine]]:
    held = Request("held", [7, 8], SamplingParams(max_tokens=9, grammar=Grammar.regex("3 8")))
    return [
        [request("a", range(50), 30), sampled("b", range(9), temperature=1.0, seed=4, top_k=5)],
        [sampled("c", range(3), frequency_penalty=0.5, logprobs=2), held],
        [],
        [request("gone", range(20), 40)],
        [request(f"n{i}", range(i, i + 30), 25) for i in range(4)],
        [Abort("gone")],
    ]


def test_other_hosts_run_the_same_steps_and_read_the_same_tokens() -> None:
    encoding, wire = Encoding(Call), list[tuple[bytes, bytearray]]()

    def send(call: Call) -> None:
        body, parts = encoding.encode(call)
        wire.append((body, bytearray(b"".join(parts))))

    lead, mailbox = served(script(), lambda engine: LeadEngine(engine, send))
    follower, handles = Recorded(), list[StepHandle]()
    play((encoding.decode(*each) for each in wire), follower, handles.append)
    for handle in handles:
        handle.tokens()

    alone, of_alone = served(script(), lambda engine: engine)
    assert [step.bucket for step in follower.steps] == [step.bucket for step in alone.steps]
    assert follower.tokens == lead.tokens == alone.tokens
    assert [reply.token_ids for reply in mailbox.replies] == [reply.token_ids for reply in of_alone.replies]
    kinds = {step.bucket.kind for step in lead.steps}
    assert kinds == {"extend", "decode"} and any(step.masked for step in lead.steps)
    assert any(step.features for step in lead.steps) and any(step.table_changes for step in lead.steps)


def test_hosts_with_other_stages_get_of_a_step_what_their_layers_take_and_no_masks() -> None:
    sent: list[Call] = []
    lead, mailbox = served(script(), lambda engine: LeadStages(engine, sent.append))
    assert any(step.masked for step in lead.steps) and any(step.features for step in lead.steps)
    for step, call in zip(lead.steps, sent, strict=True):
        assert isinstance(call, Step) and not call.masked and call.features is None
        assert (call.bucket, call.num_tokens) == (step.bucket, step.num_tokens)
        assert call.packed is step.packed and call.table_changes is step.table_changes
    _, of_alone = served(script(), lambda engine: engine)
    assert [reply.token_ids for reply in mailbox.replies] == [reply.token_ids for reply in of_alone.replies]


def test_what_is_decoded_is_what_was_encoded() -> None:
    lead, _ = served(script(), lambda engine: engine)
    encoding = Encoding(Call)
    for step in map(Step.of, lead.steps):
        body, parts = encoding.encode(step)
        found = encoding.decode(body, bytearray(b"".join(parts)))
        assert msgspec.structs.replace(found, packed=0, features=None, table_changes=()) == msgspec.structs.replace(
            step, packed=0, features=None, table_changes=()
        )
        np.testing.assert_array_equal(found.packed, step.packed)
        assert not found.packed.flags.writeable and found.packed.flags.aligned
        for mine, theirs in zip(found.table_changes, step.table_changes, strict=True):
            np.testing.assert_array_equal(mine, theirs)


def test_a_call_has_all_that_a_step_has_but_images_and_ranks_which_flags_refuse() -> None:
    assert {*Step.__struct_fields__, "encodes", "of_ranks"} == {field.name for field in dataclasses.fields(StepInputs)}


def test_arrays_that_go_beyond_what_came_or_hold_objects_are_refused() -> None:
    encoding = Encoding(Call)
    body, parts = encoding.encode(Choose(np.zeros((2, 3), np.uint32)))
    payload = bytearray(b"".join(parts))
    with pytest.raises(msgspec.ValidationError, match="goes beyond the 16 bytes"):
        encoding.decode(body, payload[:16])
    with pytest.raises(msgspec.ValidationError, match=r"an array of \|O4"):
        encoding.decode(body.replace(b"<u4", b"|O4"), payload)
    with pytest.raises(msgspec.DecodeError):
        encoding.decode(body[:-1], payload)


def test_weights_that_hosts_share_can_be_renamed_but_neither_exchanged_nor_released() -> None:
    store = FixedWeights(SHARED_BY_HOSTS, "v1")
    with pytest.raises(ConfigError, match="--nnodes"):
        store.stage_weights("folder")
    with pytest.raises(ConfigError, match="--nnodes"):
        store.release_memory(MemoryTag.WEIGHTS)
    assert store.weight_version == "v1" and not store.released
