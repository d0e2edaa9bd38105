"""What each client library does against a server of the bundled model: `python client_cases.py NAME URL`.

Runs in an environment of its own (run.py), which has the clients but not jaxsgl. A client's cases are functions of the
server's URL without a path (GRPC_ADDRESS is that of its gRPC port); a case that returns has passed. The bundled model
knows how to write Anna's JSON, and calls a tool where a grammar makes it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel

ASK = "Give me JSON for Anna, 31, Paris"
QUESTION: Any = [{"role": "user", "content": ASK}]
CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL: Any = {"type": "function", "function": {"name": "set_city", "description": "Sets the city.", "parameters": CITY}}
NAMED: Any = {"type": "function", "function": {"name": "set_city"}}
KEY, MODEL, MAX_TOKENS = "none", "default", 100
GATEWAY_START_S = 120.0

Case = Callable[[str], None]


class Person(BaseModel):
    """A person, as the bundled model has learned to write one."""

    name: str
    age: int
    city: str


ANNA = Person(name="Anna", age=31, city="Paris")


def is_anna(text: str | None) -> None:
    """Raises unless `text` is Anna's JSON."""
    assert text is not None and Person.model_validate_json(text) == ANNA, text


def is_city(arguments: str | dict[str, Any]) -> None:
    """Raises unless these are arguments of the tool."""
    given = json.loads(arguments) if isinstance(arguments, str) else arguments
    assert given.get("city") in ("Paris", "Rome"), arguments


def openai_cases(model: str = MODEL) -> dict[str, Case]:
    """openai: chats and responses."""
    import openai

    def client(url: str) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0)

    fields: Any = {"model": model, "messages": QUESTION, "temperature": 0, "max_tokens": MAX_TOKENS}

    def chat(url: str) -> None:
        is_anna(client(url).chat.completions.create(**fields).choices[0].message.content)

    def stream(url: str) -> None:
        parts = client(url).chat.completions.create(**fields, stream=True)
        is_anna("".join(part.choices[0].delta.content or "" for part in parts))

    def tool(url: str) -> None:
        answer = client(url).chat.completions.create(**fields, tools=[TOOL], tool_choice=NAMED)
        (call,) = answer.choices[0].message.tool_calls or ()
        is_city(call.function.arguments)

    def parse(url: str) -> None:
        assert client(url).chat.completions.parse(**fields, response_format=Person).choices[0].message.parsed == ANNA

    def responses(url: str) -> None:
        answer = client(url).responses.create(model=model, input=ASK, temperature=0, max_output_tokens=MAX_TOKENS)
        is_anna(answer.output_text)

    return {"chat": chat, "stream": stream, "tool": tool, "structured": parse, "responses": responses}


def anthropic_cases() -> dict[str, Case]:
    """anthropic: messages."""
    import anthropic

    def client(url: str) -> anthropic.Anthropic:
        return anthropic.Anthropic(base_url=url, api_key=KEY, max_retries=0)

    greedy = {"temperature": 0}  # the client's methods no longer have it
    fields: Any = {"model": MODEL, "messages": QUESTION, "max_tokens": MAX_TOKENS, "extra_body": greedy}

    def chat(url: str) -> None:
        (block,) = client(url).messages.create(**fields).content
        is_anna(block.text)

    def stream(url: str) -> None:
        with client(url).messages.stream(**fields) as events:
            is_anna("".join(events.text_stream))

    def tool(url: str) -> None:
        tools: Any = [{"name": "set_city", "input_schema": CITY}]
        answer = client(url).messages.create(**fields, tools=tools, tool_choice={"type": "tool", "name": "set_city"})
        (block,) = answer.content
        is_city(block.input)

    return {"chat": chat, "stream": stream, "tool": tool}


def litellm_cases() -> dict[str, Case]:
    """litellm: its completion, by OpenAI's API and by Ollama's."""
    import litellm

    def ask(url: str, **more: Any) -> Any:
        return litellm.completion(
            "openai/default", QUESTION, api_base=f"{url}/v1", api_key=KEY, temperature=0, max_tokens=MAX_TOKENS, **more
        )

    def chat(url: str) -> None:
        is_anna(ask(url).choices[0].message.content)

    def stream(url: str) -> None:
        is_anna("".join(part.choices[0].delta.content or "" for part in ask(url, stream=True)))

    def tool(url: str) -> None:
        (call,) = ask(url, tools=[TOOL], tool_choice=NAMED).choices[0].message.tool_calls
        is_city(call.function.arguments)

    def structured(url: str) -> None:
        is_anna(ask(url, response_format=Person).choices[0].message.content)

    def of_ollama(url: str) -> None:
        fields: Any = {"api_base": url, "temperature": 0, "max_tokens": MAX_TOKENS}
        is_anna(litellm.completion("ollama_chat/default", QUESTION, **fields).choices[0].message.content)
        parts = litellm.completion("ollama_chat/default", QUESTION, stream=True, **fields)
        is_anna("".join(part.choices[0].delta.content or "" for part in parts))

    return {"chat": chat, "stream": stream, "tool": tool, "structured": structured, "ollama": of_ollama}


def langchain_cases() -> dict[str, Case]:
    """langchain-openai: its chat model."""
    from langchain_openai import ChatOpenAI

    def model(url: str) -> Any:
        fields: Any = {"api_key": KEY, "max_tokens": MAX_TOKENS}
        return ChatOpenAI(model=MODEL, base_url=f"{url}/v1", temperature=0, max_retries=0, **fields)

    def chat(url: str) -> None:
        is_anna(model(url).invoke(ASK).content)

    def stream(url: str) -> None:
        is_anna("".join(part.content for part in model(url).stream(ASK)))

    def tool(url: str) -> None:
        (call,) = model(url).bind_tools([TOOL], tool_choice="set_city").invoke(ASK).tool_calls
        is_city(call["args"])

    def structured(url: str) -> None:
        assert model(url).with_structured_output(Person).invoke(ASK) == ANNA

    return {"chat": chat, "stream": stream, "tool": tool, "structured": structured}


def instructor_cases() -> dict[str, Case]:
    """instructor: the modes of its client for OpenAI."""
    import instructor
    import openai

    def case(mode: Any) -> Case:
        def run(url: str) -> None:
            client = instructor.from_openai(openai.OpenAI(base_url=f"{url}/v1", api_key=KEY), mode=mode)
            fields: Any = {"model": MODEL, "messages": QUESTION, "temperature": 0, "max_tokens": MAX_TOKENS}
            found = client.chat.completions.create(**fields, response_model=Person, max_retries=0)
            assert isinstance(found, Person), found

        return run

    modes = instructor.Mode
    of_instructor = (modes.TOOLS, modes.TOOLS_STRICT, modes.JSON_SCHEMA, modes.RESPONSES_TOOLS)
    return {mode.name.lower(): case(mode) for mode in of_instructor}


def pydantic_ai_cases() -> dict[str, Case]:
    """pydantic-ai: agents."""
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    def agent(url: str, **more: Any) -> Any:
        model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=f"{url}/v1", api_key=KEY))
        return Agent(model, model_settings={"temperature": 0, "max_tokens": MAX_TOKENS}, **more)

    def chat(url: str) -> None:
        is_anna(agent(url).run_sync(ASK).output)

    def stream(url: str) -> None:
        async def run() -> str:
            async with agent(url).run_stream(ASK) as result:
                return await result.get_output()

        is_anna(asyncio.run(run()))

    def structured(url: str) -> None:
        assert isinstance(agent(url, output_type=Person).run_sync(ASK).output, Person)

    return {"chat": chat, "stream": stream, "structured": structured}


def openai_agents_cases() -> dict[str, Case]:
    """openai-agents: agents over chats and over responses."""
    import openai
    from agents import (
        Agent,
        ModelSettings,
        OpenAIChatCompletionsModel,
        OpenAIResponsesModel,
        Runner,
        set_tracing_disabled,
    )

    set_tracing_disabled(True)

    def agent(url: str, kind: Any, **more: Any) -> Any:
        model = kind(MODEL, openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY))
        settings = ModelSettings(temperature=0, max_tokens=MAX_TOKENS)
        return Agent(name="writer", model=model, model_settings=settings, **more)

    def chat(url: str) -> None:
        is_anna(Runner.run_sync(agent(url, OpenAIChatCompletionsModel), ASK).final_output)

    def stream(url: str) -> None:
        async def run() -> Any:
            result = Runner.run_streamed(agent(url, OpenAIChatCompletionsModel), ASK)
            async for _ in result.stream_events():
                pass
            return result.final_output

        is_anna(asyncio.run(run()))

    def responses(url: str) -> None:
        is_anna(Runner.run_sync(agent(url, OpenAIResponsesModel), ASK).final_output)

    def structured(url: str) -> None:
        assert Runner.run_sync(agent(url, OpenAIChatCompletionsModel, output_type=Person), ASK).final_output == ANNA

    return {"chat": chat, "stream": stream, "responses": responses, "structured": structured}


def llama_index_cases() -> dict[str, Case]:
    """llama-index: OpenAILike."""
    from llama_index.core.llms import ChatMessage
    from llama_index.llms.openai_like import OpenAILike

    def model(url: str) -> Any:
        fields: Any = {"is_chat_model": True, "is_function_calling_model": True, "max_tokens": MAX_TOKENS}
        return OpenAILike(model=MODEL, api_base=f"{url}/v1", api_key=KEY, temperature=0, max_retries=0, **fields)

    messages = [ChatMessage(role="user", content=ASK)]

    def chat(url: str) -> None:
        is_anna(model(url).chat(messages).message.content)

    def stream(url: str) -> None:
        is_anna("".join(part.delta or "" for part in model(url).stream_chat(messages)))

    return {"chat": chat, "stream": stream}


def smolagents_cases() -> dict[str, Case]:
    """smolagents: its model for OpenAI's API."""
    from smolagents import OpenAIModel

    def model(url: str) -> Any:
        return OpenAIModel(MODEL, api_base=f"{url}/v1", api_key=KEY, temperature=0, max_tokens=MAX_TOKENS)

    messages: Any = [{"role": "user", "content": [{"type": "text", "text": ASK}]}]

    def chat(url: str) -> None:
        is_anna(model(url).generate(messages).content)

    def stream(url: str) -> None:
        is_anna("".join(part.content or "" for part in model(url).generate_stream(messages)))

    return {"chat": chat, "stream": stream}


def haystack_cases() -> dict[str, Case]:
    """haystack: its generator of chats."""
    from haystack.components.generators.chat import OpenAIChatGenerator
    from haystack.dataclasses import ChatMessage
    from haystack.utils import Secret

    def ask(url: str, **more: Any) -> str | None:
        settings = {"temperature": 0, "max_tokens": MAX_TOKENS}
        generator = OpenAIChatGenerator(
            Secret.from_token(KEY), MODEL, api_base_url=f"{url}/v1", generation_kwargs=settings, **more
        )
        return generator.run([ChatMessage.from_user(ASK)])["replies"][0].text

    def chat(url: str) -> None:
        is_anna(ask(url))

    def stream(url: str) -> None:
        parts: list[str] = []
        ask(url, streaming_callback=lambda part: parts.append(part.content))
        is_anna("".join(parts))

    return {"chat": chat, "stream": stream}


def dspy_cases() -> dict[str, Case]:
    """dspy: its LM."""
    import dspy

    def chat(url: str) -> None:
        lm = dspy.LM("openai/default", api_base=f"{url}/v1", api_key=KEY, temperature=0, max_tokens=MAX_TOKENS)
        answer = lm(ASK)[0]
        is_anna(answer if isinstance(answer, str) else answer["text"])

    return {"chat": chat}


def guidance_cases() -> dict[str, Case]:
    """guidance: its models for vLLM (which sends a grammar under two names) and for SGLang."""
    import guidance
    from guidance.models.experimental import SglangModel, VLLMModel

    def captured(url: str, kind: Any, name: str, asked: Any) -> str:
        model = kind(MODEL, base_url=f"{url}/v1", api_key=KEY, echo=False)
        with guidance.user():
            model += ASK
        with guidance.assistant():
            model += asked
        return model[name]

    def case(kind: Any) -> Case:
        def run(url: str) -> None:
            assert captured(url, kind, "city", guidance.select(["Lima", "Cairo"], name="city")) in ("Lima", "Cairo")
            age = captured(url, kind, "age", guidance.gen(name="age", regex="[0-9]{2}"))
            assert len(age) == 2 and age.isdecimal(), age

        return run

    def schema(url: str) -> None:
        is_city(captured(url, SglangModel, "city", guidance.json(name="city", schema=CITY)))

    return {"vllm": case(VLLMModel), "sglang": case(SglangModel), "schema": schema}


def ollama_cases() -> dict[str, Case]:
    """ollama: its client for Ollama's own API."""
    import ollama

    options = {"temperature": 0, "num_predict": MAX_TOKENS}
    fields: Any = {"model": MODEL, "messages": QUESTION, "options": options}

    def chat(url: str) -> None:
        answer = ollama.Client(url).chat(**fields)
        is_anna(answer.message.content)
        assert answer.done and answer.done_reason == "stop" and answer.eval_count and answer.eval_duration, answer

    def stream(url: str) -> None:
        parts = list(ollama.Client(url).chat(**fields, stream=True))
        is_anna("".join(part.message.content or "" for part in parts))
        assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]

    def generate(url: str) -> None:
        parts = ollama.Client(url).generate(MODEL, ASK, stream=True, options=options)
        is_anna("".join(part.response or "" for part in parts))

    def structured(url: str) -> None:
        is_anna(ollama.Client(url).chat(**fields, format=Person.model_json_schema()).message.content)

    def logprobs(url: str) -> None:
        answer = ollama.Client(url).chat(**fields, logprobs=True, top_logprobs=2)
        assert answer.logprobs and len(answer.logprobs) == answer.eval_count
        assert all(len(token.top_logprobs or ()) == 2 for token in answer.logprobs)

    def tool(url: str) -> None:
        def set_city(city: str) -> str:
            """Sets the city.

            Args:
              city: its name
            """
            return city

        call = {"function": {"name": "set_city", "arguments": {"city": "Rome"}}}
        turns: Any = [
            {"role": "user", "content": "Rome"},
            {"role": "assistant", "tool_calls": [call]},
            {"role": "tool", "tool_name": "set_city", "content": "Rome"},
            *QUESTION,
        ]
        answer = ollama.Client(url).chat(MODEL, turns, tools=[set_city], options=options)
        assert answer.message.content or answer.message.tool_calls

    def models(url: str) -> None:
        client = ollama.Client(url)
        (model,) = client.list().models
        (running,) = client.ps().models
        assert model.model and model.size and running.model == model.model and running.context_length
        shown = client.show(model.model)
        assert shown.modelinfo and "tools" in (shown.capabilities or ())

    def errors(url: str) -> None:
        client = ollama.Client(url)
        for call, status in ((lambda: client.show("gpt-9"), 404), (lambda: client.pull("gpt-9"), 501)):
            try:
                call()
            except ollama.ResponseError as error:
                assert error.status_code == status and "{" not in error.error, error
            else:
                raise AssertionError("no error")

    return {
        "chat": chat,
        "stream": stream,
        "generate": generate,
        "structured": structured,
        "logprobs": logprobs,
        "tool": tool,
        "models": models,
        "errors": errors,
    }


def langchain_ollama_cases() -> dict[str, Case]:
    """langchain-ollama: its chat model and its completions."""
    from langchain_ollama import ChatOllama, OllamaLLM

    def fields(url: str) -> Any:
        return {"model": MODEL, "base_url": url, "temperature": 0, "num_predict": MAX_TOKENS}

    def chat(url: str) -> None:
        answer = ChatOllama(**fields(url)).invoke(ASK)
        is_anna(answer.content)
        assert answer.usage_metadata and answer.usage_metadata["output_tokens"]

    def stream(url: str) -> None:
        is_anna("".join(part.content for part in ChatOllama(**fields(url)).stream(ASK)))

    def structured(url: str) -> None:
        assert ChatOllama(**fields(url)).with_structured_output(Person, method="json_schema").invoke(ASK) == ANNA

    def generate(url: str) -> None:
        is_anna(OllamaLLM(**fields(url)).invoke(ASK))

    return {"chat": chat, "stream": stream, "structured": structured, "generate": generate}


def smg_cases() -> dict[str, Case]:
    """smg, SGLang's gateway: openai's chats through it, which asks the server over gRPC."""

    def through(case: Case) -> Case:
        def run(_: str) -> None:
            with gateway(f"grpc://{os.environ['GRPC_ADDRESS']}") as url:
                case(url)

        return run

    return {name: through(case) for name, case in openai_cases("bundled_model").items()}


@contextlib.contextmanager
def gateway(worker: str) -> Iterator[str]:
    """Runs the gateway over a server until the block ends; gives its URL."""
    import httpx

    port, metrics_port = free_ports(2)
    url = f"http://127.0.0.1:{port}"
    command = [
        str(Path(sys.executable).with_name("smg")), "launch", "--worker-urls", worker,
        "--host", "127.0.0.1", "--port", str(port),
        "--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics_port),
        "--health-check-interval-secs", "1", "--health-success-threshold", "1",
    ]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=sys.stderr)
    try:
        deadline_s = time.monotonic() + GATEWAY_START_S
        while not is_ready(httpx, url):
            assert process.poll() is None and time.monotonic() < deadline_s, "the gateway found no worker"
            time.sleep(0.2)
        yield url
    finally:
        process.kill()
        process.wait()


def is_ready(httpx: Any, url: str) -> bool:
    """Whether the gateway has a healthy worker."""
    try:
        return any(each["is_healthy"] for each in httpx.get(f"{url}/workers", timeout=60).json()["workers"])
    except httpx.TransportError:
        return False


def free_ports(count: int) -> list[int]:
    """Ports that were free a moment ago."""
    with contextlib.ExitStack() as stack:
        taken = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [each.getsockname()[1] for each in taken]


CLIENTS: dict[str, Callable[[], dict[str, Case]]] = {
    "openai": openai_cases,
    "anthropic": anthropic_cases,
    "litellm": litellm_cases,
    "langchain-openai": langchain_cases,
    "instructor": instructor_cases,
    "pydantic-ai": pydantic_ai_cases,
    "openai-agents": openai_agents_cases,
    "llama-index": llama_index_cases,
    "smolagents": smolagents_cases,
    "haystack": haystack_cases,
    "dspy": dspy_cases,
    "guidance": guidance_cases,
    "ollama": ollama_cases,
    "langchain-ollama": langchain_ollama_cases,
    "smg": smg_cases,
}


def main(name: str, url: str) -> int:
    """Prints a line of JSON: each case's error, null if it passed. Returns 1 if one failed."""
    found: dict[str, str | None] = {}
    for case, run in CLIENTS[name]().items():
        try:
            run(url)
            found[case] = None
        except Exception as error:
            traceback.print_exc()
            found[case] = f"{type(error).__name__}: {error}"
    print(json.dumps(found))
    return int(any(found.values()))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
