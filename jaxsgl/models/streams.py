"""The residual stream of a model, or several of them: what layers update, and what becomes of it after each layer.

    one      x is what each layer updates
    several  one layer reads and updates the first of S streams; the others follow it (AltUp, arXiv 2301.13310)
             predicted  p = h + C(h_0) h    before a layer, C [S, S] of each token
             corrected  h = p + c(x) (x - p_0)    after it, x being what the layer made of p_0, c [S] of each token

Owns both forms, and what stands next to attention where a model has several (LAuReL, arXiv 2411.07501).
`decoder_layers` builds one of them, opens the streams before the first layer, and calls it after each. Never knows
checkpoints.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import TypeAlias

import jax
import jax.numpy as jnp
from flax import nnx

from jaxsgl.models.arch import ModelArch
from jaxsgl.models.layers import LayerRows, LayerVectors, Row
from jaxsgl.models.matrix import Matrices
from jaxsgl.models.precision import product, product_of_few
from pallas_kernels.norm import rms_norm, row_of, scale_of
from pallas_kernels.sums import mean_squares

LEAST_MEAN_SQUARE = 1e-5  # of a stream that is brought to the length of another one

Predicted: TypeAlias = jax.Array | tuple[()]  # streams before a layer `[S, T, D]`; () where there is one
OfEmbedding: TypeAlias = Callable[[jax.Array], jax.Array]  # a stream `[T, D]` -> what the layer's embedding adds


class OneStream(nnx.Module):
    """The stream of most models: nothing comes between a layer's last sum and the norm of what reads it."""

    def opened(self, x_TD: jax.Array, vectors: LayerVectors, rows: LayerRows) -> tuple[jax.Array, Predicted]:
        """What the first layer updates, of what goes into the stream, and what `after_layer` needs of the others."""
        return x_TD, ()


class AltUp(Matrices):
    """Several streams. On several devices each computes all of this whole."""

    def __init__(self, arch: ModelArch, dtype: jnp.dtype) -> None:
        self.eps, self.num_layers = arch.rms_norm_eps, arch.num_layers
        shape = arch.num_streams - 1, arch.hidden_size, arch.hidden_size
        for name in ("opening", "closing"):
            self.declare(name, shape, (None, None, None), dtype, None, fan_in=arch.hidden_size)

    def opened(self, x_TD: jax.Array, vectors: LayerVectors, rows: LayerRows) -> tuple[jax.Array, Predicted]:
        """See `OneStream`."""
        made = (product(x_TD, matrix) for matrix in self._matrices("opening"))
        streams_STD = jnp.stack([x_TD, *(_as_long_as(x_TD, each) for each in made)])
        return self._predicted(0, streams_STD, vectors, rows)

    def after_layer(
        self,
        index: int,
        x_TD: jax.Array,
        predicted: Predicted,
        of_embedding: OfEmbedding,
        vectors: LayerVectors,
        rows: LayerRows,
    ) -> tuple[jax.Array, Predicted]:
        """The same for the next layer, or for the last norm, of what a layer made of its stream."""
        assert isinstance(predicted, jax.Array)
        weights = _row(rows.of(vectors.stream_corrections, index), x_TD.dtype)
        shares = 1.0 + product_of_few(self._routed(index, x_TD, vectors, rows), weights)
        streams_STD = predicted + shares.T[:, :, None] * (x_TD - predicted[0])
        added = of_embedding(streams_STD[0] * _row(rows.of(vectors.stream_scale, index), x_TD.dtype))
        is_first = (jnp.arange(len(streams_STD)) == 0)[:, None, None]
        streams_STD = jnp.where(is_first, streams_STD, streams_STD + added)
        if index + 1 < self.num_layers:
            return self._predicted(index + 1, streams_STD, vectors, rows)
        return self._closed(streams_STD), ()

    def _predicted(
        self, index: int, streams_STD: jax.Array, vectors: LayerVectors, rows: LayerRows
    ) -> tuple[jax.Array, Predicted]:
        """The stream that a layer reads, the first one, and all that it begins with."""
        weights = _row(rows.of(vectors.stream_predictions, index), streams_STD.dtype)
        mixed = product_of_few(self._routed(index, streams_STD[0], vectors, rows), weights)  # [T, S S]
        shares_TSS = mixed.reshape(len(mixed), len(streams_STD), len(streams_STD))
        parts = (shares_TSS[:, :, j].T[:, :, None] * other for j, other in enumerate(streams_STD))
        predicted_STD = streams_STD + functools.reduce(operator.add, parts)
        return predicted_STD[0], predicted_STD

    def _routed(self, index: int, x_TD: jax.Array, vectors: LayerVectors, rows: LayerRows) -> jax.Array:
        """`[T, S]` of the stream `[T, D]`, each within -1 and 1, that shares of a layer are made of."""
        norm = rows.of(vectors.stream_norm, index)
        assert norm is not None
        read_TD = rms_norm(x_TD, scale_of(*norm, x_TD.dtype), self.eps) * (1 / x_TD.shape[1])
        router = _row(rows.of(vectors.stream_router, index), x_TD.dtype)
        return jnp.tanh(product_of_few(read_TD, router).astype(jnp.float32)).astype(x_TD.dtype)

    def _closed(self, streams_STD: jax.Array) -> jax.Array:
        """The mean `[T, D]` of all streams, the others by a matrix each and as long as the first."""
        first, *others = streams_STD
        made = (product(each, matrix) for each, matrix in zip(others, self._matrices("closing"), strict=True))
        return sum((_as_long_as(first, each) for each in made), start=first) * (1 / len(streams_STD))

    def _matrices(self, name: str) -> list[jax.Array]:
        stack = self.matrix(name)
        assert isinstance(stack, jax.Array), "what makes streams isn't quantized"
        return list(stack)


class Laurel(Matrices):
    """What is added next to attention: a product of few numbers. On several devices each has it whole."""

    def __init__(self, arch: ModelArch, dtype: jnp.dtype) -> None:
        d, r = arch.hidden_size, arch.laurel_rank
        self.eps = arch.rms_norm_eps
        self.declare("left", (r, d), (None, None), dtype, None, fan_in=d)
        self.declare("right", (d, r), (None, None), dtype, None, fan_in=r)

    def __call__(self, x_TD: jax.Array, read_TD: jax.Array, norm: Row | None) -> jax.Array:
        """The stream `[T, D]` with what attention made of `read [T, D]`, to that which the MLP reads of."""
        assert norm is not None
        made_TD = product(product(read_TD, self.matrix("left")), self.matrix("right"))
        return (x_TD + read_TD + rms_norm(made_TD, scale_of(*norm, x_TD.dtype), self.eps)) * 2**-0.5


def _row(row: Row | None, dtype: jnp.dtype) -> jax.Array:
    assert row is not None
    return row_of(*row, dtype)


def _as_long_as(x_TD: jax.Array, other_TD: jax.Array) -> jax.Array:
    """The other rows with the mean squares of x."""
    squares, others = (mean_squares(each.astype(jnp.float32)) for each in (x_TD, other_TD))
    return (other_TD * jnp.sqrt(squares / jnp.maximum(others, LEAST_MEAN_SQUARE))).astype(x_TD.dtype)
