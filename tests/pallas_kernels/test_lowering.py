"""Every kernel lowers for CUDA and TPU without such hardware, on the oldest and the newest JAX that we support."""

import json
import os
import subprocess
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
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


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Future[list[dict[str, str]]]]]:
    """What was lowered by each version: side by side, since each takes a minute or two of one core."""
    folder = tmp_path_factory.mktemp("jax_versions")
    with ThreadPoolExecutor(len(VERSIONS)) as threads:
        yield {version: threads.submit(lower_with, version, folder / version) for version in VERSIONS}


def lower_with(version: str, folder: Path) -> list[dict[str, str]]:
    """A line for each kernel, from a new environment with one JAX and nothing else; none without a Python for it."""
    requirement, minimum = VERSIONS[version]
    python = find_python(minimum)
    if python is None:
        return []
    subprocess.run([python, "-m", "venv", str(folder)], check=True)
    subprocess.run([str(folder / "bin/pip"), "install", "-q", "--no-compile", requirement, FORGOTTEN], check=True)
    done = subprocess.run(
        [str(folder / "bin/python"), "-m", "tests.pallas_kernels.lower_everything"],
        cwd=ROOT, env={**os.environ, "JAX_PLATFORMS": "cpu"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("version", VERSIONS)
def test_every_kernel_lowers_for_cuda_and_tpu(version: str, outputs: dict[str, Future[list[dict[str, str]]]]) -> None:
    lines = outputs[version].result()
    if find_python(VERSIONS[version][1]) is None:
        pytest.skip("{} needs Python {}.{} or newer".format(VERSIONS[version][0], *VERSIONS[version][1]))
    assert len(lines) == 3 * 3 * len(GRID_SPECS)
    for backend, calls in CALL_OF.items():
        mine = [line for line in lines if line["backend"] == backend]
        lowered = [line for line in mine if "refused" not in line]
        assert {line["custom_call"] for line in lowered} <= set(calls), lowered
        assert len({line["op"] for line in lowered}) == OPS[backend], mine
