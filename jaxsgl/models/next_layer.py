"""The layer after a checkpoint's last one, which predicts one token more (DeepSeek-V3, arXiv 2412.19437, and GLM-4.5).

    final hidden state of token i - 1     [T, D] -> hnorm     or, later in a chain, the layer's own
    embedding of token i                  [T, D] -> enorm
    both                                  [T, 2 D] -> eh_proj -> a decoder layer -> norm, the model's head: token i + 1

Embedding and head are the model's. `ModelArch.next_arch` is its shape, `weights/names.py` has its tensors' names. As
with `Decoder`, the caller attends and keeps pages.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from jaxsgl.models.arch import ModelArch
from jaxsgl.models.dense import Decoder, DecoderLayers, Params
from jaxsgl.models.layers import Attend, norm_dtype, vector
from jaxsgl.models.precision import product
from pallas_kernels import KernelChoice
from pallas_kernels.norm import rms_norm


class NextLayer(DecoderLayers):
    """The parameters of such a layer."""

    def __init__(self, arch: ModelArch, dtype: jnp.dtype, activations: jnp.dtype) -> None:
        super().__init__(arch, dtype, activations)
        d = arch.hidden_size
        self.token_norm, self.state_norm = (vector((d,), (None,), norm_dtype(arch, dtype), mean=1.0) for _ in range(2))
        self.declare("joined", (d, 2 * d), (None, None), dtype, None, fan_in=2 * d)

    def states(self, streams: dict[int, jax.Array], hidden_TD: jax.Array) -> jax.Array:
        """What it reads of tokens: their final hidden states."""
        return hidden_TD

    def __call__(
        self,
        model: Decoder,
        token_ids: jax.Array,
        before_TD: jax.Array,
        positions: jax.Array,
        attend: Attend,
        kernels: KernelChoice,
    ) -> tuple[jax.Array, jax.Array]:
        """The states `[T, D]` of tokens whose predecessors' are given, and logits of the tokens after them."""
        tokens_TD = self._normed(model.embedded(token_ids), self.token_norm)
        both = jnp.concatenate([tokens_TD, self._normed(before_TD, self.state_norm)], axis=-1)
        x_TD = product(both, self.matrix("joined")).astype(self.activations)
        hidden_TD = self.run(x_TD, positions, attend, kernels=kernels)
        return hidden_TD, model.logits(hidden_TD)

    def in_model(self, token_ids: jax.Array) -> jax.Array:
        """Its vocabulary is the model's."""
        return token_ids

    def _normed(self, x_TD: jax.Array, scale: nnx.Param[jax.Array]) -> jax.Array:
        dtype = jnp.promote_types(scale.dtype, x_TD.dtype)
        return rms_norm(x_TD, scale[...].astype(dtype), self.arch.rms_norm_eps)


def abstract_next_layer(
    arch: ModelArch, dtype: jnp.dtype, activations: jnp.dtype
) -> tuple[nnx.GraphDef[NextLayer], Params]:
    """Structure and parameters as shapes of the layer of `arch`, a `next_arch`; see `abstract_model`."""
    graphdef, params = nnx.split(nnx.eval_shape(lambda: NextLayer(arch, dtype, activations)))
    return graphdef, params
