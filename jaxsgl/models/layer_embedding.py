"""Embeddings of each token that layers have of their own: what each adds to the residual stream at its end.

    parts = norm(projection(embedding) / sqrt(D)) and table[token] * sqrt(P), added up over sqrt(2)   [T, L, P]
    layer l: x + norm(out(activation(gate(x)) * parts[:, l]))

Owns both halves. Never knows checkpoints. `decoder` builds them, makes the parts once per step, and hands each layer
its own.

Source: Gemma 4, whose form is that of Gemma 3n.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxsgl.models.arch import ModelArch
from jaxsgl.models.layer_spec import LayerSpec
from jaxsgl.models.layers import norm_dtype, vector
from jaxsgl.models.matrix import Matrices, Weights
from jaxsgl.models.precision import product
from pallas_kernels import KernelChoice
from pallas_kernels.experts import ACTIVATIONS
from pallas_kernels.norm import rms_norm


class LayerEmbeddings(Matrices):
    """The table of all layers' embeddings, and what makes a second part of them from the model's embedding."""

    def __init__(self, arch: ModelArch, dtype: jnp.dtype, activations: jnp.dtype) -> None:
        self.arch, self.activations, self.dtype = arch, activations, dtype
        d, p = arch.hidden_size, arch.embedding_size
        together = arch.num_layers * p
        fmt = None if arch.weight_format is None else arch.weight_format.of_vocabulary
        self.declare("table", (arch.vocab_rows, together), ("vocab", None), dtype, fmt, fan_in=p)
        self.declare("projection", (together, d), (None, None), dtype, None, fan_in=d)
        self.norm = vector((p,), (None,), norm_dtype(arch, dtype), mean=1.0)

    def __call__(
        self, token_ids: jax.Array, x_TD: jax.Array, rows_of: Callable[[Weights, jax.Array], jax.Array]
    ) -> jax.Array:
        """`[T, L, P]` of tokens `[T]` whose embeddings are `x [T, D]`; `rows_of` reads rows over the vocabulary."""
        arch = self.arch
        shape = len(x_TD), arch.num_layers, arch.embedding_size
        of_token = rows_of(self.matrix("table"), token_ids)
        of_token = of_token * jnp.asarray(math.sqrt(arch.embedding_size), self.dtype).astype(self.activations)
        projected = product(x_TD, self.matrix("projection")) * arch.hidden_size**-0.5
        projected = rms_norm(projected.reshape(shape), self.norm[...], arch.rms_norm_eps)
        return (projected + of_token.reshape(shape)) * 2**-0.5


class EmbeddingGate(Matrices):
    """What a layer makes of its embedding of a token. On several devices each has it whole."""

    def __init__(self, arch: ModelArch, spec: LayerSpec, dtype: jnp.dtype) -> None:
        d, p = arch.hidden_size, spec.embedding_size
        self.activation = arch.activation
        self.declare("gate", (p, d), (None, None), dtype, arch.format_of(spec, "embedding_gate"), fan_in=d)
        self.declare("out", (d, p), (None, None), dtype, arch.format_of(spec, "embedding_out"), fan_in=p)

    def __call__(self, x_TD: jax.Array, part_TP: jax.Array, kernels: KernelChoice) -> jax.Array:
        """`[T, D]`, before its norm, of the residual stream `[T, D]` and the layer's embeddings `[T, P]`."""
        gate = ACTIVATIONS[self.activation](product(x_TD, self.matrix("gate", kernels)))
        return product(gate * part_TP.astype(gate.dtype), self.matrix("out", kernels))
