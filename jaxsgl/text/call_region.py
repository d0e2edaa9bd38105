"""The text of tool calls while it comes: where it ends, what of it can be sent at once, and what becomes of it.

A region begins after the text that opens calls. It is held back until its end, since a malformed one comes back as
text; only where a grammar constrains the calls, names and arguments are sent as they come. The result depends on the
whole text alone, not on how it is cut. answer.py makes regions; calls.py knows the forms.
"""

from __future__ import annotations

import re

from jaxsgl.text.call_stream import Part, sender_of
from jaxsgl.text.calls import Call, CallForm, JsonScanner, Scan, Tools, header_pattern, read_calls

_LONGEST_HEADER = 300  # characters of a name and what belongs to it


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
