"""What a unit of an MLP makes of its first product, where MLPs are dense: XLA computes it, and no kernel does.

Owns the units that no mixture of experts has. Those that mixtures have, too, are `pallas_kernels.experts`'.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import jax
import jax.numpy as jnp

from pallas_kernels import experts

XIELU_SLOPE = 0.5
_DENSE_ALONE: Mapping[str, Callable[..., jax.Array]] = {
    "relu": jax.nn.relu,
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_new": partial(jax.nn.gelu, approximate=True),
    "gelu_erf": lambda gate, up: jax.nn.gelu(gate, approximate=False) * up,
}


def unit_of(sides: Sequence[jax.Array], activation: str) -> jax.Array:
    """activation(gate) * up of two arrays, or activation(up) of one."""
    return experts.unit_of(sides, activation) if activation not in _DENSE_ALONE else _DENSE_ALONE[activation](*sides)


def xielu(up: jax.Array, curve: jax.Array) -> jax.Array:
    """xIELU (arXiv 2411.13010): a parabola of positive numbers, an exponential of others, both of slope 1 / 2 at 0.

    `curve [2]` float32 is how much each of them bends, both positive.
    """
    wide = up.astype(jnp.float32)
    below = jnp.minimum(wide, 0.0)
    bent = jnp.where(wide > 0, curve[0] * wide * wide, curve[1] * (jnp.expm1(below) - below))
    return (bent + XIELU_SLOPE * wide).astype(up.dtype)
