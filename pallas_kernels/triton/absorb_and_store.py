"""`absorb_and_store` as a Pallas kernel for the Triton backend. Called through `triton.BACKEND`.

A program has a tile of tokens and some columns of one head's queries: it multiplies their unrotated part by the head's
matrix, and rotates the rotated part of its share of the tile. Programs of one head more, which there isn't, normalize,
rotate and store the entries of such shares, and after them the key of an index, or zeros. Products come in parts or
whole and are added up in float32, which XLA does again for each of its four kernels that read them. The pages are
aliased from input to output.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels import tuning
from pallas_kernels.latent import LatentQkv
from pallas_kernels.paged_kv import QUERY_DTYPES, PagedKv
from pallas_kernels.triton.common import MIN_DOT, tile_rows_for
from pallas_kernels.triton.tiles import Columns, load_rows, store_rows

# Numbers of a query that are multiplied at once, at most: few registers hold their parts.
_MOST_INPUTS = 64


def refuse_absorb_and_store(qkv: LatentQkv, pages: jax.Array) -> str | None:
    """Why this backend can't take the call, or None when it can."""
    size = qkv.heads.latent_size
    if size < MIN_DOT or size & (size - 1):
        return f"latents have {size} numbers; it takes powers of two from {MIN_DOT}"
    if qkv.heads.num_absorbing % MIN_DOT:
        return f"queries have {qkv.heads.num_absorbing} numbers without rotation; it takes multiples of {MIN_DOT}"
    if (pages.shape[3] != qkv.head_dim and not qkv.num_chosen) or pages.dtype not in QUERY_DTYPES:
        return f"the cache has {pages.shape[3]} {pages.dtype} numbers for entries of {qkv.head_dim}, which it can't pad"
    return None


def absorb_and_store(
    qkv: LatentQkv, pages: jax.Array, slots: jax.Array, interpret: bool
) -> tuple[jax.Array, jax.Array]:
    """See `backend.AbsorbAndStore`."""
    entries = None if qkv.entries_product is None else _in_parts(qkv.entries_product)
    qkv = dataclasses.replace(qkv, product=_in_parts(qkv.product), entries_product=entries)
    return _of_any_layer(qkv, pages, slots, interpret)


def _in_parts(product: jax.Array) -> jax.Array:
    """`[P, T, W]`."""
    return product if product.ndim == 3 else product[None]


@functools.partial(jax.jit, static_argnames="interpret")
def _of_any_layer(qkv: LatentQkv, pages: jax.Array, slots: jax.Array, interpret: bool) -> tuple[jax.Array, jax.Array]:
    """The same of products in parts."""
    heads, num_tokens = qkv.heads, qkv.num_tokens
    q = jax.ShapeDtypeStruct((num_tokens, heads.num_heads, qkv.head_dim), qkv.dtype)
    kv = PagedKv(pages, pages, slots[None], slots)
    blocks = tuning.blocks("absorb_and_store", "triton", tuning.shape_class(q, kv, num_tokens))
    tile_tokens = tile_rows_for(blocks["tile_tokens"])
    tile_columns = min(blocks["tile_columns"], heads.latent_size)
    products = [each for each in (qkv.product, qkv.entries_product) if each is not None]
    keys = [] if qkv.index is None else [qkv.index.keys]
    inputs = (*products, qkv.scales, heads.weights, qkv.cos, qkv.sin, slots, *keys, pages)
    out, stored = pl.pallas_call(
        functools.partial(
            _kernel,
            num_products=len(products),
            unrotated=heads.num_absorbing,
            eps=qkv.eps,
            tile_tokens=tile_tokens,
            tile_columns=tile_columns,
        ),
        out_shape=(q, jax.ShapeDtypeStruct(pages.shape, pages.dtype)),
        grid=(heads.latent_size // tile_columns, heads.num_heads + 1, pl.cdiv(num_tokens, tile_tokens)),
        input_output_aliases={len(inputs) - 1: 1},
        # The loop over a query's numbers is short, and its loads are many: nothing is copied ahead.
        compiler_params=plgpu.CompilerParams(num_warps=blocks["num_warps"], num_stages=1),
        interpret=interpret,
        name="absorb_and_store",
    )(*inputs)
    return out, stored


def _kernel(
    *refs: Any, num_products: int, unrotated: int, eps: float, tile_tokens: int, tile_columns: int
) -> None:  # fmt: skip
    products, (scales, weights, cos, sin, slots, *keys, _pages_in, q_out, pages_out) = (
        refs[:num_products],
        refs[num_products:],
    )
    num_heads, _, size = weights.shape
    place, head, tile = (pl.program_id(axis) for axis in range(3))
    first = tile * tile_tokens
    # The share of a tile's tokens that this program rotates or stores, besides its columns of all of them.
    share = max(1, tile_tokens // (size // tile_columns))
    mine = place * share + jnp.arange(share, dtype=jnp.int32)
    is_mine = (mine < tile_tokens) & (first + mine < q_out.shape[0])
    tokens = _Tokens(first + mine, is_mine, cos, sin)

    def make_queries() -> None:
        token = first + jnp.arange(tile_tokens, dtype=jnp.int32)
        is_real = token < q_out.shape[0]
        begin = head * (unrotated + tokens.num_rotated)
        width, columns = math.gcd(unrotated, _MOST_INPUTS), (place * tile_columns, tile_columns)
        precision = lax.Precision.HIGHEST if weights.dtype == jnp.float32 else None

        def add(turn: jax.Array, sums: jax.Array) -> jax.Array:
            q = _summed(products[0], token, is_real, (begin + turn * width, width)).astype(weights.dtype)
            row = turn * width + jnp.arange(width, dtype=jnp.int32)
            absorbing = load_rows(weights, (head, row), None, columns)
            return sums + lax.dot(q, absorbing, precision=precision, preferred_element_type=jnp.float32)

        zeros = jnp.zeros((tile_tokens, tile_columns), jnp.float32)
        absorbed = lax.fori_loop(0, unrotated // width, add, zeros)
        store_rows(q_out, (token, head), is_real, absorbed, columns)
        tokens.store_rotated(products[0], begin + unrotated, q_out, (tokens.token, head), size)

    def store_entries() -> None:
        row = products[-1]
        begin = row.shape[2] - size - tokens.num_rotated
        latent = _summed(row, tokens.token, is_mine, (begin, size))
        inverse_rms = lax.rsqrt(jnp.sum(latent * latent, axis=1) / size + eps)
        scale = plgpu.load(scales.at[jnp.arange(size, dtype=jnp.int32)]).astype(jnp.float32)
        slot = plgpu.load(slots.at[tokens.token], mask=is_mine, other=0)
        page_size = jnp.int32(pages_out.shape[2])
        where = (lax.div(slot, page_size), 0, lax.rem(slot, page_size))
        store_rows(pages_out, where, is_mine, latent * inverse_rms[:, None] * scale[None, :], (0, size))
        tokens.store_rotated(row, begin + size, pages_out, where, size)
        after = size + tokens.num_rotated
        if left := pages_out.shape[3] - after:
            width = pl.next_power_of_2(left)
            own = [load_rows(key, (tokens.token,), is_mine, (0, width, 1, left)) for key in keys]
            rest = own[0] if own else jnp.zeros((share, width), pages_out.dtype)
            store_rows(pages_out, where, is_mine, rest, (after, width, 1, left))

    pl.when(head < num_heads)(make_queries)
    pl.when(head == num_heads)(store_entries)


@dataclasses.dataclass(frozen=True)
class _Tokens:
    """Some tokens inside the kernel, and their angles."""

    token: jax.Array
    is_real: jax.Array
    cos: Any
    sin: Any

    @property
    def num_rotated(self) -> int:
        """R."""
        return 2 * int(self.cos.shape[2])

    def store_rotated(self, product: Any, begin: Any, ref: Any, index: tuple[Any, ...], to: int) -> None:
        """Writes the R columns of the product from `begin` on, rotated, to those of the ref from `to` on."""
        half = self.num_rotated // 2
        width = pl.next_power_of_2(half)
        a, b = (_summed(product, self.token, self.is_real, (at, width, 1, half)) for at in (begin, begin + half))
        cos, sin = (
            load_rows(table, (self.token, 0), self.is_real, (0, width, 1, half)) for table in (self.cos, self.sin)
        )
        store_rows(ref, index, self.is_real, a * cos - b * sin, (to, width, 1, half))
        store_rows(ref, index, self.is_real, b * cos + a * sin, (to + half, width, 1, half))


def _summed(product: Any, token: jax.Array, is_real: jax.Array, columns: Columns) -> jax.Array:
    """`[tokens, columns]` float32 of a product `[P, T, W]`, its parts added up in their order."""
    parts = [load_rows(product, (part, token), is_real, columns) for part in range(product.shape[0])]
    return functools.reduce(jnp.add, [each.astype(jnp.float32) for each in parts])
