"""Recipes of families with layers that keep states: delta-nets, Mamba and short convolutions, by architecture."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from jaxsgl.weights import pieces
from jaxsgl.weights.families.latents import LATENT
from jaxsgl.weights.families.usual import AFTER, ATTENTION, FEED_FORWARD, MLP, NORMS_OF_ALL_HEADS, OF_LAYER, layer_norms
from jaxsgl.weights.recipe import Path, Recipe, Source

_DELTA_NET = "model.layers.{}.linear_attn."
_MAMBA = "model.layers.{}.mamba."
_CONV = "model.layers.{}.conv."
_BLOCK = "model.layers.{}.mixer."  # of layers that are one block

_HYBRID: dict[Path, Recipe] = {
    ("attention", "qkv"): Recipe(
        (
            Source(ATTENTION + "q_proj.weight", ("2NH", "D")),
            Source(ATTENTION + "k_proj.weight", ("KH", "D")),
            Source(ATTENTION + "v_proj.weight", ("KH", "D")),
        ),
        pieces.fuse_gated_heads,
    ),
    ("vectors", "qkv_bias"): Recipe(
        (
            Source(ATTENTION + "q_proj.bias", ("2NH",)),
            Source(ATTENTION + "k_proj.bias", ("KH",)),
            Source(ATTENTION + "v_proj.bias", ("KH",)),
        ),
        pieces.fuse_without_gates,
    ),
    ("vectors", "gate_bias"): Recipe((Source(ATTENTION + "q_proj.bias", ("2NH",)),), pieces.gates),
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
    **AFTER,
    **NORMS_OF_ALL_HEADS,
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
    sources = tuple(Source(f"{ATTENTION}{name}_proj.weight", ("GN" if name == "b" else "GK", "D")) for name in names)
    return Recipe(sources, pieces.delta_inputs_by_head)


_KIMI_LINEAR: dict[Path, Recipe] = {
    **LATENT,
    ("channel_delta_net", "inputs"): _of_kimi("q", "k", "v", "b"),
    ("channel_delta_net", "qkvz"): _of_kimi("q", "k", "v"),
    ("channel_delta_net", "gates"): _of_kimi("b"),
    ("channel_delta_net", "low"): Recipe(
        tuple(Source(f"{ATTENTION}{name}_a_proj.weight", ("GR", "D")) for name in "fg"), pieces.stacked
    ),
    ("channel_delta_net", "read_gates"): Recipe(
        (Source(ATTENTION + "g_b_proj.weight", ("GV", "GR")),), pieces.by_key_head
    ),
    ("channel_delta_net", "decays"): Recipe((Source(ATTENTION + "f_b_proj.weight", ("GK", "GR")),), pieces.by_key_head),
    ("channel_delta_net", "output"): Recipe((Source(ATTENTION + "o_proj.weight", ("D", "GV")),), pieces.as_is),
    ("vectors", "delta_taps"): Recipe(
        tuple(Source(f"{ATTENTION}{name}_conv1d.weight", ("GK", "1", "GT")) for name in "qkv"),
        pieces.delta_taps_apart,
    ),
    ("vectors", "delta_decay"): Recipe(
        (Source(ATTENTION + "A_log", ("1", "1", "GN", "1")), Source(ATTENTION + "dt_bias", ("GK",))),
        pieces.channel_rates,
    ),
    ("vectors", "delta_norm"): Recipe((Source(ATTENTION + "o_norm.weight", ("GH",)),), pieces.as_is),
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
        for kind in (ATTENTION, _MAMBA, MLP):
            name = name.replace(kind, _BLOCK)
        return replace(source, name=name)

    return {path: replace(each, sources=tuple(map(renamed, each.sources))) for path, each in recipes.items()}


_BAMBA: dict[Path, Recipe] = {
    **_OF_MAMBA,
    **FEED_FORWARD,
    **layer_norms(mlp_norm="pre_ff_layernorm"),
    ("final_norm",): Recipe((Source("model.final_layernorm.weight", ("D",)),), pieces.norm),
}
_LOW_NORMS = {"dt": "GR", "b": "GK", "c": "GK"}
_JAMBA: dict[Path, Recipe] = {
    **FEED_FORWARD,
    **layer_norms(mlp_norm="pre_ff_layernorm"),
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
    **layer_norms(attention_norm="norm"),
    ("embedding",): Recipe((Source("model.embeddings.weight", ("V", "D")),), pieces.as_is),
    ("final_norm",): Recipe((Source("model.norm_f.weight", ("D",)),), pieces.norm),
}
_LFM2: dict[Path, Recipe] = {
    **layer_norms(attention_norm="operator_norm", mlp_norm="ffn_norm"),
    ("attention", "o"): Recipe((Source(ATTENTION + "out_proj.weight", ("D", "NH")),), pieces.as_is),
    ("vectors", "q_norm"): Recipe((Source(ATTENTION + "q_layernorm.weight", ("H",)),), pieces.head_norm),
    ("vectors", "k_norm"): Recipe((Source(ATTENTION + "k_layernorm.weight", ("H",)),), pieces.head_norm),
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
    **layer_norms(attention_out_norm="post_operator_norm", mlp_out_norm="post_ffn_norm"),
}
_SHARED_MLP = "model.layers.{}.shared_mlp."

_GRANITE_HYBRID: dict[Path, Recipe] = {
    **_OF_MAMBA,
    ("mlp", "gate_up"): Recipe((Source(_SHARED_MLP + "input_linear.weight", ("2F", "D")),), pieces.split_gate_up),
    ("mlp", "down"): Recipe((Source(_SHARED_MLP + "output_linear.weight", ("D", "F")),), pieces.as_is),
}

RECURRENT: dict[str, Mapping[Path, Recipe]] = {
    "BambaForCausalLM": _BAMBA,
    "FalconH1ForCausalLM": _BAMBA,
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
}
