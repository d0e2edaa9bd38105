"""Kinds of LFM2 and LFM3, with short convolutions."""

from __future__ import annotations

from transformers import Lfm2Config, Lfm2ForCausalLM, Lfm2MoeConfig, Lfm2MoeForCausalLM, Lfm3Config, Lfm3ForCausalLM

from tests.checkpoint_kinds.sizes import WINDOW, Kind

_CONV = {"layer_types": ["conv", "full_attention", "conv"], "conv_L_cache": 5}

KINDS: dict[str, Kind] = {
    "lfm2": (Lfm2Config, Lfm2ForCausalLM, {**_CONV, "intermediate_size": 150, "block_multiple_of": 8}),
    "lfm2_moe": (
        Lfm2MoeConfig,
        Lfm2MoeForCausalLM,
        {
            **_CONV,
            "num_dense_layers": 1,
            "num_experts": 10,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 48,
            "routed_scaling_factor": 1.7,
            "tie_word_embeddings": False,
        },
    ),
    "lfm3": (
        Lfm3Config,
        Lfm3ForCausalLM,
        {
            "num_hidden_layers": 4,
            "layer_types": ["conv", "full_attention", "conv", "sliding_attention"],
            "conv_L_cache": 5,
            "sliding_window": WINDOW,
            "attention_bias": True,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0},
                "full_attention": {"rope_type": "proportional", "rope_theta": 1000.0, "partial_rotary_factor": 0.4},
            },
        },
    ),
}
