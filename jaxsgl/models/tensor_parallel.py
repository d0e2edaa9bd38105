"""What a program that is traced knows of the devices it shares the model with: which part it computes, and their sums.

On a mesh of several devices each one runs the whole step on its own parts of the parameters and of the KV pages
(`engine/programs.py`); the arrays that a layer sees there are one device's. So layers, kernels and products are the
same on one device and on many, and only where parts must be brought together they call the functions below. On one
device these change nothing, and leave nothing in the program. Models and the engine's step call them.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.sharding import get_abstract_mesh

from pallas_kernels.order import is_order_fixed

DATA_AXIS, TENSOR_AXIS = "data", "tensor"


def num_parts() -> int:
    """How many devices share the model in the program that is being traced; 1 outside of `programs.each_device`."""
    mesh = get_abstract_mesh()
    return mesh.shape[TENSOR_AXIS] if TENSOR_AXIS in mesh.manual_axes else 1


def part_index() -> jax.Array:
    """Which part this device computes, int32; only where there are several."""
    return jax.lax.axis_index(TENSOR_AXIS)


def sum_of_parts(x: jax.Array) -> jax.Array:
    """The sum of all devices' `x`, on each of them; in fixed order, that of the devices.

    What adds up for many devices at once chooses its order by the number of bytes.
    """
    if num_parts() == 1:
        return x
    if is_order_fixed():
        return functools.reduce(jnp.add, list(jax.lax.all_gather(x, TENSOR_AXIS)))
    return jax.lax.psum(x, TENSOR_AXIS)


def on_first_part(x: jax.Array) -> jax.Array:
    """`x` on one device and zeros on the others: what must go once into a sum of parts, as a bias."""
    return x if num_parts() == 1 else jnp.where(part_index() == 0, x, jnp.zeros_like(x))


def of_this_part(x: jax.Array, axis: int = 0) -> jax.Array:
    """This device's part of an array that every device has whole."""
    parts = num_parts()
    if parts == 1:
        return x
    size = x.shape[axis] // parts
    return jax.lax.dynamic_slice_in_dim(x, part_index() * size, size, axis)


def all_parts(x: jax.Array, axis: int = 0) -> jax.Array:
    """The devices' `x`, one behind the other along `axis`, on each of them."""
    return x if num_parts() == 1 else jax.lax.all_gather(x, TENSOR_AXIS, axis=axis, tiled=True)
