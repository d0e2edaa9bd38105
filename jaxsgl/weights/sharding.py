"""The device mesh and where arrays lie on it: one table maps logical axes to mesh axes.

The mesh is `(data, tensor)`: ranks, and the devices of each. The axis `tensor` splits kv heads (with their query
heads), key heads of delta-nets (with their value heads) and the vocabulary, of which ranks have copies; both axes split
the ffn, and experts or their ffn (`ModelArch.on_devices`). Without data-parallel attention there is one rank: replicas
are engines of their own. What a rank has for itself lies in arrays of all ranks, one after the other. Every parameter
and buffer carries a `NamedSharding`, on one device as on many. Knows the model's sizes and no programs. The loaders and
the engine call it.
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
from jaxsgl.models.tensor_parallel import DATA_AXIS, TENSOR_AXIS, mesh_axes

MOST_DEVICES = 64  # that errors try as a way out


def make_mesh(devices: Sequence[jax.Device] | None = None, num_ranks: int = 1) -> Mesh:
    """A mesh `(data, tensor)` of `devices` (default: the first one of the default backend), as many for each rank."""
    chosen = np.array(devices if devices is not None else jax.devices()[:1])
    return Mesh(chosen.reshape(num_ranks, -1), (DATA_AXIS, TENSOR_AXIS), axis_types=(AxisType.Auto, AxisType.Auto))


def replicated(mesh: Mesh) -> NamedSharding:
    """The sharding of step inputs, the last-token table and sampled tokens: the same on every device."""
    return NamedSharding(mesh, PartitionSpec())


def by_rank(mesh: Mesh, axis: int = 0) -> NamedSharding:
    """The sharding of what each rank has for itself, along `axis` one after the other; `replicated` if there is one."""
    if mesh.shape[DATA_AXIS] == 1:
        return replicated(mesh)
    return NamedSharding(mesh, PartitionSpec(*(None,) * axis, DATA_AXIS))


def logits_sharding(mesh: Mesh) -> NamedSharding:
    """The sharding of logits `[S, V]`, between a forward program and a sampling program: the vocabulary is split."""
    if mesh.size == 1:
        return replicated(mesh)
    rank = DATA_AXIS if mesh.shape[DATA_AXIS] > 1 else None
    return NamedSharding(mesh, PartitionSpec(rank, mesh_axes("vocab", mesh)))


def param_sharding(param: nnx.Param[Any], mesh: Mesh) -> NamedSharding:
    """The sharding of one (abstract) parameter, by the logical axes that it carries."""
    return NamedSharding(mesh, PartitionSpec(*(mesh_axes(axis, mesh) for axis in param.get_metadata("axes"))))


def check_divisible(arch: ModelArch, mesh: Mesh) -> None:
    """Raises `ConfigError` unless every sharded axis of `arch`, as it is `on_devices`, splits evenly over `mesh`."""
    _refuse(arch, mesh.size, mesh.shape[DATA_AXIS], "use a number of devices that divides it")


def model_on_devices(arch: ModelArch, num_devices: int, *, by_experts: bool, num_ranks: int = 1) -> ModelArch:
    """`arch` as `num_devices` in `num_ranks` share it. Raises `ConfigError`, which names the flags, if they can't."""
    if by_experts and arch.mixture is None:
        raise ConfigError(f"--ep splits a mixture of experts, but {arch.name} has none: leave it out")
    shared = arch.on_devices(num_devices // num_ranks, by_experts=by_experts)
    fitting = [
        number
        for number in range(num_ranks, MOST_DEVICES + 1, num_ranks)
        if _divides(arch, number, by_experts, num_ranks)
    ]
    ways_out = [f"give --tp {_in_words(fitting)}"] if fitting else []
    if by_experts and _divides(arch, num_devices, False, num_ranks):
        ways_out.append("leave --ep out")
    elif not by_experts and arch.mixture is not None and _divides(arch, num_devices, True, num_ranks):
        ways_out.append("--ep, which splits the experts instead" if ways_out else "give --ep, which splits the experts")
    _refuse(shared, num_devices, num_ranks, ", or ".join(ways_out) or "leave --enable-dp-attention out")
    return shared


def bytes_on_each_device(params: Params, mesh: Mesh) -> int:
    """Bytes of (abstract) parameters on each device."""
    total = 0
    for _, param in nnx.to_flat_state(params):
        shape = param_sharding(param, mesh).shard_shape(param.shape)
        total += math.prod(shape) * jax.dtypes.itemsize_bits(param.dtype) // 8
    return total


def _divides(arch: ModelArch, number: int, by_experts: bool, num_ranks: int) -> bool:
    return not _misfits(arch.on_devices(number // num_ranks, by_experts=by_experts), number, num_ranks)


def _refuse(arch: ModelArch, num_devices: int, num_ranks: int, way_out: str) -> None:
    misfits = _misfits(arch, num_devices, num_ranks)
    if misfits:
        raise ConfigError(
            f"{num_devices} devices can't share {arch.name} evenly: it has {' and '.join(misfits)}: {way_out}"
        )


def _misfits(arch: ModelArch, num_devices: int, num_ranks: int) -> list[str]:
    """What of the model can't be split, in words."""
    of_rank = {"query heads": arch.num_heads, "kv heads": arch.num_kv_heads, "rows of its vocabulary": arch.vocab_rows}
    if arch.grouped is not None:
        of_rank["groups of heads (o_groups)"] = arch.grouped.out_groups
    for heads in arch.all_heads:
        if heads.queries is not None:
            layer = next(i for i, spec in enumerate(arch.layers) if spec.heads == heads)
            of_rank[f"query heads in layer {layer}"] = heads.queries
        if heads.number != arch.num_kv_heads:
            of_rank[f"kv heads of size {heads.size}"] = heads.number
    sizes = {"units in an MLP": arch.ffn_size}
    if arch.recurrent_net is not None:
        net = arch.recurrent_net
        of_rank[f"{net.shared} of its {net.plural}"] = net.key_heads
    if arch.mixture is not None:
        of_experts = arch.mixture.num_experts if arch.by_experts else arch.mixture.num_units
        sizes["experts" if arch.by_experts else "units in an expert"] = of_experts
        sizes["units in its shared experts"] = arch.mixture.shared_ffn_size
    parts = dict.fromkeys(of_rank, num_devices // num_ranks) | dict.fromkeys(sizes, num_devices)
    return [f"{size} {what}" for what, size in (of_rank | sizes).items() if size % parts[what]]


def _in_words(numbers: Sequence[int]) -> str:
    *others, last = map(str, numbers)
    return f"{', '.join(others)} or {last}" if others else last
