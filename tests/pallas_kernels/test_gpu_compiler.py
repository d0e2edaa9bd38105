"""The compiler that is checked is the one that runs. Those known to make wrong code for Hopper are not trusted."""

import dataclasses
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import PagedKv, gpu_compiler, paged_decode_attention, paged_extend_attention
from pallas_kernels.triton.common import tile_rows_for

Q = jnp.zeros((2, 16, 128), jnp.bfloat16)
PAGES = jnp.zeros((4, 8, 64, 128), jnp.bfloat16)
KV = PagedKv(PAGES, PAGES, jnp.zeros((2, 1), jnp.int32), jnp.zeros(2, jnp.int32))


@dataclasses.dataclass
class Gpu:
    device_kind: str
    compute_capability: str = "9.0"
    platform: str = "gpu"
    core_count: int = 132


class Machine:
    """A machine whose compilers are scripts that print versions: on the PATH, in CUDA's folder, in pip's package."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._folder, self._monkeypatch = folder, monkeypatch
        for name in ("CUDA_ROOT", "CUDA_HOME", "CUDA_PATH"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("PATH", str(folder / "first"))
        monkeypatch.setattr(gpu_compiler, "PACKAGES", ("no_such_package.cu13",))
        monkeypatch.setattr(gpu_compiler, "TOOLKITS", (folder / "toolkit",), raising=False)

    def on_path(self, *versions: str) -> None:
        homes = [self._home(f"path/{version}", version) for version in versions]
        self._monkeypatch.setenv("PATH", os.pathsep.join(str(home / "bin") for home in homes))

    def toolkit(self, version: str) -> None:
        self._home("toolkit", version)

    def package(self, version: str) -> None:
        self._home("pip/fake_nvidia/cu13", version)
        self._monkeypatch.syspath_prepend(self._folder / "pip")
        self._monkeypatch.setattr(gpu_compiler, "PACKAGES", ("fake_nvidia.cu13", "no_such_package.cuda_nvcc"))

    def root(self, version: str) -> None:
        self._monkeypatch.setenv("CUDA_ROOT", str(self._home("root", version)))

    def taken_by_mosaic(self) -> Path:
        """What its search finds: the PATH's, else that of CUDA's folder, else that of pip's package."""
        places = [self._folder / "toolkit/bin/ptxas", self._folder / "pip/fake_nvidia/cu13/bin/ptxas"]
        return Path(shutil.which("ptxas") or next(place for place in places if place.exists()))

    def _home(self, name: str, version: str) -> Path:
        return fake_ptxas(self._folder / name, version)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


def fake_ptxas(home: Path, version: str) -> Path:
    path = home / "bin/ptxas"
    path.parent.mkdir(parents=True)
    path.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {version[:4]}, V{version}'\n")
    path.chmod(0o755)
    return home


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    jax.clear_caches()  # kernels are traced anew
    return lambda kind: monkeypatch.setattr(jax, "devices", lambda *_: [Gpu(kind)])


def decode(backend: str = "mosaic_gpu") -> str:
    return str(jax.make_jaxpr(lambda: paged_decode_attention(Q, KV, backend=backend))())


def extend(backend: str = "auto") -> str:
    return str(jax.make_jaxpr(lambda: paged_extend_attention(Q, jnp.asarray([0, 1, 2]), KV, backend=backend))())


def number(of: gpu_compiler.Ptxas | None) -> str | None:
    return None if of is None else of.number


def test_mosaic_and_xla_search_in_different_orders(machine: Machine) -> None:
    """XLA: CUDA_ROOT, else pip's package, then the PATH. Mosaic: the PATH, CUDA's folder, then pip's package."""

    def found() -> tuple[str | None, str | None]:
        return number(gpu_compiler.mosaic_ptxas()), number(gpu_compiler.xla_ptxas())

    assert found() == (None, None)
    machine.package("13.5.37")
    assert found() == ("13.5.37", "13.5.37")
    machine.toolkit("13.0.88")
    assert found() == ("13.0.88", "13.5.37")
    machine.on_path("13.2.50", "13.3.10")
    assert found() == ("13.2.50", "13.5.37")
    machine.root("13.1.80")
    assert found() == ("13.2.50", "13.1.80")


def test_without_pips_package_both_take_the_path(machine: Machine) -> None:
    machine.on_path("13.1.80")
    machine.toolkit("13.0.88")
    assert number(gpu_compiler.mosaic_ptxas()) == number(gpu_compiler.xla_ptxas()) == "13.1.80"


@pytest.mark.parametrize("old_is_on_path", [True, False])
def test_the_compiler_that_is_checked_and_logged_is_the_one_that_mosaic_takes(
    machine: Machine, on: Callable[[str], None], caplog: pytest.LogCaptureFixture, old_is_on_path: bool
) -> None:
    """As on a machine with CUDA 13.0 and pip's newer compiler."""
    caplog.set_level(logging.INFO)
    on("NVIDIA H200")
    machine.package("13.5.37")
    (machine.on_path if old_is_on_path else machine.toolkit)("13.0.88")
    assert "paged_decode_attention" in decode()  # it was checked, and not refused
    gpu_compiler.log_compilers("NVIDIA H200")
    logged = caplog.records[-1]
    assert logged.levelname == "INFO" and "kernels are compiled by ptxas 13.5.37" in logged.getMessage()
    assert "13.5.37" in machine.taken_by_mosaic().read_text()


def test_a_right_compiler_further_back_on_the_path_comes_to_its_front(
    machine: Machine, on: Callable[[str], None]
) -> None:
    on("NVIDIA H200")
    machine.on_path("12.8.93", "13.1.80")
    assert "paged_decode_attention" in decode()
    assert number(gpu_compiler.mosaic_ptxas()) == number(gpu_compiler.xla_ptxas()) == "13.1.80"
    path = os.environ["PATH"]
    decode()
    assert os.environ["PATH"] == path  # it is there once


def test_a_right_compiler_that_mosaic_finds_is_left_to_it(machine: Machine, on: Callable[[str], None]) -> None:
    on("NVIDIA H200")
    machine.on_path("13.1.80")
    machine.package("13.5.37")
    path = os.environ["PATH"]
    assert "paged_decode_attention" in decode()
    assert os.environ["PATH"] == path and gpu_compiler.versions_key() == "ptxas-13.5.37-13.1.80"


def test_asking_changes_nothing(machine: Machine) -> None:
    machine.on_path("13.0.88", "13.1.80")
    path = os.environ["PATH"]
    assert gpu_compiler.refuse_for_hopper() is None
    assert number(gpu_compiler.mosaic_ptxas_after_choice()) == "13.1.80"
    gpu_compiler.versions_key()
    assert os.environ["PATH"] == path


@pytest.mark.parametrize("version", ["12.8.61", "12.8.93", "12.9.86", "13.0.88"])
def test_hopper_kernels_refuse_a_compiler_known_to_be_wrong(
    version: str, machine: Machine, on: Callable[[str], None]
) -> None:
    on("NVIDIA H200")
    machine.on_path(version)
    message = rf"ptxas {version} \(.*/bin/ptxas\) may compile .* wrong code.*pip install 'nvidia-cuda-nvcc>=13.1'"
    with pytest.raises(ValueError, match=message):
        decode()
    with pytest.raises(ValueError, match=message):
        extend("mosaic_gpu")


@pytest.mark.parametrize("version", ["12.6.85", "13.1.80", "13.5.37"])
def test_hopper_kernels_take_other_compilers(version: str, machine: Machine, on: Callable[[str], None]) -> None:
    on("NVIDIA H200")
    machine.on_path(version)
    assert "paged_decode_attention" in decode()


def test_auto_takes_triton_in_place_of_a_kernel_that_would_be_compiled_wrongly(
    machine: Machine, on: Callable[[str], None]
) -> None:
    on("NVIDIA H100 80GB HBM3")
    machine.on_path("13.0.88")
    assert "num_warps" in extend()  # a parameter of Triton's kernels alone


def test_tritons_tiles_need_no_wgmma_where_its_compiler_is_suspect(machine: Machine, on: Callable[[str], None]) -> None:
    """Triton multiplies 64 rows and more by wgmma on Hopper, which is what was compiled wrongly."""
    machine.package("13.0.88")
    machine.on_path("13.1.80")  # Mosaic's: of no help to Triton
    for kind, rows in (("NVIDIA H200", 32), ("NVIDIA A100-SXM4-80GB", 128)):
        on(kind)
        assert tile_rows_for(128) == rows and tile_rows_for(16) == 16
    on("NVIDIA H200")
    assert "bf16[32,128]" in extend("triton") and "bf16[128,128]" not in extend("triton")
    machine.root("13.5.37")
    jax.clear_caches()
    assert tile_rows_for(128) == 128 and "bf16[128,128]" in extend("triton")


def test_start_logs_the_compilers_and_warns_of_a_wrong_one(machine: Machine, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    machine.on_path("13.0.88")
    gpu_compiler.log_compilers("NVIDIA A100-SXM4-80GB")
    (told,) = caplog.records
    assert told.levelname == "INFO" and "ptxas 13.0.88" in told.getMessage()
    gpu_compiler.log_compilers("NVIDIA H200")
    mosaic, triton = caplog.records[-2:]
    assert mosaic.levelname == triton.levelname == "WARNING"
    assert "13.1 or newer" in mosaic.getMessage() and "Triton's kernels do without" in triton.getMessage()
    machine.package("13.5.37")
    machine.on_path("13.1.80")
    caplog.clear()
    gpu_compiler.log_compilers("NVIDIA H200")
    (told,) = caplog.records
    assert "Mosaic's kernels are compiled by ptxas 13.1.80" in told.getMessage()
    assert "XLA's and Triton's by ptxas 13.5.37" in told.getMessage()


@pytest.mark.parametrize("code", ["not a program", "#!/bin/sh\nexit 1\n", "#!/bin/sh\necho V11.7.99\n"])
def test_a_compiler_that_xla_passes_over_is_passed_over(machine: Machine, code: str) -> None:
    """One that doesn't run, or is too old for XLA."""
    machine.on_path("13.0.88", "13.1.80")
    (Path(os.environ["PATH"].split(os.pathsep)[0]) / "ptxas").write_text(code)
    assert number(gpu_compiler.mosaic_ptxas()) == "13.1.80"


def test_kept_programs_are_named_for_the_compilers_that_made_them(machine: Machine) -> None:
    assert gpu_compiler.versions_key() == ""
    machine.on_path("13.0.88")
    assert gpu_compiler.versions_key() == "ptxas-13.0.88"
    machine.package("13.5.37")
    assert gpu_compiler.versions_key() == "ptxas-13.5.37"
