"""`add_and_norm`: the residual stream with a layer's update added, and its norm, as it is or rounded to float8.

Owns the checks of the arguments. Never knows layers, nor how a backend computes: it calls the one that `dispatch`
chooses, or on a device without any what `norm` has for XLA.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import choose_kernel_or_xla
from pallas_kernels.experts import Choices
from pallas_kernels.norm import Addend, Biased, Finished, add_then_norm
from pallas_kernels.scaled import ROW_GROUP, ScaledRows, rounded_rows


def add_and_norm(
    x: jax.Array,
    update: Addend,
    scales: jax.Array,
    row: int,
    eps: float,
    *,
    biases: jax.Array | None = None,
    backend: str = "auto",
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Add to the residual stream and normalize the sum; returns the sum and its RMSNorm, `[T, D]` in x's dtype.

    Args:
        x: `[T, D]`.
        update: `[T, D]` in x's dtype; or `[P, T, D]` float32, parts whose sum is the update; or one of these as
            `Biased`; or `Choices` of T tokens, whose rows are in x's dtype; or several of these as `Finished`.
        scales: `[L, D]`, of which this norm takes `row`.
        row: index of the norm's scale.
        eps: added to the mean square.
        biases: `[L, D]`, of which `row` is added to the norm; None: none.
        backend: a backend that has the op, or "auto"; "xla" always has it.
        interpret: run a Pallas backend in its interpreter, on any platform.

    Raises:
        ValueError: shapes that don't fit each other, or a backend that can't run here.
    """
    total, normed = _add_and_norm(x, update, scales, row, eps, biases, False, backend, interpret)
    assert isinstance(normed, jax.Array)
    return total, normed


def add_and_norm_in_float8(
    x: jax.Array,
    update: Addend,
    scales: jax.Array,
    row: int,
    eps: float,
    *,
    backend: str = "auto",
    interpret: bool = False,
) -> tuple[jax.Array, ScaledRows]:
    """`add_and_norm` for a `float8_product`: the norm is rounded as `float8_rows` would, in the same kernel.

    Raises:
        ValueError: as `add_and_norm`, or D is no multiple of `ROW_GROUP`.
    """
    if x.shape[-1] % ROW_GROUP:
        raise ValueError(f"x is {x.shape}; it must be [T, D] with a D that is a multiple of {ROW_GROUP}")
    total, normed = _add_and_norm(x, update, scales, row, eps, None, True, backend, interpret)
    return total, normed if isinstance(normed, ScaledRows) else rounded_rows(normed)


def _add_and_norm(
    x: jax.Array,
    update: Addend,
    scales: jax.Array,
    row: int,
    eps: float,
    biases: jax.Array | None,
    in_float8: bool,
    backend: str,
    interpret: bool,
) -> tuple[jax.Array, jax.Array | ScaledRows]:
    """With `in_float8` the norm is rounded by a kernel, or as it is."""
    _check_update(update, x)
    if x.ndim != 2 or scales.ndim != 2 or scales.shape[1] != x.shape[1] or not 0 <= row < scales.shape[0]:
        raise ValueError(f"x {x.shape} must be [T, D] and scales {scales.shape} [L, D] with a row {row}")
    if biases is not None and biases.shape != scales.shape:
        raise ValueError(f"biases are {biases.shape}; they must be {scales.shape}, as the scales")
    kernel = choose_kernel_or_xla(
        "add_and_norm", lambda each: each.add_and_norm, backend, x, update, interpret=interpret
    )
    if kernel is None:
        return add_then_norm(x, update, scales, row, eps, biases)
    return kernel(x, update, scales, row, eps, biases, in_float8, interpret)


def _check_update(update: Addend, x: jax.Array) -> None:
    if isinstance(update, Finished):
        norms = update.scales
        if norms is not None and (norms.ndim != 2 or norms.shape[1:] != x.shape[1:] or update.row is None):
            raise ValueError(
                f"the updates' norm takes row {update.row} of {norms.shape}; it must be a row of [L, {x.shape[1]}]"
            )
        factors, factor_row = update.stream_factors, update.stream_row
        if factors is not None and (factors.shape[1:] != (1,) or factor_row is None):
            raise ValueError(f"the stream's factor is row {factor_row} of {factors.shape}; it must be a row of [L, 1]")
        for each in update.updates:
            _check_update(each, x)
        return
    if isinstance(update, Choices):
        rows, tokens = update.rows, update.place_of.shape[:1]
        if (
            (*tokens, *rows.shape[1:]) != x.shape
            or rows.dtype != x.dtype
            or update.shares.shape != update.place_of.shape
        ):
            raise ValueError(
                f"update has rows {rows.shape} {rows.dtype}, places {update.place_of.shape} and shares "
                f"{update.shares.shape}; they must be [M, D], [T, k] and [T, k] for x {x.shape} {x.dtype}"
            )
        return
    if isinstance(update, Biased):
        if update.bias.shape != x.shape[1:]:
            raise ValueError(f"the update's bias is {update.bias.shape}; it must be {x.shape[1:]}, as a row of x")
        update = update.product
    is_whole = update.shape == x.shape and update.dtype == x.dtype
    if not is_whole and (update.shape[1:] != x.shape or update.dtype != jnp.float32):
        raise ValueError(
            f"update is {update.shape} {update.dtype}; it must be {x.shape} {x.dtype} as x, or float32 parts of that"
        )
