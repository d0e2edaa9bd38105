"""What a program that is traced knows of the devices it shares the model with: which part it computes, and their sums.

On a mesh of several devices each one runs the whole step on its own parts of the parameters and of the KV pages
(`engine/programs.py`); the arrays that a layer sees there are one device's. So layers, kernels and products are the
same on one device and on many, and only where parts must be brought together they call the functions below. On one
device these change nothing, and leave nothing in the program. Models and the engine's step call them.

The devices are those of one rank, which share its tokens, or of several ranks with tokens of their own
(`--enable-dp-attention`). Attention, embedding and head are shared within a rank, and ranks have copies of them. MLPs
and experts are shared by all devices, which so need the tokens of all ranks:

    of_all_ranks(x)      [T, ..] of this rank -> [R T, ..]
    MLP or experts       this device's part, for all of them
    sum_for_this_rank    [R T, ..] of each device -> the sum [T, ..] for the rank's own tokens
"""

from __future__ import annotations

import functools
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, get_abstract_mesh

from pallas_kernels.order import is_order_fixed

DATA_AXIS, TENSOR_AXIS = "data", "tensor"
OF_RANK, OF_ALL = (TENSOR_AXIS,), (DATA_AXIS, TENSOR_AXIS)
# By which axes of the mesh a logical axis of parameters and buffers is split.
MESH_AXES_OF = {"kv_heads": OF_RANK, "key_heads": OF_RANK, "vocab": OF_RANK, "ffn": OF_ALL, "experts": OF_ALL}

TreeT = TypeVar("TreeT")


def mesh_axes(logical: str | None, mesh: Mesh | AbstractMesh) -> str | tuple[str, ...] | None:
    """What splits a logical axis over `mesh`, as a `PartitionSpec` names it; None: nothing does."""
    names = tuple(name for name in MESH_AXES_OF.get(logical or "", ()) if name == TENSOR_AXIS or mesh.shape[name] > 1)
    return names if len(names) > 1 else names[0] if names else None


def num_parts(logical: str = "kv_heads") -> int:
    """How many devices share a logical axis in the program that is being traced; 1 outside of `programs.each_device`.

    Without an argument: those of the rank.
    """
    mesh = get_abstract_mesh()
    if TENSOR_AXIS not in mesh.manual_axes:
        return 1
    count = mesh.shape[TENSOR_AXIS]
    return count * mesh.shape[DATA_AXIS] if DATA_AXIS in MESH_AXES_OF[logical] else count


def num_ranks() -> int:
    """How many ranks have tokens of their own in the program that is being traced."""
    mesh = get_abstract_mesh()
    return mesh.shape[DATA_AXIS] if DATA_AXIS in mesh.manual_axes else 1


def part_index(logical: str = "kv_heads") -> jax.Array:
    """Which part of a logical axis this device computes, int32; only where there are several."""
    return jax.lax.axis_index(_shared_by(logical))


def _shared_by(logical: str) -> str | tuple[str, ...]:
    axes = mesh_axes(logical, get_abstract_mesh())
    assert axes is not None
    return axes


def sum_of_parts(x: jax.Array) -> jax.Array:
    """The sum of the `x` of all devices of the rank, on each of them; in fixed order, that of the devices.

    What adds up for many devices at once chooses its order by the number of bytes.
    """
    if num_parts() == 1:
        return x
    if is_order_fixed():
        return functools.reduce(jnp.add, list(jax.lax.all_gather(x, TENSOR_AXIS)))
    return jax.lax.psum(x, TENSOR_AXIS)


def of_all_ranks(x: TreeT) -> TreeT:
    """Arrays `[T, ..]` of this rank's tokens: those of all ranks `[R T, ..]`, rank after rank."""
    if num_ranks() == 1:
        return x
    gathered: TreeT = jax.tree.map(lambda array: jax.lax.all_gather(array, DATA_AXIS, tiled=True), x)
    return gathered


def of_this_rank(x: jax.Array) -> jax.Array:
    """This rank's `[T, ..]` of what each device has for the tokens of all ranks `[R T, ..]`."""
    ranks = num_ranks()
    if ranks == 1:
        return x
    size = len(x) // ranks
    return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(DATA_AXIS) * size, size)


def sum_for_this_rank(x: jax.Array) -> jax.Array:
    """The sum of all devices' `x [R T, ..]`, of the tokens of this rank alone: `[T, ..]`, as `sum_of_parts` adds."""
    if num_ranks() == 1:
        return sum_of_parts(x)
    if is_order_fixed():
        return functools.reduce(jnp.add, map(of_this_rank, jax.lax.all_gather(x, OF_ALL)))
    return sum_of_parts(jax.lax.psum_scatter(x, DATA_AXIS, tiled=True))


def on_first_part(x: jax.Array, logical: str = "kv_heads") -> jax.Array:
    """`x` on one device and zeros on the others: what must go once into a sum of parts, as a bias."""
    return x if num_parts(logical) == 1 else jnp.where(part_index(logical) == 0, x, jnp.zeros_like(x))


def of_this_part(x: jax.Array, axis: int = 0) -> jax.Array:
    """This device's part of an array that every device of the rank has whole."""
    parts = num_parts()
    if parts == 1:
        return x
    size = x.shape[axis] // parts
    return jax.lax.dynamic_slice_in_dim(x, part_index() * size, size, axis)


def all_parts(x: jax.Array, axis: int = 0, logical: str = "kv_heads") -> jax.Array:
    """The `x` of the devices that share a logical axis, one behind the other along `axis`, on each of them."""
    return x if num_parts(logical) == 1 else jax.lax.all_gather(x, _shared_by(logical), axis=axis, tiled=True)
