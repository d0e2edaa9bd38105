"""Sizes, and parts of configurations, that kinds of several families have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from transformers import PretrainedConfig, PreTrainedModel

# Configuration class, model class, and what differs from `OF_FAMILIES`, or `COMMON`.
Kind: TypeAlias = tuple[Callable[..., PretrainedConfig], Callable[[PretrainedConfig], PreTrainedModel], dict[str, Any]]

VOCAB_SIZE = 256
MAX_CONTEXT = 2048
EOS_TOKEN_ID = 2
WINDOW = 12
ORIGINAL_CONTEXT = 64  # of "phi3", before its rope was stretched

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
OF_FAMILIES: dict[str, Any] = {  # all sizes differ, and no two axes of a tensor can be mistaken for each other
    "vocab_size": 200,
    "hidden_size": 128,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 20,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "max_position_embeddings": 512,
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
MIXED_TYPES = ["sliding_attention", "full_attention", "sliding_attention"]
LATENT_SIZES = {
    "head_dim": 6,
    "num_key_value_heads": 8,
    "q_lora_rank": 40,
    "kv_lora_rank": 36,
    "qk_rope_head_dim": 6,
    "qk_nope_head_dim": 14,
    "v_head_dim": 22,
}
LATENT = {
    **LATENT_SIZES,
    "n_routed_experts": 12,
    "num_experts_per_tok": 3,
    "n_shared_experts": 4,
    "moe_intermediate_size": 48,
}
# Many heads, so that hardly any token has a score of 0, which others would equal.
INDEX = {"index_topk": 8, "index_n_heads": 13, "index_head_dim": 10}
MAMBA = {
    "mamba_expand": 3,
    "mamba_n_heads": 12,
    "mamba_n_groups": 2,
    "mamba_d_state": 14,
    "mamba_d_conv": 4,
    "mamba_chunk_size": 16,
}
SIGMOID_MOE = {
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.7,
    "n_group": 2,
    "topk_group": 1,
}
