"""Reads from config.json what layers are that keep states, and layers that are a mixer or an MLP alone.

Owns the words of Qwen3-Next, OLMo, Kimi Linear, Granite 4.0, Bamba, Falcon-H1, Nemotron-H, Jamba and LFM2 for these.
Called by `layer_config`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from jaxsgl.errors import CheckpointError
from jaxsgl.models.config_file import ConfigFile
from jaxsgl.models.family import Family
from jaxsgl.models.layer_spec import ChannelDeltaNet, DeltaNet, Mamba, RecurrentNet, Selective, ShortConv

# Words of `layer_types`.
FULL, SLIDING, RECURRENT = "full_attention", "sliding_attention", "linear_attention"
DENSE, EXPERTS = "mlp", "moe"  # of blocks
_OTHER_WORDS = {  # of published folders, by what recurs
    "delta-net": {"attention": FULL},
    "channel-delta-net": {},
    "selective": {"attention": FULL, "mamba": RECURRENT},
    "mamba": {"attention": FULL, "mamba": RECURRENT},
    "short-conv": {"attention": FULL, "conv": RECURRENT},
}
_LETTERS = {"M": RECURRENT, "*": FULL, "-": DENSE, "E": EXPERTS}  # of `hybrid_override_pattern`
# How keys begin that mean nothing where no layer keeps states.
_OF_NETS = {"mamba": ("mamba_", "time_step_"), "selective": ("mamba_",), "short-conv": ("conv_",)}
ATTENTION_EVERY = 4  # layers, where config.json doesn't say otherwise
CHANNELS = 64  # of a short convolution that a device has at least


def read_recurrent_net(config: ConfigFile, family: Family) -> RecurrentNet:
    """That of all layers which keep states. Raises `CheckpointError` for numbers that don't fit, or aren't served."""
    if family.recurrence == "mamba":
        return _read_mamba(config, family.mamba_keys)
    if family.recurrence == "channel-delta-net":
        return _read_channel_delta_net(config)
    if family.recurrence == "selective":
        return _read_selective(config)
    return _read_short_conv(config) if family.recurrence == "short-conv" else _read_delta_net(config, family)


def skip_recurrent_net(config: ConfigFile, family: Family) -> None:
    """Takes its keys for asked, where no layer keeps states."""
    starts, names = _OF_NETS.get(str(family.recurrence), ()), family.mamba_keys.values()
    config.skip(*(key for key in config.values if (starts and key.startswith(starts)) or key in names))


def _read_short_conv(config: ConfigFile) -> ShortConv:
    if config.get("conv_bias", False):
        raise CheckpointError(f"{config.path}: conv_bias is true, but only false is supported")
    taps, size = config.count("conv_L_cache", 3), config.count("hidden_size")
    if taps < 2:
        raise CheckpointError(f"{config.path}: conv_L_cache is 1, but must be 2 and more")
    channels = math.gcd(size, CHANNELS)
    return ShortConv(size // channels, size // channels, 0, channels, taps)


def _read_delta_net(config: ConfigFile, family: Family) -> DeltaNet:
    is_wide = family.wide_delta
    heads = config.count("num_attention_heads")
    key_heads = config.count("linear_num_key_heads", heads if is_wide else 16)
    key_size = config.count(
        "linear_key_head_dim", int(0.75 * config.count("hidden_size") / key_heads) or 1 if is_wide else 128
    )
    made = DeltaNet(
        key_heads=key_heads,
        value_heads=config.count("linear_num_value_heads", heads if is_wide else 32),
        key_size=key_size,
        value_size=config.count("linear_value_head_dim", 2 * key_size if is_wide else 128),
        taps=config.count("linear_conv_kernel_dim", 4),
        most_written=2.0 if is_wide and config.get("linear_allow_neg_eigval", True) else 1.0,
        norm_eps=1e-5 if is_wide else None,
    )
    if made.value_heads % made.key_heads:
        raise CheckpointError(
            f"{config.path}: {made.value_heads} value heads (linear_num_value_heads) can't share {made.key_heads} key "
            "heads (linear_num_key_heads) evenly"
        )
    if made.taps < 2:
        raise CheckpointError(f"{config.path}: linear_conv_kernel_dim is 1, but must be 2 and more")
    return made


def _read_selective(config: ConfigFile) -> Selective:
    size, taps = config.count("hidden_size"), config.count("mamba_d_conv")
    if taps < 2:
        raise CheckpointError(f"{config.path}: mamba_d_conv is 1, but must be 2 and more")
    rank = -(-size // 16) if config.get("mamba_dt_rank") == "auto" else config.count("mamba_dt_rank")
    channels = config.count("mamba_expand") * size
    return Selective(1, 1, config.count("mamba_d_state"), channels, taps, rank=rank)


def _read_channel_delta_net(config: ConfigFile) -> ChannelDeltaNet:
    """By the keys of published folders, `linear_attn_config`, or those of transformers."""
    told = _published_nets(config)
    names = ("num_heads", "head_dim", "short_conv_kernel_size")
    others = ("linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim")
    heads, size, taps = (told.count(name, config.count(other)) for name, other in zip(names, others, strict=True))
    if taps < 2:
        raise CheckpointError(f"{config.path}: short_conv_kernel_size is 1, but must be 2 and more")
    return ChannelDeltaNet(heads, heads, size, size, taps, rank=size)


def _published_nets(config: ConfigFile) -> ConfigFile:
    told = config.section("linear_attn_config") or ConfigFile(config.path, {})
    told.skip("num_heads", "head_dim", "short_conv_kernel_size", "full_attn_layers", "kda_layers")
    return told


def _read_mamba(config: ConfigFile, keys: Mapping[str, str]) -> Mamba:
    """By `Family.mamba_keys`."""

    def name(key: str) -> str:
        return keys.get(key, key)

    heads, groups = config.count(name("mamba_n_heads"), 128), config.count(name("mamba_n_groups"), 1)
    expand = name("mamba_expand")
    inner = config.count(expand, 2) * config.count("hidden_size") if expand else None
    if "mamba_d_ssm" in keys and config.get("mamba_d_ssm") is not None:
        inner = config.count("mamba_d_ssm")
    told = config.get(name("mamba_d_head"), "auto")
    head_size = inner // heads if inner is not None and told == "auto" else config.count(name("mamba_d_head"))
    if heads * head_size != (inner or heads * head_size) or heads % groups:
        makes = f" don't make {inner} ({expand} times hidden_size)" if inner else " can't be"
        raise CheckpointError(
            f"{config.path}: {heads} heads ({name('mamba_n_heads')}) of {head_size} numbers ({name('mamba_d_head')}) "
            f"in {groups} groups ({name('mamba_n_groups')}){makes}"
        )
    infinite = [0.0, {"__float__": "Infinity"}]  # as transformers writes it
    limit = config.get("time_step_limit") or infinite
    is_infinite = limit[0] == 0 and isinstance(limit[1], int | float) and limit[1] >= float(np.finfo(np.float32).max)
    has_conv_bias, has_bias, activation = map(name, ("mamba_conv_bias", "mamba_proj_bias", "mamba_hidden_act"))
    unserved = (
        (has_conv_bias, config.get(has_conv_bias, True), True),
        (has_bias, config.get(has_bias, False), False),
        (activation, config.get(activation, "silu"), "silu"),
        ("time_step_limit", infinite if is_infinite else limit, infinite),
    )
    for key, value, served in unserved:
        if value != served:
            raise CheckpointError(f"{config.path}: {key} is {value}, but only {served} is supported")
    taps = config.count(name("mamba_d_conv"), 4)
    if taps < 2:
        raise CheckpointError(f"{config.path}: {name('mamba_d_conv')} is 1, but must be 2 and more")
    made = Mamba(groups, heads, config.count(name("mamba_d_state"), 256), head_size, taps)
    return made if "ssm_multipliers" not in keys else _with_factors(config, made)


def _with_factors(config: ConfigFile, net: Mamba) -> Mamba:
    """The layer as Falcon-H1 has it. Raises `CheckpointError` for what isn't built."""
    normalizes = bool(config.get("mamba_rms_norm", False))
    if config.get("mamba_norm_before_gate", True) and normalizes:
        raise CheckpointError(
            f"{config.path}: mamba_norm_before_gate is true, but only norms after the gate are supported (false)"
        )
    told, of_input = config.get("ssm_multipliers") or [1.0] * 5, config.number("ssm_in_multiplier", 1.0)
    if not isinstance(told, list) or len(told) != 5:
        raise CheckpointError(f"{config.path}: ssm_multipliers is {told}, but must be a list of 5 numbers")
    z, x, b, c, dt = (of_input * float(each) for each in told)
    factors = () if {z, x, b, c, dt} == {1.0} else (c, b, x, z, dt)
    out = config.number("ssm_out_multiplier", 1.0)
    return replace(net, normalizes=normalizes, row_factors=factors, out_factor=out)


def read_recurrent_types(config: ConfigFile, family: Family, num_layers: int) -> list[str]:
    """`FULL`, `SLIDING` or `RECURRENT` for each layer.

    Raises `CheckpointError` for other words, and where none is attention.
    """
    others = _unless_listed(config, family, num_layers)
    told: Any = config.get("layer_types") or config.get("layers_block_type") or others
    words = _OTHER_WORDS[str(family.recurrence)]
    types = [words.get(str(each), str(each)) for each in told] if isinstance(told, list) else []
    known = [FULL, RECURRENT] if family.windows == "none" else [FULL, SLIDING, RECURRENT]
    if len(types) != num_layers or not set(types) <= set(known):
        raise CheckpointError(
            f"{config.path}: layer_types is {told}, but must be a list of {num_layers}, each {' or '.join(known)}"
        )
    if set(types) == {RECURRENT}:
        raise CheckpointError(f"{config.path}: layer_types has no {FULL}, of which one layer must be at least")
    return types


def _unless_listed(config: ConfigFile, family: Family, num_layers: int) -> list[str]:
    """The types where config.json lists none."""
    if family.windows != "none":  # as LFM3 has them
        return [FULL if i % 4 == 2 else SLIDING if i and i % 4 == 0 else RECURRENT for i in range(num_layers)]
    if family.recurrence == "channel-delta-net":
        told = _published_nets(config)
        attending, others = (told.get(key) for key in ("full_attn_layers", "kda_layers"))
        if attending is None or others is None:
            return [FULL if i and i % ATTENTION_EVERY == 0 else RECURRENT for i in range(num_layers)]
        numbers = range(1, num_layers + 1)
        return [FULL if i in attending else RECURRENT if i in others else "none" for i in numbers]
    if family.recurrence == "selective":
        every, first = config.count("attn_layer_period"), config.get("attn_layer_offset")
        return [FULL if i % every == first else RECURRENT for i in range(num_layers)]
    attending = config.get("attn_layer_indices", [])
    if family.recurrence == "short-conv":
        attending = config.get("full_attn_idxs", range(num_layers))
    elif family.recurrence == "delta-net":
        every = config.count("full_attention_interval", ATTENTION_EVERY)
        attending = range(every - 1, num_layers, every)
    return [FULL if i in attending else RECURRENT for i in range(num_layers)]


def read_blocks(config: ConfigFile) -> list[str]:
    """`FULL`, `RECURRENT`, `DENSE` or `EXPERTS` for each layer of a family whose layers are one of these.

    Raises `CheckpointError` for other words, and where none is attention.
    """
    config.skip("num_hidden_layers")  # their number is that of the blocks, as in transformers
    told: Any = config.get("layers_block_type") or config.get("layer_types") or config.get("hybrid_override_pattern")
    told = told or [RECURRENT, EXPERTS, FULL, DENSE]
    words = [_LETTERS.get(each, each) for each in told] if isinstance(told, str) else told
    others = _OTHER_WORDS["mamba"]
    blocks = [others.get(str(each), str(each)) for each in words] if isinstance(words, list) else []
    if not blocks or not set(blocks) <= set(_LETTERS.values()):
        raise CheckpointError(
            f"{config.path}: layers_block_type is {told}, but must be a list of {', '.join(_LETTERS.values())}, or "
            f"hybrid_override_pattern a word of the letters {' '.join(_LETTERS)}"
        )
    if FULL not in blocks:
        raise CheckpointError(f"{config.path}: layers_block_type has no {FULL}, of which one must be at least")
    return blocks
