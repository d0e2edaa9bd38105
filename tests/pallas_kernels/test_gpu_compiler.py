"""Compilers that are known to make wrong code for Hopper are refused by its kernels; the log says which one runs."""

import dataclasses
import logging
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import PagedKv, gpu_compiler, paged_decode_attention, paged_extend_attention

Q = jnp.zeros((2, 16, 128), jnp.bfloat16)
PAGES = jnp.zeros((4, 8, 64, 128), jnp.bfloat16)
KV = PagedKv(PAGES, PAGES, jnp.zeros((2, 1), jnp.int32), jnp.zeros(2, jnp.int32))


@dataclasses.dataclass
class Gpu:
    device_kind: str
    compute_capability: str = "9.0"
    platform: str = "gpu"
    core_count: int = 132


@pytest.fixture(autouse=True)
def no_compiler_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CUDA_ROOT", "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(gpu_compiler, "PACKAGES", ())


def fake_ptxas(home: Path, version: str) -> Path:
    path = home / "bin/ptxas"
    path.parent.mkdir(parents=True)
    path.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {version[:4]}, V{version}'\n")
    path.chmod(0o755)
    return home


def on(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "devices", lambda *_: [Gpu(kind)])


def decode(backend: str = "mosaic_gpu") -> str:
    return str(jax.make_jaxpr(lambda: paged_decode_attention(Q, KV, backend=backend))())


@pytest.mark.parametrize("version", ["12.8.61", "12.8.93", "12.9.86", "13.0.88"])
def test_hopper_kernels_refuse_a_compiler_known_to_be_wrong(
    version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on("NVIDIA H200", monkeypatch)
    monkeypatch.setenv("CUDA_HOME", str(fake_ptxas(tmp_path, version)))
    message = rf"ptxas {version} \(.*/bin/ptxas\) may compile .* wrong code.*pip install 'nvidia-cuda-nvcc>=13.1'"
    with pytest.raises(ValueError, match=message):
        decode()
    with pytest.raises(ValueError, match=message):
        paged_extend_attention(Q, jnp.asarray([0, 1, 2]), KV, backend="mosaic_gpu")


@pytest.mark.parametrize("version", ["12.6.85", "13.1.80", "13.5.37"])
def test_hopper_kernels_take_other_compilers(version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on("NVIDIA H200", monkeypatch)
    monkeypatch.setenv("CUDA_HOME", str(fake_ptxas(tmp_path, version)))
    assert "paged_decode_attention" in decode()


def test_auto_takes_triton_in_place_of_a_kernel_that_would_be_compiled_wrongly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on("NVIDIA H100 80GB HBM3", monkeypatch)
    monkeypatch.setenv("CUDA_HOME", str(fake_ptxas(tmp_path, "13.0.88")))
    traced = str(jax.make_jaxpr(lambda: paged_extend_attention(Q, jnp.asarray([0, 1, 2]), KV))())
    assert "num_warps" in traced  # a parameter of Triton's kernels alone


def test_the_compiler_is_sought_where_jax_seeks_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA_ROOT, then pip's package, then CUDA_HOME."""
    for folder, version in (("home", "12.8.93"), ("pip/nvidia/cu13", "13.5.37"), ("root", "13.1.80")):
        fake_ptxas(tmp_path / folder, version)

    def found() -> tuple[int, int, int] | None:
        path = gpu_compiler.find_ptxas()
        assert path is not None
        return gpu_compiler.ptxas_version(path)

    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "home"))
    assert found() == (12, 8, 93)
    (tmp_path / "pip/fake_nvidia").symlink_to(tmp_path / "pip/nvidia")
    monkeypatch.syspath_prepend(tmp_path / "pip")
    monkeypatch.setattr(gpu_compiler, "PACKAGES", ("no_such_package.cu13", "fake_nvidia.cu13"))
    assert found() == (13, 5, 37)
    monkeypatch.setenv("CUDA_ROOT", str(tmp_path / "root"))
    assert found() == (13, 1, 80)


def test_start_logs_the_compiler_and_warns_of_a_wrong_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setenv("CUDA_HOME", str(fake_ptxas(tmp_path, "13.0.88")))
    gpu_compiler.log_compiler("NVIDIA A100-SXM4-80GB")
    (told,) = caplog.records
    assert told.levelname == "INFO" and "ptxas 13.0.88" in told.getMessage()
    gpu_compiler.log_compiler("NVIDIA H200")
    assert caplog.records[-1].levelname == "WARNING" and "13.1 or newer" in caplog.records[-1].getMessage()


def test_a_compiler_that_does_not_run_is_not_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = fake_ptxas(tmp_path, "13.0.88")
    (home / "bin/ptxas").write_text("not a program")
    monkeypatch.setenv("CUDA_HOME", str(home))
    assert gpu_compiler.refuse_for_hopper() is None
    assert "of unknown version" in gpu_compiler.describe(gpu_compiler.find_ptxas())
