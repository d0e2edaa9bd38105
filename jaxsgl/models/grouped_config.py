"""Reads from config.json layers that attend to windows and to groups of tokens, and their residual streams.

Owns DeepSeek V4's words for these, those of published folders included. Called by `layer_config` and `arch_file`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from jaxsgl.errors import CheckpointError
from jaxsgl.models.config_file import ConfigFile
from jaxsgl.models.layer_spec import Connections, GroupedAttention, Index, MoeMlp, TokenGroups
from jaxsgl.models.rope import RopeParams, read_rope

WINDOW, SPARSE, HEAVY = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
_OF_RATIOS = {0: WINDOW, 4: SPARSE, 128: HEAVY}  # of `compress_ratios`
_HASHED = "hash_moe"
_SIZES = {SPARSE: 4, HEAVY: 128}
_OLD_SIZES = {SPARSE: "compress_rate_csa", HEAVY: "compress_rate_hca"}
NUM_HASHED = 3  # layers, where config.json doesn't say it


def read_group_types(config: ConfigFile, num_layers: int) -> list[str]:
    """`WINDOW`, `SPARSE` or `HEAVY` for each layer. Raises `CheckpointError` for other words and numbers."""
    told, ratios = config.get("layer_types"), config.get("compress_ratios")
    if told is None and ratios is not None:
        told = [_OF_RATIOS.get(each, each) for each in ratios] if isinstance(ratios, list) else ratios
    if told is None:
        told = [HEAVY, HEAVY, *(SPARSE if i % 2 else HEAVY for i in range(max(num_layers - 2, 0)))]
    is_long = isinstance(told, list) and len(told) >= num_layers  # folders have those of layers after the last one, too
    if not is_long or not set(told[:num_layers]) <= {WINDOW, SPARSE, HEAVY}:
        raise CheckpointError(
            f"{config.path}: layer_types is {told}, but must be a list of {num_layers}, each {WINDOW}, {SPARSE} or "
            f"{HEAVY}, or compress_ratios one of {', '.join(map(str, _OF_RATIOS))}"
        )
    return list(told[:num_layers])


def read_grouped_mixers(config: ConfigFile, head_dim: int) -> dict[str, GroupedAttention]:
    """The mixer of each kind of layer. Raises `CheckpointError` for numbers that don't fit each other."""
    rotated, out_groups = _read_rotated(config, head_dim), config.count("o_groups", 8)
    index = Index(
        config.count("index_n_heads", 64), config.count("index_head_dim", 128), config.count("index_topk", 512),
        interleaved=True,
    )  # fmt: skip
    num_heads = config.count("num_attention_heads")
    if num_heads % out_groups or index.size < rotated:
        raise CheckpointError(
            f"{config.path}: {num_heads} heads can't be {out_groups} groups (o_groups), or index_head_dim, "
            f"{index.size}, is less than the {rotated} numbers that turn"
        )
    window = GroupedAttention(config.count("q_lora_rank", 1024), rotated, out_groups, config.count("o_lora_rank", 1024))
    sizes = _read_sizes(config)
    return {
        WINDOW: window,
        SPARSE: replace(window, groups=TokenGroups(sizes[SPARSE], overlaps=True, index=index)),
        HEAVY: replace(window, groups=TokenGroups(sizes[HEAVY])),
    }


def read_group_ropes(config: ConfigFile, head_dim: int) -> dict[str, RopeParams]:
    """The rope of each kind of layer: one of its own where layers have a window alone."""
    rotated, max_context = _read_rotated(config, head_dim), config.count("max_position_embeddings")
    theta, of_groups = config.number("rope_theta", 10_000.0), config.number("compress_rope_theta", 160_000.0)
    told = config.section("rope_parameters") or config.section("rope_scaling") or ConfigFile(config.path, {})
    is_nested = "main" in told.values
    main, compress = (told.section("main"), told.section("compress")) if is_nested else (None, told)

    def rope(section: ConfigFile | None, theta: float) -> RopeParams:
        section = section or ConfigFile(config.path, {})
        section.skip("partial_rotary_factor")
        found = read_rope(section, RopeParams(theta, rotary_dim=rotated), None, max_context, alpha_stretches=False)
        # One object for both kinds describes how that of groups is stretched; thetas stand beside it.
        found = found if is_nested else replace(found, theta=theta)
        return replace(found, amplitude=1.0) if section.get("attention_factor") is None else found

    ropes = rope(main, theta), rope(compress, of_groups)
    if any(each.amplitude != 1 for each in ropes):
        raise CheckpointError(
            f"{config.path}: attention_factor of a rope is {ropes[1].amplitude}, but only 1 is supported"
        )
    return {WINDOW: ropes[0], SPARSE: ropes[1], HEAVY: ropes[1]}


def with_hashed(config: ConfigFile, mixtures: Sequence[MoeMlp]) -> list[MoeMlp]:
    """The mixtures of the layers, of which the first ones have experts by token."""
    told, first = config.get("mlp_layer_types"), config.get("num_hash_layers", NUM_HASHED)
    kinds = told or [_HASHED if i < first else "moe" for i in range(len(mixtures))]
    if not isinstance(kinds, list) or len(kinds) != len(mixtures) or not set(kinds) <= {_HASHED, "moe"}:
        raise CheckpointError(
            f"{config.path}: mlp_layer_types is {kinds}, but must be a list of {len(mixtures)}, each {_HASHED} or moe"
        )
    return [
        replace(each, by_token=True, router=replace(each.router, choice_bias=False)) if kind == _HASHED else each
        for each, kind in zip(mixtures, kinds, strict=True)
    ]


def read_connections(config: ConfigFile) -> Connections:
    """Those of blocks to residual streams."""
    eps = config.number("hc_eps", 1e-6)
    return Connections(config.count("hc_mult", 4), config.count("hc_sinkhorn_iters", 20), eps)


def _read_rotated(config: ConfigFile, head_dim: int) -> int:
    """R. Raises `CheckpointError` for a number that isn't even."""
    told, share = config.get("qk_rope_head_dim", 0), config.get("partial_rotary_factor")
    rotated = int(head_dim * config.number("partial_rotary_factor")) if share is not None else told or head_dim // 8
    if not isinstance(rotated, int) or rotated % 2 or not 0 < rotated <= head_dim:
        raise CheckpointError(
            f"{config.path}: qk_rope_head_dim, or partial_rotary_factor times head_dim, is {rotated}, but must be "
            f"even, and 2 to {head_dim}"
        )
    return rotated


def _read_sizes(config: ConfigFile) -> Mapping[str, int]:
    """Tokens of a group, by the kind of layer."""
    told = config.section("compress_rates") or ConfigFile(config.path, {})
    return {kind: config.count(_OLD_SIZES[kind], told.count(kind, size)) for kind, size in _SIZES.items()}
