"""Answers /v1/responses: the assistant's next turn as a list of items, whole or as OpenAI's events.

An `Output` owns the items of one answer: each piece of text opens, extends and closes them, and makes events of that. A
whole answer is what a stream ends with. conversation.py makes a chat of the body; chat.py prepares it. routes.py calls
`answer_responses`.

`ResponseStore` keeps answers by their ids, with the conversations that led to them, within `--responses-store` MiB, and
lets go of what was used least lately. An answer is found by callers of the tenant that got it alone, and so are its
items, which Vercel's AI SDK sends by their ids. It is one front-end process's; several would each know other answers.
"""

from __future__ import annotations

import time
import uuid
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace
from starlette.responses import Response

from jaxsgl.errors import InvalidRequest, NotFound
from jaxsgl.frontend.access import cache_namespace
from jaxsgl.frontend.generation import FrontEnd
from jaxsgl.frontend.http.calls import EventStream, start_all
from jaxsgl.frontend.http.openai.chat import chat_prompt, prepare_chat
from jaxsgl.frontend.http.openai.conversation import ResponsesRequest, chat_of, items_of
from jaxsgl.frontend.http.openai.logprobs import ChatToken
from jaxsgl.frontend.http.openai.replies import encode, json_response
from jaxsgl.frontend.http.openai.scored_text import ScoredText, UnscoredText
from jaxsgl.frontend.http.openai.tools import AnswerForm, tool_use
from jaxsgl.frontend.http.openai.truncation import fitting
from jaxsgl.requests.request import FinishReason, Request
from jaxsgl.text.call_stream import Part
from jaxsgl.text.sample import End, Piece, detokenizer_of, follow

decode = msgspec.json.Decoder(list[dict[str, Any]]).decode
_STATUSES = {FinishReason.STOP: "completed", FinishReason.LENGTH: "incomplete", FinishReason.ABORT: "failed"}


async def answer_responses(
    front_end: FrontEnd, store: ResponseStore, body: ResponsesRequest, adapter: str = ""
) -> Response:
    """Returns the whole answer or its stream, of the model with `adapter`; `store` may keep it.

    Raises `InvalidRequest`, and as `Generator.start`.
    """
    earlier = store.items_of(body.previous_response_id)
    _resolve(store, body)
    request, form = await _prepare(front_end, body, decode(earlier), f"resp_{uuid.uuid4().hex}", adapter)
    answer = described(body, request, adapter or front_end.config.model_name)
    answer["store"] = store.is_on and body.store is not False
    output = Output(answer, form, _text_of(front_end, request, form))

    def keep() -> None:
        if answer["store"] and answer["status"] != "failed":
            items = [*decode(earlier), *items_of(body), *answer["output"]]
            ids = tuple(item["id"] for item in answer["output"])
            store.put(answer["id"], Stored(encode(answer), encode(items), ids))

    events = _events(front_end, request, form, output, keep)
    if body.stream:
        return EventStream(events)

    async def whole() -> bytes:
        async for _ in events:
            pass
        return encode(output.answer)

    return json_response(await whole())


async def count_input_tokens(front_end: FrontEnd, store: ResponseStore, body: ResponsesRequest) -> Response:
    """Returns how many tokens the prompt of `body` has. Raises as `answer_responses`."""
    earlier = store.items_of(body.previous_response_id)
    _resolve(store, body)
    chat = chat_of(body, decode(earlier))
    prompt = chat_prompt(chat, front_end.generator.model.tokenizer, tool_use(chat).shown)
    (ids,) = await front_end.generator.tokenize_all([prompt])
    return json_response(encode({"object": "response.input_tokens", "input_tokens": len(ids)}))


def _resolve(store: ResponseStore, body: ResponsesRequest) -> None:
    """Puts kept items in the place of references to them. Raises `InvalidRequest`."""
    if not isinstance(body.input, str):
        body.input = [store.referred(number, item) for number, item in enumerate(body.input)]


async def _prepare(
    front_end: FrontEnd, body: ResponsesRequest, earlier: list[dict[str, Any]], request_id: str, adapter: str
) -> tuple[Request, AnswerForm]:
    """Returns the request of the conversation, or of what fits the context of it if the client wants that."""

    async def prepare(items: Sequence[dict[str, Any]]) -> tuple[Request, AnswerForm]:
        return await prepare_chat(front_end, chat_of(body, earlier, items), request_id, adapter)

    items = [*earlier, *items_of(body)]
    return await (fitting(items, prepare) if body.truncation == "auto" else prepare(items))


def _text_of(front_end: FrontEnd, request: Request, form: AnswerForm) -> ScoredText | UnscoredText:
    if request.sampling.logprobs is None:
        return UnscoredText()
    tokenizer = front_end.generator.model.tokenizer
    return ScoredText(tokenizer, follow(detokenizer_of(tokenizer, request.sampling, form.visible), request))


async def _events(
    front_end: FrontEnd, request: Request, form: AnswerForm, output: Output, keep: Callable[[], None]
) -> AsyncGenerator[bytes, None]:
    """Yields the events; `keep` is called before the last ones, which say that the answer may be referred to."""
    async with start_all(front_end.generator, [request], visible=form.visible) as generations:
        num_scores = 0
        async for piece in generations[0]:
            num_scores += piece.num_scores
            to_write = piece.num_scores if piece.end is None else 2 * num_scores  # its last events repeat them
            events = await front_end.generator.off_loop(to_write, partial(output.take, piece))
            if piece.end is not None:
                keep()
            if events:
                yield b"".join(events)


def described(body: ResponsesRequest, request: Request, model: str) -> dict[str, Any]:
    """Returns an answer without output, with what OpenAI repeats of the request, in which defaults are filled in."""
    form = body.text.format if body.text is not None else None
    return {
        "id": request.request_id,
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "model": model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": body.reasoning.effort if body.reasoning is not None else None, "summary": None},
        "store": False,
        "temperature": request.sampling.temperature,
        "text": {"format": {"type": "text"} if form is None else form.model_dump(by_alias=True, exclude_none=True)},
        "tool_choice": body.tool_choice or "auto",
        "tools": [
            {"strict": None, "parameters": None} | tool.model_dump(exclude_none=True) for tool in body.tools or ()
        ],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": request.sampling.top_p,
        "truncation": body.truncation or "disabled",
        "usage": None,
    }


class Output:
    """The items of one answer.

    Attributes:
      answer: the answer so far, as it is written.
    """

    def __init__(self, answer: dict[str, Any], form: AnswerForm, text: ScoredText | UnscoredText) -> None:
        self.answer = answer
        self._text = text
        self._form = form
        self._parser = form.parser()
        self._items: list[dict[str, Any]] = answer["output"]
        self._open: Part | None = None  # that began the item being written
        self._held: Part | None = None  # reasoning that is to come in one chunk
        self._number = 0  # of the next event
        self._reasoning_tokens = 0

    def take(self, piece: Piece) -> list[bytes]:
        """Returns the events that a piece of the sample makes."""
        events: list[bytes] = []
        if self._number == 0:
            events += [self._event(f"response.{name}", response=self.answer) for name in ("created", "in_progress")]
        num_chars = num_reasoned = 0
        for part, tokens in self._parts(piece):
            num_chars += len(part.text)
            num_reasoned += len(part.text) if part.kind == "reasoning" else 0
            events += self._show(part, tokens)
        if num_chars:  # a piece that holds more than reasoning is shared out by its text
            self._reasoning_tokens += round(len(piece.token_ids) * num_reasoned / num_chars)
        if piece.end is not None:
            events += self._release()
            events += self._close("completed" if piece.end.reason is FinishReason.STOP else "incomplete")
            events.append(self._end(piece.end))
        return events

    def _parts(self, piece: Piece) -> Iterator[tuple[Part, list[ChatToken]]]:
        """Yields the parts that a piece makes, with the log-probabilities of a text's tokens, if they are asked for."""
        for text in self._text.split(piece):
            yield from self._scored(self._parser.feed(text))
        if piece.end is not None:
            yield from self._scored(self._parser.finish())

    def _scored(self, parts: list[Part]) -> Iterator[tuple[Part, list[ChatToken]]]:
        """Gives the last text among `parts` the tokens of all of them."""
        texts = [number for number, part in enumerate(parts) if part.kind == "content"]
        tokens = self._text.of(sum(len(parts[number].text) for number in texts)) if parts else []
        for number, part in enumerate(parts):
            yield part, tokens if texts and number == texts[-1] else []

    def _show(self, part: Part, tokens: list[ChatToken]) -> list[bytes]:
        """As `_take`; but reasoning may be dropped, or held back until something else comes."""
        if part.kind != "reasoning":
            return [*self._release(), *self._take(part, tokens)]
        if not self._form.include:
            return []
        if not self._form.in_one:
            return self._take(part, tokens)
        self._held = part if self._held is None else replace(self._held, text=self._held.text + part.text)
        return []

    def _release(self) -> list[bytes]:
        """Takes the reasoning that was held back."""
        held, self._held = self._held, None
        return [] if held is None else self._take(held, [])

    def _take(self, part: Part, tokens: list[ChatToken]) -> list[bytes]:
        events: list[bytes] = []
        begins = self._open is None or (part.kind, part.number) != (self._open.kind, self._open.number)
        if part.kind == "arguments":
            begins = False
        if begins:
            events += self._close("completed")
            events += self._begin(part)
        item, place = self._items[-1], {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}
        match part.kind:
            case "reasoning" | "content":
                item["content"][0]["text"] += part.text
                place["content_index"] = 0
                logprobs: dict[str, Any] = {"logprobs": tokens} if part.kind == "content" else {}
                if part.kind == "content":
                    item["content"][0]["logprobs"] += tokens
                events.append(self._event(f"{_EVENTS[part.kind]}.delta", **place, delta=part.text, **logprobs))
            case "arguments":
                item["arguments"] += part.text
                events.append(self._event("response.function_call_arguments.delta", **place, delta=part.text))
        return events

    def _begin(self, part: Part) -> list[bytes]:
        """Opens an item."""
        self._open = part
        made, index = uuid.uuid4().hex, len(self._items)
        item: dict[str, Any]
        if part.kind == "call":
            item = {"id": f"fc_{made}", "type": "function_call", "status": "in_progress", "name": part.text}
            item |= {"call_id": self._form.new_call_id(), "arguments": ""}
        elif part.kind == "reasoning":
            item = {"id": f"rs_{made}", "type": "reasoning", "status": "in_progress", "summary": [], "content": []}
        else:
            item = {"id": f"msg_{made}", "type": "message", "status": "in_progress", "role": "assistant", "content": []}
        self._items.append(item)
        events = [self._event("response.output_item.added", output_index=index, item=item)]
        if part.kind != "call":
            content: dict[str, Any] = {"type": "reasoning_text", "text": ""}
            if part.kind == "content":
                content = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            item["content"].append(content)
            place = {"item_id": item["id"], "output_index": index, "content_index": 0}
            events.append(self._event("response.content_part.added", **place, part=content))
        return events

    def _close(self, status: str) -> list[bytes]:
        """Ends the open item, if there is one."""
        if self._open is None:
            return []
        kind, self._open = self._open.kind, None
        item, index = self._items[-1], len(self._items) - 1
        item["status"] = status
        place: dict[str, Any] = {"item_id": item["id"], "output_index": index}
        if kind == "call":
            done = {"arguments": item["arguments"], "name": item["name"]}
            events = [self._event("response.function_call_arguments.done", **place, **done)]
        else:
            place["content_index"] = 0
            content = item["content"][0]
            logprobs = {"logprobs": content["logprobs"]} if kind == "content" else {}
            events = [
                self._event(f"{_EVENTS[kind]}.done", **place, text=content["text"], **logprobs),
                self._event("response.content_part.done", **place, part=content),
            ]
        return [*events, self._event("response.output_item.done", output_index=index, item=item)]

    def _end(self, end: End) -> bytes:
        answer = self.answer
        answer["status"] = _STATUSES[end.reason]
        if end.reason is FinishReason.LENGTH:
            answer["incomplete_details"] = {"reason": "max_output_tokens"}
        if end.reason is FinishReason.ABORT:
            answer["error"] = {"code": "server_error", "message": "the request was aborted"}
        answer["usage"] = {
            "input_tokens": end.prompt_tokens,
            "input_tokens_details": {"cached_tokens": end.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": end.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": self._reasoning_tokens},
            "total_tokens": end.prompt_tokens + end.completion_tokens,
        }
        return self._event(f"response.{answer['status']}", response=answer)

    def _event(self, kind: str, **fields: Any) -> bytes:
        number, self._number = self._number, self._number + 1
        return (
            f"event: {kind}\n".encode()
            + b"data: "
            + encode({"type": kind, **fields, "sequence_number": number})
            + b"\n\n"
        )


_EVENTS = {"content": "response.output_text", "reasoning": "response.reasoning_text"}


class Stored(NamedTuple):
    """An answer, the items of the whole conversation up to and with it, both as JSON, and the ids of the answer's."""

    answer: bytes
    items: bytes
    item_ids: tuple[str, ...] = ()


class ResponseStore:
    """Keeps answers in at most `max_bytes`; 0: none."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._stored: OrderedDict[tuple[str, str], Stored] = OrderedDict()  # by tenant and id; used last comes last
        self._answer_of: dict[tuple[str, str], str] = {}  # by tenant and id of an item

    @property
    def is_on(self) -> bool:
        """Whether any answer is kept."""
        return self._max_bytes > 0

    def put(self, response_id: str, stored: Stored) -> None:
        """Keeps an answer of the running caller; one that is larger than the whole store is not kept."""
        size = _size(stored)
        if size > self._max_bytes:
            return
        tenant = cache_namespace("")
        if (tenant, response_id) in self._stored:
            self._drop((tenant, response_id))
        self._num_bytes += size
        self._stored[tenant, response_id] = stored
        self._answer_of.update({(tenant, item_id): response_id for item_id in stored.item_ids})
        while self._num_bytes > self._max_bytes:
            self._drop(next(iter(self._stored)))

    def _drop(self, key: tuple[str, str]) -> None:
        stored = self._stored.pop(key)
        self._num_bytes -= _size(stored)
        for item_id in stored.item_ids:
            self._answer_of.pop((key[0], item_id), None)

    def get(self, response_id: str) -> Stored:
        """Returns an answer. Raises `NotFound` if it isn't kept, or not the running caller's."""
        key = (cache_namespace(""), response_id)
        if key not in self._stored:
            raise NotFound(f"no answer {response_id:.100} is stored here{self._way_out()}")
        self._stored.move_to_end(key)
        return self._stored[key]

    def delete(self, response_id: str) -> None:
        """Forgets an answer. Raises as `get`."""
        self.get(response_id)
        self._drop((cache_namespace(""), response_id))

    def referred(self, number: int, item: dict[str, Any]) -> dict[str, Any]:
        """Returns `item`, the input's of that number; of an `item_reference` the item of a kept answer that it names.

        Raises `InvalidRequest` if no kept answer has it.
        """
        if item.get("type") != "item_reference":
            return item
        item_id = str(item.get("id"))
        answer_id = self._answer_of.get((cache_namespace(""), item_id))
        if answer_id is None:
            raise InvalidRequest(
                f"input[{number}] refers to item {item_id:.100}, but none of that id is stored here{self._way_out()}, "
                "or send the item itself"
            )
        output: list[dict[str, Any]] = msgspec.json.decode(self.get(answer_id).answer)["output"]
        return next(item for item in output if item["id"] == item_id)

    def items_of(self, response_id: str | None) -> bytes:
        """Returns the items of the conversation that a request continues. Raises `InvalidRequest` as OpenAI does."""
        if response_id is None:
            return b"[]"
        try:
            return self.get(response_id).items
        except NotFound as missing:
            error = InvalidRequest(f"previous_response_id: {missing}, or send the whole conversation in input")
            error.param, error.code = "previous_response_id", "previous_response_not_found"
            raise error from None

    def _way_out(self) -> str:
        if self.is_on:
            return (
                ": it was sent with store: false or to another server, or made room for others: send store: true, or "
                "raise --responses-store"
            )
        return ": start the server with --responses-store MIB"


def _size(stored: Stored) -> int:
    return len(stored.answer) + len(stored.items) + 200 * (1 + len(stored.item_ids))  # and its entries
