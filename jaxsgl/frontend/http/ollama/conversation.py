"""Bodies of /api/chat and /api/generate, and what one stands for: a chat, or text that is continued as it is.

Holds types and limits, as openai/schemas.py has OpenAI's; the chat that is made of a body is a `ChatRequest`, so that
prompts, tools and grammars are those of chat. answering.py calls it. What a server of one model has no use for
(keep_alive, num_ctx, num_gpu, mirostat, ...) is taken and ignored. Fields without which an answer would be to another
question (template, context) are refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from jaxsgl.errors import InvalidRequest
from jaxsgl.frontend.http.bodies import (
    MAX_INT,
    Body,
    CacheSalt,
    LoraPath,
    Priority,
    Speculative,
    Stop,
    TopLogprobs,
    one_error,
    with_clients_names,
    within,
)
from jaxsgl.frontend.http.openai.schemas import (
    MAX_MESSAGES,
    MAX_PARTS,
    MAX_TOOL_CALLS,
    MAX_TOOLS,
    ChatRequest,
    CompletionRequest,
    Function,
)
from jaxsgl.requests.request import BOUNDS

RANDOM_SEED = -1
_NAMES = {"max_completion_tokens": "options.num_predict", "response_format": "format"}
_SAME_IN_OPTIONS = ("temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty")
_SAME_IN_BODY = ("priority", "cache_salt", "speculative")

Images = Annotated[
    list[str], Field(max_length=MAX_PARTS - 1, fail_fast=True, description="files in base64, or data: URLs")
]
Format = Annotated[Literal["", "json"] | dict[str, Any], one_error('must be "json" or a JSON schema, an object')]
Think = Annotated[
    bool | Literal["low", "medium", "high"],
    one_error("must be true, false, low, medium or high"),
    Field(description="the template's enable_thinking, and its reasoning_effort; false: reasoning is dropped"),
]


class Options(Body):
    """How tokens are chosen, and when to stop."""

    temperature: Annotated[float, within(BOUNDS["temperature"])] | None = None
    top_k: Annotated[int, within(BOUNDS["top_k"])] | None = None
    top_p: Annotated[float, within(BOUNDS["top_p"])] | None = None
    min_p: Annotated[float, within(BOUNDS["min_p"])] | None = None
    repeat_penalty: Annotated[float, within(BOUNDS["repetition_penalty"])] | None = None
    presence_penalty: Annotated[float, within(BOUNDS["presence_penalty"])] | None = None
    frequency_penalty: Annotated[float, within(BOUNDS["frequency_penalty"])] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63, description="-1: none")] | None = None
    num_predict: (
        Annotated[int, Field(ge=-2, le=MAX_INT, description="tokens at most; 0 and less: as many as there is room for")]
        | None
    ) = None
    stop: Stop | None = None


class CalledFunction(Body):
    """The function of a call, and its arguments."""

    name: str
    arguments: dict[str, Any] | None = None


class OllamaCall(Body):
    """A call that the assistant made."""

    id: str | None = None
    function: CalledFunction


class OllamaMessage(Body):
    """One turn of the conversation."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    images: Images | None = None
    tool_calls: Annotated[list[OllamaCall], Field(max_length=MAX_TOOL_CALLS, fail_fast=True)] | None = None
    tool_name: Annotated[str, Field(description="of a tool's result")] | None = None
    tool_call_id: str | None = None


class OllamaTool(Body):
    """A function that may be called."""

    type: Literal["function"] | None = None
    function: Function


class Asked(Body):
    """What chat and generate have in common."""

    model: str | None = None
    stream: Annotated[bool, Field(description="default: true")] | None = None
    format: Format | None = None
    options: Options | None = None
    think: Think | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    lora_path: LoraPath | None = None
    priority: Priority | None = None
    cache_salt: CacheSalt | None = None
    speculative: Speculative | None = None


class OllamaChatRequest(Asked):
    """Body of /api/chat. Without messages it asks whether the model is loaded."""

    messages: Annotated[list[OllamaMessage], Field(max_length=MAX_MESSAGES, fail_fast=True)] | None = None
    tools: Annotated[list[OllamaTool], Field(max_length=MAX_TOOLS)] | None = None


class OllamaGenerateRequest(Asked):
    """Body of /api/generate. Without a prompt it asks whether the model is loaded."""

    prompt: str | None = None
    system: str | None = None
    images: Images | None = None
    raw: Annotated[bool, Field(description="the prompt is continued as it is, without the chat template")] | None = None
    suffix: (
        Annotated[str, Field(description="text behind the gap; of models with tokens to fill in the middle")] | None
    ) = None


def chat_of(body: OllamaChatRequest | OllamaGenerateRequest) -> ChatRequest:
    """Returns the chat that `body` stands for. Raises `InvalidRequest`."""
    tools: Sequence[OllamaTool] = ()
    if isinstance(body, OllamaChatRequest):
        messages, tools = list(body.messages or ()), body.tools or ()
        if len(messages) > 1 and _is_open(messages[-1]):
            messages.pop()
    else:
        _refuse_foreign(body)
        messages = [OllamaMessage(role="system", content=body.system)] if body.system else []
        messages.append(OllamaMessage(role="user", content=body.prompt, images=body.images))
    chat = _sampled(body) | {"messages": [_turn(message) for message in messages]}
    chat |= {"max_completion_tokens": max_tokens_of(body), "logprobs": body.logprobs, "top_logprobs": body.top_logprobs}
    if body.think is not None:
        chat |= {"enable_thinking": body.think is not False, "include_reasoning": body.think is not False}
        chat |= {"reasoning_effort": body.think} if isinstance(body.think, str) else {}
    if tools:
        functions = (tool.function.model_dump(exclude_unset=True) for tool in tools)
        chat["tools"] = [{"type": "function", "function": function} for function in functions]
    # A last turn of the assistant that only speaks is the beginning of the answer.
    last = chat["messages"][-1]
    chat["continue_final_message"] = last["role"] == "assistant" and "tool_calls" not in last
    try:
        return ChatRequest.model_validate(chat)
    except ValidationError as error:
        raise with_clients_names(error, _NAMES, range(len(tools))) from None


def completion_of(body: OllamaGenerateRequest) -> CompletionRequest:
    """Returns the completion that a body stands for whose prompt is no turn. Raises `InvalidRequest`."""
    _refuse_foreign(body)
    for name in ("system", "images", "think"):
        if getattr(body, name):
            raise InvalidRequest(
                f"{name} is given, but the prompt is continued as it is (raw, suffix, or a model without a chat "
                "template): leave it out"
            )
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequest("top_logprobs are given, but logprobs is not true: set it to true")
    completion = _sampled(body) | {"prompt": body.prompt or "", "suffix": body.suffix}
    completion["logprobs"] = (body.top_logprobs or 0) if body.logprobs else None
    try:
        return CompletionRequest.model_validate(completion)
    except ValidationError as error:
        raise with_clients_names(error, _NAMES, ()) from None


def max_tokens_of(body: Asked) -> int | None:
    """Returns the most tokens of the answer, or None if the context alone bounds them."""
    most = None if body.options is None else body.options.num_predict
    return most if most is not None and most > 0 else None


def _sampled(body: Asked) -> dict[str, Any]:
    """Returns the fields that chats and completions have in common."""
    options = body.options or Options()
    fields = {name: getattr(options, name) for name in _SAME_IN_OPTIONS}
    fields |= {name: getattr(body, name) for name in _SAME_IN_BODY}
    fields |= {"repetition_penalty": options.repeat_penalty, "stop": options.stop or None}
    fields["seed"] = None if options.seed == RANDOM_SEED else options.seed
    if body.format == "json":
        fields["response_format"] = {"type": "json_object"}
    elif isinstance(body.format, dict):
        fields["response_format"] = {"type": "json_schema", "json_schema": {"schema": body.format}}
    return fields


def _refuse_foreign(body: OllamaGenerateRequest) -> None:
    """Raises `InvalidRequest` for what only Ollama could read. Empty, it asks for nothing."""
    ways_out = {
        "template": "it would be one of Go, and the model's is Jinja: send the whole prompt with raw, or start the "
        "server with --chat-template",
        "context": "answers here have none: send the conversation to /api/chat",
    }
    for name, way_out in ways_out.items():
        if (body.model_extra or {}).get(name):
            raise InvalidRequest(f"{name} is not taken: {way_out}")


def _is_open(last: OllamaMessage) -> bool:
    """Whether a last message is the assistant's turn before it has begun, which prompts end with anyway."""
    return last.role == "assistant" and not (last.content or last.thinking or last.tool_calls)


def _turn(message: OllamaMessage) -> dict[str, Any]:
    """Returns a message of chat. Pictures come before the text, as in Ollama's prompts."""
    turn: dict[str, Any] = {"role": message.role, "content": message.content or ""}
    if message.images:
        parts: list[dict[str, Any]] = [
            {"type": "image_url", "image_url": {"url": _url_of(image)}} for image in message.images
        ]
        turn["content"] = parts + ([{"type": "text", "text": message.content}] if message.content else [])
    if message.thinking:
        turn["reasoning_content"] = message.thinking
    if message.tool_calls:
        turn["tool_calls"] = [
            {"id": call.id, "type": "function", "function": call.function.model_dump(include={"name", "arguments"})}
            for call in message.tool_calls
        ]
    names = {"name": message.tool_name, "tool_call_id": message.tool_call_id}
    return turn | {name: value for name, value in names.items() if value is not None}


def _url_of(image: str) -> str:
    return image if image.startswith("data:") else f"data:;base64,{image}"
