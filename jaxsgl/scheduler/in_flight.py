"""`InFlightStep`: a step that is launched and not collected, and which requests get what it yields.

A request that ended or was retracted since the launch gets nothing: its lease has another number then. Never knows
plans; apply.py makes these values and hands out what steps yield.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from jaxsgl.batch.build import Work
from jaxsgl.batch.engine_api import StepScores, TokenScores
from jaxsgl.messages.replies import Reply, TokenLogprob
from jaxsgl.scheduler.req import Req


@dataclass(frozen=True, slots=True)
class ScoredChunk:
    """Tokens first .. first + count - 1 of a step are `req`'s from position `start` on, and their scores are wanted."""

    req: Req
    lease_number: int
    first: int
    count: int
    start: int

    def take(self, scores: StepScores) -> None:
        """Gives the log-probabilities to the request, if it still waits for them."""
        num_top = self.req.sampling.prompt_logprobs
        assert scores.prompt is not None and num_top is not None
        if self.req.lease_number == self.lease_number:
            self.req.add_prompt_logprobs(self.start, token_logprobs(scores.prompt, self.first, self.count, num_top))


@dataclass(frozen=True, slots=True)
class StatesPart:
    """Tokens first .. first + count - 1 of a step are those of the request at `place` from position `start` on."""

    place: int
    first: int
    count: int
    start: int


@dataclass(frozen=True, slots=True)
class InFlightStep:
    """A step that is launched and not collected.

    Attributes:
      reqs: the requests of the batch, in its order.
      lease_numbers: their lease numbers at the launch.
      silent: requests whose chunk isn't their last, so that its token means nothing.
      scored: chunks whose prompt tokens are scored.
      pooled: places of the chunks of which hidden states are pooled.
      states: tokens of which it yields states that are wanted.
      num_chunks: how many of `reqs`, from the first, are extended; the others decode.
      extend_tokens: by which they are extended.
    """

    reqs: Sequence[Req]
    lease_numbers: Sequence[int]
    silent: frozenset[Req] = frozenset()
    scored: Sequence[ScoredChunk] = ()
    pooled: Sequence[int] = ()
    num_chunks: int = 0
    extend_tokens: int = 0
    states: Sequence[StatesPart] = ()

    def yielded(self, tokens: npt.NDArray[np.int32]) -> Iterator[tuple[int, Req, tuple[int, ...]]]:
        """(place in the batch, request, its tokens) of each request that waits for tokens of this step.

        A request that has ended or was retracted since the launch is left out, even if it ended while earlier items of
        this iterator were handled. `tokens` are `[..., num_seqs]`; those behind the one that ends a request are
        included.
        """
        by_request = zip(*tokens.reshape(-1, len(self.reqs)).tolist(), strict=True)
        silent = self.silent
        for place, (req, number, ids) in enumerate(zip(self.reqs, self.lease_numbers, by_request, strict=True)):
            if req.lease_number == number and not (silent and req in silent):
                yield place, req, ids


def token_logprobs(scores: TokenScores, first: int, count: int, num_top: int) -> list[TokenLogprob]:
    """Entries first .. first + count - 1 of `scores`, each with its `num_top` most likely tokens."""
    part = slice(first, first + count)
    ids, logprobs = scores.top_ids[part, :num_top].tolist(), scores.top_logprobs[part, :num_top].tolist()
    tops = (tuple(zip(*pair, strict=True)) for pair in zip(ids, logprobs, strict=True))
    return [TokenLogprob(*pair) for pair in zip(scores.logprobs[part].tolist(), tops, strict=True)]


def with_scores(reply: Reply, req: Req, place: int, scores: StepScores) -> Reply:
    """The reply with what `req` wants to know of its token at `place` of the batch, and of those before."""
    logprob = None
    if req.sampling.logprobs is not None:
        assert scores.sampled is not None, f"{req.key} wants log-probabilities, but its step has none"
        (logprob,) = token_logprobs(scores.sampled, place, 1, req.sampling.logprobs)
    states = None if req.states is None else req.states.taken()
    return msgspec.structs.replace(reply, logprob=logprob, prompt_logprobs=req.take_prompt_logprobs(), states=states)


def states_of_works(reqs: Sequence[Req], works: Sequence[Work]) -> list[StatesPart]:
    """The tokens of an extend step, `works` of `reqs`, whose states are wanted."""
    parts, first = [], 0
    for place, (req, work) in enumerate(zip(reqs, works, strict=True)):
        if req.states is not None:
            parts.append(StatesPart(place, first, len(work.token_ids), work.start))
        first += len(work.token_ids)
    return parts
