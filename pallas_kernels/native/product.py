"""Rows times bfloat16 weights in C++ (`product.cc`), for x86 processors. Called by models.

Most of a step's time on a CPU goes to such products; XLA's library packs the weights at each call.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.native import library
from pallas_kernels.target import target_device

_IN_STEP, _OUT_STEP = 32, 16


def refuse(x: jax.Array, weights: jax.Array) -> str | None:
    """Why x `[T, in]` times weights `[out, in]` can't run here, because of the arrays or of this machine; or None."""
    if target_device().platform != "cpu":
        return f"it needs a cpu, this is a {target_device().platform}"
    if x.dtype != jnp.float32 or weights.dtype != jnp.bfloat16:
        return f"it takes float32 rows and bfloat16 weights, not {x.dtype} and {weights.dtype}"
    num_out, num_in = weights.shape
    if num_in % _IN_STEP or num_out % _OUT_STEP:
        return f"the weights are {weights.shape}; it takes multiples of {(_OUT_STEP, _IN_STEP)}"
    return library.load()


def rows_product(x: jax.Array, weights: jax.Array, way: str | None = None) -> jax.Array:
    """x `[T, in]`, rounded to bfloat16, times weights `[out, in]`: float32 `[T, out]`, summed in float32.

    `way` forces one of the ways to multiply ("paired", "widened", "tiles"); None takes this processor's fastest one
    (`library.product_way`). "tiles" needs `library.refuse_tiles` to have returned None.
    """
    shape = jax.ShapeDtypeStruct((x.shape[0], weights.shape[0]), jnp.float32)
    call = jax.ffi.ffi_call(library.ROWS_PRODUCT, shape)
    out: jax.Array = call(x, weights, way=way or library.product_way())
    return out
