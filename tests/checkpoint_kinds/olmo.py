"""Kinds of OLMo to OLMo 3, OLMoE, FlexOlmo and OLMo Hybrid."""

from __future__ import annotations

from transformers import (
    FlexOlmoConfig,
    FlexOlmoForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Olmo3Config,
    Olmo3ForCausalLM,
    OlmoConfig,
    OlmoeConfig,
    OlmoeForCausalLM,
    OlmoForCausalLM,
    OlmoHybridConfig,
    OlmoHybridForCausalLM,
)

from tests.checkpoint_kinds.sizes import MIXED_TYPES, WINDOW, Kind

KINDS: dict[str, Kind] = {
    "olmo": (OlmoConfig, OlmoForCausalLM, {"clip_qkv": 1.0}),
    "olmo2": (Olmo2Config, Olmo2ForCausalLM, {"attention_bias": True}),
    "olmo3": (
        Olmo3Config,
        Olmo3ForCausalLM,
        {
            "sliding_window": WINDOW,
            "layer_types": MIXED_TYPES,
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "yarn",
                    "rope_theta": 5000.0,
                    "factor": 8.0,
                    "original_max_position_embeddings": 64,
                    "beta_fast": 8.0,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0},
            },
        },
    ),
    "olmoe": (
        OlmoeConfig,
        OlmoeForCausalLM,
        {"head_dim": 16, "intermediate_size": 48, "num_experts": 10, "num_experts_per_tok": 3, "attention_bias": True},
    ),
    "flex_olmo": (
        FlexOlmoConfig,
        FlexOlmoForCausalLM,
        {"intermediate_size": 48, "num_experts": 10, "num_experts_per_tok": 3, "attention_bias": True},
    ),
    "olmo_hybrid": (
        OlmoHybridConfig,
        OlmoHybridForCausalLM,
        {
            "num_hidden_layers": 4,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 6,
            "linear_key_head_dim": 54,  # transformers saves convolutions as if all had as many channels
            "linear_value_head_dim": 18,
            "linear_conv_kernel_dim": 3,
        },
    ),
}
