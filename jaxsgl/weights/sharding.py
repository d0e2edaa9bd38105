"""The device mesh and where arrays lie on it: one table maps logical axes to mesh axes.

The mesh is `(data, tensor)`. The axis `tensor` splits kv heads (with their query heads), key heads of delta-nets (with
their value heads), the ffn, the vocabulary, and experts or their ffn (`ModelArch.on_devices`). The axis `data` has one
device: replicas are engines of their own. Every parameter and buffer carries a `NamedSharding`, on one device as on
many. Knows the model's sizes and no programs. The loaders and the engine call it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxsgl.errors import ConfigError
from jaxsgl.models import ModelArch, Params
from jaxsgl.models.tensor_parallel import DATA_AXIS, TENSOR_AXIS

MESH_AXIS_OF = dict.fromkeys(("kv_heads", "key_heads", "ffn", "vocab", "experts"), TENSOR_AXIS)
MOST_DEVICES = 64  # that errors try as a way out


def make_mesh(devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh `(data, tensor)` whose tensor axis is `devices` (default: the first device of the default backend)."""
    chosen = np.array(devices if devices is not None else jax.devices()[:1])
    return Mesh(chosen[None], (DATA_AXIS, TENSOR_AXIS), axis_types=(AxisType.Auto, AxisType.Auto))


def replicated(mesh: Mesh) -> NamedSharding:
    """The sharding of step inputs, the last-token table and sampled tokens: the same on every device."""
    return NamedSharding(mesh, PartitionSpec())


def logits_sharding(mesh: Mesh) -> NamedSharding:
    """The sharding of logits `[S, V]`, between a forward program and a sampling program: the vocabulary is split."""
    return replicated(mesh) if mesh.size == 1 else NamedSharding(mesh, PartitionSpec(None, MESH_AXIS_OF["vocab"]))


def param_sharding(param: nnx.Param[Any], mesh: Mesh) -> NamedSharding:
    """The sharding of one (abstract) parameter, by the logical axes that it carries."""
    return NamedSharding(mesh, PartitionSpec(*(MESH_AXIS_OF.get(axis) for axis in param.get_metadata("axes"))))


def check_divisible(arch: ModelArch, mesh: Mesh) -> None:
    """Raises `ConfigError` unless every sharded axis of `arch`, as it is `on_devices`, splits evenly over `mesh`."""
    _refuse(arch, mesh.shape[TENSOR_AXIS], "use a number of devices that divides it")


def model_on_devices(arch: ModelArch, num_devices: int, *, by_experts: bool) -> ModelArch:
    """`arch` as `num_devices` share it. Raises `ConfigError`, which names the flags, if they can't."""
    if by_experts and arch.mixture is None:
        raise ConfigError(f"--ep splits a mixture of experts, but {arch.name} has none: leave it out")
    shared = arch.on_devices(num_devices, by_experts=by_experts)
    fitting = [number for number in range(1, MOST_DEVICES + 1) if _divides(arch, number, by_experts)]
    way_out = f"give --tp {_in_words(fitting)}"
    if by_experts and _divides(arch, num_devices, False):
        way_out += ", or leave --ep out"
    elif not by_experts and arch.mixture is not None and _divides(arch, num_devices, True):
        way_out += ", or --ep, which splits the experts instead"
    _refuse(shared, num_devices, way_out)
    return shared


def bytes_on_each_device(params: Params, mesh: Mesh) -> int:
    """Bytes of (abstract) parameters on each device."""
    total = 0
    for _, param in nnx.to_flat_state(params):
        shape = param_sharding(param, mesh).shard_shape(param.shape)
        total += math.prod(shape) * param.dtype.itemsize
    return total


def _divides(arch: ModelArch, number: int, by_experts: bool) -> bool:
    return not _misfits(arch.on_devices(number, by_experts=by_experts), number)


def _refuse(arch: ModelArch, num_devices: int, way_out: str) -> None:
    misfits = _misfits(arch, num_devices)
    if misfits:
        raise ConfigError(
            f"{num_devices} devices can't share {arch.name} evenly: it has {' and '.join(misfits)}: {way_out}"
        )


def _misfits(arch: ModelArch, num_devices: int) -> list[str]:
    """What of the model can't be split, in words."""
    sizes = {"query heads": arch.num_heads, "kv heads": arch.num_kv_heads, "units in an MLP": arch.ffn_size}
    sizes["rows of its vocabulary"] = arch.vocab_rows
    if arch.delta_net is not None:
        sizes["key heads of its delta-nets"] = arch.delta_net.key_heads
    if arch.mixture is not None:
        of_experts = arch.mixture.num_experts if arch.by_experts else arch.mixture.ffn_size
        sizes["experts" if arch.by_experts else "units in an expert"] = of_experts
        sizes["units in its shared experts"] = arch.mixture.shared_ffn_size
    return [f"{size} {what}" for what, size in sizes.items() if size % num_devices]


def _in_words(numbers: Sequence[int]) -> str:
    *others, last = map(str, numbers)
    return f"{', '.join(others)} or {last}" if others else last
