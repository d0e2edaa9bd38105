"""Kinds of EXAONE 4 and its mixture of experts."""

from __future__ import annotations

from transformers import Exaone4Config, Exaone4ForCausalLM, ExaoneMoeConfig, ExaoneMoeForCausalLM

from tests.checkpoint_kinds.sizes import MIXED_TYPES, SIGMOID_MOE, WINDOW, Kind

KINDS: dict[str, Kind] = {
    "exaone4": (Exaone4Config, Exaone4ForCausalLM, {"sliding_window": WINDOW, "layer_types": MIXED_TYPES}),
    "exaone_moe": (
        ExaoneMoeConfig,
        ExaoneMoeForCausalLM,
        {
            **SIGMOID_MOE,
            "num_experts": 10,
            "num_shared_experts": 3,
            "sliding_window": WINDOW,
            "layer_types": MIXED_TYPES,
            "mlp_layer_types": ["dense", "sparse", "sparse"],
        },
    ),
}
