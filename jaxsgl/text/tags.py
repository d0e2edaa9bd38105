"""Tool calls whose parameters stand in tags, taken apart while they come: names, keys and values, as texts.

    <function=weather><parameter=city>Paris</parameter></function></tool_call>

A value may hold the texts that end values or calls: an end counts only where a text follows that may stand there. What
is found depends on the whole text alone, not on how it is cut. calls.py gives the values their types.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Literal

import msgspec

from jaxsgl.text.json_text import Scan

_SPACE = re.compile(r"\s*")
_GAP = r"\s{0,32}"  # between tags, where it is looked for in a value
_WORD = r"(?=[^>\s]|\Z)([^>\s]{0,256})"  # a name, or its beginning
_QUOTED = r'"?(?=[^">]|\Z)([^">]{0,256})"?'
DSML = "｜DSML｜"  # stands in each tag of DeepSeek's; a token of its own
Place = Literal["head", "between", "value", "after"]


class TagEvent(msgspec.Struct, frozen=True):
    """What was found: a call's name, a key, a piece of its value, or the end of a value or call.

    Of a key, `is_text` is what its tag says of the value: whether that is a text, else JSON. None: it says nothing.
    """

    kind: Literal["call", "key", "text", "end", "done"]
    text: str = ""
    is_text: bool | None = None


class TagValue(msgspec.Struct, frozen=True):
    """A value as it stands between tags, and what they say of it, as of a `TagEvent`."""

    text: str
    is_text: bool | None = None


@dataclass(frozen=True)
class _Tag:
    """A pattern, and one of all beginnings of what it matches, at the end of a text."""

    whole: re.Pattern[str]
    begun: re.Pattern[str]


@dataclass(frozen=True)
class _Shape:
    """How a kind writes calls.

    Attributes:
      head, pair, tail, close: what begins a call, what stands before a value, and what ends a call and all calls.
      end: the text that ends a value.
      ends: that with what may follow; and, of a model that forgot it, what follows alone.
      trims: a line break before an end is no part of the value.
    """

    head: _Tag
    pair: _Tag
    tail: _Tag
    close: _Tag
    end: str
    ends: _Tag
    trims: bool = False


class TagScanner:
    """Takes the calls of one opening apart.

    Attributes:
      state: whether the closing text has come, or something that no call can hold.
      place: up to which the text was read; where it breaks if it does.
      has_begun: whether a call was found.
      could_end: whether all calls are complete, but for the closing text.
    """

    def __init__(self, kind: str, close: str, constrained: bool = False) -> None:
        """`constrained`: a grammar guarantees the tags, so that those that models forget need not be guessed."""
        self._shape = _shape_of(kind, close, constrained)
        self._tails_close = kind == "keyed"
        self._several = kind in ("invoked", "dsml")
        self._forgives = kind == "tagged" and not constrained
        self._where: Place = "head"
        self.state = Scan.OPEN
        self.place = 0
        self.has_begun = False

    @property
    def could_end(self) -> bool:
        """Whether only the closing text is missing."""
        return self._where == "after"

    def feed(self, text: str) -> Iterator[TagEvent]:
        """Yields what is new in `text`, which has grown since the last time. To be read to its end."""
        while self.state is Scan.OPEN:
            place, where = self.place, self._where
            if where == "value":
                yield from self._read_value(text)
            else:
                yield from self._read_tag(text)
            if (place, where) == (self.place, self._where):
                return

    def _read_value(self, text: str) -> Iterator[TagEvent]:
        shape = self._shape
        match = shape.ends.whole.search(text, self.place)
        found = match or shape.ends.begun.search(text, self.place)
        end = len(text) if found is None else found.start()
        if end > self.place:
            yield TagEvent("text", text[self.place : end])
        self.place = end
        if match is not None:
            self.place += shape.trims and text[end] == "\n"
            if text.startswith(shape.end, self.place):
                self.place += len(shape.end)
            self._where = "between"
            yield TagEvent("end")

    def _read_tag(self, text: str) -> Iterator[TagEvent]:
        space = _SPACE.match(text, self.place)
        self.place = self.place if space is None else space.end()
        if self.place == len(text):
            return
        tags = self._expected()
        for tag, kind in tags:
            if (match := tag.whole.match(text, self.place)) is not None:
                self.place = match.end()
                yield from self._entered(kind, match)
                return
        if not any(tag.begun.match(text, self.place) for tag, _ in tags):
            self.state = Scan.BROKEN

    def _expected(self) -> list[tuple[_Tag, str]]:
        """Returns the tags that may come, with what they begin or end."""
        shape = self._shape
        if self._where == "head":
            return [(shape.head, "call")]
        if self._where == "between":
            forgotten = [(shape.close, "close")] if self._forgives else []
            return [(shape.pair, "key"), (shape.tail, "done"), *forgotten]
        return [(shape.close, "close"), *([(shape.head, "call")] if self._several else [])]

    def _entered(self, kind: str, match: re.Match[str]) -> Iterator[TagEvent]:
        if kind == "call":
            self._where, self.has_begun = "between", True
            yield TagEvent("call", match[1])
        elif kind == "key":
            self._where = "value"
            flag = match[2] if match.re.groups > 1 else None
            yield TagEvent("key", match[1].strip(), {"true": True, "false": False}.get(flag or ""))
        else:
            if self._where == "between":
                yield TagEvent("done")
            self._where = "after"
            if kind == "close" or self._tails_close:
                self.state = Scan.DONE


def read_tags(kind: str, text: str, close: str) -> list[tuple[str, dict[str, TagValue]]] | None:
    """Returns the name of each call with its values, or None if `text`, which `close` would follow, is malformed."""
    scanner, text = TagScanner(kind, close), text + close
    found: list[tuple[str, dict[str, TagValue]]] = []
    key, value = TagEvent("key"), ""
    for event in scanner.feed(text):
        match event.kind:
            case "call":
                found.append((event.text, {}))
            case "key":
                key, value = event, ""
            case "text":
                value += event.text
            case "end":
                found[-1][1][key.text] = TagValue(value, key.is_text)
    return found if scanner.state is Scan.DONE and scanner.place == len(text) else None


def _tag(*pieces: str) -> _Tag:
    """Returns the tag that `pieces` make: texts and patterns by turns. A pattern's matches may end anywhere."""
    whole, begun = "", []
    for number, piece in enumerate(pieces):
        is_text = number % 2 == 0
        starts = [re.escape(piece[:length]) for length in range(len(piece))] if is_text else [piece, ""]
        begun += [f"{whole}(?:{'|'.join(starts)})"] if starts else []
        whole += re.escape(piece) if is_text else piece
    return _Tag(re.compile(whole), re.compile(rf"(?:{'|'.join(begun)})\Z"))


def _any(*tags: _Tag) -> _Tag:
    def joined(patterns: list[str]) -> re.Pattern[str]:
        return re.compile("|".join(f"(?:{pattern})" for pattern in patterns))

    return _Tag(joined([tag.whole.pattern for tag in tags]), joined([tag.begun.pattern for tag in tags]))


@cache
def _shape_of(kind: str, close: str, constrained: bool) -> _Shape:
    tail = {"tagged": "</function>", "keyed": close, "invoked": "</invoke>", "dsml": f"</{DSML}invoke>"}[kind]
    pair: tuple[str, ...]
    match kind:
        case "tagged":
            head: tuple[str, ...] = ("<function=", _WORD, ">")
            pair, end = ("<parameter=", _WORD, ">", r"(?:\n|(?=[^\n]))"), "</parameter>"
        case "keyed":
            head = ("", r"([^\s<]{0,256})", "", r"(?=[\s<])")
            pair, end = ("<arg_key>", r"([^<]{0,256})", "</arg_key>", r"\s{0,256}", "<arg_value>"), "</arg_value>"
        case "dsml":
            head = (f"<{DSML}invoke name=", _QUOTED, ">")
            pair, end = (f"<{DSML}parameter name=", _QUOTED, " string=", _QUOTED, ">"), f"</{DSML}parameter>"
        case _:
            head = ("<invoke name=", _QUOTED, ">")
            pair, end = ("<parameter name=", _QUOTED, ">"), "</parameter>"
    before = ("", r"\n?") if kind == "tagged" else ("", "")
    ends = [_tag(*before, end, _GAP, follower) for follower in (pair[0], tail)]
    if kind == "tagged" and not constrained:
        ends += [_tag(*before, text, _GAP, close) for text in (end, tail)]
        ends.append(_tag(*before, close, _GAP, close.replace("/", "", 1)))  # the next call begins
        ends.append(_tag("\n<parameter=", _WORD, ">"))
    return _Shape(_tag(*head), _tag(*pair), _tag(tail), _tag(close), end, _any(*ends), kind == "tagged")
