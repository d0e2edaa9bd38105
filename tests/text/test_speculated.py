from __future__ import annotations

from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from jaxsgl.messages.replies import Reply, Run
from jaxsgl.requests.request import FinishReason, Request, SamplingParams
from jaxsgl.text.detokenizer import NoText
from jaxsgl.text.sample import End, Sample, Speculated

REPLIES = [
    Reply("r", (0,)),
    Reply("r", (1, 2, 3), run=Run(3, 2)),
    Reply("r", (4,), run=Run(4, 0, of_prediction=True)),
    Reply("r", (5,)),
    Reply("r", (6, 7, 8, 9), FinishReason.LENGTH, run=Run(3, 3, of_prediction=True)),
]


class Letters(NoText):
    """Writes token 0 as a, 1 as b, ..."""

    def feed(self, token_ids: Sequence[int]) -> str:
        return "".join(chr(ord("a") + token_id) for token_id in token_ids)


def end_of(replies: list[Reply], **sampling: object) -> End:
    request = Request("r", [1, 2], SamplingParams(**sampling))  # type: ignore[arg-type]
    end = Sample(request, 0, Letters()).take(replies).end
    assert end is not None
    return end


def test_runs_of_a_sample_add_up() -> None:
    told = end_of(REPLIES).speculated
    assert told == Speculated([1, 0, 1, 1], 10, accepted_prediction_tokens=3, rejected_prediction_tokens=4)
    assert (told.num_steps, told.accepted_tokens) == (3, 5)
    assert told.accept_length == pytest.approx(8 / 3) and told.accept_rate == 0.5
    num_plain = 1  # the step of token 5; token 0 came with the prompt
    assert told.accepted_tokens + told.num_steps + num_plain == 10 - 1


def test_drafts_after_a_stop_string_are_no_part_of_the_output() -> None:
    end = end_of([Reply("r", (0,)), Reply("r", (1, 2, 3, 4), run=Run(3, 3))], stop=("bc",))
    assert end.completion_tokens == 3
    assert end.speculated == Speculated([0, 0, 1], 3)


@pytest.mark.parametrize("stop", ["never", *"abcdefghij", "bc", "hi"])
def test_a_run_counts_alike_in_one_reply_and_in_one_for_each_token(stop: str) -> None:
    each = [part for reply in REPLIES for part in one_by_one(reply)]
    sample = Sample(Request("r", [1, 2], SamplingParams(stop=(stop,))), 0, Letters())
    streamed = next(end for part in each if (end := sample.take([part]).end) is not None)
    assert streamed == end_of(each, stop=(stop,)) == end_of(REPLIES, stop=(stop,))


def one_by_one(reply: Reply) -> list[Reply]:
    """As a run comes with log-probabilities: its first reply tells of it."""
    reason = [None] * (len(reply.token_ids) - 1) + [reply.finish_reason]
    parts = [Reply("r", (token_id,), reason[i]) for i, token_id in enumerate(reply.token_ids)]
    return [replace(parts[0], run=reply.run), *parts[1:]]


def test_a_sample_without_drafts_has_counted_nothing() -> None:
    told = end_of([Reply("r", (0, 1), FinishReason.STOP)]).speculated
    assert told == Speculated() and (told.accept_length, told.accept_rate, told.num_steps) == (0, 0, 0)
