"""What a machine has for a GPU report: packages, compilers, device, memory; a line each, with what a lack costs.

    python -m bench.report.preflight FILE

Writes the lines and the machine's facts to FILE. Needs JAX alone. Called by `bench.report.results`.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax

from bench.output import write_json
from bench.processes import ROOT
from pallas_kernels import gpu_compiler
from pallas_kernels.target import target_device

# What goes without each package.
PACKAGES = {
    "jaxlib": "nothing runs",
    "numpy": "nothing runs",
    "flax": "no engine, and no products with quantized weights",
    "msgspec": "no engine",
    "safetensors": "no engine",
    "tokenizers": "no engine",
    "ml_dtypes": "nothing runs",
    "llguidance": "grammars can't be used; this report has none",
    "torch": "no comparison with torch and transformers",
    "transformers": "no comparison with transformers",
    "matplotlib": "no picture of the kernels",
}
PLUGINS = ("jax", "jax-cuda13-plugin", "jax-cuda12-plugin", "nvidia-cuda-nvcc", "nvidia-cuda-nvcc-cu12", "triton")


@dataclasses.dataclass(frozen=True)
class Line:
    """A finding; `ok` is False where something of the report is lost."""

    what: str
    ok: bool
    detail: str


def main() -> None:
    """Looks and writes."""
    gpu_compiler.choose_mosaic_ptxas()  # as in every process of the report: this one's PATH is theirs
    machine, lines = describe()
    write_json(sys.argv[1], {"machine": machine, "lines": [dataclasses.asdict(line) for line in lines]})


def describe() -> tuple[dict[str, Any], list[Line]]:
    """The machine's facts, and the lines."""
    packages = {name: _version(name) for name in (*PLUGINS, *PACKAGES)}
    lines = [
        Line(name, packages[name] is not None, packages[name] or f"is not installed: {lost}")
        for name, lost in PACKAGES.items()
    ]
    engine = _why_not("jaxsgl.offline.llm")
    lines.append(Line("engine", engine is None, engine or "can be imported"))
    device = jax.devices()[0]
    target = target_device()
    lines.append(Line("device", target.platform == "gpu", f"{target.kind} ({target.platform}), JAX {jax.__version__}"))
    lines += [_compilers(), *_memory(device, target.platform)]
    machine = {
        "platform": target.platform,
        "kind": target.kind,
        "num_cores": target.num_cores,
        "python": sys.version.split()[0],
        "packages": packages,
        "found": sorted([name for name, version in packages.items() if version] + ["engine"] * (engine is None)),
        "ptxas": {"xla": _number(gpu_compiler.xla_ptxas()), "mosaic": _number(gpu_compiler.mosaic_ptxas())},
        "compilers": gpu_compiler.versions_key(),
        "path": os.environ.get("PATH", ""),
        "nvidia_smi": _output(
            "nvidia-smi", "--query-gpu=name,driver_version,memory.total,clocks.sm,clocks.mem", "--format=csv,noheader"
        ),
        "commit": _output("git", "-C", str(ROOT), "rev-parse", "HEAD"),
    }
    return machine, lines


def _compilers() -> Line:
    xla, mosaic = gpu_compiler.xla_ptxas(), gpu_compiler.mosaic_ptxas()
    detail = f"XLA and Triton: {xla or 'the driver'}; Mosaic: {mosaic or 'none'}"
    if (reason := gpu_compiler.refuse_for_hopper()) is not None:
        detail += f"; on Hopper Mosaic's kernels are refused: {reason}"
    return Line("ptxas", reason is None and not (xla is not None and xla.is_suspect), detail)


def _memory(device: jax.Device, platform: str) -> list[Line]:
    disk = shutil.disk_usage(Path.home()).free / 1e9
    lines = [Line("disk", disk > 5, f"{disk:.0f} GB are free for compiled programs")]
    stats = device.memory_stats() if platform != "cpu" else None
    if stats:
        free = _output("nvidia-smi", "--query-gpu=memory.free,memory.total", "--format=csv,noheader,nounits")
        lines.append(
            Line("device memory", True, f"JAX may use {stats['bytes_limit'] / 1e9:.1f} GB; MiB free, of: {free}")
        )
    return lines


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _why_not(module: str) -> str | None:
    """Why a module can't be imported; None if it can."""
    try:
        importlib.import_module(module)
    except Exception as error:  # whatever a package does when it is imported
        return f"can't be imported, so its sections are left out: {type(error).__name__}: {error}"
    return None


def _number(of: gpu_compiler.Ptxas | None) -> str | None:
    return None if of is None else of.number


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


if __name__ == "__main__":
    main()
