"""Steps of every family lower for GPUs and TPUs, with attention by kernels.

None holds a `ragged_dot`, which XLA computes with all experts on CPUs and GPUs.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxsgl.batch.buckets import Capacity
from jaxsgl.batch.inputs import Bucket, packed_len
from jaxsgl.config.engine import EngineConfig
from jaxsgl.engine.start.sizing import choose_states
from jaxsgl.engine.state import abstract_state
from jaxsgl.engine.step import make_forward
from jaxsgl.models import abstract_model, arch_from_folder
from pallas_kernels import KernelChoice
from tests.grids import daily
from tests.pallas_kernels.lower_everything import CUSTOM_CALLS, TARGETS, on_a_device
from tests.plain_model import mesh_of

BFLOAT16 = jnp.dtype("bfloat16")
COMMON = {
    "vocab_size": 512, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 2, "head_dim": 128,
    "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 2048, "dtype": "bfloat16",
}  # fmt: skip
MIXED = {"sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"]}
# The head sizes of published models, all else small.
FAMILIES: list[tuple[str, dict[str, Any]]] = [
    ("Gemma2ForCausalLM", {"head_dim": 256, **MIXED}),
    ("Gemma3ForCausalLM", {"head_dim": 256, **MIXED}),
    ("Glm4ForCausalLM", {}),
    ("SmolLM3ForCausalLM", {"no_rope_layer_interval": 2}),
    ("Olmo3ForCausalLM", MIXED),
    ("MistralForCausalLM", {"sliding_window": 128}),
    ("Phi3ForCausalLM", {"head_dim": 96}),
    ("Qwen3ForCausalLM", {"head_dim": 80}),
    ("Qwen3MoeForCausalLM", {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256}),
    (
        "DeepseekV3ForCausalLM",
        {"n_routed_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "first_k_dense_replace": 1},
    ),
    ("Llama4ForCausalLM", {"attention_chunk_size": 512, "num_local_experts": 8, "no_rope_layer_interval": 2}),
    ("GptOssForCausalLM", {"head_dim": 64, "num_attention_heads": 32, "num_local_experts": 8, **MIXED}),
]
BUCKETS = (Bucket("decode", 64, 64, False), Bucket("extend", 128, 8, False))


@pytest.mark.parametrize(
    ("name", "changes"), daily(FAMILIES[::-1], every=len(FAMILIES)), ids=lambda value: str(value)[:8]
)
def test_steps_lower_for_gpus_and_tpus(name: str, changes: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [name], **COMMON, **changes}))
    arch = arch_from_folder(tmp_path)
    graphdef, params = abstract_model(arch, BFLOAT16)
    leaves, treedef = jax.tree.flatten(params)
    for platform, (kind, num_cores, _) in TARGETS.items():
        states = choose_states(EngineConfig(), arch, "gpu" if platform == "cuda" else platform, BFLOAT16)
        capacity = Capacity(states.page_size, 40, 64, 512, 128, arch.vocab_size)
        state = abstract_state(states, capacity, mesh_of())
        state = jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype), state)
        for bucket in BUCKETS:
            packed = jax.ShapeDtypeStruct((packed_len(bucket),), jnp.int32)
            with on_a_device(platform, kind, num_cores):
                traced = jax.jit(make_forward(graphdef, treedef, bucket, KernelChoice())).trace(leaves, state, packed)
                text = traced.lower(lowering_platforms=(platform,)).as_text()
            calls = [line for line in text.splitlines() if any(call in line for call in CUSTOM_CALLS)]
            assert any("attention" in line for line in calls), (platform, bucket.kind)
            assert "ragged_dot" not in text
