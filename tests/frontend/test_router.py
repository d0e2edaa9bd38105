"""Which replica a request goes to: rule, thresholds, and the index of what was sent."""

from __future__ import annotations

import random
from collections import deque

import pytest

from jaxsgl.frontend.engines.router import MAX_PAGES, PrefixIndex, Router, choose, page_names
from jaxsgl.requests.placement import PlaceLoad
from jaxsgl.requests.request import Request, SamplingParams

pytestmark = pytest.mark.unit

IDLE = PlaceLoad()
PAGE = 4


def index(*sent: list[int], max_pages: int = 1000) -> PrefixIndex:
    """The index after replica r was sent `sent[r]`."""
    made = PrefixIndex([max_pages] * len(sent))
    for rank, prompt in enumerate(sent):
        made.add(rank, page_names(prompt, PAGE))
    return made


def names(prompt: list[int]) -> list[int]:
    return page_names(prompt, PAGE)


def busy(num_requests: int, num_waiting: int = 0, token_usage: float = 0.0) -> PlaceLoad:
    return PlaceLoad(num_requests, num_waiting, token_usage)


def test_the_longest_cached_prefix_wins() -> None:
    prompt = list(range(40))
    known = index(prompt[:16], prompt[:32], [7] * 40)
    assert choose(names(prompt), known, [IDLE, busy(3), IDLE]) == 1
    assert choose(names([7] * 40), known, [IDLE, IDLE, busy(3)]) == 2


def test_a_prompt_that_no_replica_knows_goes_to_the_least_loaded_and_then_to_the_emptiest() -> None:
    known = index(list(range(8)), [], list(range(100, 120)))
    prompt = names(list(range(50, 90)))
    assert choose(prompt, known, [busy(2), busy(3), busy(1)]) == 2
    assert choose(prompt, known, [busy(2), busy(2), busy(2)]) == 1
    assert choose(names([1]), known, [busy(2), busy(2), busy(1)]) == 2, "shorter than a page"


@pytest.mark.parametrize(("cached_pages", "rank"), [(2, 1), (3, 0)])
def test_a_short_shared_beginning_binds_no_request(cached_pages: int, rank: int) -> None:
    """A system prompt that all requests share must not lead all of them to one replica: 0.3 of the prompt does."""
    prompt = list(range(10 * PAGE))
    assert choose(names(prompt), index(prompt[: cached_pages * PAGE], []), [busy(3), IDLE]) == rank


@pytest.mark.parametrize(
    ("loads", "rank"),
    [
        ([4, 0], 0),  # 4 more than the mean of 2 are allowed
        ([8, 0], 0),
        ([9, 0], 1),
        ([90, 30], 0),  # 30 more than the mean of 60, but 1.5 times at most
        ([91, 29], 1),
        ([800, 800, 200], 0),
        ([1000, 200, 200], 1),
    ],
)
def test_a_replica_with_far_more_requests_than_the_mean_is_skipped(loads: list[int], rank: int) -> None:
    prompt = list(range(40))
    known = index(prompt, *([[]] * (len(loads) - 1)))
    assert choose(names(prompt), known, [busy(load) for load in loads]) == rank


@pytest.mark.parametrize("overloaded", [busy(9, num_waiting=8), busy(1, token_usage=0.8)])
def test_an_overloaded_replica_gets_no_request_while_another_is_not(overloaded: PlaceLoad) -> None:
    prompt = list(range(40))
    known = index(prompt, [])
    assert choose(names(prompt), known, [overloaded, busy(30, num_waiting=7, token_usage=0.79)]) == 1
    assert choose(names(prompt), known, [overloaded, overloaded]) == 0, "all are: then the prefix decides"


def test_a_replica_that_takes_no_requests_is_never_chosen() -> None:
    prompt = list(range(40))
    assert choose(names(prompt), index(prompt, [], []), [None, busy(100), busy(99)]) == 2
    assert choose(names(prompt), index(prompt, [], []), [None, busy(100, 50), None]) == 1


def test_equal_prefixes_have_equal_names_and_others_have_not() -> None:
    prompt = list(range(3 * PAGE))
    assert names(prompt) == names([*prompt, 5])[:3]
    assert not set(names(prompt)) & set(names([9, *prompt[1:]]))
    assert not set(names(prompt)) & set(page_names(prompt, PAGE, "tenant"))
    assert len(page_names([1] * (MAX_PAGES + 9), 1)) == MAX_PAGES


def test_the_index_forgets_the_oldest_pages_and_the_ends_of_prompts_first() -> None:
    known = PrefixIndex([6])
    first, second = names([1] * 16), names([2] * 16)
    known.add(0, first)
    known.add(0, second)
    assert known.num_pages(0) == 6
    assert (known.match(0, first), known.match(0, second)) == (2, 4)
    known.add(0, first[:1])
    known.add(0, names([3] * 16))
    assert (known.match(0, first), known.match(0, second)) == (1, 1)


def test_groups_that_share_a_prefix_stay_on_one_replica_and_are_spread() -> None:
    """8 groups of 16 requests arrive in any order; 12 run at a time."""
    draw = random.Random(1)
    router = Router(PAGE, [100_000, 100_000])
    arrivals = [group for group in range(8) for _ in range(16)]
    draw.shuffle(arrivals)
    running: deque[int] = deque(maxlen=12)  # ranks
    places: dict[int, set[int]] = {}
    for number, group in enumerate(arrivals):
        prompt = [group] * 60 + [number, *range(20)]
        rank = router.send(
            Request(str(number), prompt, SamplingParams()), [busy(running.count(rank)) for rank in (0, 1)]
        )
        running.append(rank)
        places.setdefault(group, set()).add(rank)
    assert all(len(ranks) == 1 for ranks in places.values())
    assert sorted(sum(ranks == {rank} for ranks in places.values()) for rank in (0, 1)) == [4, 4]
