"""Kinds of Granite 3 and 4, and HyperCLOVA X, which has its multipliers."""

from __future__ import annotations

from transformers import (
    GraniteConfig,
    GraniteForCausalLM,
    GraniteMoeConfig,
    GraniteMoeForCausalLM,
    GraniteMoeHybridConfig,
    GraniteMoeHybridForCausalLM,
    GraniteMoeSharedConfig,
    GraniteMoeSharedForCausalLM,
    GraniteMoeSWAConfig,
    GraniteMoeSWAForCausalLM,
    GraniteSWAConfig,
    GraniteSWAForCausalLM,
    HyperCLOVAXConfig,
    HyperCLOVAXForCausalLM,
)

from tests.checkpoint_kinds.sizes import MAMBA, MIXED_TYPES, WINDOW, Kind

_GRANITE = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.15,
    "residual_multiplier": 0.6,
    "logits_scaling": 0.7,
}
_GRANITE_MOE = {**_GRANITE, "intermediate_size": 48, "num_local_experts": 10, "num_experts_per_tok": 3}

KINDS: dict[str, Kind] = {
    "granite": (
        GraniteConfig,
        GraniteForCausalLM,
        {**_GRANITE, "attention_bias": True, "mlp_bias": True},
    ),
    "granite_moe": (GraniteMoeConfig, GraniteMoeForCausalLM, _GRANITE_MOE),
    "granite_moe_shared": (
        GraniteMoeSharedConfig,
        GraniteMoeSharedForCausalLM,
        {**_GRANITE_MOE, "shared_intermediate_size": 52},
    ),
    "granite_swa": (
        GraniteSWAConfig,
        GraniteSWAForCausalLM,
        {
            **_GRANITE,
            "sliding_window": WINDOW,
            "layer_types": MIXED_TYPES,
            "layer_rope_theta": [5000.0, 0, 1000.0],
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": False,
        },
    ),
    "granite_moe_swa": (
        GraniteMoeSWAConfig,
        GraniteMoeSWAForCausalLM,
        {**_GRANITE_MOE, "shared_intermediate_size": 52, "sliding_window": WINDOW, "layer_types": MIXED_TYPES},
    ),
    "granite_hybrid": (
        GraniteMoeHybridConfig,
        GraniteMoeHybridForCausalLM,
        {
            **_GRANITE_MOE,
            **MAMBA,
            "shared_intermediate_size": 52,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        },
    ),
    "granite_hybrid_dense": (
        GraniteMoeHybridConfig,
        GraniteMoeHybridForCausalLM,
        {
            **_GRANITE,
            "num_local_experts": 0,
            "shared_intermediate_size": 52,
            "position_embedding_type": "rope",
            "layer_types": ["full_attention"] * 3,
        },
    ),
    "hyperclovax": (HyperCLOVAXConfig, HyperCLOVAXForCausalLM, {**_GRANITE, "attention_bias": True, "mlp_bias": True}),
}
