"""Which replica a request goes to: the one with most of its prompt cached, unless the loads are skewed.

The rule is `requests/placement.py`'s. `choose` is a pure function of the prompt's pages, the `PrefixIndex` of what was
sent, and the loads; `Router` applies it and keeps the index. Never knows processes or protocols; replicas.py calls it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from jaxsgl.requests import placement
from jaxsgl.requests.media import hash_ids
from jaxsgl.requests.placement import PlaceLoad
from jaxsgl.requests.request import Request

MAX_PAGES = 4096  # of a prompt that are looked at: a few milliseconds of the event loop
MAX_KNOWN_PAGES = 1 << 18  # of a replica: 50 MB; more than a pool has, unless its pages are of few tokens


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


def choose(names: Sequence[int], index: PrefixIndex, loads: Sequence[PlaceLoad | None]) -> int:
    """Returns the rank of the replica that a prompt goes to; of equally loaded ones, the one that was sent least.

    Args:
      names: of the prompt's pages (`page_names`).
      index: what the replicas were sent.
      loads: by rank, or None if a replica takes no requests. At least one takes some.
    """
    ranks = range(len(loads))
    cached = [0 if loads[rank] is None else index.match(rank, names) for rank in ranks]
    busy = [(0 if load is None else load.num_requests, index.num_pages(rank)) for rank, load in enumerate(loads)]
    return placement.choose(len(names), cached, loads, busy)


class Router:
    """Chooses replicas, and remembers what it has sent where. `pool_tokens` are the sizes of their KV pools."""

    def __init__(self, page_size: int, pool_tokens: Sequence[int]) -> None:
        self._page_size = page_size
        self._index = PrefixIndex(max(1, len(page_ends(tokens, page_size))) for tokens in pool_tokens)

    def send(self, request: Request, loads: Sequence[PlaceLoad | None], rank: int | None = None) -> int:
        """Returns the replica for `request`, which is to be sent there: `rank` if given. `loads` are as in `choose`."""
        ids = hash_ids(request.prompt_ids, request.media).tolist() if request.media else request.prompt_ids
        salt = f"{request.adapter}\0{request.cache_salt}" if request.adapter else request.cache_salt
        names = page_names(ids, self._page_size, salt)
        chosen = choose(names, self._index, loads) if rank is None else rank
        self._index.add(chosen, names)
        return chosen
