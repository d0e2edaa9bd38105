"""The decoder: embed, layers, norm, logits. One class for all families; `ModelArch` holds what differs.

The engine merges the model with parameters inside its jitted step. Norms' statistics, rope and logits are float32.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from flax import nnx

from jaxsgl.models.arch import ModelArch
from jaxsgl.models.decoder_layers import DecoderLayers
from jaxsgl.models.encoder import NUM_BUCKETS, distance_buckets
from jaxsgl.models.layer_embedding import LayerEmbeddings
from jaxsgl.models.layers import (
    vector,
)
from jaxsgl.models.matrix import Matrix, Weights, dequantized
from jaxsgl.models.pooled_nets import ClassNet, DenseNet
from jaxsgl.models.precision import product
from jaxsgl.models.step_context import ImageTokens, StepContext
from jaxsgl.models.tensor_parallel import num_parts, part_index, sum_of_parts
from jaxsgl.models.towers.tower import Tower
from pallas_kernels.norm import centred, multiplied, rms_norm

Params: TypeAlias = nnx.State[Any, Any]  # the tree of a model's parameters


class Decoder(DecoderLayers):
    """A decoder-only language model."""

    def __init__(self, arch: ModelArch, dtype: jnp.dtype, activations: jnp.dtype) -> None:
        super().__init__(arch, dtype, activations)
        v, d = arch.vocab_rows, arch.hidden_size
        fmt = None if arch.weight_format is None else arch.weight_format.of_vocabulary
        if arch.has_embedding:
            self.declare("embedding", (v, d), ("vocab", None), dtype, fmt, fan_in=d)
        if arch.num_positions and arch.stage.is_first:
            self.declare("positions", (arch.num_positions, d), (None, None), dtype, None, fan_in=d)
        self.layer_embeddings = LayerEmbeddings(arch, dtype, activations) if arch.embedding_size else None
        num_types = 0 if arch.encoder is None else arch.encoder.num_types
        self.types = vector((num_types, d), (None, None), dtype, mean=0.0) if num_types else None
        has_biases = arch.encoder is not None and arch.encoder.has_biases
        biases = NUM_BUCKETS, arch.num_heads
        self.distance_biases = vector(biases, (None, "kv_heads"), dtype, mean=0.0) if has_biases else None
        makes_embeddings = arch.pooling is not None and arch.pooling.dense and arch.head != "labels"
        self.dense_net = DenseNet(arch.folder_pooling.dense, dtype) if makes_embeddings else None
        self.class_net = ClassNet(arch, dtype) if arch.head == "labels" and arch.encoder is not None else None
        if arch.head == "labels" and self.class_net is None:
            self.declare("score", (len(arch.folder_pooling.labels), d), (None, None), dtype, None, fan_in=d)
        elif arch.head == "vocabulary" and not arch.tie_embeddings:
            self.declare("lm_head", (v, d), ("vocab", None), dtype, fmt, fan_in=d)
        has_bias = arch.head_bias and arch.head == "vocabulary"
        self.head_bias = vector((v,), ("vocab",), dtype, mean=0.0) if has_bias else None
        has_tower = arch.tower is not None and arch.tower.has_tower
        self.visual = Tower(arch.tower, dtype, activations) if arch.tower is not None and has_tower else None

    def __call__(self, token_ids: jax.Array, positions: jax.Array, context: StepContext) -> jax.Array:
        """Final hidden states `[T, D]`, normalized, of `token_ids [T]` int32 at `positions [T]` or `[3, T]` int32.

        Between two pipeline stages it is the residual stream `[T, D]`: what a stage but the last one returns, and what
        the next one takes in the place of `token_ids`. Ids outside the vocabulary are clipped to it.
        """
        images = context.images
        x_TD = self._embed(token_ids, positions) if self.arch.stage.is_first else token_ids
        if images is not None:
            x_TD = jnp.where(images.is_image[:, None], images.part(0).astype(x_TD.dtype), x_TD)
        of_layers = None
        if self.layer_embeddings is not None:
            of_layers = self.layer_embeddings(self._as_text(token_ids, images), x_TD, self._rows)
        return self.run(x_TD, positions, context, of_layers, token_ids)

    def attention_biases(self) -> jax.Array | None:
        """`[N, 2 B + 1]` float32 that `paged_extend_attention` takes, of all layers; None: there are none."""
        if self.distance_biases is None:
            return None
        return self.distance_biases[...].astype(jnp.float32)[distance_buckets()].T

    def embedded(self, token_ids: jax.Array) -> jax.Array:
        """The rows of the embedding `[T, D]`, without the factor that some models have."""
        return self._rows(self.matrix("embedding"), token_ids)

    def _embed(self, token_ids: jax.Array, positions: jax.Array) -> jax.Array:
        """What goes into the residual stream `[T, D]`: embeddings, with those of positions if the model has such."""
        rows_TD = self._scaled_rows(token_ids)
        if self.arch.normalizes_embedding:
            rows_TD = rms_norm(rows_TD, jnp.ones(rows_TD.shape[1:], rows_TD.dtype), self.arch.rms_norm_eps)
        if self.arch.num_positions:
            table = self.matrix("positions")
            assert isinstance(table, jax.Array), "tables of positions aren't quantized"
            added_TD = table.at[positions + self.arch.rows_before_positions].get(mode="clip")
            rows_TD = rows_TD.astype(jnp.float32) + added_TD.astype(jnp.float32)
        if self.types is not None:
            rows_TD = rows_TD.astype(jnp.float32) + self._rows_of_types(token_ids, positions)
        return centred(rows_TD, self.activations) if self.arch.centred else rows_TD.astype(self.activations)

    def _rows_of_types(self, token_ids: jax.Array, positions: jax.Array) -> jax.Array:
        """The embeddings `[T, D]` or `[D]` float32 of the tokens' types, of prompts that are in the step whole."""
        assert self.types is not None and self.arch.encoder is not None
        table, after = self.types[...].astype(jnp.float32), self.arch.encoder.second_after
        if after is None:
            return table[0]
        ends = token_ids == after
        before = jnp.cumsum(ends) - ends
        places = jnp.arange(len(token_ids))
        is_second = before > before[jnp.maximum(places - positions, 0)]
        return table[is_second.astype(jnp.int32)]

    def _scaled_rows(self, token_ids: jax.Array) -> jax.Array:
        """Embeddings `[T, D]`; their factor is rounded to the weights' dtype where the model was trained so."""
        embedding = self.matrix("embedding")
        rows_TD, dtype = self._rows(embedding, token_ids), getattr(embedding, "dtype", self.activations)
        scale = self.arch.embedding_scale
        if scale is None:
            return rows_TD
        if self.arch.rounds_embedding_scale:
            return rows_TD * jnp.asarray(scale, dtype).astype(self.activations)
        return multiplied(rows_TD, scale)

    def _as_text(self, token_ids: jax.Array, images: ImageTokens | None) -> jax.Array:
        """The ids `[T]`, of which those of images stand for nothing."""
        if images is None or self.arch.tower is None:
            return token_ids
        return jnp.where(images.is_image, self.arch.tower.tokens.pad_id, token_ids)

    def _rows(self, matrix: Weights, token_ids: jax.Array) -> jax.Array:
        """The rows `[T, D]` of a matrix over the vocabulary, whichever device has them."""
        if num_parts() > 1:
            token_ids = jnp.clip(token_ids, 0, self.arch.vocab_size - 1)
            token_ids, is_here = _of_this_part(token_ids, matrix.shape[0])
        if isinstance(matrix, Matrix):
            rows_TD = dequantized(matrix.rows(token_ids), self.activations)
        else:
            rows_TD = matrix.at[token_ids].get(mode="clip").astype(self.activations)
        if num_parts() > 1:
            rows_TD = sum_of_parts(jnp.where(is_here[:, None], rows_TD, jnp.zeros_like(rows_TD)))
        return rows_TD

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Logits `[R, V]` float32 of `hidden [R, D]`, the hidden states of R tokens; V is this device's vocabulary.

        Those of padding after the vocabulary are -inf.
        """
        logits = product(hidden, self._head(), jnp.float32)
        if self.head_bias is not None:
            logits = logits + self.head_bias[...].astype(jnp.float32)
        logits = self._capped(logits)
        if self.arch.vocab_padding:
            first = part_index() * logits.shape[-1]
            is_token = first + jnp.arange(logits.shape[-1]) < self.arch.vocab_size
            logits = jnp.where(is_token, logits, -jnp.inf)
        return logits

    def logits_of(self, hidden: jax.Array, token_ids: jax.Array) -> jax.Array:
        """Logits `[R, L]` float32 of the tokens `[R, L]` alone, for `hidden [R, D]`: reads these rows of the head."""
        rows_RLD = self._rows(self._head(), token_ids.reshape(-1)).reshape(*token_ids.shape, -1)
        logits = jnp.einsum("rd,rld->rl", hidden, rows_RLD, precision="highest", preferred_element_type=jnp.float32)
        if self.head_bias is not None:
            biases = self._rows(self.head_bias[...][:, None], token_ids.reshape(-1))
            logits = logits + biases.reshape(token_ids.shape).astype(jnp.float32)
        return self._capped(logits)

    def class_logits(self, hidden: jax.Array) -> jax.Array:
        """Logits `[R, C]` float32 of the classes of a classification head."""
        if self.class_net is not None:
            return self.class_net(hidden)
        return product(hidden, self.matrix("score"), jnp.float32)

    def _head(self) -> Weights:
        return self.matrix("embedding" if self.arch.tie_embeddings else "lm_head")

    def _capped(self, logits: jax.Array) -> jax.Array:
        cap, divisor = self.arch.logits_cap, self.arch.logits_divisor
        if divisor is not None:
            logits = logits / divisor
        return logits if cap is None else cap * jnp.tanh(logits / cap)


def _of_this_part(token_ids: jax.Array, num_rows: int) -> tuple[jax.Array, jax.Array]:
    """The rows of ids `[T]` in this device's part of the vocabulary, and whether they are in it."""
    rows = token_ids - part_index() * num_rows
    return rows, (rows >= 0) & (rows < num_rows)


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
