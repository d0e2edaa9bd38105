"""From a `ModelArch` to a model without memory behind it: shapes and structure."""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx

from jaxsgl.models.arch import ModelArch
from jaxsgl.models.dense import Decoder


def abstract_model(
    arch: ModelArch, dtype: jnp.dtype, activations: jnp.dtype | None = None
) -> tuple[nnx.GraphDef, nnx.State]:
    """The model's structure, and its parameters as shapes in `dtype`; allocates nothing.

    `activations` is the format of what lies between products (default: `dtype`).

    Merge the structure with parameters from `weights` inside a jitted function: `nnx.merge(graphdef, params)`.
    Each abstract parameter carries its logical `axes` and its initial `mean` and `std` as metadata.
    """
    graphdef, params = nnx.split(nnx.eval_shape(lambda: Decoder(arch, dtype, activations or dtype)))
    return graphdef, params
