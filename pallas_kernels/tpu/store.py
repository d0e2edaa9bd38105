"""`store_kv` as a Mosaic TPU kernel, in place: the cache is aliased from input to output.

Owns the merging of new tokens into tiles of the memory. Called through `tpu.BACKEND`.

TPU memory is written by whole tiles, several tokens each. So tokens are sorted by slot first, and each tile that any of
them touches is read, changed and written once: two tokens of one tile never race, whatever their order. A tile that is
entirely new isn't read. Several tiles are in flight. In a cache with pages of one token, each token is its own tile.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.paged_kv import PagedKv
from pallas_kernels.tpu.common import (
    PageForm,
    page_form,
    refuse_pages,
    tile_rows,
    unview_pages,
    view_pages,
    vmem_limit_bytes,
)
from pallas_kernels.tpu.store_runs import TokenRuns, chunk_starts, token_runs
from pallas_kernels.tuning import blocks, shape_class

# The most tokens of one kernel: its work list is four numbers a token, in a scalar memory of 1 MiB.
_MOST_TOKENS = 1 << 15


def refuse_store(kv: PagedKv) -> str | None:
    """Why this backend can't store into the cache, or None when it can."""
    return refuse_pages(kv.k)


@functools.partial(jax.jit, static_argnames="interpret")
def store_kv(kv: PagedKv, k: jax.Array, v: jax.Array, slots: jax.Array, interpret: bool) -> PagedKv:
    """See `backend.Store`."""
    form = page_form(kv.k)
    # Not pinned by `keep_in_hbm`: a program that only stores would not compile then.
    views = view_pages(kv.k), view_pages(kv.v)
    store = _store_tokens if form is PageForm.HEADS else _store_tiles
    for begin in range(0, len(slots), _MOST_TOKENS):
        part = slice(begin, begin + _MOST_TOKENS)
        views = store(views, (k[part], v[part]), slots[part], kv, interpret)
    stored_k, stored_v = views
    return dataclasses.replace(kv, k=unview_pages(stored_k, form), v=unview_pages(stored_v, form))


def _call(
    kernel: Callable[..., None],
    scalars: tuple[jax.Array, ...],
    views: tuple[jax.Array, jax.Array],
    new: tuple[jax.Array, jax.Array],
    scratch: list[Any],
    interpret: bool,
) -> tuple[jax.Array, jax.Array]:
    """Run a kernel of (scalars, new k and v, cache in, cache out, scratch), all but the scalars left in HBM."""
    in_hbm = pl.BlockSpec(memory_space=pltpu.HBM)
    first_view = len(scalars) + len(new)
    stored: tuple[jax.Array, jax.Array] = pl.pallas_call(
        kernel,
        out_shape=tuple(jax.ShapeDtypeStruct(view.shape, view.dtype) for view in views),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars), in_specs=[in_hbm] * 4, out_specs=(in_hbm, in_hbm), scratch_shapes=scratch
        ),
        input_output_aliases={first_view: 0, first_view + 1: 1},
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=vmem_limit_bytes(scratch)),
        interpret=pltpu.InterpretParams() if interpret else False,
        name="store_kv",
    )(*scalars, *new, *views)
    return stored


def _store_tokens(
    views: tuple[jax.Array, jax.Array],
    new: tuple[jax.Array, jax.Array],
    slots: jax.Array,
    _kv: PagedKv,
    interpret: bool,
) -> tuple[jax.Array, jax.Array]:
    """Pages of one token: copies from HBM to HBM, all in flight at once."""
    return _call(_tokens_kernel, (slots,), views, new, [pltpu.SemaphoreType.DMA(())], interpret)


def _tokens_kernel(slots: Any, k: Any, v: Any, _k_in: Any, _v_in: Any, k_out: Any, v_out: Any, sem: Any) -> None:
    pairs = ((k, k_out), (v, v_out))

    def each(token: jax.Array, act: Callable[[Any], None]) -> None:
        def copies() -> None:
            for new, pages in pairs:
                act(pltpu.make_async_copy(new.at[token], pages.at[slots[token]], sem))

        pl.when(slots[token] > 0)(copies)  # slot 0 is the dummy page

    num_tokens = slots.shape[0]
    lax.fori_loop(0, num_tokens, lambda token, _: each(token, lambda copy: copy.start()), None)
    lax.fori_loop(0, num_tokens, lambda token, _: each(token, lambda copy: copy.wait()), None)


def _store_tiles(
    views: tuple[jax.Array, jax.Array],
    new: tuple[jax.Array, jax.Array],
    slots: jax.Array,
    kv: PagedKv,
    interpret: bool,
) -> tuple[jax.Array, jax.Array]:
    num_tokens, num_kv_heads, head_dim = new[0].shape
    page_size, form = kv.page_size, page_form(kv.k)
    sizes = blocks("store_kv", "mosaic_tpu", shape_class(new[0], kv, num_tokens))
    rows = tile_rows(kv.k)
    chunk_tokens = min(num_tokens, sizes["chunk_tokens"])
    runs = token_runs(slots, chunk_tokens, rows, page_size)
    kernel = functools.partial(_tiles_kernel, page_size=page_size, rows=rows, form=form)
    tile = (num_kv_heads, rows, head_dim) if form is PageForm.ROWS else views[0].shape[1:]
    scratch = [
        pltpu.VMEM((2, 2, rows + chunk_tokens + rows, num_kv_heads, head_dim), kv.dtype),
        pltpu.VMEM((sizes["num_buffers"], 2, *tile), kv.dtype),
        pltpu.SemaphoreType.DMA((2,)),
        pltpu.SemaphoreType.DMA((sizes["num_buffers"],)),
        pltpu.SemaphoreType.DMA((sizes["num_buffers"],)),
    ]
    return _call(kernel, (*runs, chunk_starts(num_tokens, chunk_tokens)), views, new, scratch, interpret)


def _tiles_kernel(
    slot: Any, token: Any, run_end: Any, tile_end: Any, count: Any, starts: Any,
    k: Any, v: Any, _k_in: Any, _v_in: Any, k_out: Any, v_out: Any,
    new_buf: Any, tile_buf: Any, new_sem: Any, read_sem: Any, write_sem: Any,
    *, page_size: int, rows: int, form: PageForm,
) -> None:  # fmt: skip
    runs = TokenRuns(slot, token, run_end, tile_end, count)
    num_chunks = starts.shape[0]
    chunk_tokens = slot.shape[1]

    def load_new(chunk: jax.Array, act: Callable[[Any], None]) -> None:
        def copies() -> None:
            place = new_buf.at[chunk % 2]
            for i, new in enumerate((k, v)):
                src = new.at[pl.ds(starts[chunk], chunk_tokens)]
                act(pltpu.make_async_copy(src, place.at[i, pl.ds(rows, chunk_tokens)], new_sem.at[chunk % 2]))

        pl.when(chunk < num_chunks)(copies)

    def one_chunk(chunk: jax.Array, _: None) -> None:
        load_new(chunk + 1, lambda copy: copy.start())
        load_new(chunk, lambda copy: copy.wait())
        tiles = _Tiles(
            runs, chunk, new_buf.at[chunk % 2], (k_out, v_out), tile_buf, read_sem, write_sem, page_size, rows, form
        )
        tiles.store_all()

    load_new(jnp.int32(0), lambda copy: copy.start())
    lax.fori_loop(0, num_chunks, one_chunk, None)


@dataclasses.dataclass(frozen=True)
class _Tiles:
    """The tiles of the cache that one chunk of tokens touches, each read, changed and written once."""

    runs: TokenRuns
    """The chunk's runs, in SMEM."""
    chunk: jax.Array
    new: Any
    """`[2, rows + C + rows, K, H]`: K and V of the chunk, with room at both ends for reading a tile's worth."""
    pages: tuple[Any, Any]
    buf: Any
    """`[num_buffers, 2, *tile]`."""
    read_sem: Any
    write_sem: Any
    page_size: int
    rows: int
    """Tokens of a tile."""
    form: PageForm

    def store_all(self) -> None:
        """Store the chunk; half of the buffers are being read and half are being written."""
        num_buffers = self.buf.shape[0]
        end = self.runs.num_entries[self.chunk]

        def ask(asked: jax.Array, entry: jax.Array) -> tuple[jax.Array, jax.Array]:
            """Start reading the tile of the next entry, when there is one, into the buffer used longest ago."""

            def start() -> tuple[jax.Array, jax.Array]:
                number = asked % num_buffers
                pl.when(asked >= num_buffers)(lambda: self._write(entry, number, lambda copy: copy.wait()))
                self._read(entry, number, lambda copy: copy.start())
                return asked + 1, self.runs.tile_end[self.chunk, entry]

            following: tuple[jax.Array, jax.Array] = lax.cond(entry < end, start, lambda: (asked, entry))
            return following

        def change(state: tuple[jax.Array, jax.Array, jax.Array, jax.Array]) -> Any:
            asked, to_ask, changed, entry = state
            asked, to_ask = ask(asked, to_ask)
            number = changed % num_buffers
            self._read(entry, number, lambda copy: copy.wait())
            self._merge(entry, number)
            self._write(entry, number, lambda copy: copy.start())
            return asked, to_ask, changed + 1, self.runs.tile_end[self.chunk, entry]

        zero = jnp.int32(0)
        asked, to_ask = zero, zero
        for _ in range(num_buffers // 2):
            asked, to_ask = ask(asked, to_ask)
        asked, *_ = lax.while_loop(lambda state: state[3] < end, change, (asked, to_ask, zero, zero))
        # The next chunk may touch the same tiles.
        for number in range(num_buffers):
            pl.when(number < asked)(functools.partial(self._write, zero, number, lambda copy: copy.wait()))

    def _places(self, entry: jax.Array) -> list[Any]:
        """The tile of an entry in the K and the V cache."""
        slot = self.runs.slot[self.chunk, entry]
        page = slot // self.page_size
        if self.form is PageForm.COLUMNS:
            return [pages.at[page] for pages in self.pages]
        row = pl.multiple_of(slot % self.page_size // self.rows * self.rows, self.rows)
        return [pages.at[page, :, pl.ds(row, self.rows)] for pages in self.pages]

    def _read(self, entry: jax.Array, number: jax.Array, act: Callable[[Any], None]) -> None:
        def copies() -> None:
            for i, place in enumerate(self._places(entry)):
                act(pltpu.make_async_copy(place, self.buf.at[number, i], self.read_sem.at[number]))

        # One run may fill the tile; nothing old is left then.
        pl.when(self.runs.run_end[self.chunk, entry] - entry < self.rows)(copies)

    def _write(self, entry: jax.Array, number: Any, act: Callable[[Any], None]) -> None:
        for i, place in enumerate(self._places(entry)):
            act(pltpu.make_async_copy(self.buf.at[number, i], place, self.write_sem.at[number]))

    def _merge(self, entry: jax.Array, number: jax.Array) -> None:
        """Put the runs of the tile that begins with `entry` over what was read."""

        def put_run(run: jax.Array) -> jax.Array:
            end = self.runs.run_end[self.chunk, run]
            first = self.runs.slot[self.chunk, run] % self.rows
            # Row r of the tile is the token first - r before the run's.
            source = self.rows + self.runs.token[self.chunk, run] - first
            for i in range(2):
                old = self.buf[number, i]
                new = self.new[i, pl.ds(source, self.rows)]
                new = jnp.transpose(new, (1, 0, 2) if self.form is PageForm.ROWS else (1, 2, 0))
                row = lax.broadcasted_iota(jnp.int32, old.shape, 1 if self.form is PageForm.ROWS else 2)
                self.buf[number, i] = jnp.where((row >= first) & (row < first + end - run), new, old)
            return end

        lax.while_loop(lambda run: run < self.runs.tile_end[self.chunk, entry], put_run, entry)
