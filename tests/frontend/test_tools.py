"""Tools and reasoning over HTTP. The fake engine answers with the last message, which so is what a model writes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest
from http_calls import chunks, connect, post, refusal, say
from played_link import PlayedLink, front_end_of
from server_process import ServerProcess
from test_event_loop import INFO

from jaxsgl.constraints.compiler import Compiler
from jaxsgl.errors import InvalidRequest
from jaxsgl.frontend.generation import ServedModel
from jaxsgl.frontend.http.openai.chat import chat_prompt, prepare_chat
from jaxsgl.frontend.http.openai.schemas import ChatRequest
from jaxsgl.frontend.http.openai.tools import AnswerForm, ToolUse, constrained, template_variables, tool_use
from jaxsgl.requests.grammar import Grammar
from jaxsgl.text.call_stream import Part
from jaxsgl.text.dialects import dialect_of
from jaxsgl.text.tokenizer import load_tokenizer

PATH = "/v1/chat/completions"
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
NOW = {"type": "function", "function": {"name": "now"}}
HEAD = '{"name": "weather", "arguments": '
CALL = f'<tool_call>\n{HEAD}{{"city": "Köln"}}}}\n</tool_call>'
CALL_NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


@pytest.fixture
def http(scripted: ServerProcess) -> Iterator[httpx.Client]:
    with connect(scripted) as http:
        yield http


def answer(http: httpx.Client, text: str, **fields: Any) -> tuple[dict[str, Any], str]:
    """Returns the message and why it ended; a stream of the same says the same."""
    body = {"messages": say(text), "tools": [WEATHER, NOW]} | fields
    (choice,) = post(http, PATH, **body)["choices"]
    message = choice["message"]
    assert joined(chunks(http, PATH, **body)) == (without_ids(message), choice["finish_reason"])
    return message, choice["finish_reason"]


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    calls = [{name: value for name, value in call.items() if name != "id"} for call in message.get("tool_calls", [])]
    return message | ({"tool_calls": calls} if calls else {})


def joined(parts: list[dict[str, Any]]) -> tuple[dict[str, Any], str]:
    """Returns the message that the deltas of a stream make, without the ids of calls, as OpenAI's client joins them."""
    message: dict[str, Any] = {"role": None, "content": None}
    reason = ""
    for part in parts:
        (choice,) = part["choices"]
        reason = choice["finish_reason"] or reason
        for name, value in choice["delta"].items():
            if name != "tool_calls":
                message[name] = (message.get(name) or "") + value
                continue
            for call in value:
                calls = message.setdefault("tool_calls", [])
                if "id" in call:
                    assert call["index"] == len(calls)
                    calls.append(
                        {"type": call["type"], "function": {"name": call["function"]["name"], "arguments": ""}}
                    )
                calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    if not message["content"] and message.keys() - {"role", "content"}:
        message["content"] = None
    return message, reason


def test_a_call_comes_back_as_a_call(http: httpx.Client) -> None:
    message, reason = answer(http, f"I look.\n{CALL}")
    (call,) = message["tool_calls"]
    assert call["id"].startswith("call_")
    assert (call["type"], call["function"]["name"]) == ("function", "weather")
    assert json.loads(call["function"]["arguments"]) == {"city": "Köln"}
    assert (message["content"], reason) == ("I look.", "tool_calls")


def test_an_answer_without_text_has_no_content(http: httpx.Client) -> None:
    message, _ = answer(http, f"{CALL}\n{CALL_NOW}")
    assert message["content"] is None
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["weather", "now"]
    assert len({call["id"] for call in message["tool_calls"]}) == 2


@pytest.mark.parametrize("text", [CALL.replace("}}", "}"), CALL.replace("weather", "wetter"), CALL[:-8]])
def test_what_is_no_call_is_text(http: httpx.Client, text: str) -> None:
    assert answer(http, text) == ({"role": "assistant", "content": text}, "stop")


@pytest.mark.parametrize("fields", [{"tools": None}, {"tool_choice": "none"}])
def test_calls_are_text_where_none_may_be_made(http: httpx.Client, fields: dict[str, Any]) -> None:
    assert answer(http, CALL, **fields) == ({"role": "assistant", "content": CALL}, "stop")


def test_one_call_is_left_if_calls_may_not_be_parallel(http: httpx.Client) -> None:
    message, _ = answer(http, f"{CALL_NOW}{CALL_NOW}", parallel_tool_calls=False)
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["now"]


def test_a_call_that_max_tokens_cuts_is_text(http: httpx.Client) -> None:
    message, reason = answer(http, CALL, max_tokens=4)
    assert reason == "length"
    assert "tool_calls" not in message
    assert CALL.startswith(message["content"])


def test_a_call_that_a_stop_string_cuts_ends_as_other_text_does(http: httpx.Client) -> None:
    for stop, arguments, ended in (("ln", '{"city": "Kö', "stop"), ("\n</tool", '{"city": "Köln"}', "tool_calls")):
        message, reason = answer(http, CALL, tool_choice="required", stop=[stop])
        assert (message["tool_calls"][0]["function"]["arguments"], reason) == (arguments, ended)


def test_a_call_that_is_demanded_goes_before_a_format(http: httpx.Client) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}
    message, reason = answer(http, CALL, tool_choice="required", response_format=form)
    assert (message["tool_calls"][0]["function"]["name"], reason) == ("weather", "tool_calls")


def test_calls_are_free_where_their_grammar_would_be_too_long() -> None:
    model: Any = SimpleNamespace(
        dialect=dialect_of(None, "qwen3_coder"), tokenizer=SimpleNamespace(unit_of=lambda text: None, has_grammars=True)
    )
    properties = {f"{'p' * 90}{i}": {"type": "string"} for i in range(3_000)}
    tools = {"f": {"type": "object", "properties": properties}}
    form = AnswerForm(model, ToolUse(callable=tools), reasoning_is_open=False, separate=True)
    assert constrained(form, None, free_calls=False) == (form, None)
    for use in (ToolUse(callable=tools, required=True), ToolUse(callable=tools, strict=frozenset({"f"}))):
        with pytest.raises(InvalidRequest, match="the answer_grammar has"):
            constrained(replace(form, use=use), None, free_calls=False)


@pytest.mark.parametrize("name", ["llama3", "json"])
def test_no_call_is_looked_for_in_json_that_was_asked_for(name: str) -> None:
    """A call in bare JSON could not be told from it."""
    model: Any = SimpleNamespace(dialect=dialect_of(None, name), tokenizer=SimpleNamespace(unit_of=lambda text: None))
    form = AnswerForm(model, ToolUse(callable={"weather": {}}), reasoning_is_open=False, separate=True)
    form, grammar = constrained(form, Grammar.json_object(), free_calls=False)
    assert grammar == Grammar.json_object()
    parser = form.parser()
    for text in ('{"name": "weather", ', '"arguments": {}}'):
        assert parser.feed(text) == [Part("content", text)]
    assert parser.finish() == []


@pytest.mark.parametrize(
    ("fields", "answer"),
    [
        ({"tools": [WEATHER, NOW]}, f"<think>Hm</think>I look.\n{CALL}"),
        ({"tools": [WEATHER, NOW], "tool_choice": "required"}, f"<think>Hm</think>{CALL_NOW}"),
        ({"response_format": {"type": "json_object"}}, '<think>Hm</think>\n{"a": 1}'),
        ({"tools": [NOW], "response_format": {"type": "json_object"}}, f"<think>Hm</think>{CALL_NOW}"),
        ({"regex": "[0-9]+", "enable_thinking": True}, "Hm</think>12"),
        ({"thinking_token_budget": 2}, "<think>H</think>Hello"),
    ],
)
def test_the_engine_takes_grammars_of_answers_where_markers_are_tokens(
    scripted_folder: str, fields: dict[str, Any], answer: str
) -> None:
    """Those markers are kept out of free text by an operator that no client may send."""
    tokenizer = load_tokenizer(scripted_folder)
    assert None not in map(tokenizer.unit_of, ("<think>", "</think>", "<tool_call>", "</tool_call>"))

    async def grammar() -> Grammar | None:
        with ThreadPoolExecutor(1) as threads:
            model = ServedModel(INFO, tokenizer, dialect_of(None, "qwen25", "qwen3"))
            body = ChatRequest.model_validate({"messages": say("a"), "max_tokens": 50} | fields)
            request, _ = await prepare_chat(front_end_of(PlayedLink(), threads, model), body, "a")
            return request.sampling.grammar

    asked = asyncio.run(grammar())
    assert asked is not None and asked.kind == "answer_grammar"
    matcher = Compiler(Path(scripted_folder), 1000, [1]).compile(asked)
    ids = tokenizer.encode(answer, add_special_tokens=False)
    assert matcher.num_allowed(ids) == len(ids)
    for token_id in ids:
        matcher.advance(token_id)
    assert matcher.accepts


def test_reasoning_gets_a_budget(http: httpx.Client) -> None:
    """The fake engine ignores grammars; tests/text/test_call_grammars.py asks the compiler."""
    for name in ("thinking_token_budget", "thinking_budget"):
        assert answer(http, "<think>Hm</think>Hello", **{name: 5})[0]["reasoning_content"] == "Hm"
        assert answer(http, "<think>Hm</think>Hello", **{name: -1})[0]["reasoning_content"] == "Hm", "no bound"
        assert name in refusal(http, PATH, messages=say("a"), **{name: -2})["message"]
    fields = {"thinking_token_budget": 5, "thinking_budget": 6}
    assert "differ" in refusal(http, PATH, messages=say("a"), **fields)["message"]


def test_a_tool_without_parameters_takes_no_arguments() -> None:
    functions: list[Any] = [{"name": "now"}, {"name": "any", "parameters": {}}, WEATHER["function"]]
    body = {"messages": say("a"), "tools": [{"type": "function", "function": function} for function in functions]}
    use = tool_use(ChatRequest.model_validate(body))
    assert use.callable["now"] == use.shown[0]["function"]["parameters"]
    assert use.callable["now"] == {"type": "object", "properties": {}, "additionalProperties": False}
    assert use.callable["any"] == {"type": "object"}


def test_arguments_are_an_object_whatever_the_tool_says_of_them() -> None:
    schemas: list[dict[str, Any]] = [{"properties": {}}, {"$ref": "#/$defs/a", "$defs": {"a": {}}}]
    for given in (*schemas, {"type": ["null", "object"]}):
        tool = {"type": "function", "function": {"name": "f", "parameters": given}}
        use = tool_use(ChatRequest.model_validate({"messages": say("hi"), "tools": [tool]}))
        assert use.callable["f"] == {**given, "type": "object"}


def test_the_words_of_a_tool_are_understood_unless_it_is_strict() -> None:
    """A format that nothing holds to is a note in any tool."""
    given = {"type": "object", "properties": {"x": {"type": "float"}, "y": {"type": "string", "format": "uuid4"}}}
    for strict, read in ((None, "number"), (True, "float")):
        tool = {"type": "function", "function": {"name": "f", "parameters": given, "strict": strict}}
        use = tool_use(ChatRequest.model_validate({"messages": say("hi"), "tools": [tool]}))
        assert use.callable["f"]["properties"] == {"x": {"type": read}, "y": {"type": "string"}}
        assert use.shown[0]["function"]["parameters"] == given, "the model sees what the client sent"


def test_functions_are_an_older_word_for_tools(http: httpx.Client) -> None:
    fields = {"tools": None, "functions": [WEATHER["function"], NOW["function"]], "function_call": "auto"}
    (choice,) = post(http, PATH, messages=say(CALL), **fields)["choices"]
    assert choice["message"]["function_call"] == {"name": "weather", "arguments": '{"city": "Köln"}'}
    assert choice["finish_reason"] == "function_call"


def test_the_template_sees_calls_of_functions_as_those_of_tools() -> None:
    def call(city: str) -> dict[str, Any]:
        return {"name": "weather", "arguments": json.dumps({"city": city})}

    messages: list[Any] = [{"role": "user", "content": "a"}]
    for city in ("Köln", "Bonn"):
        messages.append({"role": "assistant", "content": None, "function_call": call(city)})
        messages.append({"role": "function", "name": "weather", "content": f"rain in {city}"})
    body = ChatRequest.model_validate({"messages": messages, "functions": [WEATHER["function"]]})
    tokenizer: Any = SimpleNamespace(knows_role=lambda role: True)
    turns: list[Any] = list(chat_prompt(body, tokenizer).messages)
    ids = []
    for asks, answers in (turns[1:3], turns[3:5]):
        (made,) = asks["tool_calls"]
        assert answers["role"] == "tool" and answers["name"] == "weather"
        assert answers["tool_call_id"] == made["id"] and f"in {made['function']['arguments']['city']}" in str(answers)
        ids.append(made["id"])
    assert len(set(ids)) == 2 and all(len(each) == 9 and each.isalnum() for each in ids), "as Mistral's templates want"
    assert chat_prompt(ChatRequest.model_validate({"messages": messages}), tokenizer).messages == turns


def test_reasoning_has_a_field_of_its_own(http: httpx.Client) -> None:
    message, reason = answer(http, f"<think>Hm, <tool_call></think>\n\n{CALL_NOW}")
    assert (message["reasoning_content"], message["content"], reason) == ("Hm, <tool_call>", None, "tool_calls")
    message, _ = answer(http, "<think>Hm</think>Hello", tools=None)
    assert message == {"role": "assistant", "content": "Hello", "reasoning_content": "Hm"}


def test_reasoning_can_stay_in_the_text_or_be_dropped_or_come_at_once(http: httpx.Client) -> None:
    text = "<think>Hm, well</think>Hello"
    assert answer(http, text, separate_reasoning=False)[0] == {"role": "assistant", "content": text}
    assert answer(http, text, include_reasoning=False)[0] == {"role": "assistant", "content": "Hello"}
    parts = chunks(http, PATH, messages=say(text), stream_reasoning=False)
    deltas = [part["choices"][0]["delta"] for part in parts]
    assert [delta["reasoning_content"] for delta in deltas if "reasoning_content" in delta] == ["Hm, well"]
    assert {"reasoning_content": "Hm, well"} in deltas, "clients that read a chunk's text first would show it first"


def test_the_prompt_may_have_opened_the_reasoning(http: httpx.Client) -> None:
    fields: dict[str, Any]
    thinks = {"enable_thinking": True}
    for fields in (thinks, {"chat_template_kwargs": thinks}, {"reasoning": {"enabled": True, "effort": "high"}}):
        message, _ = answer(http, "Hm</think>Hello", **fields)
        assert message == {"role": "assistant", "content": "Hello", "reasoning_content": "Hm"}
    off = ({"enable_thinking": False}, {"reasoning_effort": "none"})
    for fields in (*off, {"reasoning": {"enabled": False}}, {"reasoning": {"effort": "none"}}):
        assert answer(http, "Hello", **fields)[0] == {"role": "assistant", "content": "Hello"}


def test_messages_are_tokenized_with_the_tools_that_their_chat_would_show(http: httpx.Client) -> None:
    body = {"messages": say("a"), "tools": [NOW], "chat_template": "{% if tools %}tools{% else %}none{% endif %}"}
    for choice, shown in ((None, "tools"), ("auto", "tools"), ("none", "none")):
        ids = post(http, "/tokenize", **body, tool_choice=choice)["tokens"]
        assert post(http, "/detokenize", tokens=ids)["prompt"] == shown


def test_the_effort_reaches_the_template_by_any_of_its_names() -> None:
    messages = say("hi")
    for fields in (
        {"reasoning_effort": "low"},
        {"reasoning": {"effort": "low"}},
        {"reasoning": {"reasoning_effort": "low"}},
    ):
        asked = ChatRequest.model_validate({"messages": messages} | fields)
        assert template_variables(asked) == {"reasoning_effort": "low"}
    both = ChatRequest.model_validate(
        {"messages": messages, "reasoning_effort": "low", "enable_thinking": True, "reasoning": {"enabled": False}}
    )
    variables = template_variables(both)
    assert (variables["reasoning_effort"], variables["thinking"]) == ("low", True), "fields of their own go before"


def test_reasoning_that_does_not_end_is_reasoning(http: httpx.Client) -> None:
    message, reason = answer(http, "<think>Hm, well", max_tokens=3)
    assert (message["content"], reason) == (None, "length")
    assert "Hm, well".startswith(message["reasoning_content"])


def test_special_tokens_have_text_if_asked_for(http: httpx.Client) -> None:
    text = "<|start|>Hi</think>"
    assert answer(http, text, separate_reasoning=False)[0]["content"] == "Hi</think>"
    assert answer(http, text, skip_special_tokens=False)[0]["content"] == text
    body = {"prompt": text + "<|end|>", "max_tokens": 50}
    assert post(http, "/v1/completions", **body)["choices"][0]["text"] == "Hi"
    assert post(http, "/v1/completions", **body, skip_special_tokens=False)["choices"][0]["text"] == text


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"tool_choice": "required", "tools": None}, "there are no tools"),
        ({"tool_choice": "always"}, "tool_choice is 'always', but must be auto, none, required or"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "but no tool is called that"),
        ({"tool_choice": {"type": "custom", "custom": {"name": "f"}}}, "must be auto, none, required or"),
        ({"tools": [NOW, NOW]}, "2 tools have 1 different names"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "pattern"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}}]},
            "be an object",
        ),
    ],
)
def test_tools_that_make_no_sense_are_refused(http: httpx.Client, fields: dict[str, Any], words: str) -> None:
    assert words in refusal(http, PATH, **({"messages": say("hi"), "tools": [NOW]} | fields))["message"]


@pytest.mark.parametrize("streamed", [False, True])
def test_openais_client_reads_calls_that_the_model_makes(scripted: ServerProcess, streamed: bool) -> None:
    fields: Any = {"model": "default", "messages": say(f"I look.\n{CALL}\n{CALL_NOW}"), "tools": [WEATHER, NOW]}
    with openai.OpenAI(base_url=f"http://{scripted.http_address}/v1", api_key="none", max_retries=0) as client:
        if streamed:
            with client.chat.completions.stream(**fields, tool_choice="auto") as stream:
                message: Any = stream.get_final_completion().choices[0].message
        else:
            message = client.chat.completions.create(**fields, tool_choice="auto").choices[0].message
    assert message.content == "I look."
    called = [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls]
    assert called == [("weather", {"city": "Köln"}), ("now", {})]
