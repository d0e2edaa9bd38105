"""The device mesh and how the step's arrays lie on it. Called by `engine`, `kv_buffers` and tests.

Every parameter and buffer carries a `NamedSharding` over this mesh, so that tensor parallelism is a mesh shape and
not a second code path. Parameters' shardings live with the weights; here are those of what the engine itself owns.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxsgl.weights import TENSOR_AXIS


def make_mesh(devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A one-dimensional mesh with axis `tp` over `devices` (default: the first device of the default backend)."""
    chosen = np.array(devices if devices is not None else jax.devices()[:1])
    return Mesh(chosen, (TENSOR_AXIS,), axis_types=(AxisType.Auto,))


def kv_sharding(mesh: Mesh) -> NamedSharding:
    """Pages `[num_pages, K, page_size, H]`: the kv heads are split."""
    return NamedSharding(mesh, PartitionSpec(None, TENSOR_AXIS, None, None))


def replicated(mesh: Mesh) -> NamedSharding:
    """Step inputs, the last-token table and sampled tokens: the same on every device."""
    return NamedSharding(mesh, PartitionSpec())
