"""Reads from config.json how gated delta-nets are made, and which layers are some. Called by `layer_config`."""

from __future__ import annotations

from jaxsgl.errors import CheckpointError
from jaxsgl.models.config_file import ConfigFile
from jaxsgl.models.layer_spec import DeltaNet

ATTENTION, DELTA = "full_attention", "linear_attention"  # words of `layer_types`
ATTENTION_EVERY = 4  # layers, where config.json doesn't say otherwise


def read_delta_net(config: ConfigFile) -> DeltaNet:
    """The delta-net of all layers that are one. Raises `CheckpointError` for numbers that don't fit each other."""
    made = DeltaNet(
        key_heads=config.count("linear_num_key_heads", 16),
        value_heads=config.count("linear_num_value_heads", 32),
        key_size=config.count("linear_key_head_dim", 128),
        value_size=config.count("linear_value_head_dim", 128),
        taps=config.count("linear_conv_kernel_dim", 4),
    )
    if made.value_heads % made.key_heads:
        raise CheckpointError(
            f"{config.path}: {made.value_heads} value heads (linear_num_value_heads) can't share {made.key_heads} key "
            "heads (linear_num_key_heads) evenly"
        )
    if made.taps < 2:
        raise CheckpointError(f"{config.path}: linear_conv_kernel_dim is 1, but must be 2 and more")
    return made


def read_delta_types(config: ConfigFile, num_layers: int) -> list[str]:
    """`ATTENTION` or `DELTA` for each layer. Raises `CheckpointError` for other words, and where none is attention."""
    every = config.count("full_attention_interval", ATTENTION_EVERY)
    told = config.get("layer_types") or [DELTA if (i + 1) % every else ATTENTION for i in range(num_layers)]
    if not isinstance(told, list) or len(told) != num_layers or not set(told) <= {ATTENTION, DELTA}:
        raise CheckpointError(
            f"{config.path}: layer_types is {told}, but must be a list of {num_layers}, each {ATTENTION} or {DELTA}"
        )
    if ATTENTION not in told:
        raise CheckpointError(f"{config.path}: layer_types has no {ATTENTION}, of which one layer must be at least")
    return told
