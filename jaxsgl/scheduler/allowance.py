"""What one extend step may hold: tokens, and seconds for their attention. A value that the `PrefillAdder` uses up."""

from __future__ import annotations

import math


class Allowance:
    """Chunks take from it.

    Args:
      num_tokens: that the step may extend.
      seconds: that the attention of its chunks may take.
      kv_token_s, pair_s: seconds per token of KV read, and per pair of tokens that attend.
    """

    def __init__(
        self, num_tokens: int, seconds: float = math.inf, kv_token_s: float = 0.0, pair_s: float = 0.0
    ) -> None:
        self.num_tokens = num_tokens
        self._seconds = seconds
        self._kv_token_s = kv_token_s
        self._pair_s = pair_s

    def longest_chunk(self, start: int, before: int = 0) -> int:
        """Tokens that a chunk with `start` tokens before it may have, instead of the `before` tokens that it has."""
        seconds = self._seconds + self._attention(start, before)
        if seconds == math.inf:
            return before + self.num_tokens
        left = seconds - self._kv_token_s * start
        if left <= 0:
            return 0
        square, linear = self._pair_s / 2, self._kv_token_s + self._pair_s * start
        divisor = linear + math.sqrt(linear * linear + 4 * square * left)
        most = before + self.num_tokens
        return min(int(2 * left / divisor), most) if divisor > 2 * left / (most + 1) else most

    def take(self, start: int, before: int, count: int) -> None:
        """A chunk with `start` tokens before it gets `count` tokens instead of `before`."""
        self.num_tokens -= count - before
        self._seconds -= self._attention(start, count) - self._attention(start, before)

    def _attention(self, start: int, count: int) -> float:
        if not count:
            return 0.0
        return self._kv_token_s * (start + count) + self._pair_s * count * (start + count / 2)
