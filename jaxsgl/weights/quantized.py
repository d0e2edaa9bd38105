"""Makes the parts of quantized matrices: which tensors they are made of, and how.

A part (`models/matrix.py`) is computed on the devices from its whole matrix, which is read as `names.py` says. The
loader calls `recipe_of` for every parameter.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx

from jaxsgl.models import ModelArch
from jaxsgl.models.matrix import part_name
from jaxsgl.models.quantization import WeightFormat
from jaxsgl.weights import names
from jaxsgl.weights.names import Path, Recipe


def recipe_of(path: Path, param: nnx.Param[jax.Array], arch: ModelArch) -> Recipe:
    """The recipe of the (abstract) parameter at `path`, quantized or not."""
    part = param.get_metadata().get("part")
    if part is None:
        return names.recipe_of(path, arch)
    fmt: WeightFormat = param.get_metadata("format")
    whole = str(path[-1]).removesuffix(part_name("", part))
    recipe = names.recipe_of((*path[:-1], whole), arch)
    return Recipe(recipe.sources, recipe.pieces, QuantizedAtLoad(fmt.numbers, part))


@dataclass(frozen=True)
class QuantizedAtLoad:
    """Quantizes with one scale per output. Equal ones are one program."""

    numbers: str
    part: str

    def __call__(self, arch: ModelArch, weights: jax.Array) -> jax.Array:
        """Of `weights [..., in]`, the numbers `[..., in]` or their scales `[..., 1]` float32."""
        numbers, scale = quantize(weights, self.numbers)
        return numbers if self.part == "numbers" else scale


def quantize(weights: jax.Array, numbers: str) -> tuple[jax.Array, jax.Array]:
    """The nearest numbers `[..., in]` of that dtype, and scales `[..., 1]`; a row's largest number ends the range."""
    weights = weights.astype(jnp.float32)
    is_float = jnp.issubdtype(jnp.dtype(numbers), jnp.floating)
    largest = float(jnp.finfo(numbers).max if is_float else jnp.iinfo(numbers).max)
    scale = jnp.max(jnp.abs(weights), axis=-1, keepdims=True) / largest
    scale = jnp.where(scale > 0, scale, 1.0)
    scaled = jnp.clip(weights / scale, -largest, largest)
    return (scaled if is_float else jnp.round(scaled)).astype(numbers), scale
