"""The kinds of models that are served, each with transformers' classes and a small configuration of its own.

A file holds the kinds of one family; a new file joins `_FAMILIES`. `tests/checkpoints.py` makes checkpoints of them.
"""

from __future__ import annotations

from typing import Any

from tests.checkpoint_kinds import (
    cohere,
    deepseek,
    ernie,
    exaone,
    falcon,
    gemma,
    glm,
    gpt,
    granite,
    hunyuan,
    lfm,
    llama,
    mistral,
    nemotron,
    olmo,
    other_dense,
    other_hybrids,
    other_mixtures,
    phi,
    qwen,
)
from tests.checkpoint_kinds.sizes import COMMON, OF_FAMILIES, Kind

_FAMILIES = (
    cohere, deepseek, ernie, exaone, falcon, gemma, glm, gpt, granite, hunyuan, lfm, llama, mistral, nemotron, olmo,
    other_dense, other_hybrids, other_mixtures, phi, qwen,
)  # fmt: skip
# Of Llama and Qwen, with sizes `COMMON`, for tests of what isn't a family's own.
KINDS: dict[str, Kind] = {**llama.COMMON_KINDS, **qwen.COMMON_KINDS}
CHECKPOINT_KINDS = tuple(KINDS)
# All of `OF_FAMILIES`.
FAMILIES: dict[str, Kind] = {kind: of_kind for family in _FAMILIES for kind, of_kind in family.KINDS.items()}
assert len(FAMILIES) == sum(len(family.KINDS) for family in _FAMILIES), "two families have a kind of one name"
FAMILY_KINDS = tuple(FAMILIES)
OF_D_NUMBERS = (  # whose heads have D numbers together
    "cohere2", "stable_lm", "gpt_neox", "gpt2", "gpt_bigcode", "gptj", "opt", "falcon", "falcon_40b", "falcon_11b",
)  # fmt: skip
# Whose mechanisms others have, too.
VARIANTS = ("falcon_11b", "gpt_bigcode", "granite_moe_swa", "hy_v3", "jais2", "kolibri1", "minicpm3", "vault_gemma")
DELTA_KINDS = ("qwen3_5", "qwen3_next", "qwen3_5_moe")  # of those, Qwen's with gated delta-nets
BLOCK_KINDS = ("nemotron_h", "nemotron_h_latent")  # whose layers are a mixer or an MLP alone
CONV_KINDS = ("lfm2", "lfm2_moe", "lfm3")  # with short convolutions
HYBRID_KINDS = (  # all that keep states
    *DELTA_KINDS, "kimi_linear", "granite_hybrid", "nemotron_h", "bamba", "nemotron_h_latent", *CONV_KINDS,
    "olmo_hybrid", "falcon_h1", "jamba",
)  # fmt: skip


def two_layers(kind: str) -> dict[str, Any]:
    """What a configuration of `kind` in `HYBRID_KINDS` changes to have a layer that keeps states, and one that attends.

    Of `BLOCK_KINDS` there are experts between them.
    """
    if kind in BLOCK_KINDS:
        return {"layers_block_type": ["linear_attention", "moe", "full_attention"]}
    if kind == "jamba":
        return {"num_hidden_layers": 2, "attn_layer_period": 2}
    recurrent = "conv" if kind in CONV_KINDS else "linear_attention"
    types = {} if kind in ("bamba", "falcon_h1") else {"layer_types": [recurrent, "full_attention"]}
    return {"num_hidden_layers": 2, **types}


def values_of(kind: str) -> Kind:
    """The classes of `kind`, and all values that a checkpoint of it has in its configuration."""
    config_class, model_class, differences = {**KINDS, **FAMILIES}[kind]
    return config_class, model_class, {**(OF_FAMILIES if kind in FAMILIES else COMMON), **differences}
