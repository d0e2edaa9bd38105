"""Gemma 1 to 4, those that see images among them; experts of Gemma 4 stand next to MLPs."""

from __future__ import annotations

from dataclasses import replace

from jaxsgl.models.families.towers import GEMMA4_TOWER, GEMMA4_UNIFIED_TOWER, SIGLIP
from jaxsgl.models.family import EncoderFamily, Family, MoeFamily

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

GEMMA: dict[str, Family] = {
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
}
