"""Grammars without a parser: `FakeMatcher` allows tokens by a hash of the output so far. For `FakeEngine`.

The text of a fake grammar is "seed length": of a language whose texts have at most `length` tokens. "seed length fails"
can't be followed beyond half of that, and any other text is no grammar.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from jaxsgl.errors import InvalidRequest, RequestFailed
from jaxsgl.requests.grammar import Grammar


def masked_tokens(words: npt.NDArray[np.uint32], vocab_size: int) -> list[int]:
    """Tokens that a mask forbids."""
    bits = np.unpackbits(words.view(np.uint8), bitorder="little")[:vocab_size]
    forbidden: list[int] = np.flatnonzero(bits == 0).tolist()
    return forbidden


class FakeMatcher:
    """A `Matcher` of scheduler/grammars/constraint.py.

    Args:
      seed: of the language.
      length: of its longest texts, in tokens.
      vocab_size: V.
      fails: whether it goes beyond its limits in the middle.
    """

    num_bytes = 99

    def __init__(self, seed: int, length: int, vocab_size: int, fails: bool = False) -> None:
        self._seed, self.length, self._vocab_size, self._fails = seed, length, vocab_size, fails
        self.output: list[int] = []

    def copy(self) -> FakeMatcher:
        """Another one for the same output."""
        other = FakeMatcher(self._seed, self.length, self._vocab_size, self._fails)
        other.output = self.output.copy()
        return other

    def allowed(self) -> list[int]:
        """Tokens that may come next."""
        if self.ended:
            return []
        start = zlib.crc32(np.array(self.output, dtype=np.int32).tobytes(), self._seed)
        few = 1 + start % 7
        return sorted({(start + 31 * i) % self._vocab_size for i in range(few)})

    def advance(self, token_id: int) -> None:
        """Raises `RequestFailed` for any other token."""
        if token_id not in self.allowed():
            raise RequestFailed(f"{token_id} doesn't follow {self.output}")
        self.output.append(token_id)

    def num_allowed(self, token_ids: Sequence[int]) -> int:
        """How many of `token_ids`, from the first, may come next."""
        ahead = self.copy()
        for count, token_id in enumerate(token_ids):
            if token_id not in ahead.allowed():
                return count
            ahead.advance(token_id)
        return len(token_ids)

    @property
    def accepts(self) -> bool:
        """True for a third of the beginnings, and at the end."""
        return self.ended or zlib.crc32(np.array(self.output, dtype=np.int32).tobytes(), ~self._seed & 0xFFFF) % 3 == 0

    @property
    def ended(self) -> bool:
        """Whether the output has its full length."""
        return len(self.output) >= self.length

    def mask_into(self, words: npt.NDArray[np.uint32]) -> None:
        """Writes the bits of `allowed`."""
        if self._fails and len(self.output) >= self.length // 2:
            raise InvalidRequest("the fake grammar fails here")
        words[:] = 0
        for token_id in self.allowed():
            words[token_id // 32] |= np.uint32(1 << token_id % 32)


def compile_fake(grammar: Grammar, vocab_size: int) -> FakeMatcher:
    """The matcher of a fake grammar. Raises `InvalidRequest`."""
    parts = grammar.text.split()
    if len(parts) not in (2, 3) or not all(part.isdigit() for part in parts[:2]):
        raise InvalidRequest(f"{grammar.text} is no fake grammar")
    return FakeMatcher(int(parts[0]), int(parts[1]), vocab_size, fails=len(parts) == 3)
