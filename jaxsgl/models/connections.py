"""Connections of blocks to several residual streams next to each other: what a block reads of them, and adds to each.

Of n streams `X [n, D]` of a token, a block and its connection make

    x   = sum over streams of  before[i] X[i]
    X'  = comb^T X + after outer block(norm(x))

where `before`, `after` and `comb [n, n]` come from a product of all streams, normalized together. `comb` is brought
near a matrix whose rows and columns add up to 1, so that streams neither grow nor vanish. All of it is computed in
float32. Sources: hyper-connections (arXiv 2409.19606), manifold-constrained ones (arXiv 2512.24880), DeepSeek-V4's
report, 2.2. Built by `decoder_layers`; never knows blocks. Streams of which layers read one alone are in streams.py.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxsgl.models.arch import ModelArch
from jaxsgl.models.layers import vector
from jaxsgl.models.matrix import Matrices
from jaxsgl.models.precision import product
from pallas_kernels.norm import rms_norm

_FLOAT32 = jnp.dtype(jnp.float32)


class Shares(NamedTuple):
    """How the streams of T tokens go on after a block.

    Attributes:
      after: `[T, n]`, of the block's output to each stream.
      comb: `[T, n, n]`, of each stream, the first axis, to each.
    """

    after: jax.Array
    comb: jax.Array

    def streams(self, x_TnD: jax.Array, out_TD: jax.Array) -> jax.Array:
        """The streams `[T, n, D]` after a block that made `out_TD` of them."""
        mixed = jnp.einsum("tij,tid->tjd", self.comb, x_TnD.astype(jnp.float32), precision="highest")
        return (mixed + self.after[..., None] * out_TD[:, None].astype(jnp.float32)).astype(x_TnD.dtype)


class Connection(Matrices):
    """What a block reads of the streams, and how they go on."""

    def __init__(self, arch: ModelArch) -> None:
        assert arch.connections is not None
        self.number, self.iterations = arch.connections.number, arch.connections.iterations
        self.eps, self.norm_eps = arch.connections.eps, arch.rms_norm_eps
        rows, inputs = self.number * (2 + self.number), self.number * arch.hidden_size
        self.declare("shares", (rows, inputs), (None, None), _FLOAT32, None, fan_in=inputs)
        self.bias, self.scale = vector((rows,), (None,), _FLOAT32, mean=0.0), vector((3,), (None,), _FLOAT32, mean=1.0)

    def __call__(self, x_TnD: jax.Array) -> tuple[jax.Array, Shares]:
        """What the block reads, `[T, D]`, and how the streams go on."""
        n = self.number
        logits = _of_all(x_TnD, self, self.norm_eps)
        parts = jnp.split(logits, (n, 2 * n), axis=-1)
        biases = jnp.split(self.bias[...], (n, 2 * n))
        before, after, comb = (
            part * scale + bias for part, scale, bias in zip(parts, self.scale[...], biases, strict=True)
        )
        comb = jax.nn.softmax(comb.reshape(-1, n, n), axis=-1) + self.eps
        comb = comb / (jnp.sum(comb, axis=1, keepdims=True) + self.eps)
        for _ in range(self.iterations - 1):
            comb = comb / (jnp.sum(comb, axis=2, keepdims=True) + self.eps)
            comb = comb / (jnp.sum(comb, axis=1, keepdims=True) + self.eps)
        return _read(x_TnD, jax.nn.sigmoid(before) + self.eps), Shares(2 * jax.nn.sigmoid(after), comb)


class LastConnection(Matrices):
    """What the final norm reads of the streams."""

    def __init__(self, arch: ModelArch) -> None:
        assert arch.connections is not None
        n, self.eps, self.norm_eps = arch.connections.number, arch.connections.eps, arch.rms_norm_eps
        self.declare("shares", (n, n * arch.hidden_size), (None, None), _FLOAT32, None, fan_in=n * arch.hidden_size)
        self.bias, self.scale = vector((n,), (None,), _FLOAT32, mean=0.0), vector((1,), (None,), _FLOAT32, mean=1.0)

    def __call__(self, x_TnD: jax.Array) -> jax.Array:
        """`[T, D]`."""
        logits = _of_all(x_TnD, self, self.norm_eps)
        return _read(x_TnD, jax.nn.sigmoid(logits * self.scale[...] + self.bias[...]) + self.eps)


def _of_all(x_TnD: jax.Array, connection: Matrices, eps: float) -> jax.Array:
    """What the product makes of all streams of a token, normalized together, float32."""
    flat = x_TnD.reshape(len(x_TnD), -1).astype(jnp.float32)
    normed = rms_norm(flat, jnp.ones(flat.shape[1], jnp.float32), eps)
    return product(normed, connection.matrix("shares"), jnp.float32)


def _read(x_TnD: jax.Array, shares_Tn: jax.Array) -> jax.Array:
    return jnp.sum(shares_Tn[..., None] * x_TnD.astype(jnp.float32), axis=1).astype(x_TnD.dtype)
