"""Layers that draft tokens from what the model has computed: EAGLE-3's head, and the checkpoint's own next layer.

As with `Decoder`, the caller attends and keeps pages. `engine/drafting/heads.py` runs them on the device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxsgl.errors import CheckpointError
from jaxsgl.json_file import read_object
from jaxsgl.models.arch import ModelArch
from jaxsgl.models.arch_file import arch_from_values
from jaxsgl.models.decoder import Decoder, Params
from jaxsgl.models.decoder_layers import DecoderLayers
from jaxsgl.models.layer_spec import DenseMlp
from jaxsgl.models.layers import MLP, Attend, last_product, norm_dtype, qkv_heads, vector
from jaxsgl.models.matrix import Matrices
from jaxsgl.models.precision import product
from jaxsgl.models.rope import rope_tables
from jaxsgl.models.step_context import StepContext
from pallas_kernels import FusedQkv, KernelChoice
from pallas_kernels.norm import rms_norm, sum_parts

SPECFORGE, SPECULATORS = "midlayer.", "layers.0."  # what the names of the layer's tensors begin with
NUM_TAPS = 3
_OTHER_KEYS = {  # of config.json: of this file, or without effect on what a head computes
    "draft_vocab_size", "eagle_aux_hidden_state_layer_ids", "eagle_config", "embed_requires_grad", "norm_before_fc",
    "norm_before_residual", "norm_output", "fc_norm", "has_no_defaults_at_init", "speculators_config",
    "speculators_model_type", "speculators_version", "target_hidden_size", "target_model_type",
    "transformer_layer_config",
}  # fmt: skip


@dataclass(frozen=True)
class EagleArch:
    """The shape of an EAGLE-3 head, read from its config.json in SpecForge's form or in speculators'.

    Attributes:
      layer: its layer as that of a Llama of one layer; `vocab_size` is the model's.
      taps: the streams of the model that it reads: the inputs of these layers, or the last one's output.
      target_size: Dt, of a stream.
      draft_vocab_size: tokens that it may draft.
      prefix: what the names of the layer's tensors begin with.
      residual_after_norm: the residual stream begins after the norm of the hidden states, not before.
      feeds_normed: the next draft reads the output after the last norm, not before.
    """

    layer: ModelArch
    taps: tuple[int, ...]
    target_size: int
    draft_vocab_size: int
    prefix: str
    residual_after_norm: bool = False
    feeds_normed: bool = False

    @property
    def has_embedding(self) -> bool:
        """Whether it embeds tokens itself; else with the model's embedding."""
        return self.layer.hidden_size != self.target_size

    @classmethod
    def from_folder(cls, folder: Path, target: ModelArch) -> EagleArch:
        """Reads config.json of a head for `target`. Raises `CheckpointError` for one that can't be used."""
        path = folder / "config.json"
        if not path.is_file():
            raise CheckpointError(f"{folder} is not the folder of an EAGLE-3 head: it has no config.json")
        values = read_object(path)
        of_layer, prefix = _described_layer(path, values)
        for key in ("norm_before_fc", "fc_norm"):
            if values.get(key):
                raise CheckpointError(f"{path}: {key} is {values[key]}, but heads with norms before fc can't be used")
        kept = {key: value for key, value in of_layer.items() if key not in _OTHER_KEYS}
        kept |= {"architectures": ["LlamaForCausalLM"], "tie_word_embeddings": False}
        layer = arch_from_values(path, kept)
        size = values.get("target_hidden_size") or layer.hidden_size
        _check_fits(path, layer, size, target)
        return cls(
            layer=layer,
            taps=_read_taps(path, values, target.num_layers),
            target_size=size,
            draft_vocab_size=values.get("draft_vocab_size") or layer.vocab_size,
            prefix=prefix,
            residual_after_norm=bool(values.get("norm_before_residual", False)),
            feeds_normed=bool(values.get("norm_output", False)),
        )

    def on_devices(self, num_devices: int) -> EagleArch:
        """The head as `num_devices` share it."""
        return replace(self, layer=self.layer.on_devices(num_devices, by_experts=False))


def _described_layer(path: Path, values: Mapping[str, Any]) -> tuple[Mapping[str, Any], str]:
    """What describes the layer, as a model of that layer alone, and how its tensors' names begin."""
    if values.get("speculators_model_type") == "eagle3":
        return values.get("transformer_layer_config") or {}, SPECULATORS
    names = values.get("architectures") or []
    if "LlamaForCausalLMEagle3" not in names:
        raise CheckpointError(
            f"{path}: architectures is {names}, but a head of EAGLE-3 is LlamaForCausalLMEagle3, or has "
            "speculators_model_type eagle3"
        )
    return values, SPECFORGE


def _check_fits(path: Path, layer: ModelArch, size: int, target: ModelArch) -> None:
    """Raises `CheckpointError` unless the head, which reads states of `size` numbers, can draft for `target`."""
    if target.centred:
        raise CheckpointError(
            f"{path}: a head reads the residual stream with its mean, and that of {target.name} is kept without: "
            "serve it without a head, or draft with --speculative-algorithm NGRAM"
        )
    if layer.num_layers != 1 or layer.attention_bias or layer.mlp_bias or layer.attention_out_bias:
        raise CheckpointError(f"{path}: a head has one layer without biases, but this one has others")
    if layer.vocab_size != target.vocab_size:
        raise CheckpointError(
            f"{path}: vocab_size is {layer.vocab_size}, but {target.name}'s is {target.vocab_size}: it is another "
            "model's head"
        )
    if size != target.hidden_size:
        raise CheckpointError(
            f"{path}: the head reads states of {size} numbers, but {target.name} has {target.hidden_size}: it is "
            "another model's head"
        )


def _read_taps(path: Path, values: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """The layers whose inputs are read.

    speculators names them so, as vLLM counts; SpecForge's `eagle_config` names the layers whose outputs are read.
    """
    given = values.get("eagle_aux_hidden_state_layer_ids")
    if given is None:
        outputs = (values.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
        given = [2, num_layers // 2, num_layers - 3] if outputs is None else [layer + 1 for layer in outputs]
    if len(given) != NUM_TAPS or not all(type(layer) is int and 0 <= layer <= num_layers for layer in given):
        raise CheckpointError(
            f"{path}: a head reads the model at the inputs of {given}, but {NUM_TAPS} of 0 to {num_layers} are needed"
        )
    return tuple(given)


class EagleHead(Matrices):
    """An EAGLE-3 head (arXiv 2503.01840): one layer. `weights/eagle.py` loads it.

        streams of the model at token i - 1   [T, 3 Dt] -> fc -> [T, D]   or, later in a chain, the head's own output
        embedding of token i                  [T, D]
        both, each with a norm of its own     [T, 2 D] -> attention -> MLP -> norm, lm_head: token i + 1

    Its vocabulary may be a part of the model's.
    """

    def __init__(self, arch: EagleArch, dtype: jnp.dtype, activations: jnp.dtype) -> None:
        layer = arch.layer
        d, n, h = layer.hidden_size, layer.num_heads, layer.head_dim
        self.arch, self.activations = arch, activations
        self.declare("fc", (d, NUM_TAPS * arch.target_size), (None, None), dtype, None, fan_in=d)
        self.declare("qkv", (*qkv_heads(layer), 2 * d), ("kv_heads", None, None, None), dtype, None, fan_in=2 * d)
        self.declare("o", (d, n * h), (None, "kv_heads"), dtype, None, fan_in=n * h)
        self.embedding_norm, self.hidden_norm, self.mlp_norm, self.final_norm = (
            vector((d,), (None,), dtype, mean=1.0) for _ in range(4)
        )
        spec = layer.layers[0].mlp
        assert isinstance(spec, DenseMlp)
        self.mlp = MLP(layer, spec, dtype, None, None)
        self.declare("lm_head", (arch.draft_vocab_size, d), ("vocab", None), dtype, None, fan_in=d)
        self.target_ids = nnx.Param(
            jnp.zeros(arch.draft_vocab_size, jnp.int32), axes=(None,), mean=0.0, std=0.0
        )  # of each token that it may draft
        if arch.has_embedding:
            self.declare("embedding", (layer.vocab_size, d), (None, None), dtype, None, fan_in=d)

    def states(self, streams: dict[int, jax.Array], hidden_TD: jax.Array) -> jax.Array:
        """`[T, D]` of the model's streams `[T, Dt]` each: what the head reads of a token."""
        taps = [streams[layer] for layer in self.arch.taps]
        return product(jnp.concatenate(taps, axis=-1), self.matrix("fc")).astype(self.activations)

    def __call__(
        self,
        model: Decoder,
        token_ids: jax.Array,
        before_TD: jax.Array,
        positions: jax.Array,
        attend: Attend,
        kernels: KernelChoice,
    ) -> tuple[jax.Array, jax.Array]:
        """The states `[T, D]` of tokens whose predecessors' are given, and logits `[T, Vd]` float32 of the tokens after
        them in its own vocabulary, this device's part.
        """
        embedded_TD = self._embedded(token_ids) if self.arch.has_embedding else model.embedded(token_ids)
        qkv = self._attention(embedded_TD, before_TD, positions)
        return self._logits(self._output(before_TD, attend(0, qkv, None), kernels))

    def in_model(self, token_ids: jax.Array) -> jax.Array:
        """The model's ids of its own."""
        return self.target_ids[...][token_ids]

    def _embedded(self, token_ids: jax.Array) -> jax.Array:
        """`[T, D]`; only if `has_embedding`."""
        embedding = self.matrix("embedding")
        assert isinstance(embedding, jax.Array), "heads are not quantized"
        return embedding.at[token_ids].get(mode="clip").astype(self.activations)

    def _attention(self, embedded_TD: jax.Array, hidden_TD: jax.Array, positions_T: jax.Array) -> FusedQkv:
        """What the tokens at `positions_T` attend with, each with the hidden state of the token before it.

        The token at 0 has none: its key and value are zeros.
        """
        layer = self.arch.layer
        both = jnp.concatenate(
            [self._normed(embedded_TD, self.embedding_norm), self._normed(hidden_TD, self.hidden_norm)], axis=-1
        )
        fused = product(both, self.matrix("qkv"))
        fused = jnp.where((positions_T > 0)[:, None, None, None], fused, jnp.zeros_like(fused))
        cos, sin = rope_tables(positions_T, layer.ropes[0], layer.rope_dim)
        return FusedQkv(fused, cos, sin)

    def _output(self, hidden_TD: jax.Array, attended_TNH: jax.Array, kernels: KernelChoice) -> jax.Array:
        """The residual stream `[T, D]` after the layer."""
        x_TD = self._normed(hidden_TD, self.hidden_norm) if self.arch.residual_after_norm else hidden_TD
        x_TD = x_TD + sum_parts(last_product(attended_TNH.reshape(len(x_TD), -1), self.matrix("o"), None), x_TD)
        return x_TD + sum_parts(self.mlp(self._normed(x_TD, self.mlp_norm), kernels=kernels), x_TD)

    def _logits(self, output_TD: jax.Array) -> tuple[jax.Array, jax.Array]:
        """What the next draft reads, and the logits."""
        normed = self._normed(output_TD, self.final_norm)
        logits = product(normed, self.matrix("lm_head"), jnp.float32)
        return normed if self.arch.feeds_normed else output_TD, logits

    def _normed(self, x_TD: jax.Array, scale: nnx.Param[jax.Array]) -> jax.Array:
        dtype = jnp.promote_types(scale.dtype, x_TD.dtype)
        return rms_norm(x_TD, scale[...].astype(dtype), self.arch.layer.rms_norm_eps)


def abstract_head(arch: EagleArch, dtype: jnp.dtype, activations: jnp.dtype) -> tuple[nnx.GraphDef[EagleHead], Params]:
    """The head's structure and its parameters as shapes; see `abstract_model`."""
    graphdef, params = nnx.split(nnx.eval_shape(lambda: EagleHead(arch, dtype, activations)))
    return graphdef, params


class NextLayer(DecoderLayers):
    """The layer after a checkpoint's last one, which predicts one token more (DeepSeek-V3, arXiv 2412.19437; GLM-4.5).

        final hidden state of token i - 1   [T, D] -> hnorm     or, later in a chain, the layer's own
        embedding of token i                [T, D] -> enorm
        both                                [T, 2 D] -> eh_proj -> decoder layer -> norm, the model's head: token i + 1

    Embedding and head are the model's. `ModelArch.next_arch` is its shape, `weights/families` has its tensors' names.
    """

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
        hidden_TD = self.run(x_TD, positions, StepContext(attend, kernels=kernels))
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
