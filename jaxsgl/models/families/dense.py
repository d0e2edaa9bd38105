"""Families whose MLPs are dense, those that see images among them; and Gemma 4, whose experts stand next to MLPs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jaxsgl.models.families.towers import (
    EXAONE_TOWER,
    GEMMA4_TOWER,
    GEMMA4_UNIFIED_TOWER,
    GLM4V_TOWER,
    GLM_OCR_TOWER,
    IDEFICS3_TOWER,
    LIGHT_ON_OCR_TOWER,
    PADDLE_OCR_TOWER,
    PIXTRAL,
    QWEN2_5_VL_TOWER,
    QWEN2_VL_TOWER,
    QWEN3_VL_TOWER,
    SIGLIP,
)
from jaxsgl.models.family import EncoderFamily, Family, MoeFamily

_MISTRAL = Family(
    qkv_bias=False,
    attention_out_bias=False,
    windows="always",
    defaults={"sliding_window": 4096, "num_key_value_heads": 8, "eos_token_id": 2},
)

# What ERNIE 4.5, dense and with experts, has in common.
ERNIE = Family(
    qkv_bias_key="use_bias",
    attention_out_bias_key="use_bias",
    mlp_bias=None,
    mlp_bias_key="use_bias",
    interleaved_rope=True,
    defaults={
        "head_dim": 128,
        "num_key_value_heads": 2,
        "rope_theta": 500_000.0,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "eos_token_id": 2,
    },
)

# What Granite's dense models, its mixtures and its hybrids have in common.
GRANITE = Family(mlp_bias=None, multipliers="each", attention_scale=1.0, defaults={"eos_token_id": 2})

# The same with windows and sinks.
GRANITE_SWA: dict[str, Any] = {
    "sinks": "all",
    "windows": "always",
    "full_every": 4,
    "full_first": True,
    "layer_thetas": True,
}

# What Hunyuan's dense models and its mixture have in common.
HUNYUAN = Family(
    qk_norm="head",
    rotates_first=True,
    alpha_stretches=True,
    defaults={"rms_norm_eps": 1e-5, "eos_token_id": 2},
    ignored=frozenset(
        {
            "attention_head_dim",
            "cla_share_factor",
            "dense_list",
            "eod_token_id",
            "im_end_id",
            "im_newline_id",
            "im_start_id",
            "mask_init_id",
            "mlp_bias",
            "norm_type",
            "org_vocab_size",
            "pad_id",
            "pool_type",
            "sep_token_id",
            "text_end_id",
            "text_start_id",
            "use_qk_norm",
            "use_rotary_pos_emb",
        }
    ),
)

# What GLM-4's older and newer form have in common.
_GLM = Family(
    attention_out_bias=False,
    partial_rope=True,
    interleaved_rope=True,
    defaults={
        "head_dim": 128,
        "num_key_value_heads": 2,
        "attention_bias": True,
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1.5625e-07,
        "eos_token_id": [151329, 151336, 151338],
    },
)

# What Gemma 2 and 3 have in common.
_GEMMA = Family(
    norms="sandwich",
    norm_offset=1,
    scales_embedding=True,
    rounds_embedding_scale=True,
    activation_key="hidden_activation",
    windows="always",
    caps=True,
    ignored=frozenset({"hidden_act", "sliding_window_size"}),
    defaults={
        "head_dim": 256,
        "num_key_value_heads": 4,
        "tie_word_embeddings": True,
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": 4096,
        "query_pre_attn_scalar": 256,
        "eos_token_id": 1,
    },
)

_GEMMA2 = replace(
    _GEMMA,
    full_every=2,
    defaults={**_GEMMA.defaults, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
)

_GEMMA3 = replace(
    _GEMMA,
    qk_norm="head",
    full_every=6,
    sliding_theta="rope_local_base_freq",
    defaults={**_GEMMA.defaults, "rope_theta": 1_000_000.0, "rope_local_base_freq": 10_000.0},
)

_GEMMA3N = Family(
    norms="sandwich",
    qk_norm="head",
    scales_embedding=True,
    rounds_embedding_scale=True,
    qkv_bias=False,
    attention_out_bias=False,
    activation_key="hidden_activation",
    windows="always",
    full_every=5,
    sliding_theta="rope_local_base_freq",
    caps_logits=True,
    attention_scale=1.0,
    normalizes_values=True,
    own_parts="embeddings and keys",
    several_streams=True,
    required={"altup_active_idx": 0, "altup_correct_scale": True, "attention_bias": False},
    ignored=frozenset({"altup_coef_clip", "altup_lr_multiplier", "query_pre_attn_scalar"}),
    defaults={
        "vocab_size": 262_400,
        "hidden_size": 2048,
        "intermediate_size": 16_384,
        "num_hidden_layers": 35,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "max_position_embeddings": 32_768,
        "tie_word_embeddings": True,
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": 512,
        "final_logit_softcapping": 30.0,
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
        "vocab_size_per_layer_input": 262_144,
        "hidden_size_per_layer_input": 256,
        "altup_num_inputs": 4,
        "laurel_rank": 64,
        "num_kv_shared_layers": 15,
        "eos_token_id": 1,
    },
)

_GEMMA4 = Family(
    norms="sandwich",
    qk_norm="head",
    qkv_bias=False,
    attention_out_bias=False,
    scales_embedding=True,
    rounds_embedding_scale=True,
    activation_key="hidden_activation",
    windows="always",
    full_every=6,
    sliding_theta=10_000.0,
    caps_logits=True,
    attention_scale=1.0,
    normalizes_values=True,
    layer_factors=True,
    own_parts="all",
    moe=MoeFamily(
        ("num_experts",), renormalize=True, top_k_key="top_k_experts", switch="enable_moe_block", expert_factors=True
    ),
    # Sizes of what is switched off.
    ignored=frozenset({"num_experts", "top_k_experts", "moe_intermediate_size"}),
    defaults={
        "vocab_size": 262_144,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 30,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131_072,
        "tie_word_embeddings": True,
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": 512,
        "vocab_size_per_layer_input": 262_144,
        "hidden_size_per_layer_input": 256,
        "eos_token_id": 1,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            "full_attention": {
                "rope_type": "proportional",
                "partial_rotary_factor": 0.25,
                "rope_theta": 1_000_000.0,
            },
        },
    },
)

# What Gemma 4's configurations say of parts that aren't the decoder's.
_GEMMA4_PARTS = {
    "audio_config",
    "audio_token_id",
    "boa_token_id",
    "boi_token_id",
    "default_output_length",
    "eoa_token_id",
    "eoa_token_index",
    "eoi_token_id",
    "global_head_dim",
    "image_seq_length",
    "image_token_id",
    "max_position_embeddings",
    "video_seq_length",
    "video_token_id",
    "vision_soft_tokens_per_image",
}
# Gemma 4 12B, without embeddings of layers and experts.
_GEMMA4_UNIFIED = replace(
    _GEMMA4,
    moe=None,
    defaults={
        **{key: value for key, value in _GEMMA4.defaults.items() if not key.endswith("_per_layer_input")},
        "hidden_size_per_layer_input": 0,
        "max_position_embeddings": 262_144,
        "sliding_window": 1024,
    },
)

_QWEN2_VL = Family(
    qkv_bias=True,
    attention_out_bias=False,
    windows="flag",
    section="text_config",
    may_be_flat=True,
    vision=QWEN2_VL_TOWER,
    defaults={
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1_000_000.0,
        "max_position_embeddings": 32_768,
        "sliding_window": 4096,
        "max_window_layers": 80,
        "eos_token_id": 151_645,
    },
    ignored=frozenset({"vision_start_token_id", "vision_end_token_id", "vision_token_id", "spatial_patch_size"}),
)

_QWEN2_5_VL = replace(
    _QWEN2_VL,
    vision=QWEN2_5_VL_TOWER,
    ignored=_QWEN2_VL.ignored | {"tokens_per_second"},
)

# What the dense Qwen3-VL and the mixture of experts have in common.
QWEN3_VL = Family(
    qk_norm="head",
    section="text_config",
    vision=QWEN3_VL_TOWER,
    defaults={
        "head_dim": 128,
        "rope_theta": 500_000.0,
        "max_position_embeddings": 128_000,
        "eos_token_id": 151_645,
    },
    ignored=frozenset({"vision_start_token_id", "vision_end_token_id"}),
)

GLM4V_TOKENS = frozenset(
    {"image_start_token_id", "image_end_token_id", "image_token_id", "video_start_token_id", "video_end_token_id"}
)

_GLM4V = replace(
    _GLM,
    norms="sandwich",
    section="text_config",
    vision=GLM4V_TOWER,
    defaults={
        "num_key_value_heads": 2,
        "attention_bias": True,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 32_768,
    },
    ignored=GLM4V_TOKENS,
)

# EXAONE 4.0, which sees images in 4.5.
_EXAONE4 = Family(
    norms="post",
    qk_norm="head",
    qkv_bias=False,
    attention_out_bias=False,
    windows="always",
    full_every=4,
    turned_layers="windows",
    defaults={
        "num_key_value_heads": 32,
        "rms_norm_eps": 1e-5,
        "sliding_window": 4096,
        "eos_token_id": 2,
    },
)

_MINISTRAL3 = replace(
    _MISTRAL,
    grows_queries=True,
    defaults={
        **_MISTRAL.defaults,
        "sliding_window": None,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 262_144,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1_000_000.0,
            "factor": 16.0,
            "original_max_position_embeddings": 16_384,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
    },
)

# Mistral's decoders next to a tower, Pixtral's (arXiv 2410.07073).
IN_MISTRAL3: dict[str, Any] = {
    "section": "text_config",
    "ties_whole": True,
    "vision": PIXTRAL,
    # What a folder that describes no tower may have; and sizes of the tower that follow from others.
    "ignored": frozenset(
        {
            "head_dim",
            "image_size",
            "image_token_id",
            "image_token_index",
            "multimodal_projector_bias",
            "projector_hidden_act",
            "spatial_merge_size",
            "vision_feature_layer",
            "vocab_size",
        }
    ),
}

_LLAMA = Family(mlp_bias=None, defaults={"eos_token_id": 2})

# Idefics 3 and SmolVLM, whose folders have settings of older processors and of parts that are not built.
_IDEFICS3 = replace(
    _LLAMA,
    section="text_config",
    vision=IDEFICS3_TOWER,
    defaults={**_LLAMA.defaults, "rms_norm_eps": 1e-5},
    ignored=frozenset(
        {
            "_pad_token_id",
            "image_token_id",
            "max_image_size",
            "neftune_noise_alpha",
            "perceiver_config",
            "pixel_shuffle_factor",
            "qk_layer_norms",
            "size",
            "tie_word_embeddings",
            "use_resampler",
            "vocab_size",
        }
    ),
)

_QWEN3 = Family(qk_norm="head", windows="flag", defaults={"head_dim": 128})

DENSE: dict[str, Family] = {
    "LlamaForCausalLM": _LLAMA,
    "ExaoneForCausalLM": replace(
        _LLAMA,
        keys={
            "num_hidden_layers": "num_layers",
            "rms_norm_eps": "layer_norm_epsilon",
            "hidden_act": "activation_function",
        },
        defaults={"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 500_000.0, "eos_token_id": 361},
    ),
    "IQuestCoderForCausalLM": Family(
        mlp_bias=None,
        defaults={"num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5, "eos_token_id": 2},
    ),
    "InternLM3ForCausalLM": Family(
        mlp_bias=None,
        defaults={"num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1e-5, "eos_token_id": 2},
    ),
    "CwmForCausalLM": Family(
        qkv_bias=False,
        attention_out_bias=False,
        windows="always",
        full_every=4,
        full_first=True,
        defaults={
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "sliding_window": 8192,
            "rope_theta": 1_000_000.0,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 16.0,
                "high_freq_factor": 4.0,
                "low_freq_factor": 1.0,
                "original_max_position_embeddings": 8192,
            },
            "eos_token_id": [128_001, 128_008, 128_009],
        },
    ),
    "Qwen2ForCausalLM": Family(qkv_bias=True, attention_out_bias=False, windows="flag"),
    "Qwen3ForCausalLM": _QWEN3,
    "SeedOssForCausalLM": Family(
        mlp_bias=None,
        attention_out_bias_key="attention_out_bias",
        defaults={"num_key_value_heads": 8, "head_dim": 128, "attention_bias": True, "eos_token_id": 2},
        ignored=frozenset({"residual_dropout"}),
    ),
    "HunYuanDenseV1ForCausalLM": HUNYUAN,
    "Ernie4_5ForCausalLM": ERNIE,
    "GraniteForCausalLM": GRANITE,
    "GraniteSWAForCausalLM": replace(
        GRANITE,
        **GRANITE_SWA,
        defaults={
            "num_key_value_heads": 4,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 8192,
            "sliding_window": 128,
            "tie_word_embeddings": True,
            "eos_token_id": 100_257,
        },
    ),
    # MiniCPM 1, 2 and 4, whose code is in their folders: Granite with factors told otherwise.
    "MiniCPMForCausalLM": Family(
        multipliers="by size",
        defaults={
            "max_position_embeddings": 2048,
            "scale_emb": 1,
            "scale_depth": 1,
            "dim_model_base": 1,
            "tie_word_embeddings": True,
            "eos_token_id": 2,
        },
        ignored=frozenset({"mup_denominator", "use_scale_emb"}),
    ),
    "HyperCLOVAXForCausalLM": replace(
        GRANITE,
        norms="sandwich",
        norms_key="use_post_norm",
        attention_scale=None,
        scales_logits=True,
        keys={"logit_scale": "logits_scaling"},
        defaults={"use_post_norm": True, "eos_token_id": 2},
    ),
    "ApertusForCausalLM": Family(
        qk_norm="head",
        gated=False,
        defaults={
            "rms_norm_eps": 1e-5,
            "hidden_act": "xielu",
            "rope_theta": 12_000_000.0,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "high_freq_factor": 4.0,
                "low_freq_factor": 1.0,
                "original_max_position_embeddings": 8192,
            },
            "max_position_embeddings": 65_536,
            "eos_token_id": 2,
        },
        required={"post_norm": False, "qk_norm": True},
    ),
    "ArceeForCausalLM": Family(
        mlp_bias=None,
        gated=False,
        defaults={"rms_norm_eps": 1e-5, "hidden_act": "relu2", "eos_token_id": 128_001},
    ),
    "MistralForCausalLM": _MISTRAL,
    "MinistralForCausalLM": _MISTRAL,
    "Ministral3ForCausalLM": _MINISTRAL3,
    "Mistral3ForConditionalGeneration": replace(_MISTRAL, **IN_MISTRAL3),
    "Ministral3ForConditionalGeneration": replace(_MINISTRAL3, **IN_MISTRAL3),
    "Phi3ForCausalLM": Family(
        qkv_bias=False,
        attention_out_bias=False,
        windows="always",
        partial_rope=True,
        defaults={"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096, "eos_token_id": 32000},
        ignored=frozenset({"full_attn_mod", "interpolate_factor"}),
    ),
    "Olmo2ForCausalLM": Family(norms="post", qk_norm="all", defaults={"rms_norm_eps": 1e-5, "eos_token_id": 50279}),
    "Olmo3ForCausalLM": Family(
        norms="post",
        qk_norm="all",
        windows="always",
        full_every=4,
        sliding_theta=500_000.0,  # whatever `rope_theta` says, as transformers has it
        defaults={"rms_norm_eps": 1e-5, "sliding_window": 4096, "rope_theta": 500_000.0, "eos_token_id": 50279},
    ),
    # Its norms have no scales.
    "NanoChatForCausalLM": Family(
        normalizes_embedding=True,
        unit_heads_key="use_qk_norm",
        rotates_first=True,
        turns_backwards=True,
        gated=False,
        caps_logits=True,
        required={"use_qk_norm": True},
        defaults={
            "use_qk_norm": True,
            "hidden_act": "relu2",
            "final_logit_softcapping": 15.0,
            "max_position_embeddings": 2048,
            "eos_token_id": 1,
        },
    ),
    "GlmForCausalLM": _GLM,
    "Glm4ForCausalLM": replace(_GLM, norms="sandwich"),
    "HeliumForCausalLM": Family(
        attention_out_bias=False,
        mlp_bias=None,
        interleaved_rope=True,
        defaults={
            "num_key_value_heads": 20,
            "head_dim": 128,
            "rms_norm_eps": 1e-8,
            "rope_theta": 100_000.0,
            "eos_token_id": 2,
        },
    ),
    "SmolLM3ForCausalLM": Family(
        mlp_bias=None,
        windows="flag",
        turned_layers="told",
        defaults={
            "num_key_value_heads": 4,
            "rope_theta": 2_000_000.0,
            "tie_word_embeddings": True,
            "eos_token_id": 128001,
        },
    ),
    "Exaone4ForCausalLM": _EXAONE4,
    "Exaone4_5_ForConditionalGeneration": replace(
        _EXAONE4,
        section="text_config",
        vision=EXAONE_TOWER,
        ignored=frozenset({"image_token_id", "num_nextn_predict_layers", "video_token_id"}),
    ),
    "GemmaForCausalLM": Family(
        norm_offset=1,
        scales_embedding=True,
        rounds_embedding_scale=True,
        activations={"gelu": "gelu_pytorch_tanh"},  # its first folders say so
        defaults={
            "head_dim": 256,
            "num_key_value_heads": 16,
            "tie_word_embeddings": True,
            "hidden_act": "gelu_pytorch_tanh",
            "eos_token_id": 1,
        },
        ignored=frozenset({"hidden_activation"}),
    ),
    "Gemma2ForCausalLM": _GEMMA2,
    "VaultGemmaForCausalLM": replace(_GEMMA2, norms="pre"),
    "Gemma3ForCausalLM": replace(_GEMMA3, encoder=EncoderFamily("mean", key="use_bidirectional_attention")),
    "Gemma3ForConditionalGeneration": replace(
        _GEMMA3,
        section="text_config",
        ties_whole=True,
        vision=SIGLIP,
        defaults={
            **_GEMMA3.defaults,
            "vocab_size": 262_208,
            "num_attention_heads": 8,
            "max_position_embeddings": 131_072,
        },
        ignored=_GEMMA3.ignored
        | {
            "boi_token_index",
            "eoi_token_index",
            "image_token_id",
            "image_token_index",
            "mm_tokens_per_image",
            "vision_use_head",
        },
    ),
    "Gemma3nForCausalLM": _GEMMA3N,
    # Without what sees and hears.
    "Gemma3nForConditionalGeneration": replace(
        _GEMMA3N,
        section="text_config",
        ties_whole=True,
        ignored=_GEMMA3N.ignored
        | {
            "audio_config",
            "audio_soft_tokens_per_image",
            "audio_token_id",
            "boa_token_id",
            "boi_token_id",
            "eoa_token_id",
            "eoi_token_id",
            "image_token_id",
            "vision_config",
            "vision_soft_tokens_per_image",
        },
    ),
    "Gemma4ForCausalLM": _GEMMA4,
    # Without what hears.
    "Gemma4ForConditionalGeneration": replace(
        _GEMMA4,
        section="text_config",
        ties_whole=True,
        vision=GEMMA4_TOWER,
        ignored=_GEMMA4.ignored | _GEMMA4_PARTS,
    ),
    "Gemma4UnifiedForCausalLM": _GEMMA4_UNIFIED,
    "Gemma4UnifiedForConditionalGeneration": replace(
        _GEMMA4_UNIFIED,
        section="text_config",
        ties_whole=True,
        vision=GEMMA4_UNIFIED_TOWER,
        ignored=_GEMMA4.ignored | _GEMMA4_PARTS | {"model_patch_size"},
    ),
    "Glm4vForConditionalGeneration": _GLM4V,
    "GlmOcrForConditionalGeneration": replace(
        _GLM4V,
        qkv_bias=False,
        vision=GLM_OCR_TOWER,
        defaults={**_GLM4V.defaults, "num_key_value_heads": 8, "max_position_embeddings": 131_072},
        ignored=GLM4V_TOKENS | {"attention_bias", "image_size", "num_nextn_predict_layers"},
    ),
    "LightOnOcrForConditionalGeneration": replace(
        _QWEN3,
        section="text_config",
        ties_whole=True,
        vision=LIGHT_ON_OCR_TOWER,
        ignored=frozenset({"head_dim", "image_size", "vocab_size"}),
    ),
    "Idefics3ForConditionalGeneration": _IDEFICS3,
    "SmolVLMForConditionalGeneration": _IDEFICS3,
    "PaddleOCRVLForConditionalGeneration": replace(
        ERNIE,
        interleaved_rope=False,
        section="text_config",
        may_be_flat=True,
        ties_whole=True,
        vision=PADDLE_OCR_TOWER,
        defaults={**ERNIE.defaults, "max_position_embeddings": 131_072},
        ignored=frozenset(
            {
                "compression_ratio",
                "ignored_index",
                "image_size",
                "rope_is_neox_style",
                "temporal_patch_size",
                "tokens_per_second",
                "use_3d_rope",
                "video_token_id",
                "vision_end_token_id",
                "vision_start_token_id",
                "weight_share_add_bias",
            }
        ),
    ),
    "Qwen2VLForConditionalGeneration": _QWEN2_VL,
    "Qwen2_5_VLForConditionalGeneration": _QWEN2_5_VL,
    "Qwen3VLForConditionalGeneration": QWEN3_VL,
}
