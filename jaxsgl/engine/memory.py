"""How many bytes are free, on an accelerator or on the host. Called by `kv_buffers` at start-up."""

from __future__ import annotations

import os
from pathlib import Path

import jax

CGROUP_FILES = (  # limit and usage of the control group, version 2 then 1
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


def free_bytes(device: jax.Device, mem_fraction_static: float) -> int:
    """Bytes that a buffer on `device` may take: of its limit, the given fraction less what is in use; on CPU, what
    the host and the process's control group have left."""
    stats = device.memory_stats() if device.platform != "cpu" else None
    if stats and "bytes_limit" in stats:
        return int(stats["bytes_limit"] * mem_fraction_static) - int(stats["bytes_in_use"])
    return free_host_bytes()


def free_host_bytes(meminfo: Path = Path("/proc/meminfo")) -> int:
    """Free memory of the host, or of the control group where that is less."""
    limits = [_available(meminfo)]
    for limit_file, used_file in CGROUP_FILES:
        limit, used = _number(Path(limit_file)), _number(Path(used_file))
        if limit is not None and used is not None:
            limits.append(max(limit - used, 0))
    return min(limits)


def _available(meminfo: Path) -> int:
    """MemAvailable, which counts reclaimable caches as free; all memory where the system doesn't say."""
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
