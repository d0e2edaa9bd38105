"""What all backends can do, and what they are told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from bench.serving.answer import Answer, Turn

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
