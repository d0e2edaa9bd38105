"""Counts the tokens of an answer, and says them where its `stream_options` ask for it. Knows no text and no engine."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import UNSET, UnsetType

from jaxsgl.frontend.http.openai.replies import Head, PromptDetails, Usage
from jaxsgl.frontend.http.openai.schemas import StreamOptions
from jaxsgl.frontend.http.sse import event
from jaxsgl.text.sample import Piece


class UsageCounter:
    """The tokens of all choices of one HTTP request, while their pieces come.

    Attributes:
      total: of the choices that have ended.
    """

    def __init__(self, options: StreamOptions | None, prompt_lens: Sequence[int], n: int) -> None:
        """`prompt_lens` tokens of each prompt; choice `number` is sample `number % n` of prompt `number // n`."""
        self.total = Usage()
        self._at_end = options is not None and bool(options.include_usage)
        self._in_chunks = options is not None and bool(options.continuous_usage_stats)
        self._prompt_lens = prompt_lens
        self._n = n
        self._completion = [0] * (len(prompt_lens) * n)
        self._cached = [0] * (len(prompt_lens) * n)

    def add(self, number: int, piece: Piece) -> None:
        """Counts a piece of choice `number`."""
        self._completion[number] += len(piece.token_ids)
        self._cached[number] = piece.cached_tokens
        if piece.end is not None:
            self.total.add(piece.end, number % self._n)

    def in_chunk(self, number: int) -> Usage | UnsetType | None:
        """For the next chunk of choice `number`: its own tokens so far, as vLLM and SGLang count them."""
        if not self._in_chunks:
            return None if self._at_end else UNSET
        prompt, completion = self._prompt_lens[number // self._n], self._completion[number]
        return Usage(prompt, completion, prompt + completion, PromptDetails(self._cached[number]))

    def last_chunk(self, head: Head) -> bytes:
        """The event with the total; empty if it isn't asked for."""
        return event(head.answer([], self.total)) if self._at_end else b""
