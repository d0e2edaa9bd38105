"""The merger of a tower, which makes tokens of squares of patches: its parameters, and what it computes.

Knows no images and no layers. A `Tower` has one behind its last layer, and others behind layers that deepstack taps.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from jaxsgl.models.matrix import Matrices
from jaxsgl.models.towers.arch import MergerShape
from jaxsgl.models.towers.parts import (
    declare_matrix,
    declare_norm,
    declare_numbers,
    normalized,
    numbers_of,
    root_norm,
    through,
)


class Merger(Matrices):
    """Squares of patches to rows of the decoder's size; `count` of them stacked, or one without that axis.

    Args:
      shape: what it is like.
      hidden_size, out_size: M of the tower, D of the decoder.
      dtype: of the parameters.
      count: how many; None: one.
      normalizes_squares: the norm is over a whole square, not over each patch.
    """

    def __init__(
        self,
        shape: MergerShape,
        hidden_size: int,
        out_size: int,
        dtype: jnp.dtype,
        count: int | None,
        normalizes_squares: bool,
    ) -> None:
        self._shape, self._wide = shape, (wide := hidden_size * shape.num_patches)
        self._normalized = wide if normalizes_squares else hidden_size
        stack, kind = () if count is None else (count,), shape.kind
        if kind == "gated":
            self._declare_gated(out_size, dtype, stack)
            return
        if shape.norm is not None:
            declare_norm(self, "norm", (*stack, self._normalized), dtype, shape.norm)
        if shape.standardizes:
            declare_numbers(self, "shift", (hidden_size,), dtype, mean=0.0)
            declare_numbers(self, "factor", (hidden_size,), dtype, mean=1.0)
        if kind == "projected":
            declare_matrix(self, "merge", (*stack, hidden_size, wide), dtype, has_bias=False)
        read = wide if kind in ("mlp", "product", "square", "halved") else hidden_size
        units = shape.ffn_size or (wide if kind == "mlp" else out_size)
        declare_matrix(self, "fc1", (*stack, units, read), dtype, shape.bias)
        if kind not in ("pooled", "product", "scaled", "normed", "averaged"):
            declare_matrix(self, "fc2", (*stack, out_size, units // (1 + (kind == "halved"))), dtype, shape.bias)

    def _declare_gated(self, out: int, dtype: jnp.dtype, stack: tuple[int, ...]) -> None:
        units = self._shape.ffn_size
        declare_matrix(self, "merge", (*stack, out, self._wide), dtype)
        declare_norm(self, "norm", (*stack, out), dtype, "deviation")
        for name, shape in {"mix": (out, out), "gate": (units, out), "fc1": (units, out), "fc2": (out, units)}.items():
            declare_matrix(self, name, (*stack, *shape), dtype, has_bias=False)

    def __call__(self, x_PM: jax.Array, index: int | jax.Array | None = None) -> jax.Array:
        """`[P, M]` to `[P / 4, D]`, by the merger `index` of the stack."""
        kind, eps = self._shape.kind, self._shape.eps

        def of(name: str) -> jax.Array:
            array = numbers_of(self, name)
            return array if index is None else array[index]

        if kind in ("pooled", "scaled", "averaged"):
            squares = x_PM.reshape(-1, self._wide // x_PM.shape[1], x_PM.shape[1]).astype(jnp.float32)
            mean = jnp.mean(squares, axis=1)
            if kind == "scaled":
                normed = root_norm(self._scaled(mean).astype(x_PM.dtype), None, eps)
            else:
                normed = normalized(self, "norm", mean.astype(x_PM.dtype), of, eps)
            return through(self, "fc1", normed, of)
        if kind == "gated":
            mixed = through(self, "mix", through(self, "merge", x_PM.reshape(-1, self._wide), of), of)
            read = jax.nn.gelu(normalized(self, "norm", mixed, of, eps), approximate=False)
            gate = jax.nn.silu(through(self, "gate", read, of))
            return through(self, "fc2", gate * through(self, "fc1", read, of), of)
        if kind == "normed":
            return through(self, "fc1", root_norm(x_PM, None, eps), of)
        if kind == "product":
            return through(self, "fc1", x_PM.reshape(-1, self._wide), of)
        x = x_PM.reshape(-1, self._normalized)
        x = normalized(self, "norm", x, of, eps) if self._shape.norm is not None else x
        x = x.reshape(-1, self._wide)
        x = through(self, "merge", x, of) if kind == "projected" else x
        x = through(self, "fc1", x, of)
        if kind == "halved":
            half, gate = jnp.split(x, 2, axis=-1)
            return through(self, "fc2", jax.nn.silu(gate) * half, of)
        x = jax.nn.gelu(x, approximate=False)
        return through(self, "fc2", x, of)

    def _scaled(self, mean_TM: jax.Array) -> jax.Array:
        """Means `[T, M]` float32, times sqrt(M), less the shift, times the factor."""
        scaled = mean_TM * math.sqrt(mean_TM.shape[1])
        if not self._shape.standardizes:
            return scaled
        shift, factor = (numbers_of(self, name).astype(jnp.float32) for name in ("shift", "factor"))
        return (scaled - shift) * factor
