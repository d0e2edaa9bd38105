"""What a program that is traced knows of the devices it shares the model with: which part it computes, and their sums.

On a mesh of several devices each one runs the whole step on its own parts of the parameters and of the KV pages
(`engine/programs.py`); the arrays that a layer sees there are one device's. So layers, kernels and products are the
same on one device and on many, and only where parts must be brought together they call the functions below. On one
device these change nothing, and leave nothing in the program. Models and the engine's step call them.

The devices are those of one rank, which share its tokens, or of several ranks with tokens of their own
(`--enable-dp-attention`). Attention, embedding and head are shared within a rank, and ranks have copies of them. MLPs
and experts are shared by all devices, which so need the tokens of all ranks:

    TokensOfRanks.gathered   [T, ..] of this rank -> [M, ..] of all ranks
    MLP or experts           this device's part, for all of them
    TokensOfRanks.summed     [M, ..] of each device -> the sum [T, ..] for the rank's own tokens

T is that of the rank with most, so that where one rank extends a prompt while others decode, most of the R T places are
padding. Attention computes it, each rank for itself. A step may have fewer places for what follows: M, into which the
tokens that are none are moved once they are gathered.
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


class TokensOfRanks:
    """The tokens of all ranks in the places where MLPs and experts compute them, for all layers of a step.

    Args:
      is_token: `[T]` which of this rank's are no padding; None: all are.
      num_places: M, enough for the tokens of all ranks; 0: all R T places are computed, rank after rank.

    Attributes:
      are_shared: whether there are several ranks. One rank has its tokens as they are.
      is_token: `[M]` which are no padding; None: all are.
    """

    def __init__(self, is_token: jax.Array | None, num_places: int = 0) -> None:
        self.are_shared = num_ranks() > 1
        self._num_places = num_places
        self.is_token = is_token
        if not self.are_shared:
            return
        self.is_token = jax.tree.map(_of_all_ranks, is_token)
        if num_places:
            flags = self.is_token
            assert flags is not None
            places = jnp.cumsum(flags, dtype=jnp.int32) - 1
            self._places = jnp.where(flags, places, num_places)  # [R T], past the last one for padding
            numbers = jnp.arange(len(flags), dtype=jnp.int32)
            self._tokens = jnp.zeros(num_places, jnp.int32).at[self._places].set(numbers, mode="drop")  # [M]
            self.is_token = jnp.arange(num_places) <= places[-1]

    def gathered(self, x: TreeT) -> TreeT:
        """Arrays `[T, ..]` of this rank's tokens: those of all ranks `[M, ..]`. Padding is a copy of some token."""
        if not self.are_shared:
            return x
        of_all: TreeT = jax.tree.map(_of_all_ranks, x)
        return jax.tree.map(lambda array: array[self._tokens], of_all) if self._num_places else of_all

    def of_this_rank(self, x: jax.Array) -> jax.Array:
        """This rank's `[T, ..]` of what each device has for the tokens of all ranks `[M, ..]`; 0 for padding."""
        return _of_this_rank(self._spread(x)) if self.are_shared else x

    def summed(self, x: jax.Array) -> jax.Array:
        """The sum of all devices' `x [M, ..]`, of the tokens of this rank alone: `[T, ..]`, as `sum_of_parts` adds."""
        if not self.are_shared:
            return sum_of_parts(x)
        x = self._spread(x)
        if is_order_fixed():
            return functools.reduce(jnp.add, map(_of_this_rank, jax.lax.all_gather(x, OF_ALL)))
        return sum_of_parts(jax.lax.psum_scatter(x, DATA_AXIS, tiled=True))

    def _spread(self, x: jax.Array) -> jax.Array:
        """`[M, ..]` in the places of all ranks `[R T, ..]`."""
        return x.at[self._places].get(mode="fill", fill_value=0) if self._num_places else x


def _of_all_ranks(x: jax.Array) -> jax.Array:
    return jax.lax.all_gather(x, DATA_AXIS, tiled=True)


def _of_this_rank(x: jax.Array) -> jax.Array:
    size = len(x) // num_ranks()
    return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(DATA_AXIS) * size, size)


def on_first_part(x: jax.Array, logical: str) -> jax.Array:
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
    """The `x` of the devices that share a logical axis, one after the other along `axis`, on each of them."""
    return x if num_parts(logical) == 1 else jax.lax.all_gather(x, _shared_by(logical), axis=axis, tiled=True)
