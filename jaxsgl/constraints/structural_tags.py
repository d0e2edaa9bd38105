"""Structural tags in llguidance's form of Lark: text that is free until a trigger, and then holds to a tag's content.

    SGLang    {"structures": [{"begin", "schema", "end"}], "triggers": [..]}
    xgrammar  {"format": {"type": .., ..}}: const_string, json_schema, regex, grammar, any_text, sequence, or, tag,
              triggered_tags, tags_with_separator, optional, star, plus

Free text, and what a regex matches, would swallow the text behind it: a trigger, a constant, a tag's begin or end
(`Ends`). So both are one lazy lexeme, which ends where that text first comes. A special token is no text, so constants
are cut at the names of special tokens, which are written as ids. Called by compiler.py.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from jaxsgl.constraints.checked import check_schema, checked_lark
from jaxsgl.constraints.ebnf import lark_of_ebnf
from jaxsgl.errors import InvalidRequest
from jaxsgl.requests.json_schemas import for_llguidance
from jaxsgl.requests.regexes import in_slashes

MAX_TAGS = 1024
MAX_DEPTH = 50
_TEXT = r"/(.|\n)*/"
# What stands directly behind an element: one of these texts; (): nothing; None: what no first text tells.
Ends: TypeAlias = tuple[str, ...] | None


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
    """Collects the rules of one grammar, each once."""

    def __init__(self, special: Mapping[str, int]) -> None:
        self._rules: dict[str, str] = {}  # the rest of a rule -> its name
        self._ids = special
        names = sorted(special, key=len, reverse=True)
        self._names = re.compile("|".join(map(re.escape, names))) if names else None
        self._depth = 0

    @property
    def rules(self) -> list[str]:
        """All that expressions use."""
        return [name + rest for rest, name in self._rules.items()]

    def element(self, given: Any, ends: Ends = (), begun: bool = False) -> str:
        """An expression for an element of xgrammar's format and for the one of `ends` behind it.

        `begun`: what stands before it has written its first text, that of a constant or a tag.
        """
        if not isinstance(given, dict):
            raise InvalidRequest("an element of the structural_tag must be an object with a type")
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise InvalidRequest(f"the structural_tag is nested more than {MAX_DEPTH} deep: flatten it")
        try:
            return self._element(given.get("type"), given, ends, begun)
        finally:
            self._depth -= 1

    def _element(self, kind: Any, given: Mapping[str, Any], ends: Ends, begun: bool) -> str:
        if kind == "const_string":
            text = _text_of("value", given)
            return f"{'' if begun else self._constant(text)} {self._one_of(ends)}"
        if kind == "json_schema":
            return f"{self._schema(given.get('json_schema'))} {self._one_of(ends)}"
        if kind == "regex":
            pattern = in_slashes(_text_of("pattern", given))
            return self._up_to(pattern, ends) if ends else self._rule(pattern, terminal=True)
        if kind == "grammar":
            return f"{self._grammar(_text_of('grammar', given))} {self._one_of(ends)}"
        if kind == "any_text":
            self._refuse_excludes(given)
            return self._free(ends)
        if kind == "sequence":
            return self._sequence(_list_of("elements", given), ends)
        if kind == "or":
            return self._rule(" | ".join(self.element(one, ends) for one in _list_of("elements", given)))
        if kind == "tag":
            return self._rule(self._tag(given, ends, begun))
        if kind == "triggered_tags":
            return self.triggered(given, ends)
        if kind == "tags_with_separator":
            return self._separated(given, ends)
        if kind == "optional" and ends:
            return self._rule(f"{self.element(given.get('content'), ends)} | {self._one_of(ends)}")
        if kind in ("optional", "star", "plus"):
            mark = {"optional": "?", "star": "*", "plus": "+"}[kind]
            return f"({self.element(given.get('content'), _of_repeated(ends))}){mark} {self._one_of(ends)}"
        raise InvalidRequest(f"an element of the structural_tag is of type {str(kind)[:50]!r}, which isn't understood")

    def triggered(self, given: Mapping[str, Any], ends: Ends = ()) -> str:
        """Free text in which each trigger begins one of the tags that begin with it, up to one of `ends`."""
        self._refuse_excludes(given)
        triggers = _list_of("triggers", given)
        tags = _list_of("tags", given)
        bodies: dict[str, list[str]] = {}
        for tag in tags:
            begin = _text_of("begin", tag)
            trigger = next((one for one in triggers if isinstance(one, str) and one and begin.startswith(one)), None)
            if trigger is None:
                raise InvalidRequest(f"the tag that begins with {begin[:50]!r} begins with none of the triggers")
            rest = self._constant(begin[len(trigger) :])
            bodies.setdefault(trigger, []).append(f"{rest} {self._tag(tag, _of_repeated(ends), begun=True)}")
        groups = [
            f"{self._up_to(_TEXT, (trigger,))} {self._rule(' | '.join(of_one))}" for trigger, of_one in bodies.items()
        ]
        any_tag = self._rule(" | ".join(groups))
        is_one, must = given.get("stop_after_first"), given.get("at_least_one")
        if is_one and must:
            return f"{any_tag} {self._one_of(ends)}"
        _check_triggers(bodies, ends)
        if is_one:
            return self._rule(f"{any_tag} {self._one_of(ends)} | {self._free(ends)}")
        return f"({any_tag}){'+' if must else '*'} {self._free(ends)}"

    def _separated(self, given: Mapping[str, Any], ends: Ends) -> str:
        one = self._rule(" | ".join(self._tag(tag, _of_repeated(ends)) for tag in _list_of("tags", given)))
        several = one
        if not given.get("stop_after_first"):
            several = f"{one} ({self._constant(_text_of('separator', given))} {one})*"
        return f"({several}){'' if given.get('at_least_one') else '?'} {self._one_of(ends)}"

    def _sequence(self, elements: Sequence[Any], ends: Ends) -> str:
        """Elements one after the other, each of which writes the first text of the next one, if that is known."""
        firsts = [*map(_first_text, elements[1:]), ends]
        begun = [False, *(first is not None for first in firsts[:-1])]
        return self._rule(" ".join(map(self.element, elements, firsts, begun)))

    def _tag(self, tag: Any, ends: Ends, begun: bool = False) -> str:
        begin = _text_of("begin", tag)
        content, own = tag.get("content"), tag.get("end", "")
        texts = tuple(own) if isinstance(own, list) else (own,)
        if not texts or not all(isinstance(text, str) for text in texts):
            raise InvalidRequest("a tag's end must be a text, or a list of texts")
        head = "" if begun else self._constant(begin)
        if texts == ("",):
            return f"{head} {self.element(content, ends)}"
        if "" in texts and ends != ():
            return f"{head} {self.element(content, None)} {self._one_of(texts)} {self._one_of(ends)}"
        return f"{head} {self.element(content, texts)} {self._one_of(ends)}"

    def _free(self, ends: Ends) -> str:
        """Free text up to one of `ends`."""
        if ends is None:
            raise InvalidRequest(
                "in the structural_tag a constant, a tag or a tag's end must follow any_text and triggered_tags, if "
                "anything does, since free text has no end of its own: add one"
            )
        return self._up_to(_TEXT, ends) if ends else "TEXT"

    def _up_to(self, pattern: str, ends: Sequence[str]) -> str:
        """What `pattern` matches, and the first of `ends` behind it."""
        return self._alternatives([self._with_end(pattern, end) for end in ends])

    def _with_end(self, pattern: str, end: str) -> str:
        plain = "TEXT" if pattern == _TEXT else pattern
        if not end:
            return plain
        first, *others = self._pieces(end)
        if first.startswith("<["):
            return " ".join([plain, first, *others])
        return " ".join([self._rule(f"{pattern} {first}", lazy=True), *others])

    def _one_of(self, ends: Ends) -> str:
        return self._alternatives([self._constant(end) for end in ends]) if ends else ""

    def _alternatives(self, expressions: Sequence[str]) -> str:
        return expressions[0] if len(expressions) == 1 else self._rule(" | ".join(expressions))

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
        return self._rule(f"%json {json.dumps(for_llguidance(schema))}")

    def _grammar(self, text: str) -> str:
        return self._rule(f"%lark {{\n{checked_lark(lark_of_ebnf(text))}\n}}")

    def _rule(self, body: str, terminal: bool = False, lazy: bool = False) -> str:
        if len(self._rules) >= 16 * MAX_TAGS:
            raise InvalidRequest("the structural_tag has too many parts: send fewer")
        name = f"{'R' if terminal else 'r'}{len(self._rules)}"
        return self._rules.setdefault(f"{'[lazy]' if lazy else ''}: {body}", name)

    def _refuse_excludes(self, given: Mapping[str, Any]) -> None:
        if given.get("excludes"):
            raise InvalidRequest("excludes of the structural_tag isn't supported: leave it out")


def _of_repeated(ends: Ends) -> Ends:
    """What stands behind a part that may come several times before `ends`: more of its kind, or one of them."""
    return None if ends else ends


def _first_text(element: Any) -> Ends:
    """The text that `element` begins with, if it is of a type that tells."""
    kind = element.get("type") if isinstance(element, dict) else None
    if kind not in ("const_string", "tag"):
        return None
    text = _text_of("value" if kind == "const_string" else "begin", element)
    return (text,) if text else None


def _check_triggers(triggers: Iterable[str], ends: Ends) -> None:
    """Raises `InvalidRequest` where free text could never come to one of `ends`, since a trigger comes before."""
    for trigger, end in itertools.product(triggers, ends or ()):
        if trigger in end:
            raise InvalidRequest(
                f"the trigger {trigger[:50]!r} of the structural_tag stands in {end[:50]!r}, which ends its text, so "
                "that no text could end: send a longer trigger"
            )


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
