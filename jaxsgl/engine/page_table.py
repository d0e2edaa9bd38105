"""The page table on the device, `[rows + 1, P]` int32: which pages hold each row's sequence. Runs in jitted programs.

A copy of the table that `cache/manager.py` keeps on the host, of which a step needs no more than `[S]` rows. Each step
notes the pages of the tokens that it computes, since their positions and slots name them. All other entries of a row
name pages that other requests have computed; the host sends them before the row is read (`StepInputs.table_changes`).
Entries past a sequence's pages may be stale: `of_seqs` leaves them out. Knows nothing about requests or buckets.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jaxsgl.cache.pages import DUMMY_PAGE, page_of, tokens_in


def table_bytes(num_rows: int, max_pages: int) -> int:
    """Device memory of the table."""
    return 4 * (num_rows + 1) * max_pages


def set_pages(table: jax.Array, changes: jax.Array) -> jax.Array:
    """Writes the entries `changes [3, n]` = (row, place in it, page)."""
    rows, places, pages = changes
    return table.at[rows, places].set(pages, mode="promise_in_bounds")


def note_tokens(table: jax.Array, rows: jax.Array, positions: jax.Array, slots: jax.Array, page_size: int) -> jax.Array:
    """Writes the pages of `slots [T]`, which hold the tokens at `positions [T]` of `rows [T]`.

    Tokens of one page write the same number.
    """
    places, pages = page_of(positions, page_size), page_of(slots, page_size)
    return table.at[rows, places].set(pages, mode="promise_in_bounds")


def of_seqs(table: jax.Array, rows: jax.Array, lengths: jax.Array, page_size: int) -> jax.Array:
    """`[S, P]` the pages of `rows [S]` as far as `lengths [S]` tokens reach, then the dummy page."""
    first_tokens = tokens_in(np.arange(table.shape[1]), page_size)
    pages = table.at[rows].get(mode="promise_in_bounds")
    return jnp.where(first_tokens < lengths[:, None], pages, DUMMY_PAGE)
