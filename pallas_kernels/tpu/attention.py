"""Decode and extend attention on TPUs: one Mosaic kernel that attends query tiles over pages.

Owns the list of query tiles (a decode has one query per tile, an extend cuts ragged sequences), the walk over it, and
the block sizes. Copies are `attention_copies`, arithmetic is `attention_rows`, and a decode that also stores the newest
tokens has `new_tokens`. Called through `tpu.BACKEND`.

One program walks the query tiles in order. K and V of all heads of a page come in one copy each. The ring is filled
ahead of the walk, also across the border to the next query tile, so that copies are always in flight; queries come
and results leave in double buffers.
"""

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.options import AttentionOptions
from pallas_kernels.paged_kv import PagedKv, refuse_mixed_dtypes
from pallas_kernels.partition import BEGIN, END, POSITION, query_tiles
from pallas_kernels.qkv import FusedQkv
from pallas_kernels.tpu.attention_copies import PageRing, QueryTiles, Ring, TokenCopies
from pallas_kernels.tpu.attention_rows import Rows, RowsState
from pallas_kernels.tpu.common import (
    LANES,
    PageForm,
    keep_in_hbm,
    page_form,
    refuse_float16,
    refuse_pages,
    tile_rows,
    unview_pages,
    view_pages,
    vmem_limit_bytes,
)
from pallas_kernels.tpu.new_tokens import NewTokens, NoTokens, TokensOfTiles
from pallas_kernels.tuning import blocks, shape_class

_DECODE, _EXTEND = "paged_decode_attention", "paged_extend_attention"


def refuse_attention(q: jax.Array, kv: PagedKv) -> str | None:
    """Why the attention kernel can't take q `[T, N, H]` and the cache, or None when it can."""
    return refuse_float16(q) or refuse_pages(kv.k) or refuse_mixed_dtypes(q, kv)


def refuse_store_and_decode(qkv: FusedQkv, kv: PagedKv) -> str | None:
    """Why the kernel can't store the tokens of the product too, or None when it can."""
    if (reason := refuse_attention(qkv.product, kv)) is not None:
        return reason
    if page_form(kv.k) is PageForm.COLUMNS:
        return f"heads of {kv.head_dim} fill no lanes: a page is written as a whole, by a store of its own"
    return None


@functools.partial(jax.jit, static_argnames=("options", "interpret"))
def decode_attention(
    q: jax.Array, kv: PagedKv, sinks: jax.Array | None, options: AttentionOptions, interpret: bool
) -> jax.Array:
    """See `backend.Decode`. A padding row stands at position -1 and yields zeros."""
    return _attend_query_tiles(
        q, kv, sinks, _single_queries(kv), _plan(_DECODE, q, kv), options, interpret=interpret, name=_DECODE
    )[0]


@functools.partial(jax.jit, static_argnames=("options", "interpret"))
def store_and_decode(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    kv: PagedKv,
    slots: jax.Array,
    sinks: jax.Array | None,
    options: AttentionOptions,
    interpret: bool,
) -> tuple[jax.Array, PagedKv]:
    """See `backend.StoreAndDecode`."""
    form = page_form(kv.k)
    out, k_view, v_view = _attend_query_tiles(
        q, kv, sinks, _single_queries(kv), _plan(_DECODE, q, kv), options,
        new=(slots, k, v), interpret=interpret, name="paged_store_and_decode_attention",
    )  # fmt: skip
    return out, dataclasses.replace(kv, k=unview_pages(k_view, form), v=unview_pages(v_view, form))


def _single_queries(kv: PagedKv) -> jax.Array:
    """The query tiles of a decode."""
    seq = jnp.arange(kv.num_seqs, dtype=jnp.int32)
    return jnp.stack([seq, seq, seq + 1, kv.lengths - 1], axis=1)


@functools.partial(jax.jit, static_argnames=("options", "interpret"))
def extend_attention(
    q: jax.Array,
    query_offsets: jax.Array,
    kv: PagedKv,
    sinks: jax.Array | None,
    options: AttentionOptions,
    interpret: bool,
) -> jax.Array:
    """See `backend.Extend`."""
    chosen = _plan(_EXTEND, q, kv)
    tiles = query_tiles(kv.lengths, query_offsets, q.shape[0], chosen.tile_queries)
    return _attend_query_tiles(q, kv, sinks, tiles, chosen, options, interpret=interpret, name=_EXTEND)[0]


@dataclasses.dataclass(frozen=True)
class Plan:
    """Block sizes of one call, from the tuning table."""

    tile_queries: int
    """Most queries of one sequence in a query tile; a power of two."""
    tile_pages: int
    """Pages in a KV tile; a power of two."""
    num_buffers: int
    """KV tiles in the ring; all but the one being worked on are in flight."""


def _plan(op: str, q: jax.Array, kv: PagedKv) -> Plan:
    """Block sizes for q `[T, N, H]` over the cache; the table of a decode has no tile_rows."""
    num_kv_heads = kv.num_kv_heads
    sizes = blocks(op, "mosaic_tpu", shape_class(q, kv))
    token_bytes = num_kv_heads * kv.head_dim * kv.dtype.itemsize
    tile_tokens = max(LANES, _power_of_two_within(sizes["tile_kib"] * 1024 // token_bytes))
    num_groups = q.shape[1] // num_kv_heads
    longest = 1 << (kv.page_table.shape[1] - 1).bit_length()  # pages: no tile needs to hold more
    return Plan(
        tile_queries=_power_of_two_within(min(q.shape[0], max(1, sizes.get("tile_rows", 0) // num_groups))),
        tile_pages=min(longest, _power_of_two_within(tile_tokens // kv.page_size)),
        num_buffers=sizes["num_buffers"],
    )


def _power_of_two_within(n: int) -> int:
    return 1 << (max(n, 1).bit_length() - 1)


def _attend_query_tiles(
    q: jax.Array,
    kv: PagedKv,
    sinks: jax.Array | None,
    tiles: jax.Array,
    chosen: Plan,
    options: AttentionOptions,
    *,
    new: tuple[jax.Array, jax.Array, jax.Array] | None = None,
    interpret: bool,
    name: str,
) -> tuple[jax.Array, ...]:
    """Attention of `tiles` over pages; returns `[T, N, H]` in q's dtype.

    With `new`, slots `[S]` and their K and V `[S, K, H]` for tiles of one sequence each, in order, these are stored
    too, and the views of K and V come after the output.

    `tiles` is `[n, 4]` int32: sequence, first token, token after the last, position of the first token. Tiles of no
    token come last and are skipped; a negative position makes the results of a tile zeros. Each token must be in some
    tile, which has at most `chosen.tile_queries`.
    """
    num_tiles = jnp.sum(tiles[:, BEGIN] < tiles[:, END], dtype=jnp.int32)
    tile_list = jnp.concatenate([tiles.reshape(-1), num_tiles[None]])
    k_view, v_view = view_pages(kv.k), view_pages(kv.v)
    if new is None:  # else they aren't pinned, as for a store
        k_view, v_view = keep_in_hbm(k_view, interpret), keep_in_hbm(v_view, interpret)
    form, stores = page_form(kv.k), new is not None
    scratch = _scratch(q, k_view, kv.page_table.shape[1], chosen) + (_store_scratch(kv) if stores else [])
    kernel = functools.partial(
        _kernel,
        has_sinks=sinks is not None,
        stores=stores,
        chosen=chosen,
        page_size=kv.page_size,
        form=form,
        options=options,
    )
    in_hbm = pl.BlockSpec(memory_space=pltpu.HBM)
    # In all lanes, as a row's maximum and sum are.
    of_heads = [] if sinks is None else [jnp.broadcast_to(sinks[:, None], (len(sinks), LANES))]
    scalars, tokens = [tile_list, *new[:1]] if new else [tile_list], new[1:] if new else ()
    kept_views = [jax.ShapeDtypeStruct(view.shape, view.dtype) for view in (k_view, v_view)] if new else []
    first_view = len(scalars) + 2 + len(tokens)
    out: tuple[jax.Array, ...] = pl.pallas_call(
        kernel,
        out_shape=(jax.ShapeDtypeStruct(q.shape, q.dtype), *kept_views),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            in_specs=[in_hbm] * (4 + len(tokens)) + [pl.BlockSpec(memory_space=pltpu.VMEM)] * len(of_heads),
            out_specs=(in_hbm,) * (1 + len(kept_views)),
            scratch_shapes=scratch,
        ),
        input_output_aliases={first_view + i: 1 + i for i in range(len(kept_views))},
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=vmem_limit_bytes(scratch)),
        interpret=pltpu.InterpretParams() if interpret else False,
        name=name,
    )(*scalars, kv.page_table[:, None], q, *tokens, k_view, v_view, *of_heads)
    return out


def _scratch(q: jax.Array, k_view: jax.Array, num_pages: int, chosen: Plan) -> list[Any]:
    _, num_heads, head_dim = q.shape
    num_kv_heads = k_view.shape[1]
    rows = -(-chosen.tile_queries * num_heads // num_kv_heads // 16) * 16
    tokens = pltpu.VMEM((2, chosen.tile_queries, num_heads, head_dim), q.dtype)
    kv_tiles = pltpu.VMEM((chosen.num_buffers, chosen.tile_pages, *k_view.shape[1:]), k_view.dtype)
    row_lanes = pltpu.VMEM((num_kv_heads, rows, LANES), jnp.float32)
    return [
        tokens,
        tokens,
        kv_tiles,
        kv_tiles,
        pltpu.VMEM((num_kv_heads, rows, head_dim), q.dtype),
        row_lanes,
        row_lanes,
        pltpu.VMEM((num_kv_heads, rows, head_dim), jnp.float32),
        pltpu.SMEM((2, 1, num_pages), jnp.int32),
        *[pltpu.SemaphoreType.DMA((2,))] * 3,
        pltpu.SemaphoreType.DMA((chosen.num_buffers,)),
    ]


def _store_scratch(kv: PagedKv) -> list[Any]:
    """What `NewTokens` has besides."""
    heads, rows = (kv.num_kv_heads, kv.head_dim), tile_rows(kv.k)
    tile = heads if page_form(kv.k) is PageForm.HEADS else (kv.num_kv_heads, rows, kv.head_dim)
    return [
        pltpu.VMEM((2, 2, *heads), kv.dtype),
        pltpu.VMEM((2, 2, *tile), kv.dtype),
        *[pltpu.SemaphoreType.DMA((2,))] * 2,
    ]


def _kernel(
    tiles_ref: Any, *refs: Any, has_sinks: bool, stores: bool, chosen: Plan, page_size: int, form: PageForm,
    options: AttentionOptions,
) -> None:  # fmt: skip
    rest = iter(refs)

    def take(count: int) -> Any:
        return tuple(itertools.islice(rest, count))

    (slots,) = take(1) if stores else (None,)
    table, q = take(2)
    new, pages_in = take(2 if stores else 0), take(2)
    (sinks,) = take(1) if has_sinks else (None,)
    (out,) = take(1)
    k, v = take(2) if stores else pages_in  # the same memory
    q_buf, out_buf, k_buf, v_buf, queries, top, total, acc, row_buf, row_sem, q_sem, out_sem, kv_sem = take(13)
    tiles = QueryTiles(tiles_ref, _tile_tokens(chosen, page_size), options)
    pages = PageRing(tiles, table, row_buf, row_sem, (k, v), (k_buf, v_buf), kv_sem, page_size)
    inputs = TokenCopies(tiles, q, q_buf, q_sem)
    results = TokenCopies(tiles, out, out_buf, out_sem)
    tokens: TokensOfTiles = NoTokens()
    if stores:
        new_buf, tile_buf, load_sem, store_sem = take(4)
        tokens = NewTokens(
            tiles, slots, new, (k, v), (k_buf, v_buf), new_buf, tile_buf, load_sem, store_sem, page_size, form
        )
    state = RowsState(queries, top, total, acc)
    num_groups = q.shape[1] // k.shape[1]

    def work(num_queries: int, tile: jax.Array, ring: Ring) -> Ring:
        rows = Rows(state, num_queries, num_groups, form, options)
        part = pl.ds(0, num_queries)
        rows.begin(q_buf.at[tile % 2, part])
        first = tiles.column(tile, POSITION) - inputs.skipped(tile, num_queries)

        def add(kv_tile: jax.Array, ring: Ring) -> Ring:
            ring, number = pages.take(tile, kv_tile, ring)
            tokens.put(tile, kv_tile, number)
            start = kv_tile * tiles.tile_tokens
            rows.add_tile(k_buf.at[number], v_buf.at[number], start, tiles.kv_range(tile), first)
            return ring

        ring = lax.fori_loop(*tiles.kv_tiles(tile), add, ring)
        rows.end(out_buf.at[tile % 2, part], sinks)
        return ring

    def one_tile(tile: jax.Array, ring: Ring) -> Ring:
        inputs.start_load(tile + 1)
        tokens.start_load(tile + 1)
        inputs.wait_load(tile)
        tokens.wait_load(tile)
        results.wait_store(tile - 2)
        tokens.wait_store(tile - 2)
        ring = inputs.by_size(tile, work, ring)
        results.start_store(tile)
        return ring

    inputs.start_load(jnp.int32(0))
    tokens.start_load(jnp.int32(0))
    lax.fori_loop(0, tiles.count, one_tile, pages.fill())
    for last in (2, 1):
        results.wait_store(tiles.count - last)
        tokens.wait_store(tiles.count - last)


def _tile_tokens(chosen: Plan, page_size: int) -> int:
    return chosen.tile_pages * page_size
