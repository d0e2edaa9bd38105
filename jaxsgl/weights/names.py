"""Maps Hugging Face tensor names to our parameters, as data: the recipe of each parameter, by architecture.

Owns these tables. Knows no files, whose names for the same tensors are in `stored_names.py`, and not how tensors fill a
parameter (`pieces.py`). Experts are in `experts.py`, a vision tower in `tower_names.py`, tensors that make no parameter
in `tensor_files.py`. The loader reads the tables through `quantized.py`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial

from jaxsgl.models import ModelArch
from jaxsgl.models.layer_spec import GroupedAttention
from jaxsgl.models.pooling import MAX_DENSE
from jaxsgl.weights import pieces
from jaxsgl.weights.recipe import Path, Pieces, Recipe, Source
from jaxsgl.weights.stored_names import stored_name

_ATTENTION = "model.layers.{}.self_attn."
_DELTA_NET = "model.layers.{}.linear_attn."
_MAMBA = "model.layers.{}.mamba."
_CONV = "model.layers.{}.conv."
_MLP = "model.layers.{}.mlp."
_BLOCK = "model.layers.{}.mixer."  # of layers that are one block

OF_MODEL: dict[Path, Recipe] = {
    ("embedding",): Recipe((Source("model.embed_tokens.weight", ("V", "D")),), pieces.as_is),
    ("final_norm",): Recipe((Source("model.norm.weight", ("D",)),), pieces.norm),
    ("final_norm_bias",): Recipe((Source("model.norm.bias", ("D",)),), pieces.as_is),
    ("positions",): Recipe((Source("model.embed_positions.weight", ("T", "D")),), pieces.as_is),
    ("head_bias",): Recipe((Source("lm_head.bias", ("V",)),), pieces.as_is),
    ("lm_head",): Recipe((Source("lm_head.weight", ("V", "D")),), pieces.as_is),
    ("score",): Recipe((Source("score.weight", ("C", "D")),), pieces.as_is),
    ("types",): Recipe((Source("model.embed_types.weight", ("TT", "D")),), pieces.as_is),
    ("distance_biases",): Recipe((Source("model.distance_biases.weight", ("TB", "N")),), pieces.as_is),
    ("class_net", "dense"): Recipe((Source("model.pooler.weight", ("D", "D")),), pieces.as_is),
    ("class_net", "dense_bias"): Recipe((Source("model.pooler.bias", ("D",)),), pieces.as_is),
    ("class_net", "norm"): Recipe((Source("model.pooler_norm.weight", ("D",)),), pieces.as_is),
    ("class_net", "classes"): Recipe((Source("classifier.weight", ("C", "D")),), pieces.as_is),
    ("class_net", "classes_bias"): Recipe((Source("classifier.bias", ("C",)),), pieces.as_is),
}

for _index in range(MAX_DENSE):
    _source = Source(f"dense.{_index}.weight", (f"DO{_index}", f"DI{_index}"))
    OF_MODEL["dense_net", f"matrix_{_index}"] = Recipe((_source,), pieces.as_is)
    OF_MODEL["dense_net", f"bias_{_index}"] = Recipe((Source(f"dense.{_index}.bias", (f"DO{_index}",)),), pieces.as_is)

# Of a `next_arch`: what is around the checkpoint's layer after the last one.
OF_NEXT_LAYER: dict[Path, Recipe] = {
    ("token_norm",): Recipe((Source("model.layers.{}.enorm.weight", ("D",)),), pieces.norm),
    ("state_norm",): Recipe((Source("model.layers.{}.hnorm.weight", ("D",)),), pieces.norm),
    ("joined",): Recipe((Source("model.layers.{}.eh_proj.weight", ("D", "2D")),), pieces.as_is),
    ("final_norm",): Recipe((Source("model.layers.{}.shared_head.norm.weight", ("D",)),), pieces.norm),
}

# A row per layer, in one array.
OF_ALL_LAYERS: dict[Path, Recipe] = {
    ("vectors", "attention_norm"): Recipe((Source("model.layers.{}.input_layernorm.weight", ("D",)),), pieces.norm),
    ("vectors", "mlp_norm"): Recipe((Source("model.layers.{}.post_attention_layernorm.weight", ("D",)),), pieces.norm),
    ("vectors", "attention_norm_bias"): Recipe((Source("model.layers.{}.input_layernorm.bias", ("D",)),), pieces.as_is),
    ("vectors", "mlp_norm_bias"): Recipe(
        (Source("model.layers.{}.post_attention_layernorm.bias", ("D",)),), pieces.as_is
    ),
    ("vectors", "q_norm"): Recipe((Source(_ATTENTION + "q_norm.weight", ("H",)),), pieces.head_norm),
    ("vectors", "k_norm"): Recipe((Source(_ATTENTION + "k_norm.weight", ("H",)),), pieces.head_norm),
    ("vectors", "qkv_bias"): Recipe(
        (
            Source(_ATTENTION + "q_proj.bias", ("NH",)),
            Source(_ATTENTION + "k_proj.bias", ("KH",)),
            Source(_ATTENTION + "v_proj.bias", ("KH",)),
        ),
        pieces.fuse_heads,
    ),
}

OF_LAYER: dict[Path, Recipe] = {
    ("attention", "qkv"): Recipe(
        (
            Source(_ATTENTION + "q_proj.weight", ("NH", "D")),
            Source(_ATTENTION + "k_proj.weight", ("KH", "D")),
            Source(_ATTENTION + "v_proj.weight", ("KH", "D")),
        ),
        pieces.fuse_heads,
    ),
    ("attention", "o"): Recipe((Source(_ATTENTION + "o_proj.weight", ("D", "NH")),), pieces.as_is),
    ("attention", "o_bias"): Recipe((Source(_ATTENTION + "o_proj.bias", ("D",)),), pieces.as_is),
    ("attention", "gates"): Recipe((Source(_ATTENTION + "gate_proj.weight", ("N", "D")),), pieces.gates_of_heads),
    ("attention", "sinks"): Recipe((Source(_ATTENTION + "sinks", ("N",)),), pieces.as_is),
    ("mlp", "gate_up"): Recipe(
        (Source(_MLP + "gate_proj.weight", ("F", "D")), Source(_MLP + "up_proj.weight", ("F", "D"))), pieces.stacked
    ),
    ("mlp", "gate_up_bias"): Recipe(
        (Source(_MLP + "gate_proj.bias", ("F",)), Source(_MLP + "up_proj.bias", ("F",))), pieces.stacked
    ),
    ("mlp", "down"): Recipe((Source(_MLP + "down_proj.weight", ("D", "F")),), pieces.as_is),
    ("mlp", "down_bias"): Recipe((Source(_MLP + "down_proj.bias", ("D",)),), pieces.as_is),
}


def _layer_norms(**names: str) -> dict[Path, Recipe]:
    """Norms of a layer by our names, with the checkpoint's."""
    return {
        ("vectors", ours): Recipe((Source(f"model.layers.{{}}.{theirs}.weight", ("D",)),), pieces.norm)
        for ours, theirs in names.items()
    }


# Norms without scales.
_BARE_NORMS: dict[Path, Recipe] = {
    path: Recipe((), pieces.ones) for path in (("vectors", "attention_norm"), ("vectors", "mlp_norm"), ("final_norm",))
}
_FUSED_QKV: dict[Path, Recipe] = {
    ("attention", "qkv"): Recipe((Source(_ATTENTION + "qkv_proj.weight", ("QKV", "D")),), pieces.fuse_split_heads)
}
_FUSED_GATE_UP: dict[Path, Recipe] = {
    ("mlp", "gate_up"): Recipe((Source(_MLP + "gate_up_proj.weight", ("2F", "D")),), pieces.split_gate_up)
}
_AFTER = _layer_norms(attention_out_norm="post_attention_layernorm", mlp_out_norm="post_feedforward_layernorm")
_NORMS_OF_ALL_HEADS: dict[Path, Recipe] = {
    ("vectors", "q_norm"): Recipe((Source(_ATTENTION + "q_norm.weight", ("NH",)),), pieces.all_heads_norm),
    ("vectors", "k_norm"): Recipe((Source(_ATTENTION + "k_norm.weight", ("KH",)),), pieces.all_keys_norm),
}
_HUNYUAN: dict[Path, Recipe] = {
    ("vectors", "q_norm"): Recipe((Source(_ATTENTION + "query_layernorm.weight", ("H",)),), pieces.head_norm),
    ("vectors", "k_norm"): Recipe((Source(_ATTENTION + "key_layernorm.weight", ("H",)),), pieces.head_norm),
}
_GEMMA = _layer_norms(
    attention_out_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    mlp_out_norm="post_feedforward_layernorm",
)

_OF_EMBEDDINGS: dict[Path, Recipe] = {
    **_layer_norms(embedding_norm="post_per_layer_input_norm"),
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
    **_layer_norms(
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
    **_layer_norms(laurel_norm="laurel.post_laurel_norm", stream_norm="altup.router_norm"),
    ("vectors", "stream_scale"): Recipe((Source(_ALTUP + "correct_output_scale", ("D",)),), pieces.as_is),
    ("vectors", "stream_router"): Recipe((Source(_ALTUP + "modality_router.weight", ("S", "D")),), pieces.as_is),
    ("vectors", "stream_predictions"): Recipe((Source(_ALTUP + "prediction_coefs.weight", ("SS", "S")),), pieces.as_is),
    ("vectors", "stream_corrections"): Recipe((Source(_ALTUP + "correction_coefs.weight", ("S", "S")),), pieces.as_is),
    ("streams", "opening"): Recipe((Source("model.altup_projections.*.weight", ("D", "D")),), pieces.stacked),
    ("streams", "closing"): Recipe((Source("model.altup_unembed_projections.*.weight", ("D", "D")),), pieces.stacked),
    ("laurel", "left"): Recipe((Source(_LAUREL + "linear_left.weight", ("R", "D")),), pieces.as_is),
    ("laurel", "right"): Recipe((Source(_LAUREL + "linear_right.weight", ("D", "R")),), pieces.as_is),
}
# Of layers that lack projections.
_READS_KEYS: dict[Path, Recipe] = {
    ("attention", "qkv"): Recipe((Source(_ATTENTION + "q_proj.weight", ("NH", "D")),), pieces.queries_alone)
}
_VALUES_ARE_KEYS: dict[Path, Recipe] = {
    ("attention", "qkv"): Recipe(
        (
            Source(_ATTENTION + "q_proj.weight", ("NH", "D")),
            Source(_ATTENTION + "k_proj.weight", ("KH", "D")),
            Source(_ATTENTION + "k_proj.weight", ("KH", "D")),
        ),
        pieces.fuse_heads,
    ),
}

# Where each number of attention's output has a gate, in a matrix of its own.
_GATED_NUMBERS: dict[Path, Recipe] = {
    ("attention", "qkv"): Recipe(
        (
            Source(_ATTENTION + "q_proj.weight", ("NH", "D")),
            Source(_ATTENTION + "k_proj.weight", ("KH", "D")),
            Source(_ATTENTION + "v_proj.weight", ("KH", "D")),
            Source(_ATTENTION + "gate_proj.weight", ("NH", "D")),
        ),
        pieces.fuse_heads_and_gates,
    ),
}
_NARROW_VALUES: dict[Path, Recipe] = {
    ("attention", "qkv"): Recipe(
        (
            Source(_ATTENTION + "q_proj.weight", ("NH", "D")),
            Source(_ATTENTION + "k_proj.weight", ("KH", "D")),
            Source(_ATTENTION + "v_proj.weight", ("KV", "D")),
        ),
        pieces.fuse_heads,
    ),
    ("attention", "o"): Recipe((Source(_ATTENTION + "o_proj.weight", ("D", "NV")),), pieces.as_is),
}

_LATENT: dict[Path, Recipe] = {
    ("attention", "q"): Recipe((Source(_ATTENTION + "q_proj.weight", ("NLQ", "D")),), pieces.latent_queries),
    ("attention", "q_a"): Recipe((Source(_ATTENTION + "q_a_proj.weight", ("LQ", "D")),), pieces.as_is),
    ("attention", "q_a_norm"): Recipe((Source(_ATTENTION + "q_a_layernorm.weight", ("LQ",)),), pieces.as_is),
    ("attention", "q_b"): Recipe((Source(_ATTENTION + "q_b_proj.weight", ("NLQ", "LQ")),), pieces.latent_queries),
    ("attention", "kv_a"): Recipe(
        (Source(_ATTENTION + "kv_a_proj_with_mqa.weight", ("LE", "D")),), pieces.latent_entries
    ),
    ("attention", "kv_a_norm"): Recipe((Source(_ATTENTION + "kv_a_layernorm.weight", ("LC",)),), pieces.latent_norm),
    ("attention", "kv_b"): Recipe((Source(_ATTENTION + "kv_b_proj.weight", ("NLB", "LC")),), pieces.latent_matrices),
    ("attention", "q_a_bias"): Recipe((Source(_ATTENTION + "q_a_proj.bias", ("LQ",)),), pieces.as_is),
    ("attention", "kv_a_bias"): Recipe(
        (Source(_ATTENTION + "kv_a_proj_with_mqa.bias", ("LE",)),), pieces.latent_entries
    ),
    ("attention", "o"): Recipe((Source(_ATTENTION + "o_proj.weight", ("D", "NLV")),), pieces.as_is),
}

_GROUPS = _ATTENTION + "compressor."
_OF_INDEX = _GROUPS + "indexer."


def _of_groups(*, has_index: bool) -> dict[Path, Recipe]:
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
        ("attention", "group_norm"): Recipe(both("kv_norm.weight", ("H",), ("AI",)), pieces.one_after_another),
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
    ("attention", "q_a"): Recipe((Source(_ATTENTION + "q_a_proj.weight", ("AQ", "D")),), pieces.as_is),
    ("attention", "q_a_norm"): Recipe((Source(_ATTENTION + "q_a_norm.weight", ("AQ",)),), pieces.as_is),
    ("attention", "q_b"): Recipe((Source(_ATTENTION + "q_b_proj.weight", ("NH", "AQ")),), pieces.by_head),
    ("attention", "kv"): Recipe((Source(_ATTENTION + "kv_proj.weight", ("H", "D")),), pieces.as_is),
    ("attention", "kv_norm"): Recipe((Source(_ATTENTION + "kv_norm.weight", ("H",)),), pieces.as_is),
    ("attention", "o_a"): Recipe((Source(_ATTENTION + "o_a_proj.weight", ("AO", "AG")),), pieces.by_out_group),
    ("attention", "o_b"): Recipe((Source(_ATTENTION + "o_b_proj.weight", ("D", "AO")),), pieces.as_is),
    ("attention", "index_q"): Recipe((Source(_OF_INDEX + "q_b_proj.weight", ("AHI", "AQ")),), pieces.by_index_head),
    ("attention", "index_weights"): Recipe(
        (Source(_OF_INDEX + "scorer.weights_proj.weight", ("AH", "D")),), pieces.as_is
    ),
    **_of_groups(has_index=True),
    **_of_connections("mixer_connection", "model.layers.{}.attn_hc."),
    **_of_connections("mlp_connection", "model.layers.{}.ffn_hc."),
    **_of_connections("last_connection", "model.hc_head.hc_"),
}

_INDEX = _ATTENTION + "indexer."
_INDEXED: dict[Path, Recipe] = {
    **_LATENT,
    ("attention", "index_q"): Recipe((Source(_INDEX + "wq_b.weight", ("LHI", "LQ")),), pieces.index_queries),
    ("attention", "index_k"): Recipe((Source(_INDEX + "wk.weight", ("LI", "D")),), pieces.index_keys),
    ("attention", "index_k_norm"): Recipe((Source(_INDEX + "k_norm.weight", ("LI",)),), pieces.index_keys),
    ("attention", "index_k_norm_bias"): Recipe((Source(_INDEX + "k_norm.bias", ("LI",)),), pieces.index_keys),
    ("attention", "index_weights"): Recipe((Source(_INDEX + "weights_proj.weight", ("LH", "D")),), pieces.as_is),
}

_HYBRID: dict[Path, Recipe] = {
    ("attention", "qkv"): Recipe(
        (
            Source(_ATTENTION + "q_proj.weight", ("2NH", "D")),
            Source(_ATTENTION + "k_proj.weight", ("KH", "D")),
            Source(_ATTENTION + "v_proj.weight", ("KH", "D")),
        ),
        pieces.fuse_gated_heads,
    ),
    ("vectors", "qkv_bias"): Recipe(
        (
            Source(_ATTENTION + "q_proj.bias", ("2NH",)),
            Source(_ATTENTION + "k_proj.bias", ("KH",)),
            Source(_ATTENTION + "v_proj.bias", ("KH",)),
        ),
        pieces.fuse_without_gates,
    ),
    ("vectors", "gate_bias"): Recipe((Source(_ATTENTION + "q_proj.bias", ("2NH",)),), pieces.gates),
    ("delta_net", "inputs"): Recipe(
        (
            Source(_DELTA_NET + "in_proj_qkv.weight", ("GC", "D")),
            Source(_DELTA_NET + "in_proj_z.weight", ("GV", "D")),
            Source(_DELTA_NET + "in_proj_b.weight", ("GN", "D")),
            Source(_DELTA_NET + "in_proj_a.weight", ("GN", "D")),
        ),
        pieces.delta_inputs,
    ),
    ("delta_net", "qkvz"): Recipe(
        (
            Source(_DELTA_NET + "in_proj_qkv.weight", ("GC", "D")),
            Source(_DELTA_NET + "in_proj_z.weight", ("GV", "D")),
        ),
        pieces.delta_inputs,
    ),
    ("delta_net", "gates"): Recipe(
        (
            Source(_DELTA_NET + "in_proj_b.weight", ("GN", "D")),
            Source(_DELTA_NET + "in_proj_a.weight", ("GN", "D")),
        ),
        pieces.delta_inputs_by_head,
    ),
    ("delta_net", "output"): Recipe((Source(_DELTA_NET + "out_proj.weight", ("D", "GV")),), pieces.as_is),
    ("vectors", "delta_taps"): Recipe((Source(_DELTA_NET + "conv1d.weight", ("GC", "1", "GT")),), pieces.delta_taps),
    ("vectors", "delta_decay"): Recipe(
        (Source(_DELTA_NET + "A_log", ("GN",)), Source(_DELTA_NET + "dt_bias", ("GN",))), pieces.delta_rates
    ),
    ("vectors", "delta_norm"): Recipe((Source(_DELTA_NET + "norm.weight", ("GH",)),), pieces.as_is),
}
_QWEN3_NEXT: dict[Path, Recipe] = {
    **_HYBRID,
    ("delta_net", "inputs"): Recipe(
        (
            Source(_DELTA_NET + "in_proj_qkvz.weight", ("GCV", "D")),
            Source(_DELTA_NET + "in_proj_ba.weight", ("G2N", "D")),
        ),
        pieces.delta_inputs_by_head,
    ),
    ("delta_net", "qkvz"): Recipe(
        (Source(_DELTA_NET + "in_proj_qkvz.weight", ("GCV", "D")),), pieces.delta_inputs_by_head
    ),
    ("delta_net", "gates"): Recipe(
        (Source(_DELTA_NET + "in_proj_ba.weight", ("G2N", "D")),), pieces.delta_inputs_by_head
    ),
}


def _delta_parts(*names: str) -> Recipe:
    """What makes each of q, k, v, z, b and a by itself, or some of these."""
    axes = {"q": "GK", "k": "GK", "v": "GV", "g": "GV", "b": "GN", "a": "GN"}
    sources = (Source(f"{_DELTA_NET}{name}_proj.weight", (axes[name], "D")) for name in names)
    return Recipe(tuple(sources), pieces.delta_inputs_by_head)


_OLMO_HYBRID: dict[Path, Recipe] = {
    **_AFTER,
    **_NORMS_OF_ALL_HEADS,
    ("delta_net", "inputs"): _delta_parts("q", "k", "v", "g", "b", "a"),
    ("delta_net", "qkvz"): _delta_parts("q", "k", "v", "g"),
    ("delta_net", "gates"): _delta_parts("b", "a"),
    ("delta_net", "output"): Recipe((Source(_DELTA_NET + "o_proj.weight", ("D", "GV")),), pieces.as_is),
    ("vectors", "delta_taps"): Recipe(
        tuple(
            Source(f"{_DELTA_NET}{name}_conv1d.weight", (f"G{axis}", "1", "GT")) for name, axis in ("qK", "kK", "vV")
        ),
        pieces.delta_taps_apart,
    ),
    ("vectors", "delta_decay"): _HYBRID["vectors", "delta_decay"],
    ("vectors", "delta_norm"): Recipe((Source(_DELTA_NET + "o_norm.weight", ("GH",)),), pieces.as_is),
}


def _of_kimi(*names: str) -> Recipe:
    """What makes each of q, k, v and b by itself, or some of these."""
    sources = tuple(Source(f"{_ATTENTION}{name}_proj.weight", ("GN" if name == "b" else "GK", "D")) for name in names)
    return Recipe(sources, pieces.delta_inputs_by_head)


_KIMI_LINEAR: dict[Path, Recipe] = {
    **_LATENT,
    ("channel_delta_net", "inputs"): _of_kimi("q", "k", "v", "b"),
    ("channel_delta_net", "qkvz"): _of_kimi("q", "k", "v"),
    ("channel_delta_net", "gates"): _of_kimi("b"),
    ("channel_delta_net", "low"): Recipe(
        tuple(Source(f"{_ATTENTION}{name}_a_proj.weight", ("GR", "D")) for name in "fg"), pieces.stacked
    ),
    ("channel_delta_net", "read_gates"): Recipe(
        (Source(_ATTENTION + "g_b_proj.weight", ("GV", "GR")),), pieces.by_key_head
    ),
    ("channel_delta_net", "decays"): Recipe(
        (Source(_ATTENTION + "f_b_proj.weight", ("GK", "GR")),), pieces.by_key_head
    ),
    ("channel_delta_net", "output"): Recipe((Source(_ATTENTION + "o_proj.weight", ("D", "GV")),), pieces.as_is),
    ("vectors", "delta_taps"): Recipe(
        tuple(Source(f"{_ATTENTION}{name}_conv1d.weight", ("GK", "1", "GT")) for name in "qkv"),
        pieces.delta_taps_apart,
    ),
    ("vectors", "delta_decay"): Recipe(
        (Source(_ATTENTION + "A_log", ("1", "1", "GN", "1")), Source(_ATTENTION + "dt_bias", ("GK",))),
        pieces.channel_rates,
    ),
    ("vectors", "delta_norm"): Recipe((Source(_ATTENTION + "o_norm.weight", ("GH",)),), pieces.as_is),
}

_OF_MAMBA: dict[Path, Recipe] = {
    ("mamba", "inputs"): Recipe((Source(_MAMBA + "in_proj.weight", ("GI", "D")),), pieces.mamba_inputs),
    ("mamba", "qkvz"): Recipe((Source(_MAMBA + "in_proj.weight", ("GI", "D")),), pieces.mamba_channels_and_gates),
    ("mamba", "gates"): Recipe((Source(_MAMBA + "in_proj.weight", ("GI", "D")),), pieces.mamba_steps),
    ("mamba", "output"): Recipe((Source(_MAMBA + "out_proj.weight", ("D", "GV")),), pieces.as_is),
    ("vectors", "mamba_taps"): Recipe((Source(_MAMBA + "conv1d.weight", ("GC", "1", "GT")),), pieces.mamba_taps),
    ("vectors", "mamba_bias"): Recipe((Source(_MAMBA + "conv1d.bias", ("GC",)),), pieces.mamba_bias),
    ("vectors", "mamba_rates"): Recipe(
        tuple(Source(_MAMBA + name, ("GN",)) for name in ("A_log", "dt_bias", "D")), pieces.by_value_head
    ),
    ("vectors", "mamba_norm"): Recipe((Source(_MAMBA + "norm.weight", ("GV",)),), pieces.mamba_norm),
}


def _in_blocks(recipes: Mapping[Path, Recipe]) -> dict[Path, Recipe]:
    """The recipes where mixers and MLPs are blocks of one name."""

    def renamed(source: Source) -> Source:
        name = source.name
        for kind in (_ATTENTION, _MAMBA, _MLP):
            name = name.replace(kind, _BLOCK)
        return replace(source, name=name)

    return {path: replace(each, sources=tuple(map(renamed, each.sources))) for path, each in recipes.items()}


# MLPs that have another name.
_FEED_FORWARD: dict[Path, Recipe] = {
    path: replace(
        recipe,
        sources=tuple(replace(each, name=each.name.replace(".mlp.", ".feed_forward.")) for each in recipe.sources),
    )
    for path, recipe in OF_LAYER.items()
    if path[0] == "mlp"
}
_BAMBA: dict[Path, Recipe] = {
    **_OF_MAMBA,
    **_FEED_FORWARD,
    **_layer_norms(mlp_norm="pre_ff_layernorm"),
    ("final_norm",): Recipe((Source("model.final_layernorm.weight", ("D",)),), pieces.norm),
}
_LOW_NORMS = {"dt": "GR", "b": "GK", "c": "GK"}
_JAMBA: dict[Path, Recipe] = {
    **_FEED_FORWARD,
    **_layer_norms(mlp_norm="pre_ff_layernorm"),
    ("final_norm",): Recipe((Source("model.final_layernorm.weight", ("D",)),), pieces.norm),
    ("selective", "inputs"): Recipe((Source(_MAMBA + "in_proj.weight", ("G2V", "D")),), pieces.by_key_head),
    ("selective", "output"): Recipe((Source(_MAMBA + "out_proj.weight", ("D", "GV")),), pieces.as_is),
    ("selective", "channels"): Recipe(
        (
            Source(_MAMBA + "conv1d.weight", ("GC", "1", "GT")),
            *(Source(_MAMBA + name, ("GC",)) for name in ("conv1d.bias", "dt_proj.bias", "D")),
        ),
        pieces.of_channels,
    ),
    ("selective", "rates"): Recipe((Source(_MAMBA + "A_log", ("GC", "GK")),), pieces.transposed),
    ("selective", "low"): Recipe((Source(_MAMBA + "x_proj.weight", ("GX", "GC")),), pieces.as_is),
    ("selective", "low_norms"): Recipe(
        tuple(Source(f"{_MAMBA}{name}_layernorm.weight", (axis,)) for name, axis in _LOW_NORMS.items()),
        pieces.in_rows,
    ),
    ("selective", "steps"): Recipe((Source(_MAMBA + "dt_proj.weight", ("GC", "GR")),), pieces.as_is),
}
_NEMOTRON_H: dict[Path, Recipe] = {
    **_in_blocks(OF_LAYER),
    **_in_blocks(_OF_MAMBA),
    **_layer_norms(attention_norm="norm"),
    ("embedding",): Recipe((Source("model.embeddings.weight", ("V", "D")),), pieces.as_is),
    ("final_norm",): Recipe((Source("model.norm_f.weight", ("D",)),), pieces.norm),
}
_LFM2: dict[Path, Recipe] = {
    **_layer_norms(attention_norm="operator_norm", mlp_norm="ffn_norm"),
    ("attention", "o"): Recipe((Source(_ATTENTION + "out_proj.weight", ("D", "NH")),), pieces.as_is),
    ("vectors", "q_norm"): Recipe((Source(_ATTENTION + "q_layernorm.weight", ("H",)),), pieces.head_norm),
    ("vectors", "k_norm"): Recipe((Source(_ATTENTION + "k_layernorm.weight", ("H",)),), pieces.head_norm),
    ("conv", "inputs"): Recipe((Source(_CONV + "in_proj.weight", ("G3C", "D")),), pieces.conv_inputs),
    ("conv", "output"): Recipe((Source(_CONV + "out_proj.weight", ("D", "GV")),), pieces.as_is),
    ("vectors", "conv_taps"): Recipe((Source(_CONV + "conv.weight", ("GC", "1", "GT")),), pieces.conv_taps),
    ("mlp", "gate_up"): Recipe(
        tuple(Source(f"model.layers.{{}}.feed_forward.{name}.weight", ("F", "D")) for name in ("w1", "w3")),
        pieces.stacked,
    ),
    ("mlp", "down"): Recipe((Source("model.layers.{}.feed_forward.w2.weight", ("D", "F")),), pieces.as_is),
    ("final_norm",): Recipe((Source("model.embedding_norm.weight", ("D",)),), pieces.norm),
}
_LFM3: dict[Path, Recipe] = {
    **{path: recipe for path, recipe in _LFM2.items() if path[-1] not in ("o", "q_norm", "k_norm")},
    **_layer_norms(attention_out_norm="post_operator_norm", mlp_out_norm="post_ffn_norm"),
}
_AFMOE: dict[Path, Recipe] = {
    **_layer_norms(
        attention_out_norm="post_attention_layernorm", mlp_norm="pre_mlp_layernorm", mlp_out_norm="post_mlp_layernorm"
    ),
}
_COHERE: dict[Path, Recipe] = {
    ("vectors", "q_norm"): Recipe((Source(_ATTENTION + "q_norm.weight", ("N", "H")),), pieces.all_heads_norm),
    ("vectors", "k_norm"): Recipe((Source(_ATTENTION + "k_norm.weight", ("K", "H")),), pieces.all_keys_norm),
}


def _with_bias(
    path: Path, matrix: str, axes: tuple[str, str], of_rows: Pieces, *, is_transposed: bool = False
) -> dict[Path, Recipe]:
    """A matrix of a layer and its bias; of attention's inputs that is in a stack."""
    of_matrix = partial(pieces.of_transposed, of_rows) if is_transposed else of_rows
    source = Source(
        f"model.layers.{{}}.{matrix}.weight", axes[::-1] if is_transposed else axes, is_transposed=is_transposed
    )
    bias = ("vectors", "qkv_bias") if path == ("attention", "qkv") else (path[0], f"{path[1]}_bias")
    return {
        path: Recipe((source,), of_matrix),
        bias: Recipe((Source(f"model.layers.{{}}.{matrix}.bias", axes[:1]),), of_rows),
    }


def _without_gates(up: str, down: str, *, is_transposed: bool = False) -> dict[Path, Recipe]:
    """An MLP of two matrices with these names."""
    return {
        **_with_bias(("mlp", "gate_up"), up, ("F", "D"), pieces.stacked, is_transposed=is_transposed),
        **_with_bias(("mlp", "down"), down, ("D", "F"), pieces.as_is, is_transposed=is_transposed),
    }


def _biased_norms(**names: str) -> dict[Path, Recipe]:
    """`_layer_norms`, and their biases."""
    biases: dict[Path, Recipe] = {
        ("vectors", f"{ours}_bias"): Recipe((Source(f"model.layers.{{}}.{theirs}.bias", ("D",)),), pieces.as_is)
        for ours, theirs in names.items()
    }
    return {**_layer_norms(**names), **biases}


_GTE: dict[Path, Recipe] = {
    **_with_bias(("attention", "qkv"), "self_attn.qkv_proj", ("QKV", "D"), pieces.fuse_split_heads),
    ("mlp", "gate_up"): Recipe((Source(_MLP + "up_gate_proj.weight", ("2F", "D")),), pieces.split_up_gate),
}
_STABLE_LM: dict[Path, Recipe] = {
    ("vectors", f"{part}_norm"): Recipe(
        (Source(_ATTENTION + f"{part}_layernorm.norms.*.weight", ("H",)),), partial(pieces.norms_of_heads, of_all)
    )
    for part, of_all in (("q", pieces.all_heads_norm), ("k", pieces.all_keys_norm))
}
_PHI: dict[Path, Recipe] = {
    **_with_bias(("attention", "o"), "self_attn.dense", ("D", "NH"), pieces.as_is),
    **_without_gates("mlp.fc1", "mlp.fc2"),
    ("final_norm",): Recipe((Source("model.final_layernorm.weight", ("D",)),), pieces.norm),
    ("final_norm_bias",): Recipe((Source("model.final_layernorm.bias", ("D",)),), pieces.as_is),
}
_GPT_NEOX: dict[Path, Recipe] = {
    **_with_bias(("attention", "qkv"), "attention.query_key_value", ("QKV", "D"), pieces.heads_by_group),
    **_with_bias(("attention", "o"), "attention.dense", ("D", "NH"), pieces.as_is),
    **_without_gates("mlp.dense_h_to_4h", "mlp.dense_4h_to_h"),
}
_FALCON: dict[Path, Recipe] = {
    **_with_bias(("attention", "qkv"), "self_attention.query_key_value", ("QKV", "D"), pieces.heads_by_group),
    **_with_bias(("attention", "o"), "self_attention.dense", ("D", "NH"), pieces.as_is),
    **_without_gates("mlp.dense_h_to_4h", "mlp.dense_4h_to_h"),
}
_GPT2: dict[Path, Recipe] = {
    **_biased_norms(attention_norm="ln_1", mlp_norm="ln_2"),
    **_with_bias(("attention", "qkv"), "attn.c_attn", ("QKV", "D"), pieces.fuse_split_heads, is_transposed=True),
    **_with_bias(("attention", "o"), "attn.c_proj", ("D", "NH"), pieces.as_is, is_transposed=True),
    **_without_gates("mlp.c_fc", "mlp.c_proj", is_transposed=True),
}
_GPT_BIGCODE: dict[Path, Recipe] = {
    **_biased_norms(attention_norm="ln_1", mlp_norm="ln_2"),
    **_with_bias(("attention", "qkv"), "attn.c_attn", ("QKV", "D"), pieces.fuse_split_heads),
    **_with_bias(("attention", "o"), "attn.c_proj", ("D", "NH"), pieces.as_is),
    **_without_gates("mlp.c_fc", "mlp.c_proj"),
}
_IN_ATTN = "model.layers.{}.attn."
_GPT_J: dict[Path, Recipe] = {
    **_biased_norms(attention_norm="ln_1"),
    ("attention", "qkv"): Recipe(
        (
            Source(_IN_ATTN + "q_proj.weight", ("NH", "D")),
            Source(_IN_ATTN + "k_proj.weight", ("KH", "D")),
            Source(_IN_ATTN + "v_proj.weight", ("KH", "D")),
        ),
        pieces.fuse_heads,
    ),
    ("attention", "o"): Recipe((Source(_IN_ATTN + "out_proj.weight", ("D", "NH")),), pieces.as_is),
    **_without_gates("mlp.fc_in", "mlp.fc_out"),
}
_OPT: dict[Path, Recipe] = {
    **_biased_norms(attention_norm="self_attn_layer_norm", mlp_norm="final_layer_norm"),
    **_with_bias(("attention", "o"), "self_attn.out_proj", ("D", "NH"), pieces.as_is),
    **_without_gates("fc1", "fc2"),
}
_APERTUS: dict[Path, Recipe] = {
    **_layer_norms(attention_norm="attention_layernorm", mlp_norm="feedforward_layernorm"),
    ("mlp", "curve"): Recipe(
        tuple(Source(f"{_MLP}act_fn.{name}", ("1",)) for name in ("alpha_p", "alpha_n")), pieces.xielu_curve
    ),
}
_GLM4: dict[Path, Recipe] = {
    **_layer_norms(attention_out_norm="post_self_attn_layernorm", mlp_out_norm="post_mlp_layernorm"),
    **_FUSED_GATE_UP,
}
_HYPERCLOVAX = _layer_norms(attention_out_norm="post_norm1", mlp_out_norm="post_norm2")
_SHARED_MLP = "model.layers.{}.shared_mlp."
_GRANITE_HYBRID: dict[Path, Recipe] = {
    **_OF_MAMBA,
    ("mlp", "gate_up"): Recipe((Source(_SHARED_MLP + "input_linear.weight", ("2F", "D")),), pieces.split_gate_up),
    ("mlp", "down"): Recipe((Source(_SHARED_MLP + "output_linear.weight", ("D", "F")),), pieces.as_is),
}

# Recipes that differ from those above, or are missing there, by architecture.
OF_FAMILY: dict[str, Mapping[Path, Recipe]] = {
    "Phi3ForCausalLM": {**_FUSED_QKV, **_FUSED_GATE_UP},
    "ModernBertModel": {**_FUSED_QKV, **_FUSED_GATE_UP},
    "NomicBertModel": _FUSED_QKV,
    **dict.fromkeys(("NewModel", "GteModel"), _GTE),
    "ApertusForCausalLM": _APERTUS,
    "Olmo2ForCausalLM": {**_AFTER, **_NORMS_OF_ALL_HEADS},
    "Olmo3ForCausalLM": {**_AFTER, **_NORMS_OF_ALL_HEADS},
    "OlmoeForCausalLM": _NORMS_OF_ALL_HEADS,
    "MiniMaxM2ForCausalLM": _NORMS_OF_ALL_HEADS,
    "AfmoeForCausalLM": _AFMOE,
    "FlexOlmoForCausalLM": {**_AFTER, **_NORMS_OF_ALL_HEADS},
    "Exaone4ForCausalLM": _AFTER,
    "Exaone4_5_ForConditionalGeneration": _AFTER,
    "HyperCLOVAXForCausalLM": _HYPERCLOVAX,
    "Kolibri1ForCausalLM": _layer_norms(attention_out_norm="post_attn_norm", mlp_out_norm="post_ffn_norm"),
    "HunYuanDenseV1ForCausalLM": _HUNYUAN,
    "HunYuanMoEV1ForCausalLM": _HUNYUAN,
    "Llama4ForCausalLM": _FEED_FORWARD,
    "Llama4ForConditionalGeneration": _FEED_FORWARD,
    "GlmForCausalLM": _FUSED_GATE_UP,
    "Glm4ForCausalLM": _GLM4,
    "BailingMoeV2ForCausalLM": _FUSED_QKV,
    "SarvamMoEForCausalLM": _FUSED_QKV,
    "SarvamMLAForCausalLM": _LATENT,
    "Glm4vForConditionalGeneration": _GLM4,
    "GlmOcrForConditionalGeneration": _GLM4,
    "DeepseekV2ForCausalLM": _LATENT,
    "DeepseekV3ForCausalLM": _LATENT,
    "DeepseekV32ForCausalLM": _INDEXED,
    "DeepseekV4ForCausalLM": _GROUPED,
    "GlmMoeDsaForCausalLM": _INDEXED,
    "Kimi_K25ForConditionalGeneration": _LATENT,
    "AXK1ForCausalLM": {**_LATENT, **_layer_norms(mlp_out_norm="post_mlp_layernorm")},
    "YoutuForCausalLM": _LATENT,
    "LongcatFlashForCausalLM": _LATENT,
    "MiniCPM3ForCausalLM": _LATENT,
    "Mistral4ForCausalLM": _LATENT,
    "Mistral4ForConditionalGeneration": _LATENT,
    "Glm4MoeLiteForCausalLM": _LATENT,
    "BambaForCausalLM": _BAMBA,
    "FalconH1ForCausalLM": _BAMBA,
    "CohereForCausalLM": _COHERE,
    "Starcoder2ForCausalLM": _without_gates("mlp.c_fc", "mlp.c_proj"),
    "StableLmForCausalLM": _STABLE_LM,
    "OlmoForCausalLM": _BARE_NORMS,
    "NanoChatForCausalLM": {**_BARE_NORMS, **_without_gates("mlp.fc1", "mlp.fc2")},
    "PhiForCausalLM": _PHI,
    "FalconForCausalLM": _FALCON,
    "GPTNeoXForCausalLM": _GPT_NEOX,
    "GPT2LMHeadModel": _GPT2,
    "GPTBigCodeForCausalLM": _GPT_BIGCODE,
    "GPTJForCausalLM": _GPT_J,
    "OPTForCausalLM": _OPT,
    "GraniteMoeHybridForCausalLM": _GRANITE_HYBRID,
    "Lfm2ForCausalLM": _LFM2,
    "Lfm2MoeForCausalLM": _LFM2,
    "Lfm2VlForConditionalGeneration": _LFM2,
    "Lfm3ForCausalLM": _LFM3,
    "NemotronHForCausalLM": _NEMOTRON_H,
    "JambaForCausalLM": _JAMBA,
    "KimiLinearForCausalLM": _KIMI_LINEAR,
    "OlmoHybridForCausalLM": _OLMO_HYBRID,
    "Qwen3NextForCausalLM": _QWEN3_NEXT,
    "Qwen3_5ForCausalLM": _HYBRID,
    "Qwen3_5MoeForCausalLM": _HYBRID,
    "Qwen3_5ForConditionalGeneration": _HYBRID,
    "Qwen3_5MoeForConditionalGeneration": _HYBRID,
    "Gemma2ForCausalLM": _GEMMA,
    "VaultGemmaForCausalLM": _layer_norms(mlp_norm="pre_feedforward_layernorm"),
    "Gemma3ForCausalLM": _GEMMA,
    "Gemma3ForConditionalGeneration": _GEMMA,
    "Gemma3nForCausalLM": _GEMMA3N,
    "Gemma3nForConditionalGeneration": _GEMMA3N,
    "Gemma4ForCausalLM": _GEMMA4,
    "Gemma4ForConditionalGeneration": _GEMMA4,
    "Gemma4UnifiedForCausalLM": _GEMMA4,
    "Gemma4UnifiedForConditionalGeneration": _GEMMA4,
}


def recipe_of(path: Path, arch: ModelArch) -> Recipe:
    """The recipe of the parameter at `path`, with the layers' indices filled in."""
    own = {**OF_FAMILY.get(arch.name, {}), **(OF_NEXT_LAYER if arch.stage.is_next else {})}

    def named(sources: tuple[Source, ...], layer: int | None = None) -> tuple[Source, ...]:
        place = arch.stage.layers_before + (layer or 0)
        return tuple(
            replace(each, name=stored_name(each.name.format(place), arch), layer=layer)
            for source in sources
            for each in _of_each(source, arch)
        )

    if path[0] == "vectors":
        recipe = own.get(path) or OF_ALL_LAYERS[path]
        layers = tuple(_layers_of(str(path[1]), arch))
        rows = [named(recipe.sources, layer) for layer in layers]
        of_layer = recipe.pieces
        if path[1] in ("q_norm", "k_norm") and len(arch.all_heads) > 1:
            of_layer = partial(pieces.padded, of_layer, max(heads.size for heads in arch.all_heads))
        return Recipe(tuple(itertools.chain(*rows)), partial(pieces.stack_layers, of_layer, layers))
    if path[0] != "layers":
        recipe = own.get(path) or OF_MODEL[path]
        return Recipe(named(recipe.sources), recipe.pieces, recipe.computed)
    assert isinstance(path[1], int)
    spec = arch.layers[path[1]]
    own |= _NARROW_VALUES if arch.value_dim is not None else {}
    own = {**_GATED_NUMBERS, **own} if arch.output_gate == "number" else own
    if spec.keys_from is not None or spec.values_are_keys:
        own |= _VALUES_ARE_KEYS if spec.values_are_keys else _READS_KEYS
    if isinstance(spec.mixer, GroupedAttention) and spec.mixer.groups is not None and spec.mixer.groups.index is None:
        own |= _of_groups(has_index=False)
    recipe = own.get(path[2:]) or OF_LAYER[path[2:]]
    if not arch.gated and path[2] == "mlp" and str(path[3]).startswith("gate_up") and len(recipe.sources) > 1:
        recipe = replace(recipe, sources=recipe.sources[1:])  # up alone
    return Recipe(named(recipe.sources, path[1]), recipe.pieces, recipe.computed)


def _of_each(source: Source, arch: ModelArch) -> tuple[Source, ...]:
    """The source, or one of each query head, kv head or further stream where its name has a place for that."""
    if "*" not in source.name:
        return (source,)
    number = arch.num_heads if ".q_" in source.name else arch.stored_kv_heads
    if arch.num_streams > 1:
        number = arch.num_streams - 1
    return tuple(replace(source, name=source.name.replace("*", str(each))) for each in range(number))


def path_in_model(path: Path, arch: ModelArch) -> Path:
    """The path of a parameter of a pipeline stage in the whole model."""
    before = arch.stage.layers_before
    return (path[0], before + path[1], *path[2:]) if path[0] == "layers" and isinstance(path[1], int) else path


def with_heads_at(path: Path, arch: ModelArch) -> ModelArch:
    """The model as if all layers had the kv heads of that which the parameter at `path` belongs to."""
    if path[0] != "layers" or not isinstance(path[1], int):
        return arch
    return arch.with_heads_of(arch.layers[path[1]])


def _layers_of(vectors: str, arch: ModelArch) -> Iterable[int]:
    """The layers that have rows in these vectors: all, or those of one kind."""
    if vectors == "q_norm":
        return arch.attention_layers + arch.reading_layers
    if vectors in ("k_norm", "qkv_bias", "gate_bias"):
        return arch.attention_layers
    if vectors.removesuffix("_bias") in arch.normed:
        return arch.normed[vectors.removesuffix("_bias")]
    return arch.recurrent_layers if vectors.startswith(("delta_", "mamba_", "conv_")) else range(arch.num_layers)
