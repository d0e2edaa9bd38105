"""Ollama's API: bodies as its clients send them, and answers as they read them (tests/clients runs the clients).

The fake engine answers with the last message, which so is what a model writes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
from http_calls import connect
from server_process import ServerProcess

from jaxsgl.errors import RequestFailed
from jaxsgl.frontend.http.errors import event_of
from jaxsgl.frontend.http.ollama.answers import Answer, as_message
from jaxsgl.frontend.http.ollama.conversation import (
    OllamaChatRequest,
    OllamaGenerateRequest,
    chat_of,
    completion_of,
)
from jaxsgl.requests.request import FinishReason
from jaxsgl.text.answer import AnswerParser
from jaxsgl.text.calls import FORMS
from jaxsgl.text.sample import End, Piece
from jaxsgl.text.tokenizer import Tokenizer
from tests.text.small_tokenizers import byte_level, save

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": CITY}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
ALL = f"Hm</think>I look.{CALL}"


@pytest.fixture
def http(scripted: ServerProcess) -> Iterator[httpx.Client]:
    with connect(scripted) as http:
        yield http


def say(text: str, **fields: Any) -> dict[str, Any]:
    return {"model": "default", "messages": [{"role": "user", "content": text}]} | fields


def whole(http: httpx.Client, path: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = http.post(path, json=body | {"stream": False})
    assert (answer.status_code, answer.headers["content-type"]) == (200, "application/json"), answer.text
    return dict(answer.json())


def lines(http: httpx.Client, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the lines of a stream, which is what comes unless a body says otherwise."""
    answer = http.post(path, json=body)
    assert (answer.status_code, answer.headers["content-type"]) == (200, "application/x-ndjson"), answer.text
    found = [json.loads(line) for line in answer.text.splitlines()]
    assert [line["done"] for line in found] == [False] * (len(found) - 1) + [True]
    return found


def test_a_chat_is_answered_with_a_message_and_what_it_took(http: httpx.Client, scripted_folder: str) -> None:
    answer = whole(http, "/api/chat", say("Hello you"))
    assert answer["message"] == {"role": "assistant", "content": "Hello you"}
    assert (answer["model"], answer["done"], answer["done_reason"]) == (Path(scripted_folder).name, True, "stop")
    assert (answer["prompt_eval_count"], answer["eval_count"]) == (6, 6)  # with the end's token
    assert abs(datetime.fromisoformat(answer["created_at"]) - datetime.now(UTC)).total_seconds() < 3600
    assert answer["total_duration"] >= answer["prompt_eval_duration"] > 0 < answer["eval_duration"]


def test_a_stream_adds_up_to_the_whole_answer(http: httpx.Client) -> None:
    body = say(ALL, tools=[WEATHER], think=True)
    *parts, last = lines(http, "/api/chat", body)
    expected = whole(http, "/api/chat", body)
    messages = [part["message"] for part in parts]
    assert "".join(each["content"] for each in messages) == expected["message"]["content"] == "I look."
    assert "".join(each.get("thinking", "") for each in messages) == expected["message"]["thinking"] == "Hm"
    calls = [call for each in messages for call in each.get("tool_calls", ())]
    for (call,) in (calls, expected["message"]["tool_calls"]):
        assert call["function"] == {"index": 0, "name": "weather", "arguments": {"city": "Köln"}}
        assert call["id"].startswith("call_")
    assert last["message"] == {"role": "assistant", "content": ""}
    assert last.keys() == expected.keys() and last["eval_count"] == expected["eval_count"]


def test_reasoning_comes_apart_unless_it_is_not_wanted(http: httpx.Client) -> None:
    for think, thinking in ((None, "Hm"), (True, "Hm"), (False, None)):  # the prompt opens it where it is true
        message = whole(http, "/api/chat", say("<think>Hm</think>Yes", think=think))["message"]
        assert (message["content"], message.get("thinking")) == ("Yes", thinking)
    answer = whole(http, "/api/generate", {"prompt": "Hm</think>Yes", "think": "low"})
    assert (answer["response"], answer["thinking"]) == ("Yes", "Hm")


def test_a_prompt_is_a_turn_or_a_text_that_is_continued(http: httpx.Client) -> None:
    answer = whole(http, "/api/generate", {"prompt": "Hello you", "system": "Be brief"})
    assert (answer["response"], answer["prompt_eval_count"]) == ("Hello you", 6)
    raw = whole(http, "/api/generate", {"prompt": "Hello you", "raw": True, "options": {"num_predict": 3}})
    assert (raw["done_reason"], raw["prompt_eval_count"], raw["eval_count"]) == ("length", 5, 3)
    assert "Hello you".startswith(raw["response"])
    *parts, last = lines(http, "/api/generate", {"prompt": "a", "suffix": "c", "options": {"num_predict": 5}})
    assert "".join(part["response"] for part in parts) == "<|fim_prefix|>a<|fim_suffix|>c<|fim_middle|>"
    assert (last["response"], last["prompt_eval_count"]) == ("", 5)


def test_why_an_answer_ends(http: httpx.Client) -> None:
    cut = whole(http, "/api/chat", say("Hello you", options={"num_predict": 3}))
    assert (cut["done_reason"], cut["eval_count"]) == ("length", 3)
    stopped = whole(http, "/api/chat", say("Hello you", options={"stop": ["you", "xy"], "num_predict": -1}))
    assert (stopped["done_reason"], stopped["message"]["content"]) == ("stop", "Hello ")


def test_nothing_to_answer_asks_whether_the_model_is_loaded(http: httpx.Client) -> None:
    (line,) = lines(http, "/api/generate", {"model": "default", "keep_alive": -1})
    assert (line["response"], line["done_reason"]) == ("", "load")
    answer = whole(http, "/api/chat", {"model": "default", "messages": []})
    assert (answer["message"]["content"], answer["done_reason"]) == ("", "load")


def test_log_probabilities_come_with_their_tokens(http: httpx.Client) -> None:
    body = say("Hello you", logprobs=True, top_logprobs=2)
    answer = whole(http, "/api/chat", body)
    tokens = answer["logprobs"]
    assert len(tokens) == answer["eval_count"]
    assert "".join(token["token"] for token in tokens).startswith("Hello you")
    assert {len(token["top_logprobs"]) for token in tokens} == {2}
    assert all(token.keys() == {"token", "logprob", "bytes", "top_logprobs"} for token in tokens)
    *parts, last = lines(http, "/api/chat", body)
    assert [token for part in parts for token in part["logprobs"]] == tokens and "logprobs" not in last
    raw = whole(
        http, "/api/generate", {"prompt": "Hello", "raw": True, "logprobs": True, "options": {"num_predict": 1}}
    )
    assert [token["top_logprobs"] for token in raw["logprobs"]] == [[]]


def test_a_body_is_json_whatever_type_curl_gives_it(http: httpx.Client) -> None:
    headers = {"content-type": "application/x-www-form-urlencoded"}
    answer = http.post("/api/generate", content=b'{"prompt": "Hello", "stream": false}', headers=headers)
    assert (answer.status_code, answer.json()["response"]) == (200, "Hello")


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("chat", say("Hi", model="gpt-9"), 404, "gpt-9 does not exist: here is "),
        ("show", {"name": "gpt-9"}, 404, "gpt-9"),
        ("chat", say("Hi", options={"top_p": 7}), 400, "options.top_p: "),
        ("chat", say("Hi", tools=[{"function": {"name": "a b"}}]), 400, "tools.0.function.name: "),
        ("chat", say("Hi", format="yaml"), 400, 'format: must be "json" or a JSON schema'),
        ("chat", say("Hi", think="hard"), 400, "think: must be true, false, low"),
        ("chat", say("Hi", top_logprobs=2), 400, "logprobs is not true"),
        ("chat", {"messages": [{"role": "user", "content": "x", "images": ["abcd"]}]}, 400, "takes text alone"),
        ("chat", say("x" * 300), 400, "context"),
        (
            "generate",
            {"prompt": "a", "raw": True, "system": "b"},
            400,
            "system is given, but .* as it is",
        ),
        ("generate", {"prompt": "a", "template": "{{ .Prompt }}"}, 400, "template is not taken: .* raw"),
        ("generate", {"prompt": "a", "context": [5]}, 400, "context is not taken: .* /api/chat"),
        ("embed", {"input": 5}, 400, "input: must be a text"),
        ("pull", {"model": "a"}, 501, "/api/pull is not served: .*--model"),
        ("nowhere", {}, 404, "no such path"),
    ],
)
def test_errors_are_texts(http: httpx.Client, path: str, body: dict[str, Any], status: int, words: str) -> None:
    answer = http.post(f"/api/{path}", json=body)
    assert (answer.status_code, answer.json().keys()) == (status, {"error"})
    assert re.search(words, answer.json()["error"])


def test_other_refusals_have_the_same_shape(http: httpx.Client) -> None:
    deleted = http.request("DELETE", "/api/delete", json={"model": "default"})
    broken = http.post("/api/chat", content=b'{"messages": ')
    for answer, status in ((deleted, 501), (broken, 400), (http.get("/api/chat"), 405)):
        assert (answer.status_code, answer.json().keys()) == (status, {"error"})
    assert event_of("/api/chat", RequestFailed("no")) == b'{"error": "no"}\n'  # the last line of a stream


def test_the_model_is_listed_and_described(http: httpx.Client, scripted_folder: str) -> None:
    name = Path(scripted_folder).name
    (listed,) = http.get("/api/tags").json()["models"]
    (running,) = http.get("/api/ps").json()["models"]
    for card in (listed, running):
        assert card["name"] == card["model"] == name and re.fullmatch("[0-9a-f]{64}", card["digest"])
        assert card["details"]["format"] == "safetensors"
    assert listed["size"] <= running["size"] and running["context_length"] == 200
    for body in ({"model": name}, {"name": f"{name}:latest"}):
        shown = http.post("/api/show", json=body).json()
        assert shown["model_info"][f"{shown['model_info']['general.architecture']}.context_length"] == 200
        assert shown["capabilities"] == ["completion", "tools", "thinking", "insert", "embedding"]
        assert "num_ctx 200" in shown["parameters"].splitlines() and "messages[-1]" in shown["template"]
    assert whole(http, "/api/chat", say("Hi", model=f"{name}:latest"))["model"] == name
    assert re.fullmatch(r"\d+\.\d+\.\d+", http.get("/api/version").json()["version"])
    for path in ("/", "/api/tags", "/api/version"):  # by which programs find a server
        assert http.head(path).status_code == 200


def test_what_the_model_lacks_is_refused_in_ollamas_words(server: ServerProcess) -> None:
    with connect(server) as http:
        for ability, fields in (("tools", {"tools": [WEATHER]}), ("thinking", {"think": True})):
            refused = http.post("/api/chat", json=say("Hi", **fields))
            assert refused.status_code == 400 and f"does not support {ability}" in refused.json()["error"]
            assert ability not in http.post("/api/show", json={"model": "default"}).json()["capabilities"]


def test_texts_become_vectors(server: ServerProcess, tokenizer: Tokenizer) -> None:
    with connect(server) as http:
        both = http.post("/api/embed", json={"model": "default", "input": ["hello world", "hello"]}).json()
        ours = http.post("/v1/embeddings", json={"input": ["hello world", "hello"]}).json()
        assert both["embeddings"] == [entry["embedding"] for entry in ours["data"]]
        assert both["prompt_eval_count"] == ours["usage"]["prompt_tokens"] and both["total_duration"] > 0
        cut = http.post("/api/embed", json={"input": "hello world", "dimensions": 2}).json()["embeddings"]
        assert [len(vector) for vector in cut] == [2]
        one = http.post("/api/embeddings", json={"model": "default", "prompt": "hello world"}).json()
        assert one == {"embedding": both["embeddings"][0]}
        assert http.post("/api/embed", json={"input": []}).json()["embeddings"] == []
        long = {"input": "a b " * 300}
        refused = http.post("/api/embed", json=long | {"truncate": False})
        assert refused.status_code == 400 and "context" in refused.json()["error"]
        assert http.post("/api/embed", json=long).json()["prompt_eval_count"] == 160  # what the pool holds


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server whose model has no chat template, and whose clients need a key."""
    model = save(byte_level(), tmp_path_factory.mktemp("plain_model"), None)
    server = ServerProcess(tmp_path_factory.mktemp("plain"), model, "--api-key", "secret")
    server.wait_until_ready()
    yield server
    server.end()


def test_without_a_chat_template_prompts_are_continued_as_they_are(plain: ServerProcess) -> None:
    with connect(plain, headers={"authorization": "Bearer secret"}) as http:
        body = {"prompt": "Hello you", "options": {"num_predict": 5}}
        answer = whole(http, "/api/generate", body)
        assert (answer["response"], answer["prompt_eval_count"]) == ("Hello you", 5)
        refused = http.post("/api/generate", json=body | {"system": "Be brief"})
        assert refused.status_code == 400 and "a model without a chat template" in refused.json()["error"]


def test_keys_are_obeyed_and_the_page_answers_without(plain: ServerProcess) -> None:
    with connect(plain) as http:
        for headers in ({}, {"authorization": "Bearer wrong"}):
            refused = http.get("/api/tags", headers=headers)
            assert (refused.status_code, refused.json().keys()) == (401, {"error"})
        assert http.get("/api/tags", headers={"authorization": "Bearer secret"}).status_code == 200
        assert http.head("/").status_code == 200


def test_requests_are_counted(http: httpx.Client) -> None:
    def counted() -> float:
        (row,) = re.findall(r"^sglang:num_requests_total\{[^}]*\} (\S+)$", http.get("/metrics").text, re.MULTILINE)
        return float(row)

    before = counted()
    whole(http, "/api/chat", say("Hi"))
    assert counted() == before + 1


def test_options_are_those_of_chat() -> None:
    options = {
        "temperature": 0, "top_k": 5, "top_p": 0.5, "min_p": 0.1, "repeat_penalty": 1.5, "presence_penalty": 1,
        "frequency_penalty": -1, "seed": 7, "num_predict": 9, "stop": ["a"], "num_ctx": 4096, "mirostat": 1,
    }  # fmt: skip
    body = say("Hi", options=options, format=CITY, think="high", logprobs=True, top_logprobs=3, keep_alive="5m")
    chat = chat_of(OllamaChatRequest.model_validate(body))
    same = ("temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty", "seed", "stop")
    assert {name: getattr(chat, name) for name in same} == {name: options[name] for name in same}
    assert (chat.repetition_penalty, chat.max_completion_tokens, chat.logprobs, chat.top_logprobs) == (1.5, 9, True, 3)
    assert (chat.enable_thinking, chat.reasoning_effort, chat.include_reasoning) == (True, "high", True)
    assert chat.response_format is not None and chat.response_format.json_schema is not None
    assert chat.response_format.json_schema.schema_ == CITY
    bare = chat_of(OllamaChatRequest.model_validate(say("Hi", format="json", options={"seed": -1, "num_predict": -1})))
    assert (bare.seed, bare.max_completion_tokens, bare.enable_thinking) == (None, None, None)
    assert bare.response_format is not None and bare.response_format.type == "json_object"
    raw = {"prompt": "a", "raw": True, "format": CITY, "options": options, "logprobs": True}
    completion = completion_of(OllamaGenerateRequest.model_validate(raw))
    assert (completion.prompt, completion.logprobs, completion.top_k, completion.seed) == ("a", 0, 5, 7)
    assert completion.response_format == chat.response_format


def test_turns_are_those_of_chat() -> None:
    messages = [
        {"role": "system", "content": "Be brief"},
        {"role": "user", "content": "Look", "images": ["aGk=", "data:image/png;base64,aGk="]},
        {"role": "assistant", "content": "", "thinking": "Hm", "tool_calls": [
            {"function": {"name": "weather", "arguments": {"city": "Köln"}}}]},
        {"role": "tool", "content": "sunny", "tool_name": "weather"},
    ]  # fmt: skip
    chat = chat_of(OllamaChatRequest.model_validate({"messages": messages, "tools": [WEATHER]}))
    system, user, assistant, tool = chat.messages
    assert (system.content, tool.content, tool.name) == ("Be brief", "sunny", "weather")
    assert isinstance(user.content, list)
    assert [part.type for part in user.content] == ["image_url", "image_url", "text"]
    urls = [part.image_url.url for part in user.content[:2] if not isinstance(part.image_url, str | None)]
    assert urls == ["data:;base64,aGk=", "data:image/png;base64,aGk="]
    assert assistant.reasoning_content == "Hm" and assistant.tool_calls is not None
    assert assistant.tool_calls[0].function.arguments == {"city": "Köln"}
    assert not chat.continue_final_message
    begun = {"messages": [messages[0], {"role": "assistant", "content": "I"}]}
    assert chat_of(OllamaChatRequest.model_validate(begun)).continue_final_message
    opened = chat_of(OllamaChatRequest.model_validate({"messages": [messages[0], {"role": "assistant"}]}))
    assert [message.role for message in opened.messages] == ["system"] and not opened.continue_final_message
    alone = chat_of(OllamaChatRequest.model_validate({"messages": [{"role": "assistant", "content": ""}]}))
    assert [message.role for message in alone.messages] == ["assistant"] and alone.continue_final_message
    asked = OllamaGenerateRequest.model_validate({"prompt": "Look", "system": "Be brief", "images": ["aGk="]})
    assert [message.role for message in chat_of(asked).messages] == ["system", "user"]


@pytest.mark.parametrize(
    ("arguments", "as_far_as_it_came"), [('{"city": "Kö', {"city": "Kö"}), ('{"days": 3, "ci', {"days": 3})]
)
def test_the_arguments_of_a_call_are_what_can_be_read_of_them(
    tokenizer: Tokenizer, arguments: str, as_far_as_it_came: dict[str, Any]
) -> None:
    parser = AnswerParser(None, FORMS["hermes"], {"weather": {}}, constrained=True)
    answer = Answer("default", as_message, parser, tokenizer, 0)
    end = End(FinishReason.LENGTH, matched_stop=None, prompt_tokens=3, cached_tokens=0, completion_tokens=2)
    whole = json.loads(answer.whole(Piece(f'<tool_call>\n{{"name": "weather", "arguments": {arguments}', [5, 6], end)))
    (call,) = whole["message"]["tool_calls"]
    assert (call["function"]["arguments"], whole["done_reason"]) == (as_far_as_it_came, "length")
