"""Rotary position embedding: the angles of every position. Dimensions i and i + H / 2 turn together.

Checkpoints that turn a part of a head, or neighbouring dimensions together, come to this one form when they are loaded:
`split_half_order` says how a head's dimensions are reordered, and what doesn't turn has angle 0.

Source: RoFormer (arXiv 2104.09864); the llama3 scaling is the one published with Llama 3.1; YaRN (arXiv 2309.00071);
LongRoPE (arXiv 2402.13753); "proportional" is Gemma 4's; three positions whose pairs take turns (Qwen3-VL, arXiv
2511.21631). `rope_config` reads the parameters, `dense` computes the tables once per step,
`pallas_kernels.rotate_and_store` applies them in every layer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
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
      kind: "none" (plain), "linear" (all wavelengths times `factor`), "llama3" and "yarn" (only the long ones),
        "longrope" (each by its own factor), "ntk" (`theta` is stretched, so that the longest is by about `factor`), or
        "proportional" (all wavelengths times `factor`, and only the first pairs turn).
      factor: how much the context was stretched.
      low_freq_factor, high_freq_factor: llama3: wavelengths longer than `original_context / low_freq_factor` are
        stretched fully, those shorter than `original_context / high_freq_factor` not at all, between them gradually.
      original_context: context length before stretching, in tokens.
      rotary_dim: R, how many dimensions of a head turn; None: all.
      share: proportional: the share of the pairs that turn, at frequencies spread over the whole head.
      interleaved: in a checkpoint, dimensions 2 i and 2 i + 1 turn together; else i and i + R / 2.
      amplitude: factor on cosines and sines.
      beta_fast, beta_slow, truncates: yarn: pairs that turn more than `beta_fast` times within the original context
        aren't stretched, those that turn less than `beta_slow` times fully; whether these limits are whole pairs.
      short_factors, long_factors: longrope: stretching of each pair, for contexts up to the original one and beyond.
      is_long: longrope: the long factors hold.
      sections: tokens have three positions (time, row, column), and so many pairs turn with each; pairs of the three
        take turns, as far as rows and columns have any. (): tokens have one position.
    """

    theta: float = 10000.0
    kind: Literal["none", "linear", "llama3", "yarn", "longrope", "ntk", "proportional"] = "none"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192
    rotary_dim: int | None = None
    share: float = 1.0
    interleaved: bool = False
    amplitude: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncates: bool = True
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    is_long: bool = False
    sections: tuple[int, ...] = ()

    def for_context(self, context_length: int) -> RopeParams:
        """The rope for sequences of up to `context_length` tokens.

        The factors of longrope follow from this limit and never from a sequence's length: keys in the cache would have
        been turned otherwise than the queries of a sequence that grew.
        """
        if self.kind != "longrope":
            return self
        return replace(self, is_long=context_length > self.original_context)


def inverse_frequencies(rope: RopeParams, head_dim: int) -> npt.NDArray[np.float32]:
    """Radians per position of each pair of dimensions, `[H / 2]`; computed in float64, then rounded."""
    turned = rope.rotary_dim or head_dim
    theta = rope.theta * rope.factor ** (turned / (turned - 2)) if rope.kind == "ntk" else rope.theta
    plain = theta ** -(np.arange(0, turned, 2, dtype=np.float64) / turned)
    if rope.kind == "linear":
        plain = plain / rope.factor
    elif rope.kind == "llama3":
        turns = rope.original_context * plain / (2 * math.pi)  # full turns within the original context
        keep = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        keep = np.clip(keep, 0.0, 1.0)
        plain = keep * plain + (1.0 - keep) * plain / rope.factor
    elif rope.kind == "yarn":
        keep = _yarn_share(rope, turned)
        plain = keep * plain + (1.0 - keep) * plain / rope.factor
    elif rope.kind == "longrope":
        plain = plain / np.asarray(rope.long_factors if rope.is_long else rope.short_factors)
    elif rope.kind == "proportional":
        turns = np.arange(len(plain)) < int(rope.share * turned // 2)
        plain = np.where(turns, plain / rope.factor, 0.0)
    still = np.zeros((head_dim - turned) // 2)
    return np.concatenate([plain, still]).astype(np.float32)


def _yarn_share(rope: RopeParams, turned: int) -> npt.NDArray[np.float64]:
    """How much of each pair's frequency is kept, `[R / 2]`: 1 for fast pairs, 0 for slow ones, a ramp between them."""

    def pair_that_turns(times: float) -> float:
        return turned * math.log(rope.original_context / (times * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = pair_that_turns(rope.beta_fast), pair_that_turns(rope.beta_slow)
    if rope.truncates:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, turned - 1)
    ramp = (np.arange(turned // 2) - low) / max(high - low, 0.001)
    return 1.0 - np.clip(ramp, 0.0, 1.0)


def split_half_order(rope: RopeParams, head_dim: int) -> list[int] | None:
    """Which of a checkpoint's dimensions of a head each of ours is, `[H]`; None: it has our order already."""
    if rope.rotary_dim in (None, head_dim) and not rope.interleaved:
        return None
    turned = rope.rotary_dim or head_dim
    pairs = turned // 2
    firsts = [2 * i if rope.interleaved else i for i in range(pairs)]
    seconds = [first + (1 if rope.interleaved else pairs) for first in firsts]
    still = list(range(turned, head_dim))
    half = len(still) // 2
    return [*firsts, *still[:half], *seconds, *still[half:]]


def axis_of_pairs(rope: RopeParams, head_dim: int) -> npt.NDArray[np.int32]:
    """Which of three positions each pair of dimensions turns with, `[H / 2]`: 0 time, 1 row, 2 column."""
    axes = np.zeros(head_dim // 2, np.int32)
    for axis, count in enumerate(rope.sections[1:], 1):
        axes[axis : 3 * count : 3] = axis
    return axes


def rope_tables(positions: jax.Array, rope: RopeParams | None, head_dim: int) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines `[T, 1, H / 2]` float32 of the tokens' angles; once per step, shared by all layers.

    `positions` are `[T]`, or `[3, T]` for a rope with `sections`; tokens of text have three equal ones, which `[T]`
    stands for. None is no rotation: the tables of angle 0.
    """
    shape = (positions.shape[-1], 1, head_dim // 2)
    if rope is None:
        return jnp.ones(shape, jnp.float32), jnp.zeros(shape, jnp.float32)

    def tables() -> tuple[jax.Array, jax.Array]:
        if positions.ndim == 1:
            per_pair = positions[:, None, None]
        else:
            per_pair = positions[axis_of_pairs(rope, head_dim)].T[:, None]
        angles = per_pair.astype(jnp.float32) * inverse_frequencies(rope, head_dim)
        cos, sin = jnp.cos(angles), jnp.sin(angles)
        if rope.amplitude == 1:
            return cos, sin
        amplitude = np.ones(head_dim // 2, np.float32)
        amplitude[: (rope.rotary_dim or head_dim) // 2] = rope.amplitude
        return cos * amplitude, sin * amplitude

    if target_device().platform != "cpu":
        return tables()
    # On a CPU, XLA would compute them again in every layer, for every head. It does not look into a branch, and can't
    # know that this one is always taken.
    zeros = jnp.zeros(shape, jnp.float32)
    cos_and_sin: tuple[jax.Array, jax.Array] = jax.lax.cond(
        positions[(0,) * positions.ndim] >= 0, tables, lambda: (zeros, zeros)
    )
    return cos_and_sin
