"""Reads the layers of a decoder from config.json: the window, the rope and the MLP of each.

Called by `arch`. Knows the keys of transformers 5 and of older folders; `families` says which of them a family has.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jaxsgl.errors import CheckpointError
from jaxsgl.models.config_file import ConfigFile
from jaxsgl.models.families import Family
from jaxsgl.models.layer_spec import LayerSpec
from jaxsgl.models.moe_config import read_mlps
from jaxsgl.models.rope import RopeParams
from jaxsgl.models.rope_config import read_rope

FULL, SLIDING = "full_attention", "sliding_attention"  # words of `layer_types`


@dataclass(frozen=True)
class Layers:
    """What `read_layers` yields.

    Attributes:
      specs: of the layers.
      ropes: those that the specs name by index.
      max_context: the most tokens of one sequence.
    """

    specs: tuple[LayerSpec, ...]
    ropes: tuple[RopeParams, ...]
    max_context: int


def read_layers(config: ConfigFile, family: Family, head_dim: int) -> Layers:
    """All layers. Raises `CheckpointError` for what isn't supported."""
    num_layers = config.count("num_hidden_layers")
    is_turned = _read_turned(config, family, num_layers)
    types = _read_types(config, family, is_turned)
    rope_of_type = _read_ropes(config, family, head_dim)
    ropes = tuple(dict.fromkeys(rope_of_type.values()))
    stretched = (int(rope.factor * rope.original_context) for rope in ropes if rope.kind == "yarn")
    max_context = max(config.count("max_position_embeddings"), *stretched, 0)
    window = _read_window(config, family, max_context)
    mlps = read_mlps(config, family.moe, num_layers)
    specs = tuple(
        LayerSpec(mlp, window if each == SLIDING else None, ropes.index(rope_of_type[each]) if turned else None)
        for mlp, each, turned in zip(mlps, types, is_turned, strict=True)
    )
    return Layers(specs, ropes, max_context)


def _read_turned(config: ConfigFile, family: Family, num_layers: int) -> list[bool]:
    """Whether each layer has a rope."""
    if not family.no_rope_layers:
        return [True] * num_layers
    every = config.count("no_rope_layer_interval", 4)
    told = config.get("no_rope_layers") or [(i + 1) % every != 0 for i in range(num_layers)]
    return [bool(turned) for turned in _of_each_layer(config, "no_rope_layers", told, num_layers)]


def _read_types(config: ConfigFile, family: Family, is_turned: list[bool]) -> list[str]:
    """`FULL` or `SLIDING` for each layer."""
    num_layers = len(is_turned)
    if family.windows == "none":
        return [FULL] * num_layers
    pattern = family.full_every
    if pattern is not None:
        pattern = config.get("sliding_window_pattern", config.get("_sliding_window_pattern", pattern))
    if family.no_rope_layers:
        slides = [not turned for turned in is_turned]
    elif family.windows == "flag":
        first = config.get("max_window_layers", 28)
        slides = [i >= first for i in range(num_layers)]
    else:
        slides = [pattern is None or (i + 1) % pattern != 0 for i in range(num_layers)]
    told = config.get("layer_types") or [SLIDING if each else FULL for each in slides]
    for each in _of_each_layer(config, "layer_types", told, num_layers):
        if each not in (FULL, SLIDING):
            raise CheckpointError(f"{config.path}: layer_types has {each}; supported are {FULL} and {SLIDING}")
    return list(told)


def _of_each_layer(config: ConfigFile, key: str, values: Any, num_layers: int) -> list[Any]:
    if not isinstance(values, list) or len(values) != num_layers:
        raise CheckpointError(
            f"{config.path}: {key} is {values}, but must be a list of {num_layers}, one of each layer"
        )
    return values


def _read_window(config: ConfigFile, family: Family, max_context: int) -> int | None:
    """Tokens that a layer with a window attends to; None: all, as where no sequence is longer than the window."""
    if family.windows == "none":
        return None
    is_on = config.get("use_sliding_window", False) if family.windows == "flag" else True
    is_given = config.get("sliding_window") is not None
    if not (is_on and is_given):
        return None
    window = config.count("sliding_window")
    return window if window < max_context else None


def _read_ropes(config: ConfigFile, family: Family, head_dim: int) -> dict[str, RopeParams]:
    """The rope of each type of layer, from `rope_parameters` of transformers 5, or the keys of older folders."""
    max_context = config.count("max_position_embeddings")
    original = config.get("original_max_position_embeddings")
    share = config.number("partial_rotary_factor", 1.0) if family.partial_rope else 1.0
    theta = config.number("rope_theta", 10000.0)

    def rope(section: ConfigFile | None, theta: float) -> RopeParams:
        section = section or ConfigFile(config.path, {})
        own_share = section.number("partial_rotary_factor", share) if family.partial_rope else 1.0
        rotary_dim = None if own_share == 1 else int(head_dim * own_share)
        sections = _read_sections(section, head_dim) if family.vision else ()
        plain = RopeParams(theta, rotary_dim=rotary_dim, interleaved=family.interleaved_rope, sections=sections)
        return read_rope(section, plain, original, max_context)

    both = config.section("rope_parameters") or config.section("rope_scaling")
    if family.sliding_theta_key is None:
        one = rope(both, theta)
        return {FULL: one, SLIDING: one}
    sliding_theta = config.number(family.sliding_theta_key, theta)
    if both is not None and (FULL in both.values or SLIDING in both.values):
        return {FULL: rope(both.section(FULL), theta), SLIDING: rope(both.section(SLIDING), sliding_theta)}
    return {FULL: rope(both, theta), SLIDING: rope(None, sliding_theta)}


def _read_sections(rope: ConfigFile, head_dim: int) -> tuple[int, ...]:
    """Pairs of dimensions that turn with time, row and column, which take turns."""
    sections = rope.get("mrope_section", [24, 20, 20])
    if not rope.get("mrope_interleaved", True):
        raise CheckpointError(f"{rope.path}: mrope_interleaved is false, but only true is supported")
    fits = isinstance(sections, list) and len(sections) == 3 and all(type(each) is int for each in sections)
    if not fits or min(sections) < 0 or sum(sections) != head_dim // 2:
        raise CheckpointError(
            f"{rope.path}: mrope_section is {sections}, but must be three numbers of pairs, {head_dim // 2} together"
        )
    return tuple(sections)
