"""Rotary position embedding: the angles of every position. Dimensions i and i + H / 2 turn together.

Checkpoints that turn a part of a head, or neighbouring dimensions together, come to this one form when they are loaded:
`split_half_order` says how a head's dimensions are reordered, and what doesn't turn has angle 0.

Source: RoFormer (arXiv 2104.09864); the llama3 scaling is the one published with Llama 3.1; YaRN (arXiv 2309.00071);
LongRoPE (arXiv 2402.13753); "proportional" is Gemma 4's; three positions are Qwen2-VL's (arXiv 2409.12191), whose pairs
take turns in Qwen3-VL (arXiv 2511.21631). `read_rope` reads the parameters from an object of config.json such as
`rope_parameters`, in transformers' words; `decoder_layers` computes the tables once per step,
`pallas_kernels.rotate_and_store` applies them in every layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from jaxsgl.errors import CheckpointError
from jaxsgl.models.config_file import ConfigFile
from pallas_kernels.target import target_device


@dataclass(frozen=True)
class RopeParams:
    """How fast each pair of dimensions turns with the position.

    Attributes:
      theta: base of the geometric series of wavelengths.
      kind: "none" (plain), "linear" (all wavelengths times `factor`), "llama3" and "yarn" (only the long ones),
        "longrope" (each by its own factor), "ntk" (`theta` is stretched, so that the longest is by about `factor`),
        "fixed ntk" (the i-th of P wavelengths by `factor ** (i / P)`), or "proportional" (all wavelengths times
        `factor`, and only the first pairs turn).
      factor: how much the context was stretched.
      low_freq_factor, high_freq_factor: llama3: wavelengths longer than `original_context / low_freq_factor` are
        stretched fully, those shorter than `original_context / high_freq_factor` not at all, between them gradually.
      original_context: context length before stretching, in tokens.
      rotary_dim: R, how many dimensions of a head turn; None: all.
      share: proportional: the share of the pairs that turn, at frequencies spread over the whole head.
      interleaved: in a checkpoint, dimensions 2 i and 2 i + 1 turn together; else i and i + R / 2.
      backwards: a checkpoint turns these the other way round, from the second one to the first.
      amplitude: factor on cosines and sines.
      beta_fast, beta_slow, truncates: yarn: pairs that turn more than `beta_fast` times within the original context
        aren't stretched, those that turn less than `beta_slow` times fully; whether these limits are whole pairs.
      short_factors, long_factors: longrope: stretching of each pair, for contexts up to the original one and beyond.
      is_long: longrope: the long factors hold.
      sections: tokens have three positions (time, row, column), and so many pairs turn with each. (): tokens have one
        position.
      takes_turns: pairs of the three take turns, as far as rows and columns have any; else they stand in order.
      query_growth: queries are multiplied by 1 + query_growth * log(1 + floor(p / original_context)), where p is the
        position plus `growth_offset`.
      growth_offset: see above.
    """

    theta: float = 10000.0
    kind: Literal["none", "linear", "llama3", "yarn", "longrope", "ntk", "fixed ntk", "proportional"] = "none"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192
    rotary_dim: int | None = None
    share: float = 1.0
    interleaved: bool = False
    backwards: bool = False
    amplitude: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncates: bool = True
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    is_long: bool = False
    sections: tuple[int, ...] = ()
    takes_turns: bool = True
    query_growth: float = 0.0
    growth_offset: int = 0

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
        between = rope.high_freq_factor - rope.low_freq_factor  # 0: there is nothing between
        keep = (turns - rope.low_freq_factor) / between if between else turns >= rope.low_freq_factor
        keep = np.clip(keep, 0.0, 1.0)
        plain = keep * plain + (1.0 - keep) * plain / rope.factor
    elif rope.kind == "yarn":
        keep = _yarn_share(rope, turned)
        plain = keep * plain + (1.0 - keep) * plain / rope.factor
    elif rope.kind == "fixed ntk":
        plain = plain / rope.factor ** (np.arange(1, turned // 2 + 1) / (turned // 2))
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
    if rope.rotary_dim in (None, head_dim) and not rope.interleaved and not rope.backwards:
        return None
    turned = rope.rotary_dim or head_dim
    pairs = turned // 2
    firsts = [2 * i if rope.interleaved else i for i in range(pairs)]
    seconds = [first + (1 if rope.interleaved else pairs) for first in firsts]
    if rope.backwards:
        firsts, seconds = seconds, firsts
    still = list(range(turned, head_dim))
    half = len(still) // 2
    return [*firsts, *still[:half], *seconds, *still[half:]]


def reorders_heads(ropes: Sequence[RopeParams], head_dim: int) -> bool:
    """Whether the dimensions of a checkpoint's heads are reordered; all ropes of a layer's heads share one order."""
    return bool(ropes) and split_half_order(ropes[0], head_dim) is not None


def axis_of_pairs(rope: RopeParams, head_dim: int) -> npt.NDArray[np.int32]:
    """Which of three positions each pair of dimensions turns with, `[H / 2]`: 0 time, 1 row, 2 column."""
    axes = np.zeros(head_dim // 2, np.int32)
    if not rope.takes_turns:
        in_order = np.repeat(np.arange(len(rope.sections)), rope.sections)
        axes[: len(in_order)] = in_order
        return axes
    for axis, count in enumerate(rope.sections[1:], 1):
        axes[axis : 3 * count : 3] = axis
    return axes


class RopeTables(NamedTuple):
    """What turns the tokens of a step: once per step, shared by all layers with the same rope.

    Attributes:
      cos, sin: `[T, 1, H / 2]` float32 of the tokens' angles.
      growth: `[T]` float32, factors on queries; None: 1.
    """

    cos: jax.Array
    sin: jax.Array
    growth: jax.Array | None = None


def tables_of(positions: jax.Array, rope: RopeParams | None, head_dim: int) -> RopeTables:
    """The tables of tokens at `positions`, as `rope_tables` takes them; without `sections` the three are equal."""
    growth = None
    if positions.ndim > 1 and not (rope is not None and rope.sections):
        positions = positions[0]
    if rope is not None and rope.query_growth:
        times = jnp.floor((positions + rope.growth_offset).astype(jnp.float32) / rope.original_context)
        growth = 1.0 + rope.query_growth * jnp.log1p(times)
    return RopeTables(*rope_tables(positions, rope, head_dim), growth)


def rope_tables(positions: jax.Array, rope: RopeParams | None, head_dim: int) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines `[T, 1, H / 2]` float32 of the tokens' angles.

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


def read_rope(
    section: ConfigFile,
    plain: RopeParams,
    original: int | None,
    max_context: int,
    *,
    alpha_stretches: bool,
    grows_queries: bool = False,
) -> RopeParams:
    """The rope that `section` describes.

    Args:
      section: the object; may be empty.
      plain: the rope without stretching, by the keys outside of `section`.
      original: `original_max_position_embeddings` outside of it, which counts first; None: not there.
      max_context: tokens that the stretched model was made for.
      alpha_stretches: whether `alpha` of a dynamic rope means something to the model's code.
      grows_queries: likewise `llama_4_scaling_beta`.
    """
    old_word = section.get("type")
    word = section.get("rope_type") or old_word or "default"
    if word not in _KINDS:
        raise CheckpointError(f"{section.path}: rope type {word} is not supported; supported are {', '.join(_KINDS)}")
    plain = replace(plain, theta=section.number("rope_theta", plain.theta))
    if not alpha_stretches:
        section.skip("alpha")
    told = _Stretch(section, word, original, max_context, alpha_stretches)
    rope: RopeParams = _KINDS[word](told, plain)
    growth = told.optional("llama_4_scaling_beta") if grows_queries else None
    return replace(rope, query_growth=growth, original_context=told.original) if growth else rope


class _Stretch:
    """The numbers of one section, with errors that name the rope's type."""

    def __init__(
        self, section: ConfigFile, word: str, original: int | None, max_context: int, alpha_stretches: bool
    ) -> None:
        self.section, self._word = section, word
        self.max_context = max_context
        self.alpha_stretches = alpha_stretches
        in_section = self.number("original_max_position_embeddings", max_context)
        self.original = int(original or in_section)

    def number(self, key: str, default: float | None = None) -> float:
        try:
            return self.section.number(key, default)
        except CheckpointError as error:
            raise CheckpointError(f"{error} (rope type {self._word})") from error

    def optional(self, key: str) -> float | None:
        return None if self.section.get(key) is None else self.number(key)

    def flag(self, key: str, default: bool) -> bool:
        return bool(self.section.get(key, default))

    def numbers(self, key: str, count: int | None) -> tuple[float, ...]:
        values = self.section.get(key)
        fits = isinstance(values, list) and all(isinstance(each, int | float) for each in values)
        if not fits or (count is not None and len(values) != count):
            raise CheckpointError(
                f"{self.section.path}: {key} of rope type {self._word} must be a list of numbers, one for each of "
                f"the {count} turned pairs, but is {str(values)[:60]}"
            )
        return tuple(map(float, values))


def _default(told: _Stretch, plain: RopeParams) -> RopeParams:
    return plain


def _linear(told: _Stretch, plain: RopeParams) -> RopeParams:
    return replace(plain, kind="linear", factor=told.number("factor"))


def _llama3(told: _Stretch, plain: RopeParams) -> RopeParams:
    return replace(
        plain,
        kind="llama3",
        factor=told.number("factor"),
        low_freq_factor=told.number("low_freq_factor"),
        high_freq_factor=told.number("high_freq_factor"),
        original_context=told.original,
    )


def _yarn(told: _Stretch, plain: RopeParams) -> RopeParams:
    """The amplitude is 0.1 ln(factor) + 1, as in the paper, unless one or the ratio of two is given.

    `attn_factor` multiplies it, as vLLM and llama.cpp have it; transformers ignores that.
    """
    factor = told.optional("factor") or told.max_context / told.original

    def amplitude(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    both, all_dims = told.optional("mscale"), told.optional("mscale_all_dim")
    own = amplitude(both) / amplitude(all_dims) if both and all_dims else amplitude(1.0)
    given = told.optional("attention_factor")
    return replace(
        plain,
        kind="yarn",
        factor=factor,
        original_context=told.original,
        amplitude=(own if given is None else given) * (told.optional("attn_factor") or 1.0),
        beta_fast=told.number("beta_fast", 32.0),
        beta_slow=told.number("beta_slow", 1.0),
        truncates=told.flag("truncate", True),
    )


def _longrope(told: _Stretch, plain: RopeParams) -> RopeParams:
    """The amplitude is sqrt(1 + ln(factor) / ln(original context)), unless it is given.

    Phi 3.5 MoE gives one for each list of factors; published folders have it twice.
    """
    factor = told.optional("factor") or told.max_context / told.original
    own = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(told.original))
    given, short, long = map(told.optional, ("attention_factor", "short_mscale", "long_mscale"))
    if short != long:
        raise CheckpointError(
            f"{told.section.path}: short_mscale is {short} and long_mscale {long}, but only models are served where "
            "these are the same"
        )
    given = short if given is None else given
    pairs = None if plain.rotary_dim is None else plain.rotary_dim // 2
    return replace(
        plain,
        kind="longrope",
        original_context=told.original,
        amplitude=own if given is None else given,
        short_factors=told.numbers("short_factor", pairs),
        long_factors=told.numbers("long_factor", pairs),
    )


def _dynamic(told: _Stretch, plain: RopeParams) -> RopeParams:
    """With a fixed `alpha`, if the model's code reads it, `theta` is stretched, else plain up to `max_context`.

    No sequence is longer here: there the rope of its tokens would depend on how long it has become.
    """
    told.section.skip("factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
    alpha = told.optional("alpha") if told.alpha_stretches else None
    return replace(plain, kind="ntk", factor=alpha) if alpha else plain


def _ntk(told: _Stretch, plain: RopeParams) -> RopeParams:
    """As the code of GTE has it, in folders that have their own."""
    return replace(plain, kind="fixed ntk", factor=told.number("factor"))


def _proportional(told: _Stretch, plain: RopeParams) -> RopeParams:
    return replace(
        plain,
        kind="proportional",
        factor=told.number("factor", 1.0),
        share=told.number("partial_rotary_factor", 1.0),
    )


_KINDS: dict[str, Callable[[_Stretch, RopeParams], Any]] = {
    "default": _default, "linear": _linear, "llama3": _llama3, "yarn": _yarn, "deepseek_yarn": _yarn,
    "longrope": _longrope, "su": _longrope,
    "dynamic": _dynamic, "ntk": _ntk, "proportional": _proportional, "mrope": _default,
}  # fmt: skip
