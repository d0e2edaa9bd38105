"""Tool calls while they come: where their text ends, what of it can be sent at once, and what becomes of it.

A region begins after the text that opens calls. It is held back until its end, since a malformed one comes back as
text; only where a grammar guarantees the calls, names and arguments are sent before a call is complete. The result
depends on the whole text alone, not on how it is cut, and what a sender has sent on the text so far. answer.py makes
regions; calls.py knows the forms.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal, Protocol

import msgspec

from jaxsgl.text.calls import Call, CallForm, Tools, header_pattern, read_calls
from jaxsgl.text.json_text import JsonScanner, Scan, encoded
from jaxsgl.text.parameters import as_said, is_text
from jaxsgl.text.python_calls import PythonScanner
from jaxsgl.text.tags import TagEvent, TagScanner

TAGGED = ("tagged", "keyed", "invoked", "dsml")
_FUNCTION = "</function>"
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
        self._is_unopened = bool(form.head) and opening == form.head  # no grammar holds to anything then
        self._opening = "" if self._is_unopened else opening.removesuffix("[")
        self._text = opening.removeprefix(self._opening)
        self._tools = tools
        self._most = most
        self._values: list[str] = []
        self._value_start: int | None = None
        self._place = 0  # up to which `_text` is read
        self._broken_at: int | None = None
        self._scanner = _scanner_of(form)
        constrained = constrained and not self._is_unopened
        self._tags = TagScanner(form.kind, form.close, constrained) if form.kind in TAGGED else None
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
        if self._tags is not None:
            return self._read_tags(self._tags, final)
        if self._form.kind == "unquoted":
            return self._read_to_close(final)
        if self._form.kind == "python" and self._form.close:
            return self._read_python(final)
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
            self._end(len(self._text), read_calls(self._form, self._text, self._tools))
        return False

    def _read_python(self, final: bool) -> bool:
        """Reads calls up to a closing text that stands outside of strings."""
        text = self._text
        self._place = self._scanner.feed(text, self._place)
        if self._scanner.state is Scan.DONE:
            end = self._place + len(self._form.close)
            self._end(end, read_calls(self._form, text[: self._place], self._tools))
        elif self._scanner.state is Scan.BROKEN:
            self._broken_at = self._place
            return True
        elif final:
            self._end_unclosed(read_calls(self._form, text, self._tools))
        return False

    def _read_tags(self, tags: TagScanner, final: bool) -> bool:
        """Reads calls in tags up to the closing text behind the last."""
        text, close = self._text, self._form.close
        for _ in tags.feed(text):
            pass
        if tags.state is Scan.DONE:
            self._end(tags.place, read_calls(self._form, text[: tags.place - len(close)], self._tools))
        elif tags.state is Scan.BROKEN and self._is_unopened:  # nor need it be closed
            calls = read_calls(self._form, text[: tags.place], self._tools) if tags.could_end else None
            self._end(max(tags.place, len(self._form.head)), calls)
        elif tags.state is Scan.BROKEN:
            self._broken_at = tags.place
            return True
        elif final and self._sender is not None and tags.has_begun and self.num_calls < self._most:
            self._end(len(text), None)  # it was sent
        elif final:
            whole = tags.could_end and tags.place == len(text)
            self._end_unclosed(read_calls(self._form, text, self._tools) if whole else None)
        return False

    def _end_unclosed(self, calls: list[Call] | None) -> None:
        """Ends a text that has ended before its calls did: as `calls`, or at the first closing text in it, if any."""
        text, form = self._text, self._form
        found = text.find(form.close)
        end = len(text) if calls is not None or found < 0 else found + len(form.close)
        if calls is None and form.kind == "tagged" and (found >= 0 or text.rstrip().endswith(_FUNCTION)):
            inner = text if found < 0 else text[:found]  # a model may forget to end its last value and the function
            calls = read_calls(form, inner.rstrip().removesuffix(_FUNCTION) + _FUNCTION, self._tools)
        self._end(end, calls)

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
        else:
            self._broken_at = max(self._broken_at, len(self._text) - len(self._form.close) + 1)
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


def _scanner_of(form: CallForm) -> JsonScanner:
    return PythonScanner(form.close) if form.kind == "python" else JsonScanner()


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
    if form.kind in TAGGED:
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


class TagSender:
    """Sends calls whose parameters stand in tags. Texts are sent as they come, other values when they are complete."""

    def __init__(self, form: CallForm, tools: Tools, num_calls: int, most: int) -> None:
        self._scanner = TagScanner(form.kind, form.close, constrained=True)
        self._tools = tools
        self._first = num_calls
        self._most = most
        self._is_full = num_calls >= most
        self._schema: Mapping[str, Any] = {}
        self._key: TagEvent | None = None
        self._value = ""  # so far, if it isn't sent as it comes
        self._streams = False  # the value is sent as it comes
        self.num_sent = 0

    def send(self, text: str) -> list[Part]:
        """Returns what can be sent of `text`."""
        told = ""
        parts: list[Part] = []
        for event in () if self._is_full else self._scanner.feed(text):
            if event.kind == "call":
                parts, told = [*parts, *self._arguments(told)], ""
                if self._first + self.num_sent == self._most:
                    self._is_full = True
                    return parts
                self._schema, self._key = self._tools.get(event.text, {}), None
                parts.append(Part("call", event.text, self._first + self.num_sent))
                self.num_sent += 1
            told += self._told(event)
        return [*parts, *self._arguments(told)]

    def _arguments(self, told: str) -> list[Part]:
        return [Part("arguments", told, self._first + self.num_sent - 1)] if told else []

    def _told(self, event: TagEvent) -> str:
        """Returns what an event adds to the arguments."""
        match event.kind:
            case "call":
                return "{"
            case "key":
                comma = "" if self._key is None else ","
                self._key, self._value = event, ""
                says_text = event.is_text
                self._streams = is_text(self._schema, event.text) if says_text is None else says_text
                return f"{comma}{encoded(event.text)}:" + ('"' if self._streams else "")
            case "text" if self._streams:
                return encoded(event.text)[1:-1]
            case "text":
                self._value += event.text
            case "end" if self._streams:
                return '"'
            case "end" if self._key is not None:
                return encoded(as_said(self._value, self._key.is_text, self._schema, self._key.text))
            case "done":
                return "}"
        return ""
