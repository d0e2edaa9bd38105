"""Kinds of Phi to Phi 3.5."""

from __future__ import annotations

from transformers import Phi3Config, Phi3ForCausalLM, PhiConfig, PhiForCausalLM, PhimoeConfig, PhimoeForCausalLM

from tests.checkpoint_kinds.sizes import ORIGINAL_CONTEXT, WINDOW, Kind

KINDS: dict[str, Kind] = {
    "phi": (PhiConfig, PhiForCausalLM, {"partial_rotary_factor": 0.5}),
    "phi3": (
        Phi3Config,
        Phi3ForCausalLM,
        {
            "head_dim": 16,  # transformers takes no other than D / N here
            "original_max_position_embeddings": ORIGINAL_CONTEXT,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.75,
                "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
                "long_factor": [1.5, 2.0, 3.0, 4.0, 6.0, 8.0],
            },
        },
    ),
    "phimoe": (
        PhimoeConfig,
        PhimoeForCausalLM,
        {
            "attention_bias": True,
            "lm_head_bias": True,
            "intermediate_size": 48,
            "num_local_experts": 10,
            "router_jitter_noise": 0.2,
            "sliding_window": WINDOW,
        },
    ),
}
