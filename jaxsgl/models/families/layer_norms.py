"""Families whose norms are LayerNorm, which takes the mean of a row away: most have MLPs next to attention, too."""

from __future__ import annotations

from dataclasses import replace

from jaxsgl.models.families.towers import AYA_TOWER, COHERE2_VISION_TOWER
from jaxsgl.models.family import Family

_COHERE = Family(
    norm_eps_key="layer_norm_eps",
    centred=True,
    parallel="shared norm",
    interleaved_rope=True,
    scales_logits=True,
    context_key="model_max_length",  # where it is longer than what the rope was made for
    defaults={
        "layer_norm_eps": 1e-5,
        "logit_scale": 0.0625,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
        "eos_token_id": 255_001,
    },
)

# Dense, and with experts.
COHERE2 = replace(
    _COHERE,
    windows="always",
    full_every=4,
    turned_layers="windows alone",
    defaults={**_COHERE.defaults, "sliding_window": 4096},
    # What its own code is whatever these say.
    ignored=frozenset(
        {
            "layer_switch",
            "order_of_interleaved_layers",
            "position_embedding_type",
            "rotary_pct",
            "use_embedding_sharing",
            "use_gated_activation",
            "use_parallel_block",
            "use_parallel_embedding",
        }
    ),
)

# What all the others have in common.
_WITH_BIAS = Family(norm_eps_key="layer_norm_eps", centred=True, norm_bias=True, defaults={"layer_norm_eps": 1e-5})

# What GPT-2 and those with its words have in common.
_GPT2 = replace(
    _WITH_BIAS,
    norm_eps_key="layer_norm_epsilon",
    gated=False,
    activation_key="activation_function",
    ffn_factor=4,
    qkv_bias=True,
    attention_out_bias=True,
    mlp_bias=True,
    turned_layers="none",
    rows_before_positions=0,
    keys={
        "hidden_size": "n_embd",
        "intermediate_size": "n_inner",
        "max_position_embeddings": "n_positions",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
    },
    required={"scale_attn_weights": True},
    defaults={
        "layer_norm_epsilon": 1e-5,
        "activation_function": "gelu_new",
        "tie_word_embeddings": True,
        "eos_token_id": 50_256,
    },
    ignored=frozenset(
        {
            "n_ctx",
            "reorder_and_upcast_attn",
            "summary_activation",
            "summary_first_dropout",
            "summary_proj_to_labels",
            "summary_type",
            "summary_use_proj",
        }
    ),
)

_WITH_TOWER = replace(
    COHERE2,
    section="text_config",
    ties_whole=True,
    vision=AYA_TOWER,
    ignored=COHERE2.ignored | {"image_token_id", "projection_dim", "vision_use_head"},
)

LAYER_NORMS: dict[str, Family] = {
    "CohereForCausalLM": replace(
        _COHERE,
        qk_norm="centred head",
        qk_norm_key="use_qk_norm",
        defaults={**_COHERE.defaults, "rope_theta": 500_000.0},
    ),
    "Cohere2ForCausalLM": COHERE2,
    # Its norms have no scales.
    "OlmoForCausalLM": Family(
        centred=True,
        limits_qkv=True,
        defaults={"rms_norm_eps": 1e-5, "eos_token_id": 50_279},
        required={"rms_norm_eps": 1e-5},
    ),
    "AyaVisionForConditionalGeneration": _WITH_TOWER,
    "Cohere2VisionForConditionalGeneration": replace(_WITH_TOWER, vision=COHERE2_VISION_TOWER),
    "Starcoder2ForCausalLM": replace(
        _WITH_BIAS,
        norm_eps_key="norm_epsilon",
        gated=False,
        qkv_bias_key="use_bias",
        attention_out_bias_key="use_bias",
        mlp_bias=None,
        mlp_bias_key="use_bias",
        windows="always",
        defaults={
            "norm_epsilon": 1e-5,
            "num_key_value_heads": 2,
            "max_position_embeddings": 4096,
            "hidden_act": "gelu_pytorch_tanh",
            "use_bias": True,
            "tie_word_embeddings": True,
            "eos_token_id": 50_256,
        },
        required={"norm_type": "layer_norm", "mlp_type": "default"},
        ignored=frozenset(
            {
                "attention_softmax_in_fp32",
                "embedding_dropout",
                "layer_norm_epsilon",
                "residual_dropout",
                "scale_attention_softmax_in_fp32",
                "scale_attn_weights",
            }
        ),
    ),
    "StableLmForCausalLM": replace(
        _WITH_BIAS,
        parallel="shared norm",
        parallel_key="use_parallel_residual",
        qk_norm="centred head",
        qk_norm_key="qk_layernorm",
        qkv_bias_key="use_qkv_bias",
        attention_out_bias=False,
        partial_rope=True,
        defaults={
            **_WITH_BIAS.defaults,
            "num_key_value_heads": 32,
            "partial_rotary_factor": 0.25,
            "eos_token_id": 0,
        },
        required={"rotary_scaling_factor": 1.0},
        ignored=frozenset({"use_norm_bias"}),  # they have one
    ),
    "NemotronForCausalLM": replace(
        _WITH_BIAS,
        norm_eps_key="norm_eps",
        norm_offset=1,
        mlp_bias=None,
        gated=False,
        partial_rope=True,
        defaults={
            "norm_eps": 1e-5,
            "max_position_embeddings": 4096,
            "hidden_act": "relu2",
            "partial_rotary_factor": 0.5,
            "eos_token_id": 3,
        },
    ),
    "Jais2ForCausalLM": replace(
        _WITH_BIAS,
        mlp_bias=None,
        gated=False,
        defaults={
            **_WITH_BIAS.defaults,
            "attention_bias": True,
            "mlp_bias": True,
            "max_position_embeddings": 8192,
            "hidden_act": "relu2",
            "eos_token_id": 150_024,
        },
    ),
    "PhiForCausalLM": replace(
        _WITH_BIAS,
        parallel="shared norm",
        gated=False,
        qkv_bias=True,
        attention_out_bias=True,
        mlp_bias=True,
        head_bias=True,
        partial_rope=True,
        defaults={
            **_WITH_BIAS.defaults,
            "hidden_act": "gelu_new",
            "partial_rotary_factor": 0.5,
            "eos_token_id": 2,
        },
    ),
    "GPTNeoXForCausalLM": replace(
        _WITH_BIAS,
        parallel="own norm",
        parallel_key="use_parallel_residual",
        gated=False,
        mlp_bias=True,
        partial_rope=True,
        keys={"partial_rotary_factor": "rotary_pct", "rope_theta": "rotary_emb_base"},
        defaults={
            **_WITH_BIAS.defaults,
            "attention_bias": True,
            "use_parallel_residual": True,
            "hidden_act": "gelu",
            "rotary_pct": 0.25,
            "eos_token_id": 2,
        },
    ),
    # With a rope.
    "FalconForCausalLM": replace(
        _WITH_BIAS,
        norm_eps_key="layer_norm_epsilon",
        parallel="own norm",
        grouped_key="new_decoder_architecture",
        parallel_norms_key="num_ln_in_parallel_attn",
        gated=False,
        activation_key="activation",
        ffn_factor=4,
        qkv_bias_key="bias",
        attention_out_bias_key="bias",
        mlp_bias=None,
        mlp_bias_key="bias",
        keys={"intermediate_size": "ffn_hidden_size", "num_key_value_heads": "num_kv_heads"},
        required={"alibi": False, "multi_query": True, "parallel_attn": True},
        defaults={
            "layer_norm_epsilon": 1e-5,
            "activation": "gelu",
            "max_position_embeddings": 2048,
            "tie_word_embeddings": True,
            "eos_token_id": 11,
        },
        ignored=frozenset({"apply_residual_connection_post_layernorm", "ff_factor", "rotary"}),
    ),
    "GPT2LMHeadModel": _GPT2,
    "GPTBigCodeForCausalLM": replace(
        _GPT2,
        required={**_GPT2.required, "multi_query": True},
        defaults={**_GPT2.defaults, "num_key_value_heads": 1, "activation_function": "gelu_pytorch_tanh"},
        ignored=_GPT2.ignored
        | {
            "attention_softmax_in_fp32",
            "pad_key_length",
            "scale_attention_softmax_in_fp32",
            "validate_runner_input",
        },
    ),
    "GPTJForCausalLM": replace(
        _GPT2,
        parallel="shared norm",
        qkv_bias=False,
        attention_out_bias=False,
        head_bias=True,
        turned_layers="all",
        interleaved_rope=True,
        partial_rope=True,
        rows_before_positions=None,
        defaults={**_GPT2.defaults, "rotary_dim": 64, "tie_word_embeddings": False},
        ignored=_GPT2.ignored | {"rotary"},
    ),
    "OPTForCausalLM": replace(
        _WITH_BIAS,
        gated=False,
        activation_key="activation_function",
        qkv_bias_key="enable_bias",
        attention_out_bias_key="enable_bias",
        mlp_bias=None,
        mlp_bias_key="enable_bias",
        turned_layers="none",
        rows_before_positions=2,
        keys={"intermediate_size": "ffn_dim"},
        required={
            "do_layer_norm_before": True,
            "_remove_final_layer_norm": False,
            "layer_norm_elementwise_affine": True,
            "word_embed_proj_dim": "hidden_size",
        },
        defaults={
            **_WITH_BIAS.defaults,
            "activation_function": "relu",
            "enable_bias": True,
            "tie_word_embeddings": True,
            "eos_token_id": 2,
        },
        ignored=frozenset({"activation_dropout", "dropout", "init_std"}),
    ),
}
