"""`Constraint`: what the next token of one sample may be. Joins the grammar's matcher with what ends the sample.

    mask     tokens that the grammar allows; EOS and stop tokens only where the grammar accepts, from min_tokens on
    limits   of those only allowed_token_ids, and no token that would complete a bad word
    end      where nothing may follow: the sample stops, without an EOS token, before min_tokens and with ignore_eos too

Owned by a `Req`, whose output it follows token by token. A request that starts over after a retraction keeps it, since
its output stays. `Matcher` is what the scheduler knows of compiled grammars; constraints/compiler.py has the real one.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from jaxsgl.errors import InvalidRequest
from jaxsgl.requests.grammar_work import GrammarWork
from jaxsgl.requests.request import SamplingParams

Words: TypeAlias = npt.NDArray[np.uint32]

ALL = 0xFFFFFFFF


class Matcher(Protocol):
    """Follows one output through a grammar. Methods raise `InvalidRequest` where the grammar goes beyond its limits."""

    @property
    def num_bytes(self) -> int:
        """Memory that the grammar takes, as far as it is known."""
        ...

    def copy(self) -> Matcher:
        """Another one for the same output so far."""
        ...

    def advance(self, token_id: int) -> None:
        """Takes the next token; raises `RequestFailed` if the grammar refuses it, since the mask has allowed it."""
        ...

    def num_allowed(self, token_ids: Sequence[int]) -> int:
        """How many of `token_ids`, from the first, may come next, one after the other; a question."""
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


class AnyTokens:
    """The `Matcher` of samples without a grammar."""

    num_bytes = 0
    ended = False
    accepts = True

    def copy(self) -> AnyTokens:
        """It holds nothing."""
        return self

    def advance(self, token_id: int) -> None:
        """Any token may come."""

    def num_allowed(self, token_ids: Sequence[int]) -> int:
        """All of them."""
        return len(token_ids)

    def mask_into(self, words: Words) -> None:
        """Allows all tokens."""
        words[:] = ALL


class Bound(NamedTuple):
    """How far the run of tokens of a sample may go in a step.

    Attributes:
      num_tokens: a run that has more is cut to so many, and the sample ends with them.
      error: why it ends then; None: its output is complete.
    """

    num_tokens: int
    error: InvalidRequest | None


NO_BOUND = Bound(2**31 - 1, None)


class TokenLimits:
    """Tokens that a request may draw at all, and those that may not follow others. Its samples share one.

    Each mask takes a comparison of the output's end with the bad words whose last token but one is the newest.
    """

    def __init__(self, sampling: SamplingParams, vocab_size: int) -> None:
        bits = np.zeros(-(-vocab_size // 32) * 32, dtype=bool)
        if sampling.allowed_token_ids:
            bits[np.array(sampling.allowed_token_ids, dtype=np.int64)] = True
        else:
            bits[:vocab_size] = True
        self._followers: dict[int, list[tuple[list[int], int]]] = {}  # by the token before: (all before, the last)
        for *before, last in sampling.bad_word_ids:
            if before:
                self._followers.setdefault(before[-1], []).append((before, last))
            else:
                bits[last] = False
        self._allowed: Words = np.packbits(bits, bitorder="little").view("<u4").astype(np.uint32)

    def apply(self, words: Words, output_ids: Sequence[int]) -> None:
        """Takes out of `words [ceil(V / 32)]` what may not come after `output_ids`."""
        words &= self._allowed
        for before, last in self._followers.get(output_ids[-1], ()) if output_ids else ():
            if output_ids[-len(before) :] == before:
                words[last // 32] &= np.uint32(ALL ^ (1 << last % 32))


class Constraint:
    """What holds one sample: its grammar, if it has one, and its limits.

    Args:
      matcher: of an empty output; it is copied.
      eos_ids: tokens that end texts of the model.
      stop_ids: those and others that end this sample.
      min_tokens: before so many none of `stop_ids` may be drawn.
      limits: None: the sample has none.
      work: measures and marks all that the matcher does. None: it is measured alone.
    """

    __slots__ = (
        "_has_grammar",
        "_keeps",
        "_limits",
        "_matcher",
        "_min_tokens",
        "_num_ahead",
        "_num_tokens",
        "_sets",
        "_words",
        "_work",
    )

    def __init__(
        self,
        matcher: Matcher,
        eos_ids: Collection[int],
        stop_ids: Collection[int],
        min_tokens: int,
        limits: TokenLimits | None = None,
        work: GrammarWork | None = None,
    ) -> None:
        self._work = work or GrammarWork()
        with self._work:
            self._matcher = matcher.copy()
        self._has_grammar = not isinstance(matcher, AnyTokens)
        self._limits = limits
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._num_ahead = 0  # drafts that were followed
        ids = np.array(sorted({*(eos_ids if self._has_grammar else ()), *stop_ids}), dtype=np.int64)
        self._words = np.unique(ids // 32)
        self._keeps = ~_bits(ids, self._words)
        self._sets = _bits(np.array(sorted(stop_ids), dtype=np.int64), self._words)

    @property
    def ended(self) -> bool:
        """Whether the output is complete and nothing may follow."""
        return self._matcher.ended

    def advance(self, token_id: int) -> None:
        """Takes the next token of the output, unless it ended it. Raises `InvalidRequest` or `RequestFailed`."""
        self._num_tokens += 1
        self._advance(self._matcher, token_id, self._num_tokens)

    def num_allowed(self, drafts: Sequence[int]) -> int:
        """How many of `drafts`, from the first, the grammar allows next; a question. Limits may allow fewer."""
        with self._work:
            return self._matcher.num_allowed(drafts)

    def mask_into(self, words: Words, output_ids: Sequence[int] = ()) -> bool:
        """Writes to `words [ceil(V / 32)]` which tokens may follow `output_ids`; False: the output is complete instead.

        Raises `InvalidRequest` if no token may come though the output isn't complete, or at the grammar's limits.
        """
        return self._mask_into(words, output_ids, self._matcher, self._num_tokens)

    def masks_ahead(self, words: Words, output_ids: Sequence[int], drafts: Sequence[int]) -> Bound:
        """Writes to `words[1:]` which tokens may follow each of `drafts`; returns how far a run may go.

        `words[0]`, which `mask_into` has written, says what may come first. Where a draft may not come, no run gets
        beyond it, and the masks after it stay as they are. The matcher stays where it is, since what is drawn decides.

        Args:
          words: `[1 + len(drafts), ceil(V / 32)]`.
          output_ids: of the sample.
          drafts: tokens that are supposed to follow them.
        """
        with self._work:
            matcher = self._matcher.copy()
        for count, draft in enumerate(drafts, 1):
            if not words[count - 1, draft // 32] >> np.uint32(draft % 32) & 1:
                break
            try:
                self._num_ahead += 1
                self._advance(matcher, draft, self._num_tokens + count)
                if matcher.ended:
                    break
                known = [*output_ids, *drafts[:count]]
                if self._mask_into(words[count], known, matcher, self._num_tokens + count):
                    continue
                error = None
            except InvalidRequest as failure:
                error = failure
            words[count] = ALL
            return Bound(count, error)
        return NO_BOUND

    def _advance(self, matcher: Matcher, token_id: int, num_tokens: int) -> None:
        with self._work:
            matcher.advance(token_id)
        self._work.check(num_tokens, self._num_ahead)

    def _mask_into(self, words: Words, output_ids: Sequence[int], matcher: Matcher, num_tokens: int) -> bool:
        with self._work:
            matcher.mask_into(words)
            accepts = matcher.accepts
        self._work.check(num_tokens, self._num_ahead)
        words[self._words] &= self._keeps
        if accepts and num_tokens >= self._min_tokens:
            words[self._words] |= self._sets
        if self._limits is not None:
            self._limits.apply(words, output_ids)
        if words.any():
            return True
        if not self._has_grammar:
            raise InvalidRequest(
                f"after {num_tokens} tokens allowed_token_ids and bad_words leave none, or none that may come "
                "before min_tokens: change them"
            )
        if not accepts:
            raise InvalidRequest(
                f"after {num_tokens} tokens the grammar leaves no token of the vocabulary that neither ends the "
                "output nor is a stop token, not allowed or bad: change the grammar, or what else limits tokens"
            )
        return False


def _bits(ids: npt.NDArray[np.int64], words: npt.NDArray[np.int64]) -> Words:
    """The bits of `ids` in those of the words of a mask that `words` names."""
    bits = np.zeros(len(words), dtype=np.uint32)
    np.bitwise_or.at(bits, np.searchsorted(words, ids // 32), np.uint32(1) << (ids % 32).astype(np.uint32))
    return bits
