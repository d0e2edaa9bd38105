"""What a step in flight owes to whom: the requests of its batch, and how its scores become replies' log-probabilities.

Values and a conversion; the scheduler makes and reads them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from jaxsgl.batch.engine_api import StepScores, TokenScores
from jaxsgl.messages import TokenLogprob
from jaxsgl.scheduler.req import Req


@dataclass(frozen=True, slots=True)
class ScoredChunk:
    """Tokens first .. first + count - 1 of a step are `req`'s from position `start` on, and their scores are wanted."""

    req: Req
    lease_number: int
    first: int
    count: int
    start: int


class Launched:
    """One step in flight, made right after it was launched.

    Args:
      reqs: whose sequences the batch holds, in its order.
      kv_tokens: tokens of KV that it reads, in all its steps.
      pairs: (token, token that it attends to) in its chunks and riders; 0 in a decode step, which is `kv_tokens`' own.
      mute: chunks that aren't the last of their request, so their token means nothing.
      scored: chunks whose prompt tokens are scored.
    """

    def __init__(
        self,
        reqs: Sequence[Req],
        kv_tokens: int,
        pairs: float = 0.0,
        mute: frozenset[Req] = frozenset(),
        scored: Sequence[ScoredChunk] = (),
    ) -> None:
        self.kv_tokens = kv_tokens
        self.pairs = pairs
        self._reqs = reqs
        self._lease_numbers = [req.lease_number for req in reqs]
        self._mute = mute
        self._scored = scored

    def yielded(self, tokens: npt.NDArray[np.int32]) -> Iterator[tuple[int, Req, tuple[int, ...]]]:
        """(place in the batch, request, its tokens) where somebody waits for them; `tokens` are `[..., num_seqs]`.

        Nobody does if the request has ended or was retracted since the launch. What one token ends is asked for when
        its turn comes. Tokens of later steps than the one that ends a request are left to whoever takes them.
        """
        by_request = zip(*tokens.reshape(-1, len(self._reqs)).tolist(), strict=True)
        for place, (req, number, ids) in enumerate(zip(self._reqs, self._lease_numbers, by_request, strict=True)):
            if req.lease_number == number and req not in self._mute:
                yield place, req, ids

    def take_prompt_scores(self, scores: StepScores) -> None:
        """Gives the log-probabilities of scored chunks to their requests."""
        for chunk in self._scored:
            num_top = chunk.req.sampling.prompt_logprobs
            assert scores.prompt is not None and num_top is not None
            if chunk.req.lease_number == chunk.lease_number:
                of_chunk = token_logprobs(scores.prompt, chunk.first, chunk.count, num_top)
                chunk.req.add_prompt_logprobs(chunk.start, of_chunk)


def token_logprobs(scores: TokenScores, first: int, count: int, num_top: int) -> list[TokenLogprob]:
    """Entries first .. first + count - 1 of `scores`, each with its `num_top` most likely tokens."""
    part = slice(first, first + count)
    ids, logprobs = scores.top_ids[part, :num_top].tolist(), scores.top_logprobs[part, :num_top].tolist()
    tops = (tuple(zip(*pair, strict=True)) for pair in zip(ids, logprobs, strict=True))
    return [TokenLogprob(*pair) for pair in zip(scores.logprobs[part].tolist(), tops, strict=True)]


def sampled_logprob(req: Req, place: int, scores: StepScores) -> TokenLogprob | None:
    """Of the token at `place` of the batch, if `req` wants it."""
    if req.sampling.logprobs is None:
        return None
    assert scores.sampled is not None, f"{req.key} wants log-probabilities, but its step has none"
    (logprob,) = token_logprobs(scores.sampled, place, 1, req.sampling.logprobs)
    return logprob
