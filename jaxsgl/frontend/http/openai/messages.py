"""From the messages of a body to what chat templates know, and what they can't express refused in clear words."""

from __future__ import annotations

import json
from typing import Any

from jaxsgl.errors import InvalidRequest
from jaxsgl.frontend.http.openai.schemas import ChatRequest, ContentPart, MessageBody, TokenizeRequest, ToolCall
from jaxsgl.text.prompts import ChatPrompt
from jaxsgl.text.tokenizer import TemplateOptions, Tokenizer, Turn


def chat_prompt(body: ChatRequest | TokenizeRequest, tokenizer: Tokenizer, with_tools: bool = True) -> ChatPrompt:
    """The prompt that the messages of `body` make in the chat template. Raises `InvalidRequest`."""
    if body.continue_final_message and body.add_generation_prompt:
        raise InvalidRequest(
            "continue_final_message and add_generation_prompt are both true, but an answer either continues the last "
            "message or begins a new one: set one of them"
        )
    options = TemplateOptions(
        tools=[tool.model_dump(exclude_unset=True) for tool in body.tools or ()] if with_tools else (),
        add_generation_prompt=not body.continue_final_message and body.add_generation_prompt is not False,
        continue_final_message=bool(body.continue_final_message),
        variables=body.chat_template_kwargs or {},
    )
    knows_developer = tokenizer.knows_role("developer")
    return ChatPrompt([_turn(i, message, knows_developer) for i, message in enumerate(body.messages or ())], options)


def _turn(index: int, message: MessageBody, knows_developer: bool) -> Turn:
    role = "system" if message.role == "developer" and not knows_developer else message.role
    turn: dict[str, Any] = {"role": role, "content": _text(index, message.content)}
    for name in ("name", "reasoning_content", "tool_call_id"):
        if (value := getattr(message, name)) is not None:
            turn[name] = value
    if message.tool_calls:
        turn["tool_calls"] = [_tool_call(index, call) for call in message.tool_calls]
    return turn


def _text(index: int, content: str | list[ContentPart] | None) -> str:
    """A message's text; those of several parts stand on lines of their own, as in vLLM."""
    if content is None or isinstance(content, str):
        return content or ""
    for number, part in enumerate(content):
        if part.type != "text" or part.text is None:
            raise InvalidRequest(
                f"messages[{index}].content[{number}] is of type {part.type}, but only text is understood: send parts "
                '{"type": "text", "text": ...}'
            )
    return "\n".join(part.text or "" for part in content)


def _tool_call(index: int, call: ToolCall) -> dict[str, Any]:
    """Templates want the arguments as an object."""
    arguments = call.function.arguments
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError):
            arguments = None
        if not isinstance(arguments, dict):
            raise InvalidRequest(
                f"messages[{index}]: the arguments of the call of {call.function.name} are no JSON object: send one, "
                "as text"
            )
    call_id = {} if call.id is None else {"id": call.id}
    return {**call_id, "type": "function", "function": {"name": call.function.name, "arguments": arguments or {}}}
