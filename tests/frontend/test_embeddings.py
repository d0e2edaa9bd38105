"""Embeddings, scores and ranks over HTTP and gRPC, by an engine process whose hidden states say which ids came."""

from __future__ import annotations

import base64
import json
from array import array
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from math import exp, hypot
from pathlib import Path
from typing import Any

import grpc
import httpx
import openai
import pytest
from fake_engine_process import VOCAB_SIZE, Script
from http_calls import connect, post, refusal, say
from server_process import PATIENCE_S, ServerProcess, wait_for
from sglang_calls import sglang_stub
from smg_grpc_proto import sglang_scheduler_pb2 as sglang_pb
from smg_grpc_proto import sglang_scheduler_pb2_grpc as sglang_grpc

from jaxsgl.frontend.proto import jaxsgl_pb2 as pb
from jaxsgl.frontend.proto import jaxsgl_pb2_grpc as pb_grpc
from jaxsgl.text.tokenizer import Tokenizer

PATH = "/v1/embeddings"


@pytest.fixture(scope="module")
def http(server: ServerProcess) -> Iterator[httpx.Client]:
    with connect(server) as http:
        yield http


def expected(ids: list[int], dimensions: int = 4, normalize: bool = True) -> list[Any]:
    hidden = [float(sum(ids)), float(len(ids)), float(ids[0]), float(ids[-1])][:dimensions]
    length = hypot(*hidden) if normalize else 1.0
    return [pytest.approx(value / length, rel=1e-6) for value in hidden]


def sigmoid(logit: float) -> float:
    return 1.0 / (1.0 + exp(-logit))


def vectors(answer: dict[str, Any]) -> list[Any]:
    assert [entry["index"] for entry in answer["data"]] == list(range(len(answer["data"])))
    return [entry["embedding"] for entry in answer["data"]]


def test_an_answer_has_all_fields_of_openai(http: httpx.Client, tokenizer: Tokenizer, model_folder: str) -> None:
    answer = post(http, PATH, input="hello world", model="default")
    usage = {"prompt_tokens": 3, "total_tokens": 3, "prompt_tokens_details": {"cached_tokens": 1}}
    assert answer == {
        "object": "list",
        "data": [{"object": "embedding", "index": 0, "embedding": expected(tokenizer.encode("hello world"))}],
        "model": Path(model_folder).name,
        "usage": usage,
    }


def test_inputs_are_texts_or_ids_one_or_many(http: httpx.Client, tokenizer: Tokenizer) -> None:
    assert vectors(post(http, PATH, input=[50, 60])) == [expected([50, 60])]
    assert vectors(post(http, PATH, input=[[50, 60], [70]])) == [expected([50, 60]), expected([70])]
    texts = ["one", "two words", "one"]
    assert vectors(post(http, PATH, input=texts)) == [expected(tokenizer.encode(text)) for text in texts]


def test_as_many_inputs_come_at_once_as_openai_takes(http: httpx.Client) -> None:
    answer = post(http, PATH, input=["one"] * 2048)
    assert len(vectors(answer)) == 2048 and answer["usage"]["prompt_tokens"] % 2048 == 0
    for inputs in (["one"] * 2049, [[50]] * 2049):
        assert "2048 texts or lists at most" in refusal(http, PATH, input=inputs)["message"]


def test_inputs_are_cut_to_their_first_tokens_or_to_their_last(http: httpx.Client, tokenizer: Tokenizer) -> None:
    ids = list(range(30, 280))
    assert vectors(post(http, PATH, input=ids, truncate_prompt_tokens=-1)) == [expected(ids[:160])]
    assert vectors(post(http, PATH, input=[ids, [50]], truncate_prompt_tokens=2)) == [expected(ids[:2]), expected([50])]
    last = post(http, PATH, input=ids, truncate_prompt_tokens=2, truncation_side="left")
    assert vectors(last) == [expected(ids[-2:])]
    documents = ["hello", "hello " * 300]
    ranked = post(http, "/v1/rerank", query="hello", documents=documents, truncate_prompt_tokens=1)["results"]
    assert [result["relevance_score"] for result in ranked] == pytest.approx([1.0, 1.0])


def test_a_chat_is_embedded_as_its_template_writes_it(http: httpx.Client, tokenizer: Tokenizer) -> None:
    text = "<|start|>user\nhello<|end|>\n"
    assert vectors(post(http, PATH, messages=say("hello"))) == [expected(tokenizer.encode(text, False))]
    turn = tokenizer.encode(f"{text}<|start|>assistant\n", False)
    assert vectors(post(http, PATH, messages=say("hello"), add_generation_prompt=True)) == [expected(turn)]
    for both in ({"input": "x", "messages": say("x")}, {}):
        assert "either input or messages must be given" in refusal(http, PATH, **both)["message"]
    assert "--trust-request-chat-template" in refusal(http, PATH, messages=say("x"), chat_template="x")["message"]


def test_dimensions_cut_before_the_vector_is_normalized(http: httpx.Client) -> None:
    (vector,) = vectors(post(http, PATH, input=[50, 60, 70], dimensions=2))
    assert vector == expected([50, 60, 70], 2) and hypot(*vector) == pytest.approx(1.0)
    for name in ("normalize", "use_activation"):  # vLLM's words, old and new
        (whole,) = vectors(post(http, PATH, input=[50, 60], **{name: False}))
        assert whole == expected([50, 60], normalize=False)


def test_base64_holds_little_endian_float32(http: httpx.Client) -> None:
    (text,) = vectors(post(http, PATH, input=[50, 60], encoding_format="base64"))
    assert list(array("f", base64.b64decode(text))) == expected([50, 60])


def test_the_openai_client_reads_them(server: ServerProcess) -> None:
    with openai.OpenAI(base_url=f"http://{server.http_address}/v1", api_key="none") as client:
        answer = client.embeddings.create(model="default", input=[[50, 60], [70]], dimensions=3)
    assert [entry.embedding for entry in answer.data] == [expected([50, 60], 3), expected([70], 3)]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"input": ""}, "is empty"),
        ({"input": []}, "is empty"),
        ({"input": [VOCAB_SIZE]}, "ids go from 0 to 999"),
        ({"input": list(range(201))}, "the prompt has 201 tokens, but this model's maximum context length is 200"),
        ({"input": "x", "dimensions": 5}, "dimensions is 5, but must be 1 to 4"),
        ({"input": "x", "dimensions": 0}, "dimensions"),
        ({"input": "x", "encoding_format": "hex"}, "encoding_format"),
        ({"input": "x", "embed_dtype": "float16"}, "embed_dtype: must be float32"),
        ({"input": "x", "endianness": "big"}, "endianness: must be little"),
        ({"input": [Script.REFUSE, 0]}, "the scheduler refuses this"),
        ({"input": "x", "lora_path": "a"}, "lora_path"),
    ],
)
def test_bad_inputs_are_refused(http: httpx.Client, body: dict[str, Any], words: str) -> None:
    assert words in refusal(http, PATH, **body)["message"]


def test_documents_are_ranked_by_the_angle_of_their_embeddings(http: httpx.Client, tokenizer: Tokenizer) -> None:
    documents = ["dog", "hello", {"text": "hello world"}]
    answer = post(http, "/v1/rerank", query="hello", documents=documents)
    scores = {result["index"]: result["relevance_score"] for result in answer["results"]}
    ordered = sorted(scores, key=lambda index: -scores[index])
    assert [result["index"] for result in answer["results"]] == ordered and ordered[0] == 1
    assert scores[1] == pytest.approx(1.0)
    assert answer["results"][0]["document"] == {"text": "hello"}
    assert answer["usage"]["prompt_tokens"] == sum(len(tokenizer.encode(t)) for t in ("hello", "dog", "hello world"))
    for other in ({"max_tokens_per_doc": 5}, {"rank_fields": ["title"]}):
        (name,) = other
        assert f"{name} isn't taken" in refusal(http, "/v2/rerank", query="a", documents=["b"], **other)["message"]
    two = post(http, "/v2/rerank", query="hello", documents=documents, top_n=2, return_documents=False)["results"]
    assert [set(result) for result in two] == [{"index", "relevance_score"}] * 2
    pairs = post(http, "/v1/score", text_1="hello", text_2=["dog", "hello", "hello world"])["data"]
    assert [pair["score"] for pair in pairs] == [scores[0], scores[1], scores[2]]
    both = post(http, "/score", queries=["hello", "dog"], documents=["hello", "dog"])["data"]
    assert [pair["score"] for pair in both] == pytest.approx([1.0, 1.0])
    for names in (("queries", "items"), ("data_1", "data_2")):
        same = post(http, "/score", **dict(zip(names, ("hello", ["dog", "hello", "hello world"]), strict=True)))["data"]
        assert same == pairs, "vLLM has several words for both sides"
    assert "items are token ids" in refusal(http, "/score", queries="hello", items=[[5]])["message"]


def test_label_tokens_are_scored_in_sglangs_form(http: httpx.Client) -> None:
    body = {"query": [50, 60], "items": [[70], [80]], "label_token_ids": [8, 16]}
    shares = [exp(1) / (exp(1) + exp(2)), exp(2) / (exp(1) + exp(2))]
    answer = post(http, "/v1/score", **body, apply_softmax=True)
    assert answer["object"] == "scoring" and answer["scores"] == [pytest.approx(shares)] * 2
    assert answer["usage"]["prompt_tokens"] == 6
    among_all = post(http, "/v1/score", **body)["scores"]
    assert among_all == [pytest.approx([exp(1 - 8), exp(2 - 8)])] * 2, "of the whole vocabulary"
    assert "send both in one form" in refusal(http, "/v1/score", **body | {"query": "x"})["message"]
    assert "needs text_1 and text_2" in refusal(http, "/v1/score", query="x")["message"]
    assert "label_token_ids" in str(refusal(http, "/v1/score", **body | {"label_token_ids": [1] * 17}))
    assert "items is an empty list" in refusal(http, "/v1/score", **body | {"query": "x", "items": []})["message"]
    assert "text is empty" in refusal(http, "/v1/score", text_1="", text_2="x")["message"]


def test_a_query_of_label_tokens_fits_before_it_stands_in_the_prompt_of_each_item(http: httpx.Client) -> None:
    ids: dict[str, Any] = {"query": list(range(30, 280)), "items": [[70]] * 9, "label_token_ids": [8, 16]}
    text = ids | {"query": "x" * 20000, "items": ["y"] * 9}
    assert "the prompt has 250 tokens, but" in refusal(http, "/v1/score", **ids)["message"], "without its item"
    assert "the query has 20000 bytes, but" in refusal(http, "/v1/score", **text)["message"]
    for body in (ids, text):
        for side in ("left", "right"):
            cut = post(http, "/v1/score", **body, truncate_prompt_tokens=5, truncation_side=side)
            assert len(cut["scores"]) == 9 and cut["usage"]["prompt_tokens"] == 9 * 5


def test_a_model_without_classes_classifies_nothing(http: httpx.Client) -> None:
    for path in ("/classify", "/v1/classify"):
        assert "no classification head" in refusal(http, path, input="x")["message"]


def test_a_head_scores_texts_through_its_activation_or_without(
    start_server: Callable[..., ServerProcess], model_folder: str, tokenizer: Tokenizer
) -> None:
    server = start_server("--random-seed", str(Script.CLASSIFIES), model=model_folder)
    server.wait_until_ready()
    with connect(server) as http, sglang_stub(server) as sglang:
        raw = float(tokenizer.encode_pair("hello", "dog")[-1])
        texts, pair = {"query": "hello", "documents": ["dog"]}, {"text_1": "hello", "text_2": "dog"}
        for asked, expected_of in (({}, sigmoid), ({"use_activation": False}, float), ({"activation": False}, float)):
            (classified,) = post(http, "/classify", input=[50, 3], **asked)["data"]
            assert classified["probs"] == [pytest.approx(expected_of(3.0))] and classified["label"] == "good"
            (ranked,) = post(http, "/v1/rerank", **texts, **asked)["results"]
            (scored,) = post(http, "/v1/score", **pair, **asked)["data"]
            assert ranked["relevance_score"] == scored["score"] == pytest.approx(expected_of(raw))
        as_written = tokenizer.encode("<|start|>user\nhello<|end|>\n", False)
        (of_chat,) = post(http, "/classify", messages=say("hello"), use_activation=False)["data"]
        assert of_chat["probs"] == [float(as_written[-1])], "rewards of answers are asked for so"
        request = sglang_pb.EmbedRequest(request_id="r", tokenized=sglang_pb.TokenizedInput(input_ids=[50, 3]))
        logits = post(http, "/encode", input_ids=[50, 3])["embedding"]
        assert list(sglang.Embed(request).embedding) == logits == [3.0], "gateways make probabilities of them"
        told = sglang.GetModelInfo(sglang_pb.GetModelInfoRequest())
        assert (told.num_labels, json.loads(told.id2label_json)) == (1, {"0": "good"})


def test_sglangs_encode(http: httpx.Client) -> None:
    answer = post(http, "/encode", input_ids=[50, 60], rid="mine")
    assert answer["embedding"] == expected([50, 60])
    assert answer["meta_info"] == {
        "id": "mine", "finish_reason": {"type": "length"}, "prompt_tokens": 2, "cached_tokens": 1
    }  # fmt: skip
    assert [one["embedding"] for one in post(http, "/encode", input_ids=[[50], [60]])] == [
        expected([50]),
        expected([60]),
    ]
    assert "either text or input_ids" in refusal(http, "/encode", rid="x")["message"]
    assert "input_ids: must be a list of token ids" in refusal(http, "/encode", input_ids="abc")["message"]


def test_our_service_embeds(stub: pb_grpc.JaxsglStub) -> None:
    reply = stub.Embed(pb.EmbedRequest(token_ids=pb.TokenIds(ids=[50, 60]), request_id="r", dimensions=3))
    assert (reply.request_id, list(reply.embedding)) == ("r", expected([50, 60], 3))
    assert (reply.usage.prompt_tokens, reply.usage.cached_tokens) == (2, 1)
    reply = stub.Embed(pb.EmbedRequest(text="hello world", label_ids=[8, 16]))
    assert (list(reply.embedding), list(reply.logits), reply.log_total) == ([], [1.0, 2.0], 8.0)
    for bad in (pb.EmbedRequest(), pb.EmbedRequest(text="x", dimensions=9), pb.EmbedRequest(text="x", label_ids=[-1])):
        with pytest.raises(grpc.RpcError) as error:
            stub.Embed(bad)
        assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_sglangs_service_embeds(sglang: sglang_grpc.SglangSchedulerStub) -> None:
    request = sglang_pb.EmbedRequest(request_id="r", tokenized=sglang_pb.TokenizedInput(input_ids=[50, 60]))
    reply = sglang.Embed(request)
    assert (reply.embedding_dim, list(reply.embedding), reply.prompt_tokens) == (4, expected([50, 60]), 2)
    for bad in (sglang_pb.EmbedRequest(), sglang_pb.EmbedRequest(texts=["x"])):
        with pytest.raises(grpc.RpcError) as error:
            sglang.Embed(bad)
        assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_a_client_that_leaves_aborts_its_inputs(server: ServerProcess, http: httpx.Client) -> None:
    def num_running() -> int:
        return int(http.get("/internal_state").json()["num_running"])

    def leave() -> None:
        with connect(server) as leaving, pytest.raises(httpx.ReadTimeout):
            leaving.post(PATH, json={"input": [[Script.HANG], [50]]}, timeout=httpx.Timeout(PATIENCE_S, read=0.5))

    with ThreadPoolExecutor() as pool:
        left = pool.submit(leave)
        wait_for(lambda: num_running() == 1, "running input")
        left.result()
    wait_for(lambda: num_running() == 0, "abort")


def test_an_input_that_an_order_aborts_may_be_sent_again(server: ServerProcess) -> None:
    def ask() -> httpx.Response:
        with connect(server) as asking:
            return asking.post(PATH, json={"input": [[Script.HANG]]})

    with ThreadPoolExecutor() as pool, connect(server) as http:
        asked = pool.submit(ask)
        order = {"abort_all": True}
        wait_for(lambda: http.post("/abort_request", json=order).json()["num_aborted"], "the input to abort")
        answer = asked.result()
    assert answer.status_code == 503 and "send it again" in answer.text


def test_a_server_for_embeddings_says_so_and_generates_nothing(start_server: Callable[..., ServerProcess]) -> None:
    server = start_server("--is-embedding")
    server.wait_until_ready()
    with connect(server) as http:
        assert http.get("/health_generate").status_code == 200, "a prompt is pooled in place of a token"
        assert http.get("/get_model_info").json()["is_generation"] is False
        assert vectors(post(http, PATH, input=[50, 60])) == [expected([50, 60])]
        assert "generates no tokens" in refusal(http, "/v1/completions", prompt=[50])["message"]
        shares = {"query": [50], "items": [[60]], "label_token_ids": [8, 16]}
        assert "--enable-embeddings" in refusal(http, "/v1/score", **shares)["message"]
        assert post(http, "/v1/score", **shares, apply_softmax=True)["scores"]


def test_states_of_tokens_need_a_flag(http: httpx.Client) -> None:
    for name in ("hidden_states", "routed_experts"):
        words = refusal(http, "/generate", input_ids=[50], **{f"return_{name}": True})["message"]
        assert f"--enable-return-{name.replace('_', '-')}" in words
        assert words == refusal(http, "/v1/completions", prompt=[50], **{f"return_{name}": True})["message"]
        assert "isn't taken here" in refusal(http, "/v1/responses", input="x", **{f"return_{name}": True})["message"]
