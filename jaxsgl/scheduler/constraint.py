"""`Constraint`: what the next token of one sample may be. Joins the grammar's matcher with what ends the sample.

    mask     tokens that the grammar allows; EOS and stop tokens only where the grammar accepts, from min_tokens on
    end      where nothing may follow: the sample stops, without an EOS token, before min_tokens and with ignore_eos too

Owned by a `Req`, whose output it follows token by token. A request that starts over after a retraction keeps it, since
its output stays. `Matcher` is what the scheduler knows of compiled grammars; constraints/compiler.py has the real one.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from jaxsgl.errors import InvalidRequest

Words: TypeAlias = npt.NDArray[np.uint32]

ALL = 0xFFFFFFFF
MASK_CPU_S, MASK_CPU_S_PER_TOKEN = 0.5, 0.005  # that the masks of a sample may take: others wait meanwhile


class Matcher(Protocol):
    """Follows one output through a grammar. Methods raise `InvalidRequest` where the grammar goes beyond its limits."""

    def copy(self) -> Matcher:
        """Another one for the same output so far."""
        ...

    def advance(self, token_id: int) -> None:
        """Takes the next token; raises `InvalidRequest` if the grammar doesn't allow it, too."""
        ...

    @property
    def accepts(self) -> bool:
        """Whether the output may end here."""
        ...

    @property
    def ended(self) -> bool:
        """Whether nothing may follow."""
        ...

    def mask_into(self, words: Words) -> None:
        """Writes bit i % 32 of word i // 32: whether token i may come next. EOS tokens may be among them or not."""
        ...


class Constraint:
    """The grammar of one sample.

    Args:
      matcher: of an empty output; it is copied.
      eos_ids: tokens that end texts of the model.
      stop_ids: those and others that end this sample.
      min_tokens: before so many none of `stop_ids` may be drawn.
    """

    __slots__ = ("_keeps", "_matcher", "_min_tokens", "_num_tokens", "_seconds", "_sets", "_words")

    def __init__(self, matcher: Matcher, eos_ids: Collection[int], stop_ids: Collection[int], min_tokens: int) -> None:
        self._matcher = matcher.copy()
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._seconds = 0.0
        ids = np.array(sorted({*eos_ids, *stop_ids}), dtype=np.int64)
        self._words = np.unique(ids // 32)
        self._keeps = ~_bits(ids, self._words)
        self._sets = _bits(np.array(sorted(stop_ids), dtype=np.int64), self._words)

    @property
    def ended(self) -> bool:
        """Whether the output is complete and nothing may follow."""
        return self._matcher.ended

    def advance(self, token_id: int) -> None:
        """Takes the next token of the output, unless it ended it. Raises `InvalidRequest`."""
        self._num_tokens += 1
        self._matcher.advance(token_id)

    def mask_into(self, words: Words) -> bool:
        """Writes to `words [ceil(V / 32)]` which tokens may come next; False if the output is complete instead.

        Raises `InvalidRequest` if no token may come though the output isn't complete, or at the grammar's limits.
        """
        start_s = time.thread_time()
        self._matcher.mask_into(words)
        self._seconds += time.thread_time() - start_s
        if self._seconds > MASK_CPU_S + MASK_CPU_S_PER_TOKEN * self._num_tokens:
            raise InvalidRequest(
                f"the grammar took {self._seconds:.1f} s for {self._num_tokens} tokens, for which others wait: "
                "simplify it"
            )
        words[self._words] &= self._keeps
        accepts = self._matcher.accepts
        if accepts and self._num_tokens >= self._min_tokens:
            words[self._words] |= self._sets
        if words.any():
            return True
        if not accepts:
            raise InvalidRequest(
                f"after {self._num_tokens} tokens the grammar leaves no token of the vocabulary that neither ends the "
                "output nor is a stop token: change the grammar, or stop_token_ids"
            )
        return False


def _bits(ids: npt.NDArray[np.int64], words: npt.NDArray[np.int64]) -> Words:
    """The bits of `ids` in those of the words of a mask that `words` names."""
    bits = np.zeros(len(words), dtype=np.uint32)
    np.bitwise_or.at(bits, np.searchsorted(words, ids // 32), np.uint32(1) << (ids % 32).astype(np.uint32))
    return bits
