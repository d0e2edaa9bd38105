"""Hosts compare model, kernels, sizes and what their programs exchange before any step runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jaxsgl.engine.engine import Engine
from jaxsgl.engine.start.joining import check_hosts, same_programs
from jaxsgl.engine.weight_store import read_arch
from jaxsgl.errors import ConfigError
from pallas_kernels.choice import KernelChoice
from tests.engine.conftest import ConfigMaker

SUM = "%x = f32[4,8]{1,0} all-reduce(%y), channel_id=1\n"
GATHER = "%z = f32[8]{0} all-gather-start(%x), channel_id=2\n"


class Recording:
    """`Hosts` that note what is compared."""

    rank = 0
    num_threads = 1
    address = "localhost"

    def __init__(self, size: int = 2) -> None:
        self.size = size
        self.told: dict[str, str] = {}

    def same(self, what: str, value: str, way_out: str) -> None:
        self.told[what] = value

    def least(self, what: str, values: Sequence[int]) -> tuple[int, ...]:
        return tuple(values)

    def all_of(self, what: str, value: str) -> tuple[str, ...]:
        return (value,)

    def fail(self, text: str) -> None:
        raise AssertionError(text)

    def end(self) -> None:
        raise AssertionError


def told_of(**texts: str) -> str:
    """What is told of programs of these texts."""
    done = {
        name: SimpleNamespace(compiled=SimpleNamespace(as_text=lambda text=text: text)) for name, text in texts.items()
    }
    compiled: Any = SimpleNamespace(compilations=done)
    hosts = Recording()
    same_programs(compiled, Any, hosts)  # type: ignore[arg-type]
    return hosts.told["the programs"]


def test_other_exchanges_another_order_or_other_programs_are_told_apart() -> None:
    told = told_of(a=SUM + GATHER)
    assert told.startswith("1 with 2 exchanges ")
    assert told == told_of(a=SUM + "%v = f32[4]{0} add(%a, %b)\n" + GATHER)
    assert len({told, told_of(a=GATHER + SUM), told_of(a=SUM), told_of(b=SUM + GATHER)}) == 4
    assert told != told_of(a=SUM.replace("f32[4,8]", "bf16[4,8]") + GATHER)


def test_one_host_compares_nothing(engine: Engine) -> None:
    hosts = Recording(1)
    same_programs(engine.compiled, engine.capacity, hosts)
    check_hosts(Path(), engine.arch, KernelChoice(), hosts)
    assert not hosts.told


def test_the_model_and_its_kernels_are_compared_and_images_are_refused(tiny_config: ConfigMaker) -> None:
    config = tiny_config()
    folder, hosts = Path(config.model), Recording()
    arch = read_arch(config, folder)
    check_hosts(folder, arch, KernelChoice(), hosts)
    assert set(hosts.told) == {"the models", "the kernels"}
    seeing: Any = SimpleNamespace(name="Seeing", tower=object())
    with pytest.raises(ConfigError, match=r"Seeing takes images, .* give --language-only"):
        check_hosts(folder, seeing, KernelChoice(), hosts)


class Poor(Recording):
    """Another host has hardly any memory."""

    def least(self, what: str, values: Sequence[int]) -> tuple[int, ...]:
        assert what == "the memory" and min(values) > 1000
        return 1000, 1000


def test_the_pool_must_fit_the_host_with_the_least_memory(tiny_config: ConfigMaker) -> None:
    with pytest.raises(ConfigError, match="0 MiB are free for the KV pool"):
        Engine(tiny_config(max_total_tokens=None), progress=False, hosts=Poor(1))
