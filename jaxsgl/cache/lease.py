"""What one admitted request holds of the cache. A value; manager.py makes, changes and ends it."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass


@dataclass(slots=True)
class Lease:
    """What one admitted request holds: a row, a locked prefix, own pages.

    Attributes:
      row: its row in the page table.
      num_pages: pages in the row.
      num_shared: leading pages that belong to the prefix cache.
      handle: the locked prefix of `num_shared` pages.
      owner: who holds it, in words.
    """

    row: int
    num_pages: int
    num_shared: int
    handle: Hashable
    owner: str
