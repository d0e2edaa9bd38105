"""The dense decoder: embed, layers, norm, logits. One class for Llama, Qwen2, Qwen3; `ModelArch` holds what differs.

Token-flat: all sequences of a step lie one after another on one axis T, and the caller's `Attend` tells them apart. The
engine merges the model with parameters inside its jitted step. Products are computed in the parameters' dtype, what
lies between them in `activations`; RMSNorm statistics, rope and logits are float32.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from flax import nnx

from jaxsgl.models.arch import ModelArch
from jaxsgl.models.layers import MLP, Attend, Attention, LayerVectors, vector
from jaxsgl.models.matrix import Matrices, Matrix, dequantized
from jaxsgl.models.precision import product
from jaxsgl.models.rope import rope_tables
from pallas_kernels import add_and_norm
from pallas_kernels.norm import rms_norm, row_of

Params: TypeAlias = nnx.State[Any, Any]  # the tree of a model's parameters


class DecoderLayer(nnx.Module):
    """The matrices of one layer."""

    def __init__(self, arch: ModelArch, dtype: jnp.dtype) -> None:
        self.attention = Attention(arch, dtype)
        self.mlp = MLP(arch, dtype)


class Decoder(Matrices):
    """A decoder-only language model."""

    def __init__(self, arch: ModelArch, dtype: jnp.dtype, activations: jnp.dtype) -> None:
        v, d = arch.vocab_size, arch.hidden_size
        self.arch = arch
        self.activations = activations
        fmt = arch.weight_format if arch.weight_format is not None and arch.weight_format.vocabulary else None
        self.declare("embedding", (v, d), ("vocab", None), dtype, fmt, fan_in=d)
        self.layers = nnx.List([DecoderLayer(arch, dtype) for _ in range(arch.num_layers)])
        self.vectors = LayerVectors(arch, dtype)
        self.final_norm = vector((d,), (None,), dtype, mean=1.0)
        if not arch.tie_embeddings:
            self.declare("lm_head", (v, d), ("vocab", None), dtype, fmt, fan_in=d)

    def __call__(self, token_ids: jax.Array, positions: jax.Array, attend: Attend) -> jax.Array:
        """Final hidden states `[T, D]`, normalized, of `token_ids [T]` int32 at `positions [T]` int32.

        `attend` is called once per layer, in order. Ids outside the vocabulary are clipped to it.
        """
        x_TD = self._embed(token_ids)
        tables = rope_tables(positions, self.arch.rope, self.arch.head_dim)
        vectors, eps = self.vectors, self.arch.rms_norm_eps
        attention_norm, mlp_norm = vectors.attention_norm[...], vectors.mlp_norm[...]
        # Each sum of the residual stream is made together with the norm of what reads it next, as a GPU's kernel does.
        normed_TD = rms_norm(x_TD, row_of(attention_norm, 0, x_TD.dtype), eps)
        for index, layer in enumerate(self.layers):
            update_TD = layer.attention(normed_TD, vectors, tables, index, attend)
            x_TD, normed_TD = add_and_norm(x_TD, update_TD, mlp_norm, index, eps)
            update_TD = layer.mlp(normed_TD)
            is_last = index == len(self.layers) - 1
            norm = (self.final_norm[...][None], 0) if is_last else (attention_norm, index + 1)
            x_TD, normed_TD = add_and_norm(x_TD, update_TD, *norm, eps)
        return normed_TD

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Logits `[R, V]` float32 of `hidden [R, D]`, the hidden states of R tokens."""
        return product(hidden, self.matrix("embedding" if self.arch.tie_embeddings else "lm_head"), jnp.float32)

    def _embed(self, token_ids: jax.Array) -> jax.Array:
        embedding = self.matrix("embedding")
        if isinstance(embedding, Matrix):
            return dequantized(embedding.rows(token_ids), self.activations)
        return embedding.at[token_ids].get(mode="clip").astype(self.activations)


def abstract_model(
    arch: ModelArch, dtype: jnp.dtype, activations: jnp.dtype | None = None
) -> tuple[nnx.GraphDef[Decoder], Params]:
    """The model's structure, and its parameters as shapes in `dtype`; allocates nothing.

    `activations` is the dtype of what lies between products (default: `dtype`). Merge the structure with parameters
    from `weights` inside a jitted function: `nnx.merge(graphdef, params)`. Each abstract parameter carries its logical
    `axes` and its initial `mean` and `std` as metadata.
    """
    graphdef, params = nnx.split(nnx.eval_shape(lambda: Decoder(arch, dtype, activations or dtype)))
    return graphdef, params
