"""Families whose MLPs are dense and which read text alone; Gemma is in `gemma`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jaxsgl.models.family import Family

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

_LLAMA = Family(mlp_bias=None, defaults={"eos_token_id": 2})

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
    "Qwen3ForCausalLM": Family(qk_norm="head", windows="flag", defaults={"head_dim": 128}),
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
    "Exaone4ForCausalLM": Family(
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
    ),
}
