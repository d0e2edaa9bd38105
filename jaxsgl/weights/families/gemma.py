"""Recipes of Gemma 2 to 4, by architecture."""

from __future__ import annotations

from collections.abc import Mapping

from jaxsgl.weights import pieces
from jaxsgl.weights.families.usual import layer_norms
from jaxsgl.weights.recipe import Path, Recipe, Source

_GEMMA = layer_norms(
    attention_out_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    mlp_out_norm="post_feedforward_layernorm",
)
_OF_EMBEDDINGS: dict[Path, Recipe] = {
    **layer_norms(embedding_norm="post_per_layer_input_norm"),
    ("layer_embeddings", "table"): Recipe(
        (Source("model.embed_tokens_per_layer.weight", ("PV", "PL")),), pieces.rows_of_tokens
    ),
    ("layer_embeddings", "projection"): Recipe(
        (Source("model.per_layer_model_projection.weight", ("PL", "D")),), pieces.as_is
    ),
    ("layer_embeddings", "norm"): Recipe((Source("model.per_layer_projection_norm.weight", ("P",)),), pieces.as_is),
    ("embedding_gate", "gate"): Recipe(
        (Source("model.layers.{}.per_layer_input_gate.weight", ("P", "D")),), pieces.as_is
    ),
    ("embedding_gate", "out"): Recipe(
        (Source("model.layers.{}.per_layer_projection.weight", ("D", "P")),), pieces.as_is
    ),
}
_GEMMA4: dict[Path, Recipe] = {
    **_GEMMA,
    **_OF_EMBEDDINGS,
    **layer_norms(
        mlp_part_norm="post_feedforward_layernorm_1",
        experts_part_norm="post_feedforward_layernorm_2",
        experts_norm="pre_feedforward_layernorm_2",
    ),
    ("vectors", "router_norm"): Recipe((Source("model.layers.{}.router.scale", ("D",)),), pieces.router_norm),
    ("vectors", "layer_factor"): Recipe((Source("model.layers.{}.layer_scalar", ("1",)),), pieces.as_is),
}
_ALTUP = "model.layers.{}.altup."
_LAUREL = "model.layers.{}.laurel."

_GEMMA3N: dict[Path, Recipe] = {
    **_GEMMA,
    **_OF_EMBEDDINGS,
    **layer_norms(laurel_norm="laurel.post_laurel_norm", stream_norm="altup.router_norm"),
    ("vectors", "stream_scale"): Recipe((Source(_ALTUP + "correct_output_scale", ("D",)),), pieces.as_is),
    ("vectors", "stream_router"): Recipe((Source(_ALTUP + "modality_router.weight", ("S", "D")),), pieces.as_is),
    ("vectors", "stream_predictions"): Recipe((Source(_ALTUP + "prediction_coefs.weight", ("SS", "S")),), pieces.as_is),
    ("vectors", "stream_corrections"): Recipe((Source(_ALTUP + "correction_coefs.weight", ("S", "S")),), pieces.as_is),
    ("streams", "opening"): Recipe((Source("model.altup_projections.*.weight", ("D", "D")),), pieces.stacked),
    ("streams", "closing"): Recipe((Source("model.altup_unembed_projections.*.weight", ("D", "D")),), pieces.stacked),
    ("laurel", "left"): Recipe((Source(_LAUREL + "linear_left.weight", ("R", "D")),), pieces.as_is),
    ("laurel", "right"): Recipe((Source(_LAUREL + "linear_right.weight", ("D", "R")),), pieces.as_is),
}

GEMMA: dict[str, Mapping[Path, Recipe]] = {
    "Gemma2ForCausalLM": _GEMMA,
    "VaultGemmaForCausalLM": layer_norms(mlp_norm="pre_feedforward_layernorm"),
    "Gemma3ForCausalLM": _GEMMA,
    "Gemma3ForConditionalGeneration": _GEMMA,
    "Gemma3nForCausalLM": _GEMMA3N,
    "Gemma3nForConditionalGeneration": _GEMMA3N,
    "Gemma4ForCausalLM": _GEMMA4,
    "Gemma4ForConditionalGeneration": _GEMMA4,
    "Gemma4UnifiedForCausalLM": _GEMMA4,
    "Gemma4UnifiedForConditionalGeneration": _GEMMA4,
}
