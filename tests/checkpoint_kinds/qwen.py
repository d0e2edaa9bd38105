"""Kinds of Qwen 2 to 3.5."""

from __future__ import annotations

from transformers import (
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from tests.checkpoint_kinds.sizes import Kind

_HYBRID = {
    "num_hidden_layers": 4,
    "head_dim": 24,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.25},
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 14,
    "linear_value_head_dim": 18,
    "linear_conv_kernel_dim": 3,
}
_HYBRID_MOE = {
    "num_experts": 10,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 52,
    "shared_expert_intermediate_size": 72,
}

# Of sizes `COMMON`.
COMMON_KINDS: dict[str, Kind] = {
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {"tie_word_embeddings": True}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"tie_word_embeddings": True, "head_dim": 32, "num_attention_heads": 6}),
}
# Of sizes `OF_FAMILIES`, as all others.
KINDS: dict[str, Kind] = {
    "qwen2_moe": (
        Qwen2MoeConfig,
        Qwen2MoeForCausalLM,
        {
            "num_experts": 10,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 48,
            "shared_expert_intermediate_size": 72,
            "mlp_only_layers": [1],
        },
    ),
    "qwen3_moe": (
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
        {
            "num_experts": 10,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 48,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
        },
    ),
    "qwen3_next": (
        Qwen3NextConfig,
        Qwen3NextForCausalLM,
        {
            **_HYBRID,
            **_HYBRID_MOE,
            "mlp_only_layers": [1],
            "attention_bias": True,
        },
    ),
    "qwen3_5": (Qwen3_5TextConfig, Qwen3_5ForCausalLM, _HYBRID),
    "qwen3_5_moe": (Qwen3_5MoeTextConfig, Qwen3_5MoeForCausalLM, {**_HYBRID, **_HYBRID_MOE}),
}
