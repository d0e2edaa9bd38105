"""What a model writes, taken apart: reasoning, text and tool calls, as the text comes.

`AnswerParser` owns one sample's text between its markers. Its parts, joined by kind and call, depend on the whole text
alone, not on how it is cut. Malformed calls are text. Never knows protocols or requests; the HTTP endpoints feed it,
dialects.py says which forms a model uses, and harmony.py reads the one that is unlike all others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from jaxsgl.text.call_stream import Part, PartKind, Region
from jaxsgl.text.calls import CallForm, Tools

MAX_CALLS = 128


@dataclass(frozen=True)
class ReasoningForm:
    """What begins and ends the reasoning that comes before an answer.

    Attributes:
      opens_itself: the answer begins with reasoning though neither prompt nor answer says so.
      frames: what may begin and end the text behind it; none of it is text of the answer, wherever it stands.
      begin: what a prompt may write behind `open`.
      wraps: tags that may begin and end that text, and are text of the answer anywhere else.
      also_opens, also_closes: what the model writes at times in place of `open` and `close`, if they are no tokens.
    """

    open: str
    close: str
    opens_itself: bool = False
    frames: tuple[tuple[str, str], ...] = ()
    begin: str = ""
    wraps: tuple[tuple[str, str], ...] = ()
    also_opens: tuple[str, ...] = ()
    also_closes: tuple[str, ...] = ()

    @property
    def opens(self) -> tuple[str, ...]:
        """All that an answer may begin its reasoning with."""
        return (self.open, *self.also_opens)


class Parser(Protocol):
    """Takes a text apart."""

    def feed(self, text: str) -> list[Part]:
        """Returns what `text` adds."""

    def finish(self) -> list[Part]:
        """Returns what was held back, at the end of the text."""


class PlainParser:
    """Takes all as the answer's text."""

    def feed(self, text: str) -> list[Part]:
        """Returns the text."""
        return [Part("content", text)] if text else []

    def finish(self) -> list[Part]:
        """Returns nothing."""
        return []


class AnswerParser:
    """Finds reasoning at the beginning and calls in the rest.

    Space around reasoning and calls is dropped. Calls in the reasoning are text of the reasoning.
    """

    def __init__(
        self,
        reasoning: ReasoningForm | None,
        calls: CallForm | None,
        tools: Tools,
        *,
        reasoning_is_open: bool = False,
        constrained: bool = False,
        max_calls: int = MAX_CALLS,
        separate: bool = True,
    ) -> None:
        """Without a form, reasoning or calls are text; without `separate`, reasoning stays in the text.

        `reasoning_is_open`: the prompt has opened the reasoning. `constrained`: a grammar guarantees that calls are
        well formed, so they are sent as they come. Calls beyond `max_calls` are dropped.
        """
        self._reasoning = reasoning
        self._form = calls
        self._openings = () if calls is None else tuple(text for text in (*calls.opens, calls.head) if text)
        of_calls = self._openings if calls is None else (*self._openings, *(calls.section or ()))
        frames = reasoning.frames if reasoning is not None and separate else ()
        self._wraps = reasoning.wraps if reasoning is not None and separate else ()  # those that may still come
        self._wrap_end = ""  # ends a wrap that has begun
        self._markers = (*of_calls, *(text for frame in frames for text in frame))
        self._tools = tools
        self._constrained = constrained
        self._max_calls = max_calls
        self._separate = separate
        self._buffer = ""
        self._region: Region | None = None
        self._num_calls = 0
        self._mode = "content" if reasoning is None else "start"
        is_open = reasoning is not None and (reasoning_is_open or reasoning.opens_itself)
        self._unopened = "reasoning" if is_open else "content"  # what an answer is that doesn't open its reasoning
        self._strip = is_open and separate  # space that comes next
        self._may_be_bare = True  # nothing was written yet
        self._spaces = ""  # held back: dropped if a call or the end of the reasoning follows

    def feed(self, text: str) -> list[Part]:
        """Returns what `text` adds."""
        return self._run(text, final=False)

    def finish(self) -> list[Part]:
        """Returns what was held back, at the end of the text."""
        return self._run("", final=True)

    def _run(self, text: str, final: bool) -> list[Part]:
        self._buffer += text
        parts: list[Part] = []
        while self._step(parts, final):
            pass
        if final and not self._strip:
            in_reasoning = self._mode == "reasoning" and self._separate
            self._write(parts, "reasoning" if in_reasoning else "content", "", last=True)
        return parts

    def _step(self, parts: list[Part], final: bool) -> bool:
        """Reads a part of the buffer; returns whether there is more to do."""
        if self._region is not None:
            return self._read_calls(parts, final)
        if self._mode == "start":
            return self._begin(final)
        if self._mode == "reasoning":
            assert self._reasoning is not None
            kind: PartKind = "reasoning" if self._separate else "content"
            return self._read_until(parts, kind, (self._reasoning.close, *self._reasoning.also_closes), final)
        return self._read_content(parts, final)

    def _begin(self, final: bool) -> bool:
        """Decides whether the answer begins with reasoning. It may open what is open."""
        assert self._reasoning is not None
        text = self._buffer.lstrip()
        opening = next((opening for opening in self._reasoning.opens if text.startswith(opening)), None)
        if opening is not None:
            self._mode = "reasoning"
            if self._separate:
                self._strip = True
                self._buffer = text[len(opening) :]
        elif final or not any(opening.startswith(text) for opening in self._reasoning.opens):
            self._mode = self._unopened
        else:
            return False
        return True

    def _read_content(self, parts: list[Part], final: bool) -> bool:
        if self._wraps:
            return self._begin_wrap(final)
        form = self._form
        if form is not None and self._may_be_bare and form.bare:
            text = self._buffer.lstrip()
            if not text:
                return self._read_until(parts, "content", [], final) if final else False
            if text[0] == form.bare:
                self._open(form, self._buffer[: len(self._buffer) - len(text)], text)
                return True
        markers = (*self._markers, self._wrap_end) if self._wrap_end else self._markers
        return self._read_until(parts, "content", markers, final)

    def _begin_wrap(self, final: bool) -> bool:
        """Decides whether a wrap begins the text."""
        text = self._buffer.lstrip()
        if not final and any(begin.startswith(text) for begin, _ in self._wraps):
            return False
        for begin, end in self._wraps:
            if text.startswith(begin):
                self._buffer, self._wrap_end, self._strip = text[len(begin) :], end, True
        self._wraps = ()
        return True

    def _read_until(self, parts: list[Part], kind: PartKind, markers: Sequence[str], final: bool) -> bool:
        """Writes the text before the first of `markers`; returns whether it came."""
        text = self._buffer
        found = [(place, -len(marker), marker) for marker in markers if (place := text.find(marker)) >= 0]
        if not found:
            held = 0 if final else _held(text, markers)
            self._write(parts, kind, text[: len(text) - held])
            self._buffer = text[len(text) - held :]
            return False
        place, _, marker = min(found)
        behind = text[place + len(marker) :]
        if self._mode == "reasoning":
            self._mode, self._buffer = "content", behind
            if self._separate:
                self._write(parts, kind, text[:place])
                self._strip, self._spaces = True, ""
            else:
                self._write(parts, kind, text[: place + len(marker)])
                self._may_be_bare = True
        elif marker == self._wrap_end:
            if behind.strip():  # it ends nothing
                self._write(parts, kind, text[: place + len(marker)])
                self._buffer = behind
                return True
            self._write(parts, kind, text[:place])
            self._buffer = "" if final else text[place:]
            self._spaces = "" if final else self._spaces
            return False
        else:
            self._write(parts, kind, text[:place])
            if self._form is None or marker not in self._openings:  # calls or the text begin or end here
                self._buffer = behind
                self._strip, self._spaces = True, ""
                return True
            self._open(self._form, marker, behind)
        return True

    def _open(self, form: CallForm, opening: str, behind: str) -> None:
        self._buffer = behind
        self._region = Region(form, opening, self._tools, self._constrained, self._num_calls, self._max_calls)

    def _read_calls(self, parts: list[Part], final: bool) -> bool:
        region = self._region
        assert region is not None
        text, self._buffer = self._buffer, ""
        parts += region.feed(text, final)
        if not region.ended:
            return False
        self._region, self._buffer = None, region.rest
        self._may_be_bare = False
        if region.refused:
            self._write(parts, "content", region.refused)
        else:
            self._num_calls = region.num_calls
            self._strip, self._spaces = True, ""
        return bool(self._buffer) or final

    def _write(self, parts: list[Part], kind: PartKind, text: str, last: bool = False) -> None:
        """Adds text, without space that may have to be dropped."""
        if self._strip:
            text = text.lstrip()
        text = self._spaces + text
        kept = text if last else text.rstrip()
        self._spaces = text[len(kept) :]
        if kept:
            self._strip = False
            self._may_be_bare &= kind == "reasoning"
            parts.append(Part(kind, kept))


def _held(text: str, markers: Sequence[str]) -> int:
    """Returns the length of the longest end of `text` that may be the beginning of one of `markers`."""
    longest = min(len(text), max(map(len, markers), default=1) - 1)
    for length in range(longest, 0, -1):
        if any(marker.startswith(text[-length:]) for marker in markers):
            return length
    return 0
