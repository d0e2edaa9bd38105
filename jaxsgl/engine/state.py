"""What stays on the device from step to step: KV pages, running states, the page table, last tokens, logit edits.

Every program that changes a part takes it donated and returns it, so that it is written in place. The engine compiles
for the state's shapes, then allocates it, and holds it between steps. Knows nothing about which request owns a page or
a row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jaxsgl.batch.buckets import Capacity
from jaxsgl.batch.sampling import EDITS_LEN
from jaxsgl.engine.layer_state import LayerStates, StateArray
from jaxsgl.engine.tables import EditTables, neutral_tables
from jaxsgl.models.tensor_parallel import DATA_AXIS
from jaxsgl.weights.sharding import by_rank, replicated
from pallas_kernels.delta import DeltaStates
from pallas_kernels.short_conv import ConvStates


class KvBuffers(NamedTuple):
    """All pages: what layers keep by page, `[num_pages, K, page_size, H]`, written in place.

    A field holds the arrays of its name, of each layer that has one. `groups` and `sums` are those of groups of tokens
    (`pallas_kernels/grouped_tokens.py`).
    """

    k: tuple[jax.Array, ...]
    v: tuple[jax.Array, ...]
    groups: tuple[jax.Array, ...] = ()
    sums: tuple[jax.Array, ...] = ()

    def by_layer(self) -> list[tuple[jax.Array, ...]]:
        """The arrays of each layer."""
        return list(zip(*(arrays for arrays in self if arrays), strict=True))

    @classmethod
    def of_layers(cls, layers: Sequence[tuple[jax.Array, ...]]) -> KvBuffers:
        """The inverse of `by_layer`, of layers that are alike."""
        k, *v = zip(*layers, strict=True)
        return cls(k, *v) if v else cls(k, ())


class StateBuffers(NamedTuple):
    """States: what layers keep by row, `[rows + 1 + snapshots, ...]`: of running requests, the dummy row's, snapshots.

    Written in place. A field holds the arrays of its name, of each layer that has one (`pallas_kernels.delta`); short
    convolutions have no matrices.
    """

    matrices: tuple[jax.Array, ...]
    inputs: tuple[jax.Array, ...]

    def by_layer(self) -> list[DeltaStates] | list[ConvStates]:
        """The states of each layer: all layers of a model that have some are of one kind."""
        if not self.matrices:
            return [ConvStates(inputs) for inputs in self.inputs]
        return [DeltaStates(*arrays) for arrays in zip(*self, strict=True)]

    @classmethod
    def of_layers(cls, layers: Sequence[DeltaStates | ConvStates]) -> StateBuffers:
        """The inverse of `by_layer`."""
        matrices = (layer.matrices for layer in layers if isinstance(layer, DeltaStates))
        return cls(tuple(matrices), tuple(layer.inputs for layer in layers))


class DeviceState(NamedTuple):
    """The state of one engine, a pytree: that of one rank, or of all ranks, each array along its first axis.

    Attributes:
      kv: the pages of all layers.
      page_table: `[rows + 1, P]` int32, the pages of each row, the dummy row last; see `tables.py`.
      last_tokens: `[rows + 1]` int32, the newest token of each row, the dummy row last.
      edit_tables: by row, what featured batches do to logits.
      images: `[rows + 1, (1 + J) D]` embeddings of images' tokens and what deepstack adds; row 0 is zeros. None: the
        model has no vision tower.
      running: the states of running requests, and snapshots; None: no layer has any.
    """

    kv: KvBuffers
    page_table: jax.Array
    last_tokens: jax.Array
    edit_tables: EditTables
    images: jax.Array | None = None
    running: StateBuffers | None = None


def abstract_state(
    states: LayerStates, capacity: Capacity, mesh: Mesh, images: tuple[int, jnp.dtype] | None = None
) -> DeviceState:
    """Shapes and places of the state, in the place of arrays.

    `images` are the length and dtype of a row of the pool of embeddings, if there is one.
    """
    rows = mesh.shape[DATA_AXIS] * (capacity.num_rows + 1)
    tables: list[Any] = [
        jax.ShapeDtypeStruct(dims, jnp.int32, sharding=by_rank(mesh))
        for dims in ((rows, capacity.max_pages_per_seq), (rows,), (rows, EDITS_LEN), (rows, capacity.vocab_size))
    ]
    page_table, last_tokens, edits, counts = tables
    pool: Any = None
    if images is not None and capacity.tower is not None:
        dims = capacity.tower.num_rows + 1, images[0]
        pool = jax.ShapeDtypeStruct(dims, images[1], sharding=replicated(mesh))
    return DeviceState(
        abstract_kv(states, capacity.num_pages, mesh),
        page_table,
        last_tokens,
        EditTables(edits, counts),
        pool,
        abstract_running(states, capacity, mesh),
    )


def allocate(
    states: LayerStates, capacity: Capacity, mesh: Mesh, images: tuple[int, jnp.dtype] | None = None
) -> DeviceState:
    """The state before the first step."""
    tables = neutral_tables(capacity.num_rows, capacity.vocab_size)
    page_table = np.zeros((capacity.num_rows + 1, capacity.max_pages_per_seq), np.int32)
    last_tokens = np.zeros(capacity.num_rows + 1, np.int32)
    kv = allocate_kv(states, capacity.num_pages, mesh)
    pool = None
    if images is not None and capacity.tower is not None:
        dims = capacity.tower.num_rows + 1, images[0]
        pool = jax.jit(lambda: jnp.zeros(dims, images[1]), out_shardings=replicated(mesh))()
    running = allocate_running(states, capacity, mesh)
    of_ranks = jax.tree.map(
        lambda array: np.concatenate([array] * mesh.shape[DATA_AXIS]), (page_table, last_tokens, tables)
    )
    host = jax.device_put(of_ranks, by_rank(mesh))
    return DeviceState(kv, *host)._replace(images=pool, running=running)


def abstract_kv(states: LayerStates, num_pages: int, mesh: Mesh) -> KvBuffers:
    """Shapes and places of the pages, in the place of arrays."""

    def described(array: StateArray) -> Any:
        dims = mesh.shape[DATA_AXIS] * (num_pages + array.scratch), *array.shape
        return jax.ShapeDtypeStruct(dims, array.dtype, sharding=array.sharding(mesh))

    return KvBuffers(*(tuple(map(described, states.by_page(name))) for name in KvBuffers._fields))


def abstract_running(states: LayerStates, capacity: Capacity, mesh: Mesh) -> StateBuffers | None:
    """Shapes and places of states, in the place of arrays; None if there are none."""
    if not states.row_bytes:
        return None

    places = mesh.shape[DATA_AXIS] * (capacity.num_rows + 1 + (capacity.num_snapshots or 0))

    def described(array: StateArray) -> Any:
        return jax.ShapeDtypeStruct((places, *array.shape), array.dtype, sharding=array.sharding(mesh))

    return StateBuffers(*(tuple(map(described, states.by_row(name))) for name in StateBuffers._fields))


def allocate_kv(states: LayerStates, num_pages: int, mesh: Mesh) -> KvBuffers:
    """Zeroed pages, made on the devices."""
    kv: KvBuffers = _zeros(abstract_kv(states, num_pages, mesh))
    return kv


def allocate_running(states: LayerStates, capacity: Capacity, mesh: Mesh) -> StateBuffers | None:
    """Zeroed states, made on the devices; None if there are none."""
    running: StateBuffers | None = _zeros(abstract_running(states, capacity, mesh))
    return running


def _zeros(abstract: Any) -> Any:
    """Zeroed arrays of the shapes and places of `abstract`, made on the devices."""

    @cache  # one program for all layers that are alike
    def zeros(shape: tuple[int, ...], dtype: jnp.dtype, sharding: NamedSharding) -> Callable[[], jax.Array]:
        return jax.jit(lambda: jnp.zeros(shape, dtype), out_shardings=sharding)

    return jax.tree.map(lambda array: zeros(array.shape, array.dtype, array.sharding)(), abstract)
