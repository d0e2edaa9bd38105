"""RMSNorm, and the sum of the residual stream that precedes it, as XLA computes them: the definition of `add_and_norm`.

Owns the arithmetic of norms over an array's last axis. Never knows layers. Used by models, and by `qkv` for heads.
"""

import dataclasses
import functools
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from pallas_kernels.experts import Choices
from pallas_kernels.parts import whole
from pallas_kernels.sums import mean_squares, means


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Biased:
    """A product, to which its bias is yet to be added."""

    product: jax.Array
    """`[T, D]`, or float32 parts of it `[P, T, D]`."""
    bias: jax.Array
    """`[D]`."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Finished:
    """A sum of updates on which something is still to be done, in this order, before it is added, and after that."""

    updates: tuple["Update", ...]
    scales: jax.Array | None = None
    """`[L, D]`, of which the sum's own RMSNorm takes `row`; None: it has none."""
    row: int | jax.Array | None = None
    """None where there are no scales."""
    eps: float = dataclasses.field(default=0.0, metadata={"static": True})
    """Of that norm."""
    centred: bool = dataclasses.field(default=False, metadata={"static": True})
    """Whether its mean is taken off, first of all."""
    factor: float | None = dataclasses.field(default=None, metadata={"static": True})
    """What it is multiplied by, last; None: nothing."""
    stream_factors: jax.Array | None = None
    """`[L, 1]`, by whose row `stream_row` the residual stream with the sum is multiplied; None: by none."""
    stream_row: int | jax.Array | None = None
    """None where there are no such factors."""


# What is added to the residual stream `[T, D]`: that, float32 parts of it `[P, T, D]`, one of these before its bias is
# added, or the results of experts.
Update: TypeAlias = jax.Array | Biased | Choices
Addend: TypeAlias = Update | Finished


def rms_norm(x: jax.Array, scale: jax.Array, eps: float, mean_square: jax.Array | None = None) -> jax.Array:
    """The last axis of x brought to unit mean square (arXiv 1910.07467), times `scale`; statistics in float32.

    Multiplied in the wider of both dtypes, returned in x's. `mean_square [.., 1]` float32 is given where x is only a
    part of what is normalized.
    """
    x32 = x.astype(jnp.float32)
    if mean_square is None:
        mean_square = mean_squares(x32)
    inverse_rms = jax.lax.rsqrt(mean_square + eps)
    return ((x32 * inverse_rms).astype(jnp.promote_types(x.dtype, scale.dtype)) * scale).astype(x.dtype)


def centred(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """The last axis of x less its mean, in `dtype`; the mean is float32. RMSNorm of that is LayerNorm of x."""
    x32 = x.astype(jnp.float32)
    return (x32 - means(x32)).astype(dtype)


def multiplied(x: jax.Array, factor: float | npt.NDArray[np.float32]) -> jax.Array:
    """x times a factor that is not rounded to its dtype first: that would be off the same way in each layer."""
    return (x.astype(jnp.float32) * factor).astype(x.dtype)


def scale_of(stack: jax.Array, row: int | jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Row `row` of the scales of norms, for numbers in `dtype`: not narrowed, since some scales need float32."""
    return row_of(stack, row, jnp.promote_types(stack.dtype, dtype))


def row_of(stack: jax.Array, row: int | jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Row `row` of an array of vectors, in `dtype`."""
    return stack.astype(dtype)[row]


def add_then_norm(
    x: jax.Array, update: Addend, scales: jax.Array, row: int, eps: float, biases: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """See `add_and_norm`."""
    x = stream_after(x, update)
    normed = rms_norm(x, scale_of(scales, row, x.dtype), eps)
    return x, normed if biases is None else biased(normed, biases, row)


def stream_after(x: jax.Array, update: Addend) -> jax.Array:
    """The residual stream after an update."""
    x = x + sum_parts(update, x)
    if not isinstance(update, Finished) or update.stream_factors is None or update.stream_row is None:
        return x
    return x * row_of(update.stream_factors, update.stream_row, x.dtype)


def biased(normed: jax.Array, biases: jax.Array, row: int) -> jax.Array:
    """What is normalized, with row `row` of the biases `[L, D]`."""
    return (normed.astype(jnp.float32) + row_of(biases, row, jnp.dtype(jnp.float32))).astype(normed.dtype)


def sum_parts(update: Addend, x: jax.Array | jax.ShapeDtypeStruct) -> jax.Array:
    """An update of x as one array in x's dtype, the sum of its parts where it comes in parts."""
    if isinstance(update, Finished):
        return _finished(update, x)
    if isinstance(update, Choices):
        return update.total()
    if isinstance(update, Biased):
        return whole(update.product, x.ndim, x.dtype) + update.bias.astype(x.dtype)
    return whole(update, x.ndim, x.dtype)


def _finished(update: Finished, x: jax.Array | jax.ShapeDtypeStruct) -> jax.Array:
    if update.centred or len(update.updates) > 1:  # sums are rounded once
        wide = jax.ShapeDtypeStruct(x.shape, jnp.float32)
        total = functools.reduce(jnp.add, (sum_parts(each, wide).astype(wide.dtype) for each in update.updates))
        rows = centred(total, x.dtype) if update.centred else total.astype(x.dtype)
    else:
        rows = sum_parts(update.updates[0], x)
    if update.scales is not None and update.row is not None:
        rows = rms_norm(rows, scale_of(update.scales, update.row, x.dtype), update.eps)
    return rows if update.factor is None else multiplied(rows, update.factor)
