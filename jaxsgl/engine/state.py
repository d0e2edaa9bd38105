"""What stays on the device from step to step: the KV pages of every layer.

Layer-major, one array for K and one for V per layer, `[num_pages, K, page_size, H]`: separate donated buffers, each
written in place by its layer. Knows nothing about which request owns a page. The engine allocates it at start-up.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxsgl.engine.sizing import KvShape
from jaxsgl.errors import ConfigError
from jaxsgl.weights.sharding import kv_sharding


class KvBuffers(NamedTuple):
    """All pages of all layers, a pytree that the step takes and returns (donated)."""

    k: tuple[jax.Array, ...]
    v: tuple[jax.Array, ...]


def allocate(shape: KvShape, num_pages: int, mesh: Mesh) -> KvBuffers:
    """Zeroed buffers, made on the device. Raises `ConfigError` if the mesh can't split the kv heads."""
    if shape.num_kv_heads % mesh.size:
        raise ConfigError(
            f"{shape.num_kv_heads} kv heads can't be split over {mesh.size} devices: use a number that divides them"
        )
    dims = (num_pages, shape.num_kv_heads, shape.page_size, shape.head_dim)
    zeros = jax.jit(lambda: jnp.zeros(dims, shape.dtype), out_shardings=kv_sharding(mesh))
    layers = range(shape.num_layers)
    return KvBuffers(tuple(zeros() for _ in layers), tuple(zeros() for _ in layers))
