"""The host page table: which pages each running request holds, by row. Hands out rows.

Knows nothing about requests or who owns a page; `manager.py` writes it, batches copy from it.
"""

from __future__ import annotations

import numpy as np

from jaxsgl.cache.pages import DUMMY_PAGE, IntArray


class PageTable:
    """`pages[row, i]` is the page that holds the i-th page worth of tokens of the request in `row`.

    Entries past a row's pages are the dummy page, so that a stale id can never be read by a later owner of the row.
    """

    def __init__(self, num_rows: int, max_pages: int) -> None:
        self.pages: IntArray = np.full((num_rows, max_pages), DUMMY_PAGE, dtype=np.int32)
        self._free_rows = list(range(num_rows - 1, -1, -1))

    @property
    def num_free_rows(self) -> int:
        """Rows that can be taken now."""
        return len(self._free_rows)

    def free_rows(self) -> list[int]:
        """A copy of the free list, for the integrity check."""
        return self._free_rows.copy()

    def take_row(self) -> int:
        """Takes a free row; its entries are all the dummy page."""
        return self._free_rows.pop()

    def free_row(self, row: int) -> None:
        """Gives `row` back and clears it."""
        assert row not in self._free_rows, f"row {row} freed twice"
        self.pages[row] = DUMMY_PAGE
        self._free_rows.append(row)
