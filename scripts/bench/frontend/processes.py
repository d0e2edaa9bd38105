"""Processor time of running processes, from /proc (Linux)."""

from __future__ import annotations

import os
from pathlib import Path

TICK_S = 1 / os.sysconf("SC_CLK_TCK")


def cpu_s(pid: int) -> float:
    """Seconds of processor time that process `pid` has used, all threads and the kernel's work for it together."""
    return _cpu_s(Path(f"/proc/{pid}/stat"))


def cpu_s_of_threads(pid: int) -> tuple[float, float]:
    """The same for the main thread and for all others that are alive."""
    used = {folder.name: _cpu_s(folder / "stat") for folder in Path(f"/proc/{pid}/task").iterdir()}
    main_s = used.pop(str(pid))
    return main_s, sum(used.values())


def children(pid: int) -> list[int]:
    """Processes that `pid` started."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _cpu_s(stat: Path) -> float:
    fields = stat.read_text().rpartition(")")[2].split()
    return TICK_S * (int(fields[11]) + int(fields[12]))
