"""Matrices of small numbers whose inputs share scales in groups, as `quantized_product` takes them.

Owns what a weight is: `(number - zero) * scale`. Never knows checkpoints, nor where a model keeps the parts. Called by
models, by `api` and by backends.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ScaledMatrix:
    """A matrix of O outputs and I inputs, whose inputs are in G groups."""

    numbers: jax.Array
    """`[O, I]`: int4, int8, float8_e4m3fn, or bfloat16 on a CPU."""
    scale: jax.Array
    """`[O, G]` float32."""
    zero: jax.Array | None
    """`[O, G]` int8, or None for 0."""
    group: int = dataclasses.field(metadata={"static": True})
    """How many inputs share a scale; the last group may be cut."""

    @property
    def num_outputs(self) -> int:
        """O."""
        return self.numbers.shape[0]

    @property
    def num_inputs(self) -> int:
        """I."""
        return self.numbers.shape[1]


def widened(numbers: jax.Array, scale: jax.Array, zero: jax.Array | None, group: int, dtype: DTypeLike) -> jax.Array:
    """The weights `[..., I]` of numbers `[..., I]`, scales and zeros `[..., G]`, rounded once, from float32."""
    values = numbers.astype(jnp.float32)
    if zero is not None:
        values = values - per_input(zero, group, numbers.shape[-1]).astype(jnp.float32)
    return (values * per_input(scale, group, numbers.shape[-1])).astype(dtype)


def per_input(of_groups: jax.Array, group: int, num_inputs: int) -> jax.Array:
    """`[..., G]` as `[..., I]`, or `[..., 1]` for one group."""
    if of_groups.shape[-1] == 1:
        return of_groups
    return jnp.repeat(of_groups, group, axis=-1)[..., :num_inputs]
