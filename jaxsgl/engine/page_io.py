"""Pages of KV and rows of images' embeddings between the device and the host: compiled programs that copy them.

Pages have a program for each number of pages of `page_counts`, rows one of `rows_of_launch` rows; more are several
launches. All are compiled and run once at the start, so that none is compiled while serving; an engine that moves none
has none. A gather is padded with the dummy page, or row 0, up to the next program. An insert of pages is cut into
programs that fit exactly, so that its data is not copied on the host; a restore of rows is padded with a row after the
pool's end, which is dropped. What is written is donated and written in place. Under a mesh each device gathers and
inserts its own heads; of heads that devices have copies of, the host form has one. Rows are the same on all devices,
and bytes on the host. Called by `engine`; knows nothing about who owns a page or a row.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax.sharding import Mesh

from jaxsgl.batch.engine_api import Gather, GatherRows, Insert, PageLayout, RestoreRows
from jaxsgl.cache.pages import DUMMY_PAGE, IntArray
from jaxsgl.engine.layer_state import LayerStates
from jaxsgl.engine.programs import Program, ProgramKey, ProgramSet
from jaxsgl.engine.state import DeviceState, KvBuffers
from jaxsgl.weights.sharding import replicated

GATHER, INSERT = "gather", "insert"
GATHER_ROWS, RESTORE_ROWS = ProgramKey("gather_rows"), ProgramKey("restore_rows")
MOST_PAGES = 64  # of one program
MOST_BYTES = 64 << 20  # of one program's pages; more is several launches
IN_FLIGHT = 4  # gathers and inserts whose pages may lie next to the pool at once
ROWS = 256  # of a launch; fewer if the pool has fewer

HostOp: TypeAlias = Gather | Insert | GatherRows | RestoreRows


def page_counts(page_bytes: int) -> tuple[int, ...]:
    """The numbers of pages for which programs are compiled, ascending: powers of 4, since each costs seconds."""
    most = max(min(MOST_PAGES, MOST_BYTES // page_bytes), 1)
    return tuple(1 << i for i in range(0, most.bit_length(), 2))


def reserved_bytes(page_bytes: int) -> int:
    """Device memory that pages on their way take next to the pool."""
    return IN_FLIGHT * page_counts(page_bytes)[-1] * page_bytes


def gather_pages(kv: KvBuffers, pages: jax.Array, copies: int = 1) -> jax.Array:
    """`[n, layers, arrays, K, page_size, H]` of `pages [n]`, one of each `copies` consecutive heads."""
    layers = [jnp.stack([array[pages, ::copies] for array in layer], axis=1) for layer in kv.by_layer()]
    return jnp.stack(layers, axis=1)


def insert_pages(kv: KvBuffers, pages: jax.Array, data: jax.Array, copies: int = 1) -> KvBuffers:
    """`kv` with `data [n, layers, arrays, K, page_size, H]` at `pages [n]`, each head `copies` times."""
    if copies > 1:
        data = jnp.repeat(data, copies, axis=3)

    def written(array: jax.Array, layer: int, number: int) -> jax.Array:
        return array.at[pages].set(data[:, layer, number], mode="promise_in_bounds", unique_indices=True)

    return KvBuffers(
        *(tuple(written(array, i, number) for i, array in enumerate(arrays)) for number, arrays in enumerate(kv))
    )


def page_programs(kv: KvBuffers, states: LayerStates, mesh: Mesh) -> Iterator[Program]:
    """Yields the programs that gather and insert pages of the pool `kv`, of each number of `page_counts`."""
    layout, copies, on_host = states.page_layout, states.kv_copies, states.host_sharding(mesh)
    in_place = jax.tree.map(lambda array: array.sharding, kv)
    for count in page_counts(states.page_bytes):
        pages: Any = jax.ShapeDtypeStruct((count,), jnp.int32, sharding=replicated(mesh))
        data = jax.ShapeDtypeStruct(layout.shape(count), kv.k[0].dtype, sharding=on_host)
        gather, insert = partial(gather_pages, copies=copies), partial(insert_pages, copies=copies)
        yield Program(ProgramKey(GATHER, count), gather, (kv, pages), on_host)
        yield Program(ProgramKey(INSERT, count), insert, (kv, pages, data), in_place, (0,))


def rows_of_launch(images: jax.Array) -> int:
    """How many rows of the pool each of the programs takes."""
    return min(ROWS, images.shape[0] - 1)


def gather_rows(images: jax.Array, rows: jax.Array) -> jax.Array:
    """`[n, length]` of `rows [n]`."""
    return images.at[rows].get(mode="promise_in_bounds")


def restore_rows(images: jax.Array, rows: jax.Array, data: jax.Array) -> jax.Array:
    """`images` with `data [n, length]` at `rows [n]`; rows after the end are dropped."""
    return images.at[rows].set(data, mode="drop")


def row_programs(images: jax.Array, mesh: Mesh) -> list[Program]:
    """The programs that gather and restore rows of the pool `images [rows + 1, length]`."""
    whole: Any = replicated(mesh)
    count = rows_of_launch(images)
    rows = jax.ShapeDtypeStruct((count,), jnp.int32, sharding=whole)
    data = jax.ShapeDtypeStruct((count, images.shape[1]), images.dtype, sharding=whole)
    return [
        Program(GATHER_ROWS, gather_rows, (images, rows), whole),
        Program(RESTORE_ROWS, restore_rows, (images, rows, data), whole, (0,)),
    ]


class _Gathering(NamedTuple):
    """A gather that was launched: `parts` hold `length` pages or rows, then padding, and are `dtype` on the host."""

    number: int
    parts: list[jax.Array]
    length: int
    dtype: npt.DTypeLike

    @property
    def has_ended(self) -> bool:
        parts: list[Any] = [*self.parts]  # JAX's types lack `is_ready`
        return all(array.is_ready() for array in parts)

    def on_host(self) -> npt.NDArray[Any]:
        arrays = [np.asarray(array) for array in self.parts]
        whole = arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
        return whole[: self.length].view(self.dtype)


class PageIo:
    """Runs operations on pages and rows, and keeps the gathers that the host has not read yet.

    Args:
      programs: where its programs are compiled.
      state: shapes and places of the pools, as arrays or descriptions.
      states: what layers keep of a page.
      mesh: where the pools lie.
      pages: whether pages are moved.
      rows: whether rows are.

    Attributes:
      load_page_s: seconds that a page takes from host memory to the pool, once `run_all` has measured it.
    """

    def __init__(
        self, programs: ProgramSet, state: DeviceState, states: LayerStates, mesh: Mesh, *, pages: bool, rows: bool
    ) -> None:
        self._states = states
        self.load_page_s = 0.0
        counts = page_counts(states.page_bytes) if pages else ()
        programs.add(page_programs(state.kv, states, mesh) if pages else ())
        self._gather = {count: programs[ProgramKey(GATHER, count)] for count in counts}
        self._insert = {count: programs[ProgramKey(INSERT, count)] for count in counts}
        self._gather_rows: dict[int, jax.stages.Compiled] = {}
        self._restore_rows: dict[int, jax.stages.Compiled] = {}
        if rows:
            assert state.images is not None
            programs.add(row_programs(state.images, mesh))
            count = rows_of_launch(state.images)
            self._gather_rows, self._restore_rows = {count: programs[GATHER_ROWS]}, {count: programs[RESTORE_ROWS]}
        self._gathers: deque[_Gathering] = deque()

    @property
    def layout(self) -> PageLayout:
        """The host form of a page."""
        return self._states.page_layout

    def apply(self, state: DeviceState, op: HostOp, number: int) -> DeviceState:
        """Launches `op`, and the copy of what a gather yields to the host; returns the state after it."""
        if isinstance(op, Gather | Insert):
            assert self._gather, "no programs for pages were compiled"
            if isinstance(op, Insert):
                return state._replace(kv=self._inserted(state.kv, op))
            self._launch(number, self._gather, state.kv, np.array(op.pages, np.int32), self.layout.host_dtype)
            return state
        assert self._gather_rows and state.images is not None, "no programs for rows of images were compiled"
        if isinstance(op, RestoreRows):
            return state._replace(images=self._restored(state.images, op))
        self._launch(number, self._gather_rows, state.images, op.rows, np.uint8)
        return state

    def poll(self, wait: bool = False) -> list[tuple[int, npt.NDArray[Any]]]:
        """The gathers that have ended, with their numbers; with `wait`, waits for the oldest."""
        if wait and self._gathers:
            jax.block_until_ready(self._gathers[0].parts)
        ended: list[tuple[int, npt.NDArray[Any]]] = []
        while self._gathers and self._gathers[0].has_ended:
            gathering = self._gathers.popleft()
            ended.append((gathering.number, gathering.on_host()))
        return ended

    def run_all(self, state: DeviceState) -> DeviceState:
        """Runs each program once, on the dummy page and row 0, and waits; returns the state, which is as good as new.

        Times the largest insert again.
        """
        for count in self._gather:
            pages = (DUMMY_PAGE,) * count
            data = np.array(self._gather[count](state.kv, np.array(pages, np.int32))).view(self.layout.host_dtype)
            state = jax.block_until_ready(self.apply(state, Insert(pages, data), 0))
        if self._gather:
            start_s = time.perf_counter()
            op = Insert(pages, data.copy())  # the tier copies pages, too
            state = jax.block_until_ready(self.apply(state, op, 0))
            self.load_page_s = (time.perf_counter() - start_s) / count
        if self._gather_rows:
            row = np.zeros(1, np.int32)
            self.apply(state, GatherRows(row), 0)
            ((_, data),) = self.poll(wait=True)
            state = jax.block_until_ready(self.apply(state, RestoreRows(row, data), 0))
        return state

    def _launch(
        self, number: int, programs: dict[int, jax.stages.Compiled], pool: Any, places: IntArray, dtype: npt.DTypeLike
    ) -> None:
        """Launches `programs`, by the ascending number of places that they take, so that they gather all `places`."""
        parts: list[jax.Array] = []
        most = max(programs)
        for first in range(0, len(places), most):
            part = places[first : first + most]
            padded = np.full(next(count for count in programs if count >= len(part)), DUMMY_PAGE, np.int32)
            padded[: len(part)] = part
            parts.append(programs[len(padded)](pool, padded))
        for array in parts:
            array.copy_to_host_async()
        self._gathers.append(_Gathering(number, parts, len(places), dtype))

    def _inserted(self, kv: KvBuffers, op: Insert) -> KvBuffers:
        """The pool with the pages of `op`, the largest programs first."""
        assert op.data.shape == self.layout.shape(len(op.pages)), f"{op.data.shape} for {len(op.pages)} pages"
        pages, data, first = np.array(op.pages, np.int32), op.data.view(kv.k[0].dtype), 0
        for count in reversed(self._insert):
            while len(pages) - first >= count:
                part = slice(first, first + count)
                kv = self._insert[count](kv, pages[part], data[part])
                first += count
        return kv

    def _restored(self, images: jax.Array, op: RestoreRows) -> jax.Array:
        """The pool of embeddings with the rows of `op`."""
        end, length = images.shape
        assert op.data.shape == (len(op.rows), length * images.dtype.itemsize), f"rows of {op.data.shape}"
        values = op.data.view(images.dtype)
        ((count, program),) = self._restore_rows.items()
        for first in range(0, len(op.rows), count):
            part = slice(first, min(first + count, len(op.rows)))
            rows = np.full(count, end, np.int32)
            rows[: part.stop - first] = op.rows[part]
            data = values[part]
            if len(data) < count:
                data = np.zeros((count, length), images.dtype)
                data[: part.stop - first] = values[part]
            images = program(images, rows, data)
        return images
