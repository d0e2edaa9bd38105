"""Which of several places a request goes to: the one with most of its prompt cached, unless the loads are skewed.

Places are replicas of one server (`frontend/engines/router.py`) and ranks of one engine (`scheduler/ranks.py`). The
rule and its thresholds are those of the Shepherd Model Gateway's policy `cache_aware`, so that they and the replicas of
a gateway are chosen alike.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

MIN_CACHED_SHARE = 0.3  # of the prompt's pages; with less cached, the least loaded place is as good
MAX_WAITING = 8  # from so many waiting requests on a place gets no more, as long as another one has fewer
MAX_TOKEN_USAGE = 0.8  # likewise from this share of its KV pool in use on
SKEW_REQUESTS = 64  # a place is skipped that has so many requests more than the mean ..
SKEW_FACTOR = 1.5  # .. and so many times the mean
MIN_SKEW_REQUESTS = 4


@dataclass(frozen=True)
class PlaceLoad:
    """How busy a place is.

    Attributes:
      num_requests: that run or wait there.
      num_waiting: of those, the ones that wait for admission.
      token_usage: the share of its KV pool that running requests need.
    """

    num_requests: int = 0
    num_waiting: int = 0
    token_usage: float = 0.0

    @property
    def is_overloaded(self) -> bool:
        """Whether it should be spared while another place is not overloaded."""
        return self.num_waiting >= MAX_WAITING or self.token_usage >= MAX_TOKEN_USAGE


def choose(
    num_pages: int, cached: Sequence[int], loads: Sequence[PlaceLoad | None], busy: Sequence[tuple[Any, ...]]
) -> int:
    """Returns the place that a prompt of `num_pages` whole pages goes to.

    Args:
      num_pages: of the prompt.
      cached: of these, how many from the first each place has.
      loads: of each place, or None if it takes no requests. At least one takes some.
      busy: what the least loaded place is the lowest by; of equals the first.

    The place with the longest prefix is taken if that is `MIN_CACHED_SHARE` of the prompt, and if the place hasn't far
    more requests than the mean. Otherwise the least loaded is taken.
    """
    usable = {place: load for place, load in enumerate(loads) if load is not None}
    spared = {place: load for place, load in usable.items() if not load.is_overloaded}
    among = spared or usable
    best = max(among, key=lambda place: (cached[place], -among[place].num_requests, -place))
    mean = sum(load.num_requests for load in among.values()) / len(among)
    if num_pages and cached[best] >= MIN_CACHED_SHARE * num_pages and not _is_skewed(among[best].num_requests, mean):
        return best
    return min(among, key=lambda place: (busy[place], place))


def _is_skewed(num_requests: int, mean: float) -> bool:
    """Whether a place has so many more requests than the mean that chance does not explain it.

    Twice the standard deviation of a random number of requests with this mean is enough: few places with few requests
    would never differ by `SKEW_REQUESTS`.
    """
    margin = min(SKEW_REQUESTS, max(MIN_SKEW_REQUESTS, 2 * math.sqrt(mean)))
    return num_requests > mean + margin and num_requests > SKEW_FACTOR * mean
