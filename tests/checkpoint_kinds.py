"""The kinds of models that are served, each with transformers' classes and a small configuration of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from transformers import (
    AfmoeConfig,
    AfmoeForCausalLM,
    ApertusConfig,
    ApertusForCausalLM,
    ArceeConfig,
    ArceeForCausalLM,
    AXK1Config,
    AXK1ForCausalLM,
    BambaConfig,
    BambaForCausalLM,
    Cohere2Config,
    Cohere2ForCausalLM,
    Cohere2MoeConfig,
    Cohere2MoeForCausalLM,
    CohereConfig,
    CohereForCausalLM,
    CwmConfig,
    CwmForCausalLM,
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    DeepseekV4Config,
    DeepseekV4ForCausalLM,
    DeepseekV32Config,
    DeepseekV32ForCausalLM,
    Dots1Config,
    Dots1ForCausalLM,
    Ernie4_5_MoeConfig,
    Ernie4_5_MoeForCausalLM,
    Ernie4_5Config,
    Ernie4_5ForCausalLM,
    Exaone4Config,
    Exaone4ForCausalLM,
    ExaoneMoeConfig,
    ExaoneMoeForCausalLM,
    FalconConfig,
    FalconForCausalLM,
    FalconH1Config,
    FalconH1ForCausalLM,
    FlexOlmoConfig,
    FlexOlmoForCausalLM,
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
    GPT2Config,
    GPT2LMHeadModel,
    GPTBigCodeConfig,
    GPTBigCodeForCausalLM,
    GPTJConfig,
    GPTJForCausalLM,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
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
    HeliumConfig,
    HeliumForCausalLM,
    HunYuanDenseV1Config,
    HunYuanDenseV1ForCausalLM,
    HunYuanMoEV1Config,
    HunYuanMoEV1ForCausalLM,
    HyperCLOVAXConfig,
    HyperCLOVAXForCausalLM,
    HYV3Config,
    HYV3ForCausalLM,
    Jais2Config,
    Jais2ForCausalLM,
    JambaConfig,
    JambaForCausalLM,
    KimiLinearConfig,
    KimiLinearForCausalLM,
    Kolibri1Config,
    Kolibri1ForCausalLM,
    LagunaConfig,
    LagunaForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    Lfm2MoeConfig,
    Lfm2MoeForCausalLM,
    Lfm3Config,
    Lfm3ForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LongcatFlashConfig,
    LongcatFlashForCausalLM,
    MellumConfig,
    MellumForCausalLM,
    MiMoV2FlashConfig,
    MiMoV2FlashForCausalLM,
    MiniCPM3Config,
    MiniCPM3ForCausalLM,
    MiniMaxM2Config,
    MiniMaxM2ForCausalLM,
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
    NanoChatConfig,
    NanoChatForCausalLM,
    NemotronConfig,
    NemotronForCausalLM,
    NemotronHConfig,
    NemotronHForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Olmo3Config,
    Olmo3ForCausalLM,
    OlmoConfig,
    OlmoeConfig,
    OlmoeForCausalLM,
    OlmoForCausalLM,
    OlmoHybridConfig,
    OlmoHybridForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    PhimoeConfig,
    PhimoeForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    SeedOssConfig,
    SeedOssForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
    SolarOpenConfig,
    SolarOpenForCausalLM,
    StableLmConfig,
    StableLmForCausalLM,
    Starcoder2Config,
    Starcoder2ForCausalLM,
    VaultGemmaConfig,
    VaultGemmaForCausalLM,
    YoutuConfig,
    YoutuForCausalLM,
)

VOCAB_SIZE = 256
MAX_CONTEXT = 2048
EOS_TOKEN_ID = 2

COMMON = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "max_position_embeddings": MAX_CONTEXT,
    "bos_token_id": 1,
    "eos_token_id": EOS_TOKEN_ID,
    "pad_token_id": None,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}

Kind: TypeAlias = tuple[Callable[..., PretrainedConfig], Callable[[PretrainedConfig], PreTrainedModel], dict[str, Any]]

# Kind -> (configuration class, model class, what differs from COMMON).
KINDS: dict[str, Kind] = {
    "llama_tied": (LlamaConfig, LlamaForCausalLM, {"tie_word_embeddings": True}),
    "llama_untied_llama3_rope": (
        LlamaConfig,
        LlamaForCausalLM,
        {"tie_word_embeddings": False, "rope_parameters": LLAMA3_ROPE, "num_hidden_layers": 3},
    ),
    "llama_linear_rope_bias": (
        LlamaConfig,
        LlamaForCausalLM,
        {
            "tie_word_embeddings": False,
            "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0},
            "attention_bias": True,
            "mlp_bias": True,
            "head_dim": 32,
        },
    ),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {"tie_word_embeddings": True}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"tie_word_embeddings": True, "head_dim": 32, "num_attention_heads": 6}),
}
CHECKPOINT_KINDS = tuple(KINDS)

WINDOW = 12
ORIGINAL_CONTEXT = 64  # of "phi3", before its rope was stretched
OF_FAMILIES: dict[str, Any] = {  # all sizes differ, and no two axes of a tensor can be mistaken for each other
    "vocab_size": 200,
    "hidden_size": 128,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 20,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": EOS_TOKEN_ID,
    "pad_token_id": None,
}
_MIXED_TYPES = ["sliding_attention", "full_attention", "sliding_attention"]
_GEMMA = {"sliding_window": WINDOW, "query_pre_attn_scalar": 30, "layer_types": _MIXED_TYPES}

_GEMMA4 = {
    "num_hidden_layers": 5,
    "num_key_value_heads": 4,
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention", *_MIXED_TYPES[1:], "full_attention"],
    "global_head_dim": 36,
    "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 5.0,
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "rope_theta": 5000.0, "partial_rotary_factor": 0.4},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
    },
}

_LATENT_SIZES = {
    "head_dim": 6,
    "num_key_value_heads": 8,
    "q_lora_rank": 40,
    "kv_lora_rank": 36,
    "qk_rope_head_dim": 6,
    "qk_nope_head_dim": 14,
    "v_head_dim": 22,
}
_LATENT = {
    **_LATENT_SIZES,
    "n_routed_experts": 12,
    "num_experts_per_tok": 3,
    "n_shared_experts": 4,
    "moe_intermediate_size": 48,
}
# Many heads, so that hardly any token has a score of 0, which others would equal.
_INDEX = {"index_topk": 8, "index_n_heads": 13, "index_head_dim": 10}

_HYBRID = {
    "num_hidden_layers": 4,
    "head_dim": 24,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.25},
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 14,
    "linear_value_head_dim": 18,
    "linear_conv_kernel_dim": 3,
}
_HYBRID_MOE = {
    "num_experts": 10,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 52,
    "shared_expert_intermediate_size": 72,
}

_EQUALLY_MANY = {"head_dim": 16, "num_key_value_heads": 8}  # kv heads and heads, of D numbers together
_FALCON = {"num_attention_heads": 16, "num_kv_heads": 4, "ffn_hidden_size": 112}
_COHERE = {"logit_scale": 0.7, "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}}

_MAMBA = {
    "mamba_expand": 3,
    "mamba_n_heads": 12,
    "mamba_n_groups": 2,
    "mamba_d_state": 14,
    "mamba_d_conv": 4,
    "mamba_chunk_size": 16,
}
_NEMOTRON_H = {
    "layers_block_type": ["linear_attention", "moe", "linear_attention", "full_attention", "mlp"],
    "mlp_hidden_act": "relu2",
    "mamba_num_heads": 12,
    "mamba_head_dim": 9,
    "n_groups": 2,
    "ssm_state_size": 14,
    "conv_kernel": 4,
    "chunk_size": 16,
    "time_step_min": 1e-9,  # else transformers bounds the steps of prompts, and not those of decodes
    "n_routed_experts": 10,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "moe_shared_expert_intermediate_size": 52,
    "routed_scaling_factor": 1.7,
    "n_group": 2,
    "topk_group": 1,
}
_GRANITE = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.15,
    "residual_multiplier": 0.6,
    "logits_scaling": 0.7,
}
_SIGMOID_MOE = {
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.7,
    "n_group": 2,
    "topk_group": 1,
}
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
_ROUTED = {"n_routed_experts": 10, "n_shared_experts": 3}
_CONV = {"layer_types": ["conv", "full_attention", "conv"], "conv_L_cache": 5}
_GRANITE_MOE = {**_GRANITE, "intermediate_size": 48, "num_local_experts": 10, "num_experts_per_tok": 3}


def _falcon(head_dim: int = 0, num_key_value_heads: int = 0, intermediate_size: int = 0, **values: Any) -> FalconConfig:
    """Its configuration, which has other words for these, or none."""
    return FalconConfig(**values)


# The same, as differences from OF_FAMILIES.
FAMILIES: dict[str, Kind] = {
    "mistral": (MistralConfig, MistralForCausalLM, {"sliding_window": WINDOW}),
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
    "olmo": (OlmoConfig, OlmoForCausalLM, {"clip_qkv": 1.0}),
    "nanochat": (NanoChatConfig, NanoChatForCausalLM, {"attention_bias": True, "final_logit_softcapping": 5.0}),
    # As 7B, 40B and 11B have it.
    "falcon": (_falcon, FalconForCausalLM, {**_FALCON, "tie_word_embeddings": False}),
    "falcon_40b": (_falcon, FalconForCausalLM, {**_FALCON, "new_decoder_architecture": True, "bias": True}),
    "falcon_11b": (
        _falcon,
        FalconForCausalLM,
        {**_FALCON, "new_decoder_architecture": True, "num_ln_in_parallel_attn": 1},
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
    "falcon_h1": (
        FalconH1Config,
        FalconH1ForCausalLM,
        {
            **_MAMBA,
            "mamba_d_ssm": 108,
            "key_multiplier": 0.7,
            "embedding_multiplier": 3.0,
            "lm_head_multiplier": 1.3,
            "mlp_multipliers": [0.8, 1.4],
            "attention_in_multiplier": 1.2,
            "attention_out_multiplier": 0.6,
            "ssm_in_multiplier": 1.1,
            "ssm_out_multiplier": 0.8,
            "ssm_multipliers": [0.9, 1.2, 0.7, 1.3, 0.8],
        },
    ),
    "olmo_hybrid": (
        OlmoHybridConfig,
        OlmoHybridForCausalLM,
        {
            "num_hidden_layers": 4,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 6,
            "linear_key_head_dim": 54,  # transformers saves convolutions as if all had as many channels
            "linear_value_head_dim": 18,
            "linear_conv_kernel_dim": 3,
        },
    ),
    "olmo2": (Olmo2Config, Olmo2ForCausalLM, {"attention_bias": True}),
    "olmo3": (
        Olmo3Config,
        Olmo3ForCausalLM,
        {
            "sliding_window": WINDOW,
            "layer_types": _MIXED_TYPES,
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "yarn",
                    "rope_theta": 5000.0,
                    "factor": 8.0,
                    "original_max_position_embeddings": 64,
                    "beta_fast": 8.0,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0},
            },
        },
    ),
    "glm": (GlmConfig, GlmForCausalLM, {"partial_rotary_factor": 0.6}),
    "glm4": (Glm4Config, Glm4ForCausalLM, {"partial_rotary_factor": 0.6}),
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
            "layer_types": ["sliding_attention", "full_attention", *_MIXED_TYPES],
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
    "gemma": (GemmaConfig, GemmaForCausalLM, {}),
    "seed_oss": (SeedOssConfig, SeedOssForCausalLM, {"attention_out_bias": True, "mlp_bias": True}),
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
            "layer_types": _MIXED_TYPES,
            "layer_rope_theta": [5000.0, 0, 1000.0],
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": False,
        },
    ),
    "granite_moe_swa": (
        GraniteMoeSWAConfig,
        GraniteMoeSWAForCausalLM,
        {**_GRANITE_MOE, "shared_intermediate_size": 52, "sliding_window": WINDOW, "layer_types": _MIXED_TYPES},
    ),
    "granite_hybrid": (
        GraniteMoeHybridConfig,
        GraniteMoeHybridForCausalLM,
        {
            **_GRANITE_MOE,
            **_MAMBA,
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
    "bamba": (BambaConfig, BambaForCausalLM, {**_MAMBA, "mlp_bias": True, "attn_layer_indices": [1]}),
    "nemotron_h": (NemotronHConfig, NemotronHForCausalLM, _NEMOTRON_H),
    "nemotron_h_latent": (NemotronHConfig, NemotronHForCausalLM, {**_NEMOTRON_H, "moe_latent_size": 44}),
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
    # With LayerNorm.
    "cohere": (CohereConfig, CohereForCausalLM, {**_COHERE, "use_qk_norm": True, "attention_bias": True}),
    "cohere2": (
        Cohere2Config,
        Cohere2ForCausalLM,
        {**_COHERE, "head_dim": 16, "sliding_window": WINDOW, "layer_types": _MIXED_TYPES},
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
    "starcoder2": (
        Starcoder2Config,
        Starcoder2ForCausalLM,
        {"sliding_window": WINDOW, "tie_word_embeddings": False},
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
    "nemotron": (NemotronConfig, NemotronForCausalLM, {"attention_bias": True, "mlp_bias": True}),
    "jais2": (Jais2Config, Jais2ForCausalLM, {}),
    "phi": (PhiConfig, PhiForCausalLM, {"partial_rotary_factor": 0.5}),
    "gpt_neox": (
        GPTNeoXConfig,
        GPTNeoXForCausalLM,
        {
            **_EQUALLY_MANY,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.5},
        },
    ),
    "gpt2": (GPT2Config, GPT2LMHeadModel, {**_EQUALLY_MANY, "intermediate_size": None, "n_inner": 112}),
    "gpt_bigcode": (
        GPTBigCodeConfig,
        GPTBigCodeForCausalLM,
        {"head_dim": 16, "num_key_value_heads": 1, "intermediate_size": None, "n_inner": 112},
    ),
    "gptj": (
        GPTJConfig,
        GPTJForCausalLM,
        {**_EQUALLY_MANY, "intermediate_size": None, "n_inner": 112, "rotary_dim": 6},
    ),
    "opt": (OPTConfig, OPTForCausalLM, {**_EQUALLY_MANY, "intermediate_size": None, "ffn_dim": 112}),
    # Others of these mechanisms.
    "cwm": (
        CwmConfig,
        CwmForCausalLM,
        {"sliding_window": WINDOW, "layer_types": _MIXED_TYPES, "rope_parameters": LLAMA3_ROPE},
    ),
    "ministral": (MinistralConfig, MinistralForCausalLM, {"sliding_window": WINDOW, "layer_types": _MIXED_TYPES}),
    "ministral3": (Ministral3Config, Ministral3ForCausalLM, {"rope_parameters": {**_GROWING_ROPE}}),
    "mistral4": (
        Mistral4Config,
        Mistral4ForCausalLM,
        {
            **_LATENT,
            "head_dim": 20,  # all of a key, not what turns of it
            "rope_parameters": {**_GROWING_ROPE},  # transformers adds to it
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 1.7,
            "tie_word_embeddings": False,
        },
    ),
    "youtu": (YoutuConfig, YoutuForCausalLM, _LATENT_SIZES),
    "minicpm3": (
        MiniCPM3Config,
        MiniCPM3ForCausalLM,
        {**_LATENT_SIZES, "scale_emb": 3, "scale_depth": 1.1, "dim_model_base": 50},
    ),
    "mellum": (
        MellumConfig,
        MellumForCausalLM,
        {
            "sliding_window": WINDOW,
            "layer_types": _MIXED_TYPES,
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
    "helium": (HeliumConfig, HeliumForCausalLM, {"head_dim": 16, "attention_bias": True, "mlp_bias": True}),
    "flex_olmo": (
        FlexOlmoConfig,
        FlexOlmoForCausalLM,
        {"intermediate_size": 48, "num_experts": 10, "num_experts_per_tok": 3, "attention_bias": True},
    ),
    "afmoe": (
        AfmoeConfig,
        AfmoeForCausalLM,
        {
            "layer_types": _MIXED_TYPES,
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
            **_SIGMOID_MOE,
            "n_routed_experts": 10,
            "n_shared_experts": 3,
            "sliding_window": WINDOW,
            "max_window_layers": 2,
        },
    ),
    "solar_open": (
        SolarOpenConfig,
        SolarOpenForCausalLM,
        {**_SIGMOID_MOE, "n_routed_experts": 10, "n_shared_experts": 3},
    ),
    "kolibri1": (
        Kolibri1Config,
        Kolibri1ForCausalLM,
        {
            "sliding_window": WINDOW,
            "layer_types": _MIXED_TYPES,
            "num_experts": 10,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 48,
            "shared_expert_intermediate_size": 52,
            "norm_topk_prob": True,
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
    "exaone_moe": (
        ExaoneMoeConfig,
        ExaoneMoeForCausalLM,
        {
            **_SIGMOID_MOE,
            "num_experts": 10,
            "num_shared_experts": 3,
            "sliding_window": WINDOW,
            "layer_types": _MIXED_TYPES,
            "mlp_layer_types": ["dense", "sparse", "sparse"],
        },
    ),
    "apertus": (
        ApertusConfig,
        ApertusForCausalLM,
        {"rope_parameters": LLAMA3_ROPE, "attention_bias": True, "tie_word_embeddings": False},
    ),
    "arcee": (ArceeConfig, ArceeForCausalLM, {"hidden_act": "relu2", "attention_bias": True, "mlp_bias": True}),
    "granite": (
        GraniteConfig,
        GraniteForCausalLM,
        {**_GRANITE, "attention_bias": True, "mlp_bias": True},
    ),
    "hyperclovax": (HyperCLOVAXConfig, HyperCLOVAXForCausalLM, {**_GRANITE, "attention_bias": True, "mlp_bias": True}),
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
    # Its last layer turns nothing. Heads are normalized in the other two, the first of which has no experts.
    "llama4": (
        Llama4TextConfig,
        Llama4ForCausalLM,
        {
            "intermediate_size": 48,
            "intermediate_size_mlp": 112,
            "num_local_experts": 10,
            "moe_layers": [1, 2],
            "no_rope_layer_interval": 3,
            "attention_chunk_size": 32,
            "floor_scale": 10,
            "attn_scale": 0.5,
            "attention_bias": True,
            "rope_parameters": {**LLAMA3_ROPE, "high_freq_factor": 1.0},
        },
    ),
    "exaone4": (Exaone4Config, Exaone4ForCausalLM, {"sliding_window": WINDOW, "layer_types": _MIXED_TYPES}),
    "ernie4_5": (Ernie4_5Config, Ernie4_5ForCausalLM, {"use_bias": True, "tie_word_embeddings": False}),
    "ernie4_5_moe": (
        Ernie4_5_MoeConfig,
        Ernie4_5_MoeForCausalLM,
        {
            "moe_k": 3,
            "moe_num_experts": 10,
            "moe_num_shared_experts": 3,
            "moe_intermediate_size": 48,
            "moe_layer_start_index": 1,
            "moe_layer_interval": 2,
            "tie_word_embeddings": False,
        },
    ),
    "olmoe": (
        OlmoeConfig,
        OlmoeForCausalLM,
        {"head_dim": 16, "intermediate_size": 48, "num_experts": 10, "num_experts_per_tok": 3, "attention_bias": True},
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
    "qwen2_moe": (
        Qwen2MoeConfig,
        Qwen2MoeForCausalLM,
        {
            "num_experts": 10,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 48,
            "shared_expert_intermediate_size": 72,
            "mlp_only_layers": [1],
        },
    ),
    "qwen3_moe": (
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
        {
            "num_experts": 10,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 48,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
        },
    ),
    "qwen3_next": (
        Qwen3NextConfig,
        Qwen3NextForCausalLM,
        {
            **_HYBRID,
            **_HYBRID_MOE,
            "mlp_only_layers": [1],
            "attention_bias": True,
        },
    ),
    "qwen3_5": (Qwen3_5TextConfig, Qwen3_5ForCausalLM, _HYBRID),
    "qwen3_5_moe": (Qwen3_5MoeTextConfig, Qwen3_5MoeForCausalLM, {**_HYBRID, **_HYBRID_MOE}),
    "mixtral": (
        MixtralConfig,
        MixtralForCausalLM,
        {"intermediate_size": 48, "num_local_experts": 5, "sliding_window": WINDOW},
    ),
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
    "deepseek_v3": (
        DeepseekV3Config,
        DeepseekV3ForCausalLM,
        {
            **_LATENT,
            "n_group": 4,
            "topk_group": 2,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 1.5,
            "attention_bias": True,
            "rms_norm_eps": 1e-3,  # those of the latents keep their own
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 5000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 128,
                "mscale": 1.0,
                "mscale_all_dim": 0.8,
            },
        },
    ),
    "jamba": (
        JambaConfig,
        JambaForCausalLM,
        {
            "head_dim": 16,
            "num_hidden_layers": 4,
            "attn_layer_period": 3,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "mamba_d_state": 14,
            "mamba_d_conv": 3,
            "mamba_expand": 3,
            "mamba_dt_rank": 10,
        },
    ),
    "kimi_linear": (
        KimiLinearConfig,
        KimiLinearForCausalLM,
        {
            **_LATENT_SIZES,
            "q_lora_rank": None,
            "num_hidden_layers": 4,
            "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
            "linear_num_heads": 10,
            "linear_head_dim": 16,
            "linear_conv_kernel_dim": 3,
            "num_experts": 12,
            "num_experts_per_token": 3,
            "num_shared_experts": 4,
            "moe_intermediate_size": 48,
            "num_expert_group": 4,
            "topk_group": 2,
            "attention_bias": True,
        },
    ),
    "longcat_flash": (
        LongcatFlashConfig,
        LongcatFlashForCausalLM,
        {
            **_LATENT_SIZES,
            "num_layers": 2,
            "expert_ffn_hidden_size": 48,
            "moe_topk": 4,
            "n_routed_experts": 12,
            "zero_expert_num": 7,
            "attention_bias": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
        },
    ),
    "axk1": (
        AXK1Config,
        AXK1ForCausalLM,
        {**_LATENT, "n_group": 4, "topk_group": 2, "mlp_layer_types": ["sparse", "dense", "sparse"]},
    ),
    "deepseek_v32": (
        DeepseekV32Config,
        DeepseekV32ForCausalLM,
        {
            **_LATENT,
            **_INDEX,
            "n_group": 4,
            "topk_group": 2,
            "first_k_dense_replace": 1,
            "attention_bias": True,
            "rms_norm_eps": 1e-3,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 5000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 128,
                "mscale": 1.0,
                "mscale_all_dim": 0.8,
            },
        },
    ),
    "glm_moe_dsa": (
        GlmMoeDsaConfig,
        GlmMoeDsaForCausalLM,
        {**_LATENT, **_INDEX, "first_k_dense_replace": 1, "indexer_types": ["full", "shared", "full"]},
    ),
    "deepseek_v4": (
        DeepseekV4Config,
        DeepseekV4ForCausalLM,
        {
            "num_hidden_layers": 4,
            "num_key_value_heads": 1,
            "head_dim": 24,
            "q_lora_rank": 22,
            "layer_types": [
                "sliding_attention",
                "compressed_sparse_attention",
                "heavily_compressed_attention",
                "compressed_sparse_attention",
            ],
            "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 8},
            "mlp_layer_types": ["hash_moe", "moe", "moe", "moe"],
            "partial_rotary_factor": 0.25,
            "sliding_window": WINDOW,
            "o_groups": 2,
            "o_lora_rank": 7,
            "index_n_heads": 13,
            "index_head_dim": 10,
            "index_topk": 5,
            "moe_intermediate_size": 26,
            "n_routed_experts": 9,
            "num_experts_per_tok": 4,
            "swiglu_limit": 1.5,
            "hc_mult": 3,
            "hc_sinkhorn_iters": 6,
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 8.0,
                "original_max_position_embeddings": 64,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
            },
        },
    ),
    "deepseek_v2": (
        DeepseekV2Config,
        DeepseekV2ForCausalLM,
        {
            **_LATENT,
            "q_lora_rank": None,
            "attention_bias": True,
            "n_group": 4,
            "topk_group": 2,
            "topk_method": "group_limited_greedy",
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 1.5,
        },
    ),
    "glm4_moe_lite": (
        Glm4MoeLiteConfig,
        Glm4MoeLiteForCausalLM,
        {**_LATENT, "n_group": 1, "topk_group": 1, "mlp_layer_types": ["dense", "sparse", "dense"]},
    ),
    "laguna": (
        LagunaConfig,
        LagunaForCausalLM,
        {
            "num_attention_heads_per_layer": [8, 4, 12],
            "layer_types": _MIXED_TYPES,
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
    "mimo_v2_flash": (
        MiMoV2FlashConfig,
        MiMoV2FlashForCausalLM,
        {
            "num_hidden_layers": 4,
            "v_head_dim": 18,
            "sliding_window": WINDOW,
            "layer_types": ["full_attention", *_MIXED_TYPES],
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
    "gpt_oss": (
        GptOssConfig,
        GptOssForCausalLM,
        {
            "intermediate_size": 48,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "sliding_window": WINDOW,
            "layer_types": _MIXED_TYPES,
            "swiglu_limit": 2.0,
        },
    ),
}
FAMILY_KINDS = tuple(FAMILIES)
OF_D_NUMBERS = (
    "cohere2",
    "stable_lm",
    "gpt_neox",
    "gpt2",
    "gpt_bigcode",
    "gptj",
    "opt",
    "falcon",
    "falcon_40b",
    "falcon_11b",
)  # whose heads have D numbers together
# Whose mechanisms others have, too.
VARIANTS = ("falcon_11b", "gpt_bigcode", "granite_moe_swa", "hy_v3", "jais2", "kolibri1", "minicpm3", "vault_gemma")
DELTA_KINDS = ("qwen3_5", "qwen3_next", "qwen3_5_moe")  # of those, Qwen's with gated delta-nets
BLOCK_KINDS = ("nemotron_h", "nemotron_h_latent")  # whose layers are a mixer or an MLP alone
CONV_KINDS = ("lfm2", "lfm2_moe", "lfm3")  # with short convolutions
HYBRID_KINDS = (  # all that keep states
    *DELTA_KINDS, "kimi_linear", "granite_hybrid", "nemotron_h", "bamba", "nemotron_h_latent", *CONV_KINDS,
    "olmo_hybrid", "falcon_h1", "jamba",
)  # fmt: skip


def two_layers(kind: str) -> dict[str, Any]:
    """What a configuration of `kind` in `HYBRID_KINDS` changes to have a layer that keeps states, and one that attends.

    Of `BLOCK_KINDS` there are experts between them.
    """
    if kind in BLOCK_KINDS:
        return {"layers_block_type": ["linear_attention", "moe", "full_attention"]}
    if kind == "jamba":
        return {"num_hidden_layers": 2, "attn_layer_period": 2}
    recurrent = "conv" if kind in CONV_KINDS else "linear_attention"
    types = {} if kind in ("bamba", "falcon_h1") else {"layer_types": [recurrent, "full_attention"]}
    return {"num_hidden_layers": 2, **types}


def values_of(kind: str) -> Kind:
    """The classes of `kind`, and all values that a checkpoint of it has in its configuration."""
    config_class, model_class, differences = {**KINDS, **FAMILIES}[kind]
    return config_class, model_class, {**(OF_FAMILIES if kind in FAMILIES else COMMON), **differences}
