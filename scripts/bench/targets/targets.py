"""The accelerators to compile for, and the virtual environments whose plug-ins compile for them.

The `.txtpb` files beside this one hold a GPU's facts as XLA's compiler wants them (cores, shared memory, bandwidth).
Imports no JAX: the parent process may have none, or another version than the targets' environments.
"""

from __future__ import annotations

import fcntl
import inspect
import json
import os
import queue
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.processes import ROOT, python_path

if TYPE_CHECKING:
    import jax

GRIDS = ("common", "steps", "steps-float8", "steps-ordered", "families", "full")
GPUS_OF_A_HOST = 8
JAX_VERSION = "0.11.2"  # has plug-in wheels for all targets


@dataclass(frozen=True)
class Target:
    """A chip.

    Attributes:
      name: its name on the command line.
      platform: platform for lowering, "cuda" or "tpu".
      extra: the extra of the package `jax` whose plug-in compiles for it; a key of `REQUIREMENTS`.
      num_cores: streaming multiprocessors, or TensorCores.
      memory_bytes: of device memory.
      backends: the kernel backends that are worth compiling for it.
      multiplies_float8: whether products with float8 weights round their rows.
    """

    name: str
    platform: str
    extra: str
    num_cores: int
    memory_bytes: int
    backends: tuple[str, ...]
    multiplies_float8: bool = False

    @property
    def engine_platform(self) -> str:
        """The platform as the engine names it, "gpu" or "tpu"."""
        return "gpu" if self.platform == "cuda" else self.platform

    def devices(self, count: int = 1) -> list[jax.Device]:
        """Descriptions of `count` devices that compile and never run; needs the target's plug-in.

        More than eight are those of several hosts.
        """
        from jax.experimental import topologies  # the parent process may have no JAX

        if self.platform == "cuda":
            config = (Path(__file__).parent / f"{self.name}.txtpb").read_text()
            hosts = -(-count // GPUS_OF_A_HOST)
            shape = f"1x{hosts}x{count // hosts}"
            described = topologies.get_topology_desc(self.name, "cuda", topology=shape, target_config=config)
        else:
            shape = next(shape for most, shape in ((4, "2x2"), (8, "2x4"), (16, "4x4")) if count <= most)
            described = topologies.get_topology_desc(f"{self.name}:{shape}", "tpu")
        return list(described.devices)[:count]

    @contextmanager
    def traced_for(self, device: jax.Device) -> Iterator[None]:
        """Inside the block, functions are traced for the device: kernels choose their backend and block sizes by it.

        A program for several devices is traced for the devices of its mesh.
        """
        from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

        fields = {"device_kind": device.device_kind, "num_cores": self.num_cores, "platform": self.platform}
        known = inspect.signature(AbstractDevice).parameters  # `platform` isn't there in every version
        abstract = AbstractDevice(**{name: value for name, value in fields.items() if name in known})
        with use_abstract_mesh(AbstractMesh((), (), abstract_device=abstract)):
            yield


TARGETS = {
    target.name: target
    for target in (
        Target("h200", "cuda", "cuda13", 132, 141 * 10**9, ("triton", "mosaic_gpu"), multiplies_float8=True),
        Target("a100", "cuda", "cuda13", 108, 80 * 10**9, ("triton",)),
        Target("b200", "cuda", "cuda13", 148, 191 * 10**9, ("triton",), multiplies_float8=True),
        Target("rtx4090", "cuda", "cuda13", 128, 25 * 10**9, ("triton",)),
        Target("rtxpro6000", "cuda", "cuda13", 188, 103 * 10**9, ("triton",)),
        Target("v5e", "tpu", "tpu", 1, 16 * 2**30, ("mosaic_tpu",)),
        Target("v6e", "tpu", "tpu", 1, 32 * 2**30, ("mosaic_tpu",)),
    )
}


def prepare_environment(dump_folder: Path, xla_flags: str = "") -> None:
    """Sets what JAX and the compilers read when they start: no device is searched for, and all code is dumped."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
    os.environ["TPU_SKIP_MDS_QUERY"] = "1"
    os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"  # several compile side by side
    dumps = f"--xla_dump_to={dump_folder} --xla_dump_hlo_as_text --xla_dump_emitter_re=ptx"
    os.environ["XLA_FLAGS"] = f"{dumps} {xla_flags}"
    os.environ["MOSAIC_GPU_DUMP_TO"] = str(dump_folder)


# What compiles for a chip. Of NVIDIA's libraries only the compiler and the linker: those of products, convolutions and
# collectives, 3 GB, are for programs that run.
REQUIREMENTS = {
    "cuda13": (f"jax-cuda13-plugin=={JAX_VERSION}", "nvidia-cuda-nvcc>=13.1", "nvidia-nvjitlink>=13.1"),
    "tpu": (f"jax[tpu]=={JAX_VERSION}",),
}
# Includes room for the wheels while they are unpacked; 1.6 GB were seen installed of each.
DISK_GB = {"cuda13": 4, "tpu": 4}
OLDEST_PYTHON = (3, 12)  # oldest Python for JAX_VERSION


def missing_for(extra: str, folder: Path) -> str | None:
    """Why the environment for `extra` can't be made in `folder`; None if it can be made or exists."""
    if _marker(folder, extra).exists():
        return None
    free = shutil.disk_usage(folder if folder.exists() else folder.parent).free / 1e9
    if free < DISK_GB[extra]:
        return f"jax[{extra}] needs {DISK_GB[extra]} GB of disk, {free:.1f} GB are free"
    if find_python(OLDEST_PYTHON) is None:
        return f"JAX {JAX_VERSION} needs Python {'.'.join(map(str, OLDEST_PYTHON))} or newer, and none was found"
    return None


def make_environment(extra: str, folder: Path) -> Path:
    """The Python of the environment with this project and what compiles for `extra`; makes it if it is missing.

    Making it takes minutes and gigabytes.
    """
    home = folder / extra
    python = home / "bin/python"
    with (folder / f"{extra}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one process makes it, others wait
        if not _marker(folder, extra).exists():
            interpreter = find_python(OLDEST_PYTHON)
            assert interpreter is not None, "missing_for says so first"
            subprocess.run([interpreter, "-m", "venv", "--clear", str(home)], check=True)
            install = [str(python), "-m", "pip", "install", "-q", "--no-compile", "-e", str(ROOT)]
            subprocess.run([*install, f"jax=={JAX_VERSION}", *REQUIREMENTS[extra]], check=True)
            _marker(folder, extra).touch()
    return python


def _marker(folder: Path, extra: str) -> Path:
    return folder / extra / f"installed-{JAX_VERSION}"


def compile_in(
    python: Path,
    target: Target,
    grid: str,
    jobs: int,
    match: str = "",
    xla_flags: str = "",
    done: Sequence[str] = (),
    tp: int = 1,
    ranks: int = 1,
) -> Iterator[dict[str, Any]]:
    """Yields the results of the target's programs whose names `match` and that aren't `done`, compiled by `jobs`
    processes side by side."""
    ptxas = next(iter(sorted(python.parents[1].glob("lib/python*/site-packages/nvidia/*/bin/ptxas"))), Path("ptxas"))
    environment = {**os.environ, "PYTHONPATH": python_path()}

    found: queue.Queue[dict[str, Any] | None] = queue.Queue()  # None: one process is done

    def share(index: int) -> None:
        command = [str(python), "-m", "bench.targets.compile_for", target.name, grid, str(index), str(jobs), str(ptxas)]
        command += ["--match", match, f"--xla-flags={xla_flags}", "--done", json.dumps(done), "--tp", str(tp)]
        command += ["--ranks", str(ranks)]
        with tempfile.TemporaryFile("w+") as errors:
            process = subprocess.Popen(
                command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, stderr=errors, text=True
            )
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith('{"target"'):
                    found.put(json.loads(line))
            if status := process.wait():
                errors.seek(0)
                problem = f"process {index} of {jobs} ended with {status}: {errors.read()[-3000:]}"
                found.put({"target": target.name, "program": "", "backend": "", "problems": [problem]})
        found.put(None)

    with ThreadPoolExecutor(jobs) as pool:
        running = [pool.submit(share, index) for index in range(jobs)]
        for _ in running:
            yield from iter(found.get, None)
        for each in running:
            each.result()


NEWEST = 13  # newest minor version that has JAX wheels and that this project supports


def find_python(minimum: tuple[int, int], newest: int = NEWEST) -> str | None:
    """A Python from `minimum` up to 3.`newest`: this one, one on the PATH, or one of pyenv; None if there is none."""
    if minimum <= sys.version_info[:2] <= (3, newest):
        return sys.executable
    names = [f"python3.{minor}" for minor in range(minimum[1], newest + 1)]
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    made = [str(path) for name in names for path in sorted(pyenv.glob(f"*/bin/{name}"))]
    return next((candidate for candidate in (*names, *made) if _works(candidate)), None)


def _works(python: str) -> bool:
    # A shim of pyenv on the PATH may refuse to run.
    try:
        done = subprocess.run([python, "-c", "import venv, ensurepip"], capture_output=True, check=False)
    except OSError:
        return False
    return done.returncode == 0
