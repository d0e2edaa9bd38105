from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jaxsgl.config.engine import EngineConfig
from jaxsgl.config.features import DisaggregationConfig, HostKvConfig
from jaxsgl.errors import ConfigError
from jaxsgl.models.rope import RopeParams
from jaxsgl.wiring import (
    RETRACT_VARIABLE,
    _model_name,
    build,
    file_of_prefixes,
    files_digest,
    retract_every,
    seed_of_requests,
    version_of,
)

pytestmark = pytest.mark.device


@pytest.mark.parametrize(("text", "steps"), [(None, None), ("", None), ("1", 1), ("250", 250)])
def test_the_test_switch_names_a_number_of_steps(
    monkeypatch: pytest.MonkeyPatch, text: str | None, steps: int | None
) -> None:
    monkeypatch.delenv(RETRACT_VARIABLE, raising=False)
    if text is not None:
        monkeypatch.setenv(RETRACT_VARIABLE, text)
    assert retract_every() == steps


@pytest.mark.parametrize("text", ["0", "-1", "x", "1.5", "٣", " 3"])
def test_a_bad_test_switch_fails_before_anything_is_loaded(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(RETRACT_VARIABLE, text)
    with pytest.raises(ConfigError, match=f"{RETRACT_VARIABLE} is .* but must be a number of steps"):
        build(EngineConfig(model="/nowhere"))


def test_prefixes_of_a_decode_server_are_kept_in_a_file_of_their_own(tmp_path: Path) -> None:
    """Prefill servers have computed them, perhaps in other formats."""
    info = SimpleNamespace(dtype="float32", architecture="A")
    arch = SimpleNamespace(ropes=())
    engine: Any = SimpleNamespace(info=info, page_layout=SimpleNamespace(name="16 tokens"), arch=arch, files="")
    host_kv = HostKvConfig(host_kv_gib=1, kv_file=str(tmp_path / "kept"))
    names = [
        file_of_prefixes(EngineConfig(host_kv=host_kv, disaggregation=DisaggregationConfig(mode)), engine)
        for mode in ("null", "prefill", "decode")
    ]
    assert names[0] == names[1] != names[2]


def test_prefixes_of_ropes_for_long_contexts_are_kept_in_a_file_of_their_own(tmp_path: Path) -> None:
    """The same folder has other keys once `--context-length` exceeds the context that it was trained for first."""
    info = SimpleNamespace(dtype="float32", architecture="A")
    host_kv = HostKvConfig(host_kv_gib=1, kv_file=str(tmp_path / "kept"))
    rope = RopeParams(
        kind="longrope", rotary_dim=4, short_factors=(1.0, 1.0), long_factors=(2.0, 2.0), original_context=64
    )
    names = []
    for context in (64, 65, 1000):
        arch = SimpleNamespace(ropes=(rope.for_context(context),))
        engine: Any = SimpleNamespace(info=info, page_layout=SimpleNamespace(name="16 tokens"), arch=arch, files="")
        names.append(file_of_prefixes(EngineConfig(host_kv=host_kv), engine))
    assert names[0] != names[1] == names[2]


def test_servers_draw_other_samples_unless_a_flag_names_a_seed() -> None:
    free, named = EngineConfig(), EngineConfig(random_seed=7)
    assert len({seed_of_requests(free, is_server=True) for _ in range(4)}) > 1
    assert seed_of_requests(free, is_server=False) == 0
    assert [seed_of_requests(named, is_server) for is_server in (True, False)] == [7, 7]


def test_servers_that_serve_the_same_weights_by_now_have_one_version() -> None:
    """One was updated to them, which the other has had from its start; a count of updates tells two of them apart."""

    def store(scale: float, version: str, num_updates: int) -> Any:
        params = {"norm": np.full(4, scale), "kernel": np.ones(4)}
        return SimpleNamespace(params=params, weight_version=version, num_updates=num_updates)

    updated, other = store(1.0, "default", 0), store(3.0, "1", 1)
    version = version_of(updated)
    assert version() == version_of(store(1.0, "default", 0))() != version_of(store(2.0, "default", 0))()
    updated.params, updated.weight_version, updated.num_updates = store(2.0, "1", 1).params, "1", 1
    now = version()
    assert now == version_of(store(2.0, "1", 0))() != version_of(other)()
    del updated.params  # they are released
    assert version() == now
    engine: Any = SimpleNamespace(arch=SimpleNamespace(name="A", ropes=()))
    assert _model_name(EngineConfig(), engine) == "A", "what is compared once, as servers connect"


def test_hosts_tell_files_of_other_names_or_sizes_apart(tmp_path: Path) -> None:
    def digest(**files: str) -> str:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        for name, text in files.items():
            (folder / f"{name}.safetensors").write_text(text)
        return files_digest(folder)

    told = digest(a="1", b="22")
    assert told.startswith("2 files of names and sizes ") and told == digest(b="33", a="2")
    assert len({told, digest(a="1", c="22"), digest(a="1", b="222"), digest(a="1")}) == 4
