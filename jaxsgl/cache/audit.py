"""Accounts for every page, row and lock of a cache, and names the last owner of what is lost. Changes nothing.

Each page is in exactly one place: on the free list, in the prefix cache, or in one request's row. Called by manager.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from jaxsgl.cache.pages import Lease, PageAllocator, PageTable
from jaxsgl.cache.prefix import PrefixCache


class LastOwners:
    """The last owner of each page and row, in words, for the report of a leak.

    Attributes:
      of_page: `[num_pages]` the request that allocated the page last.
      of_row: `[num_rows]` the request that took the row last.
    """

    def __init__(self, num_pages: int, num_rows: int) -> None:
        self.of_page: npt.NDArray[np.object_] = np.full(num_pages, "no request", dtype=object)
        self.of_row = ["no request"] * num_rows


def audit(
    allocator: PageAllocator, table: PageTable, prefixes: PrefixCache, leases: Sequence[Lease], last: LastOwners
) -> list[str]:
    """Describes everything that is wrong, one text for each page, row or lock; [] if all is well.

    Args:
      leases: all leases of this cache.
      last: the last owners.
    """
    try:
        cached = prefixes.owned_pages()
    except AssertionError as error:  # a tree with broken links can't be examined further
        return [f"the prefix cache is broken: {error}"]
    own = [table.pages[lease.row, lease.num_shared : lease.num_pages] for lease in leases]
    places = np.concatenate([allocator.free_pages(), cached, *own])
    counts = np.bincount(places, minlength=allocator.num_pages)
    wrong = np.flatnonzero(counts[1:] != 1) + 1
    found = [f"page {page} is in {counts[page]} places; {last.of_page[page]} had it last" for page in wrong.tolist()]
    if counts[0]:
        found.append("the dummy page was handed out")
    in_cache = np.zeros(allocator.num_pages, dtype=bool)
    in_cache[cached] = True
    for lease in leases:
        row = table.pages[lease.row]
        if not in_cache[row[: lease.num_shared]].all():
            found.append(f"row {lease.row} of {lease.owner} names shared pages that were given up")
        if row[lease.num_pages :].any():
            found.append(f"row {lease.row} of {lease.owner} names pages past its {lease.num_pages}")
    return found + _rows(table, leases, last) + _locks(prefixes, leases, last)


def _rows(table: PageTable, leases: Sequence[Lease], last: LastOwners) -> list[str]:
    counts = Counter(table.free_rows())
    counts.update(lease.row for lease in leases)
    return [
        f"row {row} is in {counts[row]} places; {last.of_row[row]} had it last"
        for row in range(len(table.pages))
        if counts[row] != 1
    ]


def _locks(prefixes: PrefixCache, leases: Sequence[Lease], last: LastOwners) -> list[str]:
    return [
        f"{wrong.num_pages} cached pages from page {wrong.first_page} on have {wrong.locks} locks, but "
        f"{wrong.holders} hold them; {last.of_page[wrong.first_page]} computed them"
        for wrong in prefixes.wrong_locks([lease.handle for lease in leases])
    ]
