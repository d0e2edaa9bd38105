"""How many tokens are held for requests that run: an estimate that learns, or an exact forecast.

Most requests end long before their max_tokens, so holding all of it would leave the pool half empty. The ratio is the
share of it that is held: high at first, falling with every decode step that goes well, set anew by what a retraction
has shown (SGLang's new_token_ratio). Requests that ignore EOS are known to go on to the end, so for them alone it is
computed when each ends and what the pool must hold until then (forecast.py). Values and arithmetic; decides nothing.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable

from jaxsgl.cache.manager import CacheManager
from jaxsgl.scheduler.req import Req

CLIP_TOKENS = 4096  # nobody's max_tokens counts for more than this, retraction does the rest
FIRST_RATIO = 0.7
LEAST_SHARE = 0.14  # of the first ratio
DECAY_STEPS = 600
TOKENS_AHEAD = 20  # after a retraction each request shall find room for so many at least


class NewTokenRatio:
    """Share of their max_tokens that running requests are expected to use.

    Args:
      conservativeness: scales the first ratio; 1 is SGLang's default.
    """

    def __init__(self, conservativeness: float) -> None:
        self._first = min(FIRST_RATIO * conservativeness, 1.0)
        self._least = LEAST_SHARE * self._first
        self._step = (self._first - self._least) / DECAY_STEPS
        self.value = self._first

    def decoded(self, num_steps: int = 1) -> None:
        """Decode steps found all the pages that they needed."""
        self.value = max(self.value - num_steps * self._step, self._least)

    def retracted(self, running: Collection[Req]) -> None:
        """Pages ran out; `running` are those that go on."""
        done = sum(len(req.output_ids) for req in running)
        most = sum(req.max_new_tokens for req in running)
        self.value = min((done + TOKENS_AHEAD * len(running)) / (most + 1), 1.0)

    def reset(self) -> None:
        """Nothing runs: what was learnt says nothing about what comes."""
        self.value = self._first


def tokens_to_come(req: Req) -> int:
    """Output tokens that `req` may still store, clipped."""
    return min(max(req.max_new_tokens - req.num_launched, 0), CLIP_TOKENS)


def pages_held_for(reqs: Iterable[Req], ratio: float, cache: CacheManager) -> int:
    """Pages held for admitted requests: for all that is left to extend of each, and for its share of output."""
    return sum(
        pages_after(req, math.ceil(tokens_to_come(req) * (1.0 if req.sampling.ignore_eos else ratio)), cache)
        for req in reqs
    )


def pages_after(req: Req, num_tokens: int, cache: CacheManager) -> int:
    """Pages that `req` allocates until it has stored all that is known of it, and `num_tokens` tokens more."""
    assert req.lease is not None
    return max(cache.pages_for(req.kv_len + req.extend_left + num_tokens) - req.lease.num_pages, 0)
