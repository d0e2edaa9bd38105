"""Dense models that are alone in their family."""

from __future__ import annotations

from transformers import (
    ApertusConfig,
    ApertusForCausalLM,
    ArceeConfig,
    ArceeForCausalLM,
    CwmConfig,
    CwmForCausalLM,
    HeliumConfig,
    HeliumForCausalLM,
    Jais2Config,
    Jais2ForCausalLM,
    NanoChatConfig,
    NanoChatForCausalLM,
    SeedOssConfig,
    SeedOssForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
    StableLmConfig,
    StableLmForCausalLM,
    Starcoder2Config,
    Starcoder2ForCausalLM,
)

from tests.checkpoint_kinds.sizes import LLAMA3_ROPE, MIXED_TYPES, WINDOW, Kind

KINDS: dict[str, Kind] = {
    "apertus": (
        ApertusConfig,
        ApertusForCausalLM,
        {"rope_parameters": LLAMA3_ROPE, "attention_bias": True, "tie_word_embeddings": False},
    ),
    "arcee": (ArceeConfig, ArceeForCausalLM, {"hidden_act": "relu2", "attention_bias": True, "mlp_bias": True}),
    "cwm": (
        CwmConfig,
        CwmForCausalLM,
        {"sliding_window": WINDOW, "layer_types": MIXED_TYPES, "rope_parameters": LLAMA3_ROPE},
    ),
    "helium": (HeliumConfig, HeliumForCausalLM, {"head_dim": 16, "attention_bias": True, "mlp_bias": True}),
    "jais2": (Jais2Config, Jais2ForCausalLM, {}),
    "nanochat": (NanoChatConfig, NanoChatForCausalLM, {"attention_bias": True, "final_logit_softcapping": 5.0}),
    "seed_oss": (SeedOssConfig, SeedOssForCausalLM, {"attention_out_bias": True, "mlp_bias": True}),
    "smollm3": (
        SmolLM3Config,
        SmolLM3ForCausalLM,
        {
            "no_rope_layer_interval": 2,
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": False,
        },
    ),
    "stable_lm": (
        StableLmConfig,
        StableLmForCausalLM,
        {
            "head_dim": 16,
            "partial_rotary_factor": 0.5,
            "use_qkv_bias": True,
            "qk_layernorm": True,
            "use_parallel_residual": True,
        },
    ),
    "starcoder2": (
        Starcoder2Config,
        Starcoder2ForCausalLM,
        {"sliding_window": WINDOW, "tie_word_embeddings": False},
    ),
}
