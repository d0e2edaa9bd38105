"""Kinds of Llama 3 and 4."""

from __future__ import annotations

from transformers import Llama4ForCausalLM, Llama4TextConfig, LlamaConfig, LlamaForCausalLM

from tests.checkpoint_kinds.sizes import LLAMA3_ROPE, Kind

# Of sizes `COMMON`.
COMMON_KINDS: dict[str, Kind] = {
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
}
# Of sizes `OF_FAMILIES`, as all others.
KINDS: dict[str, Kind] = {
    # Its last layer turns nothing. Heads are normalized in the other two, the first of which has no experts.
    "llama4": (
        Llama4TextConfig,
        Llama4ForCausalLM,
        {
            "intermediate_size": 48,
            "intermediate_size_mlp": 112,
            "num_local_experts": 10,
            "moe_layers": [1, 2],
            "no_rope_layer_interval": 3,
            "attention_chunk_size": 32,
            "floor_scale": 10,
            "attn_scale": 0.5,
            "attention_bias": True,
            "rope_parameters": {**LLAMA3_ROPE, "high_freq_factor": 1.0},
        },
    ),
}
