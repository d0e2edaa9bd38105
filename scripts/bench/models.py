"""Shapes of models by name, and folders of random weights in Hugging Face's layout, which every engine can load.

Knows no engine. Called by the benchmarks that take `--shape`, and by `bench_peers.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from bench.output import write_json


def _qwen3(hidden: int, layers: int, heads: int, ffn: int, *, head_dim: int, vocab: int, tied: bool) -> dict[str, Any]:
    """The config.json of a model of the Qwen3 family with 8 kv heads."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": head_dim,
        "intermediate_size": ffn,
        "vocab_size": vocab,
        "tie_word_embeddings": tied,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "max_position_embeddings": 40_960,
        "hidden_act": "silu",
        "attention_bias": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 1,
    }


SHAPES = {
    "mid": _qwen3(1024, 8, 16, 3072, head_dim=64, vocab=32_000, tied=True),
    # Of its size, with states in all layers but a few.
    "mid-delta": _qwen3(1024, 8, 8, 3072, head_dim=128, vocab=32_000, tied=False)
    | {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "num_key_value_heads": 2,
        "full_attention_interval": 4,
        "linear_num_key_heads": 8,
        "linear_num_value_heads": 16,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
    },
    "mid-mamba": {
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "model_type": "granitemoehybrid",
        "hidden_size": 1024,
        "num_hidden_layers": 8,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "intermediate_size": 3072,
        "shared_intermediate_size": 3072,
        "layer_types": ["attention" if layer == 5 else "mamba" for layer in range(8)],
        "position_embedding_type": "nope",
        "mamba_n_heads": 32,
        "mamba_d_head": 64,
        "mamba_n_groups": 1,
        "mamba_d_state": 128,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "vocab_size": 32_000,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "max_position_embeddings": 40_960,
        "torch_dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 1,
    },
    # Ten of sixteen layers are short convolutions; sizes from memory.
    "lfm2-350m": {
        "architectures": ["Lfm2ForCausalLM"],
        "model_type": "lfm2",
        "hidden_size": 1024,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "intermediate_size": 4608,
        "block_auto_adjust_ff_dim": False,
        "conv_L_cache": 3,
        "conv_bias": False,
        "layer_types": ["full_attention" if layer in (2, 5, 8, 10, 12, 14) else "conv" for layer in range(16)],
        "rope_theta": 1_000_000.0,
        "norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "max_position_embeddings": 128_000,
        "vocab_size": 65_536,
        "torch_dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 1,
    },
    "qwen3-0.6b": _qwen3(1024, 28, 16, 3072, head_dim=128, vocab=151_936, tied=True),
    "qwen3-8b": _qwen3(4096, 36, 32, 12_288, head_dim=128, vocab=151_936, tied=False),
}


def _qwen3_moe(hidden: int, layers: int, heads: int, ffn: int, expert_ffn: int) -> dict[str, Any]:
    """The config.json of a mixture of the Qwen3 family: 4 kv heads of 128, 128 experts, 8 of them per token."""
    return _qwen3(hidden, layers, heads, ffn, head_dim=128, vocab=151_936, tied=False) | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": expert_ffn,
        "norm_topk_prob": True,
    }


# Only compiled: the benchmarks count FLOPs and bytes as those of dense models.
COMPILED_SHAPES = {
    "qwen3-30b-a3b": _qwen3_moe(2048, 48, 32, 6144, 768),
    "qwen3-235b-a22b": _qwen3_moe(4096, 94, 64, 12_288, 1536),
    "phi3-mini": _qwen3(3072, 32, 32, 8192, head_dim=96, vocab=32_064, tied=False)  # heads that pages keep as 128
    | {
        "architectures": ["Phi3ForCausalLM"],
        "model_type": "phi3",
        "num_key_value_heads": 32,
        "rope_theta": 10_000.0,
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
        "sliding_window": 2047,
        "pad_token_id": 0,
    },
    # Three of four layers are gated delta-nets.
    "qwen3.5-9b": _qwen3(4096, 32, 16, 12_288, head_dim=256, vocab=248_320, tied=False)
    | {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "num_key_value_heads": 4,
        "rope_theta": 10_000_000.0,
        "max_position_embeddings": 262_144,
        "full_attention_interval": 4,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
    },
    # Nine of ten layers are Mamba-2; sizes from memory.
    "granite-4.0-h-small": {
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "model_type": "granitemoehybrid",
        "hidden_size": 4096,
        "num_hidden_layers": 40,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 768,
        "shared_intermediate_size": 1536,
        "num_local_experts": 72,
        "num_experts_per_tok": 10,
        "layer_types": ["attention" if layer % 10 == 5 else "mamba" for layer in range(40)],
        "position_embedding_type": "nope",
        "mamba_n_heads": 128,
        "mamba_d_head": 64,
        "mamba_n_groups": 1,
        "mamba_d_state": 128,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "embedding_multiplier": 12,
        "residual_multiplier": 0.22,
        "attention_multiplier": 0.0078125,
        "logits_scaling": 16,
        "vocab_size": 100_352,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "max_position_embeddings": 131_072,
        "dtype": "bfloat16",
    },
    # Each layer is one block: 23 of Mamba-2, 23 of experts, 6 with attention; sizes as those who read the folder say.
    "nemotron-3-nano": {
        "architectures": ["NemotronHForCausalLM"],
        "model_type": "nemotron_h",
        "hidden_size": 2688,
        "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
        "num_attention_heads": 32,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "mamba_num_heads": 64,
        "mamba_head_dim": 64,
        "n_groups": 8,
        "ssm_state_size": 128,
        "conv_kernel": 4,
        "n_routed_experts": 128,
        "num_experts_per_tok": 6,
        "moe_intermediate_size": 1856,
        "moe_shared_expert_intermediate_size": 3712,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "mlp_hidden_act": "relu2",
        "layer_norm_epsilon": 1e-5,
        "vocab_size": 131_072,
        "tie_word_embeddings": False,
        "max_position_embeddings": 262_144,
        "dtype": "bfloat16",
    },
    # 18 of 24 layers are short convolutions; sizes from memory.
    "lfm2-8b-a1b": {
        "architectures": ["Lfm2MoeForCausalLM"],
        "model_type": "lfm2_moe",
        "hidden_size": 2048,
        "num_hidden_layers": 24,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 7168,
        "moe_intermediate_size": 1792,
        "num_dense_layers": 2,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "norm_topk_prob": True,
        "use_expert_bias": True,
        "routed_scaling_factor": 1.0,
        "conv_L_cache": 3,
        "conv_bias": False,
        "layer_types": ["full_attention" if layer in (2, 6, 10, 14, 18, 21) else "conv" for layer in range(24)],
        "rope_theta": 1_000_000.0,
        "norm_eps": 1e-5,
        "vocab_size": 65_536,
        "tie_word_embeddings": True,
        "max_position_embeddings": 128_000,
        "dtype": "bfloat16",
    },
    # Layers attend over a latent of 576 numbers.
    "deepseek-v2-lite": {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "hidden_size": 2048,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "q_lora_rank": None,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "intermediate_size": 10_944,
        "first_k_dense_replace": 1,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "moe_intermediate_size": 1408,
        "norm_topk_prob": False,
        "scoring_func": "softmax",
        "topk_method": "greedy",
        "routed_scaling_factor": 1.0,
        "vocab_size": 102_400,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "max_position_embeddings": 163_840,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 1,
    },
}
COMPILED_SHAPES["deepseek-v3"] = COMPILED_SHAPES["deepseek-v2-lite"] | {  # only sized: no device has room for it
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "intermediate_size": 18_432,
    "first_k_dense_replace": 3,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "moe_intermediate_size": 2048,
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "routed_scaling_factor": 2.5,
    "num_nextn_predict_layers": 1,
    "vocab_size": 129_280,
}
# With an index that chooses what a token attends to, and an eighth of the experts, which fits one device in FP8.
COMPILED_SHAPES["deepseek-v3.2-32e"] = COMPILED_SHAPES["deepseek-v3"] | {
    "architectures": ["DeepseekV32ForCausalLM"],
    "model_type": "deepseek_v32",
    "n_routed_experts": 32,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 2048,
}
COMPILED_SHAPES["glm-4.7-flash"] = COMPILED_SHAPES["deepseek-v3"] | {
    "architectures": ["Glm4MoeLiteForCausalLM"],
    "model_type": "glm4_moe_lite",
    "hidden_size": 2048,
    "num_hidden_layers": 47,
    "num_attention_heads": 20,
    "num_key_value_heads": 20,
    "q_lora_rank": 768,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "intermediate_size": 10_240,
    "first_k_dense_replace": 1,
    "n_routed_experts": 64,
    "num_experts_per_tok": 4,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 1536,
    "routed_scaling_factor": 1.8,
    "vocab_size": 154_880,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1_000_000.0,
    "max_position_embeddings": 202_752,
}
COMPILED_SHAPES["glm-4.5-air"] = _qwen3(4096, 46, 96, 10_944, head_dim=128, vocab=151_552, tied=False) | {
    "architectures": ["Glm4MoeForCausalLM"],
    "model_type": "glm4_moe",
    "attention_bias": True,
    "partial_rotary_factor": 0.5,
    "use_qk_norm": False,
    "first_k_dense_replace": 1,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 1408,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "num_nextn_predict_layers": 1,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131_072,
    # As its FP8 release, which fits one device: a scale for each output of a matrix.
    "quantization_config": {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False},
                "input_activations": {
                    "num_bits": 8, "type": "float", "strategy": "token", "symmetric": True, "dynamic": True,
                },
            }
        },
        "ignore": ["lm_head", *(f"model.layers.{layer}.mlp.gate" for layer in range(1, 47)), "model.layers.46.eh_proj"],
    },
}  # fmt: skip


def _qwen3_vl(text: dict[str, Any]) -> dict[str, Any]:
    """The config.json of a Qwen3-VL whose decoder is `text`, with the tower that these models have."""
    rope = {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"}
    decoder = text | {"rope_scaling": rope, "rope_theta": 5_000_000, "max_position_embeddings": 262_144}
    for key in ("architectures", "tie_word_embeddings", "torch_dtype"):
        del decoder[key]
    return {
        "architectures": ["Qwen3VLMoeForConditionalGeneration"],
        "model_type": "qwen3_vl_moe",
        "text_config": decoder,
        "vision_config": {
            "depth": 27,
            "hidden_size": 1152,
            "intermediate_size": 4304,
            "num_heads": 16,
            "patch_size": 16,
            "temporal_patch_size": 2,
            "spatial_merge_size": 2,
            "num_position_embeddings": 2304,
            "deepstack_visual_indexes": [8, 16, 24],
            "out_hidden_size": text["hidden_size"],
        },
        "image_token_id": 151_655,
        "video_token_id": 151_656,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }


def gpt_oss(layers: int, experts: int) -> dict[str, Any]:
    """The config.json of a gpt-oss."""
    return {
        "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "hidden_size": 2880,
        "num_hidden_layers": layers, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
        "intermediate_size": 2880, "num_local_experts": experts, "num_experts_per_tok": 4, "vocab_size": 201_088,
        "tie_word_embeddings": False, "rms_norm_eps": 1e-5, "rope_theta": 150_000, "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"] * (layers // 2), "attention_bias": True,
        "max_position_embeddings": 131_072, "swiglu_limit": 7.0, "hidden_act": "silu", "torch_dtype": "bfloat16",
        "rope_scaling": {
            "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        "eos_token_id": 200_002, "quantization_config": {"quant_method": "mxfp4"},
    }  # fmt: skip


COMPILED_SHAPES |= {
    name.replace("qwen3-", "qwen3-vl-"): _qwen3_vl(COMPILED_SHAPES[name])
    for name in ("qwen3-30b-a3b", "qwen3-235b-a22b")
}
COMPILED_SHAPES["gpt-oss-20b"] = gpt_oss(24, 32)
# For dry runs: what an engine has, as small as it can be with FP8's blocks.
TINY_SHAPES = {
    "tiny": _qwen3(256, 2, 4, 256, head_dim=64, vocab=512, tied=True) | {"num_key_value_heads": 2},
    "tiny-moe": _qwen3_moe(256, 2, 4, 256, 128)
    | {"vocab_size": 512, "num_key_value_heads": 2, "head_dim": 64, "num_experts": 8, "num_experts_per_tok": 2},
}
# EAGLE-3 heads, by their models, as SpecForge stores them.
HEADS: dict[str, dict[str, Any]] = {
    "qwen3-8b": {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": 4096,
        "num_hidden_layers": 1,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 12_288,
        "vocab_size": 151_936,
        "draft_vocab_size": 32_000,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "max_position_embeddings": 40_960,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
    }
}
SMALLER = {"qwen3-8b": "qwen3-0.6b"}  # models that draft, by those that they draft for
# As FP8 and AWQ releases describe themselves; "NAME-fp8" is a shape with the first.
QUANTIZED = {
    "fp8": {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"},
}
NAMES = tuple(f"{name}{weights}" for name in SHAPES | COMPILED_SHAPES | TINY_SHAPES for weights in ("", "-fp8", "-awq"))


def write_config(shape: str, folder: Path) -> Path:
    """Writes the config.json of `shape`, for engines that draw random weights themselves; returns `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    plain, _, weights = shape.rpartition("-")
    quantized = {"quantization_config": QUANTIZED[weights]} if weights in QUANTIZED else {}
    write_json(
        folder / "config.json", (SHAPES | COMPILED_SHAPES | TINY_SHAPES)[plain if quantized else shape] | quantized
    )
    return folder


def write_head_config(model: str, folder: Path) -> Path:
    """Writes the config.json of the head that drafts for the shape `model`; returns `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", HEADS[model])
    return folder


def write_checkpoint(shape: str, folder: Path) -> Path:
    """Writes config.json and random weights in bfloat16 in one model.safetensors; returns `folder`.

    Needs twice the size of the model in memory. Weights of other families than Qwen3 are transformers'.
    """
    config = SHAPES[shape]
    if config["model_type"] != "qwen3":
        return _write_by_transformers(shape, folder)
    rng = np.random.default_rng(0)
    tensors = {}
    for name, dims in tensor_shapes(config).items():
        if len(dims) == 1:
            values = np.ones(dims, np.float32)
        else:
            values = rng.standard_normal(dims, np.float32) / np.float32(dims[1] ** 0.5)
        tensors[name] = values.astype(ml_dtypes.bfloat16)
    write_config(shape, folder)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _write_by_transformers(shape: str, folder: Path) -> Path:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(write_config(shape, folder))
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    return folder


def tensor_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Shapes by name of the tensor: `[out, in]` for a matrix, the length for the scale of a norm."""
    d, f, h = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * h, config["num_key_value_heads"] * h
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], d)}
    for layer in range(config["num_hidden_layers"]):
        parts: dict[str, tuple[int, ...]] = {
            "input_layernorm": (d,),
            "self_attn.q_proj": (q, d),
            "self_attn.k_proj": (kv, d),
            "self_attn.v_proj": (kv, d),
            "self_attn.q_norm": (h,),
            "self_attn.k_norm": (h,),
            "self_attn.o_proj": (d, q),
            "post_attention_layernorm": (d,),
            "mlp.gate_proj": (f, d),
            "mlp.up_proj": (f, d),
            "mlp.down_proj": (d, f),
        }
        shapes |= {f"model.layers.{layer}.{name}.weight": dims for name, dims in parts.items()}
    shapes["model.norm.weight"] = (d,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], d)
    return shapes
