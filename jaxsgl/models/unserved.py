"""What keeps a model from being served, in words: the mechanisms that its config.json tells of, and the nearest family.

Owns the signs of mechanisms that no layer here has. Never decides: `arch_file` asks after it found no family.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

_Sign = Callable[[Mapping[str, Any]], bool]
MOST_NAMED = 3  # mechanisms, so that a line stays one
LETTERS_OF_A_LINE = 4  # that two names begin with


def _has(*keys: str) -> _Sign:
    """Whether any of the keys is set to something."""
    return lambda config: any(config.get(key) for key in keys)


def _has_layers(*words: str) -> _Sign:
    """Whether a layer is of a kind that has one of the words in its name."""

    def has(config: Mapping[str, Any]) -> bool:
        kinds = config.get("layer_types") or config.get("layers_block_type") or config.get("hybrid_override_pattern")
        kinds = kinds if isinstance(kinds, list) else []
        return any(word in kind for kind in kinds if isinstance(kind, str) for word in words)

    return has


# In the order in which they are named: those that take the most work first.
MECHANISMS: tuple[tuple[str, tuple[_Sign, ...]], ...] = (
    ("an encoder beside the decoder", (_has("is_encoder_decoder", "encoder_layers", "num_encoder_layers"),)),
    ("recurrent blocks (RG-LRU)", (_has("lru_width"),)),
    (
        "layers with a state-space model (Mamba)",
        (
            _has("mamba_d_state", "mamba_num_heads", "ssm_state_size", "ssm_cfg", "state_size", "mamba_d_ssm"),
            _has_layers("mamba", "ssm"),
        ),
    ),
    ("short convolutions in the place of attention", (_has("conv_L_cache"), _has_layers("conv"))),
    (
        "linear attention (lightning, RWKV, Kimi delta attention)",
        (
            _has("attn_type_list", "linear_attn_config", "lightning_head_dim", "attention_hidden_size"),
            _has("linear_head_dim", "linear_attn_alpha_factor", "kda_lower_bound"),
        ),
    ),
    ("sparse attention that an index chooses for", (_has("index_topk", "index_n_heads", "indexer_n_heads"),)),
    ("attention to compressed tokens", (_has("compress_rates", "compress_ratios"),)),
    ("attention through convolutions (CCA)", (_has("cca_time0"),)),
    ("attention in chunks", (_has("attention_chunk_size"), _has_layers("chunked_attention"))),
    ("keys and values that layers share", (_has("num_kv_shared_layers", "use_cla"),)),
    ("an embedding for each layer", (_has("hidden_size_per_layer_input"),)),
    ("heads of two sizes", (_has("global_head_dim", "per_layer_config"),)),
    (
        "other numbers of heads in some layers",
        (_has("num_attention_heads_per_layer", "num_sliding_attention_heads", "attention_other_setting"),),
    ),
    (
        "values of another size than keys",
        (lambda config: bool(config.get("v_head_dim")) and not config.get("kv_lora_rank"),),
    ),
    ("several residual streams", (_has("hc_mult", "hc_count"),)),
    ("experts that compute nothing", (_has("zero_expert_num"),)),
    (
        "positions by ALiBi",
        (
            lambda config: "alibi" in (config.get("position_embedding_type"), config.get("pos_embedding_type")),
            lambda config: config.get("model_type") in ("bloom", "mpt"),
            _has("alibi"),
        ),
    ),
    ("learned positions", (_has("n_positions"),)),
    ("LayerNorm with a mean", (_has("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon"),)),
    ("audio", (_has("audio_config", "audio_token_id"),)),
    ("experts", (_has("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),)),
    ("a vision tower", (_has("vision_config", "vision_tower"),)),
)
# Which some families have, and others lack.
SERVED_BY_OTHERS = frozenset(
    {
        "experts",
        "experts that compute nothing",
        "sparse attention that an index chooses for",
        "attention to compressed tokens",
        "several residual streams",
        "layers with a state-space model (Mamba)",
        "short convolutions in the place of attention",
        "a vision tower",
        "audio",
        "attention in chunks",
        "keys and values that layers share",
        "an embedding for each layer",
        "heads of two sizes",
        "other numbers of heads in some layers",
        "values of another size than keys",
        "learned positions",
        "LayerNorm with a mean",
    }
)
# The family that comes nearest where the names don't show it, by what a name begins with.
UNLIKE_IN_NAME: Mapping[str, str] = {
    "kimi": "DeepseekV3ForCausalLM",
}
# What is served in transformers' form alone: architectures whose code is their folders' own, and where theirs is.
IN_ANOTHER_FORM: Mapping[str, str] = {
    "InternVLChatModel": (
        "its code is its folder's own, but that of transformers is served, InternVLForConditionalGeneration: take the "
        "folder of the same name that ends with -HF, as OpenGVLab/InternVL3_5-8B-HF"
    )
}


def mechanisms_of(config: Mapping[str, Any]) -> list[str]:
    """What config.json, or the part of it about the decoder, tells of that its family would need."""
    parts = [config, *(part for key in ("text_config", "llm_config") if isinstance(part := config.get(key), Mapping))]
    return [name for name, signs in MECHANISMS if any(sign(part) for part in parts for sign in signs)]


def nearest(architecture: str, families: Iterable[str]) -> str | None:
    """The family whose name begins alike, as Llama5 and Llama4; of several the one that goes on alike the longest.

    `UNLIKE_IN_NAME` counts first.
    """
    stem = _stem(architecture)
    known = next((family for start, family in UNLIKE_IN_NAME.items() if stem.startswith(start)), None)
    if known is not None:
        return known
    head = architecture[len(stem) :]

    def likeness(name: str) -> tuple[int, bool, int, str]:
        other = _stem(name)
        return _num_alike(stem, other), name.endswith(head), -abs(len(other) - len(stem)), name

    return max((name for name in families if _are_of_one_line(stem, _stem(name))), key=likeness, default=None)


def _are_of_one_line(stem: str, other: str) -> bool:
    letters, others = ("".join(itertools.takewhile(str.isalpha, each)) for each in (stem, other))
    return letters == others or _num_alike(letters, others) >= LETTERS_OF_A_LINE


def _num_alike(one: str, other: str) -> int:
    """Letters that both begin with."""
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def why_unserved(architecture: str | None, config: Mapping[str, Any], families: Iterable[str]) -> str:
    """A sentence about an architecture that no family is: what it needs that isn't here, and what comes near."""
    names = list(families)
    if architecture is None:
        return f"it names no architecture; supported are {', '.join(names)}"
    return "; ".join(_parts(architecture, config, names))


def _parts(architecture: str, config: Mapping[str, Any], names: list[str]) -> Iterator[str]:
    yield f"architecture {architecture} is not supported"
    if architecture in IN_ANOTHER_FORM:
        yield IN_ANOTHER_FORM[architecture]
        return
    needed = mechanisms_of(config)
    missing = [each for each in needed if each not in SERVED_BY_OTHERS]
    if missing:
        yield f"its config.json tells of what is not built here: {', '.join(missing[:MOST_NAMED])}; run it elsewhere"
    elif needed:
        yield f"no family of its form has {' and '.join(needed)}"
    near = nearest(architecture, names)
    if near is not None:
        yield f"the nearest family is {near}"
    yield f"supported are {', '.join(names)}"


def _stem(architecture: str) -> str:
    """The name without its head, in lower case: what families of one line have in common."""
    for suffix in ("ForConditionalGeneration", "ForCausalLM", "LMHeadModel", "Model"):
        architecture = architecture.removesuffix(suffix)
    return architecture.lower()
