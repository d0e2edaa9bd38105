"""Which devices an engine takes, and whether the weights fit on them."""

from __future__ import annotations

from typing import Any

import jax
import pytest

from jaxsgl.config.engine import EngineConfig
from jaxsgl.config.hosts import HostsConfig
from jaxsgl.engine.start.devices import mesh_of, meshes_of
from jaxsgl.engine.start.memory import check_weights_fit
from jaxsgl.errors import ConfigError
from tests.engine.test_sizing import GIB, Accelerator


class Device:
    def __init__(self, index: int, platform: str = "tpu") -> None:
        self.id, self.platform, self.device_kind, self.process_index = index, platform, "TPU v5 lite", 0


def taken(monkeypatch: pytest.MonkeyPatch, config: EngineConfig, num_devices: int, platform: str = "tpu") -> list[int]:
    devices = [Device(index, platform) for index in range(num_devices)]
    monkeypatch.setattr(jax, "devices", lambda: devices)
    monkeypatch.setattr("jaxsgl.engine.start.devices.make_mesh", lambda chosen, _: [device.id for device in chosen])
    found: Any = mesh_of(config)
    return list(found)


def test_an_engine_takes_the_first_devices_or_those_that_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert taken(monkeypatch, EngineConfig(tp=2), 4) == [0, 1]
    assert taken(monkeypatch, EngineConfig(tp=2, device_ids=(3, 1)), 4) == [3, 1]
    assert taken(monkeypatch, EngineConfig(tp=2, device_ids=(6, 7)), 2, "gpu") == [0, 1], "JAX shows these two alone"


def test_too_few_devices_are_an_error_that_names_the_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"^--tp 8 needs 8 devices, but JAX has 4 \(TPU v5 lite\): give --tp 4"):
        taken(monkeypatch, EngineConfig(tp=8), 4)
    with pytest.raises(ConfigError, match=r"--device-ids 4,5 needs 6 devices, but JAX has 4"):
        taken(monkeypatch, EngineConfig(tp=2, device_ids=(4, 5)), 4)
    with pytest.raises(ConfigError, match=r"--device-ids are \(1, 1\), but must be --tp 2 different devices"):
        EngineConfig(tp=2, device_ids=(1, 1))
    with pytest.raises(ConfigError, match="--tp is 0"):
        EngineConfig(tp=0)


TWO_HOSTS = HostsConfig(nnodes=2, node_rank=0, dist_init_addr="127.0.0.1:2000")


@pytest.mark.parametrize(
    ("config", "way_out"),
    [
        (
            EngineConfig(tp=2, pp_size=2),
            "--tp 2 --pp-size 2 .*: give a --tp and a --pp-size whose product is 2 or less,",
        ),
        (EngineConfig(tp=2, pp_size=4, hosts=TWO_HOSTS), "on 2 hosts .*: .* whose product is 4 or less,"),
        (EngineConfig(pp_size=4, device_ids=(0, 1, 2, 3)), "--device-ids 0,1,2,3 .*: .* whose product is 2 or less,"),
        (EngineConfig(device_ids=(5,)), "--device-ids 5 .*: name devices from 0 to 1, or give fewer replicas"),
        (EngineConfig(tp=4, device_ids=(0, 1, 2, 3)), "--device-ids 0,1,2,3 .*: give --tp 2 or less,"),
    ],
)
def test_what_is_to_be_given_with_too_few_devices_can_be_served(
    config: EngineConfig, way_out: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("devices", "local_devices"):
        monkeypatch.setattr(jax, name, lambda: [Device(0), Device(1)])
    with pytest.raises(ConfigError, match=way_out):
        meshes_of(config)


def test_weights_that_no_device_can_hold_are_refused_before_they_are_read() -> None:
    device: Any = Accelerator(limit=76 * GIB, used=0)
    check_weights_fit(device, 0.95, 70 * GIB, 2)
    message = (
        "the weights take 118.00 GiB on each of 4 devices, but JAX may use 76.00 GiB of the device's 80.00 GiB: "
        "give --tp 8 or more, --quantization, or a smaller model"
    )
    with pytest.raises(ConfigError, match=message):
        check_weights_fit(device, 0.95, 118 * GIB, 4)
