"""Parts of grammars that llguidance takes minutes for, whatever its limits, or gets wrong: they are refused before.

Called by translation.py and structural_tags.py.
"""

from __future__ import annotations

import json
import re
from decimal import Decimal, InvalidOperation
from typing import Any, TypeGuard

from llguidance.gbnf_to_lark import any_to_lark

from jaxsgl.errors import InvalidRequest

MAX_EBNF_CHARS = 1 << 16  # it is parsed in Python
MAX_MULTIPLE_OF = 10_000  # a number's digits are followed by so many states
MAX_DEPTH = 200


def check_schema(schema: Any, depth: int = 0) -> None:
    """Raises `InvalidRequest` for a schema whose compilation would take minutes, whatever llguidance's limits are."""
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
        _check_narrow(schema)
        schema = list(schema.values())
    if isinstance(schema, list):
        for part in schema:
            check_schema(part, depth + 1)


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


def check_lark(text: str) -> None:
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


def lark_of_ebnf(text: str) -> str:
    """A grammar in GBNF or Lark's form, in Lark's form. Raises `InvalidRequest`."""
    if len(text) > MAX_EBNF_CHARS:
        raise InvalidRequest(f"the ebnf has {len(text)} characters, but {MAX_EBNF_CHARS} are the most: shorten it")
    try:
        lark: str = any_to_lark(text)
    except Exception as error:  # a parser in Python works on what the client sent
        raise InvalidRequest(f"the ebnf can't be read: {str(error)[:300]}") from None
    return lark
