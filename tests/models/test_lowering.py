"""Each family's steps lower for GPUs and TPUs that aren't there: what these would refuse at start fails here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxsgl.batch.buckets import buckets_of
from jaxsgl.config.engine import EngineConfig
from jaxsgl.engine.start.memory import Memory
from jaxsgl.engine.start.sizing import choose_states, plan_capacity
from jaxsgl.engine.state import abstract_state
from jaxsgl.engine.step_programs import ProgramSpec
from jaxsgl.engine.weight_store import read_arch
from jaxsgl.models import Params, abstract_model, resolve_precision
from jaxsgl.models.tensor_parallel import DATA_AXIS, TENSOR_AXIS
from pallas_kernels import KernelChoice
from tests.checkpoint_kinds import CHECKPOINT_KINDS, FAMILY_KINDS
from tests.checkpoints import configuration
from tests.grids import NIGHTLY, daily
from tests.pallas_kernels.lower_everything import CUSTOM_CALLS, TARGETS, on_a_device

KINDS = (*CHECKPOINT_KINDS, *FAMILY_KINDS)
ENGINE_PLATFORM = {"cuda": "gpu", "tpu": "tpu"}
QUANTIZED: dict[str, dict[str, Any]] = {
    "fp8": {"weight_block_size": [128, 128], "activation_scheme": "dynamic"},
    "awq": {"bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"},
}
NIGHTS = [(platform, method) for platform in TARGETS for method in ("", *QUANTIZED)]


def steps_of(kind: str, platform: str, folder: Path, method: str = "", dtype: str = "bfloat16") -> dict[str, str]:
    """The text of a decode and an extend of the family by their names, in `dtype`, or quantized by a method."""
    values = {**configuration(kind), "dtype": dtype}
    if method:
        values["quantization_config"] = {"quant_method": method, **QUANTIZED[method]}
    (folder / "config.json").write_text(json.dumps(values))
    config = EngineConfig(model=str(folder), chunked_prefill_size=256)
    arch, engine = read_arch(config, folder), ENGINE_PLATFORM[platform]
    mesh = Mesh(np.array(jax.devices("cpu")[:1]).reshape(1, 1), (DATA_AXIS, TENSOR_AXIS))
    with on_a_device(engine, *TARGETS[platform][:2]):
        numbers, _, kv_dtype = resolve_precision(dtype, "auto", arch, engine, cpu_multiplies_bfloat16=lambda: False)
        states = choose_states(config, arch, engine, kv_dtype, 1)
        capacity = plan_capacity(config, arch, states, Memory(engine, 1 << 30, 1 << 31))
        graphdef, params = abstract_model(arch, numbers)
        state = abstract_state(states, capacity, mesh, None)
        spec = ProgramSpec(graphdef, _on_mesh(params, mesh), state, KernelChoice(), mesh)
        buckets = buckets_of(config, capacity)
        return {
            bucket.kind: spec.forward(bucket).trace().lower(lowering_platforms=(platform,)).as_text()
            for bucket in (buckets.decode(8), buckets.extend(256, 4))
        }


def _on_mesh(params: Params, mesh: Mesh) -> Params:
    """The parameters as shapes on the mesh."""
    everywhere = NamedSharding(mesh, PartitionSpec())

    def shape(param: Any) -> Any:
        return param.replace(jax.ShapeDtypeStruct(param.shape, jnp.dtype(param.dtype), sharding=everywhere))

    return nnx.from_flat_state([(path, shape(param)) for path, param in nnx.to_flat_state(params)])


def check(texts: dict[str, str]) -> None:
    for step, text in texts.items():
        assert any(name in text for name in CUSTOM_CALLS), f"{step}: no kernel is in it"


@pytest.mark.parametrize("kind", daily(KINDS, every=10))
def test_a_familys_steps_lower_for_gpus_with_kernels_in_them(kind: str, tmp_path: Path) -> None:
    check(steps_of(kind, "cuda", tmp_path))


@pytest.mark.parametrize("method", daily(("", *QUANTIZED), every=3))
def test_a_model_in_float32_is_multiplied_in_float32(method: str, tmp_path: Path) -> None:
    for text in steps_of("qwen3_moe", "cuda", tmp_path, method, "float32").values():
        products = [line for line in text.splitlines() if "stablehlo.dot_general" in line]
        assert products
        assert [line for line in products if "precision = [HIGHEST, HIGHEST]" not in line] == []


@pytest.mark.skipif(not NIGHTLY, reason="each family for both platforms in three formats; by day for GPUs in bfloat16")
@pytest.mark.parametrize(("platform", "method"), NIGHTS)
def test_all_families_lower_quantized_and_for_tpus(platform: str, method: str, tmp_path: Path) -> None:
    for kind in KINDS:
        check(steps_of(kind, platform, tmp_path, method))
