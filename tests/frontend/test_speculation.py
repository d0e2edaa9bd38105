"""What clients can say and hear of speculative decoding: refusing it, predictions, what became of drafts, metrics."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from http_calls import chunks, connect, generate_body, post, refusal, say
from server_process import ServerProcess, ids_request
from sglang_calls import ask, completions, sglang_stub
from smg_grpc_proto import sglang_scheduler_pb2 as sglang_pb
from test_metrics import by_name, scrape

from jaxsgl.frontend.engines.link import EngineLink
from jaxsgl.frontend.engines.replicas import total
from jaxsgl.frontend.metrics.measurements import Throughput
from jaxsgl.messages.replies import Load, SpeculationTotals

CHAT = "/v1/chat/completions"
EXPECTED = {"type": "content", "content": "hello world"}


@pytest.fixture(scope="module")
def guessing(model_folder: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Its fake engine keeps one draft of each run: of 2, or of all tokens of a prediction."""
    server = ServerProcess(tmp_path_factory.mktemp("guessing"), model_folder, "--speculative-algorithm", "NGRAM")
    server.wait_until_ready()
    yield server
    server.end()


@pytest.fixture(scope="module")
def http(guessing: ServerProcess) -> Iterator[httpx.Client]:
    with connect(guessing) as http:
        yield http


def details(answer: dict[str, Any]) -> tuple[int, int]:
    of_completion = answer["usage"]["completion_tokens_details"]
    return of_completion["accepted_prediction_tokens"], of_completion["rejected_prediction_tokens"]


def num_tokens(http: httpx.Client, text: str) -> int:
    return int(post(http, "/tokenize", prompt=text, add_special_tokens=False)["count"])


def test_the_usage_of_a_chat_counts_the_tokens_of_its_prediction(http: httpx.Client) -> None:
    expected = num_tokens(http, "hello world")
    body = {"messages": say("hello world"), "max_tokens": 5, "prediction": EXPECTED}
    assert details(post(http, CHAT, **body)) == (4, 4 * (expected - 1))
    assert details(post(http, CHAT, **body | {"n": 2})) == (8, 8 * (expected - 1))
    parts = [{"type": "text", "text": "hello"}, {"type": "text", "text": " world"}]
    assert details(post(http, CHAT, **body | {"prediction": {"type": "content", "content": parts}}))[0] == 4
    *_, last = chunks(http, CHAT, **body, stream_options={"include_usage": True})
    assert details(last) == (4, 4 * (expected - 1))
    without = post(http, CHAT, **body | {"prediction": None})
    assert "completion_tokens_details" not in without["usage"]


@pytest.mark.parametrize(
    ("path", "fields", "message"),
    [
        (CHAT, {"prediction": EXPECTED, "speculative": False}, "but speculative is false: leave one of them out"),
        (CHAT, {"prediction": {"type": "guess", "content": "a"}}, "prediction.type"),
        (CHAT, {"prediction": {"type": "content"}}, "prediction.content"),
        (
            CHAT,
            {"prediction": {"type": "content", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}},
            "has a part of type image_url, but answers are text",
        ),
        (CHAT, {"prediction": {"type": "content", "content": "a b " * 150}}, "the context holds 200"),
        ("/v1/completions", {"prediction": EXPECTED}, "prediction isn't taken here: leave it out"),
        (CHAT, {"speculative": "no"}, "speculative"),
    ],
)
def test_what_makes_no_sense_is_refused(http: httpx.Client, path: str, fields: Any, message: str) -> None:
    body = {"messages": say("a")} if path == CHAT else {"prompt": "a"}
    assert message in refusal(http, path, **body, max_tokens=2, **fields)["message"]


def test_a_request_may_refuse_to_be_guessed(http: httpx.Client, guessing: ServerProcess) -> None:
    before = by_name(scrape(guessing)[1])["vllm:spec_decode_num_drafts_total"]
    post(http, CHAT, messages=say("hello"), max_tokens=4, speculative=False)
    post(http, "/v1/completions", prompt="hello", max_tokens=4, speculative=False)
    meta = post(http, "/generate", **generate_body(50, 60, max_new_tokens=4), speculative=False)["meta_info"]
    assert (meta["spec_verify_ct"], meta["spec_accept_length"], meta["spec_accept_histogram"]) == (0, 0.0, [])
    with guessing.stub() as stub:
        request = ids_request(50, 60, max_tokens=4, stream=False)
        request.speculative = False
        (reply,) = stub.Generate(request)
    assert not reply.HasField("drafts")
    assert by_name(scrape(guessing)[1])["vllm:spec_decode_num_drafts_total"] == before


def test_generate_says_what_became_of_drafts_under_sglangs_names(http: httpx.Client) -> None:
    meta = post(http, "/generate", **generate_body(50, 60, max_new_tokens=4))["meta_info"]
    told = {name: value for name, value in meta.items() if name.startswith("spec_")}
    assert told == {
        "spec_verify_ct": 3,
        "spec_accept_length": 2.0,
        "spec_accept_rate": 0.5,
        "spec_accept_histogram": [0, 3],
        "spec_accept_token_num": 3,
        "spec_draft_token_num": 6,
    }


def test_both_grpc_services_say_what_became_of_drafts(guessing: ServerProcess) -> None:
    with guessing.stub() as stub:
        request = ids_request(50, 60, max_tokens=4, stream=False)
        request.prediction = "hello world"
        (reply,) = stub.Generate(request)
    drafts = reply.drafts
    assert (drafts.steps, drafts.accepted_tokens, list(drafts.histogram)) == (3, 3, [0, 3])
    assert drafts.accepted_prediction_tokens == 3
    assert drafts.draft_tokens == drafts.accepted_prediction_tokens + drafts.rejected_prediction_tokens
    with sglang_stub(guessing) as sglang:
        (complete,) = completions(sglang, ask(50, 60, max_new_tokens=4))
        assert (complete.spec_accepted_tokens, complete.spec_draft_tokens) == (3, 6)
        (load,) = sglang.GetLoads(sglang_pb.GetLoadsRequest(include=["spec"])).loads
        assert load.speculative.accept_length == 2.0
        assert 0 < load.speculative.accept_rate <= 0.5
        (load,) = sglang.GetLoads(sglang_pb.GetLoadsRequest(include=["core"])).loads
        assert not load.HasField("speculative")


def test_drafts_are_counted_under_vllms_and_sglangs_names(http: httpx.Client, guessing: ServerProcess) -> None:
    before = by_name(scrape(guessing)[1])
    post(http, "/generate", **generate_body(50, 60, max_new_tokens=6))
    after = by_name(scrape(guessing)[1])
    grown = {name: after[name] - before.get(name, 0) for name in after if "spec_decode" in name}
    assert grown["vllm:spec_decode_num_drafts_total"] == 5
    assert grown["vllm:spec_decode_num_draft_tokens_total"] == 10
    assert grown["vllm:spec_decode_num_accepted_tokens_total"] == 5
    assert grown["vllm:spec_decode_num_accepted_tokens_per_pos_total.0"] == 5
    assert after["sglang:spec_accept_length"] == 2.0 and 0 < after["sglang:spec_accept_rate"] <= 0.5


def test_a_server_that_does_not_speculate_takes_predictions_and_has_no_use_for_them(
    server: ServerProcess,
) -> None:
    with connect(server) as http:
        body = {"messages": say("hello world"), "max_tokens": 3}
        answer = post(http, CHAT, **body, prediction=EXPECTED)
        assert details(answer) == (0, 0)
        assert answer["choices"] == post(http, CHAT, **body)["choices"]
        assert "spec_verify_ct" not in post(http, "/generate", **generate_body(50, max_new_tokens=3))["meta_info"]
    assert by_name(scrape(server)[1])["vllm:spec_decode_num_drafts_total"] == 0


def test_the_drafts_of_replicas_add_up() -> None:
    class Link(EngineLink):
        def __init__(self, drafts: SpeculationTotals) -> None:
            self.load = Load(speculation=drafts)

        @property
        def is_dead(self) -> bool:
            return False

    one = SpeculationTotals(4, 20, 6, (4, 2), {"penalties": 3, "nothing": 1})
    other = SpeculationTotals(1, 3, 3, (1, 1, 1), {"penalties": 2})
    assert total([Link(one), Link(other), Link(SpeculationTotals())]).speculation == SpeculationTotals(
        5, 23, 9, (5, 3, 1), {"penalties": 5, "nothing": 1}
    )


def test_acceptance_is_that_of_the_last_ten_seconds_in_which_drafts_were_verified() -> None:
    now_s, drafts = 0.0, SpeculationTotals()
    throughput = Throughput(lambda: Load(speculation=drafts), lambda: now_s)
    assert (throughput.rates().accept_length, throughput.rates().accept_rate) == (0, 0)
    drafts = SpeculationTotals(4, 20, 6)
    assert (throughput.rates().accept_length, throughput.rates().accept_rate) == (2.5, 0.3)
    for _ in range(30):
        now_s += 1
        throughput.sample()
    assert throughput.rates().accept_length == 2.5
    drafts = SpeculationTotals(5, 21, 7)
    assert (throughput.rates().accept_length, throughput.rates().accept_rate) == (2.0, 1.0)
