"""The GPU code that compilers made: registers, spills, shared memory and instructions, read from their dumps.

XLA writes PTX per program (`module_*.jit_<name>.*.ptx`), with its own fusions and our Triton kernels; Mosaic GPU writes
PTX per kernel, with `*.resources.txt` beside it. `ptxas -v` reports what a kernel uses. Called by `compile_for`.
"""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

# Names of our pallas_calls begin so.
OUR_NAMES = (
    "store_kv",
    "rotate_and_store",
    "add_and_norm",
    "grouped_product",
    "grouped_float8_product",
    "gated_product",
    "grouped_packed_product",
    "gated_packed_product",
    "quantized_product",
    "ordered_product",
    "sums_of_rows",
    "float8_product",
    "float8_rows",
    "choose_experts",
    "group_by_expert",
    "gather_rows",
    "absorb_and_store",
    "attend_to_chosen",
    "attend_to_groups",
    "score_tokens",
    "best_places",
    "delta_",
    "merge_",
    "paged_",
)

# Numbers of ptxas's advisories about wgmma and setmaxnreg: that products are serialized, or registers not moved.
ADVISORY = r"C75\d\d"

# Instructions by name, as regular expressions for PTX.
INSTRUCTIONS = {
    "wgmma": r"\bwgmma\.mma_async",
    "tcgen05": r"\btcgen05\.mma",
    "mma": r"\bmma\.sync",
    "float8": r"\bw?gmma\S*\.e4m3\.e4m3\b|\bmma\.sync\S*\.e4m3\.e4m3\b|\btcgen05\.mma\S*f8f6f4",
    "bulk": r"\bcp\.async\.bulk",
    "cp.async": r"\bcp\.async\.c[ag]",
    "vector load": r"\bld\.global[.\w:]*\.v4",
    "vector store": r"\bst\.global[.\w:]*\.v4",
}


@dataclass(frozen=True)
class KernelCode:
    """One entry function.

    Attributes:
      name: name of the entry.
      registers: per thread.
      spill_bytes: stored to and loaded from local memory because registers ran out, per thread.
      shared_bytes: shared memory per thread block; None if no dump says.
      instructions: those of INSTRUCTIONS that occur in it.
      advisories: what ptxas says it could not do as asked, such as to overlap wgmma, beginning with a number.
    """

    name: str
    registers: int
    spill_bytes: int
    shared_bytes: int | None
    instructions: tuple[str, ...]
    advisories: tuple[str, ...] = ()


def kernels_in(folder: Path, ptxas: Path) -> list[KernelCode]:
    """The Pallas kernels of a program, from its folder of dumps; XLA's own fusions are left out."""
    found = []
    for ptx_file in sorted(folder.rglob("*.ptx")):
        ptx = ptx_file.read_text()
        is_mosaic = "mosaic_gpu_kernel" in ptx
        for entry in re.findall(r"\.entry\s+([\w$]+)", ptx):
            if not is_mosaic and not entry.startswith(OUR_NAMES):
                continue
            registers, spills, advisories = _ptxas(ptx_file, ptx, ptxas)[entry]
            present = tuple(name for name, pattern in INSTRUCTIONS.items() if re.search(pattern, ptx))
            shared = _mosaic_shared(ptx_file) if is_mosaic else _xla_shared(entry, folder)
            found.append(KernelCode(entry, registers, spills, shared, present, advisories))
    return found


def _ptxas(ptx_file: Path, ptx: str, ptxas: Path) -> dict[str, tuple[int, int, tuple[str, ...]]]:
    """Registers, spilled bytes and advisories by entry."""
    target = re.search(r"\.target\s+(\w+)", ptx)
    assert target is not None, f"{ptx_file} has no .target line"
    command = [str(ptxas), "-v", f"-arch={target[1]}", str(ptx_file), "-o", "/dev/null"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"ptxas failed on {ptx_file}: {done.stderr}")
    found = {}
    advisories = re.findall(rf"\(({ADVISORY})\)\s*(.*)", done.stderr)
    for part in done.stderr.split("Compiling entry function")[1:]:
        entry = re.search(r"'([^']+)'", part)
        spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", part)
        registers = re.search(r"Used (\d+) registers", part)
        assert entry and spills and registers, f"ptxas says something new: {part}"
        # Most advisories name the function that they are about.
        mine = tuple(f"{code} {text}" for code, text in advisories if entry[1] in text or "function" not in text)
        found[entry[1]] = int(registers[1]), int(spills[1]) + int(spills[2]), mine
    return found


def _xla_shared(entry: str, folder: Path) -> int | None:
    for path in folder.glob("*thunk_sequence.txt"):
        match = re.search(rf"\b{re.escape(entry)}\b.*shared_memory: (\d+) bytes", path.read_text())
        if match:
            return int(match[1])
    return None


def _mosaic_shared(ptx_file: Path) -> int | None:
    path = ptx_file.with_suffix(".resources.txt")
    match = re.search(r"smem_scratch_bytes=(\d+)", path.read_text()) if path.exists() else None
    return int(match[1]) if match else None
