"""How tensors are called in Llama and most families after it, and what several families have otherwise.

`names.py` takes recipes from here that a family's own table, in the other files of this folder, doesn't have.
"""

from __future__ import annotations

from dataclasses import replace

from jaxsgl.models.pooling import MAX_DENSE
from jaxsgl.weights import pieces
from jaxsgl.weights.recipe import Path, Recipe, Source

ATTENTION = "model.layers.{}.self_attn."
MLP = "model.layers.{}.mlp."

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
    ("vectors", "q_norm"): Recipe((Source(ATTENTION + "q_norm.weight", ("H",)),), pieces.head_norm),
    ("vectors", "k_norm"): Recipe((Source(ATTENTION + "k_norm.weight", ("H",)),), pieces.head_norm),
    ("vectors", "qkv_bias"): Recipe(
        (
            Source(ATTENTION + "q_proj.bias", ("NH",)),
            Source(ATTENTION + "k_proj.bias", ("KH",)),
            Source(ATTENTION + "v_proj.bias", ("KH",)),
        ),
        pieces.fuse_heads,
    ),
}

OF_LAYER: dict[Path, Recipe] = {
    ("attention", "qkv"): Recipe(
        (
            Source(ATTENTION + "q_proj.weight", ("NH", "D")),
            Source(ATTENTION + "k_proj.weight", ("KH", "D")),
            Source(ATTENTION + "v_proj.weight", ("KH", "D")),
        ),
        pieces.fuse_heads,
    ),
    ("attention", "o"): Recipe((Source(ATTENTION + "o_proj.weight", ("D", "NH")),), pieces.as_is),
    ("attention", "o_bias"): Recipe((Source(ATTENTION + "o_proj.bias", ("D",)),), pieces.as_is),
    ("attention", "gates"): Recipe((Source(ATTENTION + "gate_proj.weight", ("N", "D")),), pieces.gates_of_heads),
    ("attention", "sinks"): Recipe((Source(ATTENTION + "sinks", ("N",)),), pieces.as_is),
    ("mlp", "gate_up"): Recipe(
        (Source(MLP + "gate_proj.weight", ("F", "D")), Source(MLP + "up_proj.weight", ("F", "D"))), pieces.stacked
    ),
    ("mlp", "gate_up_bias"): Recipe(
        (Source(MLP + "gate_proj.bias", ("F",)), Source(MLP + "up_proj.bias", ("F",))), pieces.stacked
    ),
    ("mlp", "down"): Recipe((Source(MLP + "down_proj.weight", ("D", "F")),), pieces.as_is),
    ("mlp", "down_bias"): Recipe((Source(MLP + "down_proj.bias", ("D",)),), pieces.as_is),
}


def layer_norms(**names: str) -> dict[Path, Recipe]:
    """Norms of a layer by our names, with the checkpoint's."""
    return {
        ("vectors", ours): Recipe((Source(f"model.layers.{{}}.{theirs}.weight", ("D",)),), pieces.norm)
        for ours, theirs in names.items()
    }


AFTER = layer_norms(attention_out_norm="post_attention_layernorm", mlp_out_norm="post_feedforward_layernorm")
NORMS_OF_ALL_HEADS: dict[Path, Recipe] = {
    ("vectors", "q_norm"): Recipe((Source(ATTENTION + "q_norm.weight", ("NH",)),), pieces.all_heads_norm),
    ("vectors", "k_norm"): Recipe((Source(ATTENTION + "k_norm.weight", ("KH",)),), pieces.all_keys_norm),
}
FUSED_QKV: dict[Path, Recipe] = {
    ("attention", "qkv"): Recipe((Source(ATTENTION + "qkv_proj.weight", ("QKV", "D")),), pieces.fuse_split_heads)
}
FUSED_GATE_UP: dict[Path, Recipe] = {
    ("mlp", "gate_up"): Recipe((Source(MLP + "gate_up_proj.weight", ("2F", "D")),), pieces.split_gate_up)
}
# MLPs that have another name.
FEED_FORWARD: dict[Path, Recipe] = {
    path: replace(
        recipe,
        sources=tuple(replace(each, name=each.name.replace(".mlp.", ".feed_forward.")) for each in recipe.sources),
    )
    for path, recipe in OF_LAYER.items()
    if path[0] == "mlp"
}

# Of layers that lack projections.
READS_KEYS: dict[Path, Recipe] = {
    ("attention", "qkv"): Recipe((Source(ATTENTION + "q_proj.weight", ("NH", "D")),), pieces.queries_alone)
}
VALUES_ARE_KEYS: dict[Path, Recipe] = {
    ("attention", "qkv"): Recipe(
        (
            Source(ATTENTION + "q_proj.weight", ("NH", "D")),
            Source(ATTENTION + "k_proj.weight", ("KH", "D")),
            Source(ATTENTION + "k_proj.weight", ("KH", "D")),
        ),
        pieces.fuse_heads,
    ),
}

# Where each number of attention's output has a gate, in a matrix of its own.
GATED_NUMBERS: dict[Path, Recipe] = {
    ("attention", "qkv"): Recipe(
        (
            Source(ATTENTION + "q_proj.weight", ("NH", "D")),
            Source(ATTENTION + "k_proj.weight", ("KH", "D")),
            Source(ATTENTION + "v_proj.weight", ("KH", "D")),
            Source(ATTENTION + "gate_proj.weight", ("NH", "D")),
        ),
        pieces.fuse_heads_and_gates,
    ),
}
NARROW_VALUES: dict[Path, Recipe] = {
    ("attention", "qkv"): Recipe(
        (
            Source(ATTENTION + "q_proj.weight", ("NH", "D")),
            Source(ATTENTION + "k_proj.weight", ("KH", "D")),
            Source(ATTENTION + "v_proj.weight", ("KV", "D")),
        ),
        pieces.fuse_heads,
    ),
    ("attention", "o"): Recipe((Source(ATTENTION + "o_proj.weight", ("D", "NV")),), pieces.as_is),
}
