"""How long a run of blanks may be in JSON whose schema doesn't say: small models would write blanks without end.

Front end and engine write schemas for llguidance, each in grammars of its own; both call `with_bounded_blanks`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_BOUND = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,32}"}


def with_bounded_blanks(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns `schema` with a bound of blanks, which its own "x-guidance" goes before."""
    own = schema.get("x-guidance", {})
    if not isinstance(own, dict) or own.get("whitespace_flexible") is False:  # a pattern would allow blanks there
        return schema
    return {**schema, "x-guidance": _BOUND | own}
