"""Answers /v1/messages: the assistant's next turn as blocks of reasoning, text and calls, whole or as events.

A `Message` owns the blocks of one answer: each piece of text opens, extends and closes them, and makes events of that.
A whole answer is what a stream ends with. conversation.py makes a chat of the body; OpenAI's chat.py prepares it.
app.py includes the router. Its errors have Anthropic's shape (errors.py).
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from jaxsgl.errors import RequestFailed
from jaxsgl.frontend.adapters import adapter_of
from jaxsgl.frontend.generation import FrontEnd
from jaxsgl.frontend.http.anthropic.conversation import CountTokensRequest, MessagesRequest, chat_of
from jaxsgl.frontend.http.bodies import StrictJson, cut_object
from jaxsgl.frontend.http.calls import EventStream, start_all, while_connected
from jaxsgl.frontend.http.openai.chat import chat_prompt, prepare_chat
from jaxsgl.frontend.http.openai.replies import encode, json_response
from jaxsgl.frontend.http.openai.tools import AnswerForm, bounds_reasoning, tool_use
from jaxsgl.requests.request import FinishReason, Request
from jaxsgl.text.call_stream import Part
from jaxsgl.text.sample import End, Piece

_BLOCK_OF = {"content": "text", "reasoning": "thinking", "call": "tool_use"}


async def answer_messages(front_end: FrontEnd, body: MessagesRequest, adapter: str = "") -> Response:
    """Returns the whole answer or its stream, of the model with `adapter`.

    Raises `InvalidRequest`, and as `Generator.start`.
    """
    message_id = f"msg_{uuid.uuid4().hex}"
    chat = chat_of(body, bounds_reasoning(front_end.generator.model, front_end.config))
    request, form = await prepare_chat(front_end, chat, message_id, adapter)
    message = Message(message_id, adapter or front_end.config.model_name, form, body.stop_sequences or ())
    events = _events(front_end, request, form, message)
    if body.stream:
        return EventStream(events)
    async for _ in events:
        pass
    return json_response(encode(message.whole()))


async def count_tokens(front_end: FrontEnd, body: CountTokensRequest) -> Response:
    """Returns how many tokens the prompt of `body` has. Raises as `answer_messages`."""
    chat = chat_of(body)
    prompt = chat_prompt(chat, front_end.generator.model.tokenizer, tool_use(chat).shown)
    (ids,) = await front_end.generator.tokenize_all([prompt])
    return json_response(encode({"input_tokens": len(ids)}))


async def _events(
    front_end: FrontEnd, request: Request, form: AnswerForm, message: Message
) -> AsyncGenerator[bytes, None]:
    async with start_all(front_end.generator, [request], visible=form.visible) as generations:
        async for piece in generations[0]:
            if events := message.take(piece, len(request.prompt_ids)):
                yield b"".join(events)


class Message:
    """The blocks of one answer, and why it ended."""

    def __init__(self, message_id: str, model: str, form: AnswerForm, stop_sequences: Sequence[str]) -> None:
        self._answer: dict[str, Any] = {
            "id": message_id, "type": "message", "role": "assistant", "model": model, "content": [],
            "stop_reason": None, "stop_sequence": None, "usage": None,
        }  # fmt: skip
        self._blocks: list[dict[str, Any]] = self._answer["content"]
        self._form = form
        self._parser = form.parser()
        self._stop_sequences = frozenset(stop_sequences)
        self._open: Part | None = None  # that began the block being written
        self._arguments: list[str] = []  # of the call being written
        self._num_tokens = 0

    def whole(self) -> dict[str, Any]:
        """Returns the answer, once it has ended."""
        return self._answer

    def take(self, piece: Piece, num_prompt_tokens: int) -> list[bytes]:
        """Returns the events that a piece of the sample makes. Raises `RequestFailed` for one that was aborted."""
        events: list[bytes] = []
        self._num_tokens += len(piece.token_ids)
        if self._answer["usage"] is None:
            self._answer["usage"] = _usage(num_prompt_tokens, piece.cached_tokens, self._num_tokens)
            events += [_event("message_start", message=self._answer), _event("ping")]
        parts = self._parser.feed(piece.text)
        if piece.end is not None:
            parts += self._parser.finish()
        for part in parts:
            if part.kind != "reasoning" or self._form.include:
                events += self._take(part)
        if piece.end is not None:
            events += self._close() + self._end(piece.end)
        return events

    def _take(self, part: Part) -> list[bytes]:
        events: list[bytes] = []
        begins = self._open is None or (part.kind, part.number) != (self._open.kind, self._open.number)
        if begins and part.kind != "arguments":
            events += self._close()
            events.append(self._begin(part))
        match part.kind:
            case "content":
                self._blocks[-1]["text"] += part.text
                events.append(self._delta(type="text_delta", text=part.text))
            case "reasoning":
                self._blocks[-1]["thinking"] += part.text
                events.append(self._delta(type="thinking_delta", thinking=part.text))
            case "arguments":
                self._arguments.append(part.text)
                events.append(self._delta(type="input_json_delta", partial_json=part.text))
        return events

    def _begin(self, part: Part) -> bytes:
        """Opens a block."""
        self._open = part
        block: dict[str, Any] = {"type": _BLOCK_OF[part.kind]}
        match part.kind:
            case "content":
                block["text"] = ""
            case "reasoning":
                block |= {"thinking": "", "signature": ""}
            case "call":
                block |= {"id": self._new_call_id(), "name": part.text, "input": {}}
                self._arguments.clear()
        self._blocks.append(block)
        return _event("content_block_start", index=len(self._blocks) - 1, content_block=block)

    def _close(self) -> list[bytes]:
        """Ends the open block, if there is one."""
        if self._open is None:
            return []
        kind, self._open = self._open.kind, None
        events: list[bytes] = []
        if kind == "call":
            self._blocks[-1]["input"] = cut_object("".join(self._arguments)) or {}
        if kind == "reasoning":  # clients send it back with the block; nothing here reads it
            self._blocks[-1]["signature"] = signature = uuid.uuid4().hex
            events.append(self._delta(type="signature_delta", signature=signature))
        return [*events, _event("content_block_stop", index=len(self._blocks) - 1)]

    def _end(self, end: End) -> list[bytes]:
        answer = self._answer
        if end.reason is FinishReason.ABORT:
            raise RequestFailed("the request was aborted")
        answer["stop_reason"] = "max_tokens" if end.reason is FinishReason.LENGTH else "end_turn"
        if end.matched_stop in self._stop_sequences:
            answer |= {"stop_reason": "stop_sequence", "stop_sequence": end.matched_stop}
        elif end.reason is FinishReason.STOP and any(block["type"] == "tool_use" for block in self._blocks):
            answer["stop_reason"] = "tool_use"
        answer["usage"] = usage = _usage(end.prompt_tokens, end.cached_tokens, end.completion_tokens)
        why = {name: answer[name] for name in ("stop_reason", "stop_sequence")}
        return [_event("message_delta", delta=why, usage=usage), _event("message_stop")]

    def _new_call_id(self) -> str:
        made = self._form.new_call_id()
        return f"toolu_{made[5:]}" if made.startswith("call_") else made

    def _delta(self, **delta: Any) -> bytes:
        return _event("content_block_delta", index=len(self._blocks) - 1, delta=delta)


def _usage(prompt_tokens: int, cached_tokens: int, completion_tokens: int) -> dict[str, int]:
    """Returns the counts; as Anthropic counts, input_tokens are those that were not found in the cache."""
    return {
        "input_tokens": prompt_tokens - cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached_tokens,
        "output_tokens": completion_tokens,
    }


def _event(kind: str, **fields: Any) -> bytes:
    return f"event: {kind}\ndata: ".encode() + encode({"type": kind, **fields}) + b"\n\n"


def router(front_end: FrontEnd) -> APIRouter:
    """Returns the endpoints, for `front_end`."""
    router = APIRouter(route_class=StrictJson)

    @router.post("/v1/messages")
    @while_connected
    async def messages(body: MessagesRequest) -> Response:
        """The assistant's next turn, whole or streamed."""
        return await answer_messages(front_end, body, adapter_of(front_end, body.model, body.lora_path))

    @router.post("/v1/messages/count_tokens")
    @while_connected
    async def count(body: CountTokensRequest) -> Response:
        """How many tokens a conversation has."""
        adapter_of(front_end, body.model, body.lora_path)
        return await count_tokens(front_end, body)

    return router
