"""The protocol of a backend of the load generator: it sends a `Turn`, and fills an `Answer` while the answer streams.

Metrics read the answers when the run is over.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

FLUSH_WAIT_S = 30  # how long a flush may wait for the warm-up request to end


@dataclass(frozen=True)
class Served:
    """What a server says about itself; None where it says nothing.

    Attributes:
      words: prompts are sent as words, since the server takes no token ids.
    """

    model: str | None
    vocab_size: int | None
    words: bool = False


class BackendError(Exception):
    """The server can't do what the run needs; the message says what."""


class Backend(Protocol):
    """A connection to one server by one protocol."""

    async def describe(self) -> Served:
        """Asks the server about itself. Raises `BackendError` if it doesn't answer."""

    async def generate(self, turn: Turn, answer: Answer) -> None:
        """Sends `turn` and fills `answer` until its end; errors of the server or the network are noted in it too."""

    async def flush_cache(self) -> None:
        """Empties the prefix cache. Raises `BackendError` if the server can't."""

    async def close(self) -> None:
        """Closes the connection."""


@dataclass(slots=True)
class Answer:
    """The answer to one request. Times are seconds by the monotonic clock.

    Attributes:
      asked_len: tokens to generate.
      input_len, cached_len, output_len: tokens as the server counts them.
      chunks: (time, output tokens so far) of each event with text; 0 tokens where the protocol doesn't say.
      texts: texts of the chunks.
      output_ids: ids of the output, where the protocol has them.
      ended: whether the server gave a finish reason. Some servers send no [DONE] after it.
      error: why the request failed; empty if it didn't.
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
    _silent: list[tuple[float, int]] = field(
        default_factory=list
    )  # events with tokens but without text, before the first text

    def add(self, now_s: float, text: str, num_tokens: int = 0) -> None:
        """Notes an event. Tokens without text (half a character) count with the next text.

        Args:
          now_s: when the event arrived.
          text: text that it adds.
          num_tokens: output tokens so far; 0 if the server doesn't say.
        """
        self.end_s = now_s
        if text:
            self.texts.append(text)
            if not num_tokens or not self.chunks or num_tokens > self.chunks[-1][1]:
                self.chunks.append((now_s, num_tokens))
        elif not self.chunks and num_tokens > (self._silent[-1][1] if self._silent else 0):
            self._silent.append((now_s, num_tokens))

    def count(self, input_len: int, output_len: int, cached_len: int) -> None:
        """Notes the token counts that the server reported last."""
        self.input_len, self.output_len, self.cached_len = input_len, output_len, cached_len

    def finish(self, complete: bool) -> None:
        """Notes the end of the stream.

        One without any text (only special tokens, or no tokenizer) is timed by tokens.
        """
        if not self.error and not complete and not self.ended:
            self.error = "the answer broke off"
        if not self.error and not self.input_len:
            self.error = "the answer has no usage: its tokens can't be counted"
        self.chunks = self.chunks or self._silent or [(self.end_s, self.output_len)]

    @property
    def text(self) -> str:
        """The whole text."""
        return "".join(self.texts)

    @property
    def ttft_s(self) -> float:
        """Seconds from sending to the first text."""
        return self.chunks[0][0] - self.sent_s

    @property
    def e2e_s(self) -> float:
        """Seconds from sending to the end."""
        return self.end_s - self.sent_s

    @property
    def tpot_s(self) -> float:
        """Seconds per output token after the first; 0 if there is only one."""
        return (self.e2e_s - self.ttft_s) / (self.output_len - 1) if self.output_len > 1 else 0.0

    @property
    def itls_s(self) -> list[float]:
        """Seconds from chunk to chunk, for each token: a chunk of k tokens counts as k equal gaps.

        After a chunk whose number of tokens is not known, k is not known either, and counts as 1.
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
      pieces: the prompt in pieces of token ids; None stands for the output of an earlier turn.
      answers: answers to the earlier turns, one per None.
      output_len: tokens to generate.
    """

    pieces: Sequence[list[int] | None]
    answers: Sequence[Answer]
    output_len: int

    def prompt_ids(self) -> list[int]:
        """The ids of the prompt, with the outputs of earlier turns in their places."""
        answers = iter(self.answers)
        return [id for piece in self.pieces for id in (next(answers).output_ids if piece is None else piece)]
