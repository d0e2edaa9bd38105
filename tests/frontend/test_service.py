from __future__ import annotations

import grpc
import pytest
from fake_engine_process import EOS_ID, LIMITS, VOCAB_SIZE, Script
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from server_process import ServerProcess, ids_request, wait_for

from jaxsgl.frontend.proto import jaxsgl_pb2 as pb
from jaxsgl.frontend.proto import jaxsgl_pb2_grpc as pb_grpc
from jaxsgl.requests.request import MAX_SEED
from jaxsgl.text.tokenizer import ChatMessage, Tokenizer

TEXT = "hello 🦊 龘 world"
CHAT = [ChatMessage("system", "be brief"), ChatMessage("user", "hello")]


def report(stub: pb_grpc.JaxsglStub) -> list[int]:
    """[running requests, requests ever seen, aborts ever seen], as the engine counts."""
    (reply,) = stub.Generate(ids_request(Script.REPORT, stream=False, ignore_eos=True, max_tokens=3))
    return list(reply.token_ids)


def refusal(stub: pb_grpc.JaxsglStub, request: pb.GenerateRequest) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as caught:
        list(stub.Generate(request))
    return caught.value.code(), caught.value.details()


def text_request(text: str, stream: bool = True, **sampling: object) -> pb.GenerateRequest:
    return pb.GenerateRequest(text=text, stream=stream, sampling=pb.SamplingParams(**sampling))  # type: ignore[arg-type]


def test_streamed_pieces_add_up_to_text_and_ids(stub: pb_grpc.JaxsglStub, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(TEXT)
    replies = list(stub.Generate(text_request(TEXT, max_tokens=len(ids))))
    assert "".join(reply.text for reply in replies) == TEXT
    assert [id for reply in replies for id in reply.token_ids] == ids
    assert not any("\ufffd" in reply.text for reply in replies)
    assert [reply.finish_reason for reply in replies[:-1]] == [pb.FINISH_REASON_UNSPECIFIED] * (len(replies) - 1)
    assert not any(reply.HasField("usage") for reply in replies[:-1])
    assert len({reply.request_id for reply in replies}) == 1


def test_a_whole_answer_is_one_reply(stub: pb_grpc.JaxsglStub, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(TEXT)
    replies = list(stub.Generate(text_request(TEXT, stream=False, max_tokens=len(ids))))
    assert len(replies) == 1
    assert replies[0].text == TEXT
    assert list(replies[0].token_ids) == ids
    assert replies[0].finish_reason == pb.FINISH_REASON_LENGTH
    assert not replies[0].HasField("matched_stop_token")
    usage = replies[0].usage
    assert (usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens) == (len(ids), len(ids) // 2, len(ids))


def test_an_eos_token_is_in_the_ids_but_not_in_the_text(stub: pb_grpc.JaxsglStub, tokenizer: Tokenizer) -> None:
    hello = tokenizer.encode("hello")
    (reply,) = stub.Generate(ids_request(*hello, EOS_ID, stream=False))
    assert (reply.text, list(reply.token_ids)) == ("hello", [*hello, EOS_ID])
    assert (reply.finish_reason, reply.matched_stop_token) == (pb.FINISH_REASON_STOP, EOS_ID)


def test_a_stop_token_is_in_the_ids_but_not_in_the_text(stub: pb_grpc.JaxsglStub, tokenizer: Tokenizer) -> None:
    hello, world = tokenizer.encode("hello"), tokenizer.encode(" world")
    *replies, last = stub.Generate(ids_request(*hello, *world, stop_token_ids=world[:1]))
    assert "".join(reply.text for reply in [*replies, last]) == "hello"
    assert last.token_ids[-1] == world[0]
    assert (last.finish_reason, last.matched_stop_token) == (pb.FINISH_REASON_STOP, world[0])


def test_ignore_eos_goes_on(stub: pb_grpc.JaxsglStub) -> None:
    (reply,) = stub.Generate(ids_request(5, EOS_ID, stream=False, ignore_eos=True, max_tokens=5))
    assert list(reply.token_ids) == [5, EOS_ID, 5, EOS_ID, 5]
    assert reply.usage.completion_tokens == 5


def test_a_stop_string_over_several_tokens_ends_text_and_request(
    stub: pb_grpc.JaxsglStub, tokenizer: Tokenizer
) -> None:
    running, _, _ = report(stub)
    ids = tokenizer.encode("hello world, how are you? ")
    assert len(ids) > 8, "the test wants stop strings that are split over tokens"
    for stop, keep, text in (("d, ho", False, "hello worl"), ("d, ho", True, "hello world, ho"), ("? h", False, None)):
        text = tokenizer.decode(ids)[:-2] if text is None else text
        request = ids_request(*ids, stop=["never", stop], include_stop_str_in_output=keep)
        replies = list(stub.Generate(request))
        last = replies[-1]
        assert "".join(reply.text for reply in replies) == text
        assert (last.finish_reason, last.matched_stop_string) == (pb.FINISH_REASON_STOP, stop)
        assert not last.HasField("matched_stop_token")
        streamed_ids = [id for reply in replies for id in reply.token_ids]
        assert last.usage.completion_tokens == len(streamed_ids)
        assert stop in tokenizer.decode(streamed_ids)
        assert stop not in tokenizer.decode(streamed_ids[:-1])
        request.stream = False
        (whole,) = stub.Generate(request)
        assert (whole.text, list(whole.token_ids)) == (text, streamed_ids)
    wait_for(lambda: report(stub)[0] == running, "end of the requests")


@pytest.mark.parametrize("stream", [True, False])
def test_samples_are_told_apart_by_their_index(stub: pb_grpc.JaxsglStub, stream: bool) -> None:
    replies = list(stub.Generate(ids_request(5, 6, 7, n=3, max_tokens=4, stream=stream)))
    ids = [[id for reply in replies if reply.index == index for id in reply.token_ids] for index in range(3)]
    assert ids == [[5, 6, 7, 5], [6, 7, 5, 6], [7, 5, 6, 7]]
    ends = [reply for reply in replies if reply.finish_reason]
    assert sorted(reply.index for reply in ends) == [0, 1, 2]
    assert all(reply.usage.completion_tokens == 4 for reply in ends)
    if not stream:
        assert [reply.index for reply in replies] == [0, 1, 2]


def test_a_stop_string_ends_one_sample_and_leaves_the_others(stub: pb_grpc.JaxsglStub, tokenizer: Tokenizer) -> None:
    """Sample 1 never sees the stop string whole, since it is aborted at its end by max_tokens."""
    ids = tokenizer.encode("hello world, how are you? ")
    replies = list(stub.Generate(ids_request(*ids, n=2, stop=[tokenizer.decode(ids[:2])], max_tokens=len(ids) - 1)))
    ends = {reply.index: reply for reply in replies if reply.finish_reason}
    assert ends[0].finish_reason == pb.FINISH_REASON_STOP
    assert ends[1].finish_reason == pb.FINISH_REASON_LENGTH
    assert (ends[0].usage.completion_tokens, ends[1].usage.completion_tokens) == (2, len(ids) - 1)


def test_abort_and_cancellation_end_all_samples(stub: pb_grpc.JaxsglStub) -> None:
    running, _, aborts = report(stub)
    call = stub.Generate(ids_request(Script.FOREVER, request_id="many", n=4))
    wait_for(lambda: report(stub)[0] == running + 4, "running samples")
    assert stub.Abort(pb.AbortRequest(request_id="many")).found
    ends = [reply for reply in call if reply.finish_reason]
    assert sorted(reply.index for reply in ends) == [0, 1, 2, 3]
    assert {reply.finish_reason for reply in ends} == {pb.FINISH_REASON_ABORT}
    call = stub.Generate(ids_request(Script.FOREVER, n=4))
    wait_for(lambda: report(stub)[0] == running + 4, "running samples")
    call.cancel()
    wait_for(lambda: report(stub)[0] == running, "end of the samples")
    assert report(stub)[2] == aborts + 8


def test_log_probabilities_come_only_where_they_are_asked_for(stub: pb_grpc.JaxsglStub) -> None:
    (reply,) = stub.Generate(ids_request(8, 16, 24, stream=False, max_tokens=3))
    assert not reply.logprobs
    assert not reply.prompt_logprobs
    replies = list(
        stub.Generate(ids_request(8, 16, 24, max_tokens=3, logprobs=2, logprob_token_ids=[4], prompt_logprobs=0, n=2))
    )
    of_first = [reply for reply in replies if reply.index == 0]
    given = [entry for reply in of_first for entry in reply.logprobs]
    assert [entry.logprob for entry in given] == [-1.0, -2.0, -3.0]
    assert [[(top.token_id, top.logprob) for top in entry.top] for entry in given][1] == [(16, -2.0), (17, -3.0)]
    assert [list(entry.named) for entry in given] == [[-5.0], [-6.0], [-7.0]]
    assert [entry.logprob for entry in of_first[0].prompt_logprobs] == [-2.0, -3.0]
    assert not of_first[0].prompt_logprobs[0].top
    assert sum(bool(reply.prompt_logprobs) for reply in replies) == 1


def test_an_incomplete_character_at_the_end_is_flushed(stub: pb_grpc.JaxsglStub, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a𝄞")[:-1]
    replies = list(stub.Generate(ids_request(*ids, max_tokens=len(ids))))
    assert "".join(reply.text for reply in replies) == "a\ufffd"


def test_without_max_tokens_the_output_fills_the_context_or_the_pool(stub: pb_grpc.JaxsglStub) -> None:
    (reply,) = stub.Generate(ids_request(5, 6, 7, stream=False))
    assert reply.finish_reason == pb.FINISH_REASON_LENGTH
    assert reply.usage.completion_tokens == LIMITS.pool_tokens - 3


def test_chat_goes_through_the_template(stub: pb_grpc.JaxsglStub, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode_chat(CHAT)
    messages = [pb.ChatMessage(role=message.role, content=message.content) for message in CHAT]
    request = pb.GenerateRequest(
        chat=pb.ChatMessages(messages=messages), sampling=pb.SamplingParams(ignore_eos=True, max_tokens=len(ids))
    )
    (reply,) = stub.Generate(request)
    assert list(reply.token_ids) == ids
    assert reply.text == "system\nbe brief\nuser\nhello\nassistant\n"


def test_parts_that_are_all_texts_are_one_content(stub: pb_grpc.JaxsglStub, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode_chat([ChatMessage("user", "be brief\nhello")])
    parts = [pb.ContentPart(text="be brief"), pb.ContentPart(text="hello")]
    chat = pb.ChatMessages(messages=[pb.ChatMessage(role="user", parts=parts)])
    sampling = pb.SamplingParams(ignore_eos=True, max_tokens=len(ids))
    (reply,) = stub.Generate(pb.GenerateRequest(chat=chat, sampling=sampling))
    assert list(reply.token_ids) == ids


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (pb.GenerateRequest(), ["no input", "text, token_ids and chat"]),
        (pb.GenerateRequest(text=""), ["empty"]),
        (pb.GenerateRequest(token_ids=pb.TokenIds()), ["empty"]),
        (pb.GenerateRequest(chat=pb.ChatMessages()), ["0 messages"]),
        (pb.GenerateRequest(chat=pb.ChatMessages(messages=[pb.ChatMessage(role="robot")])), ["unknown role robot"]),
        (
            pb.GenerateRequest(chat=pb.ChatMessages(messages=[pb.ChatMessage(role="user", parts=[pb.ContentPart()])])),
            ["part 0 of a message is empty", "text or media"],
        ),
        (ids_request(5, VOCAB_SIZE), [str(VOCAB_SIZE), f"0 to {VOCAB_SIZE - 1}"]),
        (ids_request(-1), ["-1", f"0 to {VOCAB_SIZE - 1}"]),
        (ids_request(*[5] * LIMITS.context_length), [str(LIMITS.context_length), str(LIMITS.context_length - 1)]),
        (ids_request(*[5] * LIMITS.pool_tokens), [str(LIMITS.pool_tokens), "--max-total-tokens"]),
        (ids_request(5, max_tokens=LIMITS.pool_tokens), [str(LIMITS.pool_tokens + 1), "lower max_tokens"]),
        (ids_request(5, max_tokens=0), ["max_tokens is 0", "must be 1 to"]),
        (ids_request(5, max_tokens=-(2**60)), ["max_tokens", str(-(2**60))]),
        (ids_request(5, temperature=-0.5), ["temperature is -0.5", "10000"]),
        (ids_request(5, temperature=float("nan")), ["temperature is nan"]),
        (ids_request(5, top_p=0.0), ["top_p is 0.0"]),
        (ids_request(5, top_p=1.5), ["top_p is 1.5"]),
        (ids_request(5, top_k=-2), ["top_k is -2"]),
        (ids_request(5, min_p=2.0), ["min_p is 2.0"]),
        (ids_request(5, seed=-1), ["seed is -1", str(MAX_SEED)]),
        (ids_request(5, frequency_penalty=2.5), ["frequency_penalty is 2.5", "-2 to 2"]),
        (ids_request(5, presence_penalty=float("nan")), ["presence_penalty is nan"]),
        (ids_request(5, repetition_penalty=0.0), ["repetition_penalty is 0.0", "above 0"]),
        (ids_request(5, logit_bias={7: 101.0}), ["logit_bias of token 7 is 101.0", "-100 to 100"]),
        (ids_request(5, logit_bias={VOCAB_SIZE: 1.0}), ["logit_bias holds token id", str(VOCAB_SIZE)]),
        (ids_request(5, logit_bias=dict.fromkeys(range(301), 1.0)), ["301", "0 to 300"]),
        (ids_request(5, min_tokens=-1), ["min_tokens is -1"]),
        (ids_request(5, min_tokens=3, max_tokens=2), ["min_tokens is 3", "max_tokens=2"]),
        (ids_request(5, stop=[""]), ["length of a stop string is 0", "1 to 256"]),
        (ids_request(5, stop=["x" * 257]), ["257", "1 to 256"]),
        (ids_request(5, stop=["x"] * 65), ["65", "0 to 64"]),
        (ids_request(5, logprobs=21), ["logprobs is 21", "0 to 20"]),
        (ids_request(5, prompt_logprobs=-1), ["prompt_logprobs is -1"]),
        (ids_request(5, n=0), ["n is 0", "1 to 128"]),
        (ids_request(5, n=2**40), ["n is", "1 to 128"]),
        (ids_request(5, stop_token_ids=[VOCAB_SIZE]), ["stop_token_ids", str(VOCAB_SIZE)]),
        (ids_request(5, stop_token_ids=[1] * 65), ["65", "0 to 64"]),
        (ids_request(5, request_id="x" * 257), ["257", "1 to 256"]),
    ],
)
def test_bad_input_is_refused_before_it_reaches_the_engine(
    stub: pb_grpc.JaxsglStub, request_: pb.GenerateRequest, words: list[str]
) -> None:
    _, seen, _ = report(stub)
    code, details = refusal(stub, request_)
    assert code == grpc.StatusCode.INVALID_ARGUMENT
    assert all(word in details for word in words), details
    assert report(stub)[1] == seen + 1, "only the report itself"


def test_a_text_beyond_the_context_is_refused(stub: pb_grpc.JaxsglStub, tokenizer: Tokenizer) -> None:
    text = "hello world " * 1000
    code, details = refusal(stub, text_request(text))
    assert code == grpc.StatusCode.INVALID_ARGUMENT
    assert f"has {len(tokenizer.encode(text))} tokens" in details


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (pb.GenerateRequest(text="龘" * 1_000_000), ["text has 3000000 bytes", "most 12800", "to 199 tokens"]),
        (
            pb.GenerateRequest(
                chat=pb.ChatMessages(messages=[pb.ChatMessage(role="user" * 2000, content="龘" * 2000)])
            ),
            ["chat has 14034 bytes", "most 12800"],
        ),
        (
            pb.GenerateRequest(chat=pb.ChatMessages(messages=[pb.ChatMessage(role="user")] * 201)),
            ["201 messages", "at most 200"],
        ),
    ],
)
def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenized(
    stub: pb_grpc.JaxsglStub, request_: pb.GenerateRequest, words: list[str]
) -> None:
    code, details = refusal(stub, request_)
    assert code == grpc.StatusCode.INVALID_ARGUMENT
    assert all(word in details for word in words), details


def test_the_schedulers_refusal_is_the_clients_mistake(stub: pb_grpc.JaxsglStub) -> None:
    code, details = refusal(stub, ids_request(Script.REFUSE))
    assert (code, details) == (grpc.StatusCode.INVALID_ARGUMENT, "the scheduler refuses this: invalid")


def test_the_id_of_a_running_request_cannot_be_taken_again(stub: pb_grpc.JaxsglStub) -> None:
    first = stub.Generate(ids_request(Script.FOREVER, request_id="twice"))
    next(first)
    code, details = refusal(stub, ids_request(5, request_id="twice"))
    assert code == grpc.StatusCode.INVALID_ARGUMENT
    assert "twice" in details
    first.cancel()
    replies = wait_for(lambda: _try(stub, ids_request(5, request_id="twice", max_tokens=1)), "second use of the id")
    assert replies[-1].finish_reason == pb.FINISH_REASON_LENGTH


def _try(stub: pb_grpc.JaxsglStub, request: pb.GenerateRequest) -> list[pb.GenerateReply]:
    try:
        return list(stub.Generate(request))
    except grpc.RpcError:
        return []


@pytest.mark.parametrize("stream", [True, False])
def test_abort_ends_a_request_and_reports_it(stub: pb_grpc.JaxsglStub, stream: bool) -> None:
    call = stub.Generate(ids_request(Script.FOREVER, request_id="endless", stream=stream))
    wait_for(lambda: stub.Abort(pb.AbortRequest(request_id="endless")).found, "running request")
    *_, last = call
    assert last.finish_reason == pb.FINISH_REASON_ABORT
    assert last.request_id == "endless"
    assert last.usage.completion_tokens <= LIMITS.pool_tokens
    assert not stub.Abort(pb.AbortRequest(request_id="endless")).found


def test_abort_of_an_unknown_id_finds_nothing(stub: pb_grpc.JaxsglStub) -> None:
    assert not stub.Abort(pb.AbortRequest(request_id="nobody")).found


@pytest.mark.parametrize("script", [Script.HANG, Script.FOREVER])
@pytest.mark.parametrize("stream", [True, False])
def test_a_cancelled_call_is_aborted_in_the_engine(stub: pb_grpc.JaxsglStub, script: int, stream: bool) -> None:
    running, _, aborts = report(stub)
    call = stub.Generate(ids_request(script, stream=stream))
    wait_for(lambda: report(stub)[0] == running + 1, "running request")
    call.cancel()
    wait_for(lambda: report(stub)[0] == running, "end of the request")
    assert report(stub)[2] == aborts + 1


def test_a_deadline_aborts_the_request(stub: pb_grpc.JaxsglStub) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        list(stub.Generate(ids_request(Script.HANG), timeout=0.2))
    assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    wait_for(lambda: report(stub)[0] == 0, "end of the request")


def test_many_calls_at_once_get_their_own_answers(stub: pb_grpc.JaxsglStub, tokenizer: Tokenizer) -> None:
    texts = [f"hello 🦊 {number}" for number in range(60)]
    calls = [stub.Generate(text_request(text, max_tokens=len(tokenizer.encode(text)))) for text in texts]
    assert ["".join(reply.text for reply in call) for call in calls] == texts


def test_model_info_describes_the_served_model(stub: pb_grpc.JaxsglStub, model_folder: str) -> None:
    info = stub.GetModelInfo(pb.GetModelInfoRequest())
    assert info.model_path == model_folder
    assert (info.vocab_size, info.context_length, info.pool_tokens) == (VOCAB_SIZE, 200, 160)
    assert list(info.eos_token_ids) == [EOS_ID]
    assert info.has_tokenizer
    assert info.has_chat_template
    assert {"jaxsgl", "jax", "python", "grpcio"} <= set(info.versions)


@pytest.mark.parametrize("service", ["", "jaxsgl.v1.Jaxsgl"])
def test_health_is_serving(server: ServerProcess, service: str) -> None:
    with grpc.insecure_channel(server.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        assert stub.Check(health_pb2.HealthCheckRequest(service=service)).status == 1


def test_reflection_describes_the_service(server: ServerProcess) -> None:
    with grpc.insecure_channel(server.address) as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        assert {"jaxsgl.v1.Jaxsgl", "grpc.health.v1.Health"} <= set(database.get_services())
        file = database.FindFileContainingSymbol("jaxsgl.v1.Jaxsgl")
        assert [method.name for method in file.service[0].method] == ["Generate", "Embed", "Abort", "GetModelInfo"]


def test_every_request_leaves_a_debug_line(server: ServerProcess, stub: pb_grpc.JaxsglStub) -> None:
    list(stub.Generate(ids_request(5, 6, max_tokens=4, request_id="logged")))
    server.wait_for_log(r"request 'logged/\d+': 2 prompt tokens, \d cached, 4 new, length")
