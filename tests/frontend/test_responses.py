"""/v1/responses: OpenAI's own client against a server whose model answers with the last message."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
from http_calls import connect, post, refusal
from openai.types.responses import FunctionToolParam
from played_link import PlayedLink, front_end_of
from server_process import ServerProcess
from test_event_loop import INFO

from jaxsgl.errors import InvalidRequest, NotFound
from jaxsgl.frontend.access import Caller, enter
from jaxsgl.frontend.generation import ServedModel
from jaxsgl.frontend.http.openai.chat import chat_prompt, prepare_chat
from jaxsgl.frontend.http.openai.conversation import LOGPROBS, ResponsesRequest, chat_of
from jaxsgl.frontend.http.openai.responses import ResponseStore, Stored, described
from jaxsgl.frontend.http.openai.schemas import ChatRequest
from jaxsgl.frontend.http.openai.scored_text import ScoredText
from jaxsgl.frontend.http.openai.truncation import fitting
from jaxsgl.messages.replies import TokenLogprob
from jaxsgl.requests.request import FinishReason, Request, too_long
from jaxsgl.text.sample import End, Piece
from jaxsgl.text.tokenizer import Tokenizer

PATH = "/v1/responses"
WEATHER: FunctionToolParam = {
    "type": "function",
    "name": "weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": False,
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
ALL = f"<think>Hm</think>I look.{CALL}"


@pytest.fixture
def http(scripted: ServerProcess) -> Iterator[httpx.Client]:
    with connect(scripted) as http:
        yield http


@pytest.fixture
def client(scripted: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"http://{scripted.http_address}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_a_text_is_answered_with_a_message(client: openai.OpenAI) -> None:
    answer = client.responses.create(model="default", input="Hello you", instructions="Be brief", store=False)
    assert (answer.output_text, answer.status, answer.object) == ("Hello you", "completed", "response")
    (message,) = answer.output
    assert message.type == "message" and message.status == "completed"
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens


def test_reasoning_text_and_calls_are_items_in_their_order(client: openai.OpenAI) -> None:
    answer = client.responses.create(model="default", input=ALL, tools=[WEATHER])
    reasoning, message, call = answer.output
    assert reasoning.type == "reasoning" and reasoning.content is not None
    assert [part.text for part in reasoning.content] == ["Hm"]
    assert message.type == "message" and answer.output_text == "I look."
    assert call.type == "function_call"
    assert (call.name, json.loads(call.arguments)) == ("weather", {"city": "Köln"})
    assert answer.usage is not None and answer.usage.output_tokens_details.reasoning_tokens > 0
    assert answer.usage.output_tokens_details.reasoning_tokens < answer.usage.output_tokens


def test_a_stream_tells_the_same_in_events(client: openai.OpenAI) -> None:
    whole = client.responses.create(model="default", input=ALL, tools=[WEATHER])
    events = list(client.responses.create(model="default", input=ALL, tools=[WEATHER], stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert (kinds.count("response.output_item.added"), kinds.count("response.output_item.done")) == (3, 3)
    for delta, name in (
        ("response.reasoning_text.delta", "Hm"),
        ("response.output_text.delta", "I look."),
        ("response.function_call_arguments.delta", '{"city": "Köln"}'),
    ):
        assert "".join(getattr(event, "delta", "") for event in events if event.type == delta) == name
    last = events[-1]
    assert last.type == "response.completed"
    assert [without_ids(item) for item in last.response.output] == [without_ids(item) for item in whole.output]
    with client.responses.stream(model="default", input=ALL, tools=[WEATHER]) as stream:
        assert stream.get_final_response().output_text == "I look."


def without_ids(item: Any) -> dict[str, Any]:
    return {name: value for name, value in item.to_dict().items() if name not in ("id", "call_id")}


def test_an_answer_that_is_cut_is_incomplete(client: openai.OpenAI) -> None:
    answer = client.responses.create(model="default", input="Hello you, how are you?", max_output_tokens=2)
    assert answer.status == "incomplete"
    assert answer.incomplete_details is not None and answer.incomplete_details.reason == "max_output_tokens"
    assert answer.output[0].type == "message" and answer.output[0].status == "incomplete"


def test_a_conversation_is_a_chat() -> None:
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "Hi"}, {"type": "input_text", "text": "you"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
        {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "sunny"},
    ]
    form = {"format": {"type": "json_schema", "name": "a", "schema": {"type": "object"}}}
    body = {"input": items, "instructions": "Be brief", "tools": [WEATHER], "text": form, "max_output_tokens": 5}
    chat = chat_of(ResponsesRequest.model_validate(body | {"reasoning": {"effort": "low"}, "temperature": 0.5}))
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": {}}}
    assert [message.model_dump(exclude_unset=True) for message in chat.messages] == [
        {"role": "system", "content": "Be brief"},
        {"role": "user", "content": "Hi\nyou"},
        {"role": "assistant", "reasoning_content": "Hm", "content": "I look.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
    ]
    assert chat.tools is not None and chat.tools[0].function.name == "weather"
    assert chat.response_format is not None and chat.response_format.type == "json_schema"
    assert (chat.max_completion_tokens, chat.reasoning_effort, chat.temperature) == (5, "low", 0.5)


def test_all_reasoning_in_a_row_reaches_the_template() -> None:
    items: list[dict[str, Any]] = [
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "First"}]},
        {"type": "reasoning", "summary": [], "encrypted_content": "x"},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Second"}]},
        {"role": "assistant", "content": "a"},
    ]
    (turn,) = chat_of(ResponsesRequest(input=items)).messages
    assert (turn.reasoning_content, turn.content) == ("First\nSecond", "a")


SENT = [{"type": "output_text", "text": "a"}, {"type": "input_image", "image_url": "data:image/png;base64,AAAA"}]
SHOWN = [
    {"type": "text", "text": "a"},
    {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
]


@pytest.mark.parametrize(
    ("contents", "joined"),
    [
        (["a", "b"], "a\nb"),
        (["a", None, "b"], "a\nb"),
        ([None, None], None),
        (["a", SENT], [SHOWN[0], *SHOWN]),
        ([SENT, "a"], [*SHOWN, SHOWN[0]]),
        ([SENT, None], SHOWN),
    ],
)
def test_what_the_assistant_said_in_a_row_is_one_content(contents: list[Any], joined: Any) -> None:
    items = [{"role": "assistant", "content": content} for content in contents]
    (message,) = chat_of(ResponsesRequest.model_validate({"input": items})).messages
    assert message.model_dump(exclude_unset=True)["content"] == joined


def test_a_content_of_the_assistant_that_is_none_is_refused_beside_another_too() -> None:
    for contents in (["a", 5], [5, "a"], [[], 5], [[{"type": "text", "text": 5}]]):
        items = [{"role": "assistant", "content": content} for content in contents]
        with pytest.raises(InvalidRequest, match=r"input\[[01]\]"):
            chat_of(ResponsesRequest.model_validate({"input": items}))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"previous_response_id": "resp_1"}, "stored here: it was sent with store: false or to another"),
        ({"conversation": "conv_1"}, "conversations are not kept here"),
        ({"background": True}, "background is true"),
        ({"input": []}, "must be a text, or a list"),
        (
            {"input": [{"type": "item_reference", "id": "x"}]},
            "input[0] refers to item x, but none of that id is stored",
        ),
        ({"prompt": {"id": "pmpt_1"}}, "prompt isn't taken here"),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format has no schema"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input[0] holds a part of type"),
        ({"input": [{"role": "robot", "content": "a"}]}, "input[0].role is 'robot', but must be one of system,"),
        ({"input": [{"type": "function_call", "arguments": "{}"}]}, "input[0].name is None, but must be a text"),
        (
            {"input": [{"type": "function_call", "name": "f", "arguments": "[]"}]},
            "input[0]: the arguments of the call of f",
        ),
        ({"input": [{"type": "function_call_output", "output": 5}]}, "input[0].output is 5, but must be a text"),
        ({"tools": [{"type": "web_search"}, {"type": "function"}]}, "tools.1.name: Field required"),
        (
            {"text": {"format": {"type": "json_object"}}, "response_format": {"type": "json_object"}},
            "each ask for a form",
        ),
        ({"echo": True}, "echo isn't taken here"),
        ({"top_logprobs": 1}, "include doesn't name message.output_text.logprobs"),
        ({"truncation": "middle"}, "'auto' or 'disabled'"),
        ({"rid": "r"}, "rid isn't taken here"),
        ({"temperature": -1}, "greater than or equal to 0"),
        ({"n": 2}, "n is 2, but one answer is made here"),
        ({"max_tokens": 5}, "max_tokens isn't taken here: send max_output_tokens"),
        ({"reasoning_effort": "low"}, "reasoning_effort isn't taken here: send reasoning.effort"),
        ({"logprobs": True}, "logprobs isn't taken here: send include, with message.output_text.logprobs"),
        ({"enable_thinking": "no"}, "enable_thinking: Input should be a valid boolean"),
    ],
)
def test_what_needs_storage_or_is_unknown_is_refused(http: httpx.Client, fields: dict[str, Any], words: str) -> None:
    assert words in refusal(http, PATH, **({"input": "Hi"} | fields))["message"]


def test_an_answer_can_be_continued(client: openai.OpenAI, http: httpx.Client) -> None:
    first = client.responses.create(model="default", input=ALL, tools=[WEATHER])
    output = {"type": "function_call_output", "call_id": "c1", "output": "sunny"}
    second = client.responses.create(model="default", input=[output], previous_response_id=first.id)  # type: ignore[list-item]
    assert (second.output_text, second.previous_response_id) == ("sunny", first.id)
    for _ in client.responses.create(model="default", input="Hi", previous_response_id=second.id, stream=True):
        pass
    assert client.responses.retrieve(second.id).output_text == "sunny"
    client.responses.delete(second.id)
    streamed = http.get(f"{PATH}/{first.id}", params={"stream": "true"})
    assert streamed.status_code == 400 and "stream is true, but" in streamed.text
    missing = http.get(f"{PATH}/{second.id}")
    assert (missing.status_code, missing.json()["error"]["type"]) == (404, "not_found_error")
    error = refusal(http, PATH, input="Hi", previous_response_id=second.id)
    assert (error["param"], error["code"]) == ("previous_response_id", "previous_response_not_found")
    unkept = client.responses.create(model="default", input="Hi", store=False)
    assert http.get(f"{PATH}/{unkept.id}").status_code == 404


def test_items_of_answers_may_be_sent_by_their_ids(client: openai.OpenAI, http: httpx.Client) -> None:
    """As Vercel's AI SDK does, unless `store` is false."""
    first = client.responses.create(model="default", input=ALL, tools=[WEATHER])
    _, message, _ = first.output
    given = [{"role": "user", "content": "Hi"}, {"type": "item_reference", "id": message.id}]
    assert post(http, PATH, input=given, store=False)["output"][0]["content"][0]["text"] == "I look."
    client.responses.delete(first.id)
    assert "send the item itself" in refusal(http, PATH, input=given)["message"]


def test_an_item_is_found_as_long_as_its_answer() -> None:
    store = ResponseStore(1 << 10)
    call = {"id": "fc_1", "type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    store.put("r", Stored(json.dumps({"output": [{"id": "msg_1"}, call]}).encode(), b"[]", ("msg_1", "fc_1")))
    reference = {"type": "item_reference", "id": "fc_1"}
    assert store.referred(0, reference) == call
    assert store.referred(0, {"type": "x"}) == {"type": "x"}
    store.put("s", Stored(b"a" * 700, b"", ()))
    with pytest.raises(InvalidRequest, match=r"input\[3\] refers to item fc_1, but none .* raise --responses-store"):
        store.referred(3, reference)


def test_an_answer_says_how_it_was_sampled_where_the_client_left_it_to_the_model(tokenizer: Tokenizer) -> None:
    async def prepared(body: ResponsesRequest) -> Request:
        with ThreadPoolExecutor(1) as threads:
            model = ServedModel(INFO, tokenizer, sampling_defaults={"temperature": 0.5, "top_p": 0.75})
            request, _ = await prepare_chat(front_end_of(PlayedLink(), threads, model), chat_of(body), "resp_1")
            return request

    body = ResponsesRequest(input="Hi", top_p=0.25)
    answer = described(body, asyncio.run(prepared(body)), "m")
    assert (answer["id"], answer["temperature"], answer["top_p"]) == ("resp_1", 0.5, 0.25)


def test_a_conversation_goes_on_behind_a_call_that_was_cut(tokenizer: Tokenizer) -> None:
    call = {"type": "function_call", "status": "incomplete", "call_id": "c", "name": "f", "arguments": '{"x": 0, "argu'}
    chat = chat_of(ResponsesRequest(input="go on"), [{"role": "user", "content": "Hi"}, call])
    turn: Any = chat_prompt(chat, tokenizer).messages[1]
    assert turn["tool_calls"][0]["function"] == {"name": "f", "arguments": {"x": 0}}


def test_a_conversation_goes_on_where_it_ended() -> None:
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    earlier = [{"role": "user", "content": "Hi"}, call]
    chat = chat_of(ResponsesRequest(input="you"), earlier)
    assert [message.role for message in chat.messages] == ["user", "assistant", "user"]
    with pytest.raises(InvalidRequest, match=r"input\[0\] is of type 'x'"):
        chat_of(ResponsesRequest(input=[{"type": "x"}]), earlier)


def test_the_oldest_answers_make_room() -> None:
    store = ResponseStore(1 << 10)
    for number in range(4):
        store.put(f"r{number}", Stored(b"a" * 100, b"b" * 100))
        store.get("r0")
    assert [name for name in ("r0", "r1", "r2", "r3") if kept(store, name)] == ["r0", "r3"]
    store.put("large", Stored(b"a" * 2000, b""))
    assert not kept(store, "large") and kept(store, "r0")
    store.put("r0", Stored(b"a" * 100, b"b" * 100))
    store.delete("r0")
    store.delete("r3")
    store.put("most", Stored(b"a" * 800, b""))
    assert kept(store, "most"), "all room is free again"


def test_only_the_tenant_finds_its_answers() -> None:
    store = ResponseStore(1 << 10)
    enter(Caller(tenant="a"))
    store.put("r", Stored(b"", b"[]"))
    assert kept(store, "r")
    enter(Caller(tenant="b"))
    assert not kept(store, "r")
    enter(Caller())


def kept(store: ResponseStore, name: str) -> bool:
    with contextlib.suppress(NotFound):
        return store.get(name) is not None
    return False


@pytest.mark.parametrize("kind", ["web_search", "namespace", "custom", "mcp"])
def test_tools_of_other_kinds_are_left_out_and_logged(scripted: ServerProcess, http: httpx.Client, kind: str) -> None:
    answer = post(http, PATH, input=CALL, tools=[{"type": kind, "name": "x"}, WEATHER])
    assert [item["type"] for item in answer["output"]] == ["function_call"]
    scripted.wait_for_log(f"a tool of type '{kind}' is left out")


def test_texts_have_the_log_probabilities_of_their_tokens(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"input": f"<think>Hm</think>I löök 🙂.{CALL}", "tools": [WEATHER], "top_logprobs": 2}
    fields["include"] = [LOGPROBS]
    answer = client.responses.create(model="default", **fields)
    _, message, _ = answer.output
    assert isinstance(message, openai.types.responses.ResponseOutputMessage)
    (content,) = message.content
    assert content.type == "output_text" and content.logprobs is not None and answer.top_logprobs == 2
    assert bytes(byte for token in content.logprobs for byte in token.bytes).decode() == "I löök 🙂."
    assert all(len(token.top_logprobs) == 2 and token.logprob < 0 for token in content.logprobs)
    streamed: list[float] = []
    for event in client.responses.create(model="default", stream=True, **fields):
        if event.type == "response.output_text.delta":
            streamed += [token.logprob for token in event.logprobs]
        if event.type == "response.output_text.done":
            assert [token.logprob for token in event.logprobs] == streamed
    assert streamed == [token.logprob for token in content.logprobs]
    plain = client.responses.create(model="default", input="Hi")
    plain_answer: Any = plain.to_dict()
    assert plain_answer["output"][0]["content"][0]["logprobs"] == [] and plain.top_logprobs == 0


def test_tokens_are_shared_out_by_the_text_that_they_make(tokenizer: Tokenizer) -> None:
    text = ScoredText(tokenizer, tokenizer.detokenizer())
    ids = tokenizer.encode("a龘bcd", add_special_tokens=False)
    assert len(ids) > 5, "a character of several tokens is among them"
    scores = tuple(TokenLogprob(-id / 8) for id in ids)

    def taken(first: int, last: int, arrived: str, end: End | None = None) -> list[str]:
        return list(text.split(Piece(arrived, ids[first:last], end, logprobs=scores[first:last])))

    assert taken(0, 2, "a") == ["a"]
    assert [token.logprob for token in text.of(1)] == [-ids[0] / 8]
    assert taken(2, len(ids) - 1, "龘") == ["龘"], "a stop string holds the others back"
    assert [token.logprob for token in text.of(1)] == [-id / 8 for id in ids[1:-3]]
    end = End(FinishReason.STOP, None, 1, 0, len(ids))
    assert taken(len(ids) - 1, len(ids), "bc", end) == ["b", "c"]
    assert [token.token for token in text.of(1)] == ["c"], "that of a marker before is left out"
    assert text.of(1) == []


def test_a_conversation_that_is_too_long_loses_its_oldest_items(http: httpx.Client) -> None:
    long = [{"role": "user", "content": "a" * 5000}, {"role": "assistant", "content": "b" * 5000}] * 3
    given = [*long, {"role": "user", "content": "Hi"}]
    error = refusal(http, PATH, input=given)
    assert error["code"] == "context_length_exceeded"
    answer = post(http, PATH, input=given, truncation="auto", store=False)
    assert (answer["output"][0]["content"][0]["text"], answer["truncation"]) == ("Hi", "auto")
    alone = [*long, {"role": "user", "content": "a" * 20000}]
    assert refusal(http, PATH, input=alone, truncation="auto")["code"] == "context_length_exceeded"


def test_what_is_kept_begins_with_a_turn_of_the_user_if_one_fits() -> None:
    call = {"type": "function_call", "call_id": "c"}
    output = {"type": "function_call_output", "call_id": "c"}
    items: list[dict[str, Any]] = [
        {"role": "developer"}, {"role": "user"}, {"role": "assistant"}, {"role": "user", "type": "message"}, call,
        output, output, call, output,
    ]  # fmt: skip
    tried: list[int] = []

    def fit(most: int) -> list[dict[str, Any]]:
        async def prepare(given: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
            tried.append(len(given))
            if len(given) > most:
                raise too_long("too long")
            return list(given)

        return asyncio.run(fitting(items, prepare))

    assert fit(9) == items and tried == [9]
    assert fit(8) == fit(7) == [items[0], *items[3:]]
    assert fit(6) == fit(3) == [items[0], *items[7:]]
    assert len(tried) <= 1 + 4 * 3
    with pytest.raises(InvalidRequest, match="too long"):
        fit(2)


def test_the_tokens_of_a_prompt_are_counted(client: openai.OpenAI, http: httpx.Client) -> None:
    answer = client.responses.create(model="default", input="Hello you")
    assert answer.usage is not None
    counted = post(http, f"{PATH}/input_tokens", input="Hello you")
    assert counted == {"object": "response.input_tokens", "input_tokens": answer.usage.input_tokens}
    follows = post(http, f"{PATH}/input_tokens", input="Hello you", previous_response_id=answer.id)
    assert follows["input_tokens"] == answer.usage.input_tokens, "this template shows the last turn alone"
    assert (
        "no answer resp_1 is stored"
        in refusal(http, f"{PATH}/input_tokens", input="a", previous_response_id="resp_1")["message"]
    )


def test_unknown_fields_do_no_harm(http: httpx.Client) -> None:
    body: dict[str, Any] = {
        "input": "Hi",
        "messages": [],
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "a",
        "user": None,
    }
    assert post(http, PATH, **body)["output"][0]["content"][0]["text"] == "Hi"


def test_what_chat_has_and_openai_does_not_reaches_the_chat() -> None:
    fields: dict[str, Any] = {
        "enable_thinking": False,
        "thinking_token_budget": 10,
        "thinking_budget": 10,
        "separate_reasoning": False,
        "stream_reasoning": False,
        "include_reasoning": False,
        "documents": [{"text": "a"}],
        "prediction": {"type": "content", "content": "x"},
        "add_generation_prompt": False,
        "continue_final_message": True,
    }
    chat = chat_of(ResponsesRequest.model_validate({"input": "Hi"} | fields))
    assert chat.model_dump(include=set(fields)) == fields
    with pytest.raises(InvalidRequest, match="thinking_budget: "):
        chat_of(ResponsesRequest.model_validate({"input": "Hi", "thinking_budget": "all"}))


def test_a_field_that_only_chat_has_reaches_it_or_is_refused() -> None:
    refused = []
    for name in ChatRequest.model_fields.keys() - ResponsesRequest.model_fields.keys():
        with pytest.raises(InvalidRequest) as error:
            chat_of(ResponsesRequest.model_validate({"input": "Hi", name: {"no": "value"}}))
        if "isn't taken here" in str(error.value):
            refused.append(name)
        else:
            assert name in str(error.value), "the chat's schema has seen it"
    assert sorted(refused) == [
        "chat_template", "echo", "function_call", "functions", "logprob_token_ids", "logprobs", "max_completion_tokens",
        "messages", "prompt_logprobs", "reasoning_effort", "return_hidden_states", "return_routed_experts",
        "return_token_ids", "return_tokens_as_token_ids", "rid",
    ]  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_is_dropped_or_comes_at_once_if_asked_for(client: openai.OpenAI, stream: bool) -> None:
    def kinds(**fields: bool) -> tuple[list[str], list[str]]:
        asked: dict[str, Any] = {"model": "default", "input": "<think>Hm, hm</think>I look.", "extra_body": fields}
        if not stream:
            return [], [item.type for item in client.responses.create(**asked).output]
        events = list(client.responses.create(stream=True, **asked))
        deltas = [event.delta for event in events if event.type == "response.reasoning_text.delta"]
        return deltas, [item.type for item in events[-1].response.output]

    assert kinds()[1] == ["reasoning", "message"]
    assert kinds(include_reasoning=False) == ([], ["message"])
    assert kinds(separate_reasoning=False) == ([], ["message"])
    assert kinds(stream_reasoning=False) == (["Hm, hm"] * stream, ["reasoning", "message"])
