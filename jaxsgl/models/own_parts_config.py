"""Reads from config.json what layers of one model have of their own: kv heads, whose keys they read, a larger MLP.

Owns Gemma 3n's and Gemma 4's words for it, and what their code takes for granted. Called by `layer_config` for families
whose layers differ (`Family.own_parts`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from jaxsgl.errors import CheckpointError
from jaxsgl.models.config_file import ConfigFile
from jaxsgl.models.layer_spec import DenseMlp, KvHeads, LayerSpec

GLOBAL_HEAD_DIM = 512  # where neither `global_head_dim` nor `per_layer_config` is told
FULL_EVERY = 6  # layers, without `layer_types`
SPARSE_LAYERS, SPARSITY = 10, 0.95  # the first layers of larger models, without `activation_sparsity_pattern`
_OVERRIDES = ("head_dim", "num_key_value_heads")


def read_own_types(config: ConfigFile, types: Sequence[str], full: str) -> list[str]:
    """The kinds of layers as the family's code has them: the last layer is a full one, whatever is told."""
    pattern = config.get("sliding_window_pattern")
    if config.get("layer_types") is None and pattern not in (None, FULL_EVERY):
        raise CheckpointError(
            f"{config.path}: sliding_window_pattern is {pattern}, but without layer_types every {FULL_EVERY}th layer "
            "is a full one, as transformers has it: give layer_types"
        )
    return [*types[:-1], full]


def check_own_ropes(config: ConfigFile, types: Sequence[str]) -> None:
    """Raises `CheckpointError` unless each kind of layer has a rope of its own."""
    told = config.get("rope_parameters") or config.defaults.get("rope_parameters")
    for kind in dict.fromkeys(types):
        rope = told.get(kind) if isinstance(told, Mapping) else None
        if not isinstance(rope, Mapping) or rope.get("rope_theta") is None:
            raise CheckpointError(
                f"{config.path}: rope_parameters must have an object {kind} with a rope_theta, but holds {rope}"
            )
        share = rope.get("partial_rotary_factor", 1.0)
        if share != 1.0 and rope.get("rope_type") != "proportional":
            raise CheckpointError(
                f"{config.path}: rope_parameters.{kind}.partial_rotary_factor is {share}, but goes with the rope type "
                f"proportional alone, and this one is {rope.get('rope_type')}"
            )


def check_reach(config: ConfigFile) -> None:
    """Raises `CheckpointError` for tokens that attend to later ones. Where only those of images do, text is causal."""
    told = config.get("use_bidirectional_attention")
    if told not in (None, "vision"):
        raise CheckpointError(
            f"{config.path}: use_bidirectional_attention is {told}, but tokens attend to those before them alone: "
            "supported are null and vision"
        )


def with_embeddings_and_keys(
    config: ConfigFile, specs: Sequence[LayerSpec], types: Sequence[str]
) -> tuple[LayerSpec, ...]:
    """The layers `specs`, of kinds `types`, with the embedding that each has, and with whose keys it reads."""
    size = config.count("hidden_size_per_layer_input") if config.get("hidden_size_per_layer_input", 0) else 0
    return tuple(
        replace(spec, keys_from=source, embedding_size=size)
        for spec, source in zip(specs, _read_sources(config, types), strict=True)
    )


def with_sparsity(config: ConfigFile, specs: Sequence[LayerSpec]) -> tuple[LayerSpec, ...]:
    """The layers `specs` with MLPs that are as sparse as config.json says."""
    sparse = SPARSE_LAYERS if len(specs) > SPARSE_LAYERS else 0
    told = config.get("activation_sparsity_pattern", [SPARSITY] * sparse + [0.0] * (len(specs) - sparse))
    if not isinstance(told, list) or len(told) != len(specs) or not all(0 <= share < 1 for share in told):
        raise CheckpointError(
            f"{config.path}: activation_sparsity_pattern is {told}, but must be a list of {len(specs)} numbers from 0 "
            "to below 1, one of each layer"
        )
    return tuple(
        replace(spec, mlp=replace(spec.mlp, sparsity=float(share))) if isinstance(spec.mlp, DenseMlp) else spec
        for spec, share in zip(specs, told, strict=True)
    )


def with_own_parts(
    config: ConfigFile, specs: Sequence[LayerSpec], types: Sequence[str], full: str, of_model: KvHeads
) -> tuple[LayerSpec, ...]:
    """The layers `specs`, of kinds `types`, with what each has of its own.

    `of_model` are the heads of layers that have none; `full` is the kind without a window.
    """
    shares_projection = bool(config.get("attention_k_eq_v", False))
    heads = _read_heads(config, types, full, of_model, shares_projection)
    num_heads = config.count("num_attention_heads")
    is_wide = bool(config.get("use_double_wide_mlp", False))
    _check_rows(config)
    made = []
    for layer, (spec, kind, own) in enumerate(zip(specs, types, heads, strict=True)):
        if num_heads % own.number:
            raise CheckpointError(
                f"{config.path}: {num_heads} heads of layer {layer} can't share {own.number} kv heads evenly"
            )
        mlp = spec.mlp
        if is_wide and spec.keys_from is not None and isinstance(mlp, DenseMlp):
            mlp = DenseMlp(2 * mlp.ffn_size)
        made.append(
            replace(
                spec,
                mlp=mlp,
                heads=None if own == of_model else own,
                values_are_keys=shares_projection and kind == full and spec.keys_from is None,
            )
        )
    return tuple(made)


def _read_heads(
    config: ConfigFile, types: Sequence[str], full: str, of_model: KvHeads, shares_projection: bool
) -> list[KvHeads]:
    """The kv heads of each layer: by `per_layer_config`, as newer folders have it, or those of full layers."""
    size = config.count("global_head_dim", GLOBAL_HEAD_DIM)
    number = config.get("num_global_key_value_heads")
    told = config.get("per_layer_config")
    if told is None:
        # The other number of kv heads is read only where keys and values have one projection.
        own = config.count("num_global_key_value_heads") if shares_projection and number else of_model.number
        wide = KvHeads(own, size)
        return [wide if kind == full else of_model for kind in types]
    by_layer = _overrides(config, told, len(types))

    def of(layer: int) -> KvHeads:
        own = by_layer.get(layer)
        if own is None:
            return of_model
        return KvHeads(own.count("num_key_value_heads", of_model.number), own.count("head_dim", of_model.size))

    heads = [of(layer) for layer in range(len(types))]
    for kind in dict.fromkeys(types):
        kinds = {each for each, own_kind in zip(heads, types, strict=True) if own_kind == kind}
        if len({each.size for each in kinds}) > 1:
            raise CheckpointError(f"{config.path}: per_layer_config gives layers of {kind} heads of several sizes")
    return heads


def _overrides(config: ConfigFile, told: Any, num_layers: int) -> dict[int, ConfigFile]:
    """`per_layer_config` by the layers' indices. Raises `CheckpointError` for what it may not have."""
    if not isinstance(told, Mapping):
        raise CheckpointError(f"{config.path}: per_layer_config is {told}, but must be an object")
    found = {}
    for key, values in told.items():
        if not str(key).isdecimal() or int(key) >= num_layers or not isinstance(values, Mapping):
            raise CheckpointError(
                f"{config.path}: per_layer_config has {key}, but must have objects by the index of a layer, 0 to "
                f"{num_layers - 1}"
            )
        for name in values:
            if name not in _OVERRIDES:
                raise CheckpointError(
                    f"{config.path}: per_layer_config.{key}.{name} is not supported: only {' and '.join(_OVERRIDES)} "
                    "may differ by layer"
                )
        found[int(key)] = ConfigFile(config.path, values, f"per_layer_config.{key}.")
    return found


def _read_sources(config: ConfigFile, types: Sequence[str]) -> list[int | None]:
    """For each of the last `num_kv_shared_layers` the last layer of its kind before them."""
    count = config.get("num_kv_shared_layers", 0)
    if not isinstance(count, int) or isinstance(count, bool) or not 0 <= count < len(types):
        raise CheckpointError(f"{config.path}: num_kv_shared_layers is {count}, but must be 0 to {len(types) - 1}")
    first = len(types) - count
    last = {kind: layer for layer, kind in enumerate(types[:first])}
    missing = [kind for kind in types[first:] if kind not in last]
    if missing:
        raise CheckpointError(
            f"{config.path}: the last {count} layers share keys and values (num_kv_shared_layers), but none before "
            f"them is of {missing[0]}"
        )
    return [None] * first + [last[kind] for kind in types[first:]]


def _check_rows(config: ConfigFile) -> None:
    """Raises `CheckpointError` where tokens have no row in the table of layers' embeddings."""
    size = config.get("hidden_size_per_layer_input", 0)
    rows = config.get("vocab_size_per_layer_input", 0)
    if size and rows < config.count("vocab_size"):
        raise CheckpointError(
            f"{config.path}: vocab_size_per_layer_input is {rows}, but must be vocab_size, "
            f"{config.count('vocab_size')}, and more: each token has embeddings of the layers"
        )
