"""The parts of a decoder layer: RMSNorm, attention projections, SwiGLU MLP. Token-flat: the first axis is T.

Every parameter is declared with its logical axes (`weights/sharding.py` maps them to mesh axes) and its initial
distribution (`weights/loading.py` draws dummy weights from it). Knows nothing of pages, KV buffers or checkpoints.

Matrices are stored `[..., in]`, as in checkpoints: a CPU multiplies that form fastest (`precision.py`), and
accelerators multiply both forms equally fast.
"""

from __future__ import annotations

import math
from typing import Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from jaxsgl.models.arch import ModelArch
from jaxsgl.models.precision import product
from jaxsgl.models.rope import rotate

Axes = tuple[str | None, ...]


class Attend(Protocol):
    """Stores this step's keys and values, and attends to all of each sequence; the caller of the model provides it."""

    def __call__(self, layer_index: int, q_TNH: jax.Array, k_TKH: jax.Array, v_TKH: jax.Array, /) -> jax.Array:
        """Returns the attention output `[T, N, H]`, softmax scale 1 / sqrt(H)."""
        ...


def weight(shape: tuple[int, ...], axes: Axes, dtype: jnp.dtype, *, fan_in: int) -> nnx.Param[jax.Array]:
    """Declares a matrix; its value is a placeholder until parameters are loaded."""
    return nnx.Param(jnp.zeros(shape, dtype), axes=axes, mean=0.0, std=1 / math.sqrt(fan_in))


def vector(shape: tuple[int, ...], axes: Axes, dtype: jnp.dtype, *, mean: float) -> nnx.Param[jax.Array]:
    """Declares a bias (mean 0) or a norm's scale (mean 1)."""
    return nnx.Param(jnp.zeros(shape, dtype), axes=axes, mean=mean, std=0.0)


class RMSNorm(nnx.Module):
    """Scales the last axis to unit mean square (arXiv 1910.07467); statistics in float32."""

    def __init__(self, size: int, eps: float, dtype: jnp.dtype) -> None:
        self.eps = eps
        self.scale = vector((size,), (None,), dtype, mean=1.0)

    def __call__(self, x: jax.Array) -> jax.Array:
        """`[..., size]` to the same shape and dtype."""
        x32 = x.astype(jnp.float32)
        inverse_rms = jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + self.eps)
        return (x32 * inverse_rms).astype(x.dtype) * self.scale[...]


class Attention(nnx.Module):
    """The projections around `Attend`.

    qkv holds, per kv head, its G query heads, then k, then v: tensor parallelism splits the K axis, and each part keeps
    whole groups.
    """

    def __init__(self, arch: ModelArch, dtype: jnp.dtype) -> None:
        d, n, k, h = arch.hidden_size, arch.num_heads, arch.num_kv_heads, arch.head_dim
        self.group_size = n // k
        heads = (k, self.group_size + 2, h)
        self.qkv = weight((*heads, d), ("kv_heads", None, None, None), dtype, fan_in=d)
        self.qkv_bias = vector(heads, ("kv_heads", None, None), dtype, mean=0.0) if arch.attention_bias else None
        self.o = weight((d, n * h), (None, "kv_heads"), dtype, fan_in=n * h)
        self.o_bias = vector((d,), (None,), dtype, mean=0.0) if arch.attention_out_bias else None
        self.q_norm = RMSNorm(h, arch.rms_norm_eps, dtype) if arch.qk_norm else None
        self.k_norm = RMSNorm(h, arch.rms_norm_eps, dtype) if arch.qk_norm else None

    def __call__(
        self, x_TD: jax.Array, tables: tuple[jax.Array, jax.Array], layer_index: int, attend: Attend
    ) -> jax.Array:
        """`x [T, D]` to `[T, D]`; `tables` are the rope tables of the tokens."""
        qkv = product(x_TD, self.qkv[...])
        if self.qkv_bias is not None:
            qkv = qkv + self.qkv_bias[...]
        num_tokens, num_kv_heads, _, head_dim = qkv.shape
        q_TNH = qkv[:, :, : self.group_size].reshape(num_tokens, num_kv_heads * self.group_size, head_dim)
        k_TKH, v_TKH = qkv[:, :, self.group_size], qkv[:, :, self.group_size + 1]
        if self.q_norm is not None and self.k_norm is not None:
            q_TNH, k_TKH = self.q_norm(q_TNH), self.k_norm(k_TKH)
        out_TNH = attend(layer_index, rotate(q_TNH, tables), rotate(k_TKH, tables), v_TKH)
        out_TD = product(out_TNH.reshape(num_tokens, -1), self.o[...])
        return out_TD if self.o_bias is None else out_TD + self.o_bias[...]


class MLP(nnx.Module):
    """SwiGLU (arXiv 2002.05202): down(silu(gate(x)) * up(x)), gate and up in one product."""

    def __init__(self, arch: ModelArch, dtype: jnp.dtype) -> None:
        d, f = arch.hidden_size, arch.ffn_size
        self.gate_up = weight((2, f, d), (None, "ffn", None), dtype, fan_in=d)
        self.gate_up_bias = vector((2, f), (None, "ffn"), dtype, mean=0.0) if arch.mlp_bias else None
        self.down = weight((d, f), (None, "ffn"), dtype, fan_in=f)
        self.down_bias = vector((d,), (None,), dtype, mean=0.0) if arch.mlp_bias else None

    def __call__(self, x_TD: jax.Array) -> jax.Array:
        """`[T, D]` to `[T, D]`."""
        gate_up = product(x_TD, self.gate_up[...])
        if self.gate_up_bias is not None:
            gate_up = gate_up + self.gate_up_bias[...]
        out_TD = product(jax.nn.silu(gate_up[:, 0]) * gate_up[:, 1], self.down[...])
        return out_TD if self.down_bias is None else out_TD + self.down_bias[...]
