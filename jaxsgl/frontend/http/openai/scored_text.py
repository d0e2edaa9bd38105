"""Shares the log-probabilities of an answer's tokens out to the texts that a parser makes of it.

A parser takes markers out and holds text back, so the tokens of its texts are found by numbers of characters. Knows
pieces and tokenizers. responses.py feeds its parser with `split`, and asks `of` when it has made something of that.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from jaxsgl.frontend.http.openai.logprobs import ChatToken, chat_logprobs
from jaxsgl.text.detokenizer import Detokenizer
from jaxsgl.text.sample import Piece
from jaxsgl.text.tokenizer import Tokenizer


class Scored(NamedTuple):
    """Tokens that make `num_chars` characters together: one, or the parts of a character."""

    tokens: list[ChatToken]
    num_chars: int


class UnscoredText:
    """Takes the place of `ScoredText` in requests that ask for no log-probabilities."""

    def split(self, piece: Piece) -> Iterator[str]:
        """Yields the piece's text as it is."""
        yield piece.text

    def of(self, num_chars: int) -> list[ChatToken]:
        """Returns none."""
        return []


class ScoredText:
    """The tokens of one sample; `detokenizer` must make the same text of them as the sample's own."""

    def __init__(self, tokenizer: Tokenizer, detokenizer: Detokenizer) -> None:
        self._tokenizer = tokenizer
        self._detokenizer = detokenizer
        self._without_text: list[ChatToken] = []
        self._waiting: deque[Scored] = deque()  # for their text, which stop strings may hold back
        self._seen: list[Scored] = []  # by the parser since the last call of `of`

    def split(self, piece: Piece) -> Iterator[str]:
        """Yields the piece's text token by token."""
        scores = chat_logprobs(self._tokenizer, piece.token_ids, piece.logprobs).content
        for token_id, token in zip(piece.token_ids, scores, strict=True):
            self._without_text.append(token)
            self._add(len(self._detokenizer.feed([token_id])))
        if piece.end is not None:
            self._add(len(self._detokenizer.finish()))
        text = piece.text
        while text and self._waiting:
            tokens, num_chars = self._waiting.popleft()
            if len(text) < num_chars and piece.end is None:
                self._waiting.appendleft(Scored(tokens, num_chars - len(text)))
            else:
                self._seen.append(Scored(tokens, num_chars))
            yield text[:num_chars]
            text = text[num_chars:]
        if text:
            yield text

    def of(self, num_chars: int) -> list[ChatToken]:
        """Returns the tokens of the last `num_chars` characters that were split, and forgets the others."""
        found: list[Scored] = []
        while self._seen and sum(each.num_chars for each in found) < num_chars:
            found.insert(0, self._seen.pop())
        self._seen.clear()
        return [token for each in found for token in each.tokens]

    def _add(self, num_chars: int) -> None:
        if num_chars:
            self._waiting.append(Scored(self._without_text, num_chars))
            self._without_text = []
