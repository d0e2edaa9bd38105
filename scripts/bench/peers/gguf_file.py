"""Writes a checkpoint in Hugging Face's layout as a GGUF file for llama.cpp: of Qwen3, LFM2, Granite's dense hybrids.

Needs the `gguf` package.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes  # noqa: F401 - makes bfloat16 known to NumPy
import numpy as np
from safetensors import safe_open

from bench.peers.contender import CannotRun

ARCHS = {
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "lfm2": gguf.MODEL_ARCH.LFM2,
    "granitemoehybrid": gguf.MODEL_ARCH.GRANITE_HYBRID,
}
FILE_TYPES = {
    "float32": (gguf.GGMLQuantizationType.F32, gguf.LlamaFileType.ALL_F32),
    "float16": (gguf.GGMLQuantizationType.F16, gguf.LlamaFileType.MOSTLY_F16),
    "bfloat16": (gguf.GGMLQuantizationType.BF16, gguf.LlamaFileType.MOSTLY_BF16),
    "q8_0": (gguf.GGMLQuantizationType.Q8_0, gguf.LlamaFileType.MOSTLY_Q8_0),
    "q4_0": (gguf.GGMLQuantizationType.Q4_0, gguf.LlamaFileType.MOSTLY_Q4_0),
}


def write_gguf(model: Path, path: Path, dtype: str) -> None:
    """Writes the weights of the folder `model` to `path`: matrices in `dtype`, all else in float32, no tokenizer.

    Raises:
      CannotRun: the model is of another family.
    """
    config = json.loads((model / "config.json").read_text())
    arch = ARCHS.get(config["model_type"])
    if arch is None or config.get("num_local_experts"):
        raise CannotRun(f"the model is a {config['model_type']}: only {', '.join(ARCHS)} are written, without experts")
    kind, file_type = FILE_TYPES[dtype]
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch])
    _describe(writer, config)
    if arch == gguf.MODEL_ARCH.GRANITE_HYBRID:
        _describe_states(writer, config)
    else:
        if arch == gguf.MODEL_ARCH.LFM2:
            writer.add_shortconv_l_cache(config["conv_L_cache"])
        else:
            writer.add_key_length(config["head_dim"])
            writer.add_value_length(config["head_dim"])
        writer.add_rope_freq_base(config.get("rope_theta") or config["rope_parameters"]["rope_theta"])
    writer.add_file_type(file_type)
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    for file in sorted(model.glob("*.safetensors")):
        with safe_open(file, framework="numpy") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - not a dict
                for told, values in _as_told(name, tensors.get_tensor(name).astype(np.float32), config):
                    is_small = (
                        values.ndim == 1
                        or ".conv.conv." in told
                        or ".ssm_" in told.replace("ssm_in.", "").replace("ssm_out.", "")
                    )
                    stored = gguf.GGMLQuantizationType.F32 if is_small else kind
                    known = told if told.startswith("blk.") else names.get_name(told, try_suffixes=(".weight",))
                    writer.add_tensor(known, gguf.quants.quantize(values, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _describe(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """Writes the shape of the model."""
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config.get("shared_intermediate_size") or config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    num_kv_heads, types = config["num_key_value_heads"], config.get("layer_types") or []
    has_states = any(each in ("conv", "mamba", "linear_attention") for each in types)
    each_layer = [num_kv_heads if each == "attention" or each == "full_attention" else 0 for each in types]
    writer.add_head_count_kv(each_layer if has_states else num_kv_heads)
    writer.add_layer_norm_rms_eps(config.get("rms_norm_eps") or config["norm_eps"])


def _describe_states(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """Writes the sizes of Mamba-2, and Granite's factors."""
    writer.add_ssm_conv_kernel(config["mamba_d_conv"])
    writer.add_ssm_state_size(config["mamba_d_state"])
    writer.add_ssm_group_count(config["mamba_n_groups"])
    writer.add_ssm_inner_size(config["mamba_n_heads"] * config["mamba_d_head"])
    writer.add_ssm_time_step_rank(config["mamba_n_heads"])
    writer.add_embedding_scale(config.get("embedding_multiplier", 1.0))
    writer.add_residual_scale(config.get("residual_multiplier", 1.0))
    writer.add_attention_scale(config.get("attention_multiplier", 1.0))
    writer.add_logit_scale(config.get("logits_scaling", 1.0))
    # llama.cpp's switch for Granite's rope.
    writer.add_rope_scaling_finetuned(config.get("position_embedding_type") == "rope")


def _as_told(name: str, values: np.ndarray, config: dict[str, Any]) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors that one of a checkpoint becomes: names, those of the checkpoint or llama.cpp's, and numbers."""
    number = f"{name}...".split(".")[2]
    own = f"blk.{number}."
    if ".shared_mlp.input_linear" in name:
        for told, half in zip(("ffn_gate", "ffn_up"), np.split(values, 2), strict=True):
            yield f"{own}{told}.weight", half
    elif ".shared_mlp.output_linear" in name:
        yield f"{own}ffn_down.weight", values
    elif config["model_type"] == "granitemoehybrid" and ".post_attention_layernorm" in name:
        yield f"{own}ffn_norm.weight", values
    elif ".conv.conv." in name:
        yield name, values[:, 0]
    elif ".mamba." not in name:
        yield name, values
    elif name.endswith("A_log"):
        yield f"{own}ssm_a", -np.exp(values)[:, None]
    elif name.endswith(".D"):
        yield f"{own}ssm_d", values[:, None]
    elif name.endswith("dt_bias"):
        yield f"{own}ssm_dt.bias", values
    elif name.endswith("conv1d.weight"):
        yield f"{own}ssm_conv1d.weight", values[:, 0]
    elif name.endswith("conv1d.bias"):
        yield f"{own}ssm_conv1d.bias", values
    elif ".norm." in name:
        yield f"{own}ssm_norm.weight", values.reshape(config["mamba_n_groups"], -1)
    else:
        yield f"{own}ssm_{'in' if 'in_proj' in name else 'out'}.weight", values
