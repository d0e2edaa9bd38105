"""What every backend of the load generator does: it takes a `Turn`, and fills an `Answer` while the answer streams.

Metrics read the answers when the run is over.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

FLUSH_WAIT_S = 30  # for the warm-up request to be gone


@dataclass(frozen=True)
class Served:
    """What a server says of itself; None: it doesn't.

    Attributes:
      words: prompts go out as words, since the server takes no token ids.
    """

    model: str | None
    vocab_size: int | None
    words: bool = False


class BackendError(Exception):
    """A server that can't do what the run needs; the message says what."""


class Backend(Protocol):
    """A protocol, spoken to one server."""

    async def describe(self) -> Served:
        """Asks the server. Raises `BackendError` if there is none."""

    async def generate(self, turn: Turn, answer: Answer) -> None:
        """Sends `turn`, streams into `answer`, and finishes it; errors of the server or the network go into it too."""

    async def flush_cache(self) -> None:
        """Empties the prefix cache. Raises `BackendError` if the server can't."""

    async def close(self) -> None:
        """Leaves the server."""


@dataclass(slots=True)
class Answer:
    """One request's answer. Times are seconds by the monotonic clock.

    Attributes:
      asked_len: tokens to generate.
      input_len, cached_len, output_len: tokens as the server counts them.
      chunks: (time, output tokens until then; 0 where the protocol doesn't tell) of each event that brought text.
      texts: of the chunks.
      output_ids: where the protocol has them.
      ended: whether the server gave a reason for its end. Not all that do send [DONE] after it.
      error: why it failed; empty: it didn't.
    """

    sent_s: float = 0.0
    end_s: float = 0.0
    asked_len: int = 0
    input_len: int = 0
    cached_len: int = 0
    output_len: int = 0
    chunks: list[tuple[float, int]] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    output_ids: list[int] = field(default_factory=list)
    ended: bool = False
    error: str = ""
    _silent: list[tuple[float, int]] = field(default_factory=list)  # events with tokens, while no text has come

    def add(self, now_s: float, text: str, num_tokens: int = 0) -> None:
        """An event. Tokens without text (half a character) count as come with the next text.

        Args:
          now_s: when it came.
          text: what it adds.
          num_tokens: output tokens until now; 0: not told.
        """
        self.end_s = now_s
        if text:
            self.texts.append(text)
            if not num_tokens or not self.chunks or num_tokens > self.chunks[-1][1]:
                self.chunks.append((now_s, num_tokens))
        elif num_tokens and not self.chunks:
            self._silent.append((now_s, num_tokens))

    def count(self, input_len: int, output_len: int, cached_len: int) -> None:
        """What the server counted so far."""
        self.input_len, self.output_len, self.cached_len = input_len, output_len, cached_len

    def finish(self, complete: bool) -> None:
        """No more will come. A stream without any text (all special tokens, no tokenizer) is timed by its tokens."""
        if not self.error and not complete and not self.ended:
            self.error = "the answer broke off"
        if not self.error and not self.input_len:
            self.error = "the answer has no usage: its tokens can't be counted"
        self.chunks = self.chunks or self._silent or [(self.end_s, self.output_len)]

    @property
    def text(self) -> str:
        """All of it."""
        return "".join(self.texts)

    @property
    def ttft_s(self) -> float:
        """Seconds to the first text."""
        return self.chunks[0][0] - self.sent_s

    @property
    def e2e_s(self) -> float:
        """Seconds to the end."""
        return self.end_s - self.sent_s

    @property
    def tpot_s(self) -> float:
        """Seconds for each token but the first; 0 if there is but one."""
        return (self.e2e_s - self.ttft_s) / (self.output_len - 1) if self.output_len > 1 else 0.0

    @property
    def itls_s(self) -> list[float]:
        """Seconds from chunk to chunk, for each token: a chunk of k tokens counts as k equal gaps.

        After a chunk whose tokens weren't told, nobody knows k: it's one gap.
        """
        gaps: list[float] = []
        for (before_s, before), (now_s, until) in zip(self.chunks, self.chunks[1:], strict=False):
            num_tokens = max(until - before, 1) if before else 1
            gaps += [(now_s - before_s) / num_tokens] * num_tokens
        return gaps


@dataclass(frozen=True)
class Turn:
    """A request to send.

    Attributes:
      pieces: of its prompt, as token ids; None stands for what an earlier turn was answered.
      answers: of the earlier turns, one per None.
      output_len: tokens to generate.
    """

    pieces: Sequence[list[int] | None]
    answers: Sequence[Answer]
    output_len: int

    def prompt_ids(self) -> list[int]:
        """The prompt, with the ids of earlier answers in their places."""
        answers = iter(self.answers)
        return [id for piece in self.pieces for id in (next(answers).output_ids if piece is None else piece)]
