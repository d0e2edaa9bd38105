"""The device mesh and where arrays lie on it: one table maps logical axes to mesh axes.

Every parameter and buffer carries a `NamedSharding` over the mesh, so that tensor parallelism is a mesh shape and not a
second code path: the axis `tp` splits kv heads (with their query heads), the ffn and the vocabulary. The loaders and
the engine call it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxsgl.errors import ConfigError
from jaxsgl.models import ModelArch

TENSOR_AXIS = "tp"
MESH_AXIS_OF = {"kv_heads": TENSOR_AXIS, "ffn": TENSOR_AXIS, "vocab": TENSOR_AXIS, "experts": TENSOR_AXIS}


def make_mesh(devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A one-dimensional mesh with axis `tp` over `devices` (default: the first device of the default backend)."""
    chosen = np.array(devices if devices is not None else jax.devices()[:1])
    return Mesh(chosen, (TENSOR_AXIS,), axis_types=(AxisType.Auto,))


def replicated(mesh: Mesh) -> NamedSharding:
    """The sharding of step inputs, the last-token table and sampled tokens: the same on every device."""
    return NamedSharding(mesh, PartitionSpec())


def kv_sharding(mesh: Mesh) -> NamedSharding:
    """The sharding of pages `[num_pages, K, page_size, H]`: the kv heads are split."""
    return NamedSharding(mesh, PartitionSpec(None, MESH_AXIS_OF["kv_heads"], None, None))


def host_pages_sharding(mesh: Mesh) -> NamedSharding:
    """The sharding of pages in their host form `[num_pages, layers, 2, K, page_size, H]`, as `kv_sharding` splits them.

    Each device gathers and inserts its own heads; the host's array holds all of them.
    """
    return NamedSharding(mesh, PartitionSpec(None, None, None, MESH_AXIS_OF["kv_heads"], None, None))


def param_sharding(param: nnx.Param[Any], mesh: Mesh) -> NamedSharding:
    """The sharding of one (abstract) parameter, by the logical axes that it carries."""
    return NamedSharding(mesh, PartitionSpec(*(MESH_AXIS_OF.get(axis) for axis in param.get_metadata("axes"))))


def check_divisible(arch: ModelArch, mesh: Mesh) -> None:
    """Raises `ConfigError` unless every sharded axis of `arch` splits evenly over `mesh`."""
    sizes = {"kv_heads": arch.num_kv_heads, "ffn": arch.ffn_size, "vocab": arch.vocab_size}
    if arch.mixture is not None:
        sizes["experts"] = arch.mixture.num_experts
    for axis, size in sizes.items():
        devices = mesh.shape[MESH_AXIS_OF[axis]]
        if size % devices:
            raise ConfigError(
                f"the model's {axis} ({size}) can't be split over {devices} devices: use a number of devices "
                f"that divides {size}"
            )
