"""Answers of models whose tokenizer says itself how they are written: transformers' `response_template`.

For families that dialects.py doesn't know: transformers' `ResponseParser` takes the text apart, and `TemplateParser`
makes the parts of it that all parsers give. Calls are held back until they end; a malformed one comes back as text. No
grammar is made of a template.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from typing import Any

import msgspec

from jaxsgl.text.call_stream import Part
from jaxsgl.text.calls import Tools

logger = logging.getLogger(__name__)

_REASONING = ("reasoning_content", "reasoning", "thinking")
_CALLS = "tool_calls"


def markers_of(template: dict[str, Any], special: Iterable[str]) -> tuple[str, ...]:
    """Returns those of the tokenizer's `special` tokens that the template looks for."""
    text = json.dumps(template, ensure_ascii=False)
    return tuple(token for token in special if token in text)


def is_readable(template: dict[str, Any]) -> bool:
    """Whether transformers can read the template; logs why it can't."""
    try:
        TemplateParser(template, {}, "", 1, True)
    except (ValueError, TypeError, KeyError, ImportError) as error:
        logger.warning("the tokenizer's response_template is left out: %s", error)
        return False
    return True


class TemplateParser:
    """Takes the text of a sample apart by a template. Raises `ValueError` for a template that means nothing."""

    def __init__(
        self, template: dict[str, Any], tools: Tools, prompt_tail: str, max_calls: int, separate: bool
    ) -> None:
        """`prompt_tail`: the end of the prompt, which may open the reasoning; `separate`: as in `AnswerParser`."""
        self._template = template
        self._tools = tools
        self._described = [
            {"type": "function", "function": {"name": name, "parameters": dict(schema)}}
            for name, schema in tools.items()
        ]
        self._max_calls = max_calls
        self._separate = separate
        self._num_calls = 0
        self._pending = ""  # text of which nothing has come out yet
        self._parser = self._new(prompt_tail)

    def feed(self, text: str) -> list[Part]:
        """Returns what `text` adds."""
        parts: list[Part] = []
        for char in text:  # one by one, so that a malformed call's text is known
            self._pending += char
            parts += self._parts_of(lambda char=char: self._parser.feed(char))
        return _joined(parts)

    def finish(self) -> list[Part]:
        """Returns what was held back, at the end of the text."""
        return _joined(self._parts_of(lambda: self._parser.finalize()[1]))

    def _new(self, prefix: str) -> Any:
        from transformers.utils.chat_parsing import ResponseParser

        return ResponseParser(self._template, prefix=prefix, tools=self._described)

    def _parts_of(self, run: Any) -> list[Part]:
        try:
            events = run()
        except ValueError:
            text, self._pending = self._pending, ""
            self._parser = self._new("")
            return [Part("content", text)]
        parts: list[Part] = []
        for event in events:
            if event["field"] == _CALLS:
                if event["type"] == "region_close":
                    parts += self._calls(event["value"])
            elif event["type"] == "region_chunk":
                is_reasoning = self._separate and event["field"] in _REASONING
                parts.append(Part("reasoning" if is_reasoning else "content", event["text"]))
                self._pending = ""
        return parts

    def _calls(self, value: Any) -> list[Part]:
        """Returns the parts of calls that were read, or their text if they call no tool of ours."""
        found = [call.get("function", call) for call in (value if isinstance(value, list) else [value])]
        text, self._pending = self._pending, ""
        if not all(call.get("name") in self._tools and isinstance(call.get("arguments"), dict) for call in found):
            return [Part("content", text)]
        parts: list[Part] = []
        for call in found[: self._max_calls - self._num_calls]:
            arguments = msgspec.json.encode(call["arguments"]).decode()
            parts += [Part("call", call["name"], self._num_calls), Part("arguments", arguments, self._num_calls)]
            self._num_calls += 1
        return parts


def _joined(parts: list[Part]) -> list[Part]:
    """Returns the parts, with texts of one kind in a row as one."""
    joined: list[Part] = []
    for part in parts:
        if joined and part.kind == joined[-1].kind and part.kind in ("content", "reasoning"):
            joined[-1] = Part(part.kind, joined[-1].text + part.text)
        else:
            joined.append(part)
    return joined
