"""What a layer with a latent attends with, and how XLA makes that of its products.

The cache has one entry a token: the normalized latent, of C numbers, and the rotated part of a key, of R. Queries meet
entries after each head's matrix has made C numbers of their unrotated part ("absorbed"), and of the weighted sum of
latents another matrix makes the head's output. Source: DeepSeek-V2 (arXiv 2405.04434), 2.1. Never knows weights' names
or pages. Made by models; read by `absorb_and_store`, `decode_latents` and their backends.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.norm import rms_norm
from pallas_kernels.parts import whole
from pallas_kernels.qkv import rotate
from pallas_kernels.token_index import TokenIndex


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LatentHeads:
    """The matrices of a layer's heads on both sides of the latent."""

    weights: jax.Array
    """`[N, D + V, C]`: of each head D rows that absorb its queries, then V that make its output."""
    num_absorbing: int = dataclasses.field(metadata={"static": True})
    """D."""

    @property
    def num_heads(self) -> int:
        """N."""
        return int(self.weights.shape[0])

    @property
    def num_outputs(self) -> int:
        """V."""
        return int(self.weights.shape[1]) - self.num_absorbing

    @property
    def latent_size(self) -> int:
        """C."""
        return int(self.weights.shape[2])

    def absorbed(self, q: jax.Array) -> jax.Array:
        """`[T, N, C]` of unrotated queries `[T, N, D]`, by XLA."""
        # Heads first: of tokens first, XLA can't run a CPU's product of several rows in bfloat16.
        return _by_head("ntd,ndc->ntc", q.swapaxes(0, 1), self.weights[:, : self.num_absorbing]).swapaxes(0, 1)

    def outputs(self, read: jax.Array) -> jax.Array:
        """`[T, N, V]` of each head's weighted sum of latents `[T, N, C]`, by XLA."""
        return _by_head("tnc,nvc->tnv", read, self.weights[:, self.num_absorbing :])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LatentQkv:
    """Queries and entries of T tokens, as products leave them; a JAX pytree.

    A product is `[T, W]`, or `[P, T, W]` float32, parts whose sum it is.
    """

    product: jax.Array
    """Its first N (D + R) columns are queries, each head's rotated numbers last."""
    entries_product: jax.Array | None
    """Its last C + R columns are the latent, before its norm, and the rotated part of a key. None: those of `product`
    are."""
    scales: jax.Array
    """`[C]` of the latent's norm."""
    heads: LatentHeads
    cos: jax.Array
    """`[T, 1, R / 2]` float32, cosines of the tokens' angles; dimension i turns together with i + R / 2."""
    sin: jax.Array
    """`[T, 1, R / 2]` float32."""
    eps: float = dataclasses.field(metadata={"static": True})
    """Of the norm."""
    dtype: Any = dataclasses.field(metadata={"static": True})
    """Of queries and entries."""
    index: TokenIndex | None = None
    """By which tokens are chosen; None: all are attended to, or those that the last layer with an index chose."""
    num_chosen: int = dataclasses.field(default=0, metadata={"static": True})
    """Tokens that a query attends to at most; 0: all."""

    @property
    def num_tokens(self) -> int:
        """T."""
        return int(self.cos.shape[0])

    @property
    def num_rotated(self) -> int:
        """R."""
        return 2 * int(self.cos.shape[-1])

    @property
    def head_dim(self) -> int:
        """C + R."""
        return self.heads.latent_size + self.num_rotated

    @property
    def queries(self) -> jax.Array:
        """`[T, N, C + R]`, by XLA."""
        unrotated, rotated = self.heads.num_absorbing, self.num_rotated
        width = self.heads.num_heads * (unrotated + rotated)
        q = self._whole(self.product)[:, :width].reshape(self.num_tokens, self.heads.num_heads, unrotated + rotated)
        parts = self.heads.absorbed(q[..., :unrotated]), rotate(q[..., unrotated:], self.cos, self.sin)
        return jnp.concatenate(parts, axis=-1).astype(self.dtype)

    @property
    def entries(self) -> jax.Array:
        """`[T, 1, C + R]`, the tokens' own keys as the cache holds them, by XLA; with the key of an index, if there is
        one, `[T, 1, C + R + I]`."""
        product = self.product if self.entries_product is None else self.entries_product
        row = self._whole(product)[:, -self.head_dim :]
        latent, key = row[:, : self.heads.latent_size], row[:, None, self.heads.latent_size :]
        own = rms_norm(latent, self.scales, self.eps)
        parts = [own[:, None], rotate(key, self.cos, self.sin)]
        if self.index is not None:
            parts.append(self.index.keys[:, None].astype(parts[0].dtype))
        return jnp.concatenate(parts, axis=-1).astype(self.dtype)

    def split(self) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Queries, keys and values `[T, 1, C]`; `heads.outputs` makes the output of what is read of these."""
        entries = self.entries[..., : self.head_dim]
        return self.queries, entries, entries[..., : self.heads.latent_size]

    def _whole(self, product: jax.Array) -> jax.Array:
        return whole(product, 2, self.dtype)


def check_latent_qkv(qkv: LatentQkv) -> None:
    """Check the products and what comes with them against each other.

    Raises:
        ValueError: shapes that don't fit.
    """
    heads, tokens = qkv.heads, qkv.num_tokens
    widths = {"product": heads.num_heads * (heads.num_absorbing + qkv.num_rotated), "entries_product": qkv.head_dim}
    if qkv.entries_product is None:
        widths = {"product": sum(widths.values())}
    for name, width in widths.items():
        shape = getattr(qkv, name).shape
        if len(shape) not in (2, 3) or shape[-2] != tokens or shape[-1] < width:
            raise ValueError(f"qkv.{name} is {shape}; it must be [{tokens}, W] or [P, {tokens}, W], W at least {width}")
    if qkv.scales.shape != (heads.latent_size,) or qkv.sin.shape != qkv.cos.shape or qkv.cos.ndim != 3:
        raise ValueError(
            f"qkv.scales is {qkv.scales.shape}, qkv.cos {qkv.cos.shape} and qkv.sin {qkv.sin.shape}; they must be "
            f"[{heads.latent_size}] and [T, 1, R / 2]"
        )


def _by_head(axes: str, x: jax.Array, weights: jax.Array) -> jax.Array:
    """A product for each head, multiplied in the weights' format and added up in float32."""
    precision = "highest" if weights.dtype == jnp.float32 else None
    return jnp.einsum(
        axes, x.astype(weights.dtype), weights, precision=precision, preferred_element_type=jnp.float32
    ).astype(x.dtype)
