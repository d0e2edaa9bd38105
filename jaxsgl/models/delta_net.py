"""A gated delta-net: its layer mixes tokens through a state of fixed size instead of all keys and values before them.

    q, k, v = silu(conv(x Wqkv))                      depthwise and causal, over the last few tokens
    q, k    = l2norm(q) / sqrt(h), l2norm(k)
    S       = a S;  S = S + k outer (b (v - S^T k))   a and b of each value head and token; `pallas_kernels/delta.py`
    out     = (rms_norm(S^T q) w silu(x Wz)) Wo

Rows of the fused product lie by key head, so that devices that share the model have whole groups each.

Source: Gated DeltaNet (Yang et al., arXiv 2412.06464), as Qwen3-Next and Qwen3.5 have it. Never knows where states are;
`dense.DecoderLayer` builds it where a layer's mixer is a `DeltaNet`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxsgl.models.arch import ModelArch
from jaxsgl.models.layer_spec import DeltaNet, LayerSpec
from jaxsgl.models.layers import LayerRows, LayerVectors, Recur, last_product
from jaxsgl.models.matrix import Matrices, Rows, Weights
from jaxsgl.models.precision import product
from pallas_kernels import KernelChoice
from pallas_kernels.choice import AUTO_CHOICE
from pallas_kernels.delta import DeltaTokens
from pallas_kernels.norm import Update, rms_norm


class GatedDeltaNet(Matrices):
    """The products around `Recur`."""

    def __init__(self, arch: ModelArch, spec: LayerSpec, dtype: jnp.dtype) -> None:
        net = spec.mixer
        assert isinstance(net, DeltaNet)
        self.net, self.eps = net, arch.rms_norm_eps
        d, values = arch.hidden_size, net.value_heads * net.value_size
        rows = net.channels + net.group * net.value_size + 2 * net.group  # of a key head: q, k, v; z; b, a
        self.declare("inputs", (net.key_heads, rows, d), ("key_heads", None, None), dtype, None, fan_in=d)
        self.declare("output", (d, values), (None, "key_heads"), dtype, None, fan_in=values)

    def reader(self, kernels: KernelChoice) -> Weights | None:
        """The only matrix that multiplies x."""
        return self.matrix("inputs", kernels)

    def __call__(
        self,
        x_TD: Rows,
        vectors: LayerVectors,
        rows: LayerRows,
        place: int,
        recur: Recur,
        kernels: KernelChoice = AUTO_CHOICE,
    ) -> Update:
        """`x [T, D]` to `[T, D]`, or parts of it as `add_and_norm` takes them.

        `place` is that of the layer in `ModelArch.delta_layers`.
        """
        net, (taps, decay, norm) = self.net, self._vectors(vectors, rows, place)
        fused = product(x_TD, self.matrix("inputs", kernels))
        mixed, gate, write, forget = jnp.split(
            fused, (net.channels, fused.shape[-1] - 2 * net.group, fused.shape[-1] - net.group), axis=-1
        )
        write, forget = write.astype(jnp.float32), forget.astype(jnp.float32)
        log_decay = -jnp.exp(decay[:, 0]) * jax.nn.softplus(forget + decay[:, 1])
        tokens = DeltaTokens(mixed, taps, log_decay, jax.nn.sigmoid(write), net.key_size)
        out = rms_norm(recur(place, tokens), norm.astype(jnp.float32), self.eps)
        out = out * jax.nn.silu(gate.astype(jnp.float32)).reshape(out.shape)
        return last_product(out.reshape(len(out), -1).astype(mixed.dtype), self.matrix("output", kernels), None)

    def _vectors(self, vectors: LayerVectors, rows: LayerRows, place: int) -> tuple[jax.Array, jax.Array, jax.Array]:
        """`[K', C, taps]`, `[K', 2, r]` and `[v]` of this layer."""
        stacks = [rows.stack(stack, place) for stack in (vectors.delta_taps, vectors.delta_decay, vectors.delta_norm)]
        taps, decay, norm = (stack[rows.row(place)] for stack in stacks if stack is not None)
        return taps, decay, norm
