"""Families with layers that keep states in the place of attention: delta-nets, Mamba-2, Mamba, short convolutions.

Of Kimi Linear the other layers attend over a latent.
"""

from __future__ import annotations

from dataclasses import replace

from jaxsgl.models.families.dense import GRANITE
from jaxsgl.models.families.mixtures import DEEPSEEK_MOE, GRANITE_MOE, GRANITE_MOE_DEFAULTS
from jaxsgl.models.families.towers import LFM2_VL_TOWER, QWEN3_5_TOWER
from jaxsgl.models.family import Family, MoeFamily

# What LFM2, dense and with experts, has in common.
_LFM2 = Family(
    norm_eps_key="norm_eps",
    qk_norm="head",
    qkv_bias=False,
    attention_out_bias=False,
    cut_ffn=True,
    recurrence="short-conv",
    tied_keys=("tie_embedding", "tie_word_embeddings"),
    defaults={
        "num_key_value_heads": 8,
        "norm_eps": 1e-5,
        "rope_theta": 1_000_000.0,
        "max_position_embeddings": 128_000,
        "tie_word_embeddings": True,
        "eos_token_id": 2,
    },
    ignored=frozenset(
        {
            "block_dim",
            "block_mlp_init_scale",
            "block_norm_eps",
            "block_out_init_scale",
            "block_use_swiglu",
            "block_use_xavier_init",
            "conv_dim",
            "conv_dim_out",
            "conv_use_xavier_init",
            "num_heads",
            "use_pos_enc",
        }
    ),
)

# What LFM2-VL's configurations say of its processor, and of what it doesn't read.
_LFM2_VL_PROCESSOR = {
    "do_image_splitting",
    "encoder_patch_size",
    "max_image_tokens",
    "max_num_patches",
    "max_pixels_tolerance",
    "max_tiles",
    "min_image_tokens",
    "min_tiles",
    "tile_size",
    "use_image_special_tokens",
    "use_thumbnail",
    "vision_feature_layer",
    "vision_feature_select_strategy",
    "vision_use_head",
}

_LFM3 = replace(
    _LFM2,
    norms="sandwich",
    norms_key="use_sandwich_norm",
    qkv_bias=None,
    attention_out_bias=None,
    cut_ffn=False,
    output_gate="head",
    output_gate_key="use_attention_gate",
    windows="always",
    sliding_theta=10_000.0,
    defaults={
        "num_key_value_heads": 4,
        "head_dim": 128,
        "norm_eps": 1e-5,
        "conv_L_cache": 7,
        "sliding_window": 256,
        "use_sandwich_norm": True,
        "use_attention_gate": True,
        "max_position_embeddings": 128_000,
        "tie_word_embeddings": True,
        "eos_token_id": 124_900,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            "full_attention": {
                "rope_type": "proportional",
                "partial_rotary_factor": 0.5,
                "rope_theta": 1_000_000.0,
            },
        },
    },
    ignored=frozenset(),
)

# What Qwen3-Next, Qwen3.5 and its mixtures of experts have in common.
_HYBRID = Family(
    norm_offset=1,
    qk_norm="head",
    partial_rope=True,
    recurrence="delta-net",
    output_gate="number",
    next_layers_key="mtp_num_hidden_layers",
    draft_head=True,
    defaults={"head_dim": 256, "partial_rotary_factor": 0.25, "mtp_num_hidden_layers": 1},
    # Positions of text are the same on all three axes. Gates and states are always these.
    ignored=frozenset(
        {
            "mrope_section",
            "mrope_interleaved",
            "attn_output_gate",
            "output_gate_type",
            "mamba_ssm_dtype",
        }
    ),
)

_HYBRID_MOE = MoeFamily(
    ("num_experts", "num_local_experts"),
    renormalize=True,
    shared_ffn_key="shared_expert_intermediate_size",
    shared_gate=True,
)

RECURRENT: dict[str, Family] = {
    "GraniteMoeHybridForCausalLM": replace(
        GRANITE,
        mlp_bias=False,
        moe=GRANITE_MOE,
        recurrence="mamba",
        turned_layers="type",
        defaults=GRANITE_MOE_DEFAULTS | {"shared_intermediate_size": 1024},
        ignored=frozenset({"mamba_chunk_size", "init_method", "normalization_function"}),
    ),
    "BambaForCausalLM": Family(
        mlp_bias=None,
        recurrence="mamba",
        partial_rope=True,
        defaults={
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "partial_rotary_factor": 0.5,
            "max_position_embeddings": 262_144,
            "eos_token_id": 2,
        },
        ignored=frozenset(
            {"attn_rotary_emb", "mamba_chunk_size", "num_logits_to_keep", "use_mamba_kernels", "z_loss_coefficient"}
        ),
    ),
    "FalconH1ForCausalLM": Family(
        qkv_bias=False,
        attention_out_bias=False,
        recurrence="mamba",
        side_by_side=True,
        multipliers="by part",
        mamba_keys={key: key for key in ("mamba_d_ssm", "ssm_multipliers")},
        required={"hidden_act": "silu", "mamba_use_mlp": True, "projectors_bias": False},
        defaults={
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "mamba_d_ssm": 1024,
            "max_position_embeddings": 8192,
            "eos_token_id": 2,
        },
        ignored=frozenset(
            {
                "layer_types",
                "layers_block_type",
                "mamba_chunk_size",
                "mamba_expand",
                "mlp_expansion_factor",
                "num_logits_to_keep",
                "time_step_floor",
                "time_step_max",
                "time_step_min",
                "time_step_rank",
            }
        ),
    ),
    "NemotronHForCausalLM": Family(
        norm_eps_key="layer_norm_epsilon",
        qkv_bias=False,
        attention_out_bias=False,
        activation_key="mlp_hidden_act",
        gated=False,
        turned_layers="none",
        recurrence="mamba",
        mamba_keys={
            "mamba_n_heads": "mamba_num_heads",
            "mamba_n_groups": "n_groups",
            "mamba_d_head": "mamba_head_dim",
            "mamba_d_state": "ssm_state_size",
            "mamba_d_conv": "conv_kernel",
            "mamba_conv_bias": "use_conv_bias",
            "mamba_proj_bias": "use_bias",
            "mamba_expand": "",
        },
        blocks=True,
        moe=MoeFamily(
            ("n_routed_experts", "num_local_experts"),
            score="sigmoid",
            choice_bias=True,
            grouped=True,
            shared_ffn_key="moe_shared_expert_intermediate_size",
            latent_key="moe_latent_size",
        ),
        defaults={
            "num_key_value_heads": 8,
            "head_dim": 128,
            "layer_norm_epsilon": 1e-5,
            "mlp_hidden_act": "relu2",
            "n_groups": 8,
            "mamba_head_dim": 64,
            "ssm_state_size": 128,
            "moe_shared_expert_intermediate_size": 7688,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
            "eos_token_id": 2,
        },
        # `time_step_min` is for training; transformers alone takes it for a bound on the steps of prompts. Layers that
        # draft are left out.
        ignored=frozenset(
            {
                "attention_bias",
                "attention_head_dim",
                "chunk_size",
                "expand",
                "mamba_proj_bias",
                "mamba_ssm_cache_dtype",
                "moe_shared_expert_overlap",
                "mtp_hybrid_override_pattern",
                "mtp_layers_block_type",
                "n_shared_experts",
                "norm_eps",
                "num_logits_to_keep",
                "num_nextn_predict_layers",
                "rescale_prenorm_residual",
                "rms_norm_eps",
                "time_step_floor",
                "time_step_max",
                "time_step_min",
                "time_step_rank",
                "use_mamba_kernels",
            }
        ),
    ),
    "OlmoHybridForCausalLM": Family(
        norms="post of attention",
        qk_norm="all",
        turned_layers="theta",
        recurrence="delta-net",
        wide_delta=True,
        defaults={"max_position_embeddings": 65_536, "linear_allow_neg_eigval": True, "eos_token_id": 100_257},
        ignored=frozenset(
            {"linear_a_log_max", "linear_a_log_min", "linear_dt_init_floor", "linear_dt_max", "linear_dt_min"}
        ),
    ),
    "JambaForCausalLM": Family(
        qkv_bias=False,
        attention_out_bias=False,
        turned_layers="none",
        recurrence="selective",
        moe=MoeFamily(
            ("num_experts", "num_local_experts"),
            ffn_key="intermediate_size",
            renormalize=False,
            dense_layers="periods",
        ),
        required={
            "hidden_act": "silu",
            "mamba_conv_bias": True,
            "mamba_inner_layernorms": True,
            "mamba_proj_bias": False,
        },
        defaults={
            "num_key_value_heads": 8,
            "num_experts": 16,
            "num_experts_per_tok": 2,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "attn_layer_period": 8,
            "attn_layer_offset": 4,
            "mamba_d_state": 16,
            "mamba_d_conv": 4,
            "mamba_expand": 2,
            "mamba_dt_rank": "auto",
            "max_position_embeddings": 262_144,
            "eos_token_id": 2,
        },
        ignored=frozenset({"num_logits_to_keep", "use_associative_scan", "use_mamba_kernels", "use_mambapy"}),
    ),
    "KimiLinearForCausalLM": Family(
        qkv_bias=False,
        attention_out_bias=None,
        latent=True,
        turned_layers="none",
        recurrence="channel-delta-net",
        moe=replace(DEEPSEEK_MOE, count_keys=("num_experts",)),
        keys={
            "max_position_embeddings": "model_max_length",
            "norm_topk_prob": "moe_renormalize",
            "n_group": "num_expert_group",
            "num_experts_per_tok": "num_experts_per_token",
            "n_shared_experts": "num_shared_experts",
        },
        required={"hidden_act": "silu", "mla_use_nope": True, "moe_router_activation_func": "sigmoid"},
        defaults={
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 128,
            "v_head_dim": 128,
            "linear_num_heads": 32,
            "linear_head_dim": 128,
            "linear_conv_kernel_dim": 4,
            "num_experts": 256,
            "num_experts_per_token": 8,
            "num_shared_experts": 1,
            "num_expert_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "moe_renormalize": True,
            "moe_intermediate_size": 1024,
            "routed_scaling_factor": 2.446,
            "rms_norm_eps": 1e-5,
            "model_max_length": 1_048_576,
            "eos_token_id": 163_586,
        },
        # `head_dim` is of nothing.
        ignored=frozenset({"head_dim", "qk_head_dim", "num_key_value_heads", "use_grouped_topk"}),
    ),
    "Lfm2ForCausalLM": _LFM2,
    "Lfm2MoeForCausalLM": replace(
        _LFM2,
        cut_ffn=False,
        moe=MoeFamily(
            ("num_experts",),
            score="sigmoid",
            choice_bias=True,
            choice_bias_key="use_expert_bias",
            grouped=True,
            dense_layers="first",
            first_dense_key="num_dense_layers",
        ),
        defaults={
            **_LFM2.defaults,
            "num_experts": 32,
            "num_experts_per_tok": 4,
            "num_dense_layers": 2,
            "use_expert_bias": True,
            "norm_topk_prob": True,
        },
    ),
    "Lfm2VlForConditionalGeneration": replace(
        _LFM2,
        section="text_config",
        ties_whole=True,
        vision=LFM2_VL_TOWER,
        ignored=_LFM2.ignored | _LFM2_VL_PROCESSOR,
    ),
    "Lfm3ForCausalLM": _LFM3,
    "Qwen3NextForCausalLM": replace(
        _HYBRID,
        moe=replace(_HYBRID_MOE, renormalize=None, dense_layers="steps"),
        defaults={**_HYBRID.defaults, "num_key_value_heads": 2, "num_experts_per_tok": 10, "norm_topk_prob": True},
    ),
    "Qwen3_5ForCausalLM": replace(_HYBRID, defaults={**_HYBRID.defaults, "num_key_value_heads": 4}),
    "Qwen3_5MoeForCausalLM": replace(
        _HYBRID,
        moe=_HYBRID_MOE,
        defaults={**_HYBRID.defaults, "num_key_value_heads": 2, "num_experts_per_tok": 8},
        ignored=_HYBRID.ignored | {"norm_topk_prob"},
    ),
}
# The same with a tower.
RECURRENT |= {
    name.replace("ForCausalLM", "ForConditionalGeneration"): replace(
        RECURRENT[name],
        section="text_config",
        vision=QWEN3_5_TOWER,
        ignored=RECURRENT[name].ignored | {"vision_start_token_id", "vision_end_token_id"},
    )
    for name in ("Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM")
}
