"""What stays on the device from step to step: KV pages, the page table, last tokens and tables of logit edits.

Every program that changes a part takes it donated and returns it, so that it is written in place. The engine compiles
for the state's shapes, then allocates it, and holds it between steps. Knows nothing about which request owns a page or
a row.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxsgl.batch.capacity import Capacity
from jaxsgl.batch.sampling import EDITS_LEN
from jaxsgl.engine.edits import EditTables, neutral_tables
from jaxsgl.engine.sizing import KvShape
from jaxsgl.weights.sharding import kv_sharding, replicated


class KvBuffers(NamedTuple):
    """All pages: per layer one buffer for K and one for V, `[num_pages, K, page_size, H]`, written in place."""

    k: tuple[jax.Array, ...]
    v: tuple[jax.Array, ...]


class DeviceState(NamedTuple):
    """The state of one engine, a pytree.

    Attributes:
      kv: the pages of all layers.
      page_table: `[rows + 1, P]` int32, the pages of each row, the dummy row last; see `page_table.py`.
      last_tokens: `[rows + 1]` int32, the newest token of each row, the dummy row last.
      edit_tables: by row, what featured batches do to logits.
      images: `[rows + 1, (1 + J) D]` embeddings of images' tokens and what deepstack adds; row 0 is zeros. None: the
        model has no vision tower.
    """

    kv: KvBuffers
    page_table: jax.Array
    last_tokens: jax.Array
    edit_tables: EditTables
    images: jax.Array | None = None


def abstract_state(
    shape: KvShape, capacity: Capacity, mesh: Mesh, images: tuple[int, jnp.dtype] | None = None
) -> DeviceState:
    """Shapes and places of the state, in the place of arrays.

    `images` are the length and dtype of a row of the pool of embeddings, if there is one.
    """
    pages = jax.ShapeDtypeStruct(_pages_dims(shape, capacity.num_pages), shape.dtype, sharding=kv_sharding(mesh))
    layers: Any = (pages,) * shape.num_layers
    rows = capacity.num_rows + 1
    tables: list[Any] = [
        jax.ShapeDtypeStruct(dims, jnp.int32, sharding=replicated(mesh))
        for dims in ((rows, capacity.max_pages_per_seq), (rows,), (rows, EDITS_LEN), (rows, capacity.vocab_size))
    ]
    page_table, last_tokens, edits, counts = tables
    pool: Any = None
    if images is not None and capacity.tower is not None:
        dims = capacity.tower.num_rows + 1, images[0]
        pool = jax.ShapeDtypeStruct(dims, images[1], sharding=replicated(mesh))
    return DeviceState(KvBuffers(layers, layers), page_table, last_tokens, EditTables(edits, counts), pool)


def allocate(
    shape: KvShape, capacity: Capacity, mesh: Mesh, images: tuple[int, jnp.dtype] | None = None
) -> DeviceState:
    """The state before the first step."""
    tables = neutral_tables(capacity.num_rows, capacity.vocab_size)
    page_table = np.zeros((capacity.num_rows + 1, capacity.max_pages_per_seq), np.int32)
    last_tokens = np.zeros(capacity.num_rows + 1, np.int32)
    kv = allocate_kv(shape, capacity.num_pages, mesh)
    pool = None
    if images is not None and capacity.tower is not None:
        dims = capacity.tower.num_rows + 1, images[0]
        pool = jax.jit(lambda: jnp.zeros(dims, images[1]), out_shardings=replicated(mesh))()
    return DeviceState(kv, *jax.device_put((page_table, last_tokens, tables), replicated(mesh)))._replace(images=pool)


def allocate_kv(shape: KvShape, num_pages: int, mesh: Mesh) -> KvBuffers:
    """Zeroed pages, made on the devices."""
    dims = _pages_dims(shape, num_pages)
    zeros = jax.jit(lambda: jnp.zeros(dims, shape.dtype), out_shardings=kv_sharding(mesh))
    layers = range(shape.num_layers)
    return KvBuffers(tuple(zeros() for _ in layers), tuple(zeros() for _ in layers))


def _pages_dims(shape: KvShape, num_pages: int) -> tuple[int, int, int, int]:
    return num_pages, shape.num_kv_heads, shape.page_size, shape.head_dim
