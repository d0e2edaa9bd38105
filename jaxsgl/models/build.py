"""From a `ModelArch` to a model without memory behind it: shapes and structure; and the choice of the dtype."""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx

from jaxsgl.models.arch import ModelArch
from jaxsgl.models.dense import Decoder


def abstract_model(arch: ModelArch, dtype: jnp.dtype) -> tuple[nnx.GraphDef, nnx.State]:
    """The model's structure, and its parameters as shapes; allocates nothing.

    Merge the structure with parameters from `weights` inside a jitted function: `nnx.merge(graphdef, params)`.
    Each abstract parameter carries its logical `axes` and its initial `mean` and `std` as metadata.
    """
    graphdef, params = nnx.split(nnx.eval_shape(lambda: Decoder(arch, dtype)))
    return graphdef, params


def resolve_dtype(flag: str, arch: ModelArch, platform: str) -> jnp.dtype:
    """The dtype of weights and compute for the `--dtype` flag on a platform ("cpu", "gpu", "tpu").

    auto: the checkpoint's, but float32 on CPU, where 16 bit products run 3 to 10 times slower.
    """
    if flag == "auto":
        flag = "float32" if platform == "cpu" else arch.dtype
    return jnp.dtype(flag)
