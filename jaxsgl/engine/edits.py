"""Changing logits before a token is chosen: penalties, bias, stop tokens that must wait. Inside jitted programs.

Owns the tables that this needs on the device: what a request asked for and which tokens it has seen, by row. The host
writes a row once, when its request starts to sample; from then on the step counts the tokens that it draws itself,
since the host doesn't know them yet when it launches the next step. Knows nothing about requests or buckets.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxsgl.batch.sampling import EDITS_LEN, IDS, PENALTIES, UNTIL, VALUES, neutral_edits
from jaxsgl.weights.sharding import replicated


class EditTables(NamedTuple):
    """By row, the dummy row last, whose edits change nothing.

    Attributes:
      edits: `[rows + 1, EDITS_LEN]` int32, see `batch/sampling.py`.
      counts: `[rows + 1, V]` int32, twice a token's number in the output, plus 1 if it stands in the prompt.
    """

    edits: jax.Array
    counts: jax.Array


def table_bytes(num_rows: int, vocab_size: int) -> int:
    """Device memory of the tables."""
    return 4 * (num_rows + 1) * (EDITS_LEN + vocab_size)


def allocate(num_rows: int, vocab_size: int, mesh: Mesh) -> EditTables:
    """Tables that change nothing."""
    edits = np.tile(neutral_edits(), (num_rows + 1, 1))
    counts = np.zeros((num_rows + 1, vocab_size), np.int32)
    return EditTables(*(jax.device_put(table, replicated(mesh)) for table in (edits, counts)))


def set_row(tables: EditTables, setup: jax.Array) -> EditTables:
    """Writes one row of both; `setup` is `sampling.row_setup`."""
    row, edits, counts = setup[0], setup[1 : 1 + EDITS_LEN], setup[1 + EDITS_LEN :]
    return EditTables(tables.edits.at[row].set(edits), tables.counts.at[row].set(counts))


def apply(logits: jax.Array, tables: EditTables, rows: jax.Array, positions: jax.Array) -> jax.Array:
    """`logits [S, V]` as `rows [S]` want them for the tokens at `positions [S]`; the dummy row wants them as they are.

    Repetition first, which scales the model's logits (Hugging Face), then frequency and presence, then bias (OpenAI).
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
    """Counts one more `tokens [S]` in the output of `rows [S]`. The dummy row's counts mean nothing."""
    return tables._replace(counts=tables.counts.at[rows, tokens].add(2))


def _floats(bits: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(bits, jnp.float32)
