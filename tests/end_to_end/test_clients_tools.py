"""Tools and structured answers of the bundled model, asked for by the clients that people use.

The model has learned no calls: grammars make all of them, where one is demanded. Calls that a model makes by itself are
in tests/frontend/test_tools.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

import instructor
import openai
import pytest
from langchain_openai import ChatOpenAI
from openai.types.chat import ChatCompletionMessage
from pydantic import BaseModel, SecretStr

from tests.end_to_end.servers import RunningServer

QUESTION: Any = [{"role": "user", "content": "Give me JSON for Anna, 31, Paris"}]
MAX_TOKENS = 120


class Person(BaseModel):
    """A person, as the bundled model has learned to write one."""

    name: str
    age: int
    city: str


class SetCity(BaseModel):
    """Sets the city."""

    city: Literal["Paris", "Rome", "Oslo"]


CITY = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome", "Oslo"]}}, "required": ["city"]}
TOOLS: Any = [
    {"type": "function", "function": {"name": "set_city", "parameters": CITY}},
    {"type": "function", "function": {"name": "now"}},
]
NAMED: Any = {"type": "function", "function": {"name": "set_city"}}


@pytest.fixture(scope="module")
def url(shared_server: RunningServer) -> str:
    return f"http://{shared_server.http_address}/v1"


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        yield client


def ask(client: openai.OpenAI, streamed: bool, **fields: Any) -> tuple[ChatCompletionMessage, str]:
    """Returns the message and why it ended."""
    body = {"model": "default", "messages": QUESTION, "temperature": 0, "max_tokens": MAX_TOKENS} | fields
    if streamed:
        with client.chat.completions.stream(**body) as stream:
            for _ in stream:
                pass
            choice: Any = stream.get_final_completion().choices[0]
    else:
        choice = client.chat.completions.create(**body).choices[0]
    return choice.message, choice.finish_reason


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("choice", ["auto", "none", "required", NAMED])
def test_openais_client_chooses_whether_a_tool_is_called(client: openai.OpenAI, choice: Any, streamed: bool) -> None:
    fields = {} if choice is NAMED else {"parallel_tool_calls": False}
    message, reason = ask(client, streamed, tools=TOOLS, tool_choice=choice, **fields)
    if choice in ("auto", "none"):
        assert not message.tool_calls
        assert message.content == '{"name": "Anna", "age": 31, "city": "Paris"}'
        assert reason == "stop"
        return
    assert message.tool_calls is not None and not message.content
    (call,) = message.tool_calls
    assert call.type == "function"
    arguments = json.loads(call.function.arguments)
    if choice is NAMED or call.function.name == "set_city":
        assert call.function.name == "set_city"
        assert arguments["city"] in ("Paris", "Rome", "Oslo")
    else:
        assert call.function.name == "now"
        assert arguments == {}
    assert reason == "tool_calls"


def test_arguments_are_streamed_while_the_model_writes_them(client: openai.OpenAI) -> None:
    """A busy server sends the tokens together that it has meanwhile, so one of several streams must show them."""

    def deltas() -> list[Any]:
        stream = client.chat.completions.create(
            model="default", messages=QUESTION, tools=TOOLS, tool_choice=NAMED, max_tokens=MAX_TOKENS, temperature=0,
            stream=True,
        )  # fmt: skip
        found = [call for part in stream for call in part.choices[0].delta.tool_calls or ()]
        assert found[0].id is not None and found[0].function is not None and found[0].function.name == "set_city"
        assert all(delta.id is None for delta in found[1:])
        return found

    assert any(len(deltas()) > 2 for _ in range(5)), "a delta for each token or two"


def test_an_answer_is_parsed_into_a_model(client: openai.OpenAI) -> None:
    fields: Any = {"model": "default", "messages": QUESTION, "temperature": 0, "max_tokens": MAX_TOKENS}
    parsed = client.chat.completions.parse(**fields, response_format=Person).choices[0].message.parsed
    assert parsed == Person(name="Anna", age=31, city="Paris")
    with client.chat.completions.stream(**fields, response_format=Person) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == parsed


def test_strict_arguments_are_parsed_into_a_model(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(
        model="default", messages=QUESTION, temperature=0, max_tokens=MAX_TOKENS,
        tools=[openai.pydantic_function_tool(SetCity)], tool_choice="required", parallel_tool_calls=False,
    )  # fmt: skip
    (call,) = list(answer.choices[0].message.tool_calls or ())
    assert isinstance(call.function.parsed_arguments, SetCity)


def test_the_responses_api_makes_calls_and_json(client: openai.OpenAI) -> None:
    tool: Any = {"type": "function", "name": "set_city", "parameters": CITY, "strict": False}
    answer = client.responses.create(
        model="default", input=QUESTION, tools=[tool], tool_choice="required", parallel_tool_calls=False, temperature=0
    )
    (call,) = answer.output
    assert call.type == "function_call" and json.loads(call.arguments)["city"] in ("Paris", "Rome", "Oslo")
    parsed = client.responses.parse(model="default", input=QUESTION, text_format=Person, temperature=0).output_parsed
    assert parsed == Person(name="Anna", age=31, city="Paris")


@pytest.mark.parametrize("mode", [instructor.Mode.JSON_SCHEMA, instructor.Mode.TOOLS, instructor.Mode.RESPONSES_TOOLS])
def test_instructor_gets_models(client: openai.OpenAI, mode: instructor.Mode) -> None:
    patched = instructor.from_openai(client, mode=mode)
    asked: Any = Person if mode is instructor.Mode.JSON_SCHEMA else SetCity
    got = patched.chat.completions.create(
        model="default", messages=QUESTION, response_model=asked, max_retries=0, max_tokens=MAX_TOKENS, temperature=0
    )
    assert isinstance(got, asked)


def test_langchain_gets_models_and_calls(url: str) -> None:
    chat: Any = ChatOpenAI(
        base_url=url, api_key=SecretStr("none"), model="default", temperature=0, max_completion_tokens=MAX_TOKENS
    )
    question = QUESTION[0]["content"]
    assert chat.with_structured_output(Person, method="json_schema").invoke(question) == Person(
        name="Anna", age=31, city="Paris"
    )
    answer = chat.bind_tools([SetCity], tool_choice="required", parallel_tool_calls=False).invoke(question)
    (call,) = answer.tool_calls
    assert call["name"] == "SetCity"
    assert SetCity.model_validate(call["args"])
