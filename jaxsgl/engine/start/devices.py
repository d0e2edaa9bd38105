"""Which devices an engine runs on: names them and has JAX show them before it starts, and makes the mesh of them.

Owns the variables by which JAX is told of devices. `memory` decides on their memory. Called by `engine`, at start only.
Knows no model.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

import jax
from jax.sharding import Mesh

from jaxsgl.config.engine import EngineConfig
from jaxsgl.engine.start.memory import no_device
from jaxsgl.errors import ConfigError, StartupError
from jaxsgl.weights.sharding import make_mesh
from pallas_kernels.jax_internals import is_running

_HOST_DEVICES = "xla_force_host_platform_device_count"  # of XLA_FLAGS: JAX takes one of both ways
_TPU_BOUNDS = {1: "1,1,1", 2: "1,2,1", 4: "2,2,1", 8: "2,4,1"}  # the shape of so many chips of a host
_GPU_FILES = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")  # of NVIDIA's driver, on Windows' Linux too, and of AMD's
_GPU_PACKAGES = ("jax_cuda12_plugin", "jax_cuda13_plugin", "jax_rocm60_plugin", "jax_rocm7_plugin")
_DRIVER = Path("/proc/driver/nvidia")
_GOOGLE = "0x1ae0"  # a vendor's number on the PCI bus
_TPU_PORT = 8476  # libtpu's own; each process has one


def reveal_devices(config: EngineConfig) -> None:
    """Before JAX starts: asks for virtual devices of a CPU, and for no more GPUs than the engine takes.

    JAX takes memory of every GPU that it sees, and a TPU chip belongs to one process, so where chips are named it sees
    no others. Does nothing once JAX runs.

    Raises `ConfigError` if JAX_PLATFORMS asks for a GPU and no package of one is installed, before anything is tested.
    """
    if is_running():
        return
    if _asked_platform() == "gpu" and not any(map(_is_installed, _GPU_PACKAGES)):
        raise ConfigError(no_device("no plugin for GPUs is installed"))
    number = 1 + max(config.device_ids, default=config.num_own_devices - 1)
    if number > 1 and _HOST_DEVICES not in os.environ.get("XLA_FLAGS", ""):
        jax.config.update("jax_num_cpu_devices", number)
    if not config.hosts.are_several:
        jax.config.update("jax_cuda_visible_devices", ",".join(map(str, _ids_of(config))))
    if config.device_ids:
        for name, value in tpu_variables(config.device_ids).items():
            os.environ.setdefault(name, value)


def join_hosts(config: EngineConfig) -> None:
    """Before JAX starts: has it take the devices of all hosts for one machine's, if several share each layer.

    Hosts that have pipeline stages run programs of their own, so JAX need not know of the others. Waits until all have
    come. Raises `StartupError`.
    """
    hosts = config.hosts
    if not hosts.are_several or config.has_stages:
        return
    jax.config.update("jax_enable_preemption_service", False)  # it would take SIGTERM for itself
    # By default hosts share the trials of kernels, and one that finds its program in a cache leaves the others waiting.
    add_xla_flag("--xla_gpu_shard_autotuning=false")
    host, port = hosts.address
    address = f"[{host}]:{port + 1}" if ":" in host else f"{host}:{port + 1}"
    try:
        jax.distributed.initialize(
            address,
            hosts.num_hosts,
            hosts.rank,
            initialization_timeout=round(hosts.dist_timeout),
            coordinator_bind_address=address,
            cluster_detection_method="deactivate",
        )
    except RuntimeError as error:
        raise StartupError(f"JAX's hosts can't meet at {address} (--dist-init-addr): {error}") from error


def add_xla_flag(flag: str) -> None:
    """Before JAX starts in this process."""
    os.environ["XLA_FLAGS"] = with_xla_flag(flag)


def with_xla_flag(flag: str) -> str:
    """XLA_FLAGS as they are, and one more."""
    return f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()


def accelerator() -> str | None:
    """The platform of the accelerator on which JAX will start, "gpu" or "tpu"; None: it will on a CPU. Starts nothing.

    Goes by device files and installed packages, so JAX may yet find that it can't use the device.
    """
    if is_running():
        return _family(jax.devices()[0].platform)
    if _asked_platform():
        return _family(_asked_platform())
    if any(Path(name).exists() for name in _GPU_FILES) and any(map(_is_installed, _GPU_PACKAGES)):
        return "gpu"
    has_chips = any(Path("/dev").glob("accel*")) or any(Path("/dev").glob("vfio/[0-9]*"))
    return "tpu" if has_chips and _is_installed("libtpu") else None


def _asked_platform() -> str:
    """The first platform of JAX_PLATFORMS; "gpu" for each kind of them."""
    named = str(getattr(jax.config, "jax_platforms", "") or "").split(",")[0]
    return _family(named) or named


def accelerator_name(platform: str | None) -> str:
    """Names the driver and the kinds of this machine's devices, without starting JAX."""
    versions = {name: _version(name) for name in (*_GPU_PACKAGES, "libtpu")}
    if platform == "gpu":
        told = [
            path.read_text()
            for path in (_DRIVER / "version", *sorted(_DRIVER.glob("gpus/*/information")))
            if path.exists()
        ]
        lines = [line for text in told for line in text.splitlines() if line.startswith(("NVRM", "Model"))]
        if not any(line.startswith("Model") for line in lines):
            lines += _nvidia_smi()
    else:
        lines = [os.environ.get("TPU_ACCELERATOR_TYPE", "")]
        for device in sorted(Path("/sys/bus/pci/devices").glob("*/device")):
            if (device.parent / "vendor").read_text().strip() == _GOOGLE:
                lines.append(device.read_text().strip())
    return "\n".join([*lines, *(f"{name} {version}" for name, version in versions.items() if version)])


def _nvidia_smi() -> list[str]:
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=False).stdout.splitlines()
    except (OSError, subprocess.TimeoutExpired):
        return []


def device_variables(config: EngineConfig, number: int = 1) -> dict[str, str]:
    """Environment variables that show a child process the first `number` of the engine's GPUs, and no other.

    Those that choose chips of a TPU it has from this process.
    """
    visible = list(filter(None, os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")))
    # The numbers count those that are visible to this process.
    taken = (visible[each] if each < len(visible) else str(each) for each in _ids_of(config)[:number])
    return {"CUDA_VISIBLE_DEVICES": ",".join(taken)}


def _ids_of(config: EngineConfig) -> tuple[int, ...]:
    """The engine's devices on this host: those that are named, or the first ones."""
    return config.device_ids or tuple(range(config.num_own_devices))


def _is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package.replace("_", "-"))
    except importlib.metadata.PackageNotFoundError:
        return ""


def _family(platform: str) -> str | None:
    return {"cpu": None, "cuda": "gpu", "rocm": "gpu"}.get(platform, platform)


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
    """The mesh of the engine's devices, host after host. Raises `ConfigError` if JAX has too few."""
    if not config.hosts.are_several:
        return make_mesh(_chosen(config, jax.devices()), config.num_ranks)
    by_host: dict[int, list[jax.Device]] = {}
    for device in jax.devices():
        by_host.setdefault(device.process_index, []).append(device)
    each = config.tp // config.hosts.num_hosts
    for rank, devices in by_host.items():
        if len(devices) < each:
            raise ConfigError(
                f"--tp {config.tp} needs {each} devices of each of {config.hosts.num_hosts} hosts, but host {rank} has "
                f"{len(devices)} ({devices[0].device_kind}): give --tp {len(devices) * config.hosts.num_hosts} or less"
            )
    return make_mesh([device for rank in sorted(by_host) for device in by_host[rank][:each]])


def meshes_of(config: EngineConfig) -> tuple[Mesh, ...]:
    """The mesh of each pipeline stage of this host, first to last. Raises `ConfigError` if it has too few devices."""
    if not config.has_stages:
        return (mesh_of(config),)
    devices = _chosen(config, jax.local_devices())
    return tuple(make_mesh(devices[first : first + config.tp]) for first in range(0, len(devices), config.tp))


def _chosen(config: EngineConfig, devices: Sequence[jax.Device]) -> list[jax.Device]:
    # Where JAX shows the named GPUs or chips alone, it numbers them anew.
    are_shown_alone = len(devices) == config.num_own_devices and devices[0].platform != "cpu"
    ids = tuple(range(config.num_own_devices)) if are_shown_alone else _ids_of(config)
    if max(ids) >= len(devices):
        raise ConfigError(
            f"{_asked(config, ids)} needs {max(ids) + 1} devices, but JAX has {len(devices)} "
            f"({devices[0].device_kind}): {_way_out(config, len(devices))}, or make more devices visible to this "
            "process"
        )
    return [devices[index] for index in ids]


def _asked(config: EngineConfig, ids: Sequence[int]) -> str:
    """The flags that ask for these devices of this host. Replicas have `device_ids` by their number."""
    if config.device_ids:
        return f"--device-ids {','.join(map(str, ids))}"
    of_stages = f" --pp-size {config.pp_size}" if config.has_stages else ""
    of_hosts = f" on {config.hosts.num_hosts} hosts" if config.hosts.are_several else ""
    return f"--tp {config.tp}{of_stages}{of_hosts}"


def _way_out(config: EngineConfig, number: int) -> str:
    """What to give where a host has this number of devices."""
    if config.device_ids and number >= config.num_devices:
        return f"name devices from 0 to {number - 1}, or give fewer replicas (--dp-size)"
    if not config.has_stages:
        return f"give --tp {number} or less"
    of_all = number * config.hosts.num_hosts
    return f"give a --tp and a --pp-size whose product is {of_all} or less"
