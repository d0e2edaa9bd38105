"""Kinds of Falcon and Falcon H1."""

from __future__ import annotations

from typing import Any

from transformers import FalconConfig, FalconForCausalLM, FalconH1Config, FalconH1ForCausalLM

from tests.checkpoint_kinds.sizes import MAMBA, Kind

_FALCON = {"num_attention_heads": 16, "num_kv_heads": 4, "ffn_hidden_size": 112}


def _falcon(head_dim: int = 0, num_key_value_heads: int = 0, intermediate_size: int = 0, **values: Any) -> FalconConfig:
    """Its configuration, which has other words for these, or none."""
    return FalconConfig(**values)


KINDS: dict[str, Kind] = {
    # As 7B, 40B and 11B have it.
    "falcon": (_falcon, FalconForCausalLM, {**_FALCON, "tie_word_embeddings": False}),
    "falcon_40b": (_falcon, FalconForCausalLM, {**_FALCON, "new_decoder_architecture": True, "bias": True}),
    "falcon_11b": (
        _falcon,
        FalconForCausalLM,
        {**_FALCON, "new_decoder_architecture": True, "num_ln_in_parallel_attn": 1},
    ),
    "falcon_h1": (
        FalconH1Config,
        FalconH1ForCausalLM,
        {
            **MAMBA,
            "mamba_d_ssm": 108,
            "key_multiplier": 0.7,
            "embedding_multiplier": 3.0,
            "lm_head_multiplier": 1.3,
            "mlp_multipliers": [0.8, 1.4],
            "attention_in_multiplier": 1.2,
            "attention_out_multiplier": 0.6,
            "ssm_in_multiplier": 1.1,
            "ssm_out_multiplier": 0.8,
            "ssm_multipliers": [0.9, 1.2, 0.7, 1.3, 0.8],
        },
    ),
}
