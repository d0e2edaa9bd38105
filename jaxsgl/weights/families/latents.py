"""Recipes of families whose layers attend over a latent, some by an index or by groups of tokens, by architecture."""

from __future__ import annotations

from collections.abc import Mapping

from jaxsgl.weights import pieces
from jaxsgl.weights.families.usual import ATTENTION, layer_norms
from jaxsgl.weights.recipe import Path, Recipe, Source

LATENT: dict[Path, Recipe] = {
    ("attention", "q"): Recipe((Source(ATTENTION + "q_proj.weight", ("NLQ", "D")),), pieces.latent_queries),
    ("attention", "q_a"): Recipe((Source(ATTENTION + "q_a_proj.weight", ("LQ", "D")),), pieces.as_is),
    ("attention", "q_a_norm"): Recipe((Source(ATTENTION + "q_a_layernorm.weight", ("LQ",)),), pieces.as_is),
    ("attention", "q_b"): Recipe((Source(ATTENTION + "q_b_proj.weight", ("NLQ", "LQ")),), pieces.latent_queries),
    ("attention", "kv_a"): Recipe(
        (Source(ATTENTION + "kv_a_proj_with_mqa.weight", ("LE", "D")),), pieces.latent_entries
    ),
    ("attention", "kv_a_norm"): Recipe((Source(ATTENTION + "kv_a_layernorm.weight", ("LC",)),), pieces.latent_norm),
    ("attention", "kv_b"): Recipe((Source(ATTENTION + "kv_b_proj.weight", ("NLB", "LC")),), pieces.latent_matrices),
    ("attention", "q_a_bias"): Recipe((Source(ATTENTION + "q_a_proj.bias", ("LQ",)),), pieces.as_is),
    ("attention", "kv_a_bias"): Recipe(
        (Source(ATTENTION + "kv_a_proj_with_mqa.bias", ("LE",)),), pieces.latent_entries
    ),
    ("attention", "o"): Recipe((Source(ATTENTION + "o_proj.weight", ("D", "NLV")),), pieces.as_is),
}
_INDEX = ATTENTION + "indexer."

_INDEXED: dict[Path, Recipe] = {
    **LATENT,
    ("attention", "index_q"): Recipe((Source(_INDEX + "wq_b.weight", ("LHI", "LQ")),), pieces.index_queries),
    ("attention", "index_k"): Recipe((Source(_INDEX + "wk.weight", ("LI", "D")),), pieces.index_keys),
    ("attention", "index_k_norm"): Recipe((Source(_INDEX + "k_norm.weight", ("LI",)),), pieces.index_keys),
    ("attention", "index_k_norm_bias"): Recipe((Source(_INDEX + "k_norm.bias", ("LI",)),), pieces.index_keys),
    ("attention", "index_weights"): Recipe((Source(_INDEX + "weights_proj.weight", ("LH", "D")),), pieces.as_is),
}
_GROUPS = ATTENTION + "compressor."
_OF_INDEX = _GROUPS + "indexer."


def of_groups(*, has_index: bool) -> dict[Path, Recipe]:
    """What makes entries of groups of tokens, and keys of an index in the same way."""

    def both(tensor: str, axes: tuple[str, ...], of_index: tuple[str, ...]) -> tuple[Source, ...]:
        own = Source(_GROUPS + tensor, axes)
        return (own, Source(_OF_INDEX + tensor, of_index)) if has_index else (own,)

    numbers, gates = (both(f"{name}.weight", ("AE", "D"), ("AK", "D")) for name in ("kv_proj", "gate_proj"))
    return {
        ("attention", "group_numbers"): Recipe(numbers, pieces.parts_of_groups),
        ("attention", "group_gates"): Recipe(gates, pieces.parts_of_groups),
        ("attention", "group_bias"): Recipe(
            both("position_bias", ("AM", "AE"), ("AM", "AK")), pieces.parts_of_groups_by_place
        ),
        ("attention", "group_norm"): Recipe(both("kv_norm.weight", ("H",), ("AI",)), pieces.in_rows),
    }


def _of_connections(ours: str, start: str) -> dict[Path, Recipe]:
    """A connection to residual streams; `start` is how names of tensors begin."""
    rows = "AS" if "{}" in start else "AN"
    return {
        (ours, "shares"): Recipe((Source(start + "fn", (rows, "AND")),), pieces.as_is),
        (ours, "bias"): Recipe((Source(start + "base", (rows,)),), pieces.as_is),
        (ours, "scale"): Recipe((Source(start + "scale", ("A3" if "{}" in start else "1",)),), pieces.as_is),
    }


_GROUPED: dict[Path, Recipe] = {
    ("attention", "q_a"): Recipe((Source(ATTENTION + "q_a_proj.weight", ("AQ", "D")),), pieces.as_is),
    ("attention", "q_a_norm"): Recipe((Source(ATTENTION + "q_a_norm.weight", ("AQ",)),), pieces.as_is),
    ("attention", "q_b"): Recipe((Source(ATTENTION + "q_b_proj.weight", ("NH", "AQ")),), pieces.by_head),
    ("attention", "kv"): Recipe((Source(ATTENTION + "kv_proj.weight", ("H", "D")),), pieces.as_is),
    ("attention", "kv_norm"): Recipe((Source(ATTENTION + "kv_norm.weight", ("H",)),), pieces.as_is),
    ("attention", "o_a"): Recipe((Source(ATTENTION + "o_a_proj.weight", ("AO", "AG")),), pieces.by_out_group),
    ("attention", "o_b"): Recipe((Source(ATTENTION + "o_b_proj.weight", ("D", "AO")),), pieces.as_is),
    ("attention", "index_q"): Recipe((Source(_OF_INDEX + "q_b_proj.weight", ("AHI", "AQ")),), pieces.by_index_head),
    ("attention", "index_weights"): Recipe(
        (Source(_OF_INDEX + "scorer.weights_proj.weight", ("AH", "D")),), pieces.as_is
    ),
    **of_groups(has_index=True),
    **_of_connections("mixer_connection", "model.layers.{}.attn_hc."),
    **_of_connections("mlp_connection", "model.layers.{}.ffn_hc."),
    **_of_connections("last_connection", "model.hc_head.hc_"),
}

LATENTS: dict[str, Mapping[Path, Recipe]] = {
    "SarvamMLAForCausalLM": LATENT,
    "DeepseekV2ForCausalLM": LATENT,
    "DeepseekV3ForCausalLM": LATENT,
    "DeepseekV32ForCausalLM": _INDEXED,
    "DeepseekV4ForCausalLM": _GROUPED,
    "GlmMoeDsaForCausalLM": _INDEXED,
    "Kimi_K25ForConditionalGeneration": LATENT,
    "AXK1ForCausalLM": {**LATENT, **layer_norms(mlp_out_norm="post_mlp_layernorm")},
    "YoutuForCausalLM": LATENT,
    "LongcatFlashForCausalLM": LATENT,
    "MiniCPM3ForCausalLM": LATENT,
    "Mistral4ForCausalLM": LATENT,
    "Mistral4ForConditionalGeneration": LATENT,
    "Glm4MoeLiteForCausalLM": LATENT,
}
