"""Cases of `add_and_norm`: of a whole update and of one in parts, and of norms in float8.

Owns how many tokens they have.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from pallas_kernels.api.norms import add_and_norm, add_and_norm_in_float8
from pallas_kernels.norm import Addend, Biased, Finished
from pallas_kernels.selftest.batches import normal
from pallas_kernels.selftest.case import FLOAT8_TOLERANCE, TOLERANCE, Case
from pallas_kernels.selftest.cases.arguments import EPS, NUM_PARTS, ROW, in_float32, in_parts_of
from pallas_kernels.selftest.shapes import KernelShapes


def norm_cases(shapes: KernelShapes) -> Iterator[Case]:
    """A whole update, and one in parts, whose norm is rounded to float8 if products read that."""
    rounds = any(each.may_be_in_float8 and each.inputs == shapes.hidden_size for each in shapes.matrices)
    for num_tokens, parts in ((300, ()), (37, (NUM_PARTS,))):
        keys = jax.random.split(jax.random.key(3), 4)
        dtype = jnp.dtype(shapes.dtype)
        x = normal(keys[0], 1.0, shape=(num_tokens, shapes.hidden_size), dtype=dtype)
        product = normal(keys[1], 1.0, shape=(*parts, num_tokens, shapes.hidden_size), dtype=in_parts_of(dtype, parts))
        bias = normal(keys[3], 1.0, shape=(shapes.hidden_size,), dtype=dtype)
        scales = normal(keys[2], 1.0, shape=(ROW + 2, shapes.hidden_size), dtype=jnp.dtype(shapes.norm_dtype))
        update = _update(product, bias, scales, shapes)
        wide_scales = in_float32(scales)
        wide = in_float32(x), _update(in_float32(product), in_float32(bias), wide_scales, shapes), wide_scales

        yield Case(
            f"{num_tokens} tokens" + (" in parts" if parts else ""),
            TOLERANCE[shapes.dtype],
            functools.partial(_added, x, update, scales, shapes.has_norm_bias),
            functools.partial(_added, *wide, shapes.has_norm_bias, "xla", False),
        )
        if rounds:
            yield Case(
                f"{num_tokens} tokens in float8",
                FLOAT8_TOLERANCE,
                functools.partial(_added_in_float8, x, update, scales),
                functools.partial(_added_in_float8, *wide, "xla", False),
            )


def _update(product: jax.Array, bias: jax.Array, scales: jax.Array, shapes: KernelShapes) -> Addend:
    """What the model's layers make of a product."""
    update = Biased(product, bias) if shapes.has_out_bias else product
    has_factors, factor = shapes.has_stream_factors, shapes.residual_scale
    if not shapes.has_out_norms and not shapes.is_centred and not has_factors and factor is None:
        return update
    norms, row = (scales, ROW + 1) if shapes.has_out_norms else (None, None)
    factors, factor_row = (scales[:, :1], ROW) if has_factors else (None, None)
    return Finished((update,), norms, row, EPS, shapes.is_centred, factor, factors, factor_row)


def _added(
    x: jax.Array, update: Addend, scales: jax.Array, has_bias: bool, backend: str, interpret: bool
) -> list[jax.Array]:
    biases = scales if has_bias else None  # any numbers
    return list(_norm_jit(x, update, scales, biases=biases, backend=backend, interpret=interpret))


def _added_in_float8(x: jax.Array, update: Addend, scales: jax.Array, backend: str, interpret: bool) -> list[jax.Array]:
    total, normed = _rounded_norm_jit(x, update, scales, backend=backend, interpret=interpret)
    return [total, normed.values(jnp.float32)]


_norm_jit = jax.jit(functools.partial(add_and_norm, row=ROW, eps=EPS), static_argnames=("backend", "interpret"))
_rounded_norm_jit = jax.jit(
    functools.partial(add_and_norm_in_float8, row=ROW, eps=EPS), static_argnames=("backend", "interpret")
)
