"""SGLang's Generate as gateways use it: chunks and completions, samples, stops, log-probabilities."""

from __future__ import annotations

import threading
from typing import TypeAlias

import grpc
import pytest
from fake_engine_process import EOS_ID, LIMITS, Script
from server_process import wait_for
from sglang_calls import ask, completions, refusal
from smg_grpc_proto import sglang_scheduler_pb2 as pb
from smg_grpc_proto import sglang_scheduler_pb2_grpc as pb_grpc

from jaxsgl.text.tokenizer import Tokenizer

Stub: TypeAlias = pb_grpc.SglangSchedulerStub
PROMPT = (5, 6, 7, 8)


def report(sglang: Stub) -> list[int]:
    """[running requests, requests ever seen, aborts ever seen], as the engine counts."""
    (complete,) = completions(sglang, ask(Script.REPORT, ignore_eos=True, max_new_tokens=3))
    return list(complete.output_ids)


def test_chunks_hold_increments_and_the_completion_holds_everything(sglang: Stub) -> None:
    *chunks, last = sglang.Generate(ask(*PROMPT, max_new_tokens=6, request_id="a"))
    so_far: list[int] = []
    for answer in chunks:
        assert answer.chunk.token_ids
        so_far += answer.chunk.token_ids
        assert answer.chunk.completion_tokens == len(so_far)
        assert (answer.chunk.prompt_tokens, answer.chunk.cached_tokens) == (4, 2)
    assert so_far == [5, 6, 7, 8, 5, 6]
    assert {answer.request_id for answer in [*chunks, last]} == {"a"}
    complete = last.complete
    assert list(complete.output_ids) == so_far
    assert (complete.finish_reason, complete.WhichOneof("matched_stop")) == ("length", None)
    assert (complete.prompt_tokens, complete.cached_tokens, complete.completion_tokens) == (4, 2, 6)


def test_without_stream_there_are_only_completions(sglang: Stub) -> None:
    (answer,) = sglang.Generate(ask(*PROMPT, stream=False, max_new_tokens=6))
    assert list(answer.complete.output_ids) == [5, 6, 7, 8, 5, 6]
    assert answer.request_id  # the server's own


def test_max_new_tokens_left_out_fills_context_and_pool(sglang: Stub) -> None:
    (complete,) = completions(sglang, ask(*PROMPT, stream=False))
    assert complete.completion_tokens == min(LIMITS.context_length, LIMITS.pool_tokens) - len(PROMPT)


@pytest.mark.parametrize("stream", [True, False])
def test_every_sample_has_its_own_completion(sglang: Stub, stream: bool) -> None:
    answers = list(sglang.Generate(ask(5, 6, 7, n=3, max_new_tokens=4, stream=stream)))
    complete = {a.complete.index: list(a.complete.output_ids) for a in answers if a.HasField("complete")}
    assert complete == {0: [5, 6, 7, 5], 1: [6, 7, 5, 6], 2: [7, 5, 6, 7]}
    if stream:
        for index, ids in complete.items():
            chunks = [a.chunk for a in answers if a.HasField("chunk") and a.chunk.index == index]
            assert [id for chunk in chunks for id in chunk.token_ids] == ids
    else:
        assert len(answers) == 3


def test_a_stop_token_is_reported_as_the_match(sglang: Stub) -> None:
    for ids, stop_token_ids, matched in (((5, EOS_ID), (), EOS_ID), ((5, 6, 7), (6,), 6)):
        (complete,) = completions(sglang, ask(*ids, stop_token_ids=stop_token_ids))
        assert (complete.finish_reason, complete.matched_token_id) == ("stop", matched)
        assert complete.WhichOneof("matched_stop") == "matched_token_id"
        assert list(complete.output_ids) == [5, matched]


def test_ignore_eos_goes_on(sglang: Stub) -> None:
    (complete,) = completions(sglang, ask(5, EOS_ID, ignore_eos=True, max_new_tokens=4))
    assert list(complete.output_ids) == [5, EOS_ID, 5, EOS_ID]


@pytest.mark.parametrize("no_stop_trim", [True, False])
def test_a_stop_string_is_reported_as_the_match_and_ids_are_never_trimmed(
    sglang: Stub, tokenizer: Tokenizer, no_stop_trim: bool
) -> None:
    ids = tokenizer.encode("hello world, how are you? ")
    (complete,) = completions(sglang, ask(*ids, stop=["d, ho"], no_stop_trim=no_stop_trim))
    assert (complete.finish_reason, complete.matched_stop_str) == ("stop", "d, ho")
    text = tokenizer.decode(list(complete.output_ids))
    assert "d, ho" in text
    assert "d, ho" not in tokenizer.decode(list(complete.output_ids)[:-1])


def test_stream_interval_makes_fewer_chunks_but_the_first_comes_at_once(sglang: Stub) -> None:
    *chunks, last = sglang.Generate(ask(*PROMPT, max_new_tokens=50, stream_interval=10))
    sizes = [len(answer.chunk.token_ids) for answer in chunks]
    assert sum(sizes) == 50
    assert all(size >= 10 for size in sizes[1:-1])
    assert len(last.complete.output_ids) == 50


@pytest.mark.parametrize("stream", [True, False])
def test_log_probabilities_of_the_output(sglang: Stub, stream: bool) -> None:
    of_request = {"return_logprob": True, "logprob_start_len": -1, "top_logprobs_num": 2, "token_ids_logprob": [3, 1]}
    answers = list(sglang.Generate(ask(*PROMPT, max_new_tokens=5, stream=stream, of_request=of_request)))
    complete = answers[-1].complete
    expected = [5, 6, 7, 8, 5]
    assert list(complete.output_logprobs.token_ids) == expected
    assert list(complete.output_logprobs.token_logprobs) == [-id / 8 for id in expected]
    tops = [(list(top.token_ids), list(top.values)) for top in complete.output_logprobs.top_logprobs]
    assert tops == [([id, id + 1], [-id / 8, -id / 8 - 1]) for id in expected]
    named = [(list(each.token_ids), list(each.values)) for each in complete.output_logprobs.token_ids_logprobs]
    assert named == [([3, 1], [-id / 8 - 3, -id / 8 - 1]) for id in expected]
    assert not complete.HasField("input_logprobs")
    if stream:
        parts = [answer.chunk.output_logprobs for answer in answers[:-1]]
        assert [value for part in parts for value in part.token_logprobs] == [-id / 8 for id in expected]
        assert all(len(part.top_logprobs) == len(part.token_ids) for part in parts)


def test_log_probabilities_come_only_if_asked_for(sglang: Stub) -> None:
    for answer in sglang.Generate(ask(*PROMPT, max_new_tokens=3, of_request={"top_logprobs_num": 2})):
        assert not answer.chunk.HasField("output_logprobs")
        assert not answer.complete.HasField("output_logprobs")
        assert not answer.complete.HasField("input_logprobs")


@pytest.mark.parametrize("start", [0, 1, 3])
def test_log_probabilities_of_the_prompt_start_where_asked(sglang: Stub, start: int) -> None:
    """The first token has an entry without a value, since nothing stands before it."""
    of_request = {"return_logprob": True, "logprob_start_len": start, "top_logprobs_num": 1}
    first, *others = sglang.Generate(ask(*PROMPT, max_new_tokens=4, of_request=of_request))
    for given in (first.chunk.input_logprobs, others[-1].complete.input_logprobs):
        assert list(given.token_ids) == list(PROMPT[start:])
        values = [entry.value if entry.HasField("value") else None for entry in given.token_logprobs]
        assert values == [None, -6 / 8, -7 / 8, -8 / 8][start:]
        assert [list(top.token_ids) for top in given.top_logprobs] == [[], [6], [7], [8]][start:]
    assert not any(answer.chunk.HasField("input_logprobs") for answer in others[:-1])


def test_the_prompt_is_scored_with_the_first_sample_alone(sglang: Stub) -> None:
    request = ask(*PROMPT, n=2, max_new_tokens=2, stream=False, of_request={"return_logprob": True})
    first, second = completions(sglang, request)
    assert first.HasField("input_logprobs")
    assert not second.HasField("input_logprobs")


def test_prefill_only_scores_the_prompt_and_shows_no_token(sglang: Stub) -> None:
    for stream in (True, False):
        request = ask(*PROMPT, max_new_tokens=0, stream=stream, of_request={"return_logprob": True})
        (answer,) = sglang.Generate(request)
        complete = answer.complete
        assert (list(complete.output_ids), complete.completion_tokens) == ([], 0)
        assert (complete.finish_reason, complete.prompt_tokens) == ("length", 4)
        assert len(complete.input_logprobs.token_logprobs) == 4
        assert not complete.HasField("output_logprobs")


def test_an_aborted_request_completes_with_the_tokens_so_far(sglang: Stub) -> None:
    _, _, aborts = report(sglang)
    call = sglang.Generate(ask(Script.FOREVER, max_new_tokens=100, request_id="to-abort"))
    next(call)
    assert sglang.Abort(pb.AbortRequest(request_id="to-abort", reason="Stream dropped")).success
    *_, last = call
    assert last.complete.finish_reason == "abort"
    assert last.complete.output_ids
    assert wait_for(lambda: report(sglang)[2] == aborts + 1, "the abort")


def test_a_request_that_waits_can_be_aborted(sglang: Stub) -> None:
    call = sglang.Generate(ask(Script.HANG, n=2, request_id="waits"))
    wait_for(lambda: sglang.Abort(pb.AbortRequest(request_id="waits")).success, "the request")
    assert [(a.complete.finish_reason, a.complete.completion_tokens) for a in call] == [("abort", 0)] * 2
    again = sglang.Abort(pb.AbortRequest(request_id="waits"))
    assert not again.success
    assert "waits" in again.message


def test_a_cancelled_call_aborts_its_request(sglang: Stub) -> None:
    running, _, aborts = report(sglang)
    for stream in (True, False):
        call = sglang.Generate(ask(Script.FOREVER, stream=stream))
        if stream:
            next(call)
        else:
            wait_for(lambda: report(sglang)[0] > running, "the request")
        call.cancel()
    wait_for(lambda: report(sglang)[::2] == [running, aborts + 2], "the aborts")


def test_the_id_of_a_running_request_is_refused(sglang: Stub) -> None:
    call = sglang.Generate(ask(Script.FOREVER, request_id="twice"))
    next(call)
    assert "twice" in refusal(sglang, ask(*PROMPT, request_id="twice"))
    call.cancel()
    wait_for(lambda: not sglang.Abort(pb.AbortRequest(request_id="twice")).success, "its end")
    assert completions(sglang, ask(*PROMPT, request_id="twice", max_new_tokens=1))


def test_a_full_queue_is_resource_exhausted(sglang: Stub) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        list(sglang.Generate(ask(Script.REFUSE, 1)))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_streams_at_the_same_time_each_get_their_own_tokens(sglang: Stub) -> None:
    answers: dict[int, list[int]] = {}

    def read(number: int) -> None:
        ids = (100 + number, 200 + number, 300 + number)
        streamed = sglang.Generate(ask(*ids, max_new_tokens=30))
        answers[number] = [id for answer in streamed for id in answer.chunk.token_ids]

    readers = [threading.Thread(target=read, args=(number,)) for number in range(16)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    assert answers == {n: [100 + n, 200 + n, 300 + n] * 10 for n in range(16)}
