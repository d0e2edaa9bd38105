"""Calls as they come: names and arguments that can be sent before the call is complete.

For calls that a grammar guarantees. What a sender has sent depends on the text so far alone. call_region.py feeds it
the text of a region; calls.py knows the forms.
"""

from __future__ import annotations

import re
from typing import Literal, Protocol

import msgspec

from jaxsgl.text.calls import CallForm, JsonScanner, Scan, Tools, as_typed, header_pattern, is_text

PartKind = Literal["reasoning", "content", "call", "arguments"]


class Part(msgspec.Struct, frozen=True):
    """What a text adds to the answer. Of a "call", `text` is the function's name; `number` counts the calls."""

    kind: PartKind
    text: str
    number: int = 0


class Sender(Protocol):
    """Sends the calls of a region.

    Attributes:
      num_sent: calls of which something was sent.
    """

    num_sent: int

    def send(self, text: str) -> list[Part]:
        """Returns what can be sent of the region's `text`, beyond what was sent before."""
        ...


def sender_of(form: CallForm, tools: Tools, num_calls: int, most: int) -> Sender | None:
    """Returns the sender of a region after `num_calls` calls of at most `most`, or None if it comes whole."""
    if form.kind in ("tagged", "keyed"):
        return TagSender(form, tools, num_calls, most)
    return None if header_pattern(form) is None else JsonSender(form, num_calls, most)


class JsonSender:
    """Sends calls whose arguments are JSON, as the model spells it."""

    def __init__(self, form: CallForm, num_calls: int, most: int) -> None:
        header = header_pattern(form)
        assert header is not None
        self._header = header
        self._first = num_calls
        self._most = most
        self._scanner: JsonScanner | None = None
        self._place = 0  # up to which the text was sent or read
        self.num_sent = 0

    def send(self, text: str) -> list[Part]:
        """Returns what can be sent of `text`."""
        parts: list[Part] = []
        while True:
            number = self._first + self.num_sent
            if self._scanner is None:
                match = self._header.match(text, self._place)
                if match is None or number >= self._most:
                    return parts
                groups = match.groupdict()
                name = groups.get("plain") or msgspec.json.decode(groups["name"])
                parts.append(Part("call", name, number))
                self._scanner, self._place = JsonScanner(), match.end()
                self.num_sent += 1
                number = self._first + self.num_sent
            end = self._scanner.feed(text, self._place)
            if end > self._place:
                parts.append(Part("arguments", text[self._place : end], number - 1))
            self._place = end
            if self._scanner.state is Scan.OPEN:
                return parts
            self._scanner = None


# What stands before the parameters, before a value, and after the last parameter; what ends a value.
_TAGS = {
    "tagged": (
        re.compile(r"\s*<function=([^>\s]+)>"),
        re.compile(r"\s*<parameter=([^>\s]+)>(?:\n|(?=[^\n]))"),
        re.compile(r"\s*</function>"),
        "</parameter>",
    ),
    "keyed": (
        re.compile(r"\s*([^\s<]+)(?=[\s<])"),
        re.compile(r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>", re.DOTALL),
        re.compile(r"\s*</tool_call>"),
        "</arg_value>",
    ),
}


class TagSender:
    """Sends a call whose parameters stand in tags. Texts are sent as they come, other values when they are complete."""

    def __init__(self, form: CallForm, tools: Tools, num_calls: int, most: int) -> None:
        self._head, self._pair, self._tail, self._end = _TAGS[form.kind]
        self._trims = form.kind == "tagged"  # the line break before the end of a value
        self._tools = tools
        self._number = num_calls
        self._most = most
        self._name: str | None = None
        self._key: str | None = None
        self._first = True  # the next parameter is the first
        self._place = 0  # up to which the text was sent or read
        self._done = False
        self.num_sent = 0

    def send(self, text: str) -> list[Part]:
        """Returns what can be sent of `text`."""
        told = ""
        parts: list[Part] = []
        if self._name is None and self._number < self._most and (match := self._head.match(text)) is not None:
            self._name, self._place, self.num_sent = match[1], match.end(), 1
            parts.append(Part("call", self._name, self._number))
            told = "{"
        while self._name is not None and not self._done:
            news = self._value(text) if self._key is not None else self._between(text)
            if news is None:
                break
            told += news
        return [*parts, Part("arguments", told, self._number)] if told else parts

    def _between(self, text: str) -> str | None:
        """Returns what the next tag begins or ends, or None if it isn't there yet."""
        if (match := self._pair.match(text, self._place)) is not None:
            self._key, self._place = match[1].strip(), match.end()
            comma, self._first = "" if self._first else ",", False
            return f"{comma}{_json(self._key)}:" + ('"' if self._streams() else "")
        if self._tail.match(text, self._place) is not None:
            self._done = True
            return "}"
        return None

    def _value(self, text: str) -> str | None:
        """Returns what of the value can be sent, or None if nothing is new."""
        end = text.find(self._end, self._place)
        if end >= 0:
            value = text[self._place : end]
            value = value.removesuffix("\n") if self._trims else value
            self._place = end + len(self._end)
            streams, key, self._key = self._streams(), self._key, None
            if streams:
                return _json(value)[1:-1] + '"'
            assert key is not None and self._name is not None
            return _json(as_typed(value, self._tools.get(self._name, {}), key))
        if not self._streams():
            return None
        ends = (self._end, "\n" + self._end) if self._trims else (self._end,)
        held = next(
            (n for n in range(min(len(text) - self._place, len(ends[-1])), 0, -1) if _begins(text[-n:], ends)), 0
        )
        start, self._place = self._place, len(text) - held
        return _json(text[start : self._place])[1:-1] if self._place > start else None

    def _streams(self) -> bool:
        return self._name is not None and is_text(self._tools.get(self._name, {}), self._key or "")


def _begins(text: str, ends: tuple[str, ...]) -> bool:
    return any(end.startswith(text) for end in ends)


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()
