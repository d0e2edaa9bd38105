"""The layers of a decoder: a residual stream goes in, and normalized hidden states come out.

    read -> mixer ----.  added up with the norm of      .- MLP or experts -- added up with the norm of
    (norm of x)       '- what reads the stream next ----'                    what the next layer reads

Token-flat: all sequences of a step lie one after another on one axis T, and the caller's `Attend` tells them apart.
Products are computed in the parameters' dtype, what lies between them in `activations`. Owns the order of blocks and
what is added to what; parts of layers are in `layers`, `mixers` and `moe`, streams besides one in `streams` and
`connections`. Never knows tokens or a vocabulary: `decoder` does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import jax
import jax.numpy as jnp
from flax import nnx

from jaxsgl.models.arch import ModelArch
from jaxsgl.models.connections import Connection, LastConnection
from jaxsgl.models.grouped import GroupedMixer
from jaxsgl.models.layer_embedding import EmbeddingGate
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
    Attention,
    LayerRows,
    LayerVectors,
    Norm,
    Row,
    norm_dtype,
    vector,
)
from jaxsgl.models.matrix import Matrices, Rows, Weights, rounds_rows
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
from jaxsgl.models.quantization import WeightFormat
from jaxsgl.models.rope import RopeParams, RopeTables, tables_of
from jaxsgl.models.step_context import StepContext
from jaxsgl.models.streams import AltUp, Laurel, OneStream, Predicted
from jaxsgl.models.tensor_parallel import TokensOfRanks
from pallas_kernels import KernelChoice, add_and_norm, add_and_norm_in_float8
from pallas_kernels.delta_tokens import StateTokens
from pallas_kernels.norm import Addend, Finished, Update, centred, rms_norm, scale_of, stream_after, sum_parts
from pallas_kernels.short_conv import ConvTokens

AttentionMixer: TypeAlias = Attention | LatentAttention | GroupedMixer | SharedKeysAttention
RopeKey: TypeAlias = tuple[RopeParams | None, int]  # a rope, and of how many numbers of a head it is


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
        self.streams = AltUp(arch, dtype) if arch.num_streams > 1 else OneStream()
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
        gate, kernels = self.layers[index].embedding_gate, step.kernels
        if isinstance(self.streams, AltUp):
            assert gate is not None, "layers have embeddings where there are several streams"
            x_TD, _ = self._add(x_TD, updates, out_norm, None, kernels, ())
            of_embedding = functools.partial(self._of_embedding, gate, index, step)
            x_TD, predicted = self.streams.after_layer(index, x_TD, predicted, of_embedding, vectors, rows)
            return x_TD, predicted, x_TD if next_norm is None else next_norm(x_TD, self.arch.rms_norm_eps)
        if gate is not None:
            x_TD, _ = self._add(x_TD, updates, out_norm, None, kernels, ())
            assert step.embeddings is not None
            updates, out_norm = (
                (gate(x_TD, step.embeddings[:, index], kernels),),
                rows.of(vectors.embedding_norm, index),
            )
        factor = rows.of(vectors.layer_factor, index)
        x_TD, read_TD = self._add(x_TD, updates, out_norm, next_norm, kernels, readers, factor)
        return x_TD, predicted, read_TD

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
        factor: Row | None = None,
    ) -> tuple[jax.Array, Rows]:
        """The residual stream with updates, normalized by `out_norm` and scaled if there are such, and what is read.

        With `factor` the stream is multiplied by that. What is read is the stream by `next_norm`, or as it is; rounded
        if all `readers`, matrices, take it so. Each update is `[T, D]` or in parts, as `add_and_norm` takes it.
        """
        eps, scale = self.arch.rms_norm_eps, self.arch.residual_scale
        added: Addend = updates[0]
        if len(updates) > 1 or self.arch.centred or any(each is not None for each in (out_norm, scale, factor)):
            norms, row = (None, None) if out_norm is None else out_norm
            factors, factor_row = (None, None) if factor is None else factor
            added = Finished(tuple(updates), norms, row, eps, self.arch.centred, scale, factors, factor_row)
        if next_norm is None:
            x_TD = stream_after(x_TD, added)
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
