"""Mixtures of experts that are alone in their family."""

from __future__ import annotations

from transformers import (
    AfmoeConfig,
    AfmoeForCausalLM,
    Dots1Config,
    Dots1ForCausalLM,
    Kolibri1Config,
    Kolibri1ForCausalLM,
    LagunaConfig,
    LagunaForCausalLM,
    MellumConfig,
    MellumForCausalLM,
    MiMoV2FlashConfig,
    MiMoV2FlashForCausalLM,
    MiniMaxM2Config,
    MiniMaxM2ForCausalLM,
    SolarOpenConfig,
    SolarOpenForCausalLM,
)

from tests.checkpoint_kinds.sizes import MIXED_TYPES, SIGMOID_MOE, WINDOW, Kind

KINDS: dict[str, Kind] = {
    "afmoe": (
        AfmoeConfig,
        AfmoeForCausalLM,
        {
            "layer_types": MIXED_TYPES,
            "sliding_window": WINDOW,
            "mup_enabled": True,
            "num_dense_layers": 1,
            "num_experts": 10,
            "num_experts_per_tok": 3,
            "num_shared_experts": 3,
            "moe_intermediate_size": 48,
            "route_scale": 1.7,
            "tie_word_embeddings": False,
        },
    ),
    "dots1": (
        Dots1Config,
        Dots1ForCausalLM,
        {
            **SIGMOID_MOE,
            "n_routed_experts": 10,
            "n_shared_experts": 3,
            "sliding_window": WINDOW,
            "max_window_layers": 2,
        },
    ),
    "kolibri1": (
        Kolibri1Config,
        Kolibri1ForCausalLM,
        {
            "sliding_window": WINDOW,
            "layer_types": MIXED_TYPES,
            "num_experts": 10,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 48,
            "shared_expert_intermediate_size": 52,
            "norm_topk_prob": True,
        },
    ),
    "laguna": (
        LagunaConfig,
        LagunaForCausalLM,
        {
            "num_attention_heads_per_layer": [8, 4, 12],
            "layer_types": MIXED_TYPES,
            "sliding_window": WINDOW,
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            "num_experts": 10,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 48,
            "shared_expert_intermediate_size": 52,
            "moe_routed_scaling_factor": 1.7,
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.4},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
            },
        },
    ),
    "mellum": (
        MellumConfig,
        MellumForCausalLM,
        {
            "sliding_window": WINDOW,
            "layer_types": MIXED_TYPES,
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            "num_local_experts": 10,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 48,
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 5000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
            },
        },
    ),
    "mimo_v2_flash": (
        MiMoV2FlashConfig,
        MiMoV2FlashForCausalLM,
        {
            "num_hidden_layers": 4,
            "v_head_dim": 18,
            "sliding_window": WINDOW,
            "layer_types": ["full_attention", *MIXED_TYPES],
            "mlp_layer_types": ["dense", "sparse", "sparse", "dense"],
            "n_routed_experts": 12,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 48,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.5,
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.4},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": 0.6},
            },
        },
    ),
    "minimax_m2": (
        MiniMaxM2Config,
        MiniMaxM2ForCausalLM,
        {
            "intermediate_size": 48,
            "num_local_experts": 10,
            "num_experts_per_tok": 3,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.6},
        },
    ),
    "solar_open": (
        SolarOpenConfig,
        SolarOpenForCausalLM,
        {**SIGMOID_MOE, "n_routed_experts": 10, "n_shared_experts": 3},
    ),
}
