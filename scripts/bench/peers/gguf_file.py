"""Writes a Qwen3 checkpoint in Hugging Face's layout as a GGUF file for llama.cpp. Needs the `gguf` package."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes  # noqa: F401 - makes bfloat16 known to NumPy
import numpy as np
from safetensors import safe_open

from bench.peers.contender import CannotRun

ARCH = gguf.MODEL_ARCH.QWEN3
FILE_TYPES = {
    "float32": (gguf.GGMLQuantizationType.F32, gguf.LlamaFileType.ALL_F32),
    "float16": (gguf.GGMLQuantizationType.F16, gguf.LlamaFileType.MOSTLY_F16),
    "bfloat16": (gguf.GGMLQuantizationType.BF16, gguf.LlamaFileType.MOSTLY_BF16),
    "q8_0": (gguf.GGMLQuantizationType.Q8_0, gguf.LlamaFileType.MOSTLY_Q8_0),
    "q4_0": (gguf.GGMLQuantizationType.Q4_0, gguf.LlamaFileType.MOSTLY_Q4_0),
}


def write_gguf(model: Path, path: Path, dtype: str) -> None:
    """Writes the weights of the folder `model` to `path`: matrices in `dtype`, norms in float32, no tokenizer.

    Raises:
      CannotRun: the model is of another family.
    """
    config = json.loads((model / "config.json").read_text())
    if config["model_type"] != "qwen3":
        raise CannotRun(f"the model is a {config['model_type']}: only qwen3 is written as GGUF")
    kind, file_type = FILE_TYPES[dtype]
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[ARCH])
    _describe(writer, config)
    writer.add_file_type(file_type)
    names = gguf.get_tensor_name_map(ARCH, config["num_hidden_layers"])
    for file in sorted(model.glob("*.safetensors")):
        with safe_open(file, framework="numpy") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - not a dict
                values = tensors.get_tensor(name).astype(np.float32)
                stored = kind if values.ndim > 1 else gguf.GGMLQuantizationType.F32
                told = names.get_name(name, try_suffixes=(".weight",))
                writer.add_tensor(told, gguf.quants.quantize(values, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _describe(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """Writes the shape and the constants of the model."""
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config.get("rope_theta") or config["rope_parameters"]["rope_theta"])
