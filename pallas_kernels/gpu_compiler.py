"""The compilers of an NVIDIA GPU's code: which `ptxas` makes Mosaic's kernels, which one XLA's and Triton's.

Owns both searches, the versions that are suspected, and the one change of the environment that gives Mosaic a right
one. Never knows kernels. Called by the Hopper kernels before they are traced, by the refusals and tile sizes of
kernels with `wgmma`, by the engine when it starts, and by the GPU report.

Mosaic GPU and XLA search by the same function of XLA (`FindPtxAsExecutable`), but from different places: JAX gives XLA
the folder of CUDA_ROOT or of pip's package first, and Mosaic none. So Mosaic begins with the PATH, whatever CUDA_ROOT
says, and takes pip's package last of all (seen with JAX 0.11.2, in the compilers' own logs).
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import logging
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

from pallas_kernels.target import is_hopper

logger = logging.getLogger(__name__)

Version = tuple[int, int, int]

# JAX's own attention for Hopper refuses CUDA 12.8.0 to before 12.9.1. Of PTX that Triton made for sm_90a, others saw
# wrong numbers with 12.8.93, stores outside of shared memory with 12.8.93 and 13.0.88, and neither with 13.1.80
# (fla-org/flash-linear-attention, pull request 1262). Nothing shows that a version in between is right.
FIRST_SUSPECT: Version = (12, 8, 0)
FIRST_RIGHT: Version = (13, 1, 0)
# XLA passes over these (`FindPtxAsExecutable`).
OLDEST: Version = (11, 8, 0)
EXCLUDED: Version = (12, 3, 103)
PACKAGES = ("nvidia.cu13", "nvidia.cuda_nvcc")  # of pip's nvidia-cuda-nvcc and nvidia-cuda-nvcc-cu12
TOOLKITS = (Path("/usr/local/cuda"), Path("/opt/cuda"))
NO_FOLDER = Path("cuda_sdk_lib")  # where XLA searches first, in the working folder, if it is given nothing


@dataclasses.dataclass(frozen=True)
class Ptxas:
    """A compiler that runs."""

    path: Path
    version: Version

    @property
    def is_suspect(self) -> bool:
        """Whether it may compile `wgmma` to wrong code."""
        return FIRST_SUSPECT <= self.version < FIRST_RIGHT

    @property
    def number(self) -> str:
        """The version, such as "13.5.37"."""
        return ".".join(map(str, self.version))

    def __str__(self) -> str:
        return f"ptxas {self.number} ({self.path})"


def xla_ptxas() -> Ptxas | None:
    """The compiler of XLA's and Triton's kernels; None if none is found, when XLA takes the driver's."""
    return next(_those_of(_xla_folders()), None)


def mosaic_ptxas() -> Ptxas | None:
    """The compiler that Mosaic GPU would find now."""
    return next(_those_of(_mosaic_folders()), None)


def mosaic_ptxas_after_choice() -> Ptxas | None:
    """The compiler that Mosaic GPU will find after `choose_mosaic_ptxas`. Changes nothing."""
    return _right_one() or mosaic_ptxas()


def choose_mosaic_ptxas() -> None:
    """Where Mosaic would find a suspect, puts the folder of a right one, if there is any, at the front of the PATH.

    Mosaic looks at the PATH anew for each kernel. Call it before JAX starts threads, which may read the environment.
    """
    if (right := _right_one()) is not None:
        logger.info("%s is put first in PATH, since Mosaic would have taken %s", right, mosaic_ptxas())
        os.environ["PATH"] = os.pathsep.join([str(right.path.parent), *filter(None, [os.environ.get("PATH")])])


def refuse_for_hopper() -> str | None:
    """Why no compiler here can be trusted with Mosaic's kernels for Hopper, with the way out; None where one can."""
    found = mosaic_ptxas_after_choice()
    if found is None or not found.is_suspect:
        return None
    return (
        f"{found} may compile Hopper's instructions to wrong code, as those of CUDA 12.8 to 13.0 do: install 13.1 or "
        "newer (pip install 'nvidia-cuda-nvcc>=13.1' for JAX's CUDA 13 plug-in), or put its folder into PATH"
    )


def log_compilers(device_kind: str) -> None:
    """Logs the compilers of an NVIDIA GPU, and warns where one can't be trusted with Hopper's instructions."""
    mosaic, xla = mosaic_ptxas_after_choice(), xla_ptxas()
    if mosaic == xla:
        logger.info("kernels are compiled by %s", xla or "the driver: no ptxas found")
    else:
        logger.info("Mosaic's kernels are compiled by %s, XLA's and Triton's by %s", mosaic, xla)
    if not is_hopper(device_kind):
        return
    if (reason := refuse_for_hopper()) is not None:
        logger.warning(
            "%s. Until then attention runs on Triton's kernels; scripts/check kernels says whether they are right",
            reason,
        )
    if xla is not None and xla.is_suspect:
        logger.warning(
            "%s compiles XLA's and Triton's kernels and may compile wgmma to wrong code: Triton's kernels do without, "
            "which is slower. Install 13.1 or newer, or name the folder above its bin with CUDA_ROOT",
            xla,
        )


def versions_key() -> str:
    """Both versions, for the name of a folder that keeps compiled code: "ptxas-13.5.37"; empty if there is none.

    JAX's own key of a kept program doesn't have them.
    """
    numbers = dict.fromkeys(each.number for each in (xla_ptxas(), mosaic_ptxas_after_choice()) if each is not None)
    return "-".join(["ptxas", *numbers]) if numbers else ""


def _right_one() -> Ptxas | None:
    """The compiler that Mosaic should be given in place of a suspect; None if it has a right one, or there is none."""
    found = mosaic_ptxas()
    if found is None or not found.is_suspect:
        return None
    return next((each for each in _those_of((*_xla_folders(), *_mosaic_folders())) if not each.is_suspect), None)


def _xla_folders() -> Iterator[Path]:
    yield _folder_of_jax() / "bin"
    yield from _generic_folders()


def _mosaic_folders() -> Iterator[Path]:
    yield NO_FOLDER / "bin"
    yield from _generic_folders()


def _generic_folders() -> Iterator[Path]:
    for folder in os.environ.get("PATH", "").split(os.pathsep):
        yield Path(folder)
    for home in TOOLKITS:
        yield home / "bin"
    for name in PACKAGES:
        for home in _homes(name) or ():
            yield home / "bin"


def _folder_of_jax() -> Path:
    """What JAX gives to XLA as CUDA's folder: the first package that can be imported counts, if any."""
    if root := os.environ.get("CUDA_ROOT"):
        return Path(root)
    homes = next((homes for name in PACKAGES if (homes := _homes(name)) is not None), [])
    return next((home for home in homes if (home / "bin/ptxas").exists()), NO_FOLDER)


def _homes(package: str) -> list[Path] | None:
    """The folders of a package; None if it isn't installed."""
    try:
        found = importlib.util.find_spec(package)
    except ImportError:  # there is no package `nvidia`
        return None
    return None if found is None else [Path(folder) for folder in found.submodule_search_locations or ()]


def _those_of(folders: Iterator[Path] | tuple[Path, ...]) -> Iterator[Ptxas]:
    """The compilers in these folders that run and that XLA doesn't pass over, in order."""
    for folder in folders:
        path = folder / "ptxas"
        try:
            version = _version(path, path.stat().st_mtime_ns)
        except OSError:  # it isn't there, or doesn't run
            continue
        if version is not None and version >= OLDEST and version != EXCLUDED:
            yield Ptxas(path, version)


@functools.cache
def _version(path: Path, _changed_ns: int) -> Version | None:
    done = subprocess.run([str(path.absolute()), "--version"], capture_output=True, text=True, check=False)
    found = re.search(r"\bV(\d+)\.(\d+)\.(\d+)\b", done.stdout) if done.returncode == 0 else None
    return (int(found[1]), int(found[2]), int(found[3])) if found else None
