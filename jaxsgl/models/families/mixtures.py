"""Families whose MLPs are mixtures of experts, and whose layers attend."""

from __future__ import annotations

from dataclasses import replace

from jaxsgl.models.families.dense import ERNIE, GLM4V_TOKENS, GLM4V_TOWER, GRANITE, HUNYUAN, QWEN3_VL
from jaxsgl.models.family import Family, MoeFamily

GRANITE_MOE = MoeFamily(
    ("num_local_experts",),
    ffn_key="intermediate_size",
    score="softmax_of_chosen",
    renormalize=False,
    shared_ffn_key="shared_intermediate_size",
)

GRANITE_MOE_DEFAULTS = {"num_local_experts": 8, "num_experts_per_tok": 2, "eos_token_id": 2}

# What DeepSeek's models with a latent and others of this form have in common.
DEEPSEEK_MOE = MoeFamily(
    ("n_routed_experts", "num_local_experts"),
    score="sigmoid",
    choice_bias=True,
    grouped=True,
    shared_key="n_shared_experts",
    dense_layers="first",
)

_GLM4_MOE = Family(
    qk_norm="head",
    qk_norm_key="use_qk_norm",
    attention_out_bias=False,
    partial_rope=True,
    moe=DEEPSEEK_MOE,
    defaults={
        "num_key_value_heads": 8,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "partial_rotary_factor": 0.5,
        "num_nextn_predict_layers": 1,
        "rms_norm_eps": 1e-5,
    },
    next_layers_key="num_nextn_predict_layers",
    ignored=frozenset({"num_mtp_layers"}),
)

# Llama 4, whose dense layers have an F of their own. Layers with a rope attend in chunks; of the others queries grow.
_LLAMA4 = Family(
    unit_heads_key="use_qk_norm",
    rotates_first=True,
    interleaved_rope=True,
    turned_layers="told",
    windows="chunks",
    grows_unturned=True,
    keys={"intermediate_size": "intermediate_size_mlp", "moe_intermediate_size": "intermediate_size"},
    moe=MoeFamily(
        ("num_local_experts",),
        score="softmax_of_chosen",  # of one expert 1: what it reads has its share already
        renormalize=False,
        scales_inputs=True,
        shared_ffn_key="moe_intermediate_size",
        dense_layers="unlisted",
    ),
    defaults={
        "head_dim": 128,
        "num_key_value_heads": 8,
        "intermediate_size_mlp": 16_384,
        "num_experts_per_tok": 1,
        "num_local_experts": 16,
        "use_qk_norm": True,
        "attention_chunk_size": 8192,
        "attn_temperature_tuning": True,
        "floor_scale": 8192,
        "attn_scale": 0.1,
        "rope_theta": 500_000.0,
        "rms_norm_eps": 1e-5,
        "eos_token_id": 2,
    },
    ignored=frozenset({"attn_scale", "attn_temperature_tuning", "floor_scale", "router_jitter_noise"}),
)

MIXTURES: dict[str, Family] = {
    "Llama4ForCausalLM": _LLAMA4,
    # Without what sees.
    "Llama4ForConditionalGeneration": replace(
        _LLAMA4,
        section="text_config",
        ignored=_LLAMA4.ignored | {"boi_token_index", "eoi_token_index", "image_token_index", "vision_config"},
    ),
    "HunYuanMoEV1ForCausalLM": replace(
        HUNYUAN,
        moe=MoeFamily(
            ("num_experts", "num_local_experts"),
            ffn_key="intermediate_size",
            renormalize=True,
            shared_ffn_key="intermediate_size",
            top_k_key="moe_topk",
        ),
        required={
            "group_limited_greedy": False,
            "moe_intermediate_size": "intermediate_size",
            "moe_layer_num_skipped": 0,
            "norm_topk_prob": True,
            "num_shared_expert": 1,
            "routed_scaling_factor": 1.0,
            "use_mixed_mlp_moe": True,
        },
        defaults={**HUNYUAN.defaults, "num_experts": 1, "moe_topk": 1},
        ignored=HUNYUAN.ignored
        | {
            "anyres_pooling_size",
            "anyres_vit_max_image_size",
            "image_token_id",
            "num_media_embeds",
            "video_end_id",
            "video_start_id",
            "vit_input_resolution",
            "vit_mapping_type",
            "vit_norm_type",
            "vit_patch",
            "vit_token",
        },
    ),
    "GraniteMoeForCausalLM": replace(
        GRANITE, mlp_bias=False, moe=replace(GRANITE_MOE, shared_ffn_key=None), defaults=GRANITE_MOE_DEFAULTS
    ),
    "GraniteMoeSharedForCausalLM": replace(
        GRANITE, mlp_bias=False, moe=GRANITE_MOE, defaults=GRANITE_MOE_DEFAULTS | {"shared_intermediate_size": 0}
    ),
    "ExaoneMoeForCausalLM": Family(
        qk_norm="head",
        qkv_bias=False,
        attention_out_bias=False,
        windows="always",
        full_every=4,
        turned_layers="windows",
        moe=replace(DEEPSEEK_MOE, count_keys=("num_experts", "num_local_experts"), shared_key="num_shared_experts"),
        defaults={
            "num_key_value_heads": 32,
            "rms_norm_eps": 1e-5,
            "sliding_window": 4096,
            "moe_intermediate_size": 1024,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "num_shared_experts": 1,
            "first_k_dense_replace": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
            "eos_token_id": 53,
        },
        ignored=frozenset({"num_nextn_predict_layers", "scoring_func"}),
    ),
    "Qwen2MoeForCausalLM": Family(
        qkv_bias_key="qkv_bias",
        attention_out_bias=False,
        windows="even by flag",
        moe=MoeFamily(
            ("num_experts", "num_local_experts"),
            shared_ffn_key="shared_expert_intermediate_size",
            shared_gate=True,
            dense_layers="steps",
        ),
        defaults={"num_key_value_heads": 16, "num_experts_per_tok": 4, "qkv_bias": True},
    ),
    "Qwen3MoeForCausalLM": Family(
        qk_norm="head",
        windows="all by flag",
        moe=MoeFamily(("num_experts", "num_local_experts"), dense_layers="steps"),
        defaults={"num_key_value_heads": 4, "num_experts_per_tok": 8},
        ignored=frozenset({"use_qk_norm"}),
    ),
    "Qwen3VLMoeForConditionalGeneration": replace(
        QWEN3_VL,
        moe=MoeFamily(("num_experts", "num_local_experts"), renormalize=True, dense_layers="steps"),
        defaults={**QWEN3_VL.defaults, "num_key_value_heads": 16, "num_experts_per_tok": 4},
        ignored=QWEN3_VL.ignored | {"norm_topk_prob"},
    ),
    "FlexOlmoForCausalLM": Family(
        norms="post",
        qk_norm="all",
        moe=MoeFamily(("num_experts", "num_local_experts"), ffn_key="intermediate_size"),
        defaults={"num_experts": 7, "num_experts_per_tok": 5, "rope_theta": 500_000.0, "eos_token_id": 100_257},
    ),
    "AfmoeForCausalLM": Family(
        norms="sandwich",
        qk_norm="head",
        qkv_bias=False,
        attention_out_bias=False,
        output_gate="number",
        windows="always",
        full_every=4,
        turned_layers="windows",
        scales_embedding=True,
        scales_embedding_key="mup_enabled",
        moe=MoeFamily(
            ("num_experts", "num_local_experts"),
            score="sigmoid",
            choice_bias=True,
            renormalize=True,
            grouped=True,
            scale_key="route_scale",
            shared_key="num_shared_experts",
            dense_layers="first",
            first_dense_key="num_dense_layers",
        ),
        defaults={
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "sliding_window": 1024,
            "moe_intermediate_size": 1408,
            "num_dense_layers": 1,
            "num_experts": 64,
            "num_experts_per_tok": 6,
            "num_shared_experts": 2,
        },
        ignored=frozenset(
            {
                "load_balance_coeff",
                "num_expert_groups",
                "num_limited_groups",
                "route_norm",
                "score_func",
                "use_grouped_mm",
            }
        ),
    ),
    "OlmoeForCausalLM": Family(
        qk_norm="all",
        moe=MoeFamily(("num_experts", "num_local_experts"), ffn_key="intermediate_size"),
        defaults={"num_experts": 64, "num_experts_per_tok": 8, "rms_norm_eps": 1e-5, "eos_token_id": 50279},
    ),
    "Ernie4_5_MoeForCausalLM": replace(
        ERNIE,
        qkv_bias=False,
        attention_out_bias=False,
        mlp_bias=False,
        moe=MoeFamily(
            ("moe_num_experts", "num_experts", "num_local_experts"),
            choice_bias=True,
            renormalize=True,
            shared_key="moe_num_shared_experts",
            top_k_key="moe_k",
            dense_layers="outside",
        ),
        defaults={
            **ERNIE.defaults,
            "num_key_value_heads": 4,
            "head_dim": None,
            "moe_k": 6,
            "moe_num_experts": 64,
            "moe_num_shared_experts": 2,
            "moe_intermediate_size": 1536,
            "moe_layer_start_index": 1,
        },
        ignored=frozenset(
            {
                "moe_norm_min",
                "moe_capacity",
                "moe_gate",
                "moe_use_aux_free",
                "num_nextn_predict_layers",
                "use_rmsnorm",
            }
        ),
    ),
    "MiniMaxM2ForCausalLM": Family(
        qk_norm="all",
        qkv_bias=False,
        attention_out_bias=False,
        partial_rope=True,
        moe=MoeFamily(
            ("num_local_experts", "num_experts"),
            ffn_key="intermediate_size",
            score="sigmoid",
            choice_bias=True,
            renormalize=True,
        ),
        defaults={
            "head_dim": 128,
            "num_key_value_heads": 8,
            "num_experts_per_tok": 8,
            "num_local_experts": 256,
            "rope_theta": 5_000_000.0,
            "eos_token_id": 200020,
        },
        ignored=frozenset(
            {
                "attn_type_list",
                "layernorm_full_attention_alpha",
                "layernorm_full_attention_beta",
                "layernorm_linear_attention_alpha",
                "layernorm_linear_attention_beta",
                "layernorm_mlp_alpha",
                "layernorm_mlp_beta",
                "mlp_intermediate_size",
                "mtp_transformer_layers",
                "num_mtp_modules",
                "qk_norm_type",
                "router_jitter_noise",
                "scoring_func",
                "shared_moe_mode",
                "sliding_window",
                "use_mtp",
                "use_qk_norm",
                "use_routing_bias",
            }
        ),
    ),
    "MixtralForCausalLM": Family(
        qkv_bias=False,
        attention_out_bias=False,
        windows="always",
        moe=MoeFamily(("num_local_experts", "num_experts"), ffn_key="intermediate_size", renormalize=True),
        defaults={
            "num_key_value_heads": 8,
            "num_experts_per_tok": 2,
            "num_local_experts": 8,
            "rope_theta": 1_000_000.0,
            "rms_norm_eps": 1e-5,
            "eos_token_id": 2,
        },
        ignored=frozenset({"router_jitter_noise"}),
    ),
    "Glm4MoeForCausalLM": _GLM4_MOE,
    "Glm4vMoeForConditionalGeneration": replace(
        _GLM4_MOE,
        section="text_config",
        vision=replace(GLM4V_TOWER, image_token_id=151_363, video_token_id=151_364),
        qk_norm=None,
        qk_norm_key=None,
        next_layers_key=None,
        defaults={**_GLM4_MOE.defaults, "attention_bias": True, "max_position_embeddings": 65_536},
        ignored=GLM4V_TOKENS | {"num_mtp_layers", "num_nextn_predict_layers"},
    ),
    "SolarOpenForCausalLM": Family(
        attention_out_bias=False,
        moe=replace(DEEPSEEK_MOE, dense_layers="none"),
        defaults={
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1_000_000.0,
            "moe_intermediate_size": 1280,
            "n_routed_experts": 128,
            "num_experts_per_tok": 8,
            "n_shared_experts": 1,
            "norm_topk_prob": True,
        },
        ignored=frozenset(
            {"first_k_dense_replace", "partial_rotary_factor", "use_qk_norm", "num_nextn_predict_layers"}
        ),
    ),
    "HYV3ForCausalLM": Family(
        qk_norm="head",
        moe=replace(
            DEEPSEEK_MOE,
            count_keys=("num_experts", "num_local_experts"),
            renormalize=True,
            scale_key="router_scaling_factor",
            shared_key="num_shared_experts",
        ),
        defaults={
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "rope_theta": 11_158_840.0,
            "max_position_embeddings": 131_072,
            "moe_intermediate_size": 1536,
            "num_experts": 192,
            "num_experts_per_tok": 8,
            "num_shared_experts": 1,
            "router_scaling_factor": 2.826,
            "first_k_dense_replace": 1,
        },
        required={"moe_router_enable_expert_bias": True, "moe_router_use_sigmoid": True, "route_norm": True},
        # What is computed in float32 anyway, and sizes that follow from others.
        ignored=frozenset(
            {
                "enable_attention_fp32_softmax",
                "enable_lm_head_fp32",
                "enable_moe_fp32_combine",
                "expert_hidden_dim",
                "num_nextn_predict_layers",
                "qk_norm",
                "use_grouped_mm",
            }
        ),
    ),
    "Dots1ForCausalLM": Family(
        qk_norm="head",
        windows="late",
        moe=DEEPSEEK_MOE,
        defaults={"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 62},
        ignored=frozenset({"moe_layer_freq", "scoring_func", "topk_method", "use_sliding_window", "use_qk_norm"}),
    ),
    "MellumForCausalLM": Family(
        qk_norm="head",
        windows="listed",
        sliding_theta=10_000.0,
        moe=MoeFamily(("num_local_experts", "num_experts"), dense_layers="first"),
        defaults={
            "num_key_value_heads": 4,
            "head_dim": 128,
            "sliding_window": 1024,
            "moe_intermediate_size": 896,
            "num_local_experts": 64,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 500_000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            },
        },
        ignored=frozenset({"num_mtp_layers", "mtp_layer_types", "mtp_mlp_layer_types", "num_nextn_predict_layers"}),
    ),
    "GptOssForCausalLM": Family(
        sinks=True,
        windows="always",
        full_every=2,
        moe=MoeFamily(
            ("num_local_experts", "num_experts"),
            ffn_key="intermediate_size",
            score="softmax_of_chosen",
            renormalize=False,
            router_bias=True,
            expert_bias=True,
            clamped=True,
        ),
        defaults={
            "head_dim": 64,
            "num_key_value_heads": 8,
            "num_experts_per_tok": 4,
            "attention_bias": True,
            "sliding_window": 128,
            "rope_theta": 150_000.0,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 32.0,
                "original_max_position_embeddings": 4096,
                "truncate": False,
            },
            "rms_norm_eps": 1e-5,
        },
        ignored=frozenset({"experts_per_token", "initial_context_length"}),
    ),
}
