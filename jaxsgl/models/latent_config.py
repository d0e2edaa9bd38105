"""Reads from config.json how attention over a latent is made. Called by `arch`; `models/latent.py` computes it."""

from __future__ import annotations

import math

from jaxsgl.models.config_file import ConfigFile
from jaxsgl.models.layer_spec import Latent


def read_latent(config: ConfigFile) -> Latent:
    """The latent of all layers. Raises `CheckpointError` for numbers that are missing."""
    q_rank = config.get("q_lora_rank")
    return Latent(
        q_rank=None if q_rank is None else config.count("q_lora_rank"),
        kv_rank=config.count("kv_lora_rank"),
        rotated=config.count("qk_rope_head_dim"),
        unrotated=config.count("qk_nope_head_dim"),
        value=config.count("v_head_dim"),
    )


def read_latent_amplitude(config: ConfigFile) -> float:
    """The factor on queries, and on keys, that goes with a stretched rope (`mscale_all_dim`); 1 without one."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}  # which `layer_config` checks
    weight, factor = rope.get("mscale_all_dim") or 0.0, rope.get("factor") or 1.0
    is_stretched = (rope.get("rope_type") or rope.get("type") or "default") != "default"
    return 1.0 + 0.1 * weight * math.log(factor) if is_stretched and factor > 1 else 1.0
