"""/v1/messages: Anthropic's own client, and requests as Claude Code sends them. The fake engine answers with the last
message, which so is what a model writes."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import anthropic
import httpx
import jsonschema
import pytest
from anthropic import beta_tool
from anthropic.types import ToolParam
from http_calls import connect
from server_process import ServerProcess

from jaxsgl.errors import InvalidRequest
from jaxsgl.frontend.http.anthropic.conversation import MessagesRequest, chat_of
from jaxsgl.frontend.http.anthropic.messages import Message
from jaxsgl.requests.request import FinishReason
from jaxsgl.text.answer import AnswerParser
from jaxsgl.text.calls import FORMS
from jaxsgl.text.sample import End, Piece

PATH = "/v1/messages"
WEATHER: ToolParam = {
    "name": "weather",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
ALL = f"Hm</think>I look.{CALL}"


@pytest.fixture
def http(scripted: ServerProcess) -> Iterator[httpx.Client]:
    with connect(scripted) as http:
        yield http


@pytest.fixture
def client(scripted: ServerProcess) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=f"http://{scripted.http_address}", api_key="none", max_retries=0) as client:
        yield client


def ask(text: str, **fields: Any) -> dict[str, Any]:
    return {"model": "default", "max_tokens": 100, "messages": [{"role": "user", "content": text}]} | fields


def test_a_text_is_answered_with_a_text(client: anthropic.Anthropic) -> None:
    answer = client.messages.create(**ask("Hello you", system="Be brief"))
    (block,) = answer.content
    assert block.type == "text" and block.text == "Hello you"
    assert (answer.type, answer.role, answer.stop_reason, answer.stop_sequence) == (
        "message", "assistant", "end_turn", None
    )  # fmt: skip
    count = client.messages.count_tokens(model="default", messages=[{"role": "user", "content": "Hello you"}])
    usage = answer.usage
    assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == count.input_tokens == 6
    assert usage.output_tokens == 6  # with the end's token


def test_reasoning_text_and_calls_are_blocks_in_their_order(client: anthropic.Anthropic) -> None:
    thinking = {"type": "enabled", "budget_tokens": 1024}
    answer = client.messages.create(**ask(ALL, tools=[WEATHER], thinking=thinking))
    reasoning, text, call = answer.content
    assert reasoning.type == "thinking" and reasoning.thinking == "Hm" and reasoning.signature
    assert text.type == "text" and text.text == "I look."
    assert call.type == "tool_use" and (call.name, call.input) == ("weather", {"city": "Köln"})
    assert call.id.startswith("toolu_") and answer.stop_reason == "tool_use"
    dropped = client.messages.create(**ask(f"<think>{ALL}", tools=[WEATHER]))
    assert [block.type for block in dropped.content] == ["text", "tool_use"]


def test_a_stream_has_the_same_in_events(client: anthropic.Anthropic, http: httpx.Client) -> None:
    body = ask(ALL, tools=[WEATHER], thinking={"type": "adaptive"})
    whole = client.messages.create(**body)
    with client.messages.stream(**body) as stream:
        streamed = stream.get_final_message()
    assert without_ids(streamed) == without_ids(whole)
    with http.stream("POST", f"{PATH}?beta=true", json=body | {"stream": True}) as answer:
        lines = [line for line in answer.iter_lines() if line]
    names = [line.removeprefix("event: ") for line in lines[::2]]
    events = [json.loads(line.removeprefix("data: ")) for line in lines[1::2]]
    assert [event["type"] for event in events] == names
    assert names[:3] == ["message_start", "ping", "content_block_start"]
    assert names[-2:] == ["message_delta", "message_stop"]
    assert (names.count("content_block_start"), names.count("content_block_stop")) == (3, 3)
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    assert "".join(delta.get("partial_json", "") for delta in deltas) == '{"city": "Köln"}'
    assert {delta["type"] for delta in deltas} == {
        "thinking_delta", "signature_delta", "text_delta", "input_json_delta"
    }  # fmt: skip


def without_ids(answer: anthropic.types.Message) -> Any:
    fields = answer.to_dict()
    for block in fields["content"]:  # type: ignore[attr-defined]
        block.pop("id", None)
        block.pop("signature", None)
    return {name: fields[name] for name in ("content", "stop_reason", "stop_sequence")}


def test_why_an_answer_ends(client: anthropic.Anthropic) -> None:
    cut = client.messages.create(**ask("Hello you", max_tokens=3))
    assert (cut.stop_reason, cut.usage.output_tokens) == ("max_tokens", 3)
    stopped = client.messages.create(**ask("Hello you", stop_sequences=["you", "xy"]))
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "you")


@pytest.mark.parametrize(
    ("arguments", "as_far_as_it_came"),
    [
        ('{"city": "Kö', {"city": "Kö"}),
        ('{"days": 3, "city', {"days": 3}),
        (f'{{"days": {"1" * 5000}}}', {}),  # Python makes no integer of so many digits
    ],
)
def test_the_input_of_a_call_is_what_can_be_read_of_its_arguments(
    arguments: str, as_far_as_it_came: dict[str, Any]
) -> None:
    parser = AnswerParser(None, FORMS["hermes"], {"weather": {}}, constrained=True)
    form: Any = SimpleNamespace(include=True, parser=lambda: parser, new_call_id=lambda: "call_a")
    message = Message("msg_a", "default", form, ())
    end = End(FinishReason.LENGTH, matched_stop=None, prompt_tokens=3, cached_tokens=0, completion_tokens=2)
    message.take(Piece(f'<tool_call>\n{{"name": "weather", "arguments": {arguments}', [5, 6], end), 3)
    (block,) = message.whole()["content"]
    assert (block["type"], block["input"]) == ("tool_use", as_far_as_it_came)


def test_a_call_can_be_demanded(client: anthropic.Anthropic) -> None:
    """The fake engine ignores grammars: what is demanded shows in the form that the answer is read in."""
    answer = client.messages.create(**ask(CALL, tools=[WEATHER], tool_choice={"type": "any"}))
    assert [block.type for block in answer.content] == ["tool_use"]
    answer = client.messages.create(**ask(CALL, tools=[WEATHER], tool_choice={"type": "none"}))
    assert [block.type for block in answer.content] == ["text"]


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ({"model": "gpt-9"}, 404, "gpt-9"),
        ({"max_tokens": 0}, 400, "max_tokens"),
        ({"messages": []}, 400, "messages"),
        ({"tool_choice": {"type": "tool"}}, 400, "names none"),
        ({"tool_choice": {"type": "any"}}, 400, "there are no tools"),
        ({"messages": [{"role": "user", "content": [{"type": "audio"}]}]}, 400, r"content\[0\] is of type 'audio'"),
        ({"messages": [{"role": "user", "content": "x" * 300}]}, 400, "context"),
    ],
)
def test_errors_have_anthropics_shape(http: httpx.Client, body: dict[str, Any], status: int, words: str) -> None:
    answer = http.post(PATH, json=ask("Hi") | body)
    error = answer.json()
    assert (answer.status_code, error["type"], set(error["error"])) == (status, "error", {"type", "message"})
    assert error["error"]["type"] == {400: "invalid_request_error", 404: "not_found_error"}[status]
    assert re.search(words, error["error"]["message"])


def test_the_client_raises_its_own_errors(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError, match="gpt-9") as raised:
        client.messages.create(**ask("Hi") | {"model": "gpt-9"}, extra_headers={"x-request-id": "mine"})
    assert raised.value.request_id == "mine"
    with pytest.raises(anthropic.BadRequestError, match="tool_choice"):
        client.messages.create(**ask("Hi", tool_choice={"type": "any"}))


def test_the_clients_threads_go_on_with_the_whole_conversation(client: anthropic.Anthropic) -> None:
    """Its thread sends the last turn alone to a server that keeps the others. The fake engine repeats that turn."""
    fields: Any = {"model": "default", "max_tokens": 40, "system": "Be brief"}
    thread = client.beta.messages.thread(**fields, unsupported_request_behavior="continue_unthreaded")
    asked: Any = {"role": "user", "content": "Hello you"}
    thread.send(asked)
    answer = thread.send({"role": "user", "content": "x"})
    whole: Any = [asked, {"role": "assistant", "content": "Hello you"}, {"role": "user", "content": "x"}]
    count = client.messages.count_tokens(model="default", system="Be brief", messages=whole)
    assert answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0) == count.input_tokens
    with pytest.raises(anthropic.BadRequestError, match=r"thread is not taken: .*continue_unthreaded"):
        client.beta.messages.thread(**fields).send(asked)


def test_the_clients_tool_runner_sends_the_call_with_its_result(client: anthropic.Anthropic) -> None:
    @beta_tool
    def weather(city: str) -> str:
        """Says the weather."""
        return f"sunny in {city}"

    sent: list[Any] = []
    client._client.event_hooks = {"request": [lambda request: sent.append(json.loads(request.content))]}
    first, last = list(client.beta.messages.tool_runner(**ask(CALL), tools=[weather], max_iterations=2))
    assert first.stop_reason == "tool_use"
    assert [block.text for block in last.content if block.type == "text"] == ["sunny in Köln"]
    blocks = [block["type"] for message in sent[-1]["messages"][1:] for block in message["content"]]
    assert blocks == ["tool_use", "tool_result"]
    assert [tool["name"] for tool in sent[-1]["tools"]] == ["weather"]


@pytest.mark.parametrize("name", ["thread", "container", "compaction", "mcp_servers"])
def test_what_anthropics_servers_keep_or_call_is_refused(http: httpx.Client, name: str) -> None:
    values = {"thread": {"type": "create"}, "container": "container_1", "mcp_servers": [{"type": "url", "url": "a"}]}
    body = ask("Hi") | {name: values.get(name, {"type": "summary"})}
    refused = http.post(PATH, json=body)
    error = refused.json()["error"]
    assert (refused.status_code, error["type"]) == (400, "invalid_request_error")
    assert error["message"].startswith(f"{name} is not taken: ")
    details = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    assert error.get("details") == (details if name == "thread" else None)
    assert http.post(PATH, json=ask("Hi") | {name: None}).status_code == 200


@pytest.mark.parametrize(
    ("kind", "arguments", "wrong"),
    [
        ("bash_20250124", {"command": "ls"}, {"cmd": "ls"}),
        ("text_editor_20250728", {"command": "insert", "path": "a", "insert_line": 0, "insert_text": "b"}, {}),
        ("text_editor_20250124", {"command": "undo_edit", "path": "a"}, {"command": "insert", "insert_text": "b"}),
        ("memory_20250818", {"command": "rename", "old_path": "a", "new_path": "b"}, {"command": "undo_edit"}),
    ],
)
def test_the_model_is_shown_what_anthropics_tools_of_the_client_take(
    kind: str, arguments: dict[str, Any], wrong: dict[str, Any]
) -> None:
    chat = chat_of(MessagesRequest.model_validate(ask("a", tools=[{"type": kind, "name": "it"}])))
    assert chat.tools is not None
    (tool,) = (tool.function for tool in chat.tools)
    assert tool.name == "it" and tool.description and tool.parameters is not None
    jsonschema.validate(arguments, tool.parameters)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(wrong, tool.parameters)


def test_a_tool_of_the_client_that_is_not_known_needs_a_schema() -> None:
    tool: dict[str, Any] = {"type": "computer_20250124", "name": "computer", "display_width_px": 1024}
    with pytest.raises(InvalidRequest, match=r"computer_20250124, but .* give it a description and an input_schema"):
        chat_of(MessagesRequest.model_validate(ask("a", tools=[tool])))
    schema = {"type": "object", "properties": {"action": {"type": "string"}}}
    chat = chat_of(MessagesRequest.model_validate(ask("a", tools=[tool | {"input_schema": schema}])))
    assert chat.tools is not None and chat.tools[0].function.parameters == schema


def test_the_client_lists_what_is_served(client: anthropic.Anthropic) -> None:
    (model,) = client.models.list()
    assert (model.type, model.display_name) == ("model", model.id)
    assert abs(model.created_at.timestamp() - time.time()) < 3600
    assert client.models.retrieve(model.id) == model


def test_a_key_may_come_in_anthropics_header(start_server: Callable[..., ServerProcess]) -> None:
    server = start_server("--api-key", "secret")
    server.wait_until_ready()
    with connect(server) as http:
        for headers in ({}, {"x-api-key": "wrong"}):
            refused = http.post(PATH, json=ask("Hi"), headers=headers)
            assert (refused.status_code, refused.json()["error"]["type"]) == (401, "authentication_error")
        for headers in ({"x-api-key": "secret"}, {"authorization": "Bearer secret"}):
            assert http.get("/v1/models", headers=headers).status_code == 200


# What Claude Code sends, shortened.
CLAUDE_CODE: dict[str, Any] = {
    "model": "default",
    "max_tokens": 32000,
    "stream": True,
    "temperature": 1,
    "metadata": {"user_id": "user_1_account__session_2"},
    "thinking": {"type": "enabled", "budget_tokens": 31999},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1; cch=1a2b3;"},
        {"type": "text", "text": "You are Claude Code.", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "Be concise.", "cache_control": {"type": "ephemeral", "ttl": "1h"}},
    ],
    "tools": [
        {
            "name": "mcp__files__read",
            "description": "Reads a file",
            "input_schema": {"$schema": "http://json-schema.org/draft-07/schema#", "type": "object", "properties": {}},
            "cache_control": {"type": "ephemeral"},
        },
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
    ],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "<system-reminder>a</system-reminder>"},
                                     {"type": "text", "text": "look at it", "cache_control": {"type": "ephemeral"}}]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "Hm", "signature": "s"},
            {"type": "redacted_thinking", "data": "xyz"},
            {"type": "text", "text": "I look."},
            {"type": "tool_use", "id": "toolu_1", "name": "mcp__files__read", "input": {"path": "a"}},
            {"type": "tool_use", "id": "toolu_2", "name": "mcp__files__read", "input": {}},
        ]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "toolu_1", "content": "text of a"},
            {"type": "tool_result", "tool_use_id": "toolu_2", "is_error": True, "content": [
                {"type": "text", "text": "none"},
                {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}},
            ]},
            {"type": "text", "text": "go on"},
        ]},
    ],
}  # fmt: skip


def test_a_request_of_claude_code_is_a_chat() -> None:
    chat = chat_of(MessagesRequest.model_validate(CLAUDE_CODE))

    def call(number: int, arguments: dict[str, Any]) -> dict[str, Any]:
        function = {"name": "mcp__files__read", "arguments": arguments}
        return {"id": f"toolu_{number}", "type": "function", "function": function}

    assert [message.model_dump(exclude_unset=True) for message in chat.messages] == [
        {"role": "system", "content": "You are Claude Code.\nBe concise."},
        {"role": "user", "content": "<system-reminder>a</system-reminder>\nlook at it"},
        {
            "role": "assistant", "content": "I look.", "reasoning_content": "Hm",
            "tool_calls": [call(1, {"path": "a"}), call(2, {})],
        },
        {"role": "tool", "tool_call_id": "toolu_1", "content": "text of a"},
        {"role": "tool", "tool_call_id": "toolu_2", "content": "Error: none"},
        {
            "role": "user",
            "content": [
                {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
                {"type": "text", "text": "go on"},
            ],
        },
    ]  # fmt: skip
    assert chat.tools is not None and [tool.function.name for tool in chat.tools] == ["mcp__files__read"]
    assert (chat.enable_thinking, chat.max_completion_tokens, chat.temperature) == (True, 32000, 1)
    assert not chat.continue_final_message


def test_the_assistants_last_words_begin_the_answer() -> None:
    begun = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "{"}]
    assert chat_of(MessagesRequest.model_validate(ask("a") | {"messages": begun})).continue_final_message


def test_a_picture_in_a_turn_of_the_assistant_is_refused() -> None:
    picture = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
    for block in (picture, {"type": "search_result", "content": [picture]}):
        said = {"role": "assistant", "content": [{"type": "text", "text": "Here it is:"}, block]}
        body = ask("a") | {"messages": [{"role": "user", "content": "a"}, said]}
        with pytest.raises(InvalidRequest, match=r"messages\[1\]\.content\[1\] has a picture, but turns of the assist"):
            chat_of(MessagesRequest.model_validate(body))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"tools": [{"type": "web_search_20250305", "name": "w"}, {"name": "f g"}]}, "tools.1.name: String should"),
        ({"tool_choice": {"type": "any"}}, "tool_choice is of type any, but there are no tools"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": 5}]}]},
         "messages[0].content[0].tool_use_id is 5, but must be a text"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "t", "input": {}}]}]},
         "messages[0].content[0].name is None, but must be a text"),
    ],
)  # fmt: skip
def test_errors_name_what_the_client_sent(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(words)):
        chat_of(MessagesRequest.model_validate(ask("a") | {"system": "Be brief."} | fields))


def test_what_the_body_says_of_choice_and_form_reaches_the_chat() -> None:
    form = {"type": "json_schema", "schema": {"type": "object"}}
    choice = {"type": "tool", "name": "weather", "disable_parallel_tool_use": True}
    body = ask("a", tools=[WEATHER], tool_choice=choice, output_config={"effort": "max", "format": form})
    chat = chat_of(MessagesRequest.model_validate(body | {"thinking": {"type": "adaptive"}}))
    assert chat.tool_choice == {"type": "function", "function": {"name": "weather"}}
    assert (chat.parallel_tool_calls, chat.reasoning_effort) == (False, "high")
    assert chat.response_format is not None and chat.response_format.type == "json_schema"


def test_a_prompt_that_is_too_long_is_refused_in_words_that_agents_shorten_it_by(http: httpx.Client) -> None:
    """Claude Code looks for "prompt is too long", clients of OpenAI's API for the code or vLLM's words."""
    refused = http.post(PATH, json=ask("a b " * 150))
    assert (refused.status_code, refused.json()["error"]["type"]) == (400, "invalid_request_error")
    assert re.match(r"prompt is too long: the prompt has \d{3} tokens, ", refused.json()["error"]["message"])
    messages = [{"role": "user", "content": "a"}] * 300
    for path, body in (
        ("/v1/completions", {"prompt": [5] * 200}),
        ("/v1/chat/completions", {"messages": ask("a b " * 150)["messages"], "stream": True}),
        ("/v1/chat/completions", {"messages": messages}),
        ("/v1/responses", {"input": "a" * 10_000}),
    ):
        refused = http.post(path, json=body)
        error = refused.json()["error"]
        assert (refused.status_code, error["code"]) == (400, "context_length_exceeded"), path
        assert "this model's maximum context length is 200 tokens" in error["message"], path
