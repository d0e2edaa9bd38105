"""Tables by row on the device, which jitted programs read and write: pages of sequences, and edits of logits.

The page table `[rows + 1, P]` says which pages hold each row's sequence: a copy of the table that `cache/manager.py`
keeps on the host, of which a step needs no more than `[S]` rows. Each step notes the pages of the tokens that it
computes, since their positions and slots name them. All other entries of a row name pages that other requests have
computed; the host sends them before the row is read (`StepInputs.table_changes`). Entries past a sequence's pages may
be stale: `pages_of_seqs` leaves them out.

Logits are edited before a token is chosen: penalties, bias, stop tokens banned until min_tokens. The edit tables hold
by row what a request asked for and which tokens it has seen. The host writes a row once, when its request first
samples. From then on the programs count the tokens that they draw, since the host doesn't know them yet when it
launches the next step. Knows nothing about requests or buckets.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxsgl.batch.sampling import EDITS_LEN, IDS, PENALTIES, SCORED, UNTIL, VALUES, neutral_edits
from jaxsgl.cache.pages import DUMMY_PAGE, page_of, tokens_in


def page_table_bytes(num_rows: int, max_pages: int) -> int:
    """Device memory of the page table."""
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


def pages_of_seqs(table: jax.Array, rows: jax.Array, lengths: jax.Array, page_size: int) -> jax.Array:
    """`[S, P]` the pages of `rows [S]` as far as `lengths [S]` tokens reach, then the dummy page."""
    first_tokens = tokens_in(np.arange(table.shape[1]), page_size)
    pages = table.at[rows].get(mode="promise_in_bounds")
    return jnp.where(first_tokens < lengths[:, None], pages, DUMMY_PAGE)


class EditTables(NamedTuple):
    """By row; the dummy row is the last, and its edits change nothing.

    Attributes:
      edits: `[rows + 1, EDITS_LEN]` int32, see `batch/sampling.py`.
      counts: `[rows + 1, V]` int32: twice how often the output holds a token, plus 1 if the prompt holds it.
    """

    edits: jax.Array
    counts: jax.Array


def edit_table_bytes(num_rows: int, vocab_size: int) -> int:
    """Device memory of the edit tables."""
    return 4 * (num_rows + 1) * (EDITS_LEN + vocab_size)


def neutral_tables(num_rows: int, vocab_size: int) -> EditTables:
    """Edit tables that change nothing, as NumPy arrays."""
    edits: Any = np.tile(neutral_edits(), (num_rows + 1, 1))
    counts: Any = np.zeros((num_rows + 1, vocab_size), np.int32)
    return EditTables(edits, counts)


def set_row(tables: EditTables, setup: jax.Array) -> EditTables:
    """Writes one row of both edit tables; `setup` is `sampling.row_setup`."""
    row, edits, counts = setup[0], setup[1 : 1 + EDITS_LEN], setup[1 + EDITS_LEN :]
    return EditTables(tables.edits.at[row].set(edits), tables.counts.at[row].set(counts))


def edit_logits(logits: jax.Array, tables: EditTables, rows: jax.Array, positions: jax.Array) -> jax.Array:
    """`logits [S, V]` with the edits of `rows [S]`, for the tokens at `positions [S]`.

    Repetition comes first, as it scales the model's logits (Hugging Face), then frequency and presence, then bias
    (OpenAI). The dummy row's logits stay as they are.
    """
    edits, counts = tables.edits[rows], tables.counts[rows]
    frequency, presence, repetition = _floats(edits[:, PENALTIES]).T[:, :, None]
    in_output = (counts >> 1).astype(jnp.float32)
    scaled = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits = jnp.where(counts > 0, scaled, logits)
    logits = logits - frequency * in_output - presence * (in_output > 0)
    added = jnp.where(positions[:, None] < edits[:, UNTIL], _floats(edits[:, VALUES]), 0.0)
    return logits.at[jnp.arange(len(rows))[:, None], edits[:, IDS]].add(added)


def scored_ids(edits: jax.Array, rows: jax.Array) -> jax.Array:
    """`[S, A]` the tokens that `rows [S]` name, to be scored in the place of each output token; 0 for none."""
    return edits[rows, SCORED]


def count_tokens(tables: EditTables, rows: jax.Array, tokens: jax.Array) -> EditTables:
    """Adds `tokens [S]` to the counts of the output of `rows [S]`. The dummy row's counts are never read."""
    return tables._replace(counts=tables.counts.at[rows, tokens].add(2))


def _floats(bits: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(bits, jnp.float32)
