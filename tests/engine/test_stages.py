"""How layers are cut into pipeline stages, what stages read of a checkpoint, and which models are refused."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxsgl.batch.inputs import Bucket
from jaxsgl.config.engine import EngineConfig
from jaxsgl.engine.stages.engine import StagedEngine, cut_layers
from jaxsgl.engine.stages.parts import FromHost, Stage, ToHost
from jaxsgl.engine.start import opening
from jaxsgl.engine.start.model_flags import check_flags, check_folder, check_stages
from jaxsgl.errors import ConfigError
from jaxsgl.hosts.group import Alone
from jaxsgl.hosts.line import LineLost
from jaxsgl.hosts.passing import Passage
from jaxsgl.models import arch_from_folder
from jaxsgl.requests.outputs import LAST_TOKEN
from jaxsgl.weights import load_params, random_params
from jaxsgl.weights.converted import MANIFEST
from jaxsgl.weights.tensor_files import is_harmless
from tests.checkpoints import make_checkpoint
from tests.engine.conftest import ConfigMaker
from tests.hosts.world import connection
from tests.plain_model import mesh_of

FLOAT32 = jnp.dtype("float32")


@pytest.mark.parametrize(
    ("layer_bytes", "head", "stages", "cuts"),
    [
        ([1] * 8, 0, 2, [(0, 4), (4, 8)]),
        ([1] * 8, 2, 2, [(0, 5), (5, 8)]),  # the head is as much as two layers
        ([1] * 8, 100, 4, [(0, 1), (1, 2), (2, 7), (7, 8)]),
        ([9, 1, 1, 1, 1, 1], 0, 2, [(0, 1), (1, 6)]),  # a dense layer before experts, or the other way round
        ([1, 1, 1], 0, 3, [(0, 1), (1, 2), (2, 3)]),
        ([3], 1, 1, [(0, 1)]),
    ],
)
def test_layers_are_cut_so_that_the_largest_stage_has_the_fewest_bytes(
    layer_bytes: list[int], head: int, stages: int, cuts: list[tuple[int, int]]
) -> None:
    found = cut_layers(layer_bytes, head, stages)

    def largest(stage_cuts: list[tuple[int, int]]) -> int:
        sizes = [sum(layer_bytes[first:stop]) for first, stop in stage_cuts]
        return max([*sizes[:-1], sizes[-1] + head])

    assert largest(found) == largest(cuts)
    assert [first for first, _ in found] == [0, *(stop for _, stop in found[:-1])]
    assert found[-1][1] == len(layer_bytes) and all(first < stop for first, stop in found)


@pytest.mark.parametrize("kind", ["llama_untied_llama3_rope", "qwen3"])  # the second one is tied
def test_stages_read_the_parameters_of_their_own_layers_and_together_all(kind: str, tmp_path: Path) -> None:
    folder = make_checkpoint(kind, tmp_path / kind, num_hidden_layers=3)
    arch = arch_from_folder(folder)
    whole = dict(nnx.to_flat_state(load_params(folder, arch, FLOAT32, mesh_of())))
    drawn = dict(nnx.to_flat_state(random_params(arch, FLOAT32, mesh_of(), 5)))
    seen = set()
    for first, stop in ((0, 2), (2, 3)):
        stage = arch.of_layers(first, stop)
        for load, all_params in (
            (load_params(folder, stage, FLOAT32, mesh_of()), whole),
            (random_params(stage, FLOAT32, mesh_of(), 5), drawn),
        ):
            for path, param in nnx.to_flat_state(load):
                place, rows = path, slice(None)
                if path[0] == "layers":
                    place = ("layers", int(str(path[1])) + first, *path[2:])
                elif path[0] == "vectors":
                    rows = slice(first, stop)
                seen.add(place)
                np.testing.assert_array_equal(np.asarray(param[...]), np.asarray(all_params[place][...])[rows])
        has_embedding = first == 0 or arch.tie_embeddings
        assert (("embedding",) in dict(nnx.to_flat_state(load))) == has_embedding
    assert seen == whole.keys()


def test_a_stage_leaves_tensors_of_other_stages_unread_and_refuses_what_no_stage_reads(tmp_path: Path) -> None:
    arch = arch_from_folder(make_checkpoint("qwen3", tmp_path / "model", num_hidden_layers=3))
    middle = arch.of_layers(1, 2)
    for name in ("model.layers.0.mlp.down_proj.weight", "model.layers.2.mlp.down_proj.weight", "model.norm.weight"):
        assert is_harmless(name, middle) and not is_harmless(name, arch)
    for name in ("model.layers.1.mlp.odd.weight", "model.layers.3.mlp.down_proj.weight", "model.odd.weight"):
        assert not is_harmless(name, middle)


def test_a_stage_leaves_the_last_ones_norm_and_head_unread_by_all_their_names(tmp_path: Path) -> None:
    first = arch_from_folder(make_checkpoint("phi", tmp_path / "model")).of_layers(0, 1)
    for name in ("model.final_layernorm.weight", "model.final_layernorm.bias", "lm_head.bias", "lm_head.qweight"):
        assert is_harmless(name, first)
    load_params(tmp_path / "model", first, FLOAT32, mesh_of())


def test_models_that_stages_can_not_serve_are_refused_with_the_way_out(tmp_path: Path) -> None:
    arch = arch_from_folder(make_checkpoint("qwen3", tmp_path / "model", num_hidden_layers=3))
    check_stages(EngineConfig(pp_size=3), arch)
    with pytest.raises(ConfigError, match=r"--pp-size is 4, but .* has 3 layers: give that or less"):
        check_stages(EngineConfig(pp_size=4), arch)
    with pytest.raises(ConfigError, match="embeddings and scores for now: leave --pp-size out"):
        check_flags(EngineConfig(pp_size=2), replace(arch, pooling=LAST_TOKEN))


def test_stages_refuse_a_converted_folder_and_name_their_flag(tmp_path: Path) -> None:
    (tmp_path / MANIFEST).touch()
    check_folder(EngineConfig(), tmp_path)
    with pytest.raises(ConfigError, match=r"^--pp-size does .*: serve the one .*, or leave --pp-size out"):
        check_folder(EngineConfig(pp_size=2), tmp_path)


def test_what_stages_refuse_is_refused_before_kernels_are_tested(
    tiny_config: ConfigMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opening, "asked_kernels", lambda *_: pytest.fail("kernels came first"))
    with pytest.raises(ConfigError, match=r"--pp-size is 50, but .* layers"):
        StagedEngine(tiny_config(pp_size=50))


def test_stages_keep_weights_as_one_device_does_since_each_has_whole_layers(
    tiny_config: ConfigMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opening, "meshes_of", lambda config: (mesh_of(),) * config.pp_size)
    kept = [
        opening.open_model(tiny_config(pp_size=stages, quantization="int4"), None, Alone()).arch.weight_format
        for stages in (1, 2)
    ]
    assert kept[0] == kept[1] and kept[0] is not None and kept[0].packing


class Runner:
    """A stage's runner that notes its steps, and fails at one of them."""

    def __init__(self, name: str, log: list[str], fails_at: int = -1) -> None:
        self.name, self.log, self.fails_at, self.count = name, log, fails_at, 0

    def launch(self, inputs: Any, stream: tuple[jax.Array, ...] = ()) -> jax.Array:
        self.count += 1
        if self.count == self.fails_at:
            raise RuntimeError(f"{self.name} has failed")
        self.log.append(f"{self.name} step {inputs} from {[int(each) for each in stream]}")
        return jnp.int32(10 * int(inputs) + len(self.log))


def test_stages_launch_steps_in_order_and_one_that_fails_ends_its_step_and_all_after_it() -> None:
    logs: list[list[str]] = [[], []]
    stages = [Stage(cast(Any, Runner("first", logs[0], fails_at=3)), mesh_of(), []),
              Stage(cast(Any, Runner("last", logs[1])), mesh_of(), [])]  # fmt: skip
    results = []
    for step in range(4):
        passed = stages[0].launch(cast(Any, step), None)
        results.append(stages[1].launch(cast(Any, step), passed))
    for step in (0, 1):
        results[step].result()
    for step in (2, 3):
        with pytest.raises(RuntimeError, match="first has failed"):
            results[step].result()
    assert logs[0] == ["first step 0 from []", "first step 1 from []"]
    assert logs[1] == ["last step 0 from [1]", "last step 1 from [12]"]
    for stage in stages:
        stage.close()


class Step(NamedTuple):
    bucket: Bucket


def test_the_next_host_gets_what_stages_pass_on_and_a_host_that_is_gone_fails_the_step_and_all_after_it() -> None:
    """One side passes on steps of several sizes before the other one asks for any."""
    with connection() as (one, other):
        to_host, from_host = ToHost(Passage(one, "host 2")), FromHost(Passage(other, "host 1"), 3, FLOAT32)
        steps = [cast(Any, Step(Bucket("extend", size, 2, False))) for size in (4, 8, 4, 4)]
        streams = [jnp.full((step.bucket.num_tokens, 3), number, FLOAT32) for number, step in enumerate(steps)]
        sent = []
        for step, stream in zip(steps[:3], streams, strict=False):
            passed: Future[jax.Array] = Future()
            passed.set_result(stream)
            sent.append(to_host.launch(step, passed))
        for each in sent:
            assert not each.result().tokens().size
        taken = [from_host.launch(step, None) for step in steps[:3]]
        for stream, found in zip(streams, taken, strict=False):
            np.testing.assert_array_equal(found.result(), stream)
        to_host.close()
        for step in steps[2:]:
            with pytest.raises(LineLost, match="host 1 is gone"):
                from_host.launch(step, None).result()
        from_host.close()


class Poorer(Alone):
    """Another host has room for fewer pages."""

    def least(self, what: str, values: Sequence[int]) -> tuple[int, ...]:
        assert what == "the pages"
        return (min(*values, 20),)


def test_the_stage_with_room_for_the_fewest_pages_decides_for_all_hosts(tiny_config: ConfigMaker) -> None:
    engine = StagedEngine(tiny_config(max_total_tokens=None), progress=False, hosts=Poorer())
    assert engine.capacity.num_pages == 20
    engine.close()
