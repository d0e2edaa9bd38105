"""Which replica a request goes to: the one with most of its prompt cached, unless the loads are skewed.

The rule and its thresholds are those of the Shepherd Model Gateway's policy `cache_aware`, so that replicas of one
server (--dp-size) and replicas of a gateway are chosen alike. `choose` is a pure function of the prompt's pages, the
`PrefixIndex` of what was sent, and the loads; `Router` applies it and keeps the index. Never knows processes or
protocols; replicas.py calls it.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from jaxsgl.requests.media import hash_ids
from jaxsgl.requests.request import Request

MAX_PAGES = 4096  # of a prompt that are looked at: a few milliseconds of the event loop
MAX_KNOWN_PAGES = 1 << 18  # of a replica: 50 MB; more than a pool has, unless its pages are of few tokens
MIN_CACHED_SHARE = 0.3  # of the prompt's pages; with less cached, the least loaded replica is as good
MAX_WAITING = 8  # from so many waiting requests on a replica gets no more, as long as another one has fewer
MAX_TOKEN_USAGE = 0.8  # likewise from this share of its KV pool in use on
SKEW_REQUESTS = 64  # a replica is skipped that has so many requests more than the mean ..
SKEW_FACTOR = 1.5  # .. and so many times the mean
MIN_SKEW_REQUESTS = 4


def page_names(prompt_ids: Sequence[int], page_size: int, cache_salt: str = "") -> list[int]:
    """Returns a name for each whole page of the prompt, at most `MAX_PAGES`, that depends on all tokens up to its end.

    Names are 64 bits, and equal for equal prefixes of an equal salt within this process.
    """
    names: list[int] = []
    name = hash(cache_salt)
    for end in page_ends(len(prompt_ids), page_size)[:MAX_PAGES]:
        name = hash((name, *prompt_ids[end - page_size : end]))
        names.append(name)
    return names


def page_ends(num_tokens: int, page_size: int) -> range:
    """Returns where each whole page of `num_tokens` tokens ends."""
    return range(page_size, num_tokens + 1, page_size)


class PrefixIndex:
    """The pages that each replica was sent: what the router takes for the contents of its prefix cache.

    Of each replica it knows at most `max_pages[rank]` pages, the size of its KV pool, and at most `MAX_KNOWN_PAGES`,
    and forgets those first that were used least recently. So it ages as that cache does, takes a bounded memory (about
    150 bytes a page), and knows a prefix before it is computed, which matters to requests that arrive together. It may
    be wrong: a prefix that the replica has evicted since is computed there again.
    """

    def __init__(self, max_pages: Iterable[int]) -> None:
        self._max_pages = [min(most, MAX_KNOWN_PAGES) for most in max_pages]
        self._pages: list[OrderedDict[int, None]] = [OrderedDict() for _ in self._max_pages]

    def num_pages(self, rank: int) -> int:
        """Returns how many pages replica `rank` is known to have."""
        return len(self._pages[rank])

    def match(self, rank: int, names: Sequence[int]) -> int:
        """Returns how many pages at the start of a prompt replica `rank` has."""
        pages = self._pages[rank]
        for count, name in enumerate(names):
            if name not in pages:
                return count
        return len(names)

    def add(self, rank: int, names: Sequence[int]) -> None:
        """Notes that replica `rank` is sent a prompt of these pages. Its first pages are forgotten last."""
        pages = self._pages[rank]
        for name in reversed(names):
            pages[name] = None
            pages.move_to_end(name)
        while len(pages) > self._max_pages[rank]:
            pages.popitem(last=False)

    def forget(self, rank: int) -> None:
        """Notes that replica `rank` has nothing cached any more."""
        self._pages[rank].clear()


@dataclass(frozen=True)
class ReplicaLoad:
    """How busy a replica is.

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
        """Whether it should be spared while another replica is not overloaded."""
        return self.num_waiting >= MAX_WAITING or self.token_usage >= MAX_TOKEN_USAGE


def choose(names: Sequence[int], index: PrefixIndex, loads: Sequence[ReplicaLoad | None]) -> int:
    """Returns the rank of the replica that a prompt goes to.

    Args:
      names: of the prompt's pages (`page_names`).
      index: what the replicas were sent.
      loads: by rank, or None if a replica takes no requests. At least one takes some.

    The replica with the longest prefix is taken if that is `MIN_CACHED_SHARE` of the prompt, and if the replica hasn't
    far more requests than the mean. Otherwise the least loaded is taken; of several, the one that was sent least.
    """
    usable = {rank: load for rank, load in enumerate(loads) if load is not None}
    spared = {rank: load for rank, load in usable.items() if not load.is_overloaded}
    among = spared or usable
    cached = {rank: index.match(rank, names) for rank in among}
    best = max(among, key=lambda rank: (cached[rank], -among[rank].num_requests, -rank))
    mean = sum(load.num_requests for load in among.values()) / len(among)
    if names and cached[best] >= MIN_CACHED_SHARE * len(names) and not _is_skewed(among[best].num_requests, mean):
        return best
    return min(among, key=lambda rank: (among[rank].num_requests, index.num_pages(rank), rank))


def _is_skewed(num_requests: int, mean: float) -> bool:
    """Whether a replica has so many more requests than the mean that chance does not explain it.

    Twice the standard deviation of a random number of requests with this mean is enough: few replicas with few requests
    would never differ by `SKEW_REQUESTS`.
    """
    margin = min(SKEW_REQUESTS, max(MIN_SKEW_REQUESTS, 2 * math.sqrt(mean)))
    return num_requests > mean + margin and num_requests > SKEW_FACTOR * mean


class Router:
    """Chooses replicas, and remembers what it has sent where. `pool_tokens` are the sizes of their KV pools."""

    def __init__(self, page_size: int, pool_tokens: Sequence[int]) -> None:
        self._page_size = page_size
        self._index = PrefixIndex(max(1, len(page_ends(tokens, page_size))) for tokens in pool_tokens)

    def send(self, request: Request, loads: Sequence[ReplicaLoad | None], rank: int | None = None) -> int:
        """Returns the replica for `request`, which is to be sent there: `rank` if given. `loads` are as in `choose`."""
        ids = hash_ids(request.prompt_ids, request.media).tolist() if request.media else request.prompt_ids
        salt = f"{request.adapter}\0{request.cache_salt}" if request.adapter else request.cache_salt
        names = page_names(ids, self._page_size, salt)
        chosen = choose(names, self._index, loads) if rank is None else rank
        self._index.add(chosen, names)
        return chosen
