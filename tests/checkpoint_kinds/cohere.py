"""Kinds of Command R to North, with LayerNorm."""

from __future__ import annotations

from transformers import (
    Cohere2Config,
    Cohere2ForCausalLM,
    Cohere2MoeConfig,
    Cohere2MoeForCausalLM,
    CohereConfig,
    CohereForCausalLM,
)

from tests.checkpoint_kinds.sizes import MIXED_TYPES, WINDOW, Kind

_COHERE = {"logit_scale": 0.7, "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}}

KINDS: dict[str, Kind] = {
    "cohere": (CohereConfig, CohereForCausalLM, {**_COHERE, "use_qk_norm": True, "attention_bias": True}),
    "cohere2": (
        Cohere2Config,
        Cohere2ForCausalLM,
        {**_COHERE, "head_dim": 16, "sliding_window": WINDOW, "layer_types": MIXED_TYPES},
    ),
    "cohere2_moe": (
        Cohere2MoeConfig,
        Cohere2MoeForCausalLM,
        {
            "rope_theta": 5000.0,
            "logit_scale": 0.7,
            "sliding_window": WINDOW,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            "intermediate_size": 48,
            "prefix_dense_intermediate_size": 112,
            "rms_norm_eps": 1e-5,
            "num_experts": 10,
            "num_experts_per_tok": 3,
            "num_shared_experts": 3,
            "expert_selection_fn": "sigmoid",
            "norm_topk_prob": False,
        },
    ),
}
