"""The forecast for requests that ignore EOS says what growing them step by step would show."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from jaxsgl.cache.manager import CacheManager
from jaxsgl.cache.pages import PageTable, pages_for
from jaxsgl.cache.radix import RadixCache
from jaxsgl.request import Request, SamplingParams
from jaxsgl.scheduler.forecast import Forecast
from jaxsgl.scheduler.req import Req

MANY_PAGES = 10_000


def admitted(cache: CacheManager, prompt_len: int, max_tokens: int, base: int) -> Req:
    """Its prompt is extended, or as much of it as the cache doesn't hold is to come if `base` is odd."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    prompt = [100 * (base // 2) + i for i in range(prompt_len)]
    req = Req(Request(f"r{id(params)}", prompt, params), max_tokens, frozenset(), 0)
    lease = cache.acquire(cache.match(req.matchable_ids))
    req.admit(lease, cached_tokens=cache.tokens_held(lease))
    if base % 2 == 0:
        cache.grow(lease, prompt_len)
        req.launch_chunk(req.extend_left)
        cache.share(lease, req.stored_ids())
    return req


def fits_step_by_step(cache: CacheManager, reqs: list[Req]) -> bool:
    """Grows all of them a token at a time; whoever is done gives back what nobody else locks by then."""
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
def test_it_agrees_with_growing_everybody_step_by_step(
    page_size: int, sizes: list[tuple[int, int, int]], room: int
) -> None:
    cache = CacheManager(MANY_PAGES, page_size, PageTable(len(sizes) + 1, MANY_PAGES), RadixCache(page_size))
    first, *others = sizes
    reqs = [admitted(cache, *first)]
    forecast = Forecast(reqs, cache)
    for other in others:
        reqs.append(admitted(cache, *other))
        spare = cache.acquire(cache.match(reqs[0].prompt_ids[:0]))
        cache.grow(spare, max(cache.num_available - room, 0) * page_size)  # only `room` pages are left
        assert forecast.fits(reqs[-1]) == fits_step_by_step(cache, reqs)
        cache.drop(spare)
        forecast.add(reqs[-1])
