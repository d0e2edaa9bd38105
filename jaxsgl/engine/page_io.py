"""Pages between the pool and the host: compiled programs that gather and insert whole pages over all layers.

A program for each number of pages of `page_counts`, compiled and run once at the start, so that none is compiled while
serving. An engine that moves no pages makes none of this. A gather is padded with the dummy page up to the next
program; an insert is cut into programs that fit exactly, so that its data is not copied on the host. The pool is
donated to an insert and written in place. Under a mesh each device gathers and inserts its own heads; of heads that
devices have copies of, the host form has one. Called by `engine`; knows nothing about who owns a page.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxsgl.batch.engine_ops import Gather, HostPages, Insert
from jaxsgl.cache.pages import DUMMY_PAGE
from jaxsgl.engine.layer_state import LayerStates
from jaxsgl.engine.programs import Program, ProgramKey, ProgramSet
from jaxsgl.engine.state import KvBuffers
from jaxsgl.weights.sharding import replicated

GATHER, INSERT = "gather", "insert"
MOST_PAGES = 64  # of one program
MOST_BYTES = 64 << 20  # of one program's pages; more is several launches
IN_FLIGHT = 4  # gathers and inserts whose pages may lie beside the pool at once


def page_counts(page_bytes: int) -> tuple[int, ...]:
    """The numbers of pages for which programs are compiled, ascending: powers of 4, since each costs seconds."""
    most = max(min(MOST_PAGES, MOST_BYTES // page_bytes), 1)
    return tuple(1 << i for i in range(0, most.bit_length(), 2))


def reserved_bytes(page_bytes: int) -> int:
    """Device memory that pages on their way take beside the pool."""
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


class PageIo:
    """The programs for pages, and the gathers that the host has not read yet.

    Args:
      programs: where its programs are compiled.
      kv: shapes and places of the pool.
      states: what layers keep of a page.
      mesh: where the pool lies.

    Attributes:
      layout: the host form of a page.
      load_page_s: seconds that a page takes from host memory to the pool, once `run_all` has measured it.
    """

    def __init__(self, programs: ProgramSet, kv: KvBuffers, states: LayerStates, mesh: Mesh) -> None:
        self.layout = states.page_layout
        self.load_page_s = 0.0
        self._dtype = kv.k[0].dtype
        self._counts = page_counts(states.page_bytes)
        programs.add(page_programs(kv, states, mesh))
        self._gather = {count: programs[ProgramKey(GATHER, count)] for count in self._counts}
        self._insert = {count: programs[ProgramKey(INSERT, count)] for count in self._counts}
        self._gathers: deque[tuple[int, Gather, list[jax.Array]]] = deque()

    def gather(self, kv: KvBuffers, op: Gather, number: int) -> None:
        """Launches `op`, and the copy of what it yields to the host."""
        parts: list[jax.Array] = []
        pages = np.array(op.pages, np.int32)
        for first in range(0, len(pages), self._counts[-1]):
            part = pages[first : first + self._counts[-1]]
            count = next(count for count in self._counts if count >= len(part))
            padded = np.full(count, DUMMY_PAGE, np.int32)
            padded[: len(part)] = part
            parts.append(self._gather[count](kv, padded))
        for array in parts:
            array.copy_to_host_async()
        self._gathers.append((number, op, parts))

    def insert(self, kv: KvBuffers, op: Insert) -> KvBuffers:
        """Launches `op`; returns the pool with its pages."""
        assert op.data.shape == self.layout.shape(len(op.pages)), f"{op.data.shape} for {len(op.pages)} pages"
        data = op.data.view(self._dtype)
        for part in self._parts(len(op.pages)):
            pages = np.array(op.pages[part], np.int32)
            kv = self._insert[len(pages)](kv, pages, data[part])
        return kv

    def poll(self, wait: bool) -> list[tuple[int, HostPages]]:
        """The gathers that have ended; with `wait`, waits for the oldest."""
        if wait and self._gathers:
            jax.block_until_ready(self._gathers[0][2])
        ended: list[tuple[int, HostPages]] = []
        while self._gathers and _all_ready(self._gathers[0][2]):
            number, op, parts = self._gathers.popleft()
            ended.append((number, self._on_host(parts, len(op.pages))))
        return ended

    def run_all(self, kv: KvBuffers) -> KvBuffers:
        """Runs each program once, on the dummy page, and waits; returns the pool. Times the largest insert again."""
        for count in self._counts:
            pages = np.full(count, DUMMY_PAGE, np.int32)
            data = np.array(self._gather[count](kv, pages))
            kv = jax.block_until_ready(self._insert[count](kv, pages, data))
        start_s = time.perf_counter()
        kv = jax.block_until_ready(self._insert[count](kv, pages, data.copy()))  # the tier copies pages, too
        self.load_page_s = (time.perf_counter() - start_s) / count
        return kv

    def _parts(self, num_pages: int) -> Iterator[slice]:
        """Cuts `num_pages` pages into numbers of pages that have a program, the largest first."""
        first = 0
        for count in reversed(self._counts):
            while num_pages - first >= count:
                yield slice(first, first + count)
                first += count

    def _on_host(self, parts: Sequence[jax.Array], num_pages: int) -> HostPages:
        arrays = [np.asarray(array) for array in parts]
        whole = arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
        return whole[:num_pages].view(self.layout.host_dtype)


def _all_ready(arrays: Sequence[Any]) -> bool:  # JAX's types lack `is_ready`
    return all(array.is_ready() for array in arrays)
