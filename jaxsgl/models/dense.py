"""The decoder: embed, layers, norm, logits. One class for all families; `ModelArch` holds what differs.

Token-flat: all sequences of a step lie one after another on one axis T, and the caller's `Attend` tells them apart. The
engine merges the model with parameters inside its jitted step. Products are computed in the parameters' dtype, what
lies between them in `activations`; norms' statistics, rope and logits are float32.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from flax import nnx

from jaxsgl.models.arch import ModelArch
from jaxsgl.models.connections import Connection, LastConnection
from jaxsgl.models.grouped import GroupedMixer
from jaxsgl.models.layer_embedding import EmbeddingGate, LayerEmbeddings
from jaxsgl.models.layer_spec import (
    ChannelDeltaNet,
    DeltaNet,
    DenseMlp,
    GroupedAttention,
    Latent,
    LayerSpec,
    Mamba,
    MoeMlp,
    RecurrentNet,
    Selective,
    ShortConv,
)
from jaxsgl.models.layers import (
    MLP,
    Attend,
    Attention,
    LayerRows,
    LayerVectors,
    Norm,
    Recur,
    Row,
    no_states,
    norm_dtype,
    vector,
)
from jaxsgl.models.lora import ActiveAdapters, LayerAdapters
from jaxsgl.models.matrix import Matrices, Matrix, Rows, Weights, dequantized, rounds_rows
from jaxsgl.models.mixers import (
    GatedDeltaNet,
    KimiDeltaNet,
    LatentAttention,
    Mamba2,
    RecurrentMixer,
    SelectiveScan,
    SharedKeysAttention,
    ShortConvolution,
)
from jaxsgl.models.moe import MoE
from jaxsgl.models.pooled_nets import ClassNet, DenseNet
from jaxsgl.models.precision import product
from jaxsgl.models.quantization import WeightFormat
from jaxsgl.models.rope import RopeParams, RopeTables, tables_of
from jaxsgl.models.streams import AltUp, Laurel, OneStream, Predicted
from jaxsgl.models.tensor_parallel import TokensOfRanks, num_parts, part_index, sum_of_parts
from jaxsgl.models.vision.tower import Tower
from pallas_kernels import KernelChoice, add_and_norm, add_and_norm_in_float8
from pallas_kernels.choice import AUTO_CHOICE
from pallas_kernels.delta_tokens import StateTokens
from pallas_kernels.norm import Addend, Finished, Update, centred, multiplied, rms_norm, scale_of, sum_parts
from pallas_kernels.short_conv import ConvTokens

Params: TypeAlias = nnx.State[Any, Any]  # the tree of a model's parameters
AttentionMixer: TypeAlias = Attention | LatentAttention | GroupedMixer | SharedKeysAttention
RopeKey: TypeAlias = tuple[RopeParams | None, int]  # a rope, and of how many numbers of a head it is


@dataclass(frozen=True)
class ImageTokens:
    """What a tower made of images, for the tokens of a step.

    Attributes:
      rows: `[T, (1 + J) D]`: embeddings, then what is added after each of the first J layers; 0 for other tokens.
      is_image: `[T]` whether a token is an image's.
      num_parts: 1 + J.
    """

    rows: jax.Array
    is_image: jax.Array
    num_parts: int

    def part(self, index: int) -> jax.Array:
        """`[T, D]`: the embeddings (0), or what is added after layer `index` - 1."""
        size = self.rows.shape[1] // self.num_parts
        return self.rows[:, index * size : (index + 1) * size]


@dataclass(frozen=True)
class StepContext:
    """What the layers work with besides tokens and positions, the same for all layers of a step.

    Attributes:
      attend, recur: called once per layer, in order.
      is_token: `[T]`, false where a bucket is padded, which costs no expert's weights; None: all are tokens.
      adapters: those of the tokens; None: there are none.
      images: take the places of some of the embeddings; None: there are none.
      kernels: what norms, experts and products with quantized weights run on.
      mlp_tokens: places for the tokens of all ranks in MLPs; 0: those of all their batches.
      experts: the chosen experts of each layer are appended here: `[T, k]` int32, `[T, 0]` of a layer without. None:
        the step doesn't report them.
      streams: by the index of a layer, each item becomes the residual stream `[T, D]` before that layer, or after the
        last one.
    """

    attend: Attend
    recur: Recur = no_states
    is_token: jax.Array | None = None
    adapters: ActiveAdapters | None = None
    images: ImageTokens | None = None
    kernels: KernelChoice = AUTO_CHOICE
    mlp_tokens: int = 0
    experts: list[jax.Array] | None = None
    streams: dict[int, Any] = field(default_factory=dict)

    def adapters_of(self, layer: int) -> LayerAdapters | None:
        """The adapters of one layer; None: there are none."""
        return None if self.adapters is None else self.adapters.of_layer(layer)

    def note_stream(self, index: int, x_TD: jax.Array) -> None:
        """Keeps the residual stream before layer `index`, if it is asked for."""
        if index in self.streams:
            self.streams[index] = x_TD

    def note_no_experts(self, num_tokens: int) -> None:
        """Keeps that a layer has no experts to choose from, if that is asked for."""
        if self.experts is not None:
            self.experts.append(jnp.zeros((num_tokens, 0), jnp.int32))


@dataclass(frozen=True)
class _Pass:
    """One pass through the layers: its context, and what is made of that once for all of them.

    Attributes:
      rows: picks a layer's vectors.
      ranks: the tokens that MLPs and experts compute.
      tables: by rope and size of heads, see `DecoderLayers._rope_of`.
      embeddings: `[T, L, P]`, those of the layers; None: they have none.
      token_ids: `[M]` those of all ranks, if experts follow from them.
    """

    context: StepContext
    rows: LayerRows
    ranks: TokensOfRanks
    tables: Mapping[RopeKey, RopeTables]
    embeddings: jax.Array | None
    token_ids: jax.Array | None

    @property
    def kernels(self) -> KernelChoice:
        """Those of the context."""
        return self.context.kernels


class DecoderLayer(nnx.Module):
    """The matrices of one layer."""

    def __init__(self, arch: ModelArch, spec: LayerSpec, dtype: jnp.dtype) -> None:
        self._mixer = spec.mixer.module if isinstance(spec.mixer, RecurrentNet) else "attention"
        if spec.mixer is not None:
            setattr(self, self._mixer, _mixer_of(spec)(arch, spec, dtype))
        self._also_attends = spec.also_attends
        if spec.also_attends:
            self.attention = Attention(arch, spec, dtype)
        format_of = functools.partial(arch.format_of, spec)
        self.mlp = _mlp(arch, spec.mlp, dtype, format_of)
        self.experts = None if spec.experts is None else MoE(arch, spec.experts, dtype, format_of("experts"), None)
        self.embedding_gate = EmbeddingGate(arch, spec, dtype) if spec.embedding_size else None
        self.laurel = Laurel(arch, dtype) if arch.laurel_rank else None
        is_connected = arch.connections is not None
        self.mixer_connection, self.mlp_connection = (Connection(arch) if is_connected else None for _ in range(2))
        self._shares_norm = arch.parallel == "shared norm"
        self._has_shortcut = spec.shortcut

    @property
    def shortcut(self) -> MoE | None:
        """The experts that read what the MLP reads, and whose result the next layer adds, if there are any."""
        return self.experts if self._has_shortcut else None

    @property
    def experts_beside(self) -> MoE | None:
        """The experts whose result is added to that of the MLP, if there are any."""
        return None if self._has_shortcut else self.experts

    @property
    def mixer(self) -> AttentionMixer | RecurrentMixer | None:
        """What mixes tokens, if anything does."""
        found: AttentionMixer | RecurrentMixer | None
        found = getattr(self, self._mixer, None)
        return found

    @property
    def attention_beside(self) -> Attention | None:
        """What attends next to the mixer, if anything does."""
        return self.attention if self._also_attends else None

    def readers(self, kernels: KernelChoice) -> tuple[Weights | None, ...]:
        """What multiplies what the layer reads: the only matrix of its mixer, of its MLP or of attention next to these;
        None: there are several.
        """
        of_mlp = self.mlp_reader(kernels)
        if self.mixer is None:
            return (of_mlp,)
        of_mixer = self.mixer.reader(kernels)
        if self.attention_beside is not None:
            return of_mixer, self.attention_beside.reader(kernels)
        return (of_mixer, of_mlp) if self._shares_norm else (of_mixer,)

    def mlp_reader(self, kernels: KernelChoice) -> Weights | None:
        """The only matrix that multiplies what its MLP reads; None: there are several."""
        if not isinstance(self.mlp, MLP) or self.shortcut is not None:
            return None
        return self.mlp.matrix("gate_up", kernels)


def _mlp(
    arch: ModelArch, spec: DenseMlp | MoeMlp | None, dtype: jnp.dtype, format_of: Callable[[str], WeightFormat | None]
) -> MLP | MoE | None:
    if spec is None:
        return None
    if isinstance(spec, DenseMlp):
        return MLP(arch, spec, dtype, format_of("gate_up"), format_of("down"))
    return MoE(arch, spec, dtype, format_of("experts"), format_of("shared"))


_RECURRENT: dict[type[RecurrentNet], type[RecurrentMixer]] = {
    DeltaNet: GatedDeltaNet,
    ChannelDeltaNet: KimiDeltaNet,
    Mamba: Mamba2,
    Selective: SelectiveScan,
    ShortConv: ShortConvolution,
}


def _mixer_of(spec: LayerSpec) -> type[AttentionMixer | RecurrentMixer]:
    if isinstance(spec.mixer, RecurrentNet):
        return _RECURRENT[type(spec.mixer)]
    if isinstance(spec.mixer, Latent):
        return LatentAttention
    if isinstance(spec.mixer, GroupedAttention):
        return GroupedMixer
    return Attention if spec.keys_from is None else SharedKeysAttention


class DecoderLayers(Matrices):
    """Layers and the norm after the last one: a residual stream goes in, normalized hidden states come out."""

    def __init__(self, arch: ModelArch, dtype: jnp.dtype, activations: jnp.dtype) -> None:
        self.arch = arch
        self.activations = activations
        self.layers = nnx.List([DecoderLayer(arch, spec, dtype) for spec in arch.layers])
        self.vectors = LayerVectors(arch, dtype)
        self.streams = AltUp(arch, dtype) if arch.num_streams > 1 else OneStream(arch)
        self.last_connection = None if arch.connections is None else LastConnection(arch)
        norm_shape = (arch.hidden_size,)
        self.final_norm, self.final_norm_bias = (
            vector(norm_shape, (None,), norm_dtype(arch, dtype), mean=mean) if exists else None
            for exists, mean in ((arch.stage.is_last, 1.0), (arch.stage.is_last and arch.norm_bias, 0.0))
        )

    def run(
        self,
        x_TD: jax.Array,
        positions: jax.Array,
        context: StepContext,
        embeddings: jax.Array | None = None,
        token_ids: jax.Array | None = None,
    ) -> jax.Array:
        """Final hidden states `[T, D]`, normalized, of tokens whose stream `[T, D]` before the first layer is given.

        `embeddings [T, L, P]` are those of the layers, if they have some, and `token_ids [T]` what experts may follow
        from.
        """
        arch, vectors = self.arch, self.vectors
        step = self._pass_of(positions, x_TD.dtype, context, embeddings, token_ids)
        if self.last_connection is not None:
            return self._connected(x_TD, step, self.last_connection)
        x_TD, predicted = self.streams.opened(x_TD, vectors, step.rows)
        # Each sum of the residual stream is made together with the norm of what reads it next, as a GPU's kernel does.
        row = arch.norm_row("attention_norm", 0)
        first = step.rows.norm(vectors.attention_norm, vectors.attention_norm_bias, row)
        read_TD: Rows = x_TD if first is None else first(x_TD, arch.rms_norm_eps)
        if arch.encoder is not None and arch.encoder.restarts != "nowhere":
            x_TD = _restarted(read_TD)
        from_before: tuple[Update, ...] = ()
        for index, layer in enumerate(self.layers):
            context.note_stream(index, x_TD)
            x_TD, (*updates, update), shortcut = self._through_blocks(index, x_TD, read_TD, step)
            if layer.experts_beside is not None:
                update = self._with_experts(layer.experts_beside, index, x_TD, update, step)
            if context.images is not None and index + 1 < context.images.num_parts:
                update = sum_parts(update, x_TD) + context.images.part(index + 1).astype(x_TD.dtype)
            updates = [*updates, update, *from_before]
            x_TD, predicted, read_TD = self._after_layer(index, x_TD, predicted, updates, step)
            from_before = shortcut
        context.note_stream(arch.num_layers, x_TD)
        assert isinstance(read_TD, jax.Array), "heads read rows as they are"
        return read_TD

    def _pass_of(
        self,
        positions: jax.Array,
        dtype: jnp.dtype,
        context: StepContext,
        embeddings: jax.Array | None,
        token_ids: jax.Array | None,
    ) -> _Pass:
        """What layers of a stream of `dtype` have of `run`'s arguments."""
        tables = {key: tables_of(positions, *key) for key in self._ropes()}
        rows = LayerRows(self.arch.num_layers, positions.reshape(-1), dtype)
        ranks = TokensOfRanks(context.is_token, context.mlp_tokens)
        mlps = (spec.mlp for spec in self.arch.layers)
        if token_ids is not None and any(isinstance(mlp, MoeMlp) and mlp.by_token for mlp in mlps):
            token_ids = ranks.gathered(token_ids)
        return _Pass(context, rows, ranks, tables, embeddings, token_ids)

    def _connected(self, x_TD: jax.Array, step: _Pass, last: LastConnection) -> jax.Array:
        """`run` where blocks have connections to several residual streams, which begin alike."""
        arch, vectors, eps = self.arch, self.vectors, self.arch.rms_norm_eps
        assert arch.connections is not None
        x_TnD = jnp.broadcast_to(x_TD[:, None], (len(x_TD), arch.connections.number, x_TD.shape[1]))
        for index, layer in enumerate(self.layers):
            assert layer.mixer_connection is not None and layer.mlp_connection is not None
            read_TD, shares = layer.mixer_connection(x_TnD)
            norm = step.rows.norm(vectors.attention_norm, None, arch.norm_row("attention_norm", index))
            assert norm is not None
            (update,) = self._mixed(index, norm(read_TD, eps), step)
            x_TnD = shares.streams(x_TnD, sum_parts(update, read_TD))
            read_TD, shares = layer.mlp_connection(x_TnD)
            norm = self._mlp_norm(index, step)
            assert norm is not None
            x_TnD = shares.streams(x_TnD, sum_parts(self._mlp(layer, index, norm(read_TD, eps), step), read_TD))
        last_norm, x_TD = self._last_norm(), last(x_TnD)
        return x_TD if last_norm is None else last_norm(x_TD, eps)

    def _through_blocks(
        self, index: int, x_TD: jax.Array, read_TD: Rows, step: _Pass
    ) -> tuple[jax.Array, tuple[Update, ...], tuple[Update, ...]]:
        """The stream before the last block of a layer, what that block, or those next to each other, add to it, and
        what experts add at the end of the next layer, if anything.

        A layer is a mixer and then an MLP, both next to each other (`arch.parallel`), or one of them alone. Attention
        may stand next to a mixer that keeps a state.
        """
        layer = self.layers[index]
        if layer.mixer is None:
            assert layer.mlp is not None
            return x_TD, (self._mlp(layer, index, read_TD, step),), ()
        mixed = self._mixed(index, read_TD, step)
        if layer.mlp is None:
            step.context.note_no_experts(len(x_TD))
            return x_TD, mixed, ()
        next_norm = self._mlp_norm(index, step)
        if self.arch.parallel is not None:
            read_TD = read_TD if next_norm is None else next_norm(x_TD, self.arch.rms_norm_eps)
            return x_TD, (*mixed, self._mlp(layer, index, read_TD, step)), ()
        x_TD, read_TD = self._between_blocks(index, x_TD, read_TD, mixed, next_norm, step)
        shortcut: tuple[Update, ...] = ()
        if layer.shortcut is not None:
            assert isinstance(read_TD, jax.Array), "routers read rows as they are"
            shortcut = (self._of_experts(layer.shortcut, step.ranks.gathered(read_TD), None, step),)
        return x_TD, (self._mlp(layer, index, read_TD, step),), shortcut

    def _mlp_norm(self, index: int, step: _Pass) -> Norm | None:
        """That before a layer's MLP."""
        row = self.arch.norm_row("mlp_norm", index)
        return step.rows.norm(self.vectors.mlp_norm, self.vectors.mlp_norm_bias, row)

    def _between_blocks(
        self,
        index: int,
        x_TD: jax.Array,
        read_TD: Rows,
        mixed: Sequence[Update],
        next_norm: Norm | None,
        step: _Pass,
    ) -> tuple[jax.Array, Rows]:
        """The stream before a layer's MLP, of what its mixer read and made, and what the MLP reads of it."""
        layer, vectors = self.layers[index], self.vectors
        out_norm = step.rows.of(vectors.attention_out_norm, self.arch.norm_row("attention_out_norm", index))
        if layer.laurel is None:
            readers = () if step.context.adapters is not None else (layer.mlp_reader(step.kernels),)
            return self._add(x_TD, mixed, out_norm, next_norm, step.kernels, readers)
        assert isinstance(read_TD, jax.Array) and next_norm is not None
        x_TD, _ = self._add(x_TD, mixed, out_norm, None, step.kernels, ())
        x_TD = layer.laurel(x_TD, read_TD, step.rows.of(vectors.laurel_norm, index))
        return x_TD, next_norm(x_TD, self.arch.rms_norm_eps)

    def _mixed(self, index: int, read_TD: Rows, step: _Pass) -> tuple[Update, ...]:
        """What the mixer of a layer adds to the stream, and what attends next to it, if anything does."""
        layer, place = self.layers[index], self.arch.places[index]
        mixer, beside = layer.mixer, layer.attention_beside
        assert mixer is not None
        if not isinstance(mixer, RecurrentMixer):
            return (self._attended(mixer, index, place, read_TD, step),)
        update = mixer(read_TD, self.vectors, step.rows, place, step.context.recur, step.kernels)
        if beside is None:
            return (update,)
        return update, self._attended(beside, index, self.arch.attention_layers.index(index), read_TD, step)

    def _attended(self, attention: AttentionMixer, index: int, place: int, read_TD: Rows, step: _Pass) -> Update:
        """What the attention of a layer adds to the stream; `place` is the layer's among those that attend."""
        table = step.tables[self._rope_of(self.arch.layers[index])]
        adapters = step.context.adapters_of(index)
        return attention(read_TD, self.vectors, step.rows, table, place, step.context.attend, adapters, step.kernels)

    def _after_layer(
        self, index: int, x_TD: jax.Array, predicted: Predicted, updates: Sequence[Update], step: _Pass
    ) -> tuple[jax.Array, Predicted, Rows]:
        """The streams after a layer, with its last `updates`, and what the next layer or the head reads of them."""
        vectors, rows = self.vectors, step.rows
        is_last = index == self.arch.num_layers - 1
        if is_last:
            next_norm = self._last_norm()
        else:
            row = self.arch.norm_row("attention_norm", index + 1)
            next_norm = rows.norm(vectors.attention_norm, vectors.attention_norm_bias, row)
        readers: tuple[Weights | None, ...] = ()
        if not is_last and step.context.adapters is None:
            readers = self.layers[index + 1].readers(step.kernels)
        out_norm = rows.of(vectors.mlp_out_norm, self.arch.norm_row("mlp_out_norm", index))
        if self.streams.joins_norms:
            x_TD, read_TD = self._add(x_TD, updates, out_norm, next_norm, step.kernels, readers)
            return x_TD, predicted, read_TD
        x_TD, _ = self._add(x_TD, updates, out_norm, None, step.kernels, ())
        gate = self.layers[index].embedding_gate
        of_embedding = None if gate is None else functools.partial(self._of_embedding, gate, index, step)
        x_TD, predicted = self.streams.after_layer(index, x_TD, predicted, of_embedding, vectors, rows)
        return x_TD, predicted, x_TD if next_norm is None else next_norm(x_TD, self.arch.rms_norm_eps)

    def state_tokens(self, products: Sequence[jax.Array], positions: jax.Array) -> list[StateTokens | ConvTokens]:
        """What moves the states of each layer that has some, of what these made of tokens, `[T, K', ...]` each.

        `positions` are any of the step's.
        """
        rows = LayerRows(self.arch.num_layers, positions, self.activations)
        mixers = [layer.mixer for layer in self.layers if isinstance(layer.mixer, RecurrentMixer)]
        return [
            mixer.tokens(product, self.vectors, rows, place, self.activations)
            for place, (mixer, product) in enumerate(zip(mixers, products, strict=True))
        ]

    def _mlp(self, layer: DecoderLayer, index: int, read_TD: Rows, step: _Pass) -> Update:
        """What a layer's MLP or experts add to this rank's tokens, `[T, D]` or in parts; computed for those of all."""
        ranks, mlp = step.ranks, layer.mlp
        if isinstance(mlp, MoE):
            assert isinstance(read_TD, jax.Array), "routers read rows as they are"
            return self._of_experts(mlp, ranks.gathered(read_TD), None, step)
        assert mlp is not None
        adapters = step.context.adapters_of(index)
        update = mlp(ranks.gathered(read_TD), summed=not ranks.are_shared, adapters=adapters, kernels=step.kernels)
        if layer.experts is None:
            step.context.note_no_experts(len(read_TD))
        if not ranks.are_shared:
            return update
        assert isinstance(update, jax.Array), "of several devices each has its part of the inputs"
        return ranks.summed(update)

    def _of_experts(self, of_layer: MoE, x_MD: jax.Array, routed_MD: jax.Array | None, step: _Pass) -> Update:
        """What experts add to this rank's tokens, of what they and the router read of all ranks'; see `MoE`."""
        ranks, chosen = step.ranks, step.context.experts
        update = of_layer(
            x_MD, ranks.is_token, chosen, step.kernels, routed_MD, step.token_ids, summed=not ranks.are_shared
        )
        if chosen is not None:
            chosen[-1] = ranks.of_this_rank(chosen[-1])
        if not ranks.are_shared:
            return update
        assert isinstance(update, jax.Array), "experts of several devices add up their own results"
        return ranks.summed(update)

    def _with_experts(self, of_layer: MoE, index: int, x_TD: jax.Array, of_mlp: Update, step: _Pass) -> jax.Array:
        """What an MLP and the experts next to it add to the stream `[T, D]`, each normalized by itself."""
        vectors = self.vectors

        def normed(stack: nnx.Param[jax.Array] | None, rows_TD: jax.Array) -> jax.Array:
            row = step.rows.of(stack, index)
            assert row is not None
            return rms_norm(rows_TD, scale_of(*row, rows_TD.dtype), self.arch.rms_norm_eps)

        x_MD = step.ranks.gathered(x_TD)
        read, routed = (normed(stack, x_MD) for stack in (vectors.experts_norm, vectors.router_norm))
        of_experts = self._of_experts(of_layer, read, routed, step)
        of_mlp = normed(vectors.mlp_part_norm, sum_parts(of_mlp, x_TD))
        return of_mlp + normed(vectors.experts_part_norm, sum_parts(of_experts, x_TD))

    def _of_embedding(self, gate: EmbeddingGate, index: int, step: _Pass, x_TD: jax.Array) -> jax.Array:
        """What the layer's own embedding of the tokens makes of a stream `[T, D]`, to be added to one."""
        norm = step.rows.of(self.vectors.embedding_norm, index)
        assert norm is not None and step.embeddings is not None
        added = gate(x_TD, step.embeddings[:, index], step.kernels)
        return rms_norm(added, scale_of(*norm, x_TD.dtype), self.arch.rms_norm_eps)

    def _rope_of(self, spec: LayerSpec) -> RopeKey:
        """The rope of a layer, and of how many numbers of a head it is."""
        rope = None if spec.rope is None else self.arch.ropes[spec.rope]
        return rope, self.arch.rope_dim if spec.heads is None else spec.heads.size

    def _ropes(self) -> dict[RopeKey, None]:
        """The ropes that layers have, in order."""
        return dict.fromkeys(self._rope_of(self.arch.layers[layer]) for layer in self.arch.attention_layers)

    def _last_norm(self) -> Norm | None:
        """The norm after the last layer, if this stage has it."""
        if self.final_norm is None:
            return None
        bias = None if self.final_norm_bias is None else (self.final_norm_bias[...][None], 0)
        return Norm((self.final_norm[...][None], 0), bias)

    def _add(
        self,
        x_TD: jax.Array,
        updates: Sequence[Update],
        out_norm: Row | None,
        next_norm: Norm | None,
        kernels: KernelChoice,
        readers: Sequence[Weights | None],
    ) -> tuple[jax.Array, Rows]:
        """The residual stream with updates, normalized by `out_norm` and scaled if there are such, and what is read.

        That is the stream by `next_norm`, or as it is; rounded if all `readers`, matrices, take it so. Each update is
        `[T, D]` or in parts, as `add_and_norm` takes it.
        """
        eps, scale = self.arch.rms_norm_eps, self.arch.residual_scale
        added: Addend = updates[0]
        if len(updates) > 1 or self.arch.centred or out_norm is not None or scale is not None:
            norms, row = (None, None) if out_norm is None else out_norm
            added = Finished(tuple(updates), norms, row, eps, self.arch.centred, scale)
        if next_norm is None:
            x_TD = x_TD + sum_parts(added, x_TD)
            return x_TD, x_TD
        restarts = self.arch.encoder is not None and self.arch.encoder.restarts == "everywhere"
        take_rounded = [each is not None and rounds_rows(x_TD.dtype, each) for each in readers]
        if take_rounded and all(take_rounded) and next_norm.bias is None and not restarts:
            return add_and_norm_in_float8(x_TD, added, *next_norm.scale, eps, backend=kernels.add_and_norm)
        biases = None if next_norm.bias is None else next_norm.bias[0]  # whose row is that of the scales
        x_TD, read_TD = add_and_norm(x_TD, added, *next_norm.scale, eps, biases=biases, backend=kernels.add_and_norm)
        return (_restarted(read_TD) if restarts else x_TD), read_TD


def _restarted(read_TD: Rows) -> jax.Array:
    """The residual stream that goes on from what a norm made, without its mean, as norms expect it."""
    assert isinstance(read_TD, jax.Array), "streams go on from rows as they are"
    return centred(read_TD, read_TD.dtype)


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
        makes_embeddings = arch.pooling is not None and arch.pooling.dense and arch.head != "labels"
        self.dense_net = DenseNet(arch.folder_pooling.dense, dtype) if makes_embeddings else None
        self.class_net = ClassNet(arch, dtype) if arch.head == "labels" and arch.encoder is not None else None
        if arch.head == "labels" and self.class_net is None:
            self.declare("score", (len(arch.folder_pooling.labels), d), (None, None), dtype, None, fan_in=d)
        elif arch.head == "vocabulary" and not arch.tie_embeddings:
            self.declare("lm_head", (v, d), ("vocab", None), dtype, fmt, fan_in=d)
        has_bias = arch.head_bias and arch.head == "vocabulary"
        self.head_bias = vector((v,), ("vocab",), dtype, mean=0.0) if has_bias else None
        has_tower = arch.vision is not None and arch.vision.has_tower
        self.visual = Tower(arch.vision, dtype, activations) if arch.vision is not None and has_tower else None

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
        if images is None or self.arch.vision is None:
            return token_ids
        return jnp.where(images.is_image, self.arch.vision.pad_token_id, token_ids)

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
