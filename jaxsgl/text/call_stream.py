"""Tool calls while they come: where their text ends, what of it can be sent at once, and what becomes of it.

A region begins after the text that opens calls. It is held back until its end, since a malformed one comes back as
text; only where a grammar guarantees the calls, names and arguments are sent before a call is complete. The result
depends on the whole text alone, not on how it is cut, and what a sender has sent on the text so far. answer.py makes
regions; calls.py knows the forms.
"""

from __future__ import annotations

import re
from typing import Literal, Protocol

import msgspec

from jaxsgl.text.calls import Call, CallForm, JsonScanner, Scan, Tools, as_typed, header_pattern, is_text, read_calls

_LONGEST_HEADER = 300  # characters of a name and what belongs to it
PartKind = Literal["reasoning", "content", "call", "arguments"]


class Part(msgspec.Struct, frozen=True):
    """What a text adds to the answer. Of a "call", `text` is the function's name; `number` counts the calls."""

    kind: PartKind
    text: str
    number: int = 0


class Region:
    """Reads the calls of one opening.

    Attributes:
      ended: whether the region is complete; nothing may be fed then.
      rest: the text after it.
      refused: the region's text, if it is no call after all; "" if its calls were read.
      num_calls: calls so far, those of earlier regions included.
    """

    def __init__(
        self, form: CallForm, opening: str, tools: Tools, constrained: bool, num_calls: int, most: int
    ) -> None:
        """`constrained`: a grammar guarantees the calls. Calls beyond `most` are dropped."""
        self._form = form
        self._opening = opening
        self._tools = tools
        self._most = most
        self._text = ""
        self._values: list[str] = []
        self._value_start: int | None = None
        self._place = 0  # up to which `_text` is read
        self._broken_at: int | None = None
        self._scanner = _scanner_of(form)
        self._calls: list[Call] | None = None
        self._sender = sender_of(form, tools, num_calls, most) if constrained else None
        self.ended = False
        self.rest = self.refused = ""
        self.num_calls = num_calls

    def feed(self, text: str, final: bool) -> list[Part]:
        """Returns what can be sent of `text`; `final`: no more will come."""
        self._text += text
        while not self.ended and self._step(final):
            pass
        if self.ended:
            return self._parts()
        return [] if self._sender is None else self._sender.send(self._text)

    def _step(self, final: bool) -> bool:
        """Reads on; returns whether there is more to do."""
        if self._broken_at is not None:
            return self._skip_broken(final)
        if self._form.kind in ("tagged", "keyed", "invoked", "unquoted") or (
            self._form.kind == "python" and self._form.close
        ):
            return self._read_to_close(final)
        if self._value_start is None:
            return self._find_value(final)
        if self._scanner.state is Scan.OPEN:
            self._place = self._scanner.feed(self._text, self._place)
            return self._has_read(self._scanner.state, final)
        return self._read_tail(final)

    def _has_read(self, state: Scan, final: bool) -> bool:
        if state is Scan.BROKEN:
            self._broken_at = self._place
        elif state is Scan.OPEN and final:
            self._end(len(self._text), None)
        return state is not Scan.OPEN

    def _find_value(self, final: bool) -> bool:
        text = self._text
        if self._form.kind == "named_json":
            header = header_pattern(self._form)
            assert header is not None
            match = header.match(text)
            start = match.end() if match is not None else len(text)
            if match is None and ("{" in text or len(text) > _LONGEST_HEADER):
                self._broken_at = 0
                return True
        else:
            start = self._place + len(text[self._place :]) - len(text[self._place :].lstrip())
        if start < len(text):
            self._value_start = self._place = start
            if text[start] not in "{[":
                self._broken_at = start
            return True
        if final:
            self._end(len(text), None)
        return False

    def _read_tail(self, final: bool) -> bool:
        """Reads what follows a complete value: the closing text, another value, or nothing of ours."""
        text, form = self._text, self._form
        behind = self._place + len(text[self._place :]) - len(text[self._place :].lstrip())
        if form.tail and text.startswith(form.tail.strip(), behind):
            behind += len(form.tail.strip())
            behind += len(text[behind:]) - len(text[behind:].lstrip())
        elif form.tail and not final and form.tail.strip().startswith(text[behind:]):
            return False
        if form.close:
            if text.startswith(form.close, behind):
                self._end(behind + len(form.close), self._read(self._place))
            elif not final and form.close.startswith(text[behind:]):
                return False
            elif final and behind == len(text):
                self._end(behind, self._read(self._place))
            else:
                self._broken_at = behind
            return True
        if form.kind == "json" and form.separator:
            match = re.compile(r"[\s;,]*").match(text, self._place)
            assert match is not None
            if match.end() == len(text) and not final:
                return False
            if text.startswith("{", match.end()):
                assert self._value_start is not None
                self._values.append(text[self._value_start : self._place])
                self._value_start = self._place = match.end()
                self._scanner = _scanner_of(form)
                return True
            if match.end() == len(text):
                self._end(len(text), self._read(self._place))
                return True
        self._end(self._place, self._read(self._place))
        return True

    def _read_to_close(self, final: bool) -> bool:
        end = self._text.find(self._form.close, max(0, self._place - len(self._form.close)))
        self._place = len(self._text)
        if end >= 0:
            self._end(end + len(self._form.close), read_calls(self._form, self._text[:end], self._tools))
        elif final:
            whole = self._form.kind in ("python", "unquoted") or self._text.rstrip().endswith(
                ("</function>", "</invoke>")
            )
            self._end(len(self._text), read_calls(self._form, self._text, self._tools) if whole else None)
        return False

    def _skip_broken(self, final: bool) -> bool:
        """Ends a malformed region after its closing text, or where it breaks if it has none."""
        assert self._broken_at is not None
        if not self._form.close:
            self._end(self._broken_at, None)
            return False
        end = self._text.find(self._form.close, self._broken_at)
        if end >= 0:
            self._end(end + len(self._form.close), None)
        elif final:
            self._end(len(self._text), None)
        return False

    def _read(self, end: int) -> list[Call] | None:
        assert self._value_start is not None
        start = 0 if self._form.kind == "named_json" else self._value_start
        calls: list[Call] = []
        for value in [*self._values, self._text[start:end]]:
            found = read_calls(self._form, value, self._tools)
            if found is None:
                return None
            calls += found
        return calls

    def _end(self, end: int, calls: list[Call] | None) -> None:
        self.ended = True
        self._calls = calls
        self._text, self.rest = self._text[:end], self._text[end:]

    def _parts(self) -> list[Part]:
        """Returns what the end of the region adds, and sets `refused`."""
        if self._sender is not None:
            parts = self._sender.send(self._text)
            if self._sender.num_sent:
                self.num_calls += self._sender.num_sent
                return parts
        if self._calls is None:
            self.refused = self._opening + self._text
            return []
        parts = []
        for call in self._calls[: self._most - self.num_calls]:
            parts += [Part("call", call.name, self.num_calls), Part("arguments", call.arguments, self.num_calls)]
            self.num_calls += 1
        return parts


class _PythonScanner(JsonScanner):
    """Finds the end of a list of calls in Python's syntax."""

    def __init__(self) -> None:
        super().__init__()
        self._quote = ""

    def _take(self, char: str) -> bool:
        if self._quote:
            if self._escaped:
                self._escaped = False
            elif char == "\\":
                self._escaped = True
            elif char == self._quote:
                self._quote = ""
        elif char in "'\"":
            self._quote = char
        elif char in "([{":
            self._closers.append({"(": ")", "[": "]", "{": "}"}[char])
        elif char in ")]}":
            return self._close(char)
        return True


def _scanner_of(form: CallForm) -> JsonScanner:
    return _PythonScanner() if form.kind == "python" else JsonScanner()


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
