"""What answers of /api/chat and /api/generate are made of: lines of JSON, of which the last says how it ended.

An `Answer` takes the pieces of one sample apart, and makes lines of them. A call comes in one line, once it is
complete: Ollama's arguments are objects. Knows no bodies; answering.py uses it.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, TypeAlias

from jaxsgl.errors import RequestFailed
from jaxsgl.frontend.http.bodies import cut_object
from jaxsgl.frontend.http.openai.logprobs import ChatToken, chat_logprobs
from jaxsgl.frontend.http.openai.replies import encode
from jaxsgl.requests.request import FinishReason
from jaxsgl.text.answer import Parser
from jaxsgl.text.sample import End, Piece
from jaxsgl.text.tokenizer import Tokenizer


@dataclass
class Said:
    """What the assistant says in a line."""

    text: str = ""
    thinking: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    logprobs: list[ChatToken] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        """Whether it says nothing."""
        return not (self.text or self.thinking or self.calls or self.logprobs)


Layout: TypeAlias = Callable[[Said], dict[str, Any]]


def as_message(said: Said) -> dict[str, Any]:
    """The layout of /api/chat."""
    message: dict[str, Any] = {"role": "assistant", "content": said.text}
    message |= {"thinking": said.thinking} if said.thinking else {}
    return {"message": message | ({"tool_calls": said.calls} if said.calls else {})}


def as_response(said: Said) -> dict[str, Any]:
    """The layout of /api/generate."""
    return {"response": said.text} | ({"thinking": said.thinking} if said.thinking else {})


class Answer:
    """One answer while its pieces arrive.

    `started_ns` is when its request arrived, by `time.perf_counter_ns`. Unless it `thinks`, reasoning is dropped.
    """

    def __init__(
        self, model: str, layout: Layout, parser: Parser, tokenizer: Tokenizer, started_ns: int, thinks: bool = True
    ) -> None:
        self._model = model
        self._layout = layout
        self._parser = parser
        self._tokenizer = tokenizer
        self._thinks = thinks
        self._started_ns = started_ns
        self._first_ns: int | None = None
        self._call: str | None = None  # the function whose arguments are being read
        self._arguments: list[str] = []
        self._num_calls = 0

    def timed(self, piece: Piece) -> Piece:
        """Returns a piece that has just arrived, whose time is noted."""
        if self._first_ns is None and piece.token_ids:
            self._first_ns = time.perf_counter_ns()
        return piece

    def lines(self, piece: Piece) -> bytes:
        """Returns the lines that a piece adds to a stream. Raises `RequestFailed` for a sample that was aborted."""
        said = self._said(piece)
        lines = b"" if said.is_empty else self._line(said, done=False)
        return lines if piece.end is None else lines + self._line(Said(), done=True, **self._ended(piece.end))

    def whole(self, piece: Piece) -> bytes:
        """Returns the answer that all pieces, joined, make. Raises as `lines`."""
        assert piece.end is not None
        return self._line(self._said(piece), done=True, **self._ended(piece.end))

    def _said(self, piece: Piece) -> Said:
        said = Said()
        if piece.logprobs:
            said.logprobs = chat_logprobs(self._tokenizer, piece.token_ids, piece.logprobs).content
        ends = piece.end is not None
        for part in self._parser.feed(piece.text) + (self._parser.finish() if ends else []):
            if part.kind != "arguments":
                self._close_call(said)
            match part.kind:
                case "content":
                    said.text += part.text
                case "reasoning" if self._thinks:
                    said.thinking += part.text
                case "call":
                    self._call = part.text
                case "arguments":
                    self._arguments.append(part.text)
        if ends:
            self._close_call(said)
        return said

    def _close_call(self, said: Said) -> None:
        """Adds the call that is being read, if there is one."""
        if self._call is None:
            return
        arguments = cut_object("".join(self._arguments)) or {}
        function = {"index": self._num_calls, "name": self._call, "arguments": arguments}
        said.calls.append({"id": f"call_{uuid.uuid4().hex[:24]}", "function": function})
        self._num_calls += 1
        self._call = None
        self._arguments.clear()

    def _ended(self, end: End) -> dict[str, Any]:
        if end.reason is FinishReason.ABORT:
            raise RequestFailed("the request was aborted")
        now_ns = time.perf_counter_ns()
        first_ns = now_ns if self._first_ns is None else self._first_ns
        return {
            "done_reason": "length" if end.reason is FinishReason.LENGTH else "stop",
            "total_duration": now_ns - self._started_ns,
            "load_duration": 0,
            "prompt_eval_count": end.prompt_tokens,
            "prompt_eval_duration": max(first_ns - self._started_ns, 1),  # clients divide by it
            "eval_count": end.completion_tokens,
            "eval_duration": max(now_ns - first_ns, 1),
        }

    def _line(self, said: Said, done: bool, **end: Any) -> bytes:
        scores = {"logprobs": said.logprobs} if said.logprobs else {}
        return line(self._model, self._layout(said), done, **scores, **end)


def line(model: str, said: dict[str, Any], done: bool, **more: Any) -> bytes:
    """Returns a line of an answer."""
    return encode({"model": model, "created_at": now()} | said | {"done": done} | more) + b"\n"


def now() -> str:
    """The time, as Ollama writes it."""
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")
