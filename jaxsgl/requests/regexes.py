r"""Regular expressions of clients as llguidance takes them: `\d`, `\w` and `\s` as vLLM's default backend reads them.

llguidance takes `\d` for the digits of all scripts outside of JSON schemas; clients mean [0-9], and `\p{Nd}` is any
digit. Front end and engine both write regular expressions for it, each in grammars of its own.
"""

from __future__ import annotations

import re

from jaxsgl.errors import InvalidRequest

_CLASSES = {"d": "0-9", "w": "0-9A-Za-z_", "s": r"\x20\t\n\r\f\v\xa0"}  # escaped, since the flag x drops blanks
_PART = re.compile(r"\\?[/\n]|\\.")


def in_slashes(pattern: str) -> str:
    """Returns `pattern` between slashes, which nothing in it ends. Raises `InvalidRequest`."""
    ends_escaped = len(pattern) - len(pattern.rstrip("\\"))
    if ends_escaped % 2:
        raise InvalidRequest("the regex ends with a backslash that escapes nothing: leave it out, or write two")
    return f"/{_PART.sub(_in_slashes, pattern)}/"


def in_ascii(pattern: str) -> str:
    r"""Returns `pattern` with `\d`, `\w`, `\s` and their complements written out."""
    return re.sub(r"\\.", _in_ascii, pattern, flags=re.DOTALL)


def _in_slashes(part: re.Match[str]) -> str:
    return {"/": r"\/", "\n": r"\n"}.get(part[0][-1]) or _in_ascii(part)


def _in_ascii(escape: re.Match[str]) -> str:
    letter = escape[0][-1]
    if letter.lower() not in _CLASSES:
        return escape[0]
    return f"[{'^' if letter.isupper() else ''}{_CLASSES[letter.lower()]}]"
