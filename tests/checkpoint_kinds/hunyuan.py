"""Kinds of Hunyuan: dense, and with experts."""

from __future__ import annotations

from transformers import (
    HunYuanDenseV1Config,
    HunYuanDenseV1ForCausalLM,
    HunYuanMoEV1Config,
    HunYuanMoEV1ForCausalLM,
    HYV3Config,
    HYV3ForCausalLM,
)

from tests.checkpoint_kinds.sizes import Kind

KINDS: dict[str, Kind] = {
    "hunyuan": (
        HunYuanDenseV1Config,
        HunYuanDenseV1ForCausalLM,
        {
            "head_dim": 24,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 5000.0, "factor": 1.0, "alpha": 50.0},
        },
    ),
    "hunyuan_moe": (
        HunYuanMoEV1Config,
        HunYuanMoEV1ForCausalLM,
        {
            "head_dim": 24,
            "intermediate_size": 48,
            "num_experts": 10,
            "moe_topk": [3, 3, 3],
            "attention_bias": True,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 5000.0, "factor": 1.0, "alpha": 50.0},
        },
    ),
    "hy_v3": (
        HYV3Config,
        HYV3ForCausalLM,
        {
            "num_experts": 10,
            "num_shared_experts": 3,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 48,
            "router_scaling_factor": 1.7,
            "attention_bias": True,
        },
    ),
}
