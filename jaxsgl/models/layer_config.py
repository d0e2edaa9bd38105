"""Reads the layers of a decoder from config.json: window, rope, mixer and MLP of each, dense or a mixture.

Called by `arch_file`. Knows the keys of transformers 5 and of older folders; `families` says which a family has.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from jaxsgl.errors import CheckpointError
from jaxsgl.models.config_file import ConfigFile
from jaxsgl.models.family import Family, MoeFamily
from jaxsgl.models.grouped_config import read_group_ropes, read_group_types, read_grouped_mixers, with_hashed
from jaxsgl.models.layer_spec import Clamp, DenseMlp, Index, KvHeads, Latent, LayerSpec, Mixer, MoeMlp, RecurrentNet
from jaxsgl.models.own_parts_config import (
    check_own_ropes,
    check_reach,
    read_own_types,
    with_embeddings_and_keys,
    with_own_parts,
    with_sparsity,
)
from jaxsgl.models.recurrent_config import (
    DENSE,
    EXPERTS,
    FULL,
    RECURRENT,
    SLIDING,
    read_blocks,
    read_recurrent_net,
    read_recurrent_types,
    skip_recurrent_net,
)
from jaxsgl.models.rope import RopeParams, read_rope
from jaxsgl.models.towers.family import VisionFamily
from pallas_kernels import Router
from pallas_kernels.routing import Score

CHUNKED = "chunked_attention"
_OF_ROUTERS = ("n_group", "topk_group", "norm_topk_prob", "routed_scaling_factor")


@dataclass(frozen=True)
class Layers:
    """What `read_layers` yields.

    Attributes:
      specs: of the layers.
      ropes: those that the specs name by index.
      max_context: the most tokens of one sequence.
      next_spec: of the layer after these that predicts one token more; None: there is none.
    """

    specs: tuple[LayerSpec, ...]
    ropes: tuple[RopeParams, ...]
    max_context: int
    next_spec: LayerSpec | None


def read_layers(config: ConfigFile, family: Family, heads: KvHeads, latent: Latent | None) -> Layers:
    """All layers; `heads` are those of the model. Raises `CheckpointError` for what isn't supported."""
    blocks = read_blocks(config) if family.blocks else None
    num_layers = config.count("num_hidden_layers") * (2 if family.halves else 1) if blocks is None else len(blocks)
    is_turned = _read_turned(config, family, num_layers)
    types = blocks
    if types is None:
        types = [FULL] * num_layers if family.side_by_side else _read_types(config, family, is_turned)
    mlps = read_mlps(config, family, num_layers) if blocks is None else _read_mlps_of(config, family.moe, blocks)
    is_turned = _turned_by_kind(config, family, types, mlps, is_turned)
    if family.own_parts == "all":
        types = read_own_types(config, types, FULL)
        check_own_ropes(config, types)
        check_reach(config)
    ropes, rope_of_layer = _read_ropes_of_layers(
        config, family, heads.size if latent is None else latent.rotated, types, is_turned
    )
    if latent is not None and latent.q_rank is None and any(rope.query_growth for rope in ropes):
        raise CheckpointError(f"{config.path}: llama_4_scaling_beta needs q_lora_rank, which is null")
    stretched = (int(rope.factor * rope.original_context) for rope in ropes if rope.kind == "yarn")
    max_context = max(_read_max_context(config, family), *stretched, 0)
    heads_of = _read_heads(config, family, types, heads)
    window, chunk = _read_window(config, family, max_context), _read_chunk(config, family, max_context)
    has_unit_heads = family.unit_heads_key is not None and bool(config.get(family.unit_heads_key))
    experts = _read_beside(config, family.moe)
    mixers: dict[str, Mixer | None] = {DENSE: None, EXPERTS: None}
    if family.grouped_tokens:
        mixers |= read_grouped_mixers(config, heads.size)
    if RECURRENT in types or family.side_by_side:
        mixers[FULL if family.side_by_side else RECURRENT] = read_recurrent_net(config, family)
    else:
        skip_recurrent_net(config, family)
    latents = [latent] * num_layers if latent is None else _read_latents(config, latent, num_layers)
    specs = tuple(
        LayerSpec(
            mlp,
            window if each == SLIDING or family.grouped_tokens else None,
            None if rope is None else ropes.index(rope),
            mixers.get(each, own or "attention"),
            experts=experts,
            chunk=chunk if each == CHUNKED else None,
            unit_heads=has_unit_heads and turned,
            also_attends=family.side_by_side,
            heads=own_heads,
            has_sinks=family.sinks == "all" or (family.sinks == "windows" and each == SLIDING),
        )
        for mlp, each, turned, rope, own, own_heads in zip(
            mlps, types, is_turned, rope_of_layer, latents, heads_of, strict=True
        )
    )
    if family.several_streams:
        specs = with_sparsity(config, specs)
    if family.own_parts is not None:
        specs = with_embeddings_and_keys(config, specs, types)
    if family.own_parts == "all":
        specs = with_own_parts(config, specs, types, FULL, heads)
    if family.halves:
        assert family.moe is not None, "of such families the first halves mix experts"
        mixture = _read_mixture(config, family.moe)
        specs = tuple(spec if i % 2 else replace(spec, experts=mixture, shortcut=True) for i, spec in enumerate(specs))
    return Layers(specs, ropes, max_context, _read_next(config, family, specs))


def _turned_by_kind(
    config: ConfigFile,
    family: Family,
    types: Sequence[str],
    mlps: Sequence[DenseMlp | MoeMlp | None],
    is_turned: list[bool],
) -> list[bool]:
    """Which layers have a rope, where that follows from their windows or MLPs; else `is_turned`."""
    slides = [each == SLIDING and config.get("sliding_window") is not None for each in types]
    if family.turned_layers == "windows":
        return slides if config.get("sliding_window") is not None else is_turned
    if family.turned_layers == "windows alone":
        return slides
    if family.turned_layers == "windows or dense":
        return [slid or isinstance(mlp, DenseMlp) for slid, mlp in zip(slides, mlps, strict=True)]
    return is_turned


def _read_ropes_of_layers(
    config: ConfigFile, family: Family, head_dim: int, types: Sequence[str], is_turned: Sequence[bool]
) -> tuple[tuple[RopeParams, ...], list[RopeParams | None]]:
    """The ropes that there are, and that of each layer."""
    of_type = read_group_ropes(config, head_dim) if family.grouped_tokens else _read_ropes(config, family, head_dim)
    of_unturned = _read_growth(config, family) if not all(is_turned) else None
    of_layers = [of_type.get(each) if turned else of_unturned for each, turned in zip(types, is_turned, strict=True)]
    if family.layer_thetas:
        of_layers = _with_thetas(config, of_layers)
    return tuple(dict.fromkeys(filter(None, (*of_type.values(), of_unturned, *of_layers)))), of_layers


def _with_thetas(config: ConfigFile, ropes: Sequence[RopeParams | None]) -> list[RopeParams | None]:
    """The ropes of layers with thetas of their own, if these are told; a layer whose theta is 0 has none."""
    told = config.get("layer_rope_theta")
    if told is None:
        return list(ropes)
    thetas = _of_each_layer(config, "layer_rope_theta", told, len(ropes))
    if not all(isinstance(theta, int | float) and theta >= 0 for theta in thetas):
        raise CheckpointError(f"{config.path}: layer_rope_theta is {thetas}, but must be numbers of 0 and more")
    return [
        replace(rope, theta=float(theta)) if rope is not None and theta else None
        for rope, theta in zip(ropes, thetas, strict=True)
    ]


def _read_next(config: ConfigFile, family: Family, specs: tuple[LayerSpec, ...]) -> LayerSpec | None:
    """The first of the layers after the last one: it attends, and mixes experts if others do, as SGLang's code has it.

    One with an embedding of its own is left out.
    """
    if family.next_layers_key is None or not config.get(family.next_layers_key, 0):
        return None
    if family.draft_head and config.get("mtp_use_dedicated_embeddings", False):
        return None
    spec = next(spec for spec in reversed(specs) if not isinstance(spec.mixer, RecurrentNet))
    return spec if family.moe is None else replace(spec, mlp=_read_mixture(config, family.moe))


def _read_max_context(config: ConfigFile, family: Family) -> int:
    told = config.count("max_position_embeddings")
    if family.encoder is not None and family.encoder.counts_rows_before:
        told -= family.rows_before_positions or 0
    return told if family.context_key is None else config.count(family.context_key, told)


def _read_turned(config: ConfigFile, family: Family, num_layers: int) -> list[bool]:
    """Whether each layer has a rope."""
    if family.turned_layers == "none":
        return [False] * num_layers
    if family.turned_layers == "theta":
        sections = (config.get("rope_parameters") or {}, config.values)
        return [all(section.get("rope_theta", 0) is not None for section in sections)] * num_layers
    if family.turned_layers != "told":
        return [family.turned_layers != "type" or config.get("position_embedding_type") == "rope"] * num_layers
    every = config.count("no_rope_layer_interval", 4)
    told = config.get("no_rope_layers") or [(i + 1) % every != 0 for i in range(num_layers)]
    return [bool(turned) for turned in _of_each_layer(config, "no_rope_layers", told, num_layers)]


def _read_types(config: ConfigFile, family: Family, is_turned: list[bool]) -> list[str]:
    """`FULL`, `SLIDING`, `CHUNKED` or `RECURRENT` for each layer."""
    num_layers = len(is_turned)
    if family.grouped_tokens:
        return read_group_types(config, num_layers)
    if family.recurrence is not None:
        return read_recurrent_types(config, family, num_layers)
    if family.windows == "none":
        return [FULL] * num_layers
    limited = CHUNKED if family.windows == "chunks" else SLIDING
    is_limited = _read_limited(config, family, is_turned)
    told = config.get("layer_types") or [limited if each else FULL for each in is_limited]
    for each in _of_each_layer(config, "layer_types", told, num_layers):
        if each not in (FULL, limited):
            raise CheckpointError(f"{config.path}: layer_types has {each}; supported are {FULL} and {limited}")
    return list(told)


def _read_limited(config: ConfigFile, family: Family, is_turned: list[bool]) -> list[bool]:
    """Whether each layer has a window or chunks where config.json has no `layer_types`; see `Family.windows`."""
    layers, pattern = range(len(is_turned)), family.full_every
    if pattern is not None:
        for key in ("global_attn_every_n_layers", "_sliding_window_pattern", "sliding_window_pattern"):
            pattern = config.get(key, pattern)
    told = config.get("hybrid_layer_pattern")
    if told is not None:
        return [bool(each) for each in _of_each_layer(config, "hybrid_layer_pattern", told, len(is_turned))]
    if family.windows == "chunks":
        return is_turned
    if family.turned_layers == "told":
        return [not turned for turned in is_turned]
    if family.windows in ("flag", "even by flag", "late"):
        border = config.get("max_window_layers", 28)
        return [i % 2 == 0 and i < border if family.windows == "even by flag" else i >= border for i in layers]
    if isinstance(pattern, str) and pattern:  # L: local, G: global
        return [pattern[i % len(pattern)] == "L" for i in layers]
    if family.windows == "listed":
        return [False for _ in layers]
    dense = config.get("first_k_dense_replace", 0) if family.turned_layers == "windows or dense" else 0
    first_full = dense + (0 if family.full_first else -1)
    limited = [i >= dense and (not pattern or (i - first_full) % pattern != 0) for i in layers]
    return [False, *limited[1:]] if family.full_begins else limited


def _of_each_layer(config: ConfigFile, key: str, values: Any, num_layers: int) -> list[Any]:
    if not isinstance(values, list) or len(values) != num_layers:
        raise CheckpointError(
            f"{config.path}: {key} is {values}, but must be a list of {num_layers}, one of each layer"
        )
    return values


def _read_window(config: ConfigFile, family: Family, max_context: int) -> int | None:
    """Tokens that a layer with a window attends to; None: all, as where no sequence is longer than the window.

    Where tokens of images see ahead in layers with windows, these stay what they are.
    """
    if family.windows in ("none", "chunks"):
        return None
    is_on = family.windows in ("always", "late", "listed") or config.get("use_sliding_window", False)
    is_given = config.get("sliding_window") is not None
    if not (is_on and is_given):
        return None
    window = config.count("sliding_window")
    if family.window_before_key is not None and config.get(family.window_before_key) is not None:
        window = config.count(family.window_before_key) + 1
    if family.encoder is not None and (family.encoder.key is None or config.get(family.encoder.key, False)):
        window = window // 2 + 1  # those before a token, itself among them; as many come after it
    is_told_apart = family.vision is not None and family.vision.ahead == "in windows"
    return window if window < max_context or is_told_apart else None


def _read_heads(config: ConfigFile, family: Family, types: Sequence[str], of_model: KvHeads) -> list[KvHeads | None]:
    """The heads of each layer; None: those of the model."""
    num_heads, kv_heads = config.count("num_attention_heads"), [of_model.number] * len(types)
    queries = [num_heads] * len(types)
    if family.window_heads_key is not None:
        of_windows = config.count(family.window_heads_key, 2 * of_model.number)
        kv_heads = [of_windows if each == SLIDING else of_model.number for each in types]
    if family.heads_of_layers:
        told = config.get("num_attention_heads_per_layer", queries)
        queries = _of_each_layer(config, "num_attention_heads_per_layer", told, len(types))
    for layer, (own, number) in enumerate(zip(queries, kv_heads, strict=True)):
        if type(own) is not int or own < 1 or own % number:
            raise CheckpointError(f"{config.path}: {own} heads of layer {layer} can't share {number} kv heads evenly")
    made = [
        replace(of_model, number=number, queries=None if own == num_heads else own)
        for own, number in zip(queries, kv_heads, strict=True)
    ]
    return [None if each == of_model else each for each in made]


def _read_chunk(config: ConfigFile, family: Family, max_context: int) -> int | None:
    """Positions of a chunk that layers attend within; None: all, as where no sequence is longer than the chunk."""
    if family.windows != "chunks":
        return None
    chunk = config.count("attention_chunk_size")
    return chunk if chunk < max_context else None


def _read_growth(config: ConfigFile, family: Family) -> RopeParams | None:
    """The rope of layers that turn nothing, whose queries may grow all the same; None: they don't."""
    if not (family.grows_unturned and config.get("attn_temperature_tuning")):
        return None
    return RopeParams(
        kind="proportional",
        share=0.0,
        interleaved=family.interleaved_rope,
        query_growth=config.number("attn_scale"),
        original_context=config.count("floor_scale"),
        growth_offset=1,
    )


def _read_ropes(config: ConfigFile, family: Family, head_dim: int) -> dict[str, RopeParams]:
    """The rope of each type of layer, from `rope_parameters` of transformers 5, or the keys of older folders."""
    max_context = config.count("max_position_embeddings")
    original = config.get("original_max_position_embeddings")
    told = config.get("rotary_dim", head_dim) / head_dim if family.partial_rope else 1.0
    share = config.number("partial_rotary_factor", told) if family.partial_rope else 1.0
    theta = config.number("rope_theta", 10000.0)
    is_interleaved = family.interleaved_rope and bool(config.get("rope_interleave", True))

    def rope(section: ConfigFile | None, theta: float) -> RopeParams:
        section = section or ConfigFile(config.path, {})
        own_share = section.number("partial_rotary_factor", share) if family.partial_rope else 1.0
        rotary_dim = None if own_share == 1 else int(head_dim * own_share)
        if rotary_dim is not None and rotary_dim % 2:
            raise CheckpointError(
                f"{config.path}: partial_rotary_factor is {own_share}, which turns {rotary_dim} of the {head_dim} "
                "numbers of a head, but they turn in pairs: give a factor that turns an even number"
            )
        sections = _read_sections(section, family.vision, rotary_dim or head_dim)
        plain = RopeParams(
            theta, rotary_dim=rotary_dim, interleaved=is_interleaved, backwards=family.turns_backwards,
            sections=sections, takes_turns=family.vision is None or family.vision.takes_turns,
        )  # fmt: skip
        if family.grows_queries:
            section.skip("max_position_embeddings")  # the same as outside of it
        if family.grows_queries and family.latent:
            section.skip("partial_rotary_factor")  # `qk_rope_head_dim` says what turns
        return read_rope(
            section, plain, original, max_context,
            alpha_stretches=family.alpha_stretches, grows_queries=family.grows_queries,
        )  # fmt: skip

    both = config.section("rope_parameters") or config.section("rope_scaling")  # null and {} are the family's default
    if family.sliding_theta is None:
        one = rope(both, theta)
        return dict.fromkeys((FULL, SLIDING, CHUNKED), one)
    of_family = family.sliding_theta
    sliding_theta = config.number(of_family) if isinstance(of_family, str) else of_family
    if both is not None and (FULL in both.values or SLIDING in both.values):
        both.skip(*both.values)  # what else stands there no layer has, in transformers either
        return {FULL: rope(both.section(FULL), theta), SLIDING: rope(both.section(SLIDING), sliding_theta)}
    return {FULL: rope(both, theta), SLIDING: rope(None, sliding_theta)}


def _read_sections(rope: ConfigFile, family: VisionFamily | None, num_turned: int) -> tuple[int, ...]:
    """Pairs of dimensions that turn with time, row and column, of so many dimensions that turn; (): all with one."""
    if family is None or family.sections is None:
        return ()
    sections = rope.get("mrope_section", list(family.sections))
    takes_turns = bool(rope.get("mrope_interleaved", family.takes_turns))
    if takes_turns != family.takes_turns:
        raise CheckpointError(
            f"{rope.path}: mrope_interleaved is {takes_turns}, but only {family.takes_turns} is supported"
        )
    fits = isinstance(sections, list) and len(sections) == 3 and all(type(each) is int for each in sections)
    if not fits or min(sections) < 0 or sum(sections) != num_turned // 2:
        raise CheckpointError(
            f"{rope.path}: mrope_section is {sections}, but must be three numbers of pairs, {num_turned // 2} together"
        )
    return tuple(sections)


def _read_mlps_of(
    config: ConfigFile, family: MoeFamily | None, blocks: Sequence[str]
) -> Sequence[DenseMlp | MoeMlp | None]:
    """The MLP of each layer that is one; None: it is a mixer. Sizes of those that no layer is may be anything."""
    made: dict[str, DenseMlp | MoeMlp] = {}
    if DENSE in blocks:
        made[DENSE] = DenseMlp(config.count("intermediate_size"))
    if EXPERTS in blocks:
        assert family is not None, "such families mix experts"
        made[EXPERTS] = _read_mixture(config, family)
    elif family is not None:
        keys = family.ffn_key, family.top_k_key, family.shared_ffn_key, family.latent_key
        config.skip(*_OF_ROUTERS, *family.count_keys, *filter(None, keys))
    config.skip("intermediate_size")
    return [made.get(block) for block in blocks]


def read_mlps(config: ConfigFile, family: Family, num_layers: int) -> Sequence[DenseMlp | MoeMlp]:
    """The MLP of each layer. Raises `CheckpointError` for numbers that don't fit each other."""
    moe = family.moe
    if moe is None or moe.switch is not None or family.halves:
        return [DenseMlp(_read_ffn_size(config, family))] * num_layers
    if moe.shared_ffn_key is not None and config.get(moe.count_keys[0]) == 0:
        config.skip(moe.ffn_key, moe.top_k_key)
        return [DenseMlp(config.count(moe.shared_ffn_key))] * num_layers
    if moe.dense_layers == "periods" and config.count(moe.count_keys[0]) == 1:
        config.skip(moe.top_k_key, "expert_layer_period", "expert_layer_offset")
        return [DenseMlp(config.count("intermediate_size"))] * num_layers
    is_dense = _read_dense_layers(config, moe, num_layers)
    mixture = _read_mixture(config, moe)
    if family.grouped_tokens:
        return with_hashed(config, [mixture] * num_layers)
    config.get("intermediate_size")  # without meaning where no layer is dense
    dense_key = moe.dense_ffn_key if moe.dense_ffn_key and config.get(moe.dense_ffn_key) else "intermediate_size"
    return [DenseMlp(config.count(dense_key)) if dense else mixture for dense in is_dense]


def _read_ffn_size(config: ConfigFile, family: Family) -> int:
    """F of an MLP without experts."""
    if family.ffn_factor is not None:
        return config.count("intermediate_size", family.ffn_factor * config.count("hidden_size"))
    if not family.cut_ffn:
        return config.count("intermediate_size")
    config.skip("intermediate_size", "block_multiple_of", "block_ffn_dim_multiplier")
    told = config.count("block_ff_dim" if config.get("block_ff_dim") is not None else "intermediate_size")
    if not config.get("block_auto_adjust_ff_dim", True):
        return told
    multiple = config.count("block_multiple_of", 256)
    return -(-int(config.number("block_ffn_dim_multiplier", 1.0) * int(2 * told / 3)) // multiple) * multiple


def _read_beside(config: ConfigFile, family: MoeFamily | None) -> MoeMlp | None:
    """The mixture next to each layer's MLP, if there is one."""
    if family is None or family.switch is None or not config.get(family.switch, False):
        return None
    return _read_mixture(config, family)


def _read_dense_layers(config: ConfigFile, family: MoeFamily, num_layers: int) -> list[bool]:
    if family.dense_layers == "first":
        types = config.get("mlp_layer_types")
        if types is None and (are_mixed := config.get("is_moe_layer")) is not None:
            config.skip("first_k_dense_replace", "first_last_k_dense_replace")
            return [not each for each in _of_each_layer(config, "is_moe_layer", are_mixed, num_layers)]
        if types is not None:
            config.skip("first_k_dense_replace")  # which published folders keep next to them
            return [each == "dense" for each in _of_each_layer(config, "mlp_layer_types", types, num_layers)]
        first = config.get(family.first_dense_key, 0)
        return [layer < first for layer in range(num_layers)]
    if family.dense_layers == "outside":
        first, last = config.get("moe_layer_start_index", 0), config.get("moe_layer_end_index", -1)
        every = config.count("moe_layer_interval", 1)
        mixed = range(first, num_layers if last == -1 else min(last + 1, num_layers))
        return [layer not in mixed or (layer + 1) % every != 0 for layer in range(num_layers)]
    if family.dense_layers == "periods":
        every, first = config.count("expert_layer_period"), config.get("expert_layer_offset")
        return [layer % every != first for layer in range(num_layers)]
    if family.dense_layers == "unlisted":
        step = config.count("interleave_moe_layer_step", 1)
        mixed = config.get("moe_layers", range(step - 1, num_layers, step))
        return [layer not in mixed for layer in range(num_layers)]
    if family.dense_layers == "steps":
        step, dense = config.count("decoder_sparse_step", 1), config.get("mlp_only_layers", [])
        return [layer in dense or (layer + 1) % step != 0 for layer in range(num_layers)]
    return [False] * num_layers


def _read_mixture(config: ConfigFile, family: MoeFamily) -> MoeMlp:
    told = [key for key in family.count_keys if config.get(key) is not None and key in config.values]
    key = next(iter(told), family.count_keys[0])
    num_experts, ffn_size = config.count(key), config.count(family.ffn_key)
    shared_size = _read_shared_size(config, family, ffn_size)
    half = _read_half(config, family) if shared_size else 1.0
    by_groups = family.grouped and config.get("topk_method") != "greedy"
    if family.grouped and not by_groups:  # published folders give their numbers all the same
        config.skip("n_group", "topk_group")
    router = Router(
        top_k=config.count(family.top_k_key),
        score=_read_score(config, family),
        margin=config.number(family.margin_key) if family.margin_key is not None else 0.0,
        renormalize=bool(config.get("norm_topk_prob", False)) if family.renormalize is None else family.renormalize,
        scale=(config.number(family.scale_key, 1.0) if family.grouped else 1.0) * half,
        num_groups=config.count("n_group", 1) if by_groups else 1,
        top_groups=config.count("topk_group", 1) if by_groups else 1,
        group_best=1 if by_groups and family.score == "softmax" else 2,
        choice_bias=family.choice_bias and bool(family.choice_bias_key is None or config.get(family.choice_bias_key)),
        bias=family.router_bias,
    )
    identities = 0 if family.identities_key is None else int(config.get(family.identities_key, 0))
    _check_router(config, family, router, num_experts + identities)
    clamp = None
    if family.clamped == "gpt-oss":
        clamp = Clamp(config.number("swiglu_limit", 7.0), config.number("swiglu_alpha", 1.702))
    elif family.clamped == "silu":
        clamp = Clamp(config.number("swiglu_limit", 10.0), 1.0, 0.0)
    is_latent = family.latent_key is not None and config.get(family.latent_key) is not None
    return MoeMlp(
        num_experts,
        ffn_size,
        router,
        bias=family.expert_bias,
        clamp=clamp,
        shared_ffn_size=shared_size,
        shared_scale=half,
        shared_gate=family.shared_gate,
        expert_factors=family.expert_factors,
        latent_size=config.count(family.latent_key) if is_latent and family.latent_key else 0,
        scales_inputs=family.scales_inputs,
        num_identities=identities,
    )


def _check_router(config: ConfigFile, family: MoeFamily, router: Router, num_experts: int) -> None:
    """Raises `CheckpointError` for numbers of experts and groups that don't fit each other."""
    group_size = num_experts // router.num_groups
    if router.top_k > num_experts or num_experts % router.num_groups or router.top_groups > router.num_groups:
        raise CheckpointError(
            f"{config.path}: {router.top_k} of {num_experts} experts in {router.top_groups} of {router.num_groups} "
            "groups can't be chosen"
        )
    too_few = group_size < router.group_best or router.top_k > router.top_groups * group_size
    if router.top_groups < router.num_groups and too_few:
        raise CheckpointError(
            f"{config.path}: {router.top_k} experts can't be chosen from {router.top_groups} groups of {group_size}"
        )
    if family.scales_inputs and router.top_k != 1:
        raise CheckpointError(
            f"{config.path}: {config.told_as(family.top_k_key)} is {router.top_k}, but models whose experts read x "
            "times their share are only served where a token has 1"
        )


_SCORES: dict[str, Score] = {"softmax": "softmax_of_chosen", "sigmoid": "sigmoid_of_chosen"}


def _read_score(config: ConfigFile, family: MoeFamily) -> Score:
    if family.score_key is None:
        return family.score
    return _SCORES[_one_of(config, family.score_key, tuple(_SCORES))]


def _read_half(config: ConfigFile, family: MoeFamily) -> float:
    """The factor on the results of shared experts and of the others before they are added."""
    if family.shared_mean_key is None:
        return 1.0
    return 1.0 if _one_of(config, family.shared_mean_key, ("sum", "average")) == "sum" else 0.5


def _one_of(config: ConfigFile, key: str, words: tuple[str, ...]) -> str:
    word = config.get(key)
    if word not in words:
        raise CheckpointError(f"{config.path}: {key} is {word}, but must be {' or '.join(words)}")
    return str(word)


def _read_shared_size(config: ConfigFile, family: MoeFamily, ffn_size: int) -> int:
    """F of the experts that all tokens pass through; 0: there are none."""
    if family.shared_ffn_key is not None:
        return 0 if config.get(family.shared_ffn_key) == 0 else config.count(family.shared_ffn_key)
    return int(config.get(family.shared_key, 0)) * ffn_size if family.shared_key is not None else 0


def read_latent(config: ConfigFile, family: Family) -> Latent:
    """The latent of all layers. Raises `CheckpointError` for numbers that are missing."""
    q_rank = config.get("q_lora_rank")
    return Latent(
        q_rank=None if q_rank is None else config.count("q_lora_rank"),
        kv_rank=config.count("kv_lora_rank"),
        rotated=config.count("qk_rope_head_dim"),
        unrotated=config.count("qk_nope_head_dim"),
        value=config.count("v_head_dim", config.count("hidden_size") // config.count("num_attention_heads")),
        has_bias=bool(config.get("attention_bias", False)),
        factor=(config.count("hidden_size") / config.count("kv_lora_rank")) ** 0.5 if family.scales_latents else 1.0,
        index=None if family.index is None else _read_index(config, family.index),
    )


def _read_index(config: ConfigFile, turned: str) -> Index:
    num_heads, size, num_chosen = (config.count(key) for key in ("index_n_heads", "index_head_dim", "index_topk"))
    index = Index(num_heads, size, num_chosen, interleaved=turned == "pairs")
    if config.get("q_lora_rank") is None or index.size < config.count("qk_rope_head_dim"):
        raise CheckpointError(
            f"{config.path}: index_head_dim is {index.size} and q_lora_rank {config.get('q_lora_rank')}, but an index "
            "has qk_rope_head_dim numbers that turn, and makes its queries of q_lora_rank numbers"
        )
    return index


def _read_latents(config: ConfigFile, latent: Latent, num_layers: int) -> list[Latent]:
    """That of each layer: those whose index is "shared" attend to what the last "full" one chose."""
    if latent.index is None:
        return [latent] * num_layers
    shared = replace(latent, index=replace(latent.index, is_shared=True))
    kinds = {"full": latent, "F": latent, "shared": shared, "S": shared}
    every, first = max(config.get("index_topk_freq", 1), 1), config.get("index_skip_topk_offset", 2)
    by_turns = ["shared" if max(i - first + 1, 0) % every else "full" for i in range(num_layers)]
    pattern = config.get("index_topk_pattern", by_turns)
    told = config.get("indexer_types", list(pattern) if isinstance(pattern, str) else pattern)
    for place, each in enumerate(_of_each_layer(config, "indexer_types", told, num_layers)):
        if each not in kinds or (place == 0 and kinds[each] is shared):
            raise CheckpointError(
                f"{config.path}: indexer_types has {json.dumps(each)} for layer {place}, but must have full or shared, "
                "and full first"
            )
    return [kinds[each] for each in told]


def read_latent_amplitude(config: ConfigFile) -> float:
    """The factor on queries, and on keys, that goes with a stretched rope (`mscale_all_dim`); 1 without one."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}  # which `_read_ropes` checks
    weight, factor = rope.get("mscale_all_dim") or 0.0, rope.get("factor") or 1.0
    is_stretched = (rope.get("rope_type") or rope.get("type") or "default") != "default"
    return 1.0 + 0.1 * weight * math.log(factor) if is_stretched and factor > 1 else 1.0
