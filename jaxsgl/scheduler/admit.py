"""`PrefillAdder`: fills one extend step, request by request, within the budgets of tokens, sequences, rows and pages.

Pages are promised in full: a request is admitted only if its whole remaining prompt and output fit besides what all
admitted requests may still need. So a decode step always finds a page, and nobody is ever retracted.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from jaxsgl.cache.manager import CacheManager
from jaxsgl.scheduler.req import Req


@dataclass(frozen=True, slots=True)
class Chunk:
    """Extend `req` by its next `num_tokens` prompt tokens."""

    req: Req
    num_tokens: int


def pages_promised(reqs: Iterable[Req], cache: CacheManager) -> int:
    """Pages that admitted requests may still allocate before they end."""
    return sum(cache.pages_for(req.max_kv_len) - req.lease.num_pages for req in reqs if req.lease)


class PrefillAdder:
    """One extend step in the making. `chunks` is the decision; admitted requests hold their row and prefix already.

    Args:
      max_tokens: tokens that the step may extend.
      max_seqs: sequences that the step may hold.
      pages_promised: pages that admitted requests may still allocate.
    """

    def __init__(self, cache: CacheManager, max_tokens: int, max_seqs: int, pages_promised: int) -> None:
        self.chunks: list[Chunk] = []
        self._cache = cache
        self._tokens_left = max_tokens
        self._seqs_left = max_seqs
        self._pages_promised = pages_promised

    def add_continuation(self, req: Req) -> bool:
        """The next chunk of an admitted request; False if the step is full."""
        if not (self._tokens_left and self._seqs_left):
            return False
        self._add_chunk(req)
        return True

    def add_waiting(self, req: Req) -> bool:
        """Admits `req` and adds its first chunk; False, and nothing changed, if it has to wait."""
        cache = self._cache
        if not (self._tokens_left and self._seqs_left and cache.table.num_free_rows):
            return False
        match = cache.match(req.matchable_ids)
        lease = cache.acquire(match)  # locked first: what it locks can't be evicted for it
        needed = cache.pages_for(req.max_kv_len) - lease.num_pages
        if needed + self._pages_promised > cache.num_available:
            cache.cancel(lease)
            return False
        self._pages_promised += needed
        req.admit(lease, cached_tokens=cache.tokens_held(lease))
        self._add_chunk(req)
        return True

    def _add_chunk(self, req: Req) -> None:
        """As much of the prompt as the budget allows; a chunk that isn't the last ends on a page border if it can."""
        left = req.prompt_len - req.kv_len
        count = min(left, self._tokens_left)
        if count < left:
            count = max(self._cache.page_floor(req.kv_len + count) - req.kv_len, 0) or count
        self.chunks.append(Chunk(req, count))
        self._tokens_left -= count
        self._seqs_left -= 1
