"""Body of /v1/responses, and the chat that it stands for.

The Responses API sends a conversation as items (messages, calls, their outputs, reasoning), tools without an inner
object, and formats under `text`. `chat_of` makes a `ChatRequest` of them, so that prompts, tools and grammars are those
of chat. responses.py calls it, and says what came before in the conversation.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from jaxsgl.errors import InvalidRequest
from jaxsgl.frontend.http.bodies import (
    MAX_INT,
    Body,
    TopLogprobs,
    cut_object,
    one_error,
    refuse_others,
    with_clients_names,
)
from jaxsgl.frontend.http.openai.schemas import (
    MAX_MESSAGES,
    MAX_TOOLS,
    ROLES,
    AnswerOptions,
    ChatRequest,
    Sampled,
    ToolChoice,
)
from jaxsgl.logs import OF_CLIENTS

LOGPROBS = "message.output_text.logprobs"
Items = Annotated[list[dict[str, Any]], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
Input = Annotated[str | Items, one_error(f"must be a text, or a list of 1 to {MAX_MESSAGES} items")]


class TextFormat(Body):
    """The form of the answer's text: `text`, `json_object`, or `json_schema` with a schema."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class TextOptions(Body):
    """What the answer's text must be."""

    format: TextFormat | None = None


class ReasoningOptions(Body):
    """How much the model reasons; a summary is never made."""

    effort: str | None = None


class FlatTool(Body):
    """A function that may be called."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ResponsesRequest(Sampled):
    """Body of /v1/responses."""

    input: Input
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1, le=MAX_INT)] | None = None
    tools: Annotated[list[FlatTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    store: Annotated[bool, Field(description="false: it is not kept for previous_response_id")] | None = None
    metadata: dict[str, Any] | None = None
    include: Annotated[list[str], Field(max_length=64, description=f"{LOGPROBS}; others change nothing")] | None = None
    top_logprobs: TopLogprobs | None = None
    truncation: (
        Annotated[Literal["auto", "disabled"], Field(description="auto: the oldest items go until the rest fits")]
        | None
    ) = None
    previous_response_id: Annotated[str, Field(description="the answer that the conversation continues")] | None = None
    conversation: Annotated[Any, Field(description="not supported: send the conversation")] = None
    background: Annotated[bool, Field(description="only false is supported")] | None = None

    @property
    def wants_logprobs(self) -> bool:
        """Whether texts come with the log-probabilities of their tokens."""
        return LOGPROBS in (self.include or ())


logger = logging.getLogger(__name__)

_SAME_IN_CHAT = frozenset(Sampled.model_fields) - {"stream", "stream_options", "n", "max_tokens"}
# Fields of chat for which this API has others -> what to send.
_INSTEAD = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "logprobs": f"include, with {LOGPROBS}",
    "functions": "tools",
    "function_call": "tool_choice",
    "reasoning_effort": "reasoning.effort",
}
_NAMES = {"messages": "input", "max_completion_tokens": "max_output_tokens", "response_format": "text.format"}
_NOT_TAKEN = frozenset({"chat_template", "echo", "prompt", *AnswerOptions.model_fields})


def items_of(body: ResponsesRequest) -> list[dict[str, Any]]:
    """Returns the input as items."""
    return [{"role": "user", "content": body.input}] if isinstance(body.input, str) else body.input


def chat_of(
    body: ResponsesRequest, earlier: Sequence[dict[str, Any]] = (), items: Sequence[dict[str, Any]] | None = None
) -> ChatRequest:
    """Returns the chat that `body` stands for, after the items `earlier`. Raises `InvalidRequest`.

    `items` take the place of all of them, if they are given.
    """
    if body.conversation:
        raise InvalidRequest("conversations are not kept here: send previous_response_id, or all of it in input")
    if body.background:
        raise InvalidRequest("background is true, but no answer is made in the background: leave it out, or stream")
    _refuse_chats_own(body)
    given = body.model_dump(by_alias=True, exclude_unset=True)
    chat = {name: given[name] for name in _SAME_IN_CHAT & given.keys()}
    others = body.model_extra or {}
    chat |= {name: value for name, value in others.items() if name not in _INSTEAD and name not in _NOT_TAKEN}
    all_items = [*earlier, *items_of(body)] if items is None else items
    chat["messages"] = _messages(body.instructions, all_items, len(earlier))
    places = [place for place, tool in enumerate(body.tools or ()) if _is_function(tool)]
    chat["tools"] = [_tool((body.tools or ())[place]) for place in places] or None
    chat |= {"tool_choice": body.tool_choice, "parallel_tool_calls": body.parallel_tool_calls}
    chat |= {"max_completion_tokens": body.max_output_tokens, "chat_template_kwargs": body.chat_template_kwargs}
    if body.top_logprobs and not body.wants_logprobs:
        raise InvalidRequest(f"top_logprobs are given, but include doesn't name {LOGPROBS}: add it")
    if body.wants_logprobs:
        chat |= {"logprobs": True, "top_logprobs": body.top_logprobs}
    chat["reasoning_effort"] = body.reasoning.effort if body.reasoning is not None else None
    if (form := _response_format(body)) is not None:
        chat["response_format"] = form
    try:
        return ChatRequest.model_validate(chat)
    except ValidationError as error:
        raise with_clients_names(error, _NAMES, places) from None


def _response_format(body: ResponsesRequest) -> dict[str, Any] | None:
    """Returns the form that `text.format` asks for, as chat takes it; None for plain text. Raises `InvalidRequest`."""
    form = None if body.text is None else body.text.format
    if form is None or form.type == "text":
        return None
    if body.response_format is not None:
        raise InvalidRequest("text.format and response_format each ask for a form: send text.format alone")
    if form.type != "json_schema":
        return {"type": form.type}
    if form.schema_ is None:
        raise InvalidRequest('text.format has no schema: send {"type": "json_schema", "name": ..., "schema": {...}}')
    schema = {"name": form.name, "schema": form.schema_, "strict": form.strict}
    return {"type": form.type, "json_schema": schema}


def _refuse_chats_own(body: ResponsesRequest) -> None:
    """Raises `InvalidRequest` for what chat takes and this API does not."""
    refuse_others(body, _NOT_TAKEN)
    if body.n is not None and body.n > 1:
        raise InvalidRequest(f"n is {body.n}, but one answer is made here: leave it out")
    for name, instead in _INSTEAD.items():
        if getattr(body, name, None):
            raise InvalidRequest(f"{name} isn't taken here: send {instead}")


def _is_function(tool: FlatTool) -> bool:
    """Whether a client runs the tool; those that OpenAI's servers run are left out, as agents send them unasked."""
    if tool.type != "function":
        logger.info("a tool of type %.50r is left out: only functions can be called here", tool.type, extra=OF_CLIENTS)
    return tool.type == "function"


def _tool(tool: FlatTool) -> dict[str, Any]:
    names = ("name", "description", "parameters", "strict")
    return {
        "type": "function",
        "function": {name: value for name in names if (value := getattr(tool, name)) is not None},
    }


def _messages(instructions: str | None, items: Sequence[dict[str, Any]], num_earlier: int) -> list[dict[str, Any]]:
    """Returns the messages of chat. What the assistant said, thought and called in a row is one message."""
    messages: list[dict[str, Any]] = []
    if instructions:
        messages.append({"role": "system", "content": instructions})
    for number, item in enumerate(items, -num_earlier):  # errors name items of the input by their place in it
        kind = item.get("type", "message")
        if kind == "message" and item.get("role") != "assistant":
            if item.get("role") not in ROLES:
                raise InvalidRequest(
                    f"input[{number}].role is {item.get('role')!r:.100}, but must be one of {', '.join(ROLES)}"
                )
            messages.append({"role": item["role"], "content": _content(number, item.get("content"))})
        elif kind == "function_call_output":
            output = _content(number, item.get("output"), "output")
            call_id = _text(number, item, "call_id", optional=True)
            messages.append({"role": "tool", "tool_call_id": call_id, "content": output})
        elif kind in ("message", "function_call", "reasoning"):
            _add_to_turn(_assistant_turn(messages, kind), number, kind, item)
        else:
            raise InvalidRequest(f"input[{number}] is of type {kind!r:.50}, which isn't understood: leave it out")
    return messages


def _assistant_turn(messages: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    """Returns the assistant's message that an item belongs to, a new one if needed."""
    last = messages[-1] if messages else {}
    if last.get("role") != "assistant" or (kind == "reasoning" and last.keys() - {"role", "reasoning_content"}):
        messages.append({"role": "assistant"})
    return messages[-1]


def _add_to_turn(turn: dict[str, Any], number: int, kind: str, item: dict[str, Any]) -> None:
    if kind == "message":
        turn["content"] = _joined(turn.get("content"), _content(number, item.get("content")))
    elif kind == "reasoning":
        parts = item.get("content") or item.get("summary") or []
        texts = [part.get("text") for part in parts if isinstance(part, dict)] if isinstance(parts, list) else []
        reasoning = [turn.get("reasoning_content"), *texts]  # an item of encrypted content alone has no text
        turn["reasoning_content"] = "\n".join(text for text in reasoning if text and isinstance(text, str))
    else:
        name, call_id = _text(number, item, "name"), _text(number, item, "call_id", optional=True)
        arguments = item.get("arguments") or {}
        if isinstance(arguments, str):
            arguments = cut_object(arguments.strip())
        if not isinstance(arguments, dict):
            raise InvalidRequest(
                f"input[{number}]: the arguments of the call of {name} are no JSON object: send one, as text"
            )
        function = {"name": name, "arguments": arguments}
        turn.setdefault("tool_calls", []).append({"id": call_id, "type": "function", "function": function})


def _text(number: int, item: dict[str, Any], name: str, optional: bool = False) -> str | None:
    """Returns a text of an item. Raises `InvalidRequest`."""
    text = item.get(name)
    if not (isinstance(text, str) or (optional and text is None)):
        raise InvalidRequest(f"input[{number}].{name} is {text!r:.100}, but must be a text")
    return text


def _joined(said: Any, content: Any) -> Any:
    """Returns two contents of the assistant as one, without those that are None."""
    contents = [each for each in (said, content) if each is not None]
    if len(contents) < 2:
        return contents[0] if contents else None
    if all(isinstance(each, str) for each in contents):
        return "\n".join(contents)
    joined: list[Any] = []
    for each in contents:
        joined += [{"type": "text", "text": each}] if isinstance(each, str) else each
    return joined


def _content(number: int, content: Any, name: str = "content") -> Any:
    """Returns a message's content in chat's form: a text, or parts of which one at least is no text.

    Raises `InvalidRequest`.
    """
    if content is not None and not isinstance(content, str | list):
        raise InvalidRequest(f"input[{number}].{name} is {content!r:.100}, but must be a text, or a list of parts")
    if not isinstance(content, list):
        return content
    parts: list[dict[str, Any]] = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        match kind:
            case "input_text" | "output_text" | "text" | "summary_text" | "reasoning_text":
                parts.append({"type": "text", "text": _text(number, part, "text")})
            case "refusal":
                parts.append({"type": "text", "text": _text(number, part, "refusal")})
            case "input_image" if isinstance(part.get("image_url"), str):
                url = {"url": part["image_url"]} | ({"detail": part["detail"]} if part.get("detail") else {})
                parts.append({"type": "image_url", "image_url": url})
            case "input_audio" if isinstance(part.get("input_audio"), dict):
                parts.append({"type": "input_audio", "input_audio": part["input_audio"]})
            case _:
                raise InvalidRequest(f"input[{number}] holds a part of type {kind!r:.50}, which isn't understood")
    if all(part["type"] == "text" for part in parts):
        return "\n".join(part["text"] for part in parts)
    return parts
