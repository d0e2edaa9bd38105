"""Rows times bfloat16, float32 or int8 weights in C++ (`product.cc`, `product_int8.cc`), for x86 processors.

Most of a step's time on a CPU goes to such products; XLA's library packs the weights at each call. A row's result
depends neither on the other rows nor on their number. Called by models.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.native import library
from pallas_kernels.target import target_device

TWO_WORDS = 32  # of `row_bits`
BLOCK_OF_WORDS = 512  # inputs that are rounded at once where all have one scale
OUT_STEP = 16  # weights' outputs come in multiples of it
_IN_STEP, _FLOAT_IN_STEP = 32, 16
_MOST_IN_GROUP = 512


def refuse(x: jax.Array, weights: jax.Array | jax.ShapeDtypeStruct) -> str | None:
    """Why x `[T, in]` times weights `[out, in]` can't run here, because of the arrays or of this machine; or None."""
    return _refuse_arrays(x, weights, "bfloat16", "weights") or library.load()


def refuse_float(x: jax.Array, weights: jax.Array | jax.ShapeDtypeStruct) -> str | None:
    """Why `float_product` can't run here, because of the arrays or of this machine; or None."""
    return _refuse_arrays(x, weights, "float32", "weights", _FLOAT_IN_STEP) or library.load(library.GROUPED)


def float_product(x: jax.Array, weights: jax.Array) -> jax.Array:
    """x `[T, in]` times weights `[out, in]`, both float32: float32 `[T, out]`. A grouped product with one expert."""
    call = jax.ffi.ffi_call(library.GROUPED_PRODUCT, jax.ShapeDtypeStruct((x.shape[0], weights.shape[0]), jnp.float32))
    no_tokens, size = jnp.zeros(1, jnp.int32), jnp.full(1, x.shape[0], jnp.int32)
    out: jax.Array = call(x, no_tokens, size, weights[None], of_tokens=False, way="widened")
    return out


def rows_product(x: jax.Array, weights: jax.Array, way: str | None = None, activation: str | None = None) -> jax.Array:
    """x `[T, in]`, rounded to bfloat16, times weights `[out, in]`: float32 `[T, out]`, summed in float32.

    With an `activation` ("silu", "gelu_tanh") of weights `[2 * out, in]`, a gate's and then `up`'s, it is
    activation(x gate^T) * (x up^T): the gate's results are read again while they are in the cache.

    `way` forces one of the ways to multiply ("paired", "widened", "tiles"); None takes this processor's fastest one
    (`library.product_way`). "tiles" needs `library.refuse_tiles` to have returned None.
    """
    call = jax.ffi.ffi_call(library.ROWS_PRODUCT, _results(x, weights.shape[0], activation))
    out: jax.Array = call(x, weights, activation=activation or "", way=way or library.product_way())
    return out


def refuse_int8(x: jax.Array, numbers: jax.Array, scale: jax.Array, group: int) -> str | None:
    """Why `int8_product` can't run here, because of the arrays or of this machine; or None."""
    if reason := _refuse_arrays(x, numbers, "int8", "numbers"):
        return reason
    if scale.shape[1] > 1 and (group % _IN_STEP or group > _MOST_IN_GROUP):
        return f"groups have {group} inputs; it takes multiples of {_IN_STEP} up to {_MOST_IN_GROUP}"
    return library.load(library.INTEGERS)


def int8_product(
    x: jax.Array,
    numbers: jax.Array,
    scale: jax.Array,
    group: int,
    row_bits: int = 16,
    activation: str | None = None,
) -> jax.Array:
    """x `[T, in]` times weights: numbers `[out, in]` int8 times scale `[out, G]`, one for each `group` inputs.

    Returns float32 `[T, out]`. Blocks of x (a group's inputs; if G is 1, 512) become integers of `row_bits`:
    16, or 32 (`in_two_words`). Beyond that, each block's sum is exact. `activation`: as in `rows_product`.
    """
    if row_bits == TWO_WORDS:
        assert activation is None, "a gate would be activated twice"
        block = group if scale.shape[1] > 1 else BLOCK_OF_WORDS
        return in_two_words(x, block, lambda words: int8_product(words, numbers, scale, group))
    call = jax.ffi.ffi_call(library.INT8_PRODUCT, _results(x, numbers.shape[0], activation))
    out: jax.Array = call(x, numbers, scale, activation=activation or "", group=np.int64(group))
    return out


def refuse_gate(num_outputs: int) -> str | None:
    """Why a gated product can't have weights with so many outputs, or None."""
    if num_outputs % (2 * OUT_STEP):
        return f"gate and up have {num_outputs} outputs; it takes multiples of {2 * OUT_STEP}"
    return None


def _results(x: jax.Array, num_outputs: int, activation: str | None) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((x.shape[0], num_outputs // (2 if activation else 1)), jnp.float32)


def in_two_words(x: jax.Array, block: int, multiply: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """`multiply` times x `[T, in]` with the error of float32, though it rounds blocks of so many inputs to 16 bits.

    Twice the work: x is multiplied as it is rounded, and so is what that leaves of it.
    """
    num_in = x.shape[1]
    blocks = jnp.pad(x, ((0, 0), (0, -num_in % block))).reshape(len(x), -1, block)
    step = jnp.abs(blocks).max(axis=-1, keepdims=True) / 32767
    words = jnp.round(blocks / jnp.maximum(step, jnp.finfo(jnp.float32).tiny)) * step
    rounded = words.reshape(len(x), -1)[:, :num_in]
    return multiply(rounded) + multiply(x - rounded)


def _refuse_arrays(
    x: jax.Array, weights: jax.Array | jax.ShapeDtypeStruct, dtype: str, what: str, in_step: int = _IN_STEP
) -> str | None:
    """Why the kernels for weights of `dtype`, which errors call `what`, can't take these arrays on this platform."""
    if target_device().platform != "cpu":
        return f"it needs a cpu, this is a {target_device().platform}"
    if x.dtype != jnp.float32 or weights.dtype != jnp.dtype(dtype):
        return f"it takes float32 rows and {dtype} {what}, not {x.dtype} and {weights.dtype}"
    num_out, num_in = weights.shape
    if num_in % in_step or num_out % OUT_STEP:
        return f"the weights are {weights.shape}; it takes multiples of {(OUT_STEP, in_step)}"
    return None
