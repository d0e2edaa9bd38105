from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jaxsgl.config.engine import EngineConfig
from jaxsgl.config.hosts import HostsConfig
from jaxsgl.engine.start import devices, memory
from jaxsgl.engine.start.devices import accelerator, accelerator_name, device_variables, tpu_variables
from jaxsgl.errors import ConfigError


def test_replicas_on_one_host_take_chips_and_ports_of_their_own() -> None:
    """No TPU has run this; the variables are those of JAX's own tests with several processes."""
    replicas = [tpu_variables(ids) for ids in ((0, 1, 2, 3), (4, 5, 6, 7))]
    assert [variables["TPU_VISIBLE_CHIPS"] for variables in replicas] == ["0,1,2,3", "4,5,6,7"]
    assert {variables["TPU_CHIPS_PER_PROCESS_BOUNDS"] for variables in replicas} == {"2,2,1"}
    assert len({variables["TPU_PROCESS_PORT"] for variables in replicas}) == 2
    assert tpu_variables((0, 1, 2)) == {}, "three chips have no shape"


@pytest.mark.parametrize(
    ("platforms", "has_driver", "packages", "found"),
    [
        ("", True, ("jax_cuda13_plugin",), "gpu"),
        ("", False, ("jax_cuda13_plugin",), None),  # as in a container without a GPU
        ("", True, (), None),  # JAX for CPUs on a machine with a GPU
        ("cpu", True, ("jax_cuda13_plugin",), None),
        ("cuda,cpu", False, (), "gpu"),
        ("tpu", False, (), "tpu"),
    ],
)
def test_the_accelerator_is_known_before_jax_starts(
    platforms: str, has_driver: bool, packages: tuple[str, ...], found: str | None,
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
) -> None:  # fmt: skip
    monkeypatch.setattr(devices, "is_running", lambda: False)
    monkeypatch.setattr(devices, "jax", SimpleNamespace(config=SimpleNamespace(jax_platforms=platforms)))
    monkeypatch.setattr(devices, "_is_installed", lambda name: name in packages)
    monkeypatch.setattr(devices, "_GPU_FILES", (str(tmp_path / ("" if has_driver else "missing")),))
    assert accelerator() == found


def test_a_gpu_without_its_package_is_refused_before_kernels_are_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "is_running", lambda: False)
    for module in (devices, memory):
        monkeypatch.setattr(module, "jax", SimpleNamespace(config=SimpleNamespace(jax_platforms="cuda")))
    monkeypatch.setattr(devices, "_is_installed", lambda name: False)
    with pytest.raises(
        ConfigError, match=r"JAX_PLATFORMS=cuda .*: install its package with pip install 'jaxsgl\[cuda13"
    ):
        devices.reveal_devices(EngineConfig())


def test_the_name_of_a_gpu_changes_with_the_driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(devices, "_DRIVER", tmp_path)
    (tmp_path / "gpus/0000:01:00.0").mkdir(parents=True)
    (tmp_path / "gpus/0000:01:00.0/information").write_text("Model: \t\t NVIDIA H200\nIRQ: 7\n")
    names = set()
    for version in ("580.159.04", "595.1"):
        (tmp_path / "version").write_text(f"NVRM version: NVIDIA UNIX Kernel Module {version}\nGCC version: 13\n")
        names.add(accelerator_name("gpu"))
    assert len(names) == 2 and all("NVIDIA H200" in name and "IRQ" not in name for name in names)


@pytest.mark.parametrize(
    ("config", "shown"),
    [
        (EngineConfig(), "0"),
        (EngineConfig(tp=2, pp_size=2), "0,1,2,3"),
        (EngineConfig(tp=2, device_ids=(4, 6)), "4,6"),
        (EngineConfig(tp=2, hosts=HostsConfig(nnodes=2, node_rank=1, dist_init_addr="127.0.0.1:2000")), None),
    ],
)
def test_jax_sees_the_gpus_of_the_engine_alone_so_that_others_keep_their_memory(
    config: EngineConfig, shown: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: dict[str, Any] = {}
    monkeypatch.setattr(devices, "is_running", lambda: False)
    monkeypatch.setattr(
        devices, "jax", SimpleNamespace(config=SimpleNamespace(jax_platforms="", update=told.__setitem__))
    )
    devices.reveal_devices(config)
    assert told.get("jax_cuda_visible_devices") == shown


@pytest.mark.parametrize(("visible", "first", "child"), [("", "0", "2"), ("4,5,6,7", "4", "6")])
def test_the_process_that_tests_kernels_sees_the_engines_first_gpu(
    visible: str, first: str, child: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert device_variables(EngineConfig()) == {"CUDA_VISIBLE_DEVICES": first}
    assert device_variables(EngineConfig(tp=2, device_ids=(2, 3))) == {"CUDA_VISIBLE_DEVICES": child}
