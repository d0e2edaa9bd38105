"""Edits logits before a token is chosen, inside jitted programs: penalties, bias, stop tokens banned until min_tokens.

Owns the tables that this needs on the device: by row, what a request asked for and which tokens it has seen. The host
writes a row once, when its request first samples. From then on the programs count the tokens that they draw, since the
host doesn't know them yet when it launches the next step. Knows nothing about requests or buckets.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxsgl.batch.sampling import EDITS_LEN, IDS, PENALTIES, UNTIL, VALUES, neutral_edits


class EditTables(NamedTuple):
    """By row; the dummy row is the last, and its edits change nothing.

    Attributes:
      edits: `[rows + 1, EDITS_LEN]` int32, see `batch/sampling.py`.
      counts: `[rows + 1, V]` int32: twice how often the output holds a token, plus 1 if the prompt holds it.
    """

    edits: jax.Array
    counts: jax.Array


def table_bytes(num_rows: int, vocab_size: int) -> int:
    """Device memory of the tables."""
    return 4 * (num_rows + 1) * (EDITS_LEN + vocab_size)


def neutral_tables(num_rows: int, vocab_size: int) -> EditTables:
    """Tables that change nothing, as NumPy arrays."""
    edits: Any = np.tile(neutral_edits(), (num_rows + 1, 1))
    counts: Any = np.zeros((num_rows + 1, vocab_size), np.int32)
    return EditTables(edits, counts)


def set_row(tables: EditTables, setup: jax.Array) -> EditTables:
    """Writes one row of both tables; `setup` is `sampling.row_setup`."""
    row, edits, counts = setup[0], setup[1 : 1 + EDITS_LEN], setup[1 + EDITS_LEN :]
    return EditTables(tables.edits.at[row].set(edits), tables.counts.at[row].set(counts))


def apply(logits: jax.Array, tables: EditTables, rows: jax.Array, positions: jax.Array) -> jax.Array:
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


def count(tables: EditTables, rows: jax.Array, tokens: jax.Array) -> EditTables:
    """Adds `tokens [S]` to the counts of the output of `rows [S]`. The dummy row's counts are never read."""
    return tables._replace(counts=tables.counts.at[rows, tokens].add(2))


def _floats(bits: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(bits, jnp.float32)
