"""What a unit of an MLP makes of its first product, where MLPs are dense: XLA computes it, and no kernel does.

Owns the units that no mixture of experts has. Those that mixtures have, too, are `pallas_kernels.experts`'.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import jax

from pallas_kernels import experts

_DENSE_ALONE: Mapping[str, Callable[[jax.Array], jax.Array]] = {
    "relu": jax.nn.relu,
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_new": partial(jax.nn.gelu, approximate=True),
}


def unit_of(sides: Sequence[jax.Array], activation: str) -> jax.Array:
    """activation(gate) * up of two arrays, or activation(up) of one."""
    return experts.unit_of(sides, activation) if activation not in _DENSE_ALONE else _DENSE_ALONE[activation](*sides)
