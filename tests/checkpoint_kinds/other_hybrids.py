"""Models with layers that keep states, alone in their family."""

from __future__ import annotations

from transformers import (
    BambaConfig,
    BambaForCausalLM,
    JambaConfig,
    JambaForCausalLM,
    KimiLinearConfig,
    KimiLinearForCausalLM,
)

from tests.checkpoint_kinds.sizes import LATENT_SIZES, MAMBA, Kind

KINDS: dict[str, Kind] = {
    "bamba": (BambaConfig, BambaForCausalLM, {**MAMBA, "mlp_bias": True, "attn_layer_indices": [1]}),
    "jamba": (
        JambaConfig,
        JambaForCausalLM,
        {
            "head_dim": 16,
            "num_hidden_layers": 4,
            "attn_layer_period": 3,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "mamba_d_state": 14,
            "mamba_d_conv": 3,
            "mamba_expand": 3,
            "mamba_dt_rank": 10,
        },
    ),
    "kimi_linear": (
        KimiLinearConfig,
        KimiLinearForCausalLM,
        {
            **LATENT_SIZES,
            "q_lora_rank": None,
            "num_hidden_layers": 4,
            "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
            "linear_num_heads": 10,
            "linear_head_dim": 16,
            "linear_conv_kernel_dim": 3,
            "num_experts": 12,
            "num_experts_per_token": 3,
            "num_shared_experts": 4,
            "moe_intermediate_size": 48,
            "num_expert_group": 4,
            "topk_group": 2,
            "attention_bias": True,
        },
    ),
}
