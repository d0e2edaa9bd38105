"""The parts of a decoder layer: vectors, attention projections, SwiGLU MLP. Token-flat: the first axis is T.

Every parameter is declared with its logical axes (`weights/sharding.py` maps them to mesh axes) and its initial
distribution (`weights/loading.py` draws dummy weights from it). Knows nothing of pages, KV buffers or checkpoints.

Matrices are stored `[..., in]`, as in checkpoints: a CPU multiplies that form fastest (`precision.py`), and
accelerators multiply both forms equally fast. They may be quantized (`matrix.py`).
"""

from __future__ import annotations

from typing import Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from jaxsgl.models.arch import ModelArch
from jaxsgl.models.matrix import Axes, Matrices, Weights
from jaxsgl.models.precision import product, product_in_parts
from pallas_kernels import FusedQkv


class Attend(Protocol):
    """Stores this step's keys and values, and attends to all of each sequence; the caller of the model provides it."""

    def __call__(self, layer_index: int, qkv: FusedQkv, /) -> jax.Array:
        """Returns the attention output `[T, N, H]`, softmax scale 1 / sqrt(H); `qkv.split()` says what is attended."""
        ...


def vector(shape: tuple[int, ...], axes: Axes, dtype: jnp.dtype, *, mean: float) -> nnx.Param[jax.Array]:
    """Declares a bias (mean 0) or a norm's scale (mean 1)."""
    return nnx.Param(jnp.zeros(shape, dtype), axes=axes, mean=mean, std=0.0)


class LayerVectors(nnx.Module):
    """The norms' scales and the biases of attention, of all layers: one array each, row l of layer l.

    As parameters of their own they would be five arguments per layer, and each argument costs the launch of a program
    about a microsecond.
    """

    def __init__(self, arch: ModelArch, dtype: jnp.dtype) -> None:
        num_layers, d, h = arch.num_layers, arch.hidden_size, arch.head_dim
        self.attention_norm = vector((num_layers, d), (None, None), dtype, mean=1.0)
        self.mlp_norm = vector((num_layers, d), (None, None), dtype, mean=1.0)
        self.q_norm = vector((num_layers, h), (None, None), dtype, mean=1.0) if arch.qk_norm else None
        self.k_norm = vector((num_layers, h), (None, None), dtype, mean=1.0) if arch.qk_norm else None
        self.qkv_bias = (
            vector((num_layers, *qkv_heads(arch)), (None, "kv_heads", None, None), dtype, mean=0.0)
            if arch.attention_bias
            else None
        )


def qkv_heads(arch: ModelArch) -> tuple[int, int, int]:
    """`(K, G + 2, H)`: the rows of the fused weights, per kv head its G query heads, then its key, then its value.

    Tensor parallelism splits the K axis, and each part keeps whole groups.
    """
    return arch.num_kv_heads, arch.num_heads // arch.num_kv_heads + 2, arch.head_dim


class Attention(Matrices):
    """The projections around `Attend`."""

    def __init__(self, arch: ModelArch, dtype: jnp.dtype) -> None:
        d, n, h, fmt = arch.hidden_size, arch.num_heads, arch.head_dim, arch.weight_format
        self.eps = arch.rms_norm_eps
        self.declare("qkv", (*qkv_heads(arch), d), ("kv_heads", None, None, None), dtype, fmt, fan_in=d)
        self.declare("o", (d, n * h), (None, "kv_heads"), dtype, fmt, fan_in=n * h)
        self.o_bias = vector((d,), (None,), dtype, mean=0.0) if arch.attention_out_bias else None

    def __call__(
        self,
        x_TD: jax.Array,
        vectors: LayerVectors,
        tables: tuple[jax.Array, jax.Array],
        layer_index: int,
        attend: Attend,
    ) -> jax.Array:
        """`x [T, D]` to `[T, D]`, or parts of it as `add_and_norm` takes them; `tables` are the tokens' rope tables."""
        cos, sin = tables
        bias, q_norm, k_norm = (
            None if stack is None else stack[...] for stack in (vectors.qkv_bias, vectors.q_norm, vectors.k_norm)
        )
        qkv = FusedQkv(product(x_TD, self.matrix("qkv")), cos, sin, bias, q_norm, k_norm, layer_index, self.eps)
        out_TNH = attend(layer_index, qkv)
        return _last_product(out_TNH.reshape(len(x_TD), -1), self.matrix("o"), self.o_bias)


class MLP(Matrices):
    """SwiGLU (arXiv 2002.05202): down(silu(gate(x)) * up(x)), gate and up in one product."""

    def __init__(self, arch: ModelArch, dtype: jnp.dtype) -> None:
        d, f, fmt = arch.hidden_size, arch.ffn_size, arch.weight_format
        self.declare("gate_up", (2, f, d), (None, "ffn", None), dtype, fmt, fan_in=d)
        self.gate_up_bias = vector((2, f), (None, "ffn"), dtype, mean=0.0) if arch.mlp_bias else None
        self.declare("down", (d, f), (None, "ffn"), dtype, fmt, fan_in=f)
        self.down_bias = vector((d,), (None,), dtype, mean=0.0) if arch.mlp_bias else None

    def __call__(self, x_TD: jax.Array) -> jax.Array:
        """`[T, D]` to `[T, D]`, or parts of it as `add_and_norm` takes them."""
        gate_up = product(x_TD, self.matrix("gate_up"))
        if self.gate_up_bias is not None:
            gate_up = gate_up + self.gate_up_bias[...]
        return _last_product(jax.nn.silu(gate_up[:, 0]) * gate_up[:, 1], self.matrix("down"), self.down_bias)


def _last_product(x: jax.Array, matrix: Weights, bias: nnx.Param[jax.Array] | None) -> jax.Array:
    """The product that goes back to the residual stream, in parts unless there is a bias to add."""
    return product_in_parts(x, matrix) if bias is None else product(x, matrix) + bias[...]
