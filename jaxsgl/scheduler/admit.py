"""`PrefillAdder`: fills one extend step, request by request, within the budgets of tokens, sequences, rows and pages.

A request is admitted if what it has to extend and its output fit besides what is held for those that run (reserve.py).
The estimate may turn out too low: then the scheduler retracts. A pool that nobody uses takes any request, since a
request that could never fit was refused on arrival.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from jaxsgl.cache.manager import CacheManager
from jaxsgl.scheduler.allowance import Allowance
from jaxsgl.scheduler.chunks import fair_shares, without_much_padding
from jaxsgl.scheduler.forecast import Forecast
from jaxsgl.scheduler.req import Req
from jaxsgl.scheduler.reserve import pages_after, pages_held_for, tokens_to_come

SPARE_PAGES = 1  # beyond the estimate, for each request that is admitted


class NoRoom(enum.Enum):
    """Why no more requests were admitted."""

    TOKENS = "tokens"  # the pool is promised to others
    ROWS = "rows"  # as many run as may
    CHUNK = "chunk"  # the step is full


@dataclass(frozen=True, slots=True)
class Chunk:
    """Extend `req` by its next `num_tokens` known tokens."""

    req: Req
    num_tokens: int


class PrefillAdder:
    """One extend step in the making.

    Args:
      cache: pages and rows.
      admitted: requests that hold pages.
      ratio: share of their output that is held for them.
      allowance: tokens that the step may extend, and the time for it.
      max_seqs: sequences that the step may hold.
      sizes: T of the extend buckets, less what rides along; ascending.
      pages_taken: pages that the step needs for what rides along.

    Attributes:
      no_room: why the last request that was offered has to wait; None while all went in.
      pages_short: pages that it lacks, if any.
    """

    def __init__(
        self,
        cache: CacheManager,
        admitted: Iterable[Req],
        ratio: float,
        allowance: Allowance,
        max_seqs: int,
        sizes: Sequence[int],
        pages_taken: int = 0,
    ) -> None:
        self.no_room: NoRoom | None = None
        self.pages_short = 0
        self._cache = cache
        self._admitted = list(admitted)
        self._pages_held = pages_held_for(self._admitted, ratio, cache)
        self._all_go_on = all(req.sampling.ignore_eos for req in self._admitted)
        self._forecast: Forecast | None = None  # made when it is asked for
        self._allowance = allowance
        self._seqs_left = max_seqs
        self._sizes = sizes
        self._pages_taken = pages_taken
        self._chunks: dict[Req, int] = {}

    def add_continuations(self, reqs: Sequence[Req], others_wait: bool) -> None:
        """The next chunks of admitted requests, in equal shares; half of the step is left for others if some wait."""
        budget = self._allowance.num_tokens
        if others_wait:
            budget = max(budget // 2, self._cache.page_size)
        reqs = reqs[: self._seqs_left]
        for req, share in zip(reqs, fair_shares([req.extend_left for req in reqs], budget), strict=True):
            self._add(req, share)

    def add_leftovers(self, reqs: Sequence[Req]) -> None:
        """What waiting requests have left of the step goes to those between chunks, oldest first."""
        for req in reqs:
            self._add(req, self._allowance.num_tokens)

    def add_waiting(self, req: Req) -> bool:
        """Admits `req` and adds its first chunk; False, and nothing changed, if it has to wait."""
        cache = self._cache
        self.no_room = self._lack()
        if self.no_room is not None:
            return False
        match = cache.match(req.matchable_ids)
        lease = cache.acquire(match, req.name)  # locked first: what it locks can't be evicted for it
        req.admit(lease, cached_tokens=cache.tokens_held(lease))
        if not self._fits(req):
            cache.cancel(req.retract())
            self.no_room = NoRoom.TOKENS
            return False
        self._add(req, self._allowance.num_tokens)
        if req not in self._chunks:  # what is left of the step holds no page of it
            cache.cancel(req.retract())
            self.no_room = NoRoom.CHUNK
            return False
        self._admitted.append(req)
        self._all_go_on = self._all_go_on and req.sampling.ignore_eos
        if self._forecast is not None:
            self._forecast.add(req)
        self._pages_held += pages_after(req, tokens_to_come(req), cache)
        return True

    def chunks(self) -> list[Chunk]:
        """The decision; admitted requests hold their row and prefix already."""
        if self._chunks:
            self._shed_padding()
        return [Chunk(req, count) for req, count in self._chunks.items()]

    def _lack(self) -> NoRoom | None:
        if not self._cache.table.num_free_rows:
            return NoRoom.ROWS
        if not (self._allowance.num_tokens and self._seqs_left):
            return NoRoom.CHUNK
        return None

    def _fits(self, req: Req) -> bool:
        if not self._admitted:
            return True
        needed = pages_after(req, tokens_to_come(req), self._cache) + SPARE_PAGES
        self.pages_short = max(needed + self._pages_held - self._cache.num_available, 0)
        if not (self._all_go_on and req.sampling.ignore_eos):
            return self.pages_short == 0
        if self._forecast is None:
            self._forecast = Forecast(self._admitted, self._cache)
        return self._forecast.fits(req)

    def _add(self, req: Req, budget: int) -> None:
        """Gives `req` up to `budget` tokens more of the step, as far as pages reach."""
        before = self._chunks.get(req, 0)
        if not before and not self._seqs_left:
            return
        count = min(before + min(budget, self._allowance.num_tokens), self._in_time(req, before), req.extend_left)
        count = self._chunk_len(req, count)
        if count <= before:
            return
        self._pages_taken += self._new_pages(req, count) - self._new_pages(req, before)
        self._allowance.take(req.kv_len, before, count)
        self._seqs_left -= not before
        self._chunks[req] = count

    def _in_time(self, req: Req, before: int) -> int:
        """Tokens that `req` may have in the step for the sake of those that decode; a page if nobody else has any."""
        longest = self._allowance.longest_chunk(req.kv_len, before)
        return longest if self._chunks else max(longest, self._cache.page_size)

    def _chunk_len(self, req: Req, count: int) -> int:
        """At most `count`: what pages can be allocated for, and unless it is the rest, up to a page border."""
        cache, lease = self._cache, req.lease
        assert lease is not None
        pages_left = cache.num_available - self._pages_taken + self._new_pages(req, self._chunks.get(req, 0))
        count = min(count, cache.tokens_of(lease.num_pages + max(pages_left, 0)) - req.kv_len)
        if count >= req.extend_left:
            return req.extend_left
        whole = max(cache.page_floor(req.kv_len + count) - req.kv_len, 0)
        return whole if whole or self._chunks else max(count, 0)

    def _new_pages(self, req: Req, count: int) -> int:
        assert req.lease is not None
        return max(self._cache.pages_for(req.kv_len + count) - req.lease.num_pages, 0) if count else 0

    def _shed_padding(self) -> None:
        """Leaves the tail of the last chunk to the next step where that costs less than the padding."""
        req, count = next(reversed(self._chunks.items()))
        total = sum(self._chunks.values())
        better = without_much_padding(total, self._sizes, count - 1)
        kept = self._cache.page_floor(req.kv_len + count - (total - better)) - req.kv_len
        if better < total and kept > 0:
            self._chunks[req] = kept
