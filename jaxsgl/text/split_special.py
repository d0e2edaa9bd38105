"""`SplitSpecial`: names of special tokens that clients put into chats are ordinary text (`--split-special-tokens`).

    turns --mark--> turns with marks --chat template--> text --ids--> the template's own special tokens, and text

A chat template only joins texts, so the tokenizer takes `<|im_end|>` in a message for the end of a turn. Here each such
name gets two marks around it before the template runs, which tell it from the template's own afterwards. Marks
are characters that Unicode keeps for a program's own use. A name that a template itself puts together from parts of a
message isn't found. Used by tokenizer.py; byte-level tokenizers alone, since others mark the beginnings of texts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from jaxsgl.errors import CheckpointError, InvalidRequest

_BEGIN, _END = "\ufdd0", "\ufdd1"


class SplitSpecial:
    """Marks names, and makes ids of texts with marks. Safe to use from several threads.

    Args:
      backend: a tokenizer of `tokenizers`.
      special: names of special tokens, and their ids.

    Raises:
      CheckpointError: its special tokens take spaces next to them along, which can't be kept.
    """

    def __init__(self, backend: Any, special: Mapping[str, int]) -> None:
        self._plain = type(backend).from_str(backend.to_str())
        self._plain.encode_special_tokens = True  # as text
        self._ids = dict(special)
        for token in backend.get_added_tokens_decoder().values():
            if token.special and (token.lstrip or token.rstrip):
                raise CheckpointError(
                    f"--split-special-tokens: the token {token.content} takes spaces next to it along: leave it out"
                )
        names = "|".join(re.escape(name) for name in sorted(special, key=len, reverse=True))
        self._names = re.compile(names or r"(?!)")
        self._parts = re.compile(f"{_BEGIN}(.*?){_END}|({names or '(?!)'})", re.DOTALL)

    def mark(self, value: Any) -> Any:
        """A copy of a value of JSON with marks around names in its texts; keys stay as they are.

        Raises `InvalidRequest` if the value holds a mark.
        """
        if isinstance(value, str):
            if _BEGIN in value or _END in value:
                raise InvalidRequest("the chat holds U+FDD0 or U+FDD1, which are no characters: leave them out")
            return self._names.sub(f"{_BEGIN}\\g<0>{_END}", value)
        if isinstance(value, Mapping):
            return {key: self.mark(each) for key, each in value.items()}
        if isinstance(value, Sequence):
            return [self.mark(each) for each in value]
        return value

    def ids(self, text: str) -> list[int]:
        """The ids of a text with marks: names between these are text, others are their tokens."""
        ids: list[int] = []
        plain, place = "", 0
        for found in self._parts.finditer(text):
            plain, place = plain + text[place : found.start()], found.end()
            if found[2] is None:
                plain += found[1]
                continue
            ids += [*self._encode(plain), self._ids[found[2]]]
            plain = ""
        return ids + self._encode(plain + text[place:])

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._plain.encode(text, add_special_tokens=False).ids if text else []
        return ids
