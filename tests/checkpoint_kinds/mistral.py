"""Kinds of Mistral to Mistral 4, Ministral and Mixtral."""

from __future__ import annotations

from transformers import (
    Ministral3Config,
    Ministral3ForCausalLM,
    MinistralConfig,
    MinistralForCausalLM,
    Mistral4Config,
    Mistral4ForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)

from tests.checkpoint_kinds.sizes import LATENT, MIXED_TYPES, WINDOW, Kind

_GROWING_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 5000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 8.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.7,
}

KINDS: dict[str, Kind] = {
    "mistral": (MistralConfig, MistralForCausalLM, {"sliding_window": WINDOW}),
    "ministral": (MinistralConfig, MinistralForCausalLM, {"sliding_window": WINDOW, "layer_types": MIXED_TYPES}),
    "ministral3": (Ministral3Config, Ministral3ForCausalLM, {"rope_parameters": {**_GROWING_ROPE}}),
    "mistral4": (
        Mistral4Config,
        Mistral4ForCausalLM,
        {
            **LATENT,
            "head_dim": 20,  # all of a key, not what turns of it
            "rope_parameters": {**_GROWING_ROPE},  # transformers adds to it
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 1.7,
            "tie_word_embeddings": False,
        },
    ),
    "mixtral": (
        MixtralConfig,
        MixtralForCausalLM,
        {"intermediate_size": 48, "num_local_experts": 5, "sliding_window": WINDOW},
    ),
}
