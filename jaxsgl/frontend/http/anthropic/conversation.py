"""Bodies of /v1/messages and /v1/messages/count_tokens, and the chat that one stands for: system prompt, turns, tools.

Holds types and limits, as openai/schemas.py has OpenAI's. Content is kept as it came; `chat_of` reads its blocks and
makes a `ChatRequest`, so that prompts, tools and grammars are those of chat. messages.py calls it. Fields that a server
of one model has no use for (metadata, service_tier, cache_control, betas) are taken and ignored; blocks that a model
here has no use for (results of Anthropic's own tools, encrypted reasoning) are left out. Fields without which an answer
would be to another question (`_REFUSED`) are refused.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from jaxsgl.errors import InvalidRequest
from jaxsgl.frontend.http.anthropic.client_tools import definition_of
from jaxsgl.frontend.http.bodies import (
    MAX_INT,
    ROOM_FIELDS,
    Body,
    CacheSalt,
    LoraPath,
    Priority,
    Speculative,
    one_error,
    with_clients_names,
    within,
)
from jaxsgl.frontend.http.errors import THREAD_UNSUPPORTED
from jaxsgl.frontend.http.openai.schemas import MAX_MESSAGES, MAX_PARTS, MAX_TOOLS, ChatRequest
from jaxsgl.logs import OF_CLIENTS
from jaxsgl.requests.request import BOUNDS, MAX_STOP_STRINGS

# Claude Code's first block of the system prompt: it differs in each request, and would keep prefixes from being shared.
_BILLING = "x-anthropic-billing-header"
_LEFT_OUT = frozenset({
    "redacted_thinking", "server_tool_use", "web_search_tool_result", "web_fetch_tool_result",
    "tool_search_tool_result", "code_execution_tool_result", "bash_code_execution_tool_result",
    "text_editor_code_execution_tool_result", "mcp_tool_use", "mcp_tool_result", "container_upload", "tool_reference",
    "compaction",
})  # fmt: skip
_NAMES = {"parameters": "input_schema", "max_completion_tokens": "max_tokens", "stop": "stop_sequences"}
_EFFORTS = {"xhigh": "high", "max": "high"}  # what templates don't know, in words that they do
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
# Fields that name what Anthropic's servers keep or call, and the way out.
_REFUSED = {
    "thread": "no conversation is kept here: send all of it in messages, and no thread; Anthropic's client does so by "
    'unsupported_request_behavior="continue_unthreaded"',
    "container": "no code runs here: leave it out",
    "compaction": "conversations aren't summarized here: ask for a summary in a message",
    "mcp_servers": "no MCP server is called from here: call it in the client, and send its tools in tools",
}
_SAME_IN_CHAT = ("temperature", "top_p", "top_k", "stream", "priority", "cache_salt", "speculative")


Blocks = Annotated[
    str | Annotated[list[dict[str, Any]], Field(max_length=MAX_PARTS, fail_fast=True)],
    one_error(f'must be a text, or a list of blocks as {{"type": "text", "text": ...}}, {MAX_PARTS} at most'),
]


class AnthropicMessage(Body):
    """One turn: text, pictures, calls of tools and their results, reasoning."""

    role: Literal["user", "assistant", "system"]
    content: Blocks


class AnthropicTool(Body):
    """A tool of the client; those with a `type` of their own that Anthropic's servers run are left out."""

    type: str | None = None
    name: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None


class AnthropicToolChoice(Body):
    """Which tools are called: `auto`, `any`, `tool` with a name, or `none`."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Body):
    """Whether the model reasons before it answers."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Field(ge=1, le=MAX_INT)] | None = None


class OutputFormat(Body):
    """The form of the answer's text."""

    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(Body):
    """How the answer is written."""

    effort: Annotated[str, Field(description="the template's reasoning_effort")] | None = None
    format: OutputFormat | None = None


class Conversation(Body):
    """What messages and their count have in common: all that the prompt is made of."""

    model: str | None = None
    messages: Annotated[list[AnthropicMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    system: Blocks | None = None
    tools: Annotated[list[AnthropicTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: Annotated[OutputFormat, Field(description="as output_config.format")] | None = None
    chat_template_kwargs: Annotated[dict[str, Any], Field(description="as in /v1/chat/completions")] | None = None
    lora_path: LoraPath | None = None


class MessagesRequest(Conversation):
    """Body of /v1/messages."""

    max_tokens: Annotated[int, Field(ge=1, le=MAX_INT)]
    stop_sequences: Annotated[list[str], Field(max_length=MAX_STOP_STRINGS)] | None = None
    stream: bool | None = None
    temperature: Annotated[float, within(BOUNDS["temperature"])] | None = None
    top_p: Annotated[float, within(BOUNDS["top_p"])] | None = None
    top_k: Annotated[int, within(BOUNDS["top_k"])] | None = None
    metadata: dict[str, Any] | None = None
    priority: Priority | None = None
    cache_salt: CacheSalt | None = None
    speculative: Speculative | None = None


class CountTokensRequest(Conversation):
    """Body of /v1/messages/count_tokens."""


logger = logging.getLogger(__name__)


def chat_of(body: Conversation, bounds_reasoning: bool = False) -> ChatRequest:
    """Returns the chat that `body` stands for. Raises `InvalidRequest`.

    `bounds_reasoning`: the model's reasoning can be held to a budget; else it is left alone.
    """
    if isinstance(body, MessagesRequest):
        _refuse_state(body)
    chat: dict[str, Any] = {name: getattr(body, name, None) for name in _SAME_IN_CHAT}
    chat |= {name: value for name, value in (body.model_extra or {}).items() if name in ROOM_FIELDS}
    chat["messages"] = _messages(body)
    variables = body.chat_template_kwargs or {}
    thinks = body.thinking is not None and body.thinking.type != "disabled"
    thinks |= bool(variables.get("enable_thinking") or variables.get("thinking"))
    # Anthropic's models don't reason unless they are asked to; where the template can't switch it off, it is dropped.
    chat |= {"enable_thinking": thinks, "include_reasoning": thinks}
    tools = enumerate(body.tools or ())
    functions = {place: function for place, tool in tools if (function := _function(tool)) is not None}
    chat |= _tools(body, functions.values())
    if isinstance(body, MessagesRequest):
        budget = None if body.thinking is None or not bounds_reasoning else body.thinking.budget_tokens
        chat["thinking_token_budget"] = budget
        chat |= {"max_completion_tokens": body.max_tokens, "stop": body.stop_sequences or None}
    config = body.output_config
    if config is not None and config.effort is not None and thinks:
        chat["reasoning_effort"] = _EFFORTS.get(config.effort, config.effort)
    form = body.output_format if config is None or config.format is None else config.format
    if form is not None:
        chat["response_format"] = {"type": "json_schema", "json_schema": {"name": "answer", "schema": form.schema_}}
    chat["chat_template_kwargs"] = body.chat_template_kwargs
    # A last turn of the assistant that only speaks is the beginning of the answer.
    last = chat["messages"][-1]
    chat["continue_final_message"] = last["role"] == "assistant" and not last.keys() & {"tool_calls"}
    try:
        return ChatRequest.model_validate(chat)
    except ValidationError as error:
        raise with_clients_names(error, _NAMES, list(functions)) from None


def _refuse_state(body: MessagesRequest) -> None:
    """Raises `InvalidRequest` if `body` sets a field of `_REFUSED`. Empty, it asks for nothing."""
    for name, way_out in _REFUSED.items():
        if (body.model_extra or {}).get(name):
            error = InvalidRequest(f"{name} is not taken: {way_out}")
            error.param, error.code = name, THREAD_UNSUPPORTED if name == "thread" else None
            raise error


def _tools(body: Conversation, functions: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Returns chat's fields of tools, and of the choice among them. Raises `InvalidRequest`."""
    tools = [{"type": "function", "function": function} for function in functions]
    choice = body.tool_choice
    if choice is None:
        return {"tools": tools or None}
    named = {"type": "function", "function": {"name": choice.name}}
    if choice.type == "tool" and not choice.name:
        raise InvalidRequest('tool_choice is of type tool, but names none: send {"type": "tool", "name": ...}')
    if choice.type in ("any", "tool") and not tools:
        raise InvalidRequest(
            f"tool_choice is of type {choice.type}, but there are no tools: send some, or leave it out"
        )
    return {
        "tools": tools or None,
        "tool_choice": _CHOICES.get(choice.type, named),
        "parallel_tool_calls": False if choice.disable_parallel_tool_use else None,
    }


def _function(tool: AnthropicTool) -> dict[str, Any] | None:
    """Returns chat's function of a tool, or None if no client runs it. Raises `InvalidRequest`."""
    description, schema = tool.description, tool.input_schema
    if tool.type not in (None, "custom"):
        definition = definition_of(tool.type, schema)
        if definition is None:
            logger.info(
                "a tool of type %.50r is left out: no client runs it, and no server of Anthropic's is here",
                tool.type,
                extra=OF_CLIENTS,
            )
            return None
        description, schema = description or definition.description, dict(definition.input_schema)
    function: dict[str, Any] = {"name": tool.name, "parameters": schema}
    function |= {"description": description} if description is not None else {}
    return function | ({"strict": tool.strict} if tool.strict is not None else {})


def _messages(body: Conversation) -> list[dict[str, Any]]:
    """Returns the messages of chat."""
    messages: list[dict[str, Any]] = []
    if body.system:
        system = _system(body.system)
        messages += [{"role": "system", "content": system}] if system else []
    for index, message in enumerate(body.messages):
        if isinstance(message.content, str):
            messages.append({"role": message.role, "content": message.content})
        elif message.role == "assistant":
            messages.append(_assistant_turn(index, message))
        elif message.role == "system":
            messages.append({"role": "system", "content": _system(message.content)})
        else:
            messages += _user_turns(index, message.content)
    return messages


def _system(given: str | Sequence[dict[str, Any]]) -> str:
    """Returns the text of the system prompt, without what changes with each request."""
    texts = [given] if isinstance(given, str) else [_text(f"system[{i}]", block) for i, block in enumerate(given)]
    return "\n".join(text for text in texts if not text.startswith(_BILLING))


def _text(name: str, block: dict[str, Any]) -> str:
    text = block.get("text")
    if block.get("type") != "text" or not isinstance(text, str):
        raise InvalidRequest(f'{name} is no text: send {{"type": "text", "text": ...}}')
    return text


def _named(name: str, block: dict[str, Any], field: str, optional: bool = False) -> str | None:
    """Returns the field of a block that names a tool or a call. Raises `InvalidRequest`."""
    value = block.get(field)
    if not (isinstance(value, str) or (optional and value is None)):
        raise InvalidRequest(f"{name}.{field} is {value!r:.100}, but must be a text")
    return value


def _user_turns(index: int, blocks: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns a message for each result of a tool, and one for what the user says besides.

    Pictures of results come in the user's message: chat templates show them there alone.
    """
    results: list[dict[str, Any]] = []
    said: list[dict[str, Any]] = []
    for number, block in enumerate(blocks):
        name = f"messages[{index}].content[{number}]"
        if block.get("type") != "tool_result":
            said += _parts(name, block)
            continue
        content = block.get("content") or ""
        parts = _inner_parts(name, [{"type": "text", "text": content}] if isinstance(content, str) else content)
        said += [part for part in parts if part["type"] != "text"]
        text = "\n".join(part["text"] for part in parts if part["type"] == "text")
        if block.get("is_error") is True and not text.lower().startswith("error"):
            text = f"Error: {text}"  # chat templates know no other way to say so
        call_id = _named(name, block, "tool_use_id", optional=True)
        results.append({"role": "tool", "tool_call_id": call_id, "content": text})
    if all(part["type"] == "text" for part in said):
        text = "\n".join(part["text"] for part in said)
        return [*results, {"role": "user", "content": text}] if said or not results else results
    return [*results, {"role": "user", "content": said}]


def _assistant_turn(index: int, message: AnthropicMessage) -> dict[str, Any]:
    turn: dict[str, Any] = {"role": "assistant"}
    texts: list[str] = []
    for number, block in enumerate(message.content):
        assert isinstance(block, dict)
        name = f"messages[{index}].content[{number}]"
        match block.get("type"):
            case "thinking" if isinstance(block.get("thinking"), str):
                turn["reasoning_content"] = turn.get("reasoning_content", "") + block["thinking"]
            case "tool_use":
                arguments = block.get("input")
                if not isinstance(arguments, dict):
                    raise InvalidRequest(f"{name}.input must be an object")
                function: dict[str, Any] = {"name": _named(name, block, "name"), "arguments": arguments}
                turn.setdefault("tool_calls", []).append(
                    {"id": _named(name, block, "id", optional=True), "type": "function", "function": function}
                )
            case _:
                parts = _parts(name, block)
                if any(part["type"] != "text" for part in parts):
                    raise InvalidRequest(
                        f"{name} has a picture, but turns of the assistant have none: send it in a turn of the user"
                    )
                texts += [part["text"] for part in parts]
    if texts or len(turn) == 1:
        turn["content"] = "\n".join(texts)
    return turn


def _parts(name: str, block: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns chat's parts of one block. Raises `InvalidRequest` for one that isn't known."""
    kind, source = block.get("type"), block.get("source")
    if kind in _LEFT_OUT:
        return []
    match kind, source:
        case "text", _:
            return [{"type": "text", "text": _text(name, block)}]
        case "image", {"type": "base64", "media_type": str(media_type), "data": str(data)}:
            return [{"type": "image_url", "image_url": {"url": f"data:{media_type};base64,{data}"}}]
        case "image", {"type": "url", "url": str(url)}:
            return [{"type": "image_url", "image_url": {"url": url}}]
        case "document", {"type": "text", "data": str(text)}:
            return [{"type": "text", "text": text}]
        case "document", {"type": "content", "content": str(text)}:
            return [{"type": "text", "text": text}]
        case "document", {"type": "content", "content": list(inner)}:
            return _inner_parts(name, inner)
        case "search_result", _:
            return _inner_parts(name, block.get("content"))
    raise InvalidRequest(
        f"{name} is of type {kind!r:.50}, which isn't understood here: send text, and pictures as base64 or URL"
    )


def _inner_parts(name: str, blocks: Any) -> list[dict[str, Any]]:
    if not isinstance(blocks, list) or not all(isinstance(block, dict) for block in blocks):
        raise InvalidRequest(f"{name}: its content must be a list of blocks")
    return [part for number, block in enumerate(blocks) for part in _parts(f"{name}.content[{number}]", block)]
