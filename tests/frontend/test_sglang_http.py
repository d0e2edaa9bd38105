from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from fake_engine_process import EOS_ID, Script
from http_calls import connect, error_of, events, generate_body, report
from server_process import ServerProcess, ids_request, wait_for

from jaxsgl.text.tokenizer import Tokenizer

TEXT = "hello 🦊 龘 world"


@pytest.fixture(scope="module")
def http(server: ServerProcess) -> Iterator[httpx.Client]:
    with connect(server) as http:
        yield http


def test_generate_continues_a_text(http: httpx.Client, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(TEXT)
    params = {"max_new_tokens": len(ids)}
    answer = http.post("/generate", json={"text": TEXT, "rid": "r1", "sampling_params": params}).json()
    assert answer["text"] == TEXT
    assert answer["output_ids"] == ids
    meta = answer["meta_info"]
    assert meta.pop("e2e_latency") > 0
    assert meta == {
        "id": "r1",
        "finish_reason": {"type": "length", "length": len(ids)},
        "prompt_tokens": len(ids),
        "completion_tokens": len(ids),
        "cached_tokens": len(ids) // 2,
        "weight_version": "default",
    }


def test_each_event_of_a_stream_holds_all_so_far(http: httpx.Client, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(TEXT)
    body = {"text": TEXT, "stream": True, "sampling_params": {"max_new_tokens": 3 * len(ids)}}
    response = http.post("/generate", json=body)
    assert response.headers["content-type"].startswith("text/event-stream")
    chunks = events(response.text)
    for before, after in itertools.pairwise(chunks):
        assert after["output_ids"][: len(before["output_ids"])] == before["output_ids"]
        assert after["text"].startswith(before["text"])
        assert before["meta_info"]["finish_reason"] is None
    assert chunks[-1]["text"] == TEXT * 3
    assert chunks[-1]["meta_info"]["finish_reason"]["type"] == "length"
    assert "index" not in chunks[-1]


def test_several_prompts_and_samples_come_as_a_list(http: httpx.Client) -> None:
    body = {"input_ids": [[7, 8], [17, 18]], "rid": "r", "sampling_params": {"max_new_tokens": 2, "n": 2}}
    answers = http.post("/generate", json=body).json()
    assert [answer["output_ids"] for answer in answers] == [[7, 8], [8, 7], [17, 18], [18, 17]]
    assert [answer["meta_info"]["id"] for answer in answers] == ["r_0", "r_0", "r_1", "r_1"]
    streamed = events(http.post("/generate", json=body | {"stream": True}).text)
    last = {event["index"]: event["output_ids"] for event in streamed}
    assert [last[index] for index in range(4)] == [[7, 8], [8, 7], [17, 18], [18, 17]]


def test_a_batch_of_one_is_a_list(http: httpx.Client) -> None:
    (answer,) = http.post("/generate", json=generate_body() | {"input_ids": [[7]]}).json()
    assert answer["output_ids"][0] == 7


def test_prompts_may_have_parameters_of_their_own(http: httpx.Client) -> None:
    params = [{"max_new_tokens": 1}, {"max_new_tokens": 2}]
    answers = http.post("/generate", json={"input_ids": [[7], [8]], "sampling_params": params}).json()
    assert [answer["output_ids"] for answer in answers] == [[7], [8, 8]]


def test_the_reason_why_a_sample_ended_is_reported(http: httpx.Client) -> None:
    def finish(body: dict[str, object]) -> object:
        return http.post("/generate", json=body).json()["meta_info"]["finish_reason"]

    assert finish(generate_body(5, EOS_ID)) == {"type": "stop", "matched": EOS_ID}
    assert finish(generate_body(5, 6, stop_token_ids=[6])) == {"type": "stop", "matched": 6}
    assert finish({"text": "hello world", "sampling_params": {"stop": "lo"}}) == {"type": "stop", "matched": "lo"}


def test_stop_strings_stay_if_asked_for(http: httpx.Client) -> None:
    for keep in (False, True):
        body = {"text": "hello world", "sampling_params": {"stop": ["world"], "no_stop_trim": keep}}
        assert http.post("/generate", json=body).json()["text"] == ("hello world" if keep else "hello ")


def test_log_probabilities_come_as_sglang_writes_them(http: httpx.Client) -> None:
    body = generate_body(8, 16, 24, max_new_tokens=2) | {
        "return_logprob": True,
        "top_logprobs_num": 2,
        "logprob_start_len": 0,
        "return_text_in_logprobs": False,
    }
    meta = http.post("/generate", json=body).json()["meta_info"]
    assert meta["output_token_logprobs"] == [[-1.0, 8, None], [-2.0, 16, None]]
    assert meta["output_top_logprobs"][0] == [[-1.0, 8, None], [-2.0, 9, None]]
    assert meta["input_token_logprobs"] == [[None, 8, None], [-2.0, 16, None], [-3.0, 24, None]]
    assert meta["input_top_logprobs"] == [
        None,
        [[-2.0, 16, None], [-3.0, 17, None]],
        [[-3.0, 24, None], [-4.0, 25, None]],
    ]
    later = http.post("/generate", json=body | {"logprob_start_len": 2, "top_logprobs_num": 0}).json()["meta_info"]
    assert later["input_token_logprobs"] == [[-3.0, 24, None]]
    assert "input_top_logprobs" not in later
    without = http.post("/generate", json=body | {"logprob_start_len": -1}).json()["meta_info"]
    assert without["input_token_logprobs"] == []
    with_text = http.post("/generate", json=body | {"return_text_in_logprobs": True}).json()["meta_info"]
    assert isinstance(with_text["output_token_logprobs"][0][2], str)


def test_each_prompt_may_ask_for_log_probabilities_of_its_own(http: httpx.Client) -> None:
    body = generate_body(max_new_tokens=1) | {"input_ids": [[8, 16], [24, 32], [40]]}
    of_each = {"return_logprob": [True, True, False], "logprob_start_len": [1, -1, 0], "top_logprobs_num": [0, 1, 2]}
    first, second, third = (each["meta_info"] for each in http.post("/generate", json=body | of_each).json())
    assert first["input_token_logprobs"] == [[-2.0, 16, None]] and "output_top_logprobs" not in first
    assert second["input_token_logprobs"] == [] and len(second["output_top_logprobs"][0]) == 1
    assert "output_token_logprobs" not in third


def test_tokens_that_a_request_names_are_scored_at_each_output_token(http: httpx.Client) -> None:
    body = generate_body(8, 16, max_new_tokens=2) | {"return_logprob": True, "token_ids_logprob": [7, 3]}
    meta = http.post("/generate", json=body).json()["meta_info"]
    assert meta["output_token_ids_logprobs"] == [[[-8.0, 7, None], [-4.0, 3, None]], [[-9.0, 7, None], [-5.0, 3, None]]]
    of_each = body | {"input_ids": [[8], [16]], "token_ids_logprob": [[1], [2, 3]]}
    first, second = (each["meta_info"] for each in http.post("/generate", json=of_each).json())
    assert [[entry[1] for entry in entries] for entries in first["output_token_ids_logprobs"]] == [[1], [1]]
    assert [[entry[1] for entry in entries] for entries in second["output_token_ids_logprobs"]] == [[2, 3]] * 2
    plain = http.post("/generate", json=body | {"token_ids_logprob": None}).json()["meta_info"]
    assert "output_token_ids_logprobs" not in plain


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_may_be_scored_without_an_output(http: httpx.Client, stream: bool) -> None:
    """As SGLang's own language does for `select`."""
    none = {"max_new_tokens": 0, "temperature": 0}
    body = {"input_ids": [[8, 16, 24], [9]], "sampling_params": [none, {"max_new_tokens": 2}], "return_logprob": True}
    response = http.post("/generate", json=body | {"logprob_start_len": 0, "stream": stream})
    scored, other = response.json() if not stream else last_events(response)
    assert (scored["text"], scored["output_ids"]) == ("", [])
    meta = scored["meta_info"]
    assert meta["finish_reason"] == {"type": "length", "length": 0}
    assert (meta["completion_tokens"], meta["output_token_logprobs"]) == (0, [])
    assert [token_id for _, token_id, _ in meta["input_token_logprobs"]] == [8, 16, 24]
    assert len(other["output_ids"]) == 2


def last_events(response: httpx.Response) -> list[dict[str, Any]]:
    """Returns the last event of each of two choices."""
    events = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
    return [[event for event in events if event["index"] == index][-1] for index in range(2)]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"text": "a"}, "either"),
        ({"input_ids": []}, "empty"),
        ({"input_ids": [5000]}, "5000"),
        ({"sampling_params": {"max_new_tokens": -1}}, "sampling_params.max_new_tokens: Input should be greater than"),
        ({"sampling_params": {"max_tokens": 5}}, "sampling_params.max_tokens: Extra inputs are not permitted"),
        ({"sampling_params": [{"top_p": 2}]}, "sampling_params.0.top_p: Input should be less than or equal to 1"),
        ({"sampling_params": "greedy"}, "sampling_params: Input should be a valid dictionary"),
        ({"text": 5}, "text: must be a text, or a list of 1 to 1024 texts"),
        ({"input_ids": ["a"]}, "input_ids: must be a list of token ids, or a list of"),
        ({"rid": 5}, "rid: must be a text, or a list with one for each prompt"),
        ({"lora_path": 5}, "lora_path: must be a text, or a list with one"),
        ({"sampling_params": {"regex": "a+", "ebnf": "root ::= 'a'"}}, "regex and ebnf each"),
        ({"sampling_params": [{}, {}]}, "2 entries for 1 prompts"),
        ({"input_ids": [[5], [6]], "sampling_params": [{"n": 1}, {"n": 2}]}, "n differs"),
        ({"input_ids": [[5]] * 100, "sampling_params": {"n": 11}}, "1100"),
        ({"rid": ["a", "b"]}, "rid"),
        ({"rid": "x" * 300}, "300"),
        ({"image_data": "x.png"}, "the model takes text alone"),
        ({"top_logprobs_num": 21}, "top_logprobs_num"),
        ({"token_ids_logprob": [7]}, "return_logprob is not true"),
        ({"token_ids_logprob": [7], "return_logprob": True, "logprob_start_len": 0}, "output tokens alone"),
        ({"token_ids_logprob": [[7], [8]], "return_logprob": True}, "2 lists for 1 prompts"),
        ({"token_ids_logprob": [10**6], "return_logprob": True}, "logprob_token_ids holds token id 1000000"),
        ({"token_ids_logprob": [1] * 33, "return_logprob": True}, "is 33, but must be 0 to 32"),
        ({"logprob_start_len": 1, "return_logprob": True}, "logprob_start_len is 1, but the prompt has 1 tokens"),
        ({"logprob_start_len": [0, 0], "return_logprob": True}, "logprob_start_len has 2 entries for 1 prompts"),
        ({"return_logprob": "yes"}, "return_logprob: must be true or false, or a list"),
        ({"token_ids_logprob": 7}, "token_ids_logprob: must be a list of token ids, or a list with one such list"),
    ],
)
def test_requests_that_cannot_be_served_are_refused(http: httpx.Client, change: dict[str, object], words: str) -> None:
    response = http.post("/generate", json={"input_ids": [5]} | change)
    assert response.status_code == 400
    assert words in error_of(response)["message"]


def test_null_and_unknown_fields_are_ignored(http: httpx.Client) -> None:
    body = {"input_ids": [5], "what_is_this": 1, "image_data": None, "sampling_params": {"regex": None, "stop": None}}
    assert http.post("/generate", json=body).status_code == 200


@contextlib.contextmanager
def hanging(server: ServerProcess, **more: object) -> Iterator[Future[httpx.Response]]:
    """A request that never gets a token, in another thread."""
    with ThreadPoolExecutor(1) as threads, connect(server) as http:
        before = report(http)[0]
        answer = threads.submit(http.post, "/generate", json=generate_body(Script.HANG) | more)
        with connect(server) as other:
            wait_for(lambda: report(other)[0] > before, "running request")
            yield answer
            other.post("/abort_request", json={"abort_all": True})


def test_a_request_can_be_aborted_by_its_rid(server: ServerProcess, http: httpx.Client) -> None:
    with hanging(server, rid="away") as answer:
        assert http.post("/abort_request", json={"rid": "away"}).json() == {"num_aborted": 1}
        assert answer.result().json()["meta_info"]["finish_reason"]["type"] == "abort"
    assert http.post("/abort_request", json={"rid": "away"}).json() == {"num_aborted": 0}


def test_all_requests_can_be_aborted(server: ServerProcess, http: httpx.Client) -> None:
    with hanging(server) as one, hanging(server, stream=True) as other:
        assert http.post("/abort_request", json={"abort_all": True}).json() == {"num_aborted": 2}
        assert one.result().json()["meta_info"]["finish_reason"]["type"] == "abort"
        (event,) = events(other.result().text)
        assert event["meta_info"]["finish_reason"]["type"] == "abort"


def test_a_running_rid_is_refused(server: ServerProcess, http: httpx.Client) -> None:
    with hanging(server, rid="taken"):
        response = http.post("/generate", json=generate_body(5) | {"rid": "taken"})
    assert response.status_code == 400
    assert "taken" in error_of(response)["message"]


def test_the_cache_is_flushed_unless_requests_run(server: ServerProcess, http: httpx.Client) -> None:
    wait_for(lambda: report(http)[0] == 0, "idle engine")
    assert http.post("/flush_cache").json()["success"]
    with hanging(server):
        response = http.post("/flush_cache")
    assert response.status_code == 400
    assert "not flushed" in error_of(response)["message"]


def test_completions_and_chats_take_the_rid_of_their_client(http: httpx.Client) -> None:
    chat: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    bodies = (("/v1/chat/completions", chat), ("/v1/completions", {"prompt": "hi", "max_tokens": 2}))
    for path, body in bodies:
        assert http.post(path, json=body | {"rid": "mine"}).json()["id"] == "mine"
        assert error_of(http.post(path, json=body | {"rid": "x" * 257}))["param"] == "rid"
    held = generate_body(Script.PAUSE, stream=True) | {"rid": "mine"}
    with http.stream("POST", "/generate", json=held) as stream:
        lines = stream.iter_lines()
        next(lines)
        for path, body in bodies:
            for streamed in (False, True):
                refused = http.post(path, json=body | {"rid": "mine", "stream": streamed})
                assert refused.status_code == 400
                assert "request_id mine is the id of a running request" in error_of(refused)["message"]


def test_model_and_server_info_are_reported(http: httpx.Client) -> None:
    model = http.get("/get_model_info").json()
    assert model["is_generation"] is True
    assert model["context_length"] == 200
    assert http.get("/model_info").json() == model
    wait_for(lambda: report(http)[0] == 0, "idle engine")  # after the test before, which leaves a stream
    server = http.get("/get_server_info").json()
    assert server["max_total_num_tokens"] == 160
    assert server["page_size"] == 16
    assert server["internal_states"][0]["num_running"] == 0
    assert server["internal_states"][0]["steps_total"] >= 0 and "totals" not in server["internal_states"][0]
    assert http.get("/server_info").json().keys() == server.keys()


def test_health_is_good_while_the_engine_works(http: httpx.Client) -> None:
    assert http.get("/health").status_code == 200
    seen = report(http)[1]
    assert http.get("/health_generate").status_code == 200
    assert report(http)[1] == seen + 2  # the probe, and the report itself


def test_others_names_for_health_and_load_are_known(http: httpx.Client, server: ServerProcess) -> None:
    assert http.get("/version").status_code == 404  # by it a gateway tells vLLM, whose pages go other ways
    assert http.get("/ping").json() == http.post("/ping").json() == {"status": "ok"}
    with server.stub() as stub:
        before = http.get("/load").json()["server_load"]
        stays = stub.Generate(ids_request(Script.PAUSE))
        next(stays)
        assert http.get("/load").json() == {"server_load": before + 1}
        stays.cancel()


def test_health_is_good_while_the_queue_is_full(start_server: object) -> None:
    server: ServerProcess = start_server("--max-queued-requests", "1")  # type: ignore[operator]
    server.wait_until_ready()
    with connect(server) as http, server.stub() as stub:
        stays = stub.Generate(ids_request(Script.PAUSE))
        next(stays)
        assert http.post("/generate", json=generate_body(5)).status_code == 429
        assert http.get("/health_generate").status_code == 200
        stays.cancel()


def test_health_is_bad_until_the_engine_is_ready(start_server: object) -> None:
    server: ServerProcess = start_server("--random-seed", str(Script.START_HANGS))  # type: ignore[operator]
    with connect(server) as http:
        for path in ("/health", "/health_generate", "/get_model_info", "/server_info"):
            response = http.get(path)
            assert response.status_code == 503
            assert "starting" in error_of(response)["message"]
        refused = http.post("/generate", json=generate_body(5))
        assert refused.status_code == 503
        assert refused.headers["retry-after"] == "1"
