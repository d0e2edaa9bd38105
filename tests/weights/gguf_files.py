"""Writes checkpoints in Hugging Face's layout as GGUF files, as llama.cpp's converter lays them out."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer

from tests.checkpoints import make_checkpoint
from tests.text.small_tokenizers import byte_level, save

# Kinds of tests/checkpoint_kinds with llama.cpp's architecture, and values in place of those that it can't express.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama_untied_llama3_rope": ("llama", {}),
    "llama_tied": ("llama", {}),
    "mixtral": ("llama", {"sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen2_moe": ("qwen2moe", {"mlp_only_layers": []}),
    "qwen3": ("qwen3", {}),
    "qwen3_moe": ("qwen3moe", {"mlp_only_layers": []}),
    "gemma": ("gemma", {}),
    "gemma2": ("gemma2", {"query_pre_attn_scalar": 20, "layer_types": None}),
    "gemma3": (
        "gemma3",
        {
            "query_pre_attn_scalar": 20,
            "layer_types": None,
            "num_hidden_layers": 7,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 30000.0, "factor": 4.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
    ),
    "phi3": ("phi3", {}),
    "olmo2": ("olmo2", {"attention_bias": False}),
    "olmoe": ("olmoe", {"attention_bias": False}),
    "granite": ("granite", {"head_dim": 16, "attention_bias": False}),
    "smollm3": ("smollm3", {"no_rope_layer_interval": 4, "num_hidden_layers": 5, "use_sliding_window": False}),
    "seed_oss": ("seed_oss", {}),
    "exaone4": ("exaone4", {"num_hidden_layers": 4, "layer_types": None}),
    "glm4": ("glm4", {}),
    "lfm2": ("lfm2", {"head_dim": 16, "block_auto_adjust_ff_dim": False, "intermediate_size": 160}),
}
_PERMUTED = ("llama", "granite", "smollm3")
_OFFSET = ("gemma", "gemma2", "gemma3")
_KEYS = {
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "norm_eps": "attention.layer_norm_rms_epsilon",
    "conv_L_cache": "shortconv.l_cache",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "num_experts": "expert_count",
    "num_local_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
}
_STACKED = re.compile(r"(.+\.experts)\.(\d+)\.(.+)")


def write_gguf(
    folder: Path,
    path: Path,
    arch: str,
    kind: str = "F32",
    *,
    metadata: Mapping[str, Any] | None = None,
    tokenizer: Path | None = None,
    max_tensors: int = 0,
) -> Path:
    """Writes the checkpoint of `folder` to `path`, matrices in the format `kind` and vectors in float32.

    Args:
      metadata: keys of the architecture that differ, or are added; None leaves one out.
      tokenizer: a folder whose tokenizer.json, byte-level, and chat template are written, too.
      max_tensors: of a file, for several; 0: one.
    """
    config = json.loads((folder / "config.json").read_text())
    tensors = dict(load_file(folder / "model.safetensors"))
    writer = gguf.GGUFWriter(path, arch, split_max_tensors=max_tensors)
    keys = {**_described(config, tensors, arch), **(metadata or {})}
    for key, value in keys.items():
        if value is not None:
            add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
            (writer.add_array if isinstance(value, list) else add[type(value)])(f"{arch}.{key}", value)
    if tokenizer is not None:
        _add_tokenizer(writer, tokenizer)
    told = gguf.GGMLQuantizationType[kind]
    for name, values in _tensors(config, tensors, arch).items():
        is_matrix = values.ndim > 1 and not re.search(r"ffn_gate_inp|shortconv\.conv\.", name)
        stored = told if is_matrix else gguf.GGMLQuantizationType.F32
        writer.add_tensor(name, quantized(values, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def with_tokenizer(folder: Path, kind: str = "qwen3") -> tuple[Path, Path]:
    """A checkpoint with a tokenizer, and a GGUF file of both in Q8_0, to which the checkpoint is rounded."""
    tokenizer, checkpoint = byte_level(), folder / "checkpoint"
    arch, changes = KINDS[kind]
    make_checkpoint(kind, checkpoint, seed=4, **changes, vocab_size=tokenizer.get_vocab_size())
    save(tokenizer, checkpoint)
    path = write_gguf(checkpoint, folder / "some-model.gguf", arch, "Q8_0", tokenizer=checkpoint)
    save_file(rounded(checkpoint, "Q8_0"), checkpoint / "model.safetensors")
    return checkpoint, path


def quantized(values: np.ndarray, kind: gguf.GGMLQuantizationType) -> np.ndarray:
    """The bytes of rows. Where the package can only read a format, they are those of other numbers: any will do."""
    try:
        return gguf.quants.quantize(values, kind)
    except NotImplementedError:
        block, num_bytes = gguf.GGML_QUANT_SIZES[kind]
        shape = (*values.shape[:-1], values.shape[-1] // block, num_bytes)
        blocks = np.random.default_rng(values.shape).integers(0, 256, shape, dtype=np.uint8)
        first = num_bytes - 2 if kind.name == "Q6_K" else 0  # of two scales, or one at the end
        blocks[..., first : first + 4].view(np.float16)[...] = 0.002
        return blocks.reshape(*values.shape[:-1], -1)


def rounded(folder: Path, kind: str) -> dict[str, np.ndarray]:
    """The tensors of the checkpoint of `folder`, with the numbers that matrices have in the format `kind`."""
    told = gguf.GGMLQuantizationType[kind]
    return {
        name: gguf.quants.dequantize(quantized(values, told), told)
        if values.ndim > 1 and not name.endswith(("gate.weight", "conv.conv.weight"))  # routers and convolutions
        else values
        for name, values in load_file(folder / "model.safetensors").items()
    }


def _described(config: Mapping[str, Any], tensors: Mapping[str, np.ndarray], arch: str) -> dict[str, Any]:
    found = {theirs: config[ours] for ours, theirs in _KEYS.items() if config.get(ours) is not None}
    ropes = config["rope_parameters"]
    rope = ropes.get("full_attention", ropes)
    head_dim = config["head_dim"]
    found |= {"rope.freq_base": rope["rope_theta"], "attention.value_length": head_dim}
    found["rope.dimension_count"] = int(head_dim * (rope.get("partial_rotary_factor") or 1.0))
    if rope["rope_type"] == "linear":
        found |= {"rope.scaling.type": "linear", "rope.scaling.factor": rope["factor"]}
    if rope["rope_type"] == "longrope":
        ratio = config["max_position_embeddings"] / config["original_max_position_embeddings"]
        amplitude = float(np.sqrt(1 + np.log(ratio) / np.log(config["original_max_position_embeddings"])))
        found |= {"rope.scaling.attn_factor": amplitude}
        found |= {"rope.scaling.original_context_length": config["original_max_position_embeddings"]}
    if arch == "lfm2":
        kv_heads = config["num_key_value_heads"]
        found["attention.head_count_kv"] = [0 if each == "conv" else kv_heads for each in config["layer_types"]]
    if config.get("sliding_window") and arch not in ("llama", "smollm3"):
        found["attention.sliding_window"] = config["sliding_window"]
    return found


def _tensors(config: Mapping[str, Any], tensors: Mapping[str, np.ndarray], arch: str) -> dict[str, np.ndarray]:
    """By llama.cpp's names, in its order of rows, with its offsets and stacks."""
    arch_id = next(key for key, word in gguf.MODEL_ARCH_NAMES.items() if word == arch)
    names = gguf.get_tensor_name_map(arch_id, config["num_hidden_layers"])
    stacks: dict[str, dict[int, np.ndarray]] = defaultdict(dict)
    made: dict[str, np.ndarray] = {}
    for name, values in tensors.items():
        match = _STACKED.fullmatch(name)
        if match is not None:
            stacks[f"{match[1]}.{match[3]}"][int(match[2])] = values
            continue
        if arch in _PERMUTED and (match := re.search(r"\.([qk])_proj\.(?:weight|bias)$", name)):
            heads = config["num_attention_heads" if match[1] == "q" else "num_key_value_heads"]
            values = values.reshape(heads, 2, -1, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
        if arch in _OFFSET and name.endswith("norm.weight"):
            values = values + np.float32(1)
        if name.endswith("conv.conv.weight"):
            values = values[:, 0]
        if name.endswith("shared_expert_gate.weight"):
            values = values[0]
        made[names.get_name(name, try_suffixes=(".weight", ".bias"))] = values
    for name, of_expert in stacks.items():
        stack = np.stack([of_expert[expert] for expert in range(len(of_expert))])
        made[names.get_name(name, try_suffixes=(".weight",))] = stack
    return {**made, **_factors(config)}


def _factors(config: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Of ropes that are stretched unevenly: how much each pair is."""
    rope = config["rope_parameters"]
    if rope.get("rope_type") == "longrope":
        parts = {part: np.array(rope[f"{part}_factor"], np.float32) for part in ("short", "long")}
        return {f"rope_factors_{part}.weight": factors for part, factors in parts.items()}
    if rope.get("rope_type") != "llama3":
        return {}
    turns = rope["rope_theta"] ** -(np.arange(0, config["head_dim"], 2) / config["head_dim"]) / (2 * np.pi)
    turns = turns * rope["original_max_position_embeddings"]
    low, high, factor = rope["low_freq_factor"], rope["high_freq_factor"], rope["factor"]
    keep = np.clip((turns - low) / (high - low), 0, 1)
    return {"rope_freqs.weight": (1 / (keep + (1 - keep) / factor)).astype(np.float32)}


def _add_tokenizer(writer: gguf.GGUFWriter, folder: Path) -> None:
    told = json.loads((folder / "tokenizer.json").read_text())
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    special = {each["id"]: each["special"] for each in told["added_tokens"]}
    ids = range(tokenizer.get_vocab_size())
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([tokenizer.id_to_token(token_id) for token_id in ids])
    normal, control, added = gguf.TokenType.NORMAL, gguf.TokenType.CONTROL, gguf.TokenType.USER_DEFINED
    writer.add_token_types([(control if special[i] else added) if i in special else normal for i in ids])
    writer.add_token_merges([" ".join(pair) for pair in told["model"]["merges"]])
    writer.add_bos_token_id(tokenizer.token_to_id("<|start|>"))
    writer.add_eos_token_id(tokenizer.token_to_id("<|end|>"))
    writer.add_chat_template((folder / "chat_template.jinja").read_text())
