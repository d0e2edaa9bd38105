"""`rotate_and_store` as a Pallas kernel for the Triton backend. Called through `triton.BACKEND`.

A program takes a tile of tokens of one kv head: its query heads, its key and its value, which lie side by side in the
product. It adds the bias, normalizes, rotates, and writes queries to an array of their own and K and V to their pages;
the cache is aliased from input to output. Everything between load and store is float32.

Triton can't cut an array in two, so a head comes as pairs of arrays, the two sides of its rotation: one pair of halves,
or, for a cache of float8 words, four pairs of every fourth number, so that four numbers of a word meet in one place.
Arrays are powers of two long: of a half of 48 numbers 64 are read, the last 16 as zeros. The second half is written
with its zeros, which belong to a cache of 128, and so are zeros up to its end.
"""

import dataclasses
import functools
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels import tuning
from pallas_kernels.paged_kv import BITS, FLOAT8, FLOAT8_BITS, PagedKv, per_head_scale
from pallas_kernels.parts import total
from pallas_kernels.qkv import FusedQkv
from pallas_kernels.triton import float8
from pallas_kernels.triton.tiles import Columns, holds_words, index_of, load_rows, store_rows

# The least head size: its half is the row of an array, and Triton wants vectors of some width.
_MIN_HEAD_DIM = 16

# Both sides of a head's rotation, `[tokens, width]` each.
Pair: TypeAlias = tuple[jax.Array, jax.Array]


def refuse_rotate_and_store(qkv: FusedQkv, kv: PagedKv) -> str | None:
    """Why this backend can't take the call, or None when it can."""
    if qkv.num_kv_heads != kv.num_kv_heads:
        return f"the cache keeps {qkv.num_kv_heads} kv heads as {kv.num_kv_heads}; it takes as many as the model has"
    width, planes = kv.head_dim, float8.PLANES if kv.dtype == FLOAT8 else 1
    smallest = _MIN_HEAD_DIM * planes
    if width < smallest or width & (width - 1):
        return f"head size is {width}; with a {kv.dtype} cache it takes powers of two from {smallest}"
    if qkv.head_dim % (2 * planes):
        return f"heads of {qkv.head_dim} have halves that don't fill words of a {kv.dtype} cache"
    if kv.dtype in (BITS, FLOAT8_BITS):
        return "the cache holds bits of numbers as integers, as it does on a CPU"
    return None


def rotate_and_store(qkv: FusedQkv, kv: PagedKv, slots: jax.Array, interpret: bool) -> tuple[jax.Array, PagedKv]:
    """See `backend.RotateAndStore`."""
    return _of_any_layer(dataclasses.replace(qkv, layer=0), index_of(qkv.layer), kv, slots, interpret)


@functools.partial(jax.jit, static_argnames="interpret")
def _of_any_layer(
    qkv: FusedQkv, layer: jax.Array, kv: PagedKv, slots: jax.Array, interpret: bool
) -> tuple[jax.Array, PagedKv]:
    """The same of layer `[1]`."""
    num_tokens, num_kv_heads = qkv.num_tokens, qkv.num_kv_heads
    q: Any = jax.ShapeDtypeStruct((num_tokens, num_kv_heads * qkv.num_groups, kv.head_dim), qkv.dtype)
    blocks = tuning.blocks("rotate_and_store", "triton", tuning.shape_class(q, kv, num_tokens))
    optional = {
        "bias": qkv.bias,
        "q_norm": qkv.q_norm,
        "k_norm": qkv.k_norm,
        "k_scale": per_head_scale("k_scale", kv.k_scale, num_kv_heads),
        "v_scale": per_head_scale("v_scale", kv.v_scale, num_kv_heads),
    }
    vectors = {name: array for name, array in optional.items() if array is not None}
    pages = kv.k, kv.v
    if kv.dtype == FLOAT8:
        pages = float8.as_words(kv.k), float8.as_words(kv.v)
    first_page_input = 5 + len(vectors)
    q_out, *stored = pl.pallas_call(
        functools.partial(
            _kernel,
            names=tuple(vectors),
            eps=qkv.eps,
            tile_tokens=blocks["tile_tokens"],
            rotates_first=qkv.rotates_first,
            normalizes_values=qkv.normalizes_values,
            num_groups=qkv.num_groups,
        ),
        out_shape=(q, *(jax.ShapeDtypeStruct(each.shape, each.dtype) for each in pages)),
        grid=(num_kv_heads, pl.cdiv(num_tokens, blocks["tile_tokens"])),
        input_output_aliases={first_page_input: 1, first_page_input + 1: 2},
        compiler_params=plgpu.CompilerParams(num_warps=blocks["num_warps"]),
        interpret=interpret,
        name="rotate_and_store",
    )(layer, qkv.product, qkv.cos, qkv.sin, slots, *vectors.values(), *pages)
    if kv.dtype == FLOAT8:
        stored = [float8.from_words(each) for each in stored]
    return q_out, dataclasses.replace(kv, k=stored[0], v=stored[1])


@dataclasses.dataclass(frozen=True)
class _Head:
    """A tile of tokens of one kv head inside the kernel: how its rows come and become what is stored."""

    product: Any
    dtype: Any
    """Of the product as a whole."""
    vectors: dict[str, Any]
    """Refs by name: bias `[L, K, G + 2, H]`, norms `[L, H]`, scales `[K]`."""
    layer: jax.Array
    """`[1]`."""
    eps: float
    token: jax.Array
    is_real: jax.Array
    head: jax.Array

    def columns(self, planes: int) -> list[tuple[Columns, Columns]]:
        """Where both sides of each pair lie in a row."""
        half = self.product.shape[-1] // 2
        there = half // planes
        width = _power_of_two(there)
        return [((plane, width, planes, there), (half + plane, width, planes, there)) for plane in range(planes)]

    def vector(self, name: str, index: tuple[Any, ...], columns: Columns) -> jax.Array:
        """`[1, width]` of the layer's row."""
        return load_rows(self.vectors[name], (self.layer, *index), None, columns).astype(jnp.float32)

    def load(self, which: int, planes: int = 1) -> list[Pair]:
        """Row `which` of G + 2, with its bias; parts of the product are added up first."""
        index = self.token, self.head, which

        def side(columns: Columns) -> jax.Array:
            if len(self.product.shape) == 4:
                rows = load_rows(self.product, index, self.is_real, columns)
            else:
                parts = range(self.product.shape[0])
                rows = total((load_rows(self.product, (p, *index), self.is_real, columns) for p in parts), self.dtype)
            rows = rows.astype(jnp.float32)
            if "bias" not in self.vectors:
                return rows
            return rows + self.vector("bias", (self.head, which), columns)

        return [(side(first), side(second)) for first, second in self.columns(planes)]

    def normalized(self, pairs: list[Pair], name: str) -> list[Pair]:
        """The pairs brought to unit mean square, times the scale of that name; as they are where there is no norm."""
        if name not in self.vectors:
            return pairs
        inverse_rms, columns = self.inverse_rms(pairs), self.columns(len(pairs))
        return [
            (a * inverse_rms * self.vector(name, (), left), b * inverse_rms * self.vector(name, (), right))
            for (a, b), (left, right) in zip(pairs, columns, strict=True)
        ]

    def inverse_rms(self, pairs: list[Pair]) -> jax.Array:
        """`[tokens, 1]`: what brings the pairs of a head to unit mean square."""
        squares = [jnp.sum(side * side, axis=1) for pair in pairs for side in pair]
        return lax.rsqrt(functools.reduce(jnp.add, squares) / self.product.shape[-1] + self.eps)[:, None]

    def store_pages(self, pages: Any, scale: str, where: tuple[Any, ...], pairs: list[Pair]) -> None:
        """Write K or V as `store_kv` would: the rounded numbers over the cache's scale, in the cache's format."""
        if scale in self.vectors:
            factor = self.vectors[scale][self.head]
            pairs = [tuple(side.astype(self.dtype).astype(jnp.float32) / factor for side in pair) for pair in pairs]
        if not holds_words(pages):
            self.store(pages, where, pairs)
            return
        left, right = (float8.pack(tuple(side)) for side in zip(*pairs, strict=True))
        self.store(pages, where, [(left, right)])

    def store(self, ref: Any, index: tuple[Any, ...], pairs: list[Pair]) -> None:
        """Write pairs that lie one after the other: one pair of halves, then zeros to the end of the ref's row."""
        ((left, right),) = pairs
        half = self.product.shape[-1] // 2 // (float8.PLANES if holds_words(ref) else 1)
        width = left.shape[1]
        store_rows(ref, index, self.is_real, left, (0, width, 1, half))
        store_rows(ref, index, self.is_real, right, (half, width))
        begin = half + width
        if missing := ref.shape[-1] - begin:
            zeros = jnp.zeros((left.shape[0], _power_of_two(missing)), ref.dtype)
            store_rows(ref, index, self.is_real, zeros, (begin, zeros.shape[1], 1, missing))


def _power_of_two(number: int) -> int:
    """The least one that isn't smaller."""
    return 1 << (number - 1).bit_length()


def _kernel(
    layer_ref: Any, product_ref: Any, cos_ref: Any, sin_ref: Any, slots_ref: Any, *refs: Any,
    names: tuple[str, ...], eps: float, tile_tokens: int, rotates_first: bool, normalizes_values: bool, num_groups: int,
) -> None:  # fmt: skip
    _k_in, _v_in, q_out, k_out, v_out = refs[len(names) :]
    num_tokens, page_size = product_ref.shape[-4], k_out.shape[2]
    token = pl.program_id(1) * tile_tokens + jnp.arange(tile_tokens, dtype=jnp.int32)
    layer = jnp.full((1,), layer_ref[0], jnp.int32)
    head = _Head(
        product_ref, q_out.dtype, dict(zip(names, refs, strict=False)), layer, eps, token, token < num_tokens,
        pl.program_id(0),
    )  # fmt: skip
    planes = float8.PLANES if holds_words(k_out) else 1

    # All loads before the first store: more bytes in flight.
    queries = [head.load(which) for which in range(num_groups)]
    key, value = (head.load(which, planes) for which in (num_groups, num_groups + 1))
    slot = plgpu.load(slots_ref.at[token], mask=head.is_real, other=0)

    def rotated(pairs: list[Pair]) -> list[Pair]:
        turned = []
        for (a, b), (columns, _) in zip(pairs, head.columns(len(pairs)), strict=True):
            cos, sin = (load_rows(ref, (token, 0), head.is_real, columns) for ref in (cos_ref, sin_ref))
            turned.append((a * cos - b * sin, b * cos + a * sin))
        return turned

    def finished(pairs: list[Pair], norm: str) -> list[Pair]:
        return head.normalized(rotated(pairs), norm) if rotates_first else rotated(head.normalized(pairs, norm))

    if normalizes_values:
        inverse_rms = head.inverse_rms(value)
        value = [(a * inverse_rms, b * inverse_rms) for a, b in value]
    where = (lax.div(slot, jnp.int32(page_size)), head.head, lax.rem(slot, jnp.int32(page_size)))
    head.store_pages(k_out, "k_scale", where, finished(key, "k_norm"))
    head.store_pages(v_out, "v_scale", where, value)
    for group, query in enumerate(queries):
        head.store(q_out, (token, head.head * num_groups + group), finished(query, "q_norm"))
