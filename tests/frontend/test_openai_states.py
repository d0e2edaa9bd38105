"""Hidden states and experts in answers, from a fake engine whose states say which token stands where."""

from __future__ import annotations

import base64
from array import array
from collections.abc import Iterator

import httpx
import pytest
from http_calls import chunks, connect, post, say
from server_process import ServerProcess
from sglang_calls import ask, completions, refusal, sglang_stub
from smg_grpc_proto import sglang_scheduler_pb2_grpc as sglang_grpc

BOTH = {"return_hidden_states": True, "return_routed_experts": True}


@pytest.fixture(scope="module")
def http(scripted: ServerProcess) -> Iterator[httpx.Client]:
    with connect(scripted) as http:
        yield http


def experts(ids: list[int]) -> str:
    return base64.b64encode(array("i", [id % 4 for id in ids])).decode()


def test_a_completion_has_the_last_state_of_each_choice_and_the_experts_of_the_first(http: httpx.Client) -> None:
    body = {"prompt": [50, 60, 70], "max_tokens": 3, "n": 2}
    answer = post(http, "/v1/completions", **body, **BOTH)
    assert [choice["hidden_states"] for choice in answer["choices"]] == [[60, 4], [70, 4]], "the fake engine echoes"
    assert answer["sglext"] == {"routed_experts": experts([50, 60, 70, 50, 60])}
    one = post(http, "/v1/completions", prompt=[50], max_tokens=1, return_hidden_states=True)
    assert one["choices"][0]["hidden_states"] == [] and "sglext" not in one, "its only token has no state"
    plain = post(http, "/v1/completions", **body)
    assert "sglext" not in plain and "hidden_states" not in plain["choices"][0]
    *_, first, second, last = chunks(http, "/v1/completions", **body, **BOTH)
    assert [part["choices"][0]["hidden_states"] for part in (first, second)] == [[60, 4], [70, 4]]
    assert (last["choices"], last["sglext"]) == ([], answer["sglext"])


def test_sglangs_service_returns_the_states_of_all_tokens_but_the_last(
    scripted: ServerProcess, sglang: sglang_grpc.SglangSchedulerStub
) -> None:
    request = ask(50, 60, of_request={"return_hidden_states": True}, n=2, max_new_tokens=2)
    with sglang_stub(scripted) as stub:
        first, second = completions(stub, request)
    assert [list(state.values) for state in first.all_hidden_states] == [[50, 0], [60, 1], [50, 2]]
    assert [list(state.values) for state in second.all_hidden_states] == [[50, 0], [60, 1], [60, 2]]
    assert [(state.position, state.layer) for state in first.all_hidden_states] == [(0, -1), (1, -1), (2, -1)]
    assert "--enable-return-hidden-states" in refusal(sglang, request)


def test_a_chat_has_them_whole_and_streamed(http: httpx.Client) -> None:
    answer = post(http, "/v1/chat/completions", messages=say("hello you"), max_tokens=3, **BOTH)
    (choice,) = answer["choices"]
    assert choice["hidden_states"][1] == answer["usage"]["prompt_tokens"] + 1
    assert len(base64.b64decode(answer["sglext"]["routed_experts"])) == 4 * (choice["hidden_states"][1] + 1)
    parts = chunks(http, "/v1/chat/completions", messages=say("hello you"), max_tokens=3, **BOTH)
    assert parts[-2]["choices"][0]["delta"] == {"hidden_states": choice["hidden_states"]}
    assert parts[-1]["sglext"] == answer["sglext"]
    assert all("sglext" not in part for part in parts[:-1])
