"""The compiler of an NVIDIA GPU's code: which `ptxas` JAX would run, its version, and which ones are known to be wrong.

Owns the search and the list of bad versions. Never knows kernels. Called by the Hopper backend's refusals, and by the
engine, which logs the version when it starts.
"""

import functools
import importlib.util
import logging
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from pallas_kernels.target import is_hopper

logger = logging.getLogger(__name__)

Version = tuple[int, int, int]

# JAX's own attention for Hopper refuses CUDA 12.8.0 to before 12.9.1. Others saw the same PTX for sm_90a become wrong
# code with 12.8.93 and 13.0.88, and right code with 13.1.80 (fla-org/flash-linear-attention, pull request 1262).
# Nothing shows that a version in between is right.
FIRST_WRONG: Version = (12, 8, 0)
FIRST_RIGHT: Version = (13, 1, 0)
PACKAGES = ("nvidia.cu13", "nvidia.cuda_nvcc")  # of pip's nvidia-cuda-nvcc and nvidia-cuda-nvcc-cu12
VARIABLES = ("CUDA_HOME", "CUDA_PATH")


def find_ptxas() -> Path | None:
    """The `ptxas` that JAX takes: CUDA_ROOT's, else that of pip's package, CUDA_HOME, /usr/local/cuda or the PATH."""
    return next((path for folder in _folders() if (path := folder / "bin/ptxas").is_file()), _on_path())


def ptxas_version(path: Path) -> Version | None:
    """Its version, such as (13, 0, 88); None if it doesn't run or says nothing known."""
    try:
        return _version(path, path.stat().st_mtime_ns)
    except OSError:
        return None


def describe(path: Path | None) -> str:
    """For logs: "ptxas 13.5.37 (/path/to/ptxas)"."""
    if path is None:
        return "no ptxas found: XLA uses the driver's compiler"
    version = ptxas_version(path)
    return f"ptxas {'of unknown version' if version is None else '.'.join(map(str, version))} ({path})"


def refuse_for_hopper() -> str | None:
    """Why this machine's compiler can't be trusted with wgmma and TMA, with the way out; None where it can."""
    path = find_ptxas()
    version = ptxas_version(path) if path else None
    if version is None or not FIRST_WRONG <= version < FIRST_RIGHT:
        return None
    return (
        f"{describe(path)} may compile Hopper's instructions to wrong code, as those of CUDA 12.8 to 13.0 do: install "
        "13.1 or newer (pip install 'nvidia-cuda-nvcc>=13.1' for JAX's CUDA 13 plug-in), or name one with CUDA_ROOT"
    )


def log_compiler(device_kind: str) -> None:
    """Logs the compiler of an NVIDIA GPU, and warns where it can't be trusted with Hopper's instructions."""
    logger.info("kernels are compiled by %s", describe(find_ptxas()))
    if is_hopper(device_kind) and (reason := refuse_for_hopper()) is not None:
        logger.warning(
            "%s. Until then attention runs on Triton's kernels; scripts/check kernels says whether they are right",
            reason,
        )


def _folders() -> Iterator[Path]:
    if root := os.environ.get("CUDA_ROOT"):
        yield Path(root)
    for name in PACKAGES:
        try:
            found = importlib.util.find_spec(name)
        except ImportError:  # there is no package `nvidia`
            continue
        for folder in (found.submodule_search_locations or ()) if found else ():
            yield Path(folder)
    for variable in VARIABLES:
        if home := os.environ.get(variable):
            yield Path(home)
    yield Path("/usr/local/cuda")


def _on_path() -> Path | None:
    found = shutil.which("ptxas")
    return Path(found) if found else None


@functools.cache
def _version(path: Path, _changed_ns: int) -> Version | None:
    done = subprocess.run([str(path), "--version"], capture_output=True, text=True, check=False)
    found = re.search(r"\bV(\d+)\.(\d+)\.(\d+)", done.stdout)
    return (int(found[1]), int(found[2]), int(found[3])) if found else None
