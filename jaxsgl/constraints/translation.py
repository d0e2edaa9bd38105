"""A `Grammar` in llguidance's own words: its form of Lark, in which JSON schemas and regular expressions are embedded.

Every text begins with `HEAD`, since llguidance would otherwise compute the bytes that a grammar forces, whole, inside
one mask: "start: /a+/ /a+/" forces bytes without end. Masks allow the same tokens with it. Never knows a vocabulary
beyond the names of special tokens, which are no text for llguidance. Called by compiler.py and structural_tags.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, TypeAlias

from llguidance import LLMatcher, regex_to_lark

from jaxsgl.constraints import structural_tags
from jaxsgl.constraints.checked import check_schema, checked_lark, lark_of_ebnf
from jaxsgl.errors import InvalidRequest
from jaxsgl.requests.grammar import Grammar

# A schema's own "x-guidance" goes before. Small models would write blanks without end.
JSON_DEFAULTS: Any = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,32}"}

HEAD = '%llguidance {"no_forcing": true}'

SpecialTokens: TypeAlias = Mapping[str, int]  # name -> id


def llguidance_text(grammar: Grammar, special: SpecialTokens) -> str:
    """What llguidance compiles for `grammar`. Raises `InvalidRequest`."""
    text = grammar.text
    try:
        if grammar.kind == "json_object":
            return _text(_start_of_schema({"type": "object"}))
        if grammar.kind == "json_schema":
            schema = parsed("json_schema", text)
            if schema is True:
                schema = {}
            elif not isinstance(schema, dict):
                raise InvalidRequest("the json_schema must be an object, or true (any JSON)")
            check_schema(schema)
            return _text(_start_of_schema(schema))
        if grammar.kind == "regex":
            return _text(f"start: /{regex_to_lark(text)}/")
        if grammar.kind in ("lark", "ebnf"):
            lark = text if grammar.kind == "lark" else lark_of_ebnf(text)
            return _text(checked_lark(lark))
        if grammar.kind == "choice":
            return _text(_lark_of_choice(parsed("choice", text)))
        return _text(structural_tags.lark_of(parsed("structural_tag", text), special))
    except InvalidRequest:
        raise
    except ValueError as error:
        raise InvalidRequest(f"the {grammar.kind} can't be used: {str(error)[:300]}") from None


def _text(lark: str) -> str:
    """What llguidance compiles for a grammar in Lark's form."""
    return LLMatcher.grammar_from_lark(f"{HEAD}\n{lark}")


def _start_of_schema(schema: Mapping[str, Any]) -> str:
    options = schema.get("x-guidance", {})
    merged = {**schema, "x-guidance": {**JSON_DEFAULTS, **options} if isinstance(options, dict) else options}
    return f"start: %json {json.dumps(merged)}"


def parsed(kind: str, text: str) -> Any:
    """`text` as JSON. Raises `InvalidRequest`."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"the {kind} is not JSON: {str(error)[:200]}") from None


def _lark_of_choice(texts: Any) -> str:
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
        raise InvalidRequest("the choice must be a list of texts, one at least")
    some = [json.dumps(text) for text in texts if text]
    if not some:
        return 'start: ""'
    return f"start: CHOICE{'' if all(texts) else '?'}\nCHOICE: {' | '.join(some)}"
