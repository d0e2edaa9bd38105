"""Tool calls in the syntax of Python, in a list or line by line: where they end, and what they call.

    [weather(city="Paris", days=2), now()]

Names are those of tools and parameters, so that they may hold what Python's can't, as dashes, or be its keywords. Only
values are Python's, or JSON. calls.py makes calls of them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from jaxsgl.text.json_text import BROKEN, MAX_DEPTH, JsonScanner, Scan, literal
from jaxsgl.text.parameters import parameters_of

_NAME = re.compile(r"\s*([^\s()\[\]{},='\"]+)\s*\(\s*")
_KEY = re.compile(r"([^()\[\]{},='\"]+?)\s*=(?!=)\s*")
_PLAIN_KEY = re.compile(r"[^\W\d][\w.-]*")
_STRING = r"""\"{3}(?:\\.|[^\\])*?\"{3}|'{3}(?:\\.|[^\\])*?'{3}|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'"""
_PIECE = re.compile(rf"{_STRING}|[()\[\]{{}},]", re.DOTALL)
_COMMA, _NEXT_LINE = re.compile(r"\s*,\s*"), re.compile(r"\s*[,\n]\s*")
_SPACE = re.compile(r"\s*")
_OUTSIDE = re.compile(r"""['"()\[\]{}<]""")
_IN_STRING = {
    quote: re.compile(rf"\\|{quote[0]}" + ("" if len(quote) == 3 else "|\n")) for quote in ("'", '"', "'''", '"""')
}
_CLOSERS = {"(": ")", "[": "]", "{": "}"}


def read_python(text: str, tools: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, dict[str, Any]]] | None:
    """Returns the name and the arguments of each call, or None if the text is anything but calls of `tools`."""
    text, separator = text.strip(), _NEXT_LINE
    if text.startswith("["):
        if not text.endswith("]"):
            return None
        text, separator = text[1:-1].strip(), _COMMA
    found: list[tuple[str, dict[str, Any]]] = []
    place = 0
    while place < len(text):
        match = _NAME.match(text, place)
        if match is None or match[1] not in tools:
            return None
        read = _arguments(text, match.end(), tools[match[1]])
        if read is None:
            return None
        arguments, place = read
        found.append((match[1], arguments))
        behind = separator.match(text, place)
        if behind is None and place < len(text):
            return None
        place = len(text) if behind is None else behind.end()
    return found


def _arguments(text: str, place: int, schema: Mapping[str, Any]) -> tuple[dict[str, Any], int] | None:
    """Returns the arguments that begin at `place`, and the place behind their closing bracket."""
    known, _ = parameters_of(schema)
    arguments: dict[str, Any] = {}
    while not text.startswith(")", place):
        match = _KEY.match(text, place)
        if match is None or not (match[1] in known or _PLAIN_KEY.fullmatch(match[1])):
            return None
        end = _end_of_value(text, match.end())
        value = BROKEN if end is None else literal(text[match.end() : end].strip())
        if end is None or value is BROKEN:
            return None
        arguments[match[1]] = value
        space = _SPACE.match(text, end + 1) if text[end] == "," else None
        place = end if space is None else space.end()
    return arguments, place + 1


def _end_of_value(text: str, place: int) -> int | None:
    """Returns the place of the comma or bracket behind a value, or None if it does not end."""
    depth = 0
    for match in _PIECE.finditer(text, place):
        piece = match[0]
        if depth == 0 and piece in ",)":
            return match.start()
        if len(piece) == 1:
            depth += (piece in "([{") - (piece in ")]}")
    return None


class PythonScanner(JsonScanner):
    """Finds the end of calls: the bracket that closes their list, or a text that stands outside of strings.

    Looks at brackets and strings alone. A line break in a string that can't have one breaks the calls.
    """

    def __init__(self, close: str = "") -> None:
        """With a `close`, which begins with "<", the calls end before it; else they begin with a bracket."""
        super().__init__()
        self._close_text = close
        self._quote = ""

    def feed(self, text: str, start: int = 0) -> int:
        """Reads `text` from `start` on; returns where it stops, which may be before an end that isn't clear yet."""
        place = start
        while self.state is Scan.OPEN and place < len(text):
            pattern = _IN_STRING[self._quote] if self._quote else _OUTSIDE
            match = pattern.search(text, place)
            if match is None:
                return len(text)
            length = self._read_string(text, match.start()) if self._quote else self._read(text, match.start())
            if length == 0:
                return match.start()
            place = match.start() + length
        return place

    def _read_string(self, text: str, place: int) -> int:
        """Returns how many characters of a string are read at `place`; 0 if more text has to come."""
        if text[place] == "\\":
            return 2 if place + 1 < len(text) else 0
        if text[place] == "\n":
            self.state = Scan.BROKEN
            return 0
        if text.startswith(self._quote, place):
            length, self._quote = len(self._quote), ""
            return length
        return 0 if self._quote.startswith(text[place:]) else 1

    def _read(self, text: str, place: int) -> int:
        """Returns how many characters outside of strings are read at `place`; 0 if more has to come, or at the end."""
        char, rest = text[place], text[place : place + max(3, len(self._close_text))]
        if char == "<":
            if self._close_text and rest == self._close_text:
                self.state = Scan.DONE
            return 0 if self._close_text.startswith(rest) else 1
        if char in "'\"":
            if len(rest) < 3 and rest == char * len(rest):
                return 0
            self._quote = char * 3 if rest.startswith(char * 3) else char
            return len(self._quote)
        if char in _CLOSERS:
            self._closers.append(_CLOSERS[char])
            is_right = len(self._closers) <= MAX_DEPTH
        else:
            is_right = bool(self._closers) and char == self._closers.pop()
        if not is_right:
            self.state = Scan.BROKEN
            return 0
        if not self._closers and not self._close_text:
            self.state = Scan.DONE
        return 1
