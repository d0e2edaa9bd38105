"""The model families that are served: what an architecture's name implies, as data.

Owns which family has which differences of `family`. Never knows tensors' names (`weights/names.py`), nor how a
difference is computed. Read by `arch`, and for GGUF by `weights/gguf_config.py`. docs/models.md says how to add one.
"""

from __future__ import annotations

from dataclasses import replace

from jaxsgl.models.family import Family, MoeFamily

_MISTRAL = Family(
    qkv_bias=False,
    attention_out_bias=False,
    windows="always",
    defaults={"sliding_window": 4096, "num_key_value_heads": 8, "eos_token_id": 2},
)

# What ERNIE 4.5, dense and with experts, has in common.
_ERNIE = Family(
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
_GRANITE = Family(mlp_bias=None, multipliers=True, defaults={"eos_token_id": 2})
_GRANITE_MOE = MoeFamily(
    ("num_local_experts",),
    ffn_key="intermediate_size",
    score="softmax_of_chosen",
    renormalize=False,
    shared_ffn_key="shared_intermediate_size",
)
_GRANITE_MOE_DEFAULTS = {"num_local_experts": 8, "num_experts_per_tok": 2, "eos_token_id": 2}

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

# What DeepSeek's models with a latent and others of this form have in common.
_DEEPSEEK_MOE = MoeFamily(
    ("n_routed_experts", "num_local_experts"),
    score="sigmoid",
    choice_bias=True,
    grouped=True,
    shared_key="n_shared_experts",
    dense_layers="first",
)
_DEEPSEEK = Family(
    qkv_bias=False,
    attention_out_bias=False,
    latent=True,
    interleaved_rope=True,
    moe=_DEEPSEEK_MOE,
    next_layers=True,
    defaults={
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
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

# Keys of models that see images, beside the object that describes the decoder.
_BESIDE_TEXT = frozenset({"vision_config", "image_token_index", "image_token_id"})

# What Gemma 2 and 3 have in common.
_GEMMA = Family(
    norms="sandwich",
    norm_offset=1,
    scales_embedding=True,
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

_GEMMA3 = replace(
    _GEMMA,
    qk_norm="head",
    full_every=6,
    sliding_theta="rope_local_base_freq",
    defaults={**_GEMMA.defaults, "rope_theta": 1_000_000.0, "rope_local_base_freq": 10_000.0},
)

_GEMMA4 = Family(
    norms="sandwich",
    qk_norm="head",
    qkv_bias=False,
    attention_out_bias=False,
    scales_embedding=True,
    activation_key="hidden_activation",
    windows="always",
    full_every=6,
    sliding_theta=10_000.0,
    caps_logits=True,
    attention_scale=1.0,
    normalizes_values=True,
    layer_factors=True,
    own_parts=True,
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

# What the dense Qwen3-VL and the mixture of experts have in common.
_QWEN3_VL = Family(
    qk_norm="head",
    section="text_config",
    vision=True,
    defaults={
        "head_dim": 128,
        "rope_theta": 500_000.0,
        "max_position_embeddings": 128_000,
        "eos_token_id": 151_645,
    },
    ignored=frozenset({"vision_start_token_id", "vision_end_token_id"}),
)

# What Qwen3-Next, Qwen3.5 and its mixtures of experts have in common.
_HYBRID = Family(
    norm_offset=1,
    qk_norm="head",
    partial_rope=True,
    recurrence="delta-net",
    output_gate="number",
    defaults={"head_dim": 256, "partial_rotary_factor": 0.25},
    # Positions of text are the same on all three axes. Draft heads are left out. Gates and states are always these.
    ignored=frozenset(
        {
            "mrope_section",
            "mrope_interleaved",
            "mtp_num_hidden_layers",
            "mtp_use_dedicated_embeddings",
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
_HYBRID_TEXT = frozenset(
    {"vision_config", "image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"}
)

FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(mlp_bias=None, defaults={"eos_token_id": 2}),
    "Qwen2ForCausalLM": Family(qkv_bias=True, attention_out_bias=False, windows="flag"),
    "Qwen3ForCausalLM": Family(qk_norm="head", windows="flag", defaults={"head_dim": 128}),
    "SeedOssForCausalLM": Family(
        mlp_bias=None,
        attention_out_bias_key="attention_out_bias",
        defaults={"num_key_value_heads": 8, "head_dim": 128, "attention_bias": True, "eos_token_id": 2},
        ignored=frozenset({"residual_dropout"}),
    ),
    "HunYuanDenseV1ForCausalLM": Family(
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
    ),
    "Ernie4_5ForCausalLM": _ERNIE,
    "GraniteForCausalLM": _GRANITE,
    "GraniteMoeForCausalLM": replace(
        _GRANITE, mlp_bias=False, moe=replace(_GRANITE_MOE, shared_ffn_key=None), defaults=_GRANITE_MOE_DEFAULTS
    ),
    "GraniteMoeSharedForCausalLM": replace(
        _GRANITE, mlp_bias=False, moe=_GRANITE_MOE, defaults=_GRANITE_MOE_DEFAULTS | {"shared_intermediate_size": 0}
    ),
    "GraniteMoeHybridForCausalLM": replace(
        _GRANITE,
        mlp_bias=False,
        moe=_GRANITE_MOE,
        recurrence="mamba",
        turned_layers="type",
        defaults=_GRANITE_MOE_DEFAULTS | {"shared_intermediate_size": 1024},
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
                "time_step_floor",
                "time_step_max",
                "time_step_min",
                "use_mamba_kernels",
            }
        ),
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
    "Lfm3ForCausalLM": _LFM3,
    "ArceeForCausalLM": Family(
        mlp_bias=None,
        gated=False,
        defaults={"rms_norm_eps": 1e-5, "hidden_act": "relu2", "eos_token_id": 128_001},
    ),
    "MistralForCausalLM": _MISTRAL,
    # Its text only.
    "Mistral3ForConditionalGeneration": replace(
        _MISTRAL,
        section="text_config",
        ties_whole=True,
        ignored=_BESIDE_TEXT
        | {"multimodal_projector_bias", "projector_hidden_act", "spatial_merge_size", "vision_feature_layer"},
    ),
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
    "GlmForCausalLM": _GLM,
    "Glm4ForCausalLM": replace(_GLM, norms="sandwich"),
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
    "GemmaForCausalLM": Family(
        norm_offset=1,
        scales_embedding=True,
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
    "Gemma2ForCausalLM": replace(
        _GEMMA,
        full_every=2,
        defaults={**_GEMMA.defaults, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    ),
    "Gemma3ForCausalLM": _GEMMA3,
    # Its text only.
    "Gemma3ForConditionalGeneration": replace(
        _GEMMA3,
        section="text_config",
        ties_whole=True,
        defaults={
            **_GEMMA3.defaults,
            "vocab_size": 262_208,
            "num_attention_heads": 8,
            "max_position_embeddings": 131_072,
        },
        ignored=_GEMMA3.ignored | _BESIDE_TEXT | {"mm_tokens_per_image", "boi_token_index", "eoi_token_index"},
    ),
    "Gemma4ForCausalLM": _GEMMA4,
    # Its text only.
    "Gemma4ForConditionalGeneration": replace(
        _GEMMA4,
        section="text_config",
        ties_whole=True,
        ignored=_GEMMA4.ignored
        | _BESIDE_TEXT
        | {
            "audio_config",
            "audio_token_id",
            "boa_token_id",
            "boi_token_id",
            "eoa_token_id",
            "eoa_token_index",
            "eoi_token_id",
            "video_token_id",
            "vision_soft_tokens_per_image",
        },
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
    "Qwen3VLForConditionalGeneration": _QWEN3_VL,
    "Qwen3VLMoeForConditionalGeneration": replace(
        _QWEN3_VL,
        moe=MoeFamily(("num_experts", "num_local_experts"), renormalize=True, dense_layers="steps"),
        defaults={**_QWEN3_VL.defaults, "num_key_value_heads": 16, "num_experts_per_tok": 4},
        ignored=_QWEN3_VL.ignored | {"norm_topk_prob"},
    ),
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
    "OlmoeForCausalLM": Family(
        qk_norm="all",
        moe=MoeFamily(("num_experts", "num_local_experts"), ffn_key="intermediate_size"),
        defaults={"num_experts": 64, "num_experts_per_tok": 8, "rms_norm_eps": 1e-5, "eos_token_id": 50279},
    ),
    "Ernie4_5_MoeForCausalLM": replace(
        _ERNIE,
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
            **_ERNIE.defaults,
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
    "Glm4MoeForCausalLM": Family(
        qk_norm="head",
        qk_norm_key="use_qk_norm",
        attention_out_bias=False,
        partial_rope=True,
        moe=MoeFamily(
            ("n_routed_experts", "num_local_experts"),
            score="sigmoid",
            choice_bias=True,
            grouped=True,
            shared_key="n_shared_experts",
            dense_layers="first",
        ),
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
        next_layers=True,
        ignored=frozenset({"num_mtp_layers"}),
    ),
    "DeepseekV3ForCausalLM": _DEEPSEEK,
    "DeepseekV2ForCausalLM": replace(
        _DEEPSEEK,
        moe=replace(_DEEPSEEK_MOE, score="softmax", choice_bias=False, renormalize=False),
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
# Their text only.
FAMILIES |= {
    name.replace("ForCausalLM", "ForConditionalGeneration"): replace(
        FAMILIES[name], section="text_config", ignored=FAMILIES[name].ignored | _HYBRID_TEXT
    )
    for name in ("Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM")
}
