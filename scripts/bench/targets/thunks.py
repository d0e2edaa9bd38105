"""How XLA runs a GPU program: its command buffers (CUDA graphs), and what it launches outside of them.

XLA writes `*.thunk_sequence_after_thunk_passes.txt` per program: a line per thunk, one that lies in another indented.
Imports no JAX. Called by `compile_for`, and by the GPU report.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

SUFFIX = "thunk_sequence_after_thunk_passes.txt"
# Thunks that launch nothing themselves.
CONTAINERS = frozenset(("kCommandBuffer", "kSequential", "kWhile", "kConditional", "kDynamicSliceFusion"))


@dataclass(frozen=True)
class CommandBuffers:
    """The command buffers of one program.

    Attributes:
      count: how many there are; a step should be one.
      outside: the thunks that launch something outside of them, by kind or kernel.
      num_sliced: kernels that XLA gives a slice of an array at each run.
    """

    count: int
    outside: tuple[str, ...]
    num_sliced: int


def command_buffers_in(folder: Path, module: str) -> CommandBuffers | None:
    """Those of the program that XLA calls `module`, from its dumps in the folder; None if there is no such dump."""
    found = sorted(folder.rglob(f"*.{module}.*{SUFFIX}"))
    return read(found[-1].read_text()) if found else None


def read(text: str) -> CommandBuffers:
    """Reads a dump."""
    count = 0
    outside = []
    buffer_depth: int | None = None
    for line in text.splitlines():
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
            outside.append(thunk[3].split(" ")[0] or kind)
    return CommandBuffers(count, tuple(outside), text.count(" kDynamicSliceFusion "))
