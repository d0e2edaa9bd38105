"""Every kernel lowers for CUDA and TPU without such hardware, on the oldest and the newest JAX that we support."""

import functools
import json
import os
import subprocess
from pathlib import Path

import pytest

from pallas_kernels.arg_specs import GRID_SPECS
from scripts.compile_check.pythons import find_python

ROOT = Path(__file__).parents[2]
# The ends of what pyproject.toml allows, and the oldest Python that each runs on.
VERSIONS = {"oldest": ("jax==0.10.0", (3, 11)), "newest": ("jax>=0.12,<0.13", (3, 12))}
FORGOTTEN = "absl-py"  # JAX 0.10 imports it with Mosaic GPU, without requiring it
CALL_OF = {"triton": ("triton_kernel_call", "__gpu$xla.gpu.triton"), "mosaic_gpu": ("mosaic_gpu",),
           "mosaic_tpu": ("tpu_custom_call",)}  # fmt: skip
OPS = {"triton": 3, "mosaic_gpu": 2, "mosaic_tpu": 3}


@functools.cache
def environment(version: str, folder: Path) -> Path:
    """The python of a new environment with one JAX and nothing else."""
    requirement, minimum = VERSIONS[version]
    python = find_python(minimum)
    if python is None:
        pytest.skip(f"{requirement} needs Python {'.'.join(map(str, minimum))} or newer, and this machine has none")
    subprocess.run([python, "-m", "venv", str(folder / version)], check=True)
    subprocess.run([str(folder / version / "bin/pip"), "install", "-q", requirement, FORGOTTEN], check=True)
    return folder / version / "bin/python"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("jax_versions")


@pytest.mark.timeout(900)
@pytest.mark.parametrize("version", VERSIONS)
def test_every_kernel_lowers_for_cuda_and_tpu(version: str, folder: Path) -> None:
    python = environment(version, folder)
    done = subprocess.run(
        [str(python), "-m", "tests.pallas_kernels.lower_everything"],
        cwd=ROOT, env={**os.environ, "JAX_PLATFORMS": "cpu"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(lines) == 3 * 3 * len(GRID_SPECS)
    for backend, calls in CALL_OF.items():
        mine = [line for line in lines if line["backend"] == backend]
        lowered = [line for line in mine if "refused" not in line]
        assert {line["custom_call"] for line in lowered} <= set(calls), lowered
        assert len({line["op"] for line in lowered}) == OPS[backend], mine
