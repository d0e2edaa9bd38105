"""Kinds of Gemma to Gemma 4, and VaultGemma."""

from __future__ import annotations

from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3nForCausalLM,
    Gemma3nTextConfig,
    Gemma3TextConfig,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    Gemma4UnifiedForCausalLM,
    Gemma4UnifiedTextConfig,
    GemmaConfig,
    GemmaForCausalLM,
    VaultGemmaConfig,
    VaultGemmaForCausalLM,
)

from tests.checkpoint_kinds.sizes import MIXED_TYPES, WINDOW, Kind

_GEMMA = {"sliding_window": WINDOW, "query_pre_attn_scalar": 30, "layer_types": MIXED_TYPES}
_GEMMA4 = {
    "num_hidden_layers": 5,
    "num_key_value_heads": 4,
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention", *MIXED_TYPES[1:], "full_attention"],
    "global_head_dim": 36,
    "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 5.0,
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "rope_theta": 5000.0, "partial_rotary_factor": 0.4},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
    },
}

KINDS: dict[str, Kind] = {
    "gemma": (GemmaConfig, GemmaForCausalLM, {}),
    "gemma2": (
        Gemma2Config,
        Gemma2ForCausalLM,
        {**_GEMMA, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 5.0},
    ),
    "vault_gemma": (
        VaultGemmaConfig,
        VaultGemmaForCausalLM,
        {**_GEMMA, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 5.0},
    ),
    "gemma3": (
        Gemma3TextConfig,
        Gemma3ForCausalLM,
        {
            **_GEMMA,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 30000.0, "factor": 4.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
            },
        },
    ),
    # The last token and those after it have the first one's embeddings of layers.
    "gemma3n": (
        Gemma3nTextConfig,
        Gemma3nForCausalLM,
        {
            "num_hidden_layers": 5,
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention", *MIXED_TYPES],
            "num_kv_shared_layers": 2,
            "activation_sparsity_pattern": [0.6, 0.0, 0.8, 0.0, 0.5],
            "altup_num_inputs": 3,
            "laurel_rank": 18,
            "hidden_size_per_layer_input": 14,
            "vocab_size_per_layer_input": 190,
            "final_logit_softcapping": 5.0,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
            },
        },
    ),
    # Its three forms: dense, with keys that layers share and embeddings of layers, and with experts.
    "gemma4": (
        Gemma4TextConfig,
        Gemma4ForCausalLM,
        {**_GEMMA4, "attention_k_eq_v": True, "num_global_key_value_heads": 2},
    ),
    "gemma4_small": (
        Gemma4TextConfig,
        Gemma4ForCausalLM,
        {
            **_GEMMA4,
            "num_kv_shared_layers": 2,
            "use_double_wide_mlp": True,
            "hidden_size_per_layer_input": 14,
            "vocab_size_per_layer_input": 210,
        },
    ),
    "gemma4_moe": (
        Gemma4TextConfig,
        Gemma4ForCausalLM,
        {
            **_GEMMA4,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 2,
            "enable_moe_block": True,
            "num_experts": 10,
            "top_k_experts": 3,
            "moe_intermediate_size": 48,
            "tie_word_embeddings": False,
        },
    ),
    "gemma4_unified": (
        Gemma4UnifiedTextConfig,
        Gemma4UnifiedForCausalLM,
        {key: value for key, value in _GEMMA4.items() if key != "hidden_size_per_layer_input"},
    ),
}
