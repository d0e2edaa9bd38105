"""Tiny random-weight Hugging Face checkpoints, one per kind of model that is served; made with transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCAB_SIZE = 256
MAX_CONTEXT = 2048
EOS_TOKEN_ID = 2

COMMON = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "max_position_embeddings": MAX_CONTEXT,
    "bos_token_id": 1,
    "eos_token_id": EOS_TOKEN_ID,
    "pad_token_id": None,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}

# Kind -> (configuration class, model class, what differs from COMMON).
_KINDS: dict[str, tuple[Callable[..., PretrainedConfig], Callable[[PretrainedConfig], PreTrainedModel], dict]] = {
    "llama_tied": (LlamaConfig, LlamaForCausalLM, {"tie_word_embeddings": True}),
    "llama_untied_llama3_rope": (
        LlamaConfig,
        LlamaForCausalLM,
        {"tie_word_embeddings": False, "rope_parameters": LLAMA3_ROPE, "num_hidden_layers": 3},
    ),
    "llama_linear_rope_bias": (
        LlamaConfig,
        LlamaForCausalLM,
        {
            "tie_word_embeddings": False,
            "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0},
            "attention_bias": True,
            "mlp_bias": True,
            "head_dim": 32,
        },
    ),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {"tie_word_embeddings": True}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"tie_word_embeddings": True, "head_dim": 32, "num_attention_heads": 6}),
}
CHECKPOINT_KINDS = tuple(_KINDS)


def make_checkpoint(
    kind: str,
    folder: Path,
    *,
    seed: int = 0,
    max_shard_size: str | None = None,
    dtype: torch.dtype = torch.float32,
    **config_changes: object,
) -> Path:
    """Saves a random model of `kind` into `folder` and returns the folder.

    Args:
      max_shard_size: such as "50KB", for several files and an index; None: one file.
      config_changes: configuration values that differ from the kind's.
    """
    config_class, model_class, differences = _KINDS[kind]
    generator_state = torch.random.get_rng_state()
    torch.manual_seed(seed)
    model = model_class(config_class(**{**COMMON, **differences, **config_changes})).to(dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:  # away from the initial ones, zeros and near-uniform logits, so that each one matters
                parameter.add_(0.2 * torch.randn_like(parameter))
            elif name.endswith("bias"):
                parameter.copy_(0.3 * torch.randn_like(parameter))
            else:
                parameter.copy_(1.5 * torch.randn_like(parameter) / parameter.shape[-1] ** 0.5)
    torch.random.set_rng_state(generator_state)
    model.save_pretrained(folder, **({} if max_shard_size is None else {"max_shard_size": max_shard_size}))
    return folder


def reference_logits(folder: Path, token_ids: list[int]) -> torch.Tensor:
    """transformers' float32 logits `[T, V]` of one sequence."""
    model = load_reference(folder)
    with torch.no_grad():
        return model(torch.tensor([token_ids])).logits[0].float()


def load_reference(folder: Path) -> PreTrainedModel:
    """The checkpoint in `folder` as a transformers model in float32."""
    architecture = json.loads((folder / "config.json").read_text())["architectures"][0]
    classes: dict[str, Any] = {model_class.__name__: model_class for _, model_class, _ in _KINDS.values()}
    return classes[architecture].from_pretrained(folder, dtype=torch.float32).eval()
