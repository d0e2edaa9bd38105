"""Kinds of GPT-2 and its kin, with learned positions or LayerNorm, and gpt-oss."""

from __future__ import annotations

from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    GPTBigCodeConfig,
    GPTBigCodeForCausalLM,
    GPTJConfig,
    GPTJForCausalLM,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    OPTConfig,
    OPTForCausalLM,
)

from tests.checkpoint_kinds.sizes import MIXED_TYPES, WINDOW, Kind

_EQUALLY_MANY = {"head_dim": 16, "num_key_value_heads": 8}  # kv heads and heads, of D numbers together

KINDS: dict[str, Kind] = {
    "gpt2": (GPT2Config, GPT2LMHeadModel, {**_EQUALLY_MANY, "intermediate_size": None, "n_inner": 112}),
    "gpt_bigcode": (
        GPTBigCodeConfig,
        GPTBigCodeForCausalLM,
        {"head_dim": 16, "num_key_value_heads": 1, "intermediate_size": None, "n_inner": 112},
    ),
    "gptj": (
        GPTJConfig,
        GPTJForCausalLM,
        {**_EQUALLY_MANY, "intermediate_size": None, "n_inner": 112, "rotary_dim": 6},
    ),
    "gpt_neox": (
        GPTNeoXConfig,
        GPTNeoXForCausalLM,
        {
            **_EQUALLY_MANY,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.5},
        },
    ),
    "opt": (OPTConfig, OPTForCausalLM, {**_EQUALLY_MANY, "intermediate_size": None, "ffn_dim": 112}),
    "gpt_oss": (
        GptOssConfig,
        GptOssForCausalLM,
        {
            "intermediate_size": 48,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "sliding_window": WINDOW,
            "layer_types": MIXED_TYPES,
            "swiglu_limit": 2.0,
        },
    ),
}
