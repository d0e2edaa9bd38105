from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_engine_process import EOS_ID
from http_calls import chunks, connect, post, refusal, say
from server_process import ServerProcess

from jaxsgl.errors import InvalidRequest
from jaxsgl.frontend.http.openai.chat import chat_prompt
from jaxsgl.frontend.http.openai.schemas import ChatRequest
from jaxsgl.frontend.http.openai.tools import tool_use
from jaxsgl.text.prompts import ChatPrompt
from jaxsgl.text.tokenizer import TemplateOptions, Tokenizer, load_tokenizer
from tests.text.small_tokenizers import byte_level, save

PATH = "/v1/chat/completions"


@pytest.fixture(scope="module")
def http(server: ServerProcess) -> Iterator[httpx.Client]:
    with connect(server) as http:
        yield http


@pytest.fixture(scope="module")
def telling(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A tokenizer whose chat template writes down all that it is given."""
    template = "{{ [messages, tools, add_generation_prompt, colour] | tojson }}"
    return load_tokenizer(save(byte_level(), tmp_path_factory.mktemp("telling"), template))


def prompt_of(tokenizer: Tokenizer, **body: Any) -> ChatPrompt:
    parsed = ChatRequest.model_validate(body)
    return chat_prompt(parsed, tokenizer)


def rendered(tokenizer: Tokenizer, **body: Any) -> str:
    prompt = prompt_of(tokenizer, **body)
    turns: Any = prompt.messages
    return tokenizer.render_chat(turns, prompt.options)


def test_an_answer_has_all_fields_of_openai(http: httpx.Client, model_folder: str, tokenizer: Tokenizer) -> None:
    answer = post(http, PATH, messages=say("hello"), model=model_folder)
    assert answer["id"].startswith("chatcmpl-")
    assert answer["object"] == "chat.completion"
    assert answer["model"] == Path(model_folder).name
    (choice,) = answer["choices"]
    assert choice == {
        "index": 0,
        "message": {"role": "assistant", "content": "user\nhello"},  # the fake echoes the prompt up to the first EOS
        "logprobs": None,
        "finish_reason": "stop",
        "matched_stop": EOS_ID,
        "stop_reason": None,
    }
    prompt_len = len(tokenizer.encode("<|start|>user\nhello<|end|>\n<|start|>assistant\n"))
    assert answer["usage"] == {
        "prompt_tokens": prompt_len,
        "completion_tokens": 7,
        "total_tokens": prompt_len + 7,
        "prompt_tokens_details": {"cached_tokens": prompt_len // 2},
    }


def test_a_stream_starts_with_the_role_and_ends_with_the_reason(http: httpx.Client) -> None:
    first, *parts, last = chunks(http, PATH, messages=say("hello"))
    assert first["object"] == "chat.completion.chunk"
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert all(part["choices"][0]["finish_reason"] is None for part in (first, *parts))
    assert (
        "".join(part["choices"][0]["delta"]["content"] for part in parts)
        + last["choices"][0]["delta"].get("content", "")
        == "user\nhello"
    )
    assert last["choices"][0]["finish_reason"] == "stop"
    assert (last["choices"][0]["matched_stop"], last["choices"][0]["stop_reason"]) == (EOS_ID, None)
    assert len({part["id"] for part in (first, *parts, last)}) == 1
    assert all("usage" not in part for part in (first, *parts, last))


@pytest.mark.parametrize("top_logprobs", [None, 0, 2])
def test_a_stream_says_the_same_as_a_whole_answer(http: httpx.Client, top_logprobs: int | None) -> None:
    body: dict[str, Any] = {"messages": say("Köln 龘 🙂"), "n": 3, "max_tokens": 20, "ignore_eos": True}
    if top_logprobs is not None:
        body |= {"logprobs": True, "top_logprobs": top_logprobs}
    whole = post(http, PATH, **body)
    *parts, last = chunks(http, PATH, **body, stream_options={"include_usage": True})
    assert last["choices"] == []
    assert last["usage"] == whole["usage"]
    for choice in whole["choices"]:
        deltas = [part["choices"][0] for part in parts if part["choices"][0]["index"] == choice["index"]]
        assert "".join(delta["delta"].get("content", "") for delta in deltas) == choice["message"]["content"]
        assert [delta["delta"]["role"] for delta in deltas if "role" in delta["delta"]] == ["assistant"]
        assert deltas[-1]["finish_reason"] == choice["finish_reason"] == "length"
        scored = [token for delta in deltas if delta["logprobs"] for token in delta["logprobs"]["content"]]
        assert scored == (choice["logprobs"]["content"] if top_logprobs is not None else [])


def test_each_chunk_of_a_stream_has_the_usage_of_its_choice_so_far_if_asked(http: httpx.Client) -> None:
    body = {"messages": say("Köln"), "n": 2, "max_tokens": 5, "ignore_eos": True, "logprobs": True}
    parts = chunks(http, PATH, **body, stream_options={"continuous_usage_stats": True})
    prompt_tokens = post(http, PATH, **body)["usage"]["prompt_tokens"]
    told = [0, 0]  # tokens, by their log-probabilities
    for part in parts:
        (choice,), usage = part["choices"], part["usage"]
        told[choice["index"]] += len((choice["logprobs"] or {"content": []})["content"])
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (prompt_tokens, told[choice["index"]])
    assert parts[0]["usage"]["completion_tokens"] == 0, "the role is no token"
    assert told == [5, 5]


def test_logprobs_have_the_form_of_openai(http: httpx.Client, tokenizer: Tokenizer) -> None:
    body = {"messages": say("龘"), "max_tokens": 20, "ignore_eos": True, "logprobs": True, "top_logprobs": 1}
    (choice,) = post(http, PATH, **body)["choices"]
    tokens = choice["logprobs"]["content"]
    prompt = tokenizer.encode("<|start|>user\n龘<|end|>\n<|start|>assistant\n")
    assert [token["logprob"] for token in tokens] == [-id / 8 for id in (prompt * 2)[:20]]
    assert tokens[0]["token"] == "<|start|>"
    assert tokens[0]["bytes"] == list(b"<|start|>")
    for token in tokens:
        if not token["token"].startswith("\\x"):
            assert bytes(token["bytes"]).decode() == token["token"]
        (top,) = token["top_logprobs"]
        assert top == {name: token[name] for name in ("token", "logprob", "bytes")}
    in_parts = [byte for token in tokens if token["token"].startswith("\\x") for byte in token["bytes"]]
    assert bytes(in_parts) == "龘".encode()


def test_tokens_that_a_request_names_stand_in_place_of_the_likeliest(http: httpx.Client) -> None:
    """As in vLLM: behind the token itself, however unlikely they are."""
    of_both: dict[str, Any] = {"logprob_token_ids": [70, 66], "return_tokens_as_token_ids": True, "max_tokens": 2}
    scored = {66: -66 / 8 - 66, 67: -67 / 8, 70: -66 / 8 - 70}  # the fake's
    (choice,) = post(http, "/v1/completions", prompt=[66, 67], logprobs=2, **of_both)["choices"]
    first, second = choice["logprobs"]["top_logprobs"]
    assert first == {"token_id:66": scored[66], "token_id:70": scored[70]}
    assert list(second) == ["token_id:67", "token_id:70", "token_id:66"]
    assert second["token_id:67"] == scored[67]
    (choice,) = post(http, PATH, messages=say("a"), logprobs=True, top_logprobs=2, **of_both)["choices"]
    for token in choice["logprobs"]["content"]:
        assert [top["token"] for top in token["top_logprobs"]] == [token["token"], "token_id:70", "token_id:66"]
    streamed = chunks(http, PATH, messages=say("a"), logprobs=True, **of_both)
    scores = [part["choices"][0]["logprobs"] for part in streamed if part["choices"][0]["logprobs"]]
    assert [token for score in scores for token in score["content"]] == choice["logprobs"]["content"]
    for path, prompt in ((PATH, {"messages": say("a")}), ("/v1/completions", {"prompt": "a"})):
        error = refusal(http, path, **prompt, logprob_token_ids=[70])
        assert "logprob_token_ids are given, but logprobs is not" in error["message"]


def test_token_ids_come_with_the_texts_if_asked_for(http: httpx.Client, tokenizer: Tokenizer) -> None:
    """In vLLM's places: trainers read them."""
    prompt_ids = tokenizer.encode("<|start|>user\nhello<|end|>\n<|start|>assistant\n")
    body = {"messages": say("hello"), "return_token_ids": True, "n": 2}
    answer = post(http, PATH, **body)
    assert answer["prompt_token_ids"] == prompt_ids
    whole = [choice["token_ids"] for choice in answer["choices"]]
    assert whole[0] == prompt_ids[: prompt_ids.index(EOS_ID) + 1]
    streamed: list[list[int]] = [[], []]
    for chunk in chunks(http, PATH, **body):
        (choice,) = chunk["choices"]
        is_first = choice["delta"].get("role") == "assistant"
        assert chunk.get("prompt_token_ids") == (prompt_ids if is_first else None)
        streamed[choice["index"]] += choice.get("token_ids", [])
    assert streamed == whole
    prompts = [[7, 8], [9]]
    body = {"prompt": prompts, "return_token_ids": True, "max_tokens": 3}
    choices = post(http, "/v1/completions", **body)["choices"]
    assert [choice["prompt_token_ids"] for choice in choices] == prompts
    assert [choice["token_ids"] for choice in choices] == [[7, 8, 7], [9, 9, 9]]
    streamed, given = [[], []], [list[int](), list[int]()]
    for chunk in chunks(http, "/v1/completions", **body):
        (choice,) = chunk["choices"]
        streamed[choice["index"]] += choice["token_ids"]
        given[choice["index"]] += choice.get("prompt_token_ids", [])
    assert (streamed, given) == ([[7, 8, 7], [9, 9, 9]], prompts)


def test_max_completion_tokens_counts_before_max_tokens(http: httpx.Client) -> None:
    body = {"messages": say("hello"), "max_tokens": 9, "max_completion_tokens": 2}
    assert post(http, PATH, **body)["usage"]["completion_tokens"] == 2


def test_a_stop_string_is_found_across_tokens(http: httpx.Client) -> None:
    (choice,) = post(http, PATH, messages=say("hello"), stop=["xyz", "r\nh"])["choices"]
    assert (choice["message"]["content"], choice["matched_stop"]) == ("use", "r\nh")


def test_parts_of_text_are_lines_of_one_text(http: httpx.Client) -> None:
    parts = [{"type": "text", "text": "hello"}, {"type": "text", "text": "you"}]
    (choice,) = post(http, PATH, messages=[{"role": "user", "content": parts}])["choices"]
    assert choice["message"]["content"] == "user\nhello\nyou"


def test_a_developer_message_is_a_system_message_where_templates_lack_the_role(
    http: httpx.Client, tmp_path: Path
) -> None:
    (choice,) = post(http, PATH, messages=[{"role": "developer", "content": "be brief"}])["choices"]
    assert choice["message"]["content"] == "system\nbe brief"
    knows = load_tokenizer(save(byte_level(), tmp_path, "{% if messages[0].role == 'developer' %}yes{% endif %}"))
    prompt = prompt_of(knows, messages=[{"role": "developer", "content": "be brief"}])
    messages: Any = prompt.messages
    assert knows.render_chat(messages, prompt.options) == "yes"


def test_a_role_of_its_own_reaches_the_template_that_names_it(tmp_path: Path) -> None:
    """As GLM's observation, or Granite's document."""
    template = "{% for m in messages %}{% if m['role'] == \"document\" %}[{{ m.content }}]{% endif %}{% endfor %}"
    knows = load_tokenizer(save(byte_level(), tmp_path, template))
    assert rendered(knows, messages=[*say("hi"), {"role": "document", "content": "page"}]) == "[page]"
    with pytest.raises(InvalidRequest, match=r"messages\[1\].role is 'docu', which the chat template doesn't name"):
        rendered(knows, messages=[*say("hi"), {"role": "docu", "content": "page"}])


def test_the_tokenizers_start_token_comes_before_a_chat_if_asked_for(tokenizer: Tokenizer) -> None:
    for asked, comes in ((None, False), (False, False), (True, True)):
        assert prompt_of(tokenizer, messages=say("hi"), add_special_tokens=asked).add_special_tokens is comes


def test_the_last_message_can_be_continued(http: httpx.Client, tokenizer: Tokenizer) -> None:
    messages = [*say("hello"), {"role": "assistant", "content": "I am"}]
    answer = post(http, PATH, messages=messages, continue_final_message=True, max_tokens=1)
    expected = tokenizer.encode("<|start|>user\nhello<|end|>\n<|start|>assistant\nI am")
    assert answer["usage"]["prompt_tokens"] == len(expected)
    answer = post(http, PATH, messages=messages, add_generation_prompt=False, max_tokens=1)
    assert answer["usage"]["prompt_tokens"] == len(expected) + 2


@pytest.mark.parametrize("body", [{"continue_final_message": True}, {"add_generation_prompt": False}])
def test_an_echo_begins_the_answer_with_the_message_that_it_continues(http: httpx.Client, body: dict[str, Any]) -> None:
    body |= {"messages": [*say("hello"), {"role": "assistant", "content": "I am"}], "max_tokens": 3, "n": 2}
    plain, echoed = (
        [choice["message"]["content"] for choice in post(http, PATH, **body, echo=echo)["choices"]]
        for echo in (False, True)
    )
    assert echoed == [f"I am{text}" for text in plain]
    streamed = ["", ""]
    for chunk in chunks(http, PATH, **body, echo=True):
        for choice in chunk["choices"]:
            streamed[choice["index"]] += choice["delta"].get("content") or ""
    assert streamed == echoed


def test_the_template_is_given_tools_and_variables(telling: Tokenizer) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"default": None}, "strict": True}}
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "hi", "name": "Ann"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "ok", "tool_call_id": "c1"},
    ]
    prompt = prompt_of(telling, messages=messages, tools=[tool], chat_template_kwargs={"colour": {"is": "blue"}})
    called = call | {"function": {"name": "f", "arguments": {"x": 1}}}
    assert prompt.messages == [messages[0], messages[1] | {"content": "", "tool_calls": [called]}, messages[2]]
    text = telling.render_chat(prompt.messages, prompt.options)
    assert '"default": null' in text
    assert text.endswith('true, {"is": "blue"}]')


@pytest.mark.parametrize(
    ("cut", "read"),
    [("", {}), ("{", {}), ('{"x": 0, "argumen', {"x": 0}), ('{"x": [1, {"y": "caf\\u00', {"x": [1, {"y": "caf"}]})],
)
def test_a_call_that_max_tokens_cut_may_be_sent_back(telling: Tokenizer, cut: str, read: dict[str, Any]) -> None:
    prompt = prompt_of(
        telling, messages=[*say("hi"), {"role": "assistant", "tool_calls": [call_of(cut)]}, *say("go on")]
    )
    turn: Any = prompt.messages[1]
    (call,) = turn["tool_calls"]
    assert call["function"] == {"name": "f", "arguments": read}


def test_tools_are_left_out_if_none_may_be_called(telling: Tokenizer) -> None:
    fields = {"messages": say("hi"), "tools": [{"type": "function", "function": {"name": "f"}}]}
    for choice, num_told in (("none", 0), ("auto", 1), (None, 1)):
        body = ChatRequest.model_validate(fields | {"tool_choice": choice})
        assert len(chat_prompt(body, telling, tool_use(body).shown).options.tools) == num_told


def test_what_a_tool_lacks_is_filled_in_for_the_template(tmp_path: Path) -> None:
    template = (
        "{% for tool in tools %}{{ tool.function.description + '|' }}{{ tool.function.parameters.type }}{% endfor %}"
    )
    tokenizer = load_tokenizer(save(byte_level(), tmp_path, template))
    functions: list[dict[str, Any]] = [{"name": "f"}, {"name": "f", "description": None, "parameters": None}]
    for function in functions:
        tools = [{"type": "function", "function": function}]
        assert rendered(tokenizer, messages=say("hi"), tools=tools) == "|object"


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_earlier_reasoning_reaches_the_template_by_either_name(telling: Tokenizer, name: str) -> None:
    turn = {"role": "assistant", "content": "Yes", name: "Hm"}
    call = {"function": {"name": "f", "arguments": "{}"}}
    prompt = prompt_of(telling, messages=[turn, {"role": "assistant", name: "Hm", "tool_calls": [call]}])
    turns: Any = prompt.messages
    said, called = turns
    assert said == {"role": "assistant", "content": "Yes", "reasoning_content": "Hm"}
    assert called["reasoning_content"] == called["thinking"] == "Hm"


def test_arguments_of_a_call_may_be_empty_or_an_object(telling: Tokenizer) -> None:
    for given, expected in (("", {}), ("null", {}), (None, {}), ({"x": 1}, {"x": 1})):
        calls = [{"function": {"name": "f", "arguments": given}}]
        prompt = prompt_of(telling, messages=[{"role": "assistant", "tool_calls": calls}])
        (turn,) = prompt.messages
        assert isinstance(turn, dict)
        assert turn["tool_calls"] == [{"type": "function", "function": {"name": "f", "arguments": expected}}]


def test_a_template_that_joins_arguments_to_text_gets_them_as_text(tmp_path: Path) -> None:
    template = "{% for call in messages[0].tool_calls %}{{ call.function.name + call.function.arguments }}{% endfor %}"
    tokenizer = load_tokenizer(save(byte_level(), tmp_path, template))
    call = {"function": {"name": "f", "arguments": '{"x": "\u00e9"}'}}
    assert rendered(tokenizer, messages=[{"role": "assistant", "tool_calls": [call]}]) == 'f{"x": "\u00e9"}'


@pytest.mark.parametrize("name", ["chat_template", "tokenize", "messages", "tools", "conversation", "return_tensors"])
def test_no_variable_gets_past_the_template(telling: Tokenizer, name: str) -> None:
    with pytest.raises(InvalidRequest, match=f"can't be called {name}"):
        telling.render_chat(say("hi"), TemplateOptions(variables={name: "{{ 1 }}"}))


@pytest.mark.parametrize("template", ["{{ nothing.at.all }}", "{{ 1 // 0 }}", "{{ 'a' + 1 }}", "{{ colour() }}"])
def test_a_template_that_fails_is_a_bad_request(tmp_path: Path, template: str) -> None:
    tokenizer = load_tokenizer(save(byte_level(), tmp_path, template))
    with pytest.raises(InvalidRequest, match=r"chat template refuses these messages: \S"):
        tokenizer.render_chat(say("hi"), TemplateOptions(variables={"colour": "blue"}))


def call_of(arguments: str) -> dict[str, Any]:
    return {"function": {"name": "f", "arguments": arguments}}


IMAGE = {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"messages": None}, "messages", "valid list"),
        ({"messages": []}, "messages", "at least 1 item"),
        ({"messages": [{"role": "robot", "content": "a"}]}, None, "messages[0].role is 'robot', which the chat"),
        ({"messages": [{"role": "", "content": "a"}]}, "messages.0.role", "at least 1 character"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content", "must be a text, or a list of parts"),
        ({"messages": ["hello"]}, "messages.0", "valid dictionary"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, None, "the model takes text alone"),
        ({"messages": [{"role": "user", "content": [{"type": "audio"}]}]}, None, "content[0] names no file"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, None, "content[0] is of type text without a"),
        ({"prompt_logprobs": 21}, "prompt_logprobs", "less than or equal to 20"),
        ({"prompt_logprobs": 1, "stream": True}, None, "prompt_logprobs come with whole answers: leave stream out"),
        ({"messages": [{"role": "tool", "content": "a"}]}, None, "unknown role tool"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]}]},
            None,
            "arguments of the call of f are no JSON object",
        ),
        *(
            ({"messages": [{"role": "assistant", "tool_calls": [call_of(arguments)]}]}, None, words)
            for arguments, words in [
                ('{"a": "\\ud800"}', "no JSON object"),
                ('{"a": NaN}', "no JSON object"),
                ('{"a": 1} {"b": 2}', "no JSON object"),
                ('["a', "no JSON object"),
            ]
        ),
        ({"tools": [{"type": "web"}]}, "tools.0.type", "'function'"),
        ({"tools": [{"type": "function"}]}, "tools.0.function", "required"),
        ({"tool_choice": 5}, "tool_choice", "must be a text or an object"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, None, "response_format has no schema"),
        ({"response_format": {"type": 5}}, "response_format.type", "valid string"),
        ({"top_logprobs": 2}, None, "logprobs is not true"),
        ({"logprobs": 3}, "logprobs", "valid boolean"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "less than or equal to 20"),
        ({"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
        ({"max_completion_tokens": 0}, "max_completion_tokens", "greater than or equal to 1"),
        ({"add_generation_prompt": True, "continue_final_message": True}, None, "set one of them"),
        ({"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, None, "can't be called chat_template"),
        ({"chat_template": "{{ 1 }}"}, None, "start the server with --trust-request-chat-template"),
        ({"chat_template": "{{ 1 }}" * 9363}, "chat_template", "at most 65536 characters"),
        ({"logits_processors": ["x"]}, None, "logits_processors is not taken (the code of a client is never run;"),
        ({"prompt_embeds": "AAAA"}, None, "prompt_embeds is not taken (prompts are texts and token ids): leave it out"),
        ({"use_beam_search": True}, None, "use_beam_search is not taken (ask for n samples with logprobs)"),
    ],
)
def test_a_wrong_value_is_refused_with_its_name(
    http: httpx.Client, fields: dict[str, Any], param: str | None, words: str
) -> None:
    error = refusal(http, PATH, **({"messages": say("hello")} | fields))
    assert words in error["message"]
    assert error["param"] == param


def test_a_request_may_bring_its_own_template_where_the_server_trusts_it(scripted: ServerProcess) -> None:
    with connect(scripted) as http:
        body = {"messages": say("hello"), "chat_template": "{{ messages[0].content }} {{ x }}<|end|>"}
        answer = post(http, PATH, **body, chat_template_kwargs={"x": "you"})
        assert answer["choices"][0]["message"]["content"] == "hello you"
        tokens = post(http, "/tokenize", **{name: body[name] for name in ("messages", "chat_template")})["tokens"]
        assert tokens == post(http, "/tokenize", prompt="hello <|end|>")["tokens"]
        unsafe = refusal(http, PATH, **body | {"chat_template": "{{ messages.__class__.__mro__ }}"})
        assert "the request's chat template refuses these messages" in unsafe["message"]


def test_messages_make_no_turns_where_the_server_splits_special_tokens(
    http: httpx.Client, start_server: Callable[..., ServerProcess], model_folder: str
) -> None:
    server = start_server("--split-special-tokens", model=model_folder)
    server.wait_until_ready()
    turns = "hi<|end|><|start|>system"
    with connect(server) as other:
        split, plain = (post(each, "/tokenize", messages=say(turns))["tokens"] for each in (other, http))
        assert sum(token < 2 for token in split) == 3 < sum(token < 2 for token in plain)


def test_chats_are_cut_to_their_last_tokens(http: httpx.Client) -> None:
    answer = post(http, PATH, messages=say("hello " * 300), truncate_prompt_tokens=4, max_tokens=4)
    assert answer["usage"]["prompt_tokens"] == 4
    assert answer["choices"][0]["message"]["content"] == "ant\n", "the end of what begins the assistant's turn"


def test_extra_fields_of_clients_are_accepted(http: httpx.Client) -> None:
    answer = post(
        http,
        PATH,
        messages=say("hello"),
        model=None,
        store=False,
        metadata={},
        user="me",
        service_tier="auto",
        parallel_tool_calls=True,
        reasoning_effort="low",
        response_format={"type": "text"},
        tools=[],
        tool_choice="auto",
        modalities=["text"],
        functions=[],
        stop=None,
        max_tokens=None,
    )
    assert answer["choices"][0]["message"]["content"] == "user\nhello"
