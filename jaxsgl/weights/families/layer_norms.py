"""Recipes of families with biases, LayerNorm or MLPs without gates, as GPT-2 and its kin, by architecture."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from jaxsgl.weights import pieces
from jaxsgl.weights.families.usual import ATTENTION, MLP, layer_norms
from jaxsgl.weights.recipe import Path, Pieces, Recipe, Source

# Norms without scales.
_BARE_NORMS: dict[Path, Recipe] = {
    path: Recipe((), pieces.ones) for path in (("vectors", "attention_norm"), ("vectors", "mlp_norm"), ("final_norm",))
}
_COHERE: dict[Path, Recipe] = {
    ("vectors", "q_norm"): Recipe((Source(ATTENTION + "q_norm.weight", ("N", "H")),), pieces.all_heads_norm),
    ("vectors", "k_norm"): Recipe((Source(ATTENTION + "k_norm.weight", ("K", "H")),), pieces.all_keys_norm),
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
    """`layer_norms`, and their biases."""
    biases: dict[Path, Recipe] = {
        ("vectors", f"{ours}_bias"): Recipe((Source(f"model.layers.{{}}.{theirs}.bias", ("D",)),), pieces.as_is)
        for ours, theirs in names.items()
    }
    return {**layer_norms(**names), **biases}


_GTE: dict[Path, Recipe] = {
    **_with_bias(("attention", "qkv"), "self_attn.qkv_proj", ("QKV", "D"), pieces.fuse_split_heads),
    ("mlp", "gate_up"): Recipe((Source(MLP + "up_gate_proj.weight", ("2F", "D")),), pieces.split_up_gate),
}
_STABLE_LM: dict[Path, Recipe] = {
    ("vectors", f"{part}_norm"): Recipe(
        (Source(ATTENTION + f"{part}_layernorm.norms.*.weight", ("H",)),), partial(pieces.norms_of_heads, of_all)
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

LAYER_NORMS: dict[str, Mapping[Path, Recipe]] = {
    **dict.fromkeys(("NewModel", "GteModel"), _GTE),
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
}
