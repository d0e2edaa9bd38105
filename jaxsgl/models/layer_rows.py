"""The rows of one layer in the vectors that all layers share, so that a CPU compiles the code of one layer only.

XLA compiles equal kernels once. A kernel that knows its row is equal to no other layer's: with 28 layers it would be
compiled 28 times, in each program. So a CPU's kernels get the row's index from memory. Accelerators' kernels take the
stack and the index, as `pallas_kernels` has it. Knows no weights but those vectors. Used by `dense` and `layers`.
"""

from __future__ import annotations

from typing import TypeAlias

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from pallas_kernels.target import target_device

Row: TypeAlias = tuple[jax.Array, int]  # a stack of vectors `[L, ...]`, and which of them


class LayerRows:
    """Picks rows during one trace of the model."""

    def __init__(self, num_layers: int, positions_T: jax.Array, activations: DTypeLike) -> None:
        self._activations = activations
        self._indices = _indices_in_memory(num_layers, positions_T) if target_device().platform == "cpu" else None

    def of(self, stack: nnx.Param[jax.Array] | None, layer: int) -> Row | None:
        """Row `layer` of a stack `[L, ...]`; None where the model has no such vectors."""
        vectors = self.stack(stack, layer)
        return None if vectors is None else (vectors, self.row(layer))

    def stack(self, stack: nnx.Param[jax.Array] | None, layer: int) -> jax.Array | None:
        """The stack, or what is left of it for `layer`; which row that layer has in it, `row` says."""
        if stack is None or self._indices is None:
            return None if stack is None else stack[...]
        # Converted before it is cut: XLA would make an array of its own of each row that is cut in 16 bits.
        wide = stack[...].astype(jnp.promote_types(stack.dtype, self._activations))
        return wide.at[self._indices[layer]].get(mode="promise_in_bounds")[None]

    def row(self, layer: int) -> int:
        """The row of `layer` in each stack that `stack` returns for it."""
        return layer if self._indices is None else 0


def _indices_in_memory(num_layers: int, positions_T: jax.Array) -> tuple[jax.Array, ...]:
    """0 to num_layers - 1, each in an array that XLA knows nothing about: it looks into no branch of a condition.

    An optimization barrier would not do, since XLA removes it before it forms kernels.
    """
    numbers = range(num_layers)
    indices: tuple[jax.Array, ...] = jax.lax.cond(
        positions_T[0] >= 0, lambda: tuple(map(jnp.int32, numbers)), lambda: tuple(jnp.int32(0) for _ in numbers)
    )
    return indices
