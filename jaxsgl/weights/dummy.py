"""Random parameters without a checkpoint, for benchmarks and tests of speed; made on the devices, sharded."""

from __future__ import annotations

import zlib
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from jaxsgl.models import ModelArch, abstract_model
from jaxsgl.weights.sharding import check_divisible, param_sharding


def random_params(arch: ModelArch, dtype: jnp.dtype, mesh: Mesh, seed: int) -> nnx.State:
    """Parameters that keep activations and logits near unit scale; a tree like `abstract_model`'s.

    The same seed gives the same values on every mesh (JAX's default generator is elementwise, so it shards).
    """
    check_divisible(arch, mesh)
    _, abstract = abstract_model(arch, dtype)
    root = jax.random.key(seed)
    params = []
    for path, param in nnx.to_flat_state(abstract):
        key = jax.random.fold_in(root, zlib.crc32(repr(path).encode()))
        mean, std = param.get_metadata("mean"), param.get_metadata("std")
        value = _draw(key, param.shape, dtype, mean, std, param_sharding(param, mesh))
        params.append((path, param.replace(value)))
    return nnx.from_flat_state(params)


@partial(jax.jit, static_argnames=("shape", "dtype", "mean", "std", "sharding"))
def _draw(
    key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype, mean: float, std: float, sharding: NamedSharding
) -> jax.Array:
    """Uniform values of the given mean and standard deviation; one program per kind of parameter."""
    half_width = std * 3**0.5
    values = jax.random.uniform(key, shape, jnp.float32, mean - half_width, mean + half_width)
    return jax.lax.with_sharding_constraint(values.astype(dtype), sharding)
