"""Harmony, the form in which gpt-oss writes: messages of several channels, each with a header.

    <|channel|>analysis<|message|>reasoning<|end|><|start|>assistant<|channel|>commentary to=functions.f
    <|constrain|>json<|message|>{"x": 1}<|call|>

The channel `analysis` is reasoning, a recipient makes a message a call, all else is text. `HarmonyParser` does what
`AnswerParser` does for the other forms; the markers are special tokens, whose names its text must hold.
"""

from __future__ import annotations

import re

import msgspec

from jaxsgl.text.answer import MAX_CALLS
from jaxsgl.text.call_stream import Part, PartKind
from jaxsgl.text.calls import Tools

MESSAGE = "<|message|>"
MARKERS = ("<|start|>", "<|channel|>", MESSAGE, "<|constrain|>", "<|end|>", "<|return|>", "<|call|>")
_ENDS = ("<|end|>", "<|return|>", "<|call|>", "<|start|>")
_NEXT = "<|start|>assistant"
_ANY_END = re.compile("|".join(map(re.escape, _ENDS)))
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_HEADER = re.compile(r"<\|(?:start|channel|constrain)\|>|^\s*(?:assistant)?\s*to=\S*\s*$")  # a sign of one
_MAX_HELD = max(map(len, _ENDS)) - 1


class HarmonyParser:
    """Reads message by message."""

    def __init__(
        self,
        tools: Tools,
        *,
        with_calls: bool,
        constrained: bool = False,
        max_calls: int = MAX_CALLS,
        separate: bool = True,
    ) -> None:
        """Without `with_calls`, calls are text. The other options are those of `AnswerParser`."""
        self._tools = tools
        self._with_calls = with_calls
        self._constrained = constrained
        self._max_calls = max_calls
        self._separate = separate
        self._buffer = ""
        self._started = False  # the last marker was <|start|>, so that a header follows
        self._header: str | None = None  # of the message whose body is being read
        self._kind: PartKind | None = None  # of that body, or None if it is dropped
        self._breaks: dict[PartKind, str] = {}  # what stands before the next text of a kind of which there was some
        self._body = ""  # of a call that is held back
        self._name = ""
        self._num_calls = 0

    def feed(self, text: str) -> list[Part]:
        """Returns what `text` adds."""
        return self._run(text, final=False)

    def finish(self) -> list[Part]:
        """Returns what was held back, at the end of the text."""
        return self._run("", final=True)

    def _run(self, text: str, final: bool) -> list[Part]:
        self._buffer += text
        parts: list[Part] = []
        while self._read_header(parts, final) if self._header is None else self._read_body(parts, final):
            pass
        return parts

    def _read_header(self, parts: list[Part], final: bool) -> bool:
        end = self._buffer.find(MESSAGE)
        if end < 0:
            if final:
                is_header = self._started or _HEADER.search(self._buffer) is not None  # which the end has cut
                if self._buffer.strip() and not is_header:
                    parts.append(Part("content", self._buffer))
                self._buffer = ""
            return False
        self._header, self._buffer = self._buffer[:end], self._buffer[end + len(MESSAGE) :]
        recipient, channel = _RECIPIENT.search(self._header), _CHANNEL.search(self._header)
        name = recipient[1].removeprefix("functions.") if recipient is not None else ""
        self._body, self._name = "", ""
        if self._with_calls and name in self._tools:
            self._name, self._kind = name, "arguments" if self._num_calls < self._max_calls else None
            if self._constrained and self._kind is not None:
                parts.append(Part("call", name, self._num_calls))
        else:
            is_reasoning = self._separate and channel is not None and channel[1] == "analysis"
            self._kind = "reasoning" if is_reasoning else "content"
        return True

    def _read_body(self, parts: list[Part], final: bool) -> bool:
        text = self._buffer
        match = _ANY_END.search(text)
        if match is not None:
            self._write(parts, text[: match.start()])
            self._close(parts)
            self._buffer, self._started = text[match.end() :], match[0] == "<|start|>"
            return True
        held = 0
        if not final:
            for length in range(min(len(text), _MAX_HELD), 0, -1):
                if any(end.startswith(text[-length:]) for end in _ENDS):
                    held = length
                    break
        self._write(parts, text[: len(text) - held])
        self._buffer = text[len(text) - held :]
        if final:
            self._close(parts)
        return False

    def _write(self, parts: list[Part], text: str) -> None:
        if self._kind is None or not text:
            return
        if self._kind != "arguments":
            parts.append(Part(self._kind, self._breaks.get(self._kind, "") + text))
            self._breaks[self._kind] = ""
        elif self._constrained:
            parts.append(Part("arguments", text, self._num_calls))
        else:
            self._body += text

    def _close(self, parts: list[Part]) -> None:
        """Ends a message; a call whose arguments are no JSON object is text."""
        self._breaks = dict.fromkeys(self._breaks, "\n\n")
        if self._kind == "arguments":
            if not self._constrained:
                if _is_object(self._body):
                    parts.append(Part("call", self._name, self._num_calls))
                    parts.append(Part("arguments", self._body, self._num_calls))
                    self._num_calls += 1
                else:
                    parts.append(Part("content", f"{(self._header or '').removeprefix(_NEXT)}{MESSAGE}{self._body}"))
            else:
                self._num_calls += 1
        self._header = None


def _is_object(text: str) -> bool:
    try:
        return isinstance(msgspec.json.decode(text), dict)
    except (msgspec.DecodeError, RecursionError):
        return False
