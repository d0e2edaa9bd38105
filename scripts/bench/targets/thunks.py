"""How XLA runs a GPU program: its command buffers (CUDA graphs), and what it launches outside of them.

XLA writes `*.thunk_sequence_after_thunk_passes.txt` per program: a line per thunk, one that lies in another indented.
Imports no JAX. Called by `compile_for`, and by the GPU report.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

SUFFIX = "thunk_sequence_after_thunk_passes.txt"
# Thunks that launch nothing themselves; a condition outside of command buffers waits for the device to decide it.
CONTAINERS = frozenset(("kCommandBuffer", "kSequential", "kWhile", "kDynamicSliceFusion"))


@dataclass(frozen=True)
class CommandBuffers:
    """The command buffers of one program.

    Attributes:
      count: how many there are; a step should be one, and the body of a loop in it one more.
      outside: the thunks that launch something outside of them, by kind or kernel.
      num_sliced: kernels that XLA gives a slice of an array at each run.
      num_loops: loops that are in none.
      conditions: what their conditions launch, unless XLA knows how often they turn.
    """

    count: int
    outside: tuple[str, ...]
    num_sliced: int
    num_loops: int = 0
    conditions: tuple[str, ...] = ()


def command_buffers_in(folder: Path, module: str) -> CommandBuffers | None:
    """Those of the program that XLA calls `module`, from its dumps in the folder; None if there is no such dump."""
    found = sorted(folder.rglob(f"*.{module}.*{SUFFIX}"))
    return read(found[-1].read_text()) if found else None


def read(text: str) -> CommandBuffers:
    """Reads a dump."""
    count = num_loops = 0
    outside: list[str] = []
    conditions: list[str] = []
    launched = outside
    buffer_depth: int | None = None
    for line in text.splitlines():
        launched = {"condition:": conditions, "body:": outside}.get(line.strip(), launched)
        thunk = re.match(r"( *)\d+: (k\w+)\s*(?:\[[^\]]*\])?\s*(.*)", line)
        if thunk is None:
            continue
        depth, kind = len(thunk[1]), thunk[2]
        if buffer_depth is not None and depth > buffer_depth:
            continue
        buffer_depth = None
        if kind == "kCommandBuffer":
            count += 1
            buffer_depth = depth
        elif kind not in CONTAINERS:
            launched.append(thunk[3].split(" ")[0] or kind)
        num_loops += kind == "kWhile"
    sliced = text.count(" kDynamicSliceFusion ")
    return CommandBuffers(count, tuple(outside), sliced, num_loops, tuple(conditions))
