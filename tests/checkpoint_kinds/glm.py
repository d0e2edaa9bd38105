"""Kinds of GLM 4 to 5."""

from __future__ import annotations

from transformers import (
    Glm4Config,
    Glm4ForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    Glm4MoeLiteConfig,
    Glm4MoeLiteForCausalLM,
    GlmConfig,
    GlmForCausalLM,
    GlmMoeDsaConfig,
    GlmMoeDsaForCausalLM,
)

from tests.checkpoint_kinds.sizes import INDEX, LATENT, Kind

KINDS: dict[str, Kind] = {
    "glm": (GlmConfig, GlmForCausalLM, {"partial_rotary_factor": 0.6}),
    "glm4": (Glm4Config, Glm4ForCausalLM, {"partial_rotary_factor": 0.6}),
    "glm4_moe": (
        Glm4MoeConfig,
        Glm4MoeForCausalLM,
        {
            "partial_rotary_factor": 0.6,
            "use_qk_norm": True,
            "attention_bias": True,
            "n_routed_experts": 12,
            "num_experts_per_tok": 3,
            "n_group": 4,
            "topk_group": 2,
            "n_shared_experts": 3,
            "moe_intermediate_size": 48,
            "routed_scaling_factor": 1.5,
        },
    ),
    "glm4_moe_lite": (
        Glm4MoeLiteConfig,
        Glm4MoeLiteForCausalLM,
        {**LATENT, "n_group": 1, "topk_group": 1, "mlp_layer_types": ["dense", "sparse", "dense"]},
    ),
    "glm_moe_dsa": (
        GlmMoeDsaConfig,
        GlmMoeDsaForCausalLM,
        {**LATENT, **INDEX, "first_k_dense_replace": 1, "indexer_types": ["full", "shared", "full"]},
    ),
}
