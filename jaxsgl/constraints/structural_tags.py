"""Structural tags in llguidance's form of Lark: text that is free until a trigger, and then holds to a tag's content.

    SGLang    {"structures": [{"begin", "schema", "end"}], "triggers": [..]}
    xgrammar  {"format": {"type": .., ..}}: const_string, json_schema, regex, grammar, any_text, sequence, or, tag,
              triggered_tags, tags_with_separator, optional, star, plus

Free text is a lazy lexeme: it ends at the first trigger. A special token is no text, so constants are cut at the names
of special tokens, which are written as ids. Called by compiler.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from llguidance import regex_to_lark

from jaxsgl.constraints.checked import check_schema, checked_lark, lark_of_ebnf
from jaxsgl.errors import InvalidRequest

MAX_TAGS = 1024
MAX_DEPTH = 50
_TEXT = r"/(.|\n)*/"


def lark_of(tag: Any, special: Mapping[str, int]) -> str:
    """The Lark grammar of a structural tag, as it was parsed from JSON. Raises `InvalidRequest`."""
    if not isinstance(tag, dict):
        raise InvalidRequest("the structural_tag must be an object")
    writer = _Writer(special)
    if "format" in tag:
        start = writer.element(tag["format"])
    elif "structures" in tag:
        start = writer.triggered(_triggered_of_structures(tag))
    else:
        raise InvalidRequest("the structural_tag has neither structures nor a format: send one of them")
    return "\n".join([f"start: {start}", f"TEXT: {_TEXT}", *writer.rules])


def _triggered_of_structures(tag: Mapping[str, Any]) -> dict[str, Any]:
    structures = _list_of("structures", tag)
    tags = [
        {
            "begin": _text_of("begin", structure),
            "content": {"type": "json_schema", "json_schema": structure.get("schema", {})},
            "end": _text_of("end", structure),
        }
        for structure in structures
    ]
    return {"triggers": tag.get("triggers"), "tags": tags}


class _Writer:
    """Collects the rules of one grammar."""

    def __init__(self, special: Mapping[str, int]) -> None:
        self.rules: list[str] = []
        self._ids = special
        names = sorted(special, key=len, reverse=True)
        self._names = re.compile("|".join(map(re.escape, names))) if names else None
        self._depth = 0

    def element(self, given: Any) -> str:
        """An expression for an element of xgrammar's format."""
        if not isinstance(given, dict):
            raise InvalidRequest("an element of the structural_tag must be an object with a type")
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise InvalidRequest(f"the structural_tag is nested more than {MAX_DEPTH} deep: flatten it")
        try:
            return self._element(given.get("type"), given)
        finally:
            self._depth -= 1

    def _element(self, kind: Any, given: Mapping[str, Any]) -> str:
        if kind == "const_string":
            return self._constant(_text_of("value", given))
        if kind == "json_schema":
            return self._schema(given.get("json_schema"))
        if kind == "regex":
            return self._rule(f"/{regex_to_lark(_text_of('pattern', given))}/", terminal=True)
        if kind == "grammar":
            return self._grammar(_text_of("grammar", given))
        if kind == "any_text":
            self._refuse_excludes(given)
            return "TEXT"
        if kind == "sequence":
            return self._sequence(_list_of("elements", given))
        if kind == "or":
            return self._rule(" | ".join(self.element(one) for one in _list_of("elements", given)))
        if kind == "tag":
            return self._rule(" ".join(self._tag(given)))
        if kind == "triggered_tags":
            return self.triggered(given)
        if kind == "tags_with_separator":
            return self._separated(given)
        if kind in ("optional", "star", "plus"):
            mark = {"optional": "?", "star": "*", "plus": "+"}[kind]
            return f"({self.element(given.get('content'))}){mark}"
        raise InvalidRequest(f"an element of the structural_tag is of type {str(kind)[:50]!r}, which isn't understood")

    def triggered(self, given: Mapping[str, Any]) -> str:
        """Free text in which each trigger begins one of the tags that begin with it."""
        self._refuse_excludes(given)
        triggers = _list_of("triggers", given)
        tags = _list_of("tags", given)
        bodies: dict[str, list[str]] = {}
        for tag in tags:
            begin = _text_of("begin", tag)
            trigger = next((one for one in triggers if isinstance(one, str) and one and begin.startswith(one)), None)
            if trigger is None:
                raise InvalidRequest(f"the tag that begins with {begin[:50]!r} begins with none of the triggers")
            rest = begin[len(trigger) :]
            bodies.setdefault(trigger, []).append(" ".join([self._constant(rest), *self._tag(tag)[1:]]))
        groups = [f"{self._until(trigger)} {self._rule(' | '.join(of_one))}" for trigger, of_one in bodies.items()]
        any_tag = self._rule(" | ".join(groups))
        if given.get("stop_after_first"):
            return any_tag if given.get("at_least_one") else self._rule(f"{any_tag} | TEXT")
        return f"({any_tag}){'+' if given.get('at_least_one') else '*'} TEXT"

    def _separated(self, given: Mapping[str, Any]) -> str:
        one = self._rule(" | ".join(" ".join(self._tag(tag)) for tag in _list_of("tags", given)))
        several = one
        if not given.get("stop_after_first"):
            several = f"{one} ({self._constant(_text_of('separator', given))} {one})*"
        return several if given.get("at_least_one") else f"({several})?"

    def _sequence(self, elements: Sequence[Any]) -> str:
        """Elements one after the other. Free text ends where the constant behind it begins."""
        parts: list[str] = []
        after_text = False
        for element in elements:
            kind = element.get("type") if isinstance(element, dict) else None
            if not after_text:
                if kind == "any_text":
                    self._refuse_excludes(element)
                    after_text = True
                else:
                    parts.append(self.element(element))
            elif kind == "const_string":
                parts.append(self._until(_text_of("value", element)))
                after_text = False
            elif kind == "tag":
                begin = _text_of("begin", element)
                parts += [self._until(begin), *self._tag(element)[1:]]
                after_text = False
            else:
                raise InvalidRequest("in a sequence of the structural_tag a constant or a tag must follow any_text")
        return self._rule(" ".join([*parts, "TEXT"] if after_text else parts))

    def _tag(self, tag: Any) -> list[str]:
        """What begins a tag, and the parts behind that."""
        begin = self._constant(_text_of("begin", tag))
        content, ends = tag.get("content"), tag.get("end", "")
        texts = ends if isinstance(ends, list) else [ends]
        if not texts or not all(isinstance(text, str) for text in texts):
            raise InvalidRequest("a tag's end must be a text, or a list of texts")
        if isinstance(content, dict) and content.get("type") == "any_text":
            self._refuse_excludes(content)
            return [begin, self._rule(" | ".join(self._until(text) if text else "TEXT" for text in texts))]
        ending = self._constant(texts[0]) if len(texts) == 1 else self._rule(" | ".join(map(self._constant, texts)))
        return [begin, self.element(content), ending]

    def _until(self, text: str) -> str:
        """Free text that ends with the first `text`."""
        if not text:
            raise InvalidRequest("a trigger or a constant behind any_text is empty: send a text")
        first, *others = self._pieces(text)
        if first.startswith("<["):
            return " ".join(["TEXT", first, *others])
        return " ".join([self._rule(f"{_TEXT} {first}", lazy=True), *others])

    def _constant(self, text: str) -> str:
        return " ".join(self._pieces(text)) or '""'

    def _pieces(self, text: str) -> list[str]:
        """`text` as expressions: strings, and the special tokens in between."""
        if self._names is None:
            return [json.dumps(text)] if text else []
        pieces: list[str] = []
        start = 0
        for found in self._names.finditer(text):
            pieces += [json.dumps(text[start : found.start()])] if found.start() > start else []
            pieces.append(f"<[{self._ids[found[0]]}]>")
            start = found.end()
        return [*pieces, json.dumps(text[start:])] if start < len(text) else pieces

    def _schema(self, schema: Any) -> str:
        if schema is True:
            schema = {}
        if not isinstance(schema, dict):
            raise InvalidRequest("a json_schema of the structural_tag must be an object, or true")
        check_schema(schema)
        return self._rule(f"%json {json.dumps(schema)}")

    def _grammar(self, text: str) -> str:
        return self._rule(f"%lark {{\n{checked_lark(lark_of_ebnf(text))}\n}}")

    def _rule(self, body: str, terminal: bool = False, lazy: bool = False) -> str:
        if len(self.rules) >= 16 * MAX_TAGS:
            raise InvalidRequest("the structural_tag has too many parts: send fewer")
        name = f"{'R' if terminal else 'r'}{len(self.rules)}"
        self.rules.append(f"{name}{'[lazy]' if lazy else ''}: {body}")
        return name

    def _refuse_excludes(self, given: Mapping[str, Any]) -> None:
        if given.get("excludes"):
            raise InvalidRequest("excludes of the structural_tag isn't supported: leave it out")


def _text_of(name: str, given: Any) -> str:
    value = given.get(name) if isinstance(given, dict) else None
    if not isinstance(value, str):
        raise InvalidRequest(f"the structural_tag needs {name} as a text in each of its parts that have one")
    return value


def _list_of(name: str, given: Mapping[str, Any]) -> list[Any]:
    value = given.get(name)
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_TAGS:
        raise InvalidRequest(f"{name} of the structural_tag must be a list of 1 to {MAX_TAGS}")
    return value
