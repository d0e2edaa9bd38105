"""Families that see images and whose MLPs are dense: decoders, many of other families, next to a tower of `towers`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jaxsgl.models.families.dense import DENSE, ERNIE
from jaxsgl.models.families.towers import (
    EXAONE_TOWER,
    GLM4V_TOWER,
    GLM_OCR_TOWER,
    IDEFICS3_TOWER,
    LIGHT_ON_OCR_TOWER,
    PADDLE_OCR_TOWER,
    PIXTRAL,
    QWEN2_5_VL_TOWER,
    QWEN2_VL_TOWER,
    QWEN3_VL_TOWER,
)
from jaxsgl.models.family import Family

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
    DENSE["GlmForCausalLM"],
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

# Idefics 3 and SmolVLM, whose folders have settings of older processors and of parts that are not built.
_IDEFICS3 = replace(
    DENSE["LlamaForCausalLM"],
    section="text_config",
    vision=IDEFICS3_TOWER,
    defaults={**DENSE["LlamaForCausalLM"].defaults, "rms_norm_eps": 1e-5},
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

SEEING: dict[str, Family] = {
    "Qwen2VLForConditionalGeneration": _QWEN2_VL,
    "Qwen2_5_VLForConditionalGeneration": _QWEN2_5_VL,
    "Qwen3VLForConditionalGeneration": QWEN3_VL,
    "Glm4vForConditionalGeneration": _GLM4V,
    "GlmOcrForConditionalGeneration": replace(
        _GLM4V,
        qkv_bias=False,
        vision=GLM_OCR_TOWER,
        defaults={**_GLM4V.defaults, "num_key_value_heads": 8, "max_position_embeddings": 131_072},
        ignored=GLM4V_TOKENS | {"attention_bias", "image_size", "num_nextn_predict_layers"},
    ),
    "Mistral3ForConditionalGeneration": replace(DENSE["MistralForCausalLM"], **IN_MISTRAL3),
    "Ministral3ForConditionalGeneration": replace(DENSE["Ministral3ForCausalLM"], **IN_MISTRAL3),
    "Exaone4_5_ForConditionalGeneration": replace(
        DENSE["Exaone4ForCausalLM"],
        section="text_config",
        vision=EXAONE_TOWER,
        ignored=frozenset({"image_token_id", "num_nextn_predict_layers", "video_token_id"}),
    ),
    "Idefics3ForConditionalGeneration": _IDEFICS3,
    "SmolVLMForConditionalGeneration": _IDEFICS3,
    "LightOnOcrForConditionalGeneration": replace(
        DENSE["Qwen3ForCausalLM"],
        section="text_config",
        ties_whole=True,
        vision=LIGHT_ON_OCR_TOWER,
        ignored=frozenset({"head_dim", "image_size", "vocab_size"}),
    ),
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
}
