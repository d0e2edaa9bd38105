"""JSON in the texts of models: its values, some as Python spells them; where one ends in a text that comes in pieces.

Never knows tool calls; the modules that read them use it.
"""

from __future__ import annotations

import ast
import enum
from typing import Any

import msgspec

_WORDS = {"true": True, "false": False, "null": None}
BROKEN = object()  # stands for the value of a text that is no JSON
_OUTSIDE = frozenset(
    '{}[]:,"-+.0123456789 \t\n\r' + "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
)  # of strings
MAX_DEPTH = 200  # of brackets in brackets


def decoded(text: str) -> Any:
    """Returns the value of a text of JSON, or `BROKEN`."""
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError, UnicodeEncodeError):
        return BROKEN


def encoded(value: object) -> str:
    """Returns a value as JSON. Raises `TypeError` or `ValueError` for what JSON can't hold."""
    return msgspec.json.encode(value).decode()


def literal(text: str) -> Any:
    """Returns the value of JSON or of a literal of Python, where true, false and null are known, too; or `BROKEN`."""
    if not text:
        return BROKEN
    if (value := decoded(text)) is not BROKEN:
        return value
    try:
        tree = ast.parse(f"({text}\n)", mode="eval")  # in brackets it may have lines
        return ast.literal_eval(_Words().visit(tree))
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return BROKEN


class _Words(ast.NodeTransformer):
    """Replaces the words of JSON by their values."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        """Returns the value of a word, or other names as they are."""
        return ast.copy_location(ast.Constant(_WORDS[node.id]), node) if node.id in _WORDS else node


class Scan(enum.Enum):
    """How far a value has come."""

    OPEN = "open"
    DONE = "done"
    BROKEN = "broken"


class JsonScanner:
    """Finds the end of a JSON object or array in a text that comes in pieces; it must begin with a bracket.

    Looks at brackets and strings alone and refuses characters that JSON can't have there, so that a broken value ends
    where it breaks. Never parses: its callers do, once they have the whole value.

    Attributes:
      state: whether the value is complete, or can't become one any more.
    """

    def __init__(self) -> None:
        self.state = Scan.OPEN
        self._closers: list[str] = []
        self._in_string = self._escaped = False

    def feed(self, text: str, start: int = 0) -> int:
        """Reads `text` from `start` on; returns where it stops: after the value, at what breaks it, or at the end."""
        for place in range(start, len(text)):
            if self.state is not Scan.OPEN:
                return place
            if not self._take(text[place]):
                self.state = Scan.BROKEN
                return place
        return len(text)

    def _take(self, char: str) -> bool:
        """Returns whether `char` may stand here."""
        if self._in_string:
            if self._escaped:
                self._escaped = False
            elif char == "\\":
                self._escaped = True
            elif char == '"':
                self._in_string = False
            return char >= " "
        if char in "{[":
            self._closers.append("}" if char == "{" else "]")
            return len(self._closers) <= MAX_DEPTH
        if not self._closers or char not in _OUTSIDE:
            return False
        if char in "}]":
            return self._close(char)
        self._in_string = char == '"'
        return True

    def _close(self, char: str) -> bool:
        matches = char == self._closers.pop()
        if matches and not self._closers:
            self.state = Scan.DONE
        return matches
