"""The forecast for requests that ignore EOS agrees with growing them step by step."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from jaxsgl.cache.manager import CacheManager
from jaxsgl.cache.pages import PageTable, pages_for
from jaxsgl.cache.radix import RadixCache
from jaxsgl.requests.request import Request, SamplingParams
from jaxsgl.scheduler.budget import Claim, Forecast, Ledger, pages_held_for, pages_to_come
from jaxsgl.scheduler.req import Req

MANY_PAGES = 10_000


def waiting(prompt_len: int, max_tokens: int, base: int) -> Req:
    """Requests of bases 0 and 1, 2 and 3, and so on share prefixes."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    prompt = [100 * (base // 2) + i for i in range(prompt_len)]
    return Req(Request(f"r{id(params)}", prompt, params), max_tokens, frozenset(), 0)


def admit(cache: CacheManager, req: Req) -> None:
    lease = cache.acquire(cache.match(req.matchable_ids))
    req.admit(lease, cached_tokens=lease.num_tokens)


def extend(cache: CacheManager, req: Req) -> None:
    assert req.lease is not None
    cache.grow(req.lease, req.prompt_len)
    req.launch_chunk(req.extend_left)
    cache.share(req.lease, req.stored_ids())


def admitted(cache: CacheManager, prompt_len: int, max_tokens: int, base: int) -> Req:
    """An admitted request: its prompt is extended, or still to be extended past the cached prefix if `base` is odd."""
    req = waiting(prompt_len, max_tokens, base)
    admit(cache, req)
    if base % 2 == 0:
        extend(cache, req)
    return req


def fits_step_by_step(cache: CacheManager, reqs: list[Req]) -> bool:
    """Grows all of them a token at a time; a request that is done gives back what no other locks by then."""
    steps = {req: req.max_kv_len - req.kv_len - req.extend_left for req in reqs}
    free = cache.num_available
    for step in range(max(steps.values()) + 1):
        running = [req for req in reqs if steps[req] >= step]
        grown = sum(
            pages_for(req.kv_len + req.extend_left + step, cache.page_size) - req.lease.num_pages
            for req in running
            if req.lease
        )
        if grown > free:
            return False
        free += sum(cache.num_exclusive(req.lease) for req in running if req.lease and steps[req] == step)
    return True


REQUEST = st.tuples(st.integers(1, 60), st.integers(1, 60), st.integers(0, 5))


@given(st.sampled_from([1, 4, 16]), st.lists(REQUEST, min_size=2, max_size=8), st.integers(0, 60))
def test_the_forecast_agrees_with_growing_all_requests_step_by_step(
    page_size: int, sizes: list[tuple[int, int, int]], room: int
) -> None:
    """The forecast is made before the request is admitted, the oracle runs after."""
    cache = CacheManager(MANY_PAGES, page_size, PageTable(len(sizes) + 1, MANY_PAGES), RadixCache(page_size))
    first, *others = sizes
    reqs = [admitted(cache, *first)]
    for other in others:
        spare = cache.acquire(cache.match(reqs[0].prompt_ids[:0]))
        cache.grow(spare, max(cache.num_available - room, 0) * page_size)  # only `room` pages are left
        req, ledger = waiting(*other), Ledger(cache)
        forecast = Forecast([Claim.held(held) for held in reqs], ledger, cache)
        prefix = cache.peek(req.matchable_ids)
        ledger.lock(prefix)
        claim = Claim.planned(req, prefix, cache)
        fits = not forecast.steps_short(claim)
        at_most = pages_held_for(reqs, 1.0, cache) + pages_to_come(claim, claim.tokens_to_come, cache)
        assert fits or at_most > ledger.available, "no page need come free, but the forecast says no"
        admit(cache, req)
        assert fits == fits_step_by_step(cache, [*reqs, req])
        cache.drop(spare)
        if other[2] % 2 == 0:
            extend(cache, req)
        reqs.append(req)


@given(st.sampled_from([1, 4, 16]), st.lists(REQUEST, min_size=2, max_size=8))
def test_requests_that_are_planned_count_like_admitted_ones(page_size: int, sizes: list[tuple[int, int, int]]) -> None:
    """Locks in the ledger count as the same locks in the cache do once they are taken."""
    cache = CacheManager(MANY_PAGES, page_size, PageTable(len(sizes) + 1, MANY_PAGES), RadixCache(page_size))
    lease = cache.acquire(cache.match(np.arange(1, dtype=np.int32)))
    cache.grow(lease, 60)
    cache.release(lease, np.arange(60, dtype=np.int32))  # a prefix that no request locks
    holder = admitted(cache, *sizes[0])
    ledger = Ledger(cache)
    reqs = [waiting(*size) for size in sizes[1:]]
    claims = []
    for req in reqs:
        prefix = cache.peek(req.matchable_ids)
        ledger.lock(prefix)
        claims.append(Claim.planned(req, prefix, cache))
    planned = [ledger.num_exclusive(claim) for claim in [Claim.held(holder), *claims]]
    locked = ledger.count
    assert holder.lease is not None
    ledger.give_back(holder.lease)
    given_back = ledger.count
    for req in reqs:
        admit(cache, req)
    assert locked == (cache.num_free, cache.prefixes.num_evictable)
    assert planned == [cache.num_exclusive(req.lease) for req in [holder, *reqs] if req.lease]
    cache.drop(holder.lease)
    assert given_back == (cache.num_free, cache.prefixes.num_evictable)
