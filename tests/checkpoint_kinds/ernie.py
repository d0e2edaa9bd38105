"""Kinds of Ernie 4.5."""

from __future__ import annotations

from transformers import Ernie4_5_MoeConfig, Ernie4_5_MoeForCausalLM, Ernie4_5Config, Ernie4_5ForCausalLM

from tests.checkpoint_kinds.sizes import Kind

KINDS: dict[str, Kind] = {
    "ernie4_5": (Ernie4_5Config, Ernie4_5ForCausalLM, {"use_bias": True, "tie_word_embeddings": False}),
    "ernie4_5_moe": (
        Ernie4_5_MoeConfig,
        Ernie4_5_MoeForCausalLM,
        {
            "moe_k": 3,
            "moe_num_experts": 10,
            "moe_num_shared_experts": 3,
            "moe_intermediate_size": 48,
            "moe_layer_start_index": 1,
            "moe_layer_interval": 2,
            "tie_word_embeddings": False,
        },
    ),
}
