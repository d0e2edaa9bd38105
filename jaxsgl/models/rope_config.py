"""Reads how a rope was stretched for longer contexts, from an object of config.json such as `rope_parameters`.

Owns the words of transformers for it and the defaults of its numbers. Called by `layer_config`; `rope` computes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from jaxsgl.errors import CheckpointError
from jaxsgl.models.config_file import ConfigFile
from jaxsgl.models.rope import RopeParams


def read_rope(section: ConfigFile, plain: RopeParams, original: int | None, max_context: int) -> RopeParams:
    """The rope that `section` describes.

    Args:
      section: the object; may be empty.
      plain: the rope without stretching, by the keys outside of `section`.
      original: `original_max_position_embeddings` outside of it, which counts first; None: not there.
      max_context: tokens that the stretched model was made for.
    """
    old_word = section.get("type")
    word = section.get("rope_type") or old_word or "default"
    if word not in _KINDS:
        raise CheckpointError(f"{section.path}: rope type {word} is not supported; supported are {', '.join(_KINDS)}")
    plain = replace(plain, theta=section.number("rope_theta", plain.theta))
    return _KINDS[word](_Stretch(section, word, original, max_context), plain)


class _Stretch:
    """The numbers of one section, with errors that name the rope's type."""

    def __init__(self, section: ConfigFile, word: str, original: int | None, max_context: int) -> None:
        self._section, self._word = section, word
        self.max_context = max_context
        in_section = self.number("original_max_position_embeddings", max_context)
        self.original = int(original or in_section)

    def number(self, key: str, default: float | None = None) -> float:
        try:
            return self._section.number(key, default)
        except CheckpointError as error:
            raise CheckpointError(f"{error} (rope type {self._word})") from error

    def optional(self, key: str) -> float | None:
        return None if self._section.get(key) is None else self.number(key)

    def flag(self, key: str, default: bool) -> bool:
        return bool(self._section.get(key, default))

    def numbers(self, key: str, count: int | None) -> tuple[float, ...]:
        values = self._section.get(key)
        fits = isinstance(values, list) and all(isinstance(each, int | float) for each in values)
        if not fits or (count is not None and len(values) != count):
            raise CheckpointError(
                f"{self._section.path}: {key} of rope type {self._word} must be a list of numbers, one for each of "
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
    """The amplitude is 0.1 ln(factor) + 1, as in the paper, unless one or the ratio of two is given."""
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
        amplitude=own if given is None else given,
        beta_fast=told.number("beta_fast", 32.0),
        beta_slow=told.number("beta_slow", 1.0),
        truncates=told.flag("truncate", True),
    )


def _longrope(told: _Stretch, plain: RopeParams) -> RopeParams:
    """The amplitude is sqrt(1 + ln(factor) / ln(original context)), unless it is given."""
    factor = told.optional("factor") or told.max_context / told.original
    own = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(told.original))
    given = told.optional("attention_factor")
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
    """Only with a fixed `alpha`: else the rope of a token would depend on how long its sequence has become."""
    return replace(plain, kind="ntk", factor=told.number("alpha"))


def _proportional(told: _Stretch, plain: RopeParams) -> RopeParams:
    return replace(
        plain,
        kind="proportional",
        factor=told.number("factor", 1.0),
        share=told.number("partial_rotary_factor", 1.0),
    )


_KINDS: dict[str, Callable[[_Stretch, RopeParams], Any]] = {
    "default": _default, "linear": _linear, "llama3": _llama3, "yarn": _yarn, "longrope": _longrope, "su": _longrope,
    "dynamic": _dynamic, "proportional": _proportional,
}  # fmt: skip
