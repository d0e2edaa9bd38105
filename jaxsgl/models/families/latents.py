"""Families that attend over a latent, with experts and without."""

from __future__ import annotations

from dataclasses import replace

from jaxsgl.models.families.mixtures import DEEPSEEK_MOE
from jaxsgl.models.families.seeing import IN_MISTRAL3
from jaxsgl.models.family import Family, MoeFamily

_SIZES = {
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
}
_DEEPSEEK = Family(
    qkv_bias=False,
    attention_out_bias=False,
    latent=True,
    interleaved_rope=True,
    moe=DEEPSEEK_MOE,
    next_layers_key="num_nextn_predict_layers",
    defaults={
        **_SIZES,
        "n_shared_experts": 1,
        "routed_scaling_factor": 2.5,
        "n_group": 8,
        "topk_group": 4,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 3,
        "norm_topk_prob": True,
        "num_nextn_predict_layers": 1,
        "eos_token_id": 1,
    },
    ignored=frozenset(
        {
            "head_dim",
            "qk_head_dim",
            "num_mtp_layers",
            "scoring_func",
            "aux_loss_alpha",
            "seq_aux",
            "ep_size",
            "num_key_value_heads",
        }
    ),
)

# The same latent with plain MLPs.
_YOUTU = replace(
    _DEEPSEEK,
    moe=None,
    next_layers_key=None,
    defaults={
        **_SIZES,
        "tie_word_embeddings": True,
        "eos_token_id": 128_001,
    },
    ignored=frozenset({"head_dim", "qk_head_dim", "num_key_value_heads", "embedding_initializer_range"}),
)

# The same with factors.
_MINICPM3 = replace(
    _YOUTU,
    multipliers="by size",
    interleaved_rope=False,
    defaults={
        "q_lora_rank": 768,
        "kv_lora_rank": 256,
        "qk_rope_head_dim": 32,
        "qk_nope_head_dim": 64,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 32_768,
        "scale_emb": 12,
        "scale_depth": 1.4,
        "dim_model_base": 256,
        "tie_word_embeddings": True,
        "eos_token_id": 2,
    },
)

_MISTRAL4 = replace(
    _DEEPSEEK,
    grows_queries=True,
    next_layers_key=None,
    moe=replace(DEEPSEEK_MOE, score="softmax", choice_bias=False),
    defaults={
        "q_lora_rank": 1024,
        "kv_lora_rank": 256,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 64,
        "v_head_dim": 128,
        "max_position_embeddings": 1_048_576,
        "moe_intermediate_size": 2048,
        "n_shared_experts": 1,
        "n_routed_experts": 128,
        "num_experts_per_tok": 4,
        "first_k_dense_replace": 0,
        "norm_topk_prob": True,
        "eos_token_id": 2,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10_000.0,
            "factor": 128.0,
            "original_max_position_embeddings": 8192,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
    },
    ignored=frozenset({"head_dim", "qk_head_dim", "num_key_value_heads"}),
)

# With an index that chooses tokens. Their layer after the last one has one, too, and is left out.
_DEEPSEEK_V32 = replace(
    _DEEPSEEK,
    index="halves",
    next_layers_key=None,
    required={"indexer_rope_interleave": False},
    defaults={
        **_DEEPSEEK.defaults,
        "max_position_embeddings": 163_840,
        "index_topk": 2048,
        "index_head_dim": 128,
        "index_n_heads": 64,
    },
    ignored=_DEEPSEEK.ignored | {"layer_types", "num_nextn_predict_layers"},
)
_GLM_DSA = replace(
    _DEEPSEEK_V32,
    index="pairs",
    required={"indexer_rope_interleave": True},
    defaults={
        **_DEEPSEEK_V32.defaults,
        "q_lora_rank": 2048,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
        "n_group": 1,
        "topk_group": 1,
        "max_position_embeddings": 202_752,
        "rms_norm_eps": 1e-5,
        "index_n_heads": 32,
    },
    ignored=_DEEPSEEK_V32.ignored | {"moe_router_dtype", "index_share_for_mtp_iteration"},
)

# Two attentions and two MLPs in a layer, and experts from the first MLP's input to the layer's end.
_LONGCAT = Family(
    qkv_bias=False,
    attention_out_bias=None,
    latent=True,
    scales_latents=True,
    interleaved_rope=True,
    halves=True,
    moe=MoeFamily(
        ("n_routed_experts", "num_local_experts"),
        renormalize=False,
        choice_bias=True,
        grouped=True,
        identities_key="zero_expert_num",
    ),
    keys={
        "num_hidden_layers": "num_layers",
        "intermediate_size": "ffn_hidden_size",
        "moe_intermediate_size": "expert_ffn_hidden_size",
        "num_experts_per_tok": "moe_topk",
    },
    required={
        "attention_method": "MLA",
        "mla_scale_kv_lora": True,
        "mla_scale_q_lora": True,
        "router_bias": False,
        "zero_expert_type": "identity",
    },
    defaults={
        **_SIZES,
        "num_layers": 28,
        "ffn_hidden_size": 12_288,
        "expert_ffn_hidden_size": 2048,
        "moe_topk": 12,
        "n_routed_experts": 512,
        "zero_expert_num": 256,
        "routed_scaling_factor": 6.0,
        "max_position_embeddings": 131_072,
        "rope_theta": 10_000_000.0,
        "rms_norm_eps": 1e-5,
        "eos_token_id": 2,
    },
    ignored=frozenset({"head_dim", "qk_head_dim", "num_key_value_heads", "num_hidden_layers", "norm_topk_prob"}),
)

# Not over a latent, but over windows and entries of groups of tokens.
_DEEPSEEK_V4 = Family(
    qkv_bias=False,
    attention_out_bias=False,
    sinks="all",
    windows="always",
    grouped_tokens=True,
    moe=MoeFamily(
        ("n_routed_experts", "num_local_experts"),
        score="root_of_softplus",
        choice_bias=True,
        renormalize=True,
        grouped=True,
        shared_key="n_shared_experts",
        clamped="silu",
    ),
    required={
        "attention_bias": False,
        "mlp_bias": False,
        "n_group": 1,
        "norm_topk_prob": True,
        "num_key_value_heads": 1,
        "scoring_func": "sqrtsoftplus",
        "topk_group": 1,
    },
    defaults={
        "head_dim": 512,
        "max_position_embeddings": 1_048_576,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 6,
        "num_key_value_heads": 1,
        "routed_scaling_factor": 1.5,
        "sliding_window": 128,
        "eos_token_id": 1,
    },
    # Layers that draft are left out.
    ignored=frozenset(
        {
            "expert_dtype",
            "intermediate_size",
            "num_nextn_predict_layers",
            "router_jitter_noise",
            "topk_method",
        }
    ),
)

LATENTS: dict[str, Family] = {
    "LongcatFlashForCausalLM": _LONGCAT,
    "DeepseekV4ForCausalLM": _DEEPSEEK_V4,
    "DeepseekV32ForCausalLM": _DEEPSEEK_V32,
    "GlmMoeDsaForCausalLM": _GLM_DSA,
    "Mistral4ForCausalLM": _MISTRAL4,
    "Mistral4ForConditionalGeneration": replace(
        _MISTRAL4, **{**IN_MISTRAL3, "ignored": IN_MISTRAL3["ignored"] | _MISTRAL4.ignored}
    ),
    "YoutuForCausalLM": _YOUTU,
    "MiniCPM3ForCausalLM": _MINICPM3,
    "DeepseekV3ForCausalLM": _DEEPSEEK,
    # The text alone.
    "Kimi_K25ForConditionalGeneration": replace(
        _DEEPSEEK,
        section="text_config",
        ties_whole=True,
        ignored=_DEEPSEEK.ignored
        | {
            "image_token_id",
            "media_placeholder_token_id",
            "projection_hidden_size",
            "projection_layer_norm_eps",
            "use_unified_vision_chunk",
            "video_placeholder",
            "video_token_id",
            "vision_config",
            "vision_end_token_id",
            "vision_start_token_id",
        },
    ),
    "AXK1ForCausalLM": replace(
        _DEEPSEEK,
        norms="pre and mixtures",
        next_layers_key=None,
        defaults={
            **_DEEPSEEK.defaults,
            "n_routed_experts": 192,
            "first_k_dense_replace": 1,
            "moe_intermediate_size": 2048,
            "max_position_embeddings": 32_768,
            "eos_token_id": 163_691,
        },
        ignored=_DEEPSEEK.ignored | {"num_nextn_predict_layers", "topk_method"},
    ),
    "SarvamMLAForCausalLM": replace(
        _DEEPSEEK,
        keys={"n_routed_experts": "num_experts", "n_shared_experts": "num_shared_experts"},
        defaults={
            **_DEEPSEEK.defaults,
            "q_lora_rank": None,
            "n_routed_experts": 128,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "num_nextn_predict_layers": 0,
        },
        required={"moe_router_enable_expert_bias": True, "score_function": "sigmoid"},
        ignored=_DEEPSEEK.ignored | {"q_head_dim", "router_dtype"},
    ),
    "DeepseekV2ForCausalLM": replace(
        _DEEPSEEK,
        moe=replace(DEEPSEEK_MOE, score="softmax", choice_bias=False, renormalize=False),
        defaults={
            **_DEEPSEEK.defaults,
            "n_shared_experts": 2,
            "routed_scaling_factor": 1.0,
            "n_group": None,
            "topk_group": None,
            "topk_method": "greedy",
            "first_k_dense_replace": 0,
            "num_nextn_predict_layers": 0,
            "moe_intermediate_size": 1407,
            "eos_token_id": 2,
        },
        ignored=_DEEPSEEK.ignored | {"norm_topk_prob"},
    ),
    "Glm4MoeLiteForCausalLM": replace(
        _DEEPSEEK,
        defaults={
            **_DEEPSEEK.defaults,
            "q_lora_rank": 768,
            "qk_nope_head_dim": 192,
            "v_head_dim": 256,
            "routed_scaling_factor": 1.8,
            "n_group": 1,
            "topk_group": 1,
            "num_experts_per_tok": 4,
            "num_nextn_predict_layers": 0,
            "first_k_dense_replace": 1,
            "rms_norm_eps": 1e-5,
        },
    ),
}
