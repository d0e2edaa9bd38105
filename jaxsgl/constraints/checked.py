"""Parts of grammars that llguidance takes minutes for, whatever its limits, or gets wrong: they are refused before.

    json_schema      check_schema
    lark, ebnf       checked_lark: operators, and schemas that the grammar embeds
    structural_tag   each of its parts as one of these
    answer_grammar   check_schemas_in: its operators are the front end's own

Called by compiler.py and structural_tags.py.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from decimal import Decimal, InvalidOperation
from typing import Any, TypeGuard
from urllib.parse import unquote

from jaxsgl.errors import InvalidRequest
from jaxsgl.requests.regexes import in_ascii

MAX_MULTIPLE_OF = 10_000  # a number's digits are followed by so many states
MAX_DEPTH = 200
MAX_PLACE = 4  # names of properties down to which patterns are told apart
MAX_PATTERNS = 8  # that one text must match at once: compiling takes 2 to the power of their number
_EMPTY_HEAD = re.compile(r"\A\s*%llguidance\s*\{\s*\}")
# Texts, comments, regular expressions (which may have several lines) and special tokens of Lark, inside of which no
# operator stands. One that doesn't end is an error for llguidance.
_LITERAL = re.compile(r'"(?:\\.|[^"\\\n])*"?|(?://|#)[^\n]*|/(?:\\.|[^/\\])+/?|<[^<>\s]+>')


def check_schema(schema: Any) -> None:
    """Raises `InvalidRequest` for a schema whose compilation would take minutes, whatever llguidance's limits are."""
    _check_part(schema, _Intersections(schema), 0)


def _check_part(schema: Any, intersections: _Intersections, depth: int) -> None:
    if depth > MAX_DEPTH:
        raise InvalidRequest(f"the json_schema is nested more than {MAX_DEPTH} deep: flatten it")
    if isinstance(schema, dict):
        step = schema.get("multipleOf")
        if _is_number(step) and _coefficient(step) > MAX_MULTIPLE_OF:
            raise InvalidRequest(
                f"multipleOf is {step}, but must have at most {MAX_MULTIPLE_OF} as its digits: leave it out"
            )
        parts = schema.get("allOf")
        steps = [part for part in parts if "multipleOf" in part] if isinstance(parts, list) else []
        if len(steps) + (step is not None) > 1:
            raise InvalidRequest("allOf holds several multipleOf: write their least common multiple in one")
        if "allOf" in schema or "$ref" in schema:
            intersections.check(schema)
        _check_narrow(schema)
        schema = list(schema.values())
    if isinstance(schema, list):
        for part in schema:
            _check_part(part, intersections, depth + 1)


class _Intersections:
    """Counts the patterns that one text must match at once: those of all parts of `allOf`, through `$ref`s.

    Parts of an `allOf` may each describe a property, whose patterns then meet. So patterns are counted by the place of
    their text: the names of properties that lead to it, "*" for any other.

    Args:
      root: the schema that `$ref`s point into.
    """

    def __init__(self, root: Any) -> None:
        self._root = root
        self._known: dict[int, Counter[tuple[str, ...]]] = {}  # by the identity of a part of the schema

    def check(self, schema: dict[str, Any]) -> None:
        """Raises `InvalidRequest` if more than `MAX_PATTERNS` meet in what `schema` describes."""
        for place, count in self._counts(schema).items():
            if count > MAX_PATTERNS:
                where = " of " + ".".join(place) if place else ""
                raise InvalidRequest(
                    f"{count} patterns{where} meet in one allOf, but {MAX_PATTERNS} are the most: join them in one"
                )

    def _counts(self, schema: Any, depth: int = 0) -> Counter[tuple[str, ...]]:
        if not isinstance(schema, dict):
            return Counter()
        if depth > MAX_DEPTH:
            raise InvalidRequest(f"the json_schema is nested more than {MAX_DEPTH} deep: flatten it")
        found = self._known.get(id(schema))
        if found is not None:
            return found
        self._known[id(schema)] = Counter()  # of a part inside of itself
        found = Counter({(): sum(keyword in schema for keyword in ("pattern", "format"))})
        target = self._target(schema.get("$ref"))
        for part in [target, *_list(schema.get("allOf"))]:
            found.update(self._counts(part, depth + 1))
        for keyword in ("anyOf", "oneOf"):
            for part in _list(schema.get(keyword)):
                found |= found + self._counts(part, depth + 1)
        for name, part in self._inner(schema):
            for place, count in self._counts(part, depth + 1).items():
                if len(place) < MAX_PLACE:
                    found[(name, *place)] += count
        self._known[id(schema)] = found
        return found

    def _inner(self, schema: dict[str, Any]) -> Iterator[tuple[str, Any]]:
        properties = schema.get("properties")
        if isinstance(properties, dict):
            yield from properties.items()
        patterns = schema.get("patternProperties")
        for part in [*(patterns.values() if isinstance(patterns, dict) else ()), *_list(schema.get("prefixItems"))]:
            yield "*", part
        for keyword in ("additionalProperties", "items", "not"):
            yield "*", schema.get(keyword)

    def _target(self, ref: Any) -> Any:
        """The part that `ref` points to, if it is one of this schema."""
        if not isinstance(ref, str) or not ref.startswith("#"):
            return None
        part = self._root
        for name in filter(None, ref[1:].split("/")):
            name = unquote(name).replace("~1", "/").replace("~0", "~")
            if isinstance(part, dict):
                part = part.get(name)
            elif isinstance(part, list) and name.isdecimal() and int(name) < len(part):
                part = part[int(name)]
            else:
                return None
        return part


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _check_narrow(schema: dict[str, Any]) -> None:
    """llguidance 1.9 lets "2" pass as above 2 and up to 2.5, where a bound that is excluded is a whole number."""
    if schema.get("type") == "integer":
        return
    for excluded, others in (
        ("exclusiveMinimum", ("maximum", "exclusiveMaximum")),
        ("exclusiveMaximum", ("minimum", "exclusiveMinimum")),
    ):
        bound = schema.get(excluded)
        for other in others:
            far = schema.get(other)
            if not (_is_number(bound) and _is_number(far) and bound == int(bound) and abs(far - bound) < 1):
                continue
            raise InvalidRequest(
                f"{excluded} {bound} can't be held exactly with {other} {far}, less than 1 away: leave one of them out"
            )


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def checked_lark(text: str) -> str:
    """A client's grammar in Lark's form, without an empty directive at its head, its regular expressions in ASCII.

    Raises `InvalidRequest` for other directives to llguidance, for the operators `&` (both) and `~` (not), whose
    compilation takes 2 to the power of their number, and as `check_schema` does for schemas that the grammar embeds.
    """
    text = _EMPTY_HEAD.sub("", text)
    bare = _LITERAL.sub(" ", text)
    if "%llguidance" in bare:
        raise InvalidRequest("the grammar holds %llguidance, which is the server's to set: leave it out")
    for operator, meaning in (("&", "both"), ("~", "not")):
        place = re.search(r"&" if operator == "&" else r"~(?!\s*\d)", bare)
        if place is not None:
            raise InvalidRequest(
                f"the grammar holds the operator {operator} ({meaning}), which may take minutes to compile: write "
                "alternatives instead"
            )
    check_schemas_in(text)
    return _LITERAL.sub(lambda literal: in_ascii(literal[0]) if literal[0][0] == "/" else literal[0], text)


def check_schemas_in(text: str) -> None:
    """Raises `InvalidRequest` as `check_schema` does, for the schemas that a grammar in Lark's form embeds."""
    for place in re.finditer(r"%json\s*", text):
        try:
            schema, _ = json.JSONDecoder().raw_decode(text, place.end())
        except (ValueError, RecursionError):
            continue  # llguidance says so, or it stands in a string
        check_schema(schema)


def _coefficient(number: float) -> int:
    """The digits of `number` without its decimal point and trailing zeros."""
    try:
        digits = Decimal(str(number)).normalize().as_tuple().digits
    except InvalidOperation:
        return 0
    return int("".join(map(str, digits)) or 0)
