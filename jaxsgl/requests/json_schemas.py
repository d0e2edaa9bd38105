"""How a client's JSON schema is written for llguidance: what it leaves open is bounded, and what are notes is left out.

Small models would write blanks without end. And llguidance refuses a `format` that it can't hold to, which is a note by
JSON Schema itself: pydantic writes "uuid4" and "path", others write formats of their own.

Front end and engine write schemas for llguidance, each in grammars of its own; both call this.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

VALUES = frozenset({"const", "enum"})  # what they hold is no schema
DEFINITIONS = ("$defs", "definitions")
NAMING = frozenset({"properties", "patternProperties", "dependentSchemas", *DEFINITIONS})  # their keys are names
_FORMATS = frozenset({  # that llguidance holds to
    "date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown",
})  # fmt: skip
_NO_SCHEMAS = VALUES | {"default", "examples", "x-guidance"}
_MAX_DEPTH = 200  # deeper ones are refused (constraints/checked.py)
_BOUND = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,32}"}


def for_llguidance(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns `schema` with a bound of blanks, which its own "x-guidance" goes before, and without unknown formats."""
    schema = _without_unknown_formats(schema)
    own = schema.get("x-guidance", {})
    if not isinstance(own, dict) or own.get("whitespace_flexible") is False:  # a pattern would allow blanks there
        return schema
    return {**schema, "x-guidance": _BOUND | own}


def is_unknown(word: str, value: object) -> bool:
    """Whether a word of a schema is a format that nothing holds to."""
    return word == "format" and isinstance(value, str) and value not in _FORMATS


def _without_unknown_formats(schema: Any, names: bool = False, depth: int = 0) -> Any:
    """Returns a schema, or with `names` a dict of schemas by names, without formats that aren't of `_FORMATS`."""
    if depth > _MAX_DEPTH:
        return schema
    if isinstance(schema, list):
        return [_without_unknown_formats(part, depth=depth + 1) for part in schema]
    if not isinstance(schema, dict):
        return schema
    kept: dict[str, Any] = {}
    for word, value in schema.items():
        if names or word not in _NO_SCHEMAS:
            value = _without_unknown_formats(value, not names and word in NAMING, depth + 1)
        if names or not is_unknown(word, value):
            kept[word] = value
    return kept
