"""Families by the config.json of a published folder, but for the number of layers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jaxsgl.config.engine import EngineConfig
from jaxsgl.engine.start.model_flags import check_stages
from jaxsgl.errors import CheckpointError, ConfigError
from jaxsgl.models import ModelArch, arch_from_folder
from jaxsgl.models.layer_spec import ChannelDeltaNet, DenseMlp, KvHeads, Latent, MoeMlp
from jaxsgl.models.towers.arch import Norms

HY3: dict[str, Any] = {
    "architectures": ["HYV3ForCausalLM"], "model_type": "hy_v3", "hidden_size": 4096, "intermediate_size": 13312,
    "num_hidden_layers": 3, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128,
    "max_position_embeddings": 262144, "vocab_size": 120832, "num_experts": 192, "num_experts_per_tok": 8,
    "num_shared_experts": 1, "first_k_dense_replace": 1, "moe_intermediate_size": 1536, "expert_hidden_dim": 1536,
    "moe_router_use_sigmoid": True, "moe_router_enable_expert_bias": True, "router_scaling_factor": 2.826,
    "route_norm": True, "num_nextn_predict_layers": 1, "use_grouped_mm": True, "qk_norm": True,
    "enable_attention_fp32_softmax": True, "enable_moe_fp32_combine": False, "enable_lm_head_fp32": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 11158840.0}, "rms_norm_eps": 1e-05,
    "tie_word_embeddings": False,
}  # fmt: skip
KIMI_LINEAR: dict[str, Any] = {
    "architectures": ["KimiLinearForCausalLM"], "model_type": "kimi_linear", "hidden_size": 2304, "head_dim": 72,
    "intermediate_size": 9216, "num_hidden_layers": 5, "num_attention_heads": 32, "num_key_value_heads": 32,
    "first_k_dense_replace": 1, "hidden_act": "silu", "kv_lora_rank": 512, "q_lora_rank": None, "mla_use_nope": True,
    "linear_attn_config": {
        "full_attn_layers": [4], "kda_layers": [1, 2, 3, 5], "head_dim": 128, "num_heads": 32,
        "short_conv_kernel_size": 4,
    },
    "model_max_length": 1048576, "moe_intermediate_size": 1024, "moe_layer_freq": 1, "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid", "num_expert_group": 1, "num_experts": 256, "num_experts_per_token": 8,
    "num_nextn_predict_layers": 0, "num_shared_experts": 1, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 10000.0, "routed_scaling_factor": 2.446,
    "tie_word_embeddings": False, "topk_group": 1, "use_grouped_topk": True, "v_head_dim": 128, "vocab_size": 163840,
    "eos_token_id": 163586,
}  # fmt: skip
LONGCAT: dict[str, Any] = {
    "architectures": ["LongcatFlashForCausalLM"], "model_type": "longcat_flash", "attention_bias": False,
    "attention_method": "MLA", "bos_token_id": 1, "eos_token_id": 2, "expert_ffn_hidden_size": 2048,
    "ffn_hidden_size": 12288, "hidden_size": 6144, "kv_lora_rank": 512, "max_position_embeddings": 131072,
    "mla_scale_kv_lora": True, "mla_scale_q_lora": True, "moe_topk": 12, "n_routed_experts": 512,
    "num_attention_heads": 64, "num_layers": 2, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-05, "rope_theta": 10000000.0, "routed_scaling_factor": 6.0, "router_bias": False,
    "torch_dtype": "bfloat16", "use_cache": True, "v_head_dim": 128, "vocab_size": 131072, "zero_expert_num": 256,
    "zero_expert_type": "identity",
}  # fmt: skip
FALCON: dict[str, Any] = {
    "architectures": ["FalconForCausalLM"], "model_type": "falcon", "alibi": False, "bias": False, "hidden_size": 4544,
    "apply_residual_connection_post_layernorm": False, "attention_dropout": 0.0, "hidden_dropout": 0.0,
    "initializer_range": 0.02, "layer_norm_epsilon": 1e-05, "multi_query": True, "new_decoder_architecture": False,
    "num_attention_heads": 71, "num_hidden_layers": 3, "parallel_attn": True, "vocab_size": 65024, "bos_token_id": 11,
    "eos_token_id": 11, "torch_dtype": "bfloat16", "use_cache": True,
}  # fmt: skip
# What it changes there, but for sizes.
FALCON_40B: dict[str, Any] = {"new_decoder_architecture": True, "num_attention_heads": 64, "num_kv_heads": 8}
PHI_MOE: dict[str, Any] = {
    "architectures": ["PhimoeForCausalLM"], "model_type": "phimoe", "attention_bias": True, "attention_dropout": 0.0,
    "hidden_act": "silu", "hidden_dropout": 0.0, "hidden_size": 4096, "input_jitter_noise": 0.01,
    "intermediate_size": 6400, "lm_head_bias": True, "max_position_embeddings": 131072, "num_attention_heads": 32,
    "num_experts_per_tok": 2, "num_hidden_layers": 3, "num_key_value_heads": 8, "num_local_experts": 16,
    "original_max_position_embeddings": 4096, "output_router_logits": False, "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "long_factor": [2.0] * 64, "long_mscale": 1.243163121016122, "original_max_position_embeddings": 4096,
        "short_factor": [1.0] * 64, "short_mscale": 1.243163121016122, "type": "longrope",
    },
    "rope_theta": 10000.0, "router_aux_loss_coef": 0.0, "router_jitter_noise": 0.01, "sliding_window": 131072,
    "tie_word_embeddings": False, "vocab_size": 32064,
}  # fmt: skip
GEMMA_3N_E2B: dict[str, Any] = {
    "architectures": ["Gemma3nForConditionalGeneration"], "model_type": "gemma3n", "audio_soft_tokens_per_image": 188,
    "audio_config": {"hidden_size": 1536, "model_type": "gemma3n_audio"}, "audio_token_id": 262273,
    "boa_token_id": 256000, "boi_token_id": 255999, "eoa_token_id": 262272, "eoi_token_id": 262144,
    "eos_token_id": [1, 106], "image_token_id": 262145, "initializer_range": 0.02, "torch_dtype": "bfloat16",
    "vision_config": {"architecture": "mobilenetv5_300m_enc", "hidden_size": 2048, "model_type": "gemma3n_vision"},
    "vision_soft_tokens_per_image": 256,
    "text_config": {
        "activation_sparsity_pattern": [0.95] * 4 + [0.0] * 6, "altup_active_idx": 0, "altup_coef_clip": 120.0,
        "altup_correct_scale": True, "altup_lr_multiplier": 1.0, "altup_num_inputs": 4, "attention_bias": False,
        "attention_dropout": 0.0, "final_logit_softcapping": 30.0, "head_dim": 256, "hidden_size": 2048,
        "hidden_activation": "gelu_pytorch_tanh", "hidden_size_per_layer_input": 256, "initializer_range": 0.02,
        "intermediate_size": [8192] * 10, "laurel_rank": 64, "max_position_embeddings": 32768,
        "layer_types": [*["sliding_attention"] * 4, "full_attention"] * 2, "model_type": "gemma3n_text",
        "num_attention_heads": 8, "num_hidden_layers": 10, "num_key_value_heads": 2, "num_kv_shared_layers": 5,
        "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06, "rope_local_base_freq": 10000.0, "rope_scaling": None,
        "rope_theta": 1000000.0, "sliding_window": 512, "torch_dtype": "bfloat16", "use_cache": True,
        "vocab_size": 262400, "vocab_size_per_layer_input": 262144,
    },
}  # fmt: skip
MIMO_V2_FLASH: dict[str, Any] = {
    "architectures": ["MiMoV2FlashForCausalLM"], "model_type": "mimo_v2_flash", "add_full_attention_sink_bias": False,
    "add_swa_attention_sink_bias": True, "attention_bias": False, "attention_chunk_size": 128, "head_dim": 192,
    "attention_dropout": 0.0, "attention_value_scale": 0.707, "hidden_act": "silu", "hidden_size": 4096,
    "hybrid_block_size": None, "hybrid_layer_pattern": [0, 1, 1, 1, 1, 0, 1], "initializer_range": 0.02,
    "intermediate_size": 16384, "layernorm_epsilon": 1e-05, "max_position_embeddings": 262144,
    "moe_intermediate_size": 2048, "moe_layer_freq": [0, 1, 1, 1, 1, 1, 1], "n_group": 1, "n_routed_experts": 256,
    "n_shared_experts": None, "norm_topk_prob": True, "num_attention_heads": 64, "num_experts_per_tok": 8,
    "num_hidden_layers": 7, "num_key_value_heads": 4, "partial_rotary_factor": 0.334, "rope_theta": 5000000,
    "routed_scaling_factor": None, "scoring_func": "sigmoid", "sliding_window": 128, "sliding_window_size": 128,
    "swa_head_dim": 192, "swa_num_attention_heads": 64, "swa_num_key_value_heads": 8, "swa_rope_theta": 10000,
    "swa_v_head_dim": 128, "tie_word_embeddings": False, "topk_group": 1, "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16", "use_cache": True, "v_head_dim": 128, "vocab_size": 152576,
    "quantization_config": {
        "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128],
        "ignored_layers": [f"model.layers.{layer}.self_attn.o_proj" for layer in range(7)],
    },
}  # fmt: skip
_INT4: dict[str, Any] = {
    "config_groups": {
        "group_0": {
            "input_activations": None, "output_activations": None, "targets": ["Linear"],
            "weights": {
                "actorder": None, "block_structure": None, "dynamic": False, "group_size": 32, "num_bits": 4,
                "observer": "minmax", "observer_kwargs": {}, "strategy": "group", "symmetric": True, "type": "int",
            },
        }
    },
    "format": "pack-quantized", "kv_cache_scheme": None, "quant_method": "compressed-tensors",
    "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*"],
    "quantization_status": "compressed",
}  # fmt: skip
KIMI_K25: dict[str, Any] = {
    "architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25", "dtype": "bfloat16",
    "auto_map": {"AutoConfig": "configuration_kimi_k25.KimiK25Config"}, "bos_token_id": 163584,
    "eos_token_id": 163585, "ignore_index": -100, "media_placeholder_token_id": 163605, "pad_token_id": 163839,
    "tie_word_embeddings": False, "use_unified_vision_chunk": True,
    "video_placeholder": "<|kimi_k25_video_placeholder|>",
    "text_config": {
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "kimi_k2", "hidden_size": 7168, "vocab_size": 163840,
        "intermediate_size": 18432, "num_hidden_layers": 3, "num_attention_heads": 64, "num_key_value_heads": 64,
        "max_position_embeddings": 262144, "aux_loss_alpha": 0.001, "ep_size": 1, "first_k_dense_replace": 1,
        "kv_lora_rank": 512, "moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_group": 1, "n_routed_experts": 384,
        "n_shared_experts": 1, "norm_topk_prob": True, "num_experts_per_tok": 8, "num_nextn_predict_layers": 0,
        "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "topk_group": 1,
        "rope_scaling": {
            "beta_fast": 32.0, "beta_slow": 1.0, "factor": 64.0, "mscale": 1.0, "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096, "type": "yarn",
        },
        "rope_theta": 50000.0, "routed_scaling_factor": 2.827, "scoring_func": "sigmoid", "seq_aux": True,
        "topk_method": "noaux_tc", "rms_norm_eps": 1e-05, "tie_word_embeddings": False,
        "quantization_config": _INT4,
    },
    "vision_config": {"patch_size": 14, "vt_hidden_size": 1152, "vt_num_hidden_layers": 27},
}  # fmt: skip
APERTUS: dict[str, Any] = {
    "architectures": ["ApertusForCausalLM"], "model_type": "apertus", "attention_bias": False, "hidden_act": "xielu",
    "hidden_size": 4096, "intermediate_size": 21504, "max_position_embeddings": 65536, "mlp_bias": False,
    "num_attention_heads": 32, "num_hidden_layers": 3, "num_key_value_heads": 8, "post_norm": False, "qk_norm": True,
    "rms_norm_eps": 1e-05, "rope_theta": 12000000, "tie_word_embeddings": False, "vocab_size": 131072,
    "rope_scaling": {
        "factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192,
        "rope_type": "llama3", "type": "llama3",
    },
}  # fmt: skip
MINITRON: dict[str, Any] = {
    "architectures": ["NemotronForCausalLM"], "model_type": "nemotron", "attention_bias": False, "head_dim": 128,
    "hidden_act": "relu2", "hidden_size": 3072, "intermediate_size": 9216, "max_position_embeddings": 4096,
    "mlp_bias": False, "norm_eps": 1e-05, "num_attention_heads": 24, "num_hidden_layers": 3, "num_key_value_heads": 8,
    "partial_rotary_factor": 0.5, "rope_theta": 10000, "tie_word_embeddings": False, "vocab_size": 256000,
}  # fmt: skip
MINICPM4: dict[str, Any] = {
    "architectures": ["MiniCPMForCausalLM"], "model_type": "minicpm", "hidden_act": "silu", "hidden_size": 4096,
    "intermediate_size": 16384, "max_position_embeddings": 32768, "num_attention_heads": 32, "num_hidden_layers": 4,
    "num_key_value_heads": 2, "rms_norm_eps": 1e-06, "vocab_size": 73448, "scale_emb": 12, "dim_model_base": 256,
    "scale_depth": 1.4, "mup_denominator": 32, "rope_theta": 10000.0, "tie_word_embeddings": False,
}  # fmt: skip


GLM_OCR: dict[str, Any] = {
    "architectures": ["GlmOcrForConditionalGeneration"], "model_type": "glm_ocr", "image_start_token_id": 59256,
    "image_end_token_id": 59257, "video_start_token_id": 59258, "video_end_token_id": 59259, "image_token_id": 59280,
    "video_token_id": 59281, "tie_word_embeddings": False,
    "text_config": {
        "model_type": "glm_ocr_text", "pad_token_id": 59246, "vocab_size": 59392, "eos_token_id": [59246, 59253],
        "head_dim": 128, "attention_bias": False, "hidden_act": "silu", "hidden_size": 1536, "intermediate_size": 4608,
        "max_position_embeddings": 131072, "num_attention_heads": 16, "num_hidden_layers": 3,
        "num_nextn_predict_layers": 1, "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "tie_word_embeddings": False,
        "rope_parameters": {
            "rope_type": "default", "mrope_section": [16, 24, 24], "partial_rotary_factor": 1.0, "rope_theta": 10000,
        },
    },
    "vision_config": {
        "model_type": "glm_ocr_vision", "hidden_size": 1024, "depth": 24, "num_heads": 16, "attention_bias": True,
        "intermediate_size": 4096, "hidden_act": "silu", "image_size": 336, "patch_size": 14, "out_hidden_size": 1536,
        "rms_norm_eps": 1e-05, "spatial_merge_size": 2, "temporal_patch_size": 2,
    },
}  # fmt: skip


NORTH: dict[str, Any] = {
    "architectures": ["Cohere2MoeForCausalLM"], "model_type": "cohere2_moe", "attention_bias": False,
    "expert_selection_fn": "sigmoid", "first_k_dense_replace": 1, "head_dim": 128, "hidden_act": "silu",
    "hidden_size": 2048, "intermediate_size": 768, "layer_norm_eps": 1e-05, "logit_scale": 1.0,
    "max_position_embeddings": 500000, "norm_topk_prob": False, "num_attention_heads": 32, "num_experts": 128,
    "num_experts_per_tok": 8, "num_hidden_layers": 6, "num_key_value_heads": 4, "num_shared_experts": 0,
    "prefix_dense_intermediate_size": 3072, "prefix_dense_sliding_window_pattern": 1, "rms_norm_eps": 1e-05,
    "rope_theta": 1000000, "shared_expert_combination_strategy": "average", "sliding_window": 4096,
    "sliding_window_pattern": 4, "tie_word_embeddings": True, "use_parallel_block": True, "vocab_size": 262144,
}  # fmt: skip


_OF_GPT2: dict[str, Any] = {
    "attn_pdrop": 0.1, "embd_pdrop": 0.1, "resid_pdrop": 0.1, "initializer_range": 0.02, "layer_norm_epsilon": 1e-05,
    "scale_attn_weights": True, "summary_activation": None, "summary_first_dropout": 0.1, "use_cache": True,
    "summary_proj_to_labels": True, "summary_type": "cls_index", "summary_use_proj": True, "n_layer": 3,
}  # fmt: skip
STARCODER: dict[str, Any] = {
    **_OF_GPT2, "architectures": ["GPTBigCodeForCausalLM"], "model_type": "gpt_bigcode", "activation_function": "gelu",
    "attention_softmax_in_fp32": True, "eos_token_id": 0, "inference_runner": 0, "max_batch_size": None,
    "max_sequence_length": None, "multi_query": True, "n_embd": 6144, "n_head": 48, "n_inner": 24576,
    "n_positions": 8192, "pad_key_length": True, "pre_allocate_kv_cache": False, "validate_runner_input": True,
    "scale_attention_softmax_in_fp32": True, "vocab_size": 49152,
}  # fmt: skip
GPT_J: dict[str, Any] = {
    **_OF_GPT2, "architectures": ["GPTJForCausalLM"], "model_type": "gptj", "activation_function": "gelu_new",
    "gradient_checkpointing": False, "n_embd": 4096, "n_head": 16, "n_inner": None, "n_positions": 2048,
    "rotary": True, "rotary_dim": 64, "tie_word_embeddings": False, "tokenizer_class": "GPT2Tokenizer",
    "vocab_size": 50400,
}  # fmt: skip


def read(folder: Path, values: dict[str, Any]) -> ModelArch:
    (folder / "config.json").write_text(json.dumps(values))
    return arch_from_folder(folder)


def test_hy3_is_understood(tmp_path: Path) -> None:
    arch = read(tmp_path, HY3)
    dense, mixture, _ = (layer.mlp for layer in arch.layers)
    assert not isinstance(dense, MoeMlp) and isinstance(mixture, MoeMlp)
    assert (mixture.num_experts, mixture.ffn_size, mixture.shared_ffn_size) == (192, 1536, 1536)
    router = mixture.router
    assert (router.top_k, router.score, router.renormalize, router.scale) == (8, "sigmoid", True, 2.826)
    assert router.choice_bias and arch.qk_norm == "head" and arch.next_layer is None


def test_gemma_3n_is_understood(tmp_path: Path) -> None:
    arch = read(tmp_path, GEMMA_3N_E2B)
    assert (arch.num_streams, arch.laurel_rank, arch.embedding_size, arch.layer_vocab_size) == (4, 64, 256, 262144)
    assert [layer.keys_from for layer in arch.layers] == [None] * 5 + [3] * 4 + [4]
    assert [layer.mlp for layer in arch.layers] == [DenseMlp(8192, 0.95)] * 4 + [DenseMlp(8192)] * 6
    assert [arch.ropes[layer.rope or 0].theta for layer in arch.layers] == ([1e4] * 4 + [1e6]) * 2
    assert (arch.attention_scale, arch.logits_cap, arch.tower, arch.tie_embeddings) == (1.0, 30.0, None, True)
    text = GEMMA_3N_E2B["text_config"]
    told = [DenseMlp(8192, 0.95)] * 10 + [DenseMlp(8192)] * 2
    many = {
        "num_hidden_layers": 12,
        "intermediate_size": 8192,
        "layer_types": None,
        "activation_sparsity_pattern": None,
    }
    assert [layer.mlp for layer in read(tmp_path, {**GEMMA_3N_E2B, "text_config": text | many}).layers] == told
    for key, value in (("altup_active_idx", 1), ("activation_sparsity_pattern", [1.0] * 10)):
        with pytest.raises(CheckpointError, match=key):
            read(tmp_path, {**GEMMA_3N_E2B, "text_config": text | {key: value}})


def test_mimo_v2_flash_is_understood(tmp_path: Path) -> None:
    arch = read(tmp_path, MIMO_V2_FLASH)
    assert [layer.window for layer in arch.layers] == [None, *[129] * 4, None, 129]
    assert [layer.heads for layer in arch.layers] == [
        None if layer.window is None else KvHeads(8, 192) for layer in arch.layers
    ]
    assert [layer.has_sinks for layer in arch.layers] == [layer.window is not None for layer in arch.layers]
    assert [isinstance(layer.mlp, MoeMlp) for layer in arch.layers] == [False] + [True] * 6
    assert [(rope.theta, rope.rotary_dim) for rope in arch.ropes] == [(5e6, 64), (1e4, 64)]
    assert [layer.rope for layer in arch.layers] == [0, 1, 1, 1, 1, 0, 1]
    assert (arch.num_kv_heads, arch.head_dim, arch.value_dim, arch.attention_out_factor) == (4, 192, 128, 0.707)
    assert {layer.unquantized for layer in arch.layers} == {frozenset({"o"})}
    assert arch.layers == read(tmp_path, {**MIMO_V2_FLASH, "hybrid_layer_pattern": None}).layers
    for key, value in (("v_head_dim", 256), ("swa_head_dim", 128), ("swa_num_key_value_heads", 5)):
        changed = {**MIMO_V2_FLASH, key: value} | ({"swa_v_head_dim": 256} if key == "v_head_dim" else {})
        with pytest.raises(CheckpointError, match=f"{key}|5 kv heads"):
            read(tmp_path, changed)


def test_the_text_of_kimi_k25_is_understood_wherever_it_says_how_it_is_quantized(tmp_path: Path) -> None:
    arch = read(tmp_path, KIMI_K25)
    assert arch.tower is None and not arch.tie_embeddings and arch.eos_token_ids == (163585,)
    assert arch.latent == Latent(q_rank=1536, kv_rank=512, rotated=64, unrotated=128, value=128)
    assert arch.mixture is not None and arch.mixture.num_experts == 384
    assert arch.weight_format is not None
    assert [layer.matrices - layer.unquantized for layer in arch.layers] == [set(), {"experts"}, {"experts"}]
    text = {key: value for key, value in KIMI_K25["text_config"].items() if key != "quantization_config"}
    assert read(tmp_path, {**KIMI_K25, "text_config": text, "quantization_config": _INT4}) == arch


def test_kimi_linear_lists_its_layers_from_1_on(tmp_path: Path) -> None:
    arch = read(tmp_path, KIMI_LINEAR)
    assert (arch.attention_layers, arch.recurrent_layers) == ((3,), (0, 1, 2, 4))
    assert arch.latent == Latent(q_rank=None, kv_rank=512, rotated=64, unrotated=128, value=128)
    assert arch.recurrent_net == ChannelDeltaNet(32, 32, 128, 128, 4, rank=128)
    assert {layer.rope for layer in arch.layers} == {None} and arch.max_context == 1_048_576
    dense, *mixtures = (layer.mlp for layer in arch.layers)
    assert not isinstance(dense, MoeMlp) and len(set(mixtures)) == 1 and arch.mixture is not None
    router = arch.mixture.router
    assert (router.top_k, router.score, router.renormalize, router.scale) == (8, "sigmoid", True, 2.446)
    for changes, named in (
        ({"mla_use_nope": False}, "mla_use_nope is false"),
        ({"linear_attn_config": {**KIMI_LINEAR["linear_attn_config"], "kda_layers": [1, 2, 3]}}, "layer_types is"),
        ({"linear_attn_config": {**KIMI_LINEAR["linear_attn_config"], "gate_lower_bound": -5.0}}, "gate_lower_bound"),
    ):
        with pytest.raises(CheckpointError, match=named):
            read(tmp_path, {**KIMI_LINEAR, **changes})


def test_a_layer_of_longcat_is_two_of_which_the_first_has_experts(tmp_path: Path) -> None:
    arch = read(tmp_path, LONGCAT)
    assert arch.num_layers == 4 and arch.ffn_size == 12_288 and arch.ropes[0].theta == 1e7
    assert [layer.shortcut for layer in arch.layers] == [layer.experts is not None for layer in arch.layers]
    assert [layer.shortcut for layer in arch.layers] == [True, False, True, False]
    assert arch.latent is not None and arch.latent.factor == 12**0.5
    assert arch.attention_scale == pytest.approx(2 / 192**0.5)  # queries are twice as large
    mixture = arch.mixture
    assert mixture is not None and (mixture.num_experts, mixture.num_choices, mixture.ffn_size) == (512, 768, 2048)
    router = mixture.router
    assert (router.top_k, router.score, router.renormalize, router.scale) == (12, "softmax", False, 6.0)
    assert router.choice_bias and not router.bias
    for changes, named in (
        ({"zero_expert_type": "copy"}, "zero_expert_type is"),
        ({"router_bias": True}, "router_bias is true"),
        ({"moe_topk": 769}, "769 of 768 experts"),
    ):
        with pytest.raises(CheckpointError, match=named):
            read(tmp_path, {**LONGCAT, **changes})
    with pytest.raises(ConfigError, match="--pp-size does not work for now with experts of Longcat"):
        check_stages(EngineConfig(model="", pp_size=2), arch)


def test_coheres_mixtures_are_understood_in_all_their_forms(tmp_path: Path) -> None:
    arch = read(tmp_path, NORTH)
    assert [layer.mlp.ffn_size for layer in arch.layers if layer.mlp is not None] == [3072, *[768] * 5]
    assert [layer.window for layer in arch.layers] == [None, 4096, 4096, 4096, None, 4096]
    assert [layer.rope for layer in arch.layers] == [0, 0, 0, 0, None, 0] and not arch.centred
    assert arch.mixture is not None and arch.logits_divisor is None
    router = arch.mixture.router
    assert (router.score, router.renormalize, router.scale, router.top_k) == ("sigmoid_of_chosen", False, 1.0, 8)
    changes = {"rms_norm_eps": None, "num_shared_experts": 4, "expert_selection_fn": "softmax"}
    shared = read(tmp_path, {**NORTH, **changes})
    assert shared.centred and shared.mixture is not None and shared.mixture.router.score == "softmax_of_chosen"
    assert (shared.mixture.shared_ffn_size, shared.mixture.shared_scale, shared.mixture.router.scale) == (
        3072,
        0.5,
        0.5,
    )
    added = read(tmp_path, {**NORTH, **changes, "shared_expert_combination_strategy": "sum"}).mixture
    assert added is not None and (added.shared_scale, added.router.scale) == (1.0, 1.0)
    for key, value, words in (
        ("expert_selection_fn", "relu", "expert_selection_fn is relu, but must be softmax or sigmoid"),
        ("prefix_dense_sliding_window_pattern", 4, "prefix_dense_sliding_window_pattern is 4, but .* where it is 1"),
    ):
        with pytest.raises(CheckpointError, match=words):
            read(tmp_path, {**NORTH, key: value})


def test_glm_ocr_is_understood(tmp_path: Path) -> None:
    arch = read(tmp_path, GLM_OCR)
    tower = arch.tower
    assert tower is not None and (tower.layers.ffn_size, tower.merger.ffn_size) == (4096, 4608)
    assert tower.layers.bias and tower.positioning.learned == "none"
    assert tower.norms == Norms("root", eps=1e-5, last=True, heads="each")
    assert (arch.head_dim, arch.ropes[0].sections, arch.ropes[0].rotary_dim) == (128, (16, 24, 24), None)
    bare = {**GLM_OCR, "vision_config": {**GLM_OCR["vision_config"], "attention_bias": False}}
    assert read(tmp_path, bare).tower == replace(tower, layers=replace(tower.layers, bias=False))


def test_apertus_and_minitron_are_understood(tmp_path: Path) -> None:
    apertus = read(tmp_path, APERTUS)
    assert (apertus.activation, apertus.gated, apertus.qk_norm, apertus.max_context) == ("xielu", False, "head", 65536)
    (rope,) = apertus.ropes
    assert (rope.kind, rope.theta, rope.factor) == ("llama3", 12e6, 8.0)
    minitron = read(tmp_path, MINITRON)
    assert (minitron.activation, minitron.norm_offset, minitron.ropes[0].rotary_dim) == ("relu2", 1, 64)
    assert minitron.centred and minitron.norm_bias and not minitron.attention_bias


def test_starcoder_and_gpt_j_are_understood(tmp_path: Path) -> None:
    starcoder = read(tmp_path, STARCODER)
    assert (starcoder.num_heads, starcoder.num_kv_heads, starcoder.head_dim) == (48, 1, 128)
    assert (starcoder.activation, starcoder.num_positions, starcoder.tie_embeddings) == ("gelu", 8192, True)
    with pytest.raises(CheckpointError, match=r"multi_query is false, but .* where it is true"):
        read(tmp_path, {**STARCODER, "multi_query": False})
    gpt_j = read(tmp_path, GPT_J)
    assert (gpt_j.num_kv_heads, gpt_j.head_dim, gpt_j.ffn_size, gpt_j.num_positions) == (16, 256, 4 * 4096, 0)
    (rope,) = gpt_j.ropes
    assert (rope.rotary_dim, rope.interleaved) == (64, True) and gpt_j.head_bias and not gpt_j.attention_bias


def test_falcons_differ_by_their_kv_heads_and_norms(tmp_path: Path) -> None:
    for changes, expected in (
        ({}, (1, "shared norm")),
        (FALCON_40B, (8, "own norm")),
        ({**FALCON_40B, "num_ln_in_parallel_attn": 1}, (8, "shared norm")),
    ):
        arch = read(tmp_path, {**FALCON, **changes})
        assert (arch.num_kv_heads, arch.parallel) == expected
        assert (arch.ffn_size, arch.activation, arch.max_context, arch.tie_embeddings) == (4 * 4544, "gelu", 2048, True)
    for key, value in (("alibi", True), ("parallel_attn", False)):
        with pytest.raises(CheckpointError, match=f"{key} is .* but of this family only models are served where"):
            read(tmp_path, {**FALCON, key: value})


def test_phi_with_experts_has_an_amplitude_of_its_own(tmp_path: Path) -> None:
    arch = read(tmp_path, PHI_MOE)
    (rope,) = arch.ropes
    assert (rope.kind, rope.amplitude, rope.is_long) == ("longrope", 1.243163121016122, True)
    mlp = arch.layers[0].mlp
    assert isinstance(mlp, MoeMlp) and (mlp.router.score, mlp.router.margin) == ("sparse_mixer", 0.01)
    assert arch.head_bias and arch.norm_bias and arch.attention_out_bias and arch.layers[0].window is None
    other = {**PHI_MOE, "rope_scaling": {**PHI_MOE["rope_scaling"], "short_mscale": 1.0}}
    with pytest.raises(CheckpointError, match=r"short_mscale is 1.0 and long_mscale 1.24"):
        read(tmp_path, other)
    with pytest.raises(CheckpointError, match="num_experts_per_tok is 3"):
        read(tmp_path, {**PHI_MOE, "num_experts_per_tok": 3})


def test_minicpm_is_granite_with_factors_told_otherwise(tmp_path: Path) -> None:
    found = read(tmp_path, MINICPM4)
    factors = ("scale_emb", "dim_model_base", "scale_depth", "mup_denominator")
    told = {key: value for key, value in MINICPM4.items() if key not in factors}
    told |= {"embedding_multiplier": 12.0, "residual_multiplier": 1.4 / 4**0.5, "logits_scaling": 16.0}
    granite = read(tmp_path, {**told, "architectures": ["GraniteForCausalLM"], "attention_multiplier": 128**-0.5})
    assert granite.attention_scale == 128**-0.5  # what it is where none is told
    assert replace(found, name=granite.name, attention_scale=granite.attention_scale) == granite
