"""What memory there is: the share of a GPU that JAX may use, and what a device has left once the weights are loaded.

Owns the variables by which JAX is told its share, and what errors say about memory. `sizing` divides what is left.
Called by `engine`, at start only. Knows no pages and no steps.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from jaxsgl.engine.start.cuda_memory import driver_memory
from jaxsgl.errors import ConfigError, StartupError
from pallas_kernels.jax_internals import is_running

SHARE_VARIABLES = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")  # JAX reads one when it starts
JAX_SHARE = 0.75  # of a GPU, unless a variable says otherwise
GPU_SHARE = 0.95  # the rest is for the CUDA context, libraries, and the code of programs
SMALL_PLACES, SMALL_BYTES = 64, 1 << 16  # for the inputs and results of steps in flight
HEADROOM = 0.02  # of an accelerator's memory, for the inputs of steps and fragmentation
EXTRAS = {  # word of JAX_PLATFORMS -> what brings that platform
    "cuda": "'jaxsgl[cuda13]' ('jaxsgl[cuda12]' for older drivers)",
    "gpu": "'jaxsgl[cuda13]' ('jaxsgl[cuda12]' for older drivers)",
    "tpu": "'jaxsgl[tpu]'",
}
OUT_OF_MEMORY = "RESOURCE_EXHAUSTED"  # begins XLA's message
CGROUP_FILES = (  # limit and usage of the control group, version 2 then 1
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


@dataclass(frozen=True)
class Memory:
    """What a device has left once the weights are loaded.

    Attributes:
      platform: of the device.
      static_bytes: what the KV pool and the tables may take; on an accelerator --mem-fraction-static less the weights.
      all_bytes: what the pool, the tables and the temporary memory of a step may take together.
      account: where the memory went, in words; empty if the device doesn't tell.
    """

    platform: str
    static_bytes: int
    all_bytes: int
    account: str = ""


@functools.cache
def start_jax() -> float:
    """Starts JAX's devices, and lets it use most of a GPU unless the user's variables say otherwise; returns the share.

    JAX keeps the share that it began with as long as the process lives, so later calls return that. The variable is
    unset afterwards, so that processes started from here decide for themselves.

    Raises:
      ConfigError: a variable is set to something other than a share, or JAX finds no device.
    """
    for name in SHARE_VARIABLES:
        if text := os.environ.get(name):
            return _share(name, text)
    if is_running():
        return JAX_SHARE
    os.environ[SHARE_VARIABLES[-1]] = str(GPU_SHARE)
    try:
        jax.devices()
    except (AssertionError, RuntimeError) as error:  # of a platform without a plugin, or without a device
        raise ConfigError(no_device(str(error))) from error
    finally:
        del os.environ[SHARE_VARIABLES[-1]]
    return GPU_SHARE


def no_device(reason: str) -> str:
    """Returns the error for a platform that has no device; it names the platform, the reason and what to install."""
    asked = str(getattr(jax.config, "jax_platforms", "") or "")
    extras = next((names for word, names in EXTRAS.items() if word in asked.split(",")), "")
    words = f"JAX finds no device of JAX_PLATFORMS={asked}" if asked else "JAX finds no device"
    words += f" ({' '.join(reason.split())[:300]})" if reason else ""
    return f"{words}: install its package with pip install {extras}, or unset JAX_PLATFORMS" if extras else words


def _share(name: str, text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = 0.0
    if not share > 0:
        raise ConfigError(f"{name} is {text!r}, but must be the share of a GPU that JAX may use, as 0.9; or unset it")
    return share


def least_free_memory(devices: Sequence[jax.Device], mem_fraction_static: float, jax_share: float) -> Memory:
    """What the fullest of `devices` has left: they get equal parts. The virtual devices of a CPU share the host's."""
    left = min((free_memory(each, mem_fraction_static, jax_share) for each in devices), key=lambda one: one.all_bytes)
    if left.platform != "cpu":
        return left
    return replace(left, static_bytes=left.static_bytes // len(devices), all_bytes=left.all_bytes // len(devices))


def free_memory(device: jax.Device, mem_fraction_static: float, jax_share: float = 1.0) -> Memory:
    """What `device` has left: on a CPU, what the host and the process's control group have.

    `mem_fraction_static` is a fraction of the whole device, as in SGLang; `jax_share` is what JAX may use of a GPU.
    """
    if device.platform == "cpu":
        free_bytes = free_host_bytes()
        return Memory(device.platform, free_bytes, free_bytes)
    told = _told_by(device, jax_share)
    if told is None:
        raise StartupError(
            f"neither JAX nor a driver tells the memory of {device}, so no KV pool can be sized: unset "
            "XLA_PYTHON_CLIENT_ALLOCATOR"
        )
    limit, used, whole = told
    account = (
        f"JAX may use {_gib(limit)} of the device's {_gib(whole)}, the weights take {_gib(used)}, and "
        f"--mem-fraction-static {mem_fraction_static:g} allows {_gib(mem_fraction_static * whole)} for weights and pool"
    )
    all_bytes = int(limit * (1 - HEADROOM)) - used
    return Memory(device.platform, min(int(whole * mem_fraction_static) - used, all_bytes), all_bytes, account)


class _Told(NamedTuple):
    """Bytes of an accelerator: what JAX may use, what is in use, and all that it has."""

    limit: int
    used: int
    whole: int


def _told_by(device: jax.Device, jax_share: float) -> _Told | None:
    """The memory of an accelerator; None: it isn't told.

    The allocator "platform" keeps no account and no share: then a GPU's driver tells what any program has taken.
    """
    stats = device.memory_stats()
    if stats and "bytes_limit" in stats:
        limit = int(stats["bytes_limit"])
        whole = round(limit / jax_share) if device.platform == "gpu" else limit
        return _Told(limit, int(stats["bytes_in_use"]), whole)
    told = driver_memory(device.local_hardware_id) if device.platform == "gpu" else None
    return None if told is None else _Told(told.total, told.total - told.free, told.total)


def keep_small_places(devices: Sequence[jax.Device]) -> list[jax.Array]:
    """Leaves places in a GPU's memory for small arrays that steps take and give back; returns what keeps them apart.

    Hold the result as long as steps run. XLA replays a step as a CUDA graph, and writes every node of it anew when the
    step's temporary memory has moved: 1 to 2 ms of the host for 300 nodes. Without such places the inputs and tokens of
    the steps in flight are cut off the region where the next step's temporary memory begins.
    """
    places, walls = [], []
    for device in devices:
        for _ in range(SMALL_PLACES):
            places.append(jax.device_put(np.zeros(SMALL_BYTES, np.uint8), device))
            walls.append(jax.device_put(np.zeros(1, np.uint8), device))
    jax.block_until_ready((places, walls))
    for place in places:
        place.delete()
    return walls


def check_weights_fit(device: jax.Device, jax_share: float, weight_bytes: int, num_devices: int) -> None:
    """Before anything is read. Raises `ConfigError` if the weights of each of `num_devices` are too many for `device`.

    A device that doesn't tell its memory, as a CPU, passes.
    """
    told = None if device.platform == "cpu" else _told_by(device, jax_share)
    if told is None:
        return
    limit = told.limit
    usable = int(limit * (1 - HEADROOM))
    if weight_bytes <= usable:
        return
    needed = num_devices * -(-weight_bytes // usable)
    whole = f"the device's {_gib(told.whole)}"
    raise ConfigError(
        f"the weights take {_gib(weight_bytes)} on each of {num_devices} devices, but JAX may use {_gib(limit)} of "
        f"{whole}: give --tp {needed} or more, --quantization, or a smaller model"
    )


@contextmanager
def loading_weights(device: jax.Device, jax_share: float) -> Iterator[None]:
    """Turns what XLA raises inside for lack of memory into a `StartupError` that says what may help."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if OUT_OF_MEMORY not in str(error):
            raise
        stats = device.memory_stats() or {}
        told = ""
        if "bytes_limit" in stats:
            limit = int(stats["bytes_limit"])
            told = f"JAX may use {_gib(limit)} of the device's {_gib(limit / jax_share)}, "
            told += f"{_gib(int(stats.get('bytes_in_use', 0)))} were taken when it failed; "
        raise StartupError(
            f"the weights do not fit into the device's memory: {told}end other programs that use the device, take a "
            f"smaller model or --dtype bfloat16, or raise {SHARE_VARIABLES[-1]} (JAX's share of a GPU, now "
            f"{jax_share:g})"
        ) from error


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"


def free_host_bytes(meminfo: Path = Path("/proc/meminfo")) -> int:
    """Free bytes of the host, or of the control group if it has fewer; what caches files counts as free."""
    limits = [_available(meminfo)]
    for limit_file, used_file in CGROUP_FILES:
        limit, used = _number(Path(limit_file)), _number(Path(used_file))
        if limit is not None and used is not None:
            limits.append(max(limit - used + _cached(Path(used_file).with_name("memory.stat")), 0))
    return min(limits)


def _cached(stat: Path) -> int:
    """Bytes of files that a control group's memory holds, which go when they are in the way; 0 if it doesn't tell."""
    try:
        told = dict(line.split() for line in stat.read_text().splitlines())
    except (OSError, ValueError):
        return 0
    names = ("inactive_file", "active_file")
    whole = [f"total_{name}" if f"total_{name}" in told else name for name in names]  # version 1 counts children apart
    return sum(int(told.get(name, 0)) for name in whole)


def _available(meminfo: Path) -> int:
    """MemAvailable, which counts reclaimable caches as free; all memory if the system doesn't tell."""
    if meminfo.is_file():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # no such version, or "max"
        return None
