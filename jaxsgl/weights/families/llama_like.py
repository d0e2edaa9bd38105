"""Recipes of families that differ from Llama in names, places of norms or fused matrices alone, by architecture."""

from __future__ import annotations

from collections.abc import Mapping

from jaxsgl.weights import pieces
from jaxsgl.weights.families.usual import (
    AFTER,
    ATTENTION,
    FEED_FORWARD,
    FUSED_GATE_UP,
    FUSED_QKV,
    MLP,
    NORMS_OF_ALL_HEADS,
    layer_norms,
)
from jaxsgl.weights.recipe import Path, Recipe, Source

_HUNYUAN: dict[Path, Recipe] = {
    ("vectors", "q_norm"): Recipe((Source(ATTENTION + "query_layernorm.weight", ("H",)),), pieces.head_norm),
    ("vectors", "k_norm"): Recipe((Source(ATTENTION + "key_layernorm.weight", ("H",)),), pieces.head_norm),
}
_APERTUS: dict[Path, Recipe] = {
    **layer_norms(attention_norm="attention_layernorm", mlp_norm="feedforward_layernorm"),
    ("mlp", "curve"): Recipe(
        tuple(Source(f"{MLP}act_fn.{name}", ("1",)) for name in ("alpha_p", "alpha_n")), pieces.xielu_curve
    ),
}
_GLM4: dict[Path, Recipe] = {
    **layer_norms(attention_out_norm="post_self_attn_layernorm", mlp_out_norm="post_mlp_layernorm"),
    **FUSED_GATE_UP,
}
_HYPERCLOVAX = layer_norms(attention_out_norm="post_norm1", mlp_out_norm="post_norm2")
_AFMOE: dict[Path, Recipe] = {
    **layer_norms(
        attention_out_norm="post_attention_layernorm", mlp_norm="pre_mlp_layernorm", mlp_out_norm="post_mlp_layernorm"
    ),
}

LLAMA_LIKE: dict[str, Mapping[Path, Recipe]] = {
    "Phi3ForCausalLM": {**FUSED_QKV, **FUSED_GATE_UP},
    "ModernBertModel": {**FUSED_QKV, **FUSED_GATE_UP},
    "NomicBertModel": FUSED_QKV,
    "ApertusForCausalLM": _APERTUS,
    "Olmo2ForCausalLM": {**AFTER, **NORMS_OF_ALL_HEADS},
    "Olmo3ForCausalLM": {**AFTER, **NORMS_OF_ALL_HEADS},
    "OlmoeForCausalLM": NORMS_OF_ALL_HEADS,
    "MiniMaxM2ForCausalLM": NORMS_OF_ALL_HEADS,
    "AfmoeForCausalLM": _AFMOE,
    "FlexOlmoForCausalLM": {**AFTER, **NORMS_OF_ALL_HEADS},
    "Exaone4ForCausalLM": AFTER,
    "Exaone4_5_ForConditionalGeneration": AFTER,
    "HyperCLOVAXForCausalLM": _HYPERCLOVAX,
    "Kolibri1ForCausalLM": layer_norms(attention_out_norm="post_attn_norm", mlp_out_norm="post_ffn_norm"),
    "HunYuanDenseV1ForCausalLM": _HUNYUAN,
    "HunYuanMoEV1ForCausalLM": _HUNYUAN,
    "Llama4ForCausalLM": FEED_FORWARD,
    "Llama4ForConditionalGeneration": FEED_FORWARD,
    "GlmForCausalLM": FUSED_GATE_UP,
    "Glm4ForCausalLM": _GLM4,
    "BailingMoeV2ForCausalLM": FUSED_QKV,
    "SarvamMoEForCausalLM": FUSED_QKV,
    "Glm4vForConditionalGeneration": _GLM4,
    "GlmOcrForConditionalGeneration": _GLM4,
}
