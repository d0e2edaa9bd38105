"""All arithmetic on pages and slots, and the free list. The only file that multiplies or divides by a page size.

A page is `page_size` consecutive KV slots; slot = page * page_size + offset. Page 0 is the dummy page: padding
reads and writes it, and it is never allocated. Knows nothing about requests or prefixes.
"""

from __future__ import annotations

from typing import Any, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

IntArray: TypeAlias = npt.NDArray[np.int32]
ArrayT = TypeVar("ArrayT", bound=Any)

DUMMY_PAGE = 0


def pages_for(num_tokens: int, page_size: int) -> int:
    """Pages that hold `num_tokens` tokens (rounded up)."""
    return -(-num_tokens // page_size)


def full_pages(num_tokens: int, page_size: int) -> int:
    """Pages that `num_tokens` tokens fill completely (rounded down)."""
    return num_tokens // page_size


def tokens_in(num_pages: int, page_size: int) -> int:
    """Tokens that `num_pages` pages hold."""
    return num_pages * page_size


def as_pages(token_ids: IntArray, page_size: int) -> IntArray:
    """The full pages of `token_ids [n]` as `[n // page_size, page_size]`; a tail that fills no page is left out."""
    count = len(token_ids) // page_size
    return token_ids[: count * page_size].reshape(count, page_size)


def slots_of(page_table_row: IntArray, start: int, stop: int, page_size: int) -> IntArray:
    """Slots `[stop - start]` of the tokens at positions start..stop-1 of the sequence in `page_table_row [P]`."""
    positions = np.arange(start, stop, dtype=np.int32)
    return page_table_row[positions // page_size] * page_size + positions % page_size


def slots_at(page_tables: ArrayT, positions: ArrayT, page_size: int) -> ArrayT:
    """Slots `[S]` of one position per sequence: `positions [S]` in `page_tables [S, P]`; arrays of NumPy or of JAX."""
    pages = page_tables[np.arange(len(positions)), positions // page_size]
    slots: ArrayT = pages * page_size + positions % page_size
    return slots


class PageAllocator:
    """The free list of pages 1 .. num_pages - 1. Pages are handed out and taken back as int32 arrays."""

    def __init__(self, num_pages: int) -> None:
        if num_pages < 2:
            raise ValueError(f"a pool of {num_pages} pages has none besides the dummy page; at least 2 are needed")
        self.num_pages = num_pages
        self._stack = np.arange(num_pages - 1, 0, -1, dtype=np.int32)  # pops low page ids first
        self._num_free = num_pages - 1

    @property
    def num_free(self) -> int:
        """Pages that can be allocated now."""
        return self._num_free

    def allocate(self, count: int) -> IntArray:
        """Takes `count` pages off the free list. Asking for more than `num_free` is a bug of the caller."""
        assert 0 <= count <= self._num_free, f"{count} pages asked for, {self._num_free} free"
        self._num_free -= count
        return self._stack[self._num_free : self._num_free + count].copy()

    def free(self, pages: IntArray) -> None:
        """Puts `pages` back."""
        end = self._num_free + len(pages)
        assert end < self.num_pages, f"{len(pages)} pages freed, but only {self.num_pages - 1 - self._num_free} are out"
        self._stack[self._num_free : end] = pages
        self._num_free = end

    def free_pages(self) -> IntArray:
        """A copy of the free list, for the integrity check."""
        return self._stack[: self._num_free].copy()
