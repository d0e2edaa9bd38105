"""Rows of the pool of images' embeddings between the device and the host: two compiled programs of `ROWS` rows each.

A gather and a restore of more rows are several launches. Both are padded: a gather with row 0, a restore with a row
behind the pool's end, which is dropped. The pool is donated to a restore and written in place; it is the same on all
devices of a mesh. The host form of a row is its bytes. Called by `engine`; knows nothing about whose a row is.
"""

from __future__ import annotations

from collections import deque
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax.sharding import Mesh

from jaxsgl.batch.engine_ops import GatherRows, RestoreRows
from jaxsgl.engine.programs import Program, ProgramKey, ProgramSet
from jaxsgl.weights.sharding import replicated

GATHER_ROWS, RESTORE_ROWS = ProgramKey("gather_rows"), ProgramKey("restore_rows")
ROWS = 256  # of a launch; fewer if the pool has fewer

HostRows: TypeAlias = npt.NDArray[np.uint8]  # [n, bytes of a row]


def rows_of_launch(images: jax.Array) -> int:
    """How many rows of the pool each of the programs takes."""
    return min(ROWS, images.shape[0] - 1)


def row_programs(images: jax.Array, mesh: Mesh) -> list[Program]:
    """The programs that gather and restore rows of the pool `images`."""
    whole: Any = replicated(mesh)
    count = rows_of_launch(images)
    rows = jax.ShapeDtypeStruct((count,), jnp.int32, sharding=whole)
    data = jax.ShapeDtypeStruct((count, images.shape[1]), images.dtype, sharding=whole)
    return [
        Program(GATHER_ROWS, gather_rows, (images, rows), whole),
        Program(RESTORE_ROWS, restore_rows, (images, rows, data), whole, (0,)),
    ]


class RowIo:
    """The programs, and the gathers that the host has not read yet.

    Args:
      programs: where they are compiled.
      images: shape and place of the pool, `[rows + 1, length]`.
      mesh: where it lies.
    """

    def __init__(self, programs: ProgramSet, images: jax.Array, mesh: Mesh) -> None:
        self._dtype, self._length = images.dtype, images.shape[1]
        self._end = images.shape[0]
        self._count = rows_of_launch(images)
        programs.add(row_programs(images, mesh))
        self._gather, self._restore = programs[GATHER_ROWS], programs[RESTORE_ROWS]
        self._gathers: deque[tuple[int, GatherRows, list[jax.Array]]] = deque()

    def gather(self, images: jax.Array, op: GatherRows, number: int) -> None:
        """Launches `op`, and the copy of what it yields to the host."""
        parts: list[jax.Array] = []
        for first in range(0, len(op.rows), self._count):
            rows = np.zeros(self._count, np.int32)
            part = op.rows[first : first + self._count]
            rows[: len(part)] = part
            parts.append(self._gather(images, rows))
        for array in parts:
            array.copy_to_host_async()
        self._gathers.append((number, op, parts))

    def restore(self, images: jax.Array, op: RestoreRows) -> jax.Array:
        """Launches `op`; returns the pool with its rows."""
        assert op.data.shape == (len(op.rows), self._length * self._dtype.itemsize), f"rows of {op.data.shape}"
        values = op.data.view(self._dtype)
        for first in range(0, len(op.rows), self._count):
            part = slice(first, min(first + self._count, len(op.rows)))
            rows = np.full(self._count, self._end, np.int32)
            rows[: part.stop - first] = op.rows[part]
            data = values[part]
            if len(data) < self._count:
                data = np.zeros((self._count, self._length), self._dtype)
                data[: part.stop - first] = values[part]
            images = self._restore(images, rows, data)
        return images

    def poll(self, wait: bool) -> list[tuple[int, HostRows]]:
        """The gathers that have ended; with `wait`, waits for the oldest."""
        if wait and self._gathers:
            jax.block_until_ready(self._gathers[0][2])
        ended: list[tuple[int, HostRows]] = []
        while self._gathers and all(_is_ready(array) for array in self._gathers[0][2]):
            number, op, parts = self._gathers.popleft()
            whole = np.concatenate([np.asarray(array) for array in parts])[: len(op.rows)]
            ended.append((number, np.ascontiguousarray(whole).view(np.uint8)))
        return ended

    def run_all(self, images: jax.Array) -> jax.Array:
        """Runs both programs once, and waits; returns the pool, which is as it was."""
        rows = np.zeros(1, np.int32)
        self.gather(images, GatherRows(rows), 0)
        ((_, data),) = self.poll(wait=True)
        return jax.block_until_ready(self.restore(images, RestoreRows(rows, data)))


def gather_rows(images: jax.Array, rows: jax.Array) -> jax.Array:
    """`[n, length]` of `rows [n]`."""
    return images.at[rows].get(mode="promise_in_bounds")


def restore_rows(images: jax.Array, rows: jax.Array, data: jax.Array) -> jax.Array:
    """`images` with `data [n, length]` at `rows [n]`; rows behind the end are dropped."""
    return images.at[rows].set(data, mode="drop")


def _is_ready(array: Any) -> bool:  # JAX's types lack `is_ready`
    ready: bool = array.is_ready()
    return ready
