"""Kinds of Nemotron and Nemotron-H."""

from __future__ import annotations

from transformers import NemotronConfig, NemotronForCausalLM, NemotronHConfig, NemotronHForCausalLM

from tests.checkpoint_kinds.sizes import Kind

_NEMOTRON_H = {
    "layers_block_type": ["linear_attention", "moe", "linear_attention", "full_attention", "mlp"],
    "mlp_hidden_act": "relu2",
    "mamba_num_heads": 12,
    "mamba_head_dim": 9,
    "n_groups": 2,
    "ssm_state_size": 14,
    "conv_kernel": 4,
    "chunk_size": 16,
    "time_step_min": 1e-9,  # else transformers bounds the steps of prompts, and not those of decodes
    "n_routed_experts": 10,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "moe_shared_expert_intermediate_size": 52,
    "routed_scaling_factor": 1.7,
    "n_group": 2,
    "topk_group": 1,
}

KINDS: dict[str, Kind] = {
    "nemotron": (NemotronConfig, NemotronForCausalLM, {"attention_bias": True, "mlp_bias": True}),
    "nemotron_h": (NemotronHConfig, NemotronHForCausalLM, _NEMOTRON_H),
    "nemotron_h_latent": (NemotronHConfig, NemotronHForCausalLM, {**_NEMOTRON_H, "moe_latent_size": 44}),
}
