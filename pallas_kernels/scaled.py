"""Matrices of small numbers whose inputs share scales in groups, and rows that are rounded to float8 in groups.

Owns what a weight is: `(number - zero) * scale`; and how rows are rounded. Never knows checkpoints, nor where a model
keeps the parts. Called by models, by `api` and by backends.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.paged_kv import FLOAT8

ROW_GROUP = 128  # numbers of a row that share a scale
LARGEST_FLOAT8 = 448.0
MOST_NUMBERS = 2**31  # of a byte each, that kernels with offsets of 32 bits take (`triton.tiles`)
SMALLEST_TOP = 2.0**-80  # taken for the largest number of a group where it is less, so that scales are finite


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ScaledMatrix:
    """A matrix of O outputs and I inputs, whose inputs are in G groups; or a stack of those of E experts."""

    numbers: jax.Array
    """`[O, I]`: int4, int8, float8_e4m3fn, or bfloat16 on a CPU. A stack's: `[E, O, I]`."""
    scale: jax.Array
    """`[O, G]` float32, or `[E, O, G]`."""
    zero: jax.Array | None
    """As the scales: int8, float32 of what was packed for a GPU, or None for 0."""
    group: int = dataclasses.field(metadata={"static": True})
    """How many inputs share a scale; the last group may be cut."""
    block_outputs: int = dataclasses.field(default=1, metadata={"static": True})
    """How many outputs, of each expert, share their scales: equal are those from a multiple of it to the next."""

    @property
    def num_outputs(self) -> int:
        """O."""
        return self.numbers.shape[-2]

    @property
    def num_inputs(self) -> int:
        """I."""
        return self.numbers.shape[-1]


def refuse_rounding(weights: ScaledMatrix) -> str | None:
    """Why no kernel multiplies rows that are rounded in groups of `ROW_GROUP` with the weights, by format and sizes."""
    numbers = weights.numbers
    if numbers.dtype != FLOAT8 or weights.zero is not None:
        zeros = "" if weights.zero is None else " with zero points"
        return f"the weights are {numbers.dtype}{zeros}; it takes {FLOAT8.dtype}"
    if weights.num_inputs % ROW_GROUP or weights.group % ROW_GROUP:
        return f"{weights.num_inputs} inputs are in groups of {weights.group}; it takes multiples of {ROW_GROUP}"
    if numbers.size > MOST_NUMBERS:
        return f"the weights are {numbers.size} {numbers.dtype}; it takes {MOST_NUMBERS}"
    return None


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


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ScaledRows:
    """T rows of I numbers, rounded to float8 in groups of `ROW_GROUP`: a number times its group's scale is a value."""

    numbers: jax.Array
    """`[T, I]` float8_e4m3fn."""
    scale: jax.Array
    """`[I / ROW_GROUP, T]` float32: the largest of a group over `LARGEST_FLOAT8`. Those of a tile lie side by side."""
    dtype: jnp.dtype = dataclasses.field(metadata={"static": True})
    """Which the rows had before."""

    def __len__(self) -> int:
        """T."""
        return self.numbers.shape[0]

    def values(self, dtype: DTypeLike) -> jax.Array:
        """The rows `[T, I]` that are meant."""
        return widened(self.numbers, self.scale.T, None, ROW_GROUP, dtype)


def rounded_rows(x: jax.Array) -> ScaledRows:
    """Rows `[T, I]` of whole groups, rounded."""
    groups = x.astype(jnp.float32).reshape(len(x), -1, ROW_GROUP)
    top = jnp.maximum(jnp.max(jnp.abs(groups), axis=-1), SMALLEST_TOP)
    numbers = (groups * (LARGEST_FLOAT8 / top)[..., None]).astype(FLOAT8)
    return ScaledRows(numbers.reshape(x.shape), (top / LARGEST_FLOAT8).T, x.dtype)
