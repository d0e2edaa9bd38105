"""Makes the parts of quantized matrices: which tensors they are made of, and how.

A part (`models/matrix.py`) is made of the tensors of its whole matrix by the fusing function of `names.py`, which works
on numbers and scales alike since both have a row for each output. The loader calls `recipe_of` for every parameter.
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
from jaxsgl.weights.names import Fuse, Path, Recipe


def recipe_of(path: Path, param: nnx.Param[jax.Array], arch: ModelArch) -> Recipe:
    """The recipe of the (abstract) parameter at `path`, quantized or not."""
    part = param.get_metadata().get("part")
    if part is None:
        return names.recipe_of(path, arch)
    fmt: WeightFormat = param.get_metadata("format")
    whole = str(path[-1]).removesuffix(part_name("", part))
    recipe = names.recipe_of((*path[:-1], whole), arch)
    return Recipe(recipe.sources, QuantizedAtLoad(recipe.fuse, fmt.numbers, part))


@dataclass(frozen=True)
class QuantizedAtLoad:
    """Fuses, then quantizes with one scale per output. Equal ones are one program."""

    fuse: Fuse
    numbers: str
    part: str

    def __call__(self, arch: ModelArch, tensors: tuple[jax.Array, ...]) -> jax.Array:
        """The numbers `[..., in]` or their scales `[..., 1]` float32."""
        numbers, scale = quantize(self.fuse(arch, tensors), self.numbers)
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
