"""Rows times the weights of their experts in C++ (`grouped_product.h`), for x86 processors. Called through
`native.backend`.

It reads the weights of the experts that have rows, where they lie. XLA's own ways multiply with all experts, or copy
the weights that they choose.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.experts import Groups
from pallas_kernels.native import library
from pallas_kernels.native.product import BLOCK_OF_WORDS, TWO_WORDS, in_two_words

# Of the weights' out and in.
_STEPS = {jnp.dtype(jnp.bfloat16): (16, 32), jnp.dtype(jnp.float32): (16, 16), jnp.dtype(jnp.int8): (16, 32)}


def refuse_grouped_product(x: jax.Array, groups: Groups, weights: jax.Array) -> str | None:
    """Why x times weights `[E, out, in]` can't run here, because of the arrays or of this machine; or None."""
    if x.dtype != jnp.float32 or weights.dtype not in _STEPS:
        return f"it takes float32 rows and bfloat16, float32 or int8 weights, not {x.dtype} and {weights.dtype}"
    steps = _STEPS[weights.dtype]
    if any(size % step for size, step in zip(weights.shape[1:], steps, strict=True)):
        return f"the weights are {weights.shape}; with {weights.dtype} it takes multiples of {steps}"
    return library.load(library.INTEGERS if weights.dtype == jnp.int8 else library.GROUPED)


def grouped_product(x: jax.Array, groups: Groups, weights: jax.Array, of_tokens: bool, interpret: bool) -> jax.Array:
    """See `backend.GroupedProduct`. Rows are rounded as in `product.rows_product` and `product.int8_product`."""
    shape = jax.ShapeDtypeStruct((groups.num_places, weights.shape[1]), jnp.float32)
    if weights.dtype == jnp.int8:
        return grouped_int8_product(x, groups, weights, of_tokens, 16)
    call = jax.ffi.ffi_call(library.GROUPED_PRODUCT, shape)
    way = library.product_way() if weights.dtype == jnp.bfloat16 else "widened"
    out: jax.Array = call(x, groups.tokens, groups.sizes, weights, of_tokens=of_tokens, way=way)
    return out


def grouped_int8_product(x: jax.Array, groups: Groups, weights: jax.Array, of_tokens: bool, row_bits: int) -> jax.Array:
    """`grouped_product` with int8 weights. Rows become integers of `row_bits`, as in `product.int8_product`."""
    if row_bits == TWO_WORDS:
        return in_two_words(
            x, BLOCK_OF_WORDS, lambda words: grouped_int8_product(words, groups, weights, of_tokens, 16)
        )
    call = jax.ffi.ffi_call(
        library.GROUPED_INT8_PRODUCT, jax.ShapeDtypeStruct((groups.num_places, weights.shape[1]), jnp.float32)
    )
    sums: jax.Array = call(x, groups.tokens, groups.sizes, weights, of_tokens=of_tokens)
    return sums
