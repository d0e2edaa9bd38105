"""The files that keep verdicts of tests between starts, next to compiled programs.

Owns their names, made of all that may change a verdict, and their form. Called by those who run tests, at start only.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path

import jax

import pallas_kernels
from jaxsgl.config.engine import EngineConfig
from jaxsgl.engine.start.warmup import cache_folder
from pallas_kernels.gpu_compiler import mosaic_ptxas_after_choice, versions_key, xla_ptxas
from pallas_kernels.selftest.report import Request, Verdict

logger = logging.getLogger(__name__)

FOLDER = "kernel-tests"  # next to compiled programs


def file_of(config: EngineConfig, request: Request, machine: str) -> Path | None:
    """Where verdicts on this request are kept, on a machine of these drivers and devices; None: nowhere."""
    folder = cache_folder(config.compilation_cache_dir, versions_key() if request.platform == "gpu" else "")
    if folder is None:
        return None
    key = [
        request.line(),
        machine,
        str(config.device_ids),
        *map(str, (xla_ptxas(), mosaic_ptxas_after_choice())),
        *(os.environ.get(name, "") for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "CUDA_VISIBLE_DEVICES")),
        jax.__version__,
        importlib.metadata.version("jaxlib"),
        _hash_of_sources(),
    ]
    return folder / FOLDER / f"{hashlib.sha256(json.dumps(key).encode()).hexdigest()}.json"


def _hash_of_sources() -> str:
    home = Path(pallas_kernels.__file__).parent
    found = hashlib.sha256()
    for path in sorted(path for path in home.rglob("*") if path.suffix in (".py", ".json", ".cc", ".h")):
        found.update(str(path.relative_to(home)).encode() + b"\0" + path.read_bytes() + b"\0")
    return found.hexdigest()


def read(file: Path) -> tuple[Verdict, ...] | None:
    """What `write` wrote; None if there is no such file, or it holds something else."""
    try:
        return tuple(Verdict.of(each) for each in json.loads(file.read_text()))
    except (OSError, ValueError, TypeError):
        return None


def write(file: Path, verdicts: Sequence[Verdict]) -> None:
    """Keeps them, or warns that it can't."""
    text = json.dumps([dataclasses.asdict(each) for each in verdicts], indent=1)
    partial = file.with_suffix(f".{os.getpid()}")
    try:
        file.parent.mkdir(mode=0o700, exist_ok=True)
        partial.write_text(text)
        partial.replace(file)
    except OSError as error:
        logger.warning("the verdicts on kernels are not kept between starts: %s", error)
