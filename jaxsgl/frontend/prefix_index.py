"""Which replica was sent which prefixes: what the router takes for the contents of the replicas' prefix caches.

Holds a name for each page of the prompts that were sent, least recently used first, and forgets the oldest beyond the
size of the replica's KV pool: so it ages as the cache of that replica does, takes a bounded memory (about 150 bytes a
page), and knows a prefix before it is computed, which matters to requests that arrive together. Nothing depends on its
being right: a prefix that the replica has evicted since is computed there again. Never knows loads or processes;
router.py asks it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

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
    """The pages that each replica was sent, at most `max_pages[rank]` of them, and `MAX_KNOWN_PAGES`."""

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
