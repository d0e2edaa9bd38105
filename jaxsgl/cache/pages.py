"""All arithmetic on pages and slots, the free list, the page table, and the lease that one request has on them.

A page is `page_size` consecutive KV slots; slot = page * page_size + offset. Page 0 is the dummy page: padding
reads and writes it, and it is never allocated. No other file multiplies or divides by a page size. Knows nothing about
requests or prefixes; `manager.py` is the only writer.
"""

from __future__ import annotations

import enum
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

IntArray: TypeAlias = npt.NDArray[np.int32]
ArrayT = TypeVar("ArrayT", bound=Any)
CountT = TypeVar("CountT", int, npt.NDArray[np.int64])

DUMMY_PAGE = 0


class PageState(enum.IntEnum):
    """Where a page is; see the invariants in CONTRIBUTING.md."""

    FREE = 0  # on the free list
    EVICTABLE = 1  # in the prefix cache, and no request uses it
    LOCKED = 2  # in the prefix cache, and requests use it
    OWNED = 3  # one request's own


_NO_ENTRIES: IntArray = np.empty((3, 0), dtype=np.int32)


def pages_for(num_tokens: CountT, page_size: int) -> CountT:
    """Pages that hold `num_tokens` tokens (rounded up), a number or an array of numbers."""
    return -(-num_tokens // page_size)


def full_pages(num_tokens: int, page_size: int) -> int:
    """Pages that `num_tokens` tokens fill completely (rounded down)."""
    return num_tokens // page_size


def tokens_in(num_pages: CountT, page_size: int) -> CountT:
    """Tokens that `num_pages` pages hold, a number or an array of numbers."""
    return num_pages * page_size


def as_pages(token_ids: IntArray, page_size: int) -> IntArray:
    """The full pages of `token_ids [n]` as `[n // page_size, page_size]`; a tail that fills no page is left out."""
    count = len(token_ids) // page_size
    return token_ids[: count * page_size].reshape(count, page_size)


def slots_of(page_table_row: IntArray, start: int, stop: int, page_size: int) -> IntArray:
    """Slots `[stop - start]` of the tokens at positions start..stop-1 of the sequence in `page_table_row [P]`."""
    positions = np.arange(start, stop, dtype=np.int32)
    return page_table_row[positions // page_size] * page_size + positions % page_size


def slots_at(page_tables: IntArray, rows: IntArray, positions: IntArray, page_size: int) -> IntArray:
    """Slots `[..., S]` of `positions [..., S]` of the sequences in `rows [S]` of `page_tables [rows, P]`."""
    slots: IntArray = page_tables[rows, positions // page_size] * page_size + positions % page_size
    return slots


def page_of(numbers: ArrayT, page_size: int) -> ArrayT:
    """The pages of slots, or the places in a row of the page table of positions; arrays of NumPy or of JAX."""
    pages: ArrayT = numbers // page_size
    return pages


def rows_of(slots: ArrayT, heads: ArrayT, num_heads: int, page_size: int) -> ArrayT:
    """Where the numbers of `slots` and `heads` stand in pages `[P, num_heads, page, H]`, counted in rows of H."""
    rows: ArrayT = (slots // page_size * num_heads + heads) * page_size + slots % page_size
    return rows


def slots_on(pages: ArrayT, positions: ArrayT, page_size: int) -> ArrayT:
    """The slots of `positions`, which lie on `pages`; arrays of NumPy or of JAX."""
    slots: ArrayT = pages * page_size + positions % page_size
    return slots


def ends_page(num_tokens: ArrayT, page_size: int) -> ArrayT:
    """Whether so many tokens fill whole pages: a number, or arrays of NumPy or of JAX."""
    ends: ArrayT = num_tokens % page_size == 0
    return ends


def groups_of(page_size: int, group_size: int) -> int:
    """How many groups of so many tokens a page holds, which must be whole ones."""
    assert ends_page(page_size, group_size), f"pages of {page_size} tokens don't hold whole groups of {group_size}"
    return page_size // group_size


def pages_before_ends(
    steps: npt.NDArray[np.int64], known: npt.NDArray[np.int64], page_size: int
) -> npt.NDArray[np.int64]:
    """`[n]` pages of the requests that have not ended, right before each of their ends; they are in order of ends.

    Request i knows `known [n]` tokens, grows by one token a step and ends after `steps [n]` steps. The result is the
    sum over i >= k of ceil((known_i + steps_k) / page_size), without n x n terms: apart from whole pages it depends
    only on which remainders carry over, and those are counted.
    """
    whole, rest = np.divmod(known + page_size - 1, page_size)
    more, more_rest = np.divmod(steps, page_size)
    carries = sums_from(rest[:, None] >= np.arange(page_size + 1))  # [k, r]: how many i >= k have a rest of r or more
    places = np.arange(len(steps))
    num_carried: npt.NDArray[np.int64] = carries[places, page_size - more_rest]
    return sums_from(whole) + (len(steps) - places) * more + num_carried


def sums_from(values: npt.NDArray[np.generic]) -> npt.NDArray[np.int64]:
    """`[n, ...]` the sum of `values` from each index on."""
    sums: npt.NDArray[np.int64] = np.cumsum(values[::-1], axis=0, dtype=np.int64)[::-1]
    return sums


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
        """Takes `count` pages off the free list. Asking for more than `num_free` is a bug in the caller."""
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


class PageTable:
    """`pages[row, i]` is the page that holds the i-th page worth of tokens of the request in `row`.

    Entries past a row's pages are the dummy page, so that a later owner of the row can never read a stale page id.

    The device has a copy. A step writes the pages of the tokens that it computes into it, so that new pages need no
    message. `unsent` has the other entries, which name pages that other requests have computed.
    """

    def __init__(self, num_rows: int, max_pages: int) -> None:
        self.pages: IntArray = np.full((num_rows, max_pages), DUMMY_PAGE, dtype=np.int32)
        self._free_rows = list(range(num_rows - 1, -1, -1))
        self._unsent: dict[int, tuple[int, int]] = {}  # row -> first entry, end; mostly empty

    def move_to(self, pages: IntArray) -> None:
        """Keeps its entries in `pages [rows, P]` from now on, a part of an array that has those of other tables too."""
        pages[:] = self.pages
        self.pages = pages

    @property
    def num_free_rows(self) -> int:
        """Rows that can be taken now."""
        return len(self._free_rows)

    def free_rows(self) -> list[int]:
        """A copy of the free list, for the integrity check."""
        return self._free_rows.copy()

    def take_row(self) -> int:
        """Takes a free row; all its entries are the dummy page."""
        return self._free_rows.pop()

    def free_row(self, row: int) -> None:
        """Gives `row` back and clears it."""
        assert row not in self._free_rows, f"row {row} freed twice"
        self.pages[row] = DUMMY_PAGE
        self._unsent.pop(row, None)
        self._free_rows.append(row)

    def put(self, row: int, first: int, pages: IntArray) -> None:
        """Writes `pages`, which other requests have computed, to entries first .. of `row`."""
        if len(pages):
            end = first + len(pages)
            self.pages[row, first:end] = pages
            old_first, old_end = self._unsent.get(row, (first, end))
            self._unsent[row] = min(first, old_first), max(end, old_end)

    def unsent(self, rows: Sequence[int] | IntArray) -> IntArray:
        """`[3, n]` entries of `rows` that the device must get before it reads these rows: row, place in it, page."""
        if not self._unsent:
            return _NO_ENTRIES
        spans = [(row, *self._unsent[row]) for row in rows if row in self._unsent]
        places = [np.arange(first, end, dtype=np.int32) for _, first, end in spans]
        parts = [(np.full_like(at, row), at, self.pages[row, at]) for (row, *_), at in zip(spans, places, strict=True)]
        return np.concatenate([np.stack(part) for part in parts], axis=1) if parts else _NO_ENTRIES

    def sent(self, rows: Iterable[int]) -> None:
        """A step that carries `unsent(rows)` will be launched, before any other."""
        for row in rows:
            self._unsent.pop(row, None)


@dataclass(slots=True)
class Lease:
    """What one admitted request holds of the cache: a row, a locked prefix, and pages of its own.

    Attributes:
      row: its row in the page table.
      num_pages: pages in the row.
      num_tokens: tokens that these pages hold.
      num_shared: leading pages that belong to the prefix cache.
      handle: the locked prefix of `num_shared` pages.
      owner: the request's name, for the report of a leak.
      salt: of the request; its pages are shared with requests of an equal salt alone.
      names: of its leading full pages, as far as they are known; [] if no tier goes by names. See host_pages.py.
      source: the place of the state that its first step reads, until that is launched; see snapshots.py.
      borders: (tokens, place) of states at its page borders, while it decodes.
      is_retired: a part of what it holds is of weights of the past, so that nothing of it is shared any more.
    """

    row: int
    num_pages: int
    num_tokens: int
    num_shared: int
    handle: Hashable
    owner: str
    salt: bytes = b""
    names: list[bytes] = field(default_factory=list)
    source: int | None = None
    borders: tuple[tuple[int, int], ...] = ()
    is_retired: bool = False
