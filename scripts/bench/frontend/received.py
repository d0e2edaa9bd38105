"""What a stream received, and whether that is right. The clients only keep bytes; all reading happens afterwards.

So the load costs little while it is measured, and yet every token of every stream is compared with what the engine
sent.
"""

from __future__ import annotations

import bisect
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from bench.frontend.plan import Plan, tokenizer
from jaxsgl.text.detokenizer import ByteDetokenizer, TokenBytes


@dataclass
class Received:
    """Bytes of one stream, as they came: (seconds by the monotonic clock, bytes)."""

    parts: list[tuple[float, bytes]] = field(default_factory=list)

    def add(self, data: bytes) -> None:
        """Keeps `data`."""
        self.parts.append((time.monotonic(), data))


@dataclass(frozen=True)
class Chunk:
    """A message of the protocol. Its text or its ids are None if the protocol has none."""

    time_s: float
    text: str | None
    ids: Sequence[int] | None


class WrongStream(Exception):
    """A stream differs from what the engine sent."""


class Expected:
    """What the streams of a plan should have received."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._tokenizer = tokenizer()
        self._bytes = TokenBytes(self._tokenizer.id_to_token, ())

    def check(self, stream: int, chunks: Sequence[Chunk]) -> list[tuple[float, int]]:
        """Returns (seconds, tokens until then) for each chunk. Raises `WrongStream`."""
        ids = self._plan.tokens(stream)
        if all(chunk.ids is not None for chunk in chunks):
            got = [id for chunk in chunks for id in chunk.ids or ()]
            if got != ids:
                raise WrongStream(f"stream {stream}: {len(got)} ids differ from the {len(ids)} of the engine")
        if any(chunk.text for chunk in chunks):
            text = "".join(chunk.text or "" for chunk in chunks)
            if text != self._tokenizer.decode(ids, skip_special_tokens=True):
                raise WrongStream(f"stream {stream}: the text of {len(text)} characters differs from the engine's")
        elif any(chunk.ids is None for chunk in chunks):
            raise WrongStream(f"stream {stream}: neither text nor ids")
        counts = itertools.accumulate(self._num_tokens(stream, chunks))
        return [(chunk.time_s, count) for chunk, count in zip(chunks, counts, strict=True)]

    def _num_tokens(self, stream: int, chunks: Sequence[Chunk]) -> list[int]:
        """Tokens that each chunk completed. One without text counts as come with the next that has some."""
        if all(chunk.ids is not None for chunk in chunks):
            return [len(chunk.ids or ()) for chunk in chunks]
        detokenizer = ByteDetokenizer(self._bytes)
        ends = list(itertools.accumulate(len(detokenizer.feed([id])) for id in self._plan.tokens(stream)))
        at = list(itertools.accumulate(len(chunk.text or "") for chunk in chunks))
        done = [bisect.bisect_left(ends, position) + 1 if position else 0 for position in at]
        done[-1] = len(ends)
        return [now - before for before, now in itertools.pairwise([0, *done])]
