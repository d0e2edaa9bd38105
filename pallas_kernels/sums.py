"""Sums over the last axis whose bits don't depend on how many rows are summed, and what is made of such sums.

XLA's CPU back end adds in another order for few rows than for many, so that a request's numbers would depend on its
company; nor is exp(x - maximum) the same where it fuses both. The C++ kernels have one order; without them, and on
other platforms, these are JAX's own functions and their programs those that they would be without this file. Called by
norms, by the choice of experts, and by samplers.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.native import sums as native


def row_sums(x: jax.Array, *, keepdims: bool = False) -> jax.Array:
    """`x [.., n]` summed over its last axis: `[..]`, or `[.., 1]` with `keepdims`."""
    if native.refuse(x) is not None:
        return jnp.sum(x, axis=-1, keepdims=keepdims)
    sums = native.of_rows(x, "sum")
    return sums[..., None] if keepdims else sums


def mean_squares(x: jax.Array) -> jax.Array:
    """The means of the squares of `x [.., n]` float32 over its last axis, `[.., 1]`."""
    if native.refuse(x) is not None:
        return jnp.mean(x * x, axis=-1, keepdims=True)
    return native.of_rows(x, "squares")[..., None] / x.shape[-1]


def mean_squares_of_all(x: jax.Array) -> jax.Array | None:
    """`mean_squares` of rows of which only some are wanted, where one call for all is faster; elsewhere None."""
    return None if native.refuse(x) is not None else mean_squares(x)


def log_sum_exp(x: jax.Array, *, keepdims: bool = False) -> jax.Array:
    """log(sum(exp(x))) over the last axis of `x [.., n]`, in which at least one number is finite."""
    if native.refuse(x) is not None:
        return jax.nn.logsumexp(x, axis=-1, keepdims=keepdims)
    top = native.of_rows(x, "top")[..., None]
    total = jnp.log(row_sums(jnp.exp(x - top), keepdims=True)) + top
    return total if keepdims else total[..., 0]


def softmax(x: jax.Array) -> jax.Array:
    """The softmax over the last axis of `x [.., n]`."""
    if native.refuse(x) is not None:
        return jax.nn.softmax(x, axis=-1)
    shares = jnp.exp(x - native.of_rows(x, "top")[..., None])
    return shares / row_sums(shares, keepdims=True)
