"""Which devices an engine runs on: has JAX show them before it starts, and makes the mesh of them.

Owns the variables by which JAX is told of devices. `memory` decides on their memory. Called by `engine`, at start only.
Knows no model.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import jax
from jax.sharding import Mesh

from jaxsgl.config.engine import EngineConfig
from jaxsgl.engine.memory import is_running
from jaxsgl.errors import ConfigError
from jaxsgl.weights.sharding import make_mesh

_HOST_DEVICES = "xla_force_host_platform_device_count"  # of XLA_FLAGS: JAX takes one of both ways
_TPU_BOUNDS = {1: "1,1,1", 2: "1,2,1", 4: "2,2,1", 8: "2,4,1"}  # the shape of so many chips of a host
_TPU_PORT = 8476  # libtpu's own; each process has one


def reveal_devices(config: EngineConfig) -> None:
    """Before JAX starts: asks for virtual devices of a CPU, and for those GPUs or TPU chips alone that are named.

    JAX takes memory of every GPU that it sees, and a TPU chip belongs to one process. Does nothing once JAX runs.
    """
    if is_running():
        return
    number = 1 + max(config.device_ids, default=config.tp - 1)
    if number > 1 and _HOST_DEVICES not in os.environ.get("XLA_FLAGS", ""):
        jax.config.update("jax_num_cpu_devices", number)
    if config.device_ids:
        jax.config.update("jax_cuda_visible_devices", ",".join(map(str, config.device_ids)))
        for name, value in tpu_variables(config.device_ids).items():
            os.environ.setdefault(name, value)


def tpu_variables(device_ids: Sequence[int]) -> dict[str, str]:
    """Environment variables by which libtpu takes these chips of the host and leaves the rest to other processes.

    Empty for numbers of chips of which no shape is known: then the process takes all chips.
    """
    bounds = _TPU_BOUNDS.get(len(device_ids))
    if bounds is None:
        return {}
    port = str(_TPU_PORT + min(device_ids))
    return {
        "TPU_VISIBLE_CHIPS": ",".join(map(str, device_ids)),
        "TPU_CHIPS_PER_PROCESS_BOUNDS": bounds,
        "TPU_PROCESS_BOUNDS": "1,1,1",
        "TPU_PROCESS_ADDRESSES": f"localhost:{port}",
        "TPU_PROCESS_PORT": port,
        "CLOUD_TPU_TASK_ID": "0",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    }


def mesh_of(config: EngineConfig) -> Mesh:
    """The mesh of the engine's devices. Raises `ConfigError` if JAX has too few."""
    return make_mesh(_chosen(config, jax.devices()))


def _chosen(config: EngineConfig, devices: Sequence[jax.Device]) -> list[jax.Device]:
    # Where JAX shows the named GPUs or chips alone, it numbers them anew.
    are_shown_alone = len(devices) == config.tp and devices[0].platform != "cpu"
    ids = config.device_ids if config.device_ids and not are_shown_alone else tuple(range(config.tp))
    if max(ids) >= len(devices):
        asked = f"--device-ids {','.join(map(str, ids))}" if config.device_ids else f"--tp {config.tp}"
        raise ConfigError(
            f"{asked} needs {max(ids) + 1} devices, but JAX has {len(devices)} ({devices[0].device_kind}): give "
            f"--tp {len(devices)} or less, fewer replicas (--dp-size), or make more devices visible to this process"
        )
    return [devices[index] for index in ids]
