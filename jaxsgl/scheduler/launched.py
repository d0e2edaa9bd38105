"""What a step in flight owes to whom: the entries of its batch, and how its scores become replies' log-probabilities.

Values and a conversion; the scheduler makes and reads them.
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxsgl.batch.engine_api import TokenScores
from jaxsgl.messages import TokenLogprob
from jaxsgl.scheduler.req import Req


@dataclass(frozen=True, slots=True)
class ScoredChunk:
    """Tokens first .. first + count - 1 of a step are `req`'s from position `start` on, and their scores are wanted."""

    req: Req
    first: int
    count: int
    start: int


@dataclass(frozen=True, slots=True)
class Launched:
    """One step in flight.

    Attributes:
      entries: whose token each sequence of the batch yields; None for a chunk that yields none.
      scored: chunks whose prompt tokens are scored.
    """

    entries: list[Req | None]
    scored: tuple[ScoredChunk, ...] = ()


def token_logprobs(scores: TokenScores, first: int, count: int, num_top: int) -> list[TokenLogprob]:
    """Entries first .. first + count - 1 of `scores`, each with its `num_top` most likely tokens."""
    part = slice(first, first + count)
    ids, logprobs = scores.top_ids[part, :num_top].tolist(), scores.top_logprobs[part, :num_top].tolist()
    tops = (tuple(zip(*pair, strict=True)) for pair in zip(ids, logprobs, strict=True))
    return [TokenLogprob(*pair) for pair in zip(scores.logprobs[part].tolist(), tops, strict=True)]
