"""GBNF in Lark's form, by llguidance's translation, and what that takes for something else mended before.

    "\\u0041"      the character, since the translation drops leading zeros of its number
    'a'           "a"
    start, a-b    another name, where the translation would take it for another rule's
    line breaks   end a rule before the next one only, as in xgrammar's EBNF

Lark's form is left as it is. Called by compiler.py and structural_tags.py.
"""

from __future__ import annotations

import itertools
import re

from llguidance.gbnf_to_lark import gbnf_to_lark

from jaxsgl.errors import InvalidRequest

MAX_EBNF_CHARS = 1 << 16  # it is parsed in Python
_DEFINED = re.compile(r"^[ \t]*([\w-]+)[ \t]*::=", re.MULTILINE)
_LARK = re.compile(r"^[ \t]*(%llguidance\b|[!?]{0,2}start\b[^:\n]*:)", re.MULTILINE)
_NAME = re.compile(r"[\w-]+")
# Texts and classes of characters, names, and what stands between; a text that doesn't end is left to the translation.
_PART = re.compile(
    r"""(?P<text>"(?:\\.|[^"\\])*"?|'(?:\\.|[^'\\])*'?|\[(?:\\.|[^\]\\])*\]?)"""
    r"|(?P<name>[\w-]+)"
    r"|(?P<gap>(?:[ \t\r\n]|#[^\r\n]*)+)(?P<ends>(?=[\w-]+[ \t]*::=))?",
    re.DOTALL,
)
_CHAR = re.compile(r"\\u([0-9a-fA-F]{4})|\\U([0-9a-fA-F]{8})|\\(.)|([\x00-\x1f\x7f])", re.DOTALL)


def lark_of_ebnf(text: str) -> str:
    """A grammar in GBNF or Lark's form, in Lark's form. Raises `InvalidRequest`."""
    if len(text) > MAX_EBNF_CHARS:
        raise InvalidRequest(f"the ebnf has {len(text)} characters, but {MAX_EBNF_CHARS} are the most: shorten it")
    if _DEFINED.search(text) is None:
        if _LARK.search(text) is None:
            raise InvalidRequest(
                "the ebnf is neither GBNF (root ::= ...) nor Lark's form (start: ...): write one of them"
            )
        return text
    try:
        lark: str = gbnf_to_lark(_mended(text))
    except Exception as error:  # a parser in Python works on what the client sent
        raise InvalidRequest(f"the ebnf can't be read as GBNF: {str(error)[:300]}") from None
    return lark


def _mended(text: str) -> str:
    names = _new_names(text)

    def mended(match: re.Match[str]) -> str:
        part = match[0]
        if match["text"]:
            return _CHAR.sub(_char, _in_double_quotes(part))
        if match["name"]:
            return names.get(part, part)
        return " " if "\n" in part and match["ends"] is None else part

    return _PART.sub(mended, text)


def _new_names(text: str) -> dict[str, str]:
    """Names of rules that need another one -> that. The translation folds case, "-" and "_", and calls root start."""
    given, words = {"start", "root"}, set(map(_folded, _NAME.findall(text)))
    found: dict[str, str] = {}
    for name in dict.fromkeys(_DEFINED.findall(text)):
        if name == "root":
            continue
        new = _folded(name)
        if new in given:
            new = next(one for number in itertools.count(1) if (one := f"{_folded(name)}_{number}") not in words)
            words.add(new)
            found[name] = new
        given.add(new)
    return found


def _folded(name: str) -> str:
    return re.sub(r"([a-z])([A-Z])", r"\1_\2", name.replace("-", "_")).lower()


def _in_double_quotes(part: str) -> str:
    if len(part) < 2 or part[0] != "'" or part[-1] != "'":
        return part
    inner = re.sub(r'\\.|"', lambda match: '\\"' if match[0] == '"' else match[0], part[1:-1], flags=re.DOTALL)
    return f'"{inner}"'


def _char(match: re.Match[str]) -> str:
    """A character as the translation and Lark know it; what is none is theirs to refuse."""
    if match[3] is not None and (match[3].isalnum() or match[3] in '\\"'):
        return match[0]
    plain = match[3] or match[4]  # as "\[", "\-" and "\'", of which Lark's texts know none, and line breaks
    number = ord(plain) if plain else int(match[1] or match[2], 16)
    if number < 0x80:
        return f"\\x{number:02x}"
    return match[0] if 0xD800 <= number < 0xE000 or number > 0x10FFFF else chr(number)
