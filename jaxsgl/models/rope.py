"""Rotary position embedding: the angles of every position. Dimensions i and i + H / 2 turn together.

Source: RoFormer (arXiv 2104.09864); the llama3 scaling is the one published with Llama 3.1. `arch.py` reads the
parameters, `dense.py` computes the tables once per step, `pallas_kernels.rotate_and_store` applies them in every layer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from pallas_kernels.target import target_device


@dataclass(frozen=True)
class RopeParams:
    """How fast each pair of dimensions turns with the position.

    Attributes:
      theta: base of the geometric series of wavelengths.
      kind: "none" (plain), "linear" (all wavelengths times `factor`), or "llama3" (only the long ones).
      factor: how much the context was stretched.
      low_freq_factor, high_freq_factor: llama3: wavelengths longer than `original_context / low_freq_factor` are
        stretched fully, those shorter than `original_context / high_freq_factor` not at all, between them gradually.
      original_context: llama3: context length before stretching, in tokens.
    """

    theta: float = 10000.0
    kind: Literal["none", "linear", "llama3"] = "none"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192


def inverse_frequencies(rope: RopeParams, head_dim: int) -> npt.NDArray[np.float32]:
    """Radians per position of each pair of dimensions, `[H / 2]`; computed in float64, then rounded."""
    plain = rope.theta ** -(np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if rope.kind == "linear":
        plain = plain / rope.factor
    elif rope.kind == "llama3":
        turns = rope.original_context * plain / (2 * math.pi)  # full turns within the original context
        keep = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        keep = np.clip(keep, 0.0, 1.0)
        plain = keep * plain + (1.0 - keep) * plain / rope.factor
    return plain.astype(np.float32)


def rope_tables(positions_T: jax.Array, rope: RopeParams, head_dim: int) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines `[T, 1, H / 2]` float32 of the tokens' angles; once per step, shared by all layers."""

    def tables() -> tuple[jax.Array, jax.Array]:
        angles = positions_T[:, None, None].astype(jnp.float32) * inverse_frequencies(rope, head_dim)
        return jnp.cos(angles), jnp.sin(angles)

    if target_device().platform != "cpu":
        return tables()
    # On a CPU, XLA would compute them again in every layer, for every head. It does not look into a branch, and can't
    # know that this one is always taken.
    zeros = jnp.zeros((len(positions_T), 1, head_dim // 2), jnp.float32)
    cos_and_sin: tuple[jax.Array, jax.Array] = jax.lax.cond(positions_T[0] >= 0, tables, lambda: (zeros, zeros))
    return cos_and_sin
