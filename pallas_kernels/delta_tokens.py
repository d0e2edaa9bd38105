"""What a layer with a gated delta-net makes of its tokens, and how `delta.py` and backends read it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

from pallas_kernels.norm import rms_norm
from pallas_kernels.parts import whole


@partial(jax.tree_util.register_dataclass, data_fields=("taps", "rates", "scales"), meta_fields=("row", "eps"))
@dataclass(frozen=True)
class DeltaVectors:
    """The small parameters of a layer: row `row` of those of L layers. Kernels take the whole arrays and the row.

    Attributes:
      taps: `[L, K, C, taps]` float32, that of the newest token last.
      rates: `[L, K, 2, r]` float32: log a = -exp(rates[0]) softplus(logit + rates[1]).
      scales: `[L, v]` of the norm of what is read.
      row: of the layer.
      eps: of the norm.
    """

    taps: jax.Array
    rates: jax.Array
    scales: jax.Array
    row: int
    eps: float


@partial(jax.tree_util.register_dataclass, data_fields=("product", "vectors"), meta_fields=("key_size", "dtype"))
@dataclass(frozen=True)
class DeltaTokens:
    """What a layer makes of its tokens, and how it reads that.

    Attributes:
      product: `[T, K, C + r v + 2 r]`, or float32 parts of it `[P, T, ...]`. For each key head q, k and the v of r
        heads, before the convolution: C = 2 h + r v; the gates z of what is read; the logits of b, and those of a.
      vectors: of the layer.
      key_size: h.
      dtype: of the product as a whole.
    """

    product: jax.Array
    vectors: DeltaVectors
    key_size: int
    dtype: jnp.dtype

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.product.shape[-3]

    @property
    def fused(self) -> jax.Array:
        """`[T, K, C + r v + 2 r]`, the product as a whole."""
        return whole(self.product, 3, self.dtype)

    @property
    def sizes(self) -> tuple[int, int, int]:
        """h, r and v."""
        return self.key_size, self.vectors.rates.shape[-1], self.vectors.scales.shape[-1]

    @property
    def mixed(self) -> jax.Array:
        """`[T, K, C]` what the convolution mixes."""
        return self.fused[..., : self.vectors.taps.shape[2]]

    @property
    def taps(self) -> jax.Array:
        """`[K, C, taps]` of the convolution."""
        return self.vectors.taps[self.vectors.row]

    @property
    def beta(self) -> jax.Array:
        """`[T, K, r]` float32, b."""
        group = self.sizes[1]
        return jax.nn.sigmoid(self.fused[..., -2 * group : -group].astype(jnp.float32))

    @property
    def log_decay(self) -> jax.Array:
        """`[T, K, r]` float32, log a."""
        rates = self.vectors.rates[self.vectors.row]
        logits = self.fused[..., -rates.shape[-1] :].astype(jnp.float32)
        return -jnp.exp(rates[:, 0]) * jax.nn.softplus(logits + rates[:, 1])

    def gated(self, read: jax.Array) -> jax.Array:
        """What `read [T, K, r, v]` float32 gives, normalized and gated, in the dtype of the product."""
        vectors = self.vectors
        gates = self.fused[..., vectors.taps.shape[2] : -2 * self.sizes[1]].astype(jnp.float32)
        out = rms_norm(read, vectors.scales[vectors.row].astype(jnp.float32), vectors.eps)
        return (out * jax.nn.silu(gates).reshape(read.shape)).astype(self.dtype)
