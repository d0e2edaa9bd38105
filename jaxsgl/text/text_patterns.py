"""Regular expressions, as llguidance writes them between slashes, of texts that JSON schemas and clients describe.

Texts outside of JSON, as in the tags of tool calls, are held to a schema by them. Owns no grammar: call_grammar.py
makes terminals of them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxsgl.errors import InvalidRequest
from jaxsgl.requests.regexes import in_slashes
from jaxsgl.text.parameters import parts_of

LOOKAROUND = re.compile(r"\(\?<?[=!]|\\[1-9]")  # and what refers back: llguidance has neither
_ANY = r"(.|\n)*"
_DATE = "[0-9]{4}-((0[1-9]|1[0-2])-(0[1-9]|1[0-9]|2[0-8])|(0[13-9]|1[0-2])-(29|30)|(0[13578]|1[02])-31)"
_TIME = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,9})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_BYTE = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_LABEL = "[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_IN_URI = "([A-Za-z0-9._~!$&'()*+,;=:@/-]|%[0-9A-Fa-f]{2})*"
_FORMATS = {  # each allows valid texts alone, if not all of them
    "date": _DATE,
    "date-time": f"{_DATE}T{_TIME}",
    "time": _TIME,
    "uuid": "[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
    "email": rf"[A-Za-z0-9_+-]{{1,32}}(\.[A-Za-z0-9_+-]{{1,31}})?@({_LABEL}\.){{1,3}}{_LABEL}",
    "hostname": rf"{_LABEL}(\.{_LABEL}){{0,3}}",
    "ipv4": rf"({_BYTE}\.){{3}}{_BYTE}",
    "uri": rf"[a-z][a-z0-9+.-]{{0,31}}://[A-Za-z0-9._~-]+(:[0-9]{{1,5}})?(/{_IN_URI})?(\?{_IN_URI})?(#{_IN_URI})?",
}
_FEW = 100  # characters of which each has a place of its own in llguidance's machine
_LIMITS = ("pattern", "format", "minLength", "maxLength")
_SPECIAL = re.compile(r"\\.|\[\^?\]?(\\.|[^\]\\])*\]", re.DOTALL)  # what is escaped, and classes
_GROUP = re.compile(r"\([^()]*\)")


@dataclass
class TextLimits:
    """What texts hold to: `patterns` that match all of a text, between slashes, and its length in characters."""

    patterns: list[str] = field(default_factory=list)
    least: int = 0
    most: int | None = None

    def without_end(self, end: str, is_token: bool) -> str:
        """Returns the expression of texts of these limits in which `end`, which follows them, isn't found before.

        `end` begins with `</`; a line break may stand before it. If it `is_token`, it ends a text
        wherever it comes; else where a text may end.
        """
        length = rf"/(.|\n){{{self.least},{'' if self.most is None else self.most}}}/"
        spelled = "".join("\\" + char if char in r"\/.+*?()|[]{}^$" else char for char in end)
        if is_token:
            without = [rf"~/(.|\n)*{spelled}(.|\n)*/"]
        elif self.patterns or self.least > _FEW:  # no tag ends in it: to look for `end` alone would cost too much
            without = [r"/([^<]|<+[^<\/])*<*/"]
        elif self.least and self.most is not None:  # as above, while the text is too short
            without = [rf"/([^<]|<[^<\/]){{{self.least}}}(([^<]|<[^<\/])(.|\n)*)?/"]
        elif self.least:  # from there on, the first end is one
            without = [rf"~/(.|\n){{0,{self.least}}}{spelled}(.|\n)*/"]
        else:
            without = []
        return " & ".join([length, *self.patterns, *without])


def text_limits(schema: Any, root: Mapping[str, Any], key: str) -> TextLimits | None:
    """Returns what the texts of the parameter `key` hold to by its schema, or None if any text does.

    Raises `InvalidRequest` for what no expression says.
    """
    found = TextLimits()
    for part, must_hold in parts_of(schema, root, "string"):
        limits = {word: part[word] for word in _LIMITS if word in part}
        if "not" in part or "if" in part:
            raise _refused(key, "not" if "not" in part else "if")
        if limits and not must_hold:
            raise _refused(key, f"{next(iter(limits))} in one of several alternatives")
        for word, limit in limits.items():
            _add(found, key, word, limit)
    return None if found == TextLimits() else found


def _add(found: TextLimits, key: str, word: str, limit: Any) -> None:
    match word, limit:
        case "pattern", str():
            found.patterns.append(in_slashes(_searched(key, limit)))
        case "format", str() if limit in _FORMATS:
            found.patterns.append(in_slashes(_FORMATS[limit]))
        case "minLength", int() if limit >= 0 and limit is not True:
            found.least = max(found.least, limit)
        case "maxLength", int() if limit > 0 and limit is not True:
            found.most = limit if found.most is None else min(found.most, limit)
        case _:
            raise _refused(key, f"{word} {limit!r:.100}")


def _searched(key: str, pattern: str) -> str:
    """Returns the expression of whole texts in which `pattern` is found."""
    from_start, inner = pattern.startswith("^"), pattern.removeprefix("^")
    escapes = len(inner) - len(inner.removesuffix("$").rstrip("\\")) - 1
    to_end = inner.endswith("$") and escapes % 2 == 0
    inner = inner[:-1] if to_end else inner
    outer = _SPECIAL.sub("", inner)
    has_anchors = "^" in outer or "$" in outer
    while (without := _GROUP.sub("", outer)) != outer:
        outer = without
    if has_anchors or LOOKAROUND.search(inner) or ((from_start or to_end) and "|" in outer):
        raise _refused(key, f"pattern {pattern!r:.100}")
    return f"{'' if from_start else _ANY}({inner}){'' if to_end else _ANY}"


def _refused(key: str, what: str) -> InvalidRequest:
    return InvalidRequest(
        f"the parameter {key:.100} of a strict tool has {what}, to which this model's form of calls can't be held: "
        "leave it out, or send strict: false"
    )
