"""The shape of a model: `ModelArch` holds everything that models, weights and the engine need to know about a model.

`arch_file` reads it from a folder. What differs between model families is data: `families` for what an architecture's
name implies, and `weights/families` for the names of tensors.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, TypeAlias

from msgspec.structs import replace as replace_struct

from jaxsgl.errors import ConfigError
from jaxsgl.models.encoder import Encoder
from jaxsgl.models.families import FAMILIES
from jaxsgl.models.family import GateFunction, NormPlaces, OutputGate, Parallel, QkNorm
from jaxsgl.models.layer_spec import (
    WHOLE,
    Connections,
    DenseMlp,
    GroupedAttention,
    KvHeads,
    Latent,
    LayerSpec,
    MoeMlp,
    RecurrentNet,
    Stage,
    TokenGroups,
)
from jaxsgl.models.quantization import WeightFormat
from jaxsgl.models.rope import RopeParams
from jaxsgl.models.towers.arch import TowerArch
from jaxsgl.requests.outputs import LAST_TOKEN, PoolingSpec
from pallas_kernels.options import AttentionOptions

Activation: TypeAlias = Literal["silu", "gelu_tanh", "relu2", "relu", "gelu", "gelu_new", "xielu", "gelu_erf"]
Head: TypeAlias = Literal["vocabulary", "labels", "none"]
WITHOUT_GATES: dict[str, Activation] = {
    "relu2": "relu2",
    "relu": "relu",
    "gelu": "gelu",
    "xielu": "xielu",
    # Names of one approximation.
    **dict.fromkeys(("gelu_new", "gelu_pytorch_tanh", "gelu_fast"), "gelu_new"),
}


@dataclass(frozen=True)
class ModelArch:
    """The shape of a decoder.

    Attributes:
      name: architecture as config.json calls it, a key of `FAMILIES`.
      vocab_size, hidden_size, num_heads, num_kv_heads, head_dim: V, D, N, K, H, the last two of what the cache holds.
      layers: what each layer is made of.
      ropes: rotary position embeddings, which layers name by index.
      rms_norm_eps: added to the mean square in every norm.
      tie_embeddings: the embedding is also the output head.
      attention_bias: q, k and v have biases.  attention_out_bias, mlp_bias: so have the output projection, the MLP.
      down_bias: the MLP's last product has a bias, whatever `mlp_bias` says.
      qk_norm: whether q and k are normalized, per head or over all heads.
      rotates_first: whether heads are normalized after their rotation; else before.
      qkv_limit: queries, keys and values lie within this on both sides of 0, before a rope; None: they may be anything.
      max_context: the most tokens of one sequence that the model was made for.
      dtype: name of the checkpoint's dtype.
      names_dtype: config.json says so; else it is a guess, which the tensors correct (`weights/as_stored.py`).
      eos_token_ids: ids that end a generation; may be empty.
      norms: where a layer has norms.
      centred: norms are LayerNorm. What goes into the residual stream has no mean, so that RMSNorm of it is that.
      norm_bias: the layers' norms and the last one add a bias.
      parallel: the MLP runs next to the mixer, and what it reads then; None: it runs after it.
      norm_offset: added to the scales of all norms when they are loaded. Unless it is 0, they are float32 parameters.
      activation: of the MLPs' gates, or of their units if these have none.
      embedding_scale: factor on embeddings; None: 1.
      rounds_embedding_scale: that is rounded to the weights' dtype first.
      residual_scale: factor on what a block adds to the residual stream; None: 1.
      logits_divisor: what logits are divided by; None: 1.
      normalizes_embedding: embeddings are brought to unit mean square.
      head_bias: the output head has a bias.
      num_positions: rows of the table of learned positions, as the checkpoint has it; 0: there is none.
      rows_before_positions: how many of these come before that of the first position.
      attention_scale: factor on q . k before the softmax; None: 1 / sqrt(H).
      attention_out_factor: on what attention makes; None: 1.
      unit_factors: on gates and ups of dense MLPs; None: 1.
      attention_cap, logits_cap: soft caps of scores and of logits: x becomes cap * tanh(x / cap).
      value_dim: numbers of a value where these are fewer than of a key; the cache has H all the same. None: H.
      output_gate: what attention's output has gates for, which multiply it; None: it has none.
      gate_function: what is made of these gates first.
      kv_cache_dtype: "fp8_e4m3" if the checkpoint was calibrated for a KV cache of it; None: as the weights.
      weight_format: how matrices are quantized; None: not at all.
      stored_format: how the checkpoint has quantized what has no format here: what makes keys and values of a latent,
        gates, an output head, a tower, and experts unless `weight_format.of_experts` says otherwise. They are
        dequantized as they are loaded.
      head_format: how the checkpoint has quantized the output head, if it is; None: in any of the others' formats.
      expert_format: how the checkpoint's experts are quantized where nothing else is, or all else otherwise (MXFP4).
        Unless it is packed, they are dequantized as they are loaded.
      may_pack: quantized matrices may be packed: the folder has them as they were published.
      kv_copies: each kv head of the checkpoint stands for so many consecutive ones of `num_kv_heads`, which are equal.
        Layers may have other kv heads (`LayerSpec.heads`).
      normalizes_values: values are brought to unit mean square, each head by itself.
      layer_factors: what a layer passes on is multiplied by a number of its own.
      layer_vocab_size: rows that the checkpoint has of embeddings of layers; 0: layers have none.
      num_streams: S, residual streams (`models/streams.py`).
      laurel_rank: the rank of the low-rank update next to attention (`Laurel`); 0 without one.
      by_experts: devices that share the model have whole experts, instead of a part of each one.
      vocab_padding: rows of embedding and head after the vocabulary, so that devices have equally many.
      head: what reads the final hidden states: the vocabulary, a classifier of the folder's labels, or nothing.
      folder_pooling: how the folder says that embeddings and scores are made.
      pooling: how they are made here; None: none are served.
      generates: whether tokens are served.
      tower: makes tokens of images or sounds; None: the model takes neither, or both are refused.
      encoder: how it differs from a decoder, if its tokens see their whole prompt.
      connections: of residual streams next to each other, which every block reads; None: there are none.
      stage: which of the model's layers `layers` are, if they are not all.
      next_layer: the checkpoint's layer after these, which predicts one token more; None: there is none.
    """

    name: str
    vocab_size: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    layers: tuple[LayerSpec, ...]
    ropes: tuple[RopeParams, ...]
    rms_norm_eps: float
    tie_embeddings: bool
    attention_bias: bool
    attention_out_bias: bool
    mlp_bias: bool
    qk_norm: QkNorm | None
    max_context: int
    dtype: str
    eos_token_ids: tuple[int, ...]
    names_dtype: bool = True
    rotates_first: bool = False
    qkv_limit: float | None = None
    norms: NormPlaces = "pre"
    centred: bool = False
    norm_bias: bool = False
    parallel: Parallel | None = None
    norm_offset: int = 0
    activation: Activation = "silu"
    embedding_scale: float | None = None
    rounds_embedding_scale: bool = False
    residual_scale: float | None = None
    logits_divisor: float | None = None
    normalizes_embedding: bool = False
    head_bias: bool = False
    num_positions: int = 0
    rows_before_positions: int = 0
    attention_scale: float | None = None
    attention_out_factor: float | None = None
    unit_factors: tuple[float, float] | None = None
    attention_cap: float | None = None
    logits_cap: float | None = None
    value_dim: int | None = None
    output_gate: OutputGate | None = None
    gate_function: GateFunction = "sigmoid"
    normalizes_values: bool = False
    layer_factors: bool = False
    layer_vocab_size: int = 0
    num_streams: int = 1
    down_bias: bool = False
    laurel_rank: int = 0
    kv_cache_dtype: str | None = None
    weight_format: WeightFormat | None = None
    stored_format: WeightFormat | None = None
    head_format: WeightFormat | None = None
    expert_format: WeightFormat | None = None
    may_pack: bool = True
    kv_copies: int = 1
    by_experts: bool = False
    vocab_padding: int = 0
    head: Head = "vocabulary"
    folder_pooling: PoolingSpec = LAST_TOKEN
    pooling: PoolingSpec | None = None
    generates: bool = True
    tower: TowerArch | None = None
    next_layer: LayerSpec | None = None
    encoder: Encoder | None = None
    connections: Connections | None = None
    stage: Stage = WHOLE

    @property
    def has_sinks(self) -> bool:
        """Whether query heads of some layer have attention sinks."""
        return any(layer.has_sinks for layer in self.layers)

    @property
    def num_layers(self) -> int:
        """The number of layers."""
        return len(self.layers)

    @property
    def ffn_size(self) -> int:
        """F of the dense MLPs; 0 if the model has none."""
        return next((layer.mlp.ffn_size for layer in self.layers if isinstance(layer.mlp, DenseMlp)), 0)

    @property
    def gated(self) -> bool:
        """Whether a unit of an MLP is activation(gate) * up; else activation(up), of a product without gates."""
        return self.activation not in WITHOUT_GATES.values()

    @property
    def unit_rows(self) -> int:
        """U, rows of a unit in the first product of an MLP: gate and up, or up alone."""
        return 2 if self.gated else 1

    @property
    def latent(self) -> Latent | None:
        """The latent that its layers attend over, all the same but for indexes of their own; None: they have heads."""
        return next((layer.mixer for layer in self.layers if isinstance(layer.mixer, Latent)), None)

    @property
    def recurrent_net(self) -> RecurrentNet | None:
        """The net of the layers that keep states, which all have the same; None: no layer keeps any."""
        return next((layer.mixer for layer in self.layers if isinstance(layer.mixer, RecurrentNet)), None)

    @property
    def grouped(self) -> GroupedAttention | None:
        """The mixer of the first layer, if layers attend to windows and groups of tokens, as all of a model do then."""
        mixer = self.layers[0].mixer
        return mixer if isinstance(mixer, GroupedAttention) else None

    @cached_property
    def token_groups(self) -> tuple[TokenGroups, ...]:
        """The groups of tokens that layers have, each kind once."""
        mixers = (layer.mixer for layer in self.layers if isinstance(layer.mixer, GroupedAttention))
        return tuple(dict.fromkeys(filter(None, (mixer.groups for mixer in mixers))))

    @property
    def index_covers(self) -> int:
        """The most tokens of a sequence of which an index would choose all; 0: there is no index."""
        if self.latent is not None and self.latent.index is not None:
            return self.latent.index.num_chosen
        covered = ((each.index.num_chosen + 1) * each.size - 1 for each in self.token_groups if each.index is not None)
        return min(covered, default=0)

    @cached_property
    def attention_layers(self) -> tuple[int, ...]:
        """The layers that keep something of each token."""
        own = ((i, layer) for i, layer in enumerate(self.layers) if layer.keys_from is None and layer.mixer is not None)
        return tuple(i for i, layer in own if layer.also_attends or not isinstance(layer.mixer, RecurrentNet))

    @cached_property
    def reading_layers(self) -> tuple[int, ...]:
        """The layers that attend to what others keep."""
        return tuple(i for i, layer in enumerate(self.layers) if layer.keys_from is not None)

    @cached_property
    def recurrent_layers(self) -> tuple[int, ...]:
        """The layers that keep states."""
        return tuple(i for i, layer in enumerate(self.layers) if isinstance(layer.mixer, RecurrentNet))

    @cached_property
    def normed(self) -> dict[str, tuple[int, ...]]:
        """The layers that have a norm, by what `LayerVectors` calls it."""
        has_after = dict.fromkeys(range(self.num_layers), self.norms in ("post", "sandwich"))
        has_before = dict.fromkeys(has_after, self.norms != "post")
        if self.norms == "post of attention":
            has_before = {i: isinstance(layer.mixer, RecurrentNet) for i, layer in enumerate(self.layers)}
            has_after = {i: not before for i, before in has_before.items()}
        after_mlp = has_after
        if self.norms == "pre and mixtures":
            after_mlp = {i: isinstance(layer.mlp, MoeMlp) for i, layer in enumerate(self.layers)}
        places = {"attention_norm": has_before, "mlp_norm": has_before}
        places |= {"attention_out_norm": has_after, "mlp_out_norm": after_mlp}
        return {name: tuple(i for i, has in of_layers.items() if has) for name, of_layers in places.items()}

    def norm_row(self, norm: str, layer: int) -> int | None:
        """The row of a layer in such norms; None: it has none."""
        layers = self.normed[norm]
        return layers.index(layer) if layer in layers else None

    @cached_property
    def places(self) -> tuple[int, ...]:
        """The place of each layer among `recurrent_layers`, or else among `attention_layers` and then `reading_layers`;
        -1 of a layer that mixes no tokens.
        """
        attending = self.attention_layers + self.reading_layers
        place = {layer: i for of_kind in (attending, self.recurrent_layers) for i, layer in enumerate(of_kind)}
        return tuple(place.get(layer, -1) for layer in range(self.num_layers))

    @property
    def rope_dim(self) -> int:
        """The numbers of a head that ropes are for: all, or those of a latent that turn."""
        return self.head_dim if self.latent is None else self.latent.rotated

    @property
    def kv_heads(self) -> KvHeads:
        """The kv heads of layers that have none of their own."""
        return KvHeads(self.num_kv_heads, self.head_dim, self.kv_copies)

    @property
    def all_heads(self) -> tuple[KvHeads, ...]:
        """The kv heads that layers have, each once, in the order of the layers."""
        return tuple(dict.fromkeys(layer.heads or self.kv_heads for layer in self.layers))

    @property
    def draft_head(self) -> bool:
        """Whether the files call `next_layer` a draft head, `mtp`."""
        return self.next_layer is not None and FAMILIES[self.name].draft_head

    def with_heads(self, heads: KvHeads | None) -> ModelArch:
        """The model as if all layers had these kv heads; None: those that layers have by default."""
        if heads is None:
            return self
        num_heads = heads.queries or self.num_heads
        return replace(
            self, num_heads=num_heads, num_kv_heads=heads.number, head_dim=heads.size, kv_copies=heads.copies
        )

    def with_heads_of(self, layer: LayerSpec) -> ModelArch:
        """The model as if all layers had the kv heads of this one, and turned them as it does, if it does."""
        arch = self.with_heads(layer.heads)
        return arch if layer.rope is None else replace(arch, ropes=(self.ropes[layer.rope],) * len(self.ropes))

    @property
    def embedding_size(self) -> int:
        """P, numbers of the embedding that each layer has of a token; 0: layers have none."""
        return self.layers[0].embedding_size

    @property
    def mixture(self) -> MoeMlp | None:
        """The mixture of experts; layers that have one have the same."""
        mixtures = (mlp for layer in self.layers for mlp in (layer.mlp, layer.experts))
        return next((mlp for mlp in mixtures if isinstance(mlp, MoeMlp)), None)

    def attention_options(self, layer_index: int) -> AttentionOptions:
        """Scale, window, chunk and soft cap of a layer's attention, what is a value of a latent, and whether it sees
        ahead.
        """
        value_dim = None if self.latent is None else self.latent.kv_rank
        layer = self.layers[layer_index]
        sees_ahead = self.tower is not None and self.tower.tokens.sees_ahead_in(layer.window is not None)
        is_encoder = self.encoder is not None
        return AttentionOptions(
            self.attention_scale,
            layer.window,
            self.attention_cap,
            value_dim,
            sees_ahead or is_encoder,
            chunk=layer.chunk,
            symmetric=is_encoder,
        )

    def format_of(self, layer: LayerSpec, matrix: str) -> WeightFormat | None:
        """The format of a matrix of `layer`, by its name in `LayerSpec.matrices`."""
        if matrix == "experts" and self.expert_format is not None and self.expert_format.packing:
            return self.expert_format
        return None if matrix in layer.unquantized else self.weight_format

    def stored_format_of(self, layer: LayerSpec, matrix: str) -> WeightFormat | None:
        """How the checkpoint has quantized a matrix of `layer`; None: not at all."""
        own = dict(layer.stored_in).get(matrix)
        return self.stored_format if own is None and matrix not in layer.unquantized else own

    @property
    def stored_layers(self) -> tuple[LayerSpec, ...]:
        """The layers that the checkpoint has: those of the model, and last the next one, if there is one."""
        return self.layers if self.next_layer is None else (*self.layers, self.next_layer)

    @property
    def stored_formats(self) -> tuple[WeightFormat, ...]:
        """All formats that the checkpoint has quantized matrices in."""
        others = (fmt for layer in self.stored_layers for _, fmt in layer.stored_in)
        return tuple(dict.fromkeys(filter(None, (self.stored_format, *others, self.head_format))))

    @property
    def has_axes(self) -> bool:
        """Whether tokens have three positions: time, row and column."""
        return any(rope.sections for rope in self.ropes)

    @property
    def vocab_rows(self) -> int:
        """The rows of embedding and head: a row for each token, then padding."""
        return self.vocab_size + self.vocab_padding

    @property
    def next_arch(self) -> ModelArch | None:
        """The shape of the checkpoint's `next_layer`, as a model of that layer alone (`models/heads.py`), or None."""
        if self.next_layer is None:
            return None
        stage = Stage(self.num_layers, is_next=True, is_draft_head=self.draft_head)
        return replace(self, layers=(self.next_layer,), stage=stage, next_layer=None)

    @property
    def stored_kv_heads(self) -> int:
        """The kv heads of the checkpoint."""
        return self.num_kv_heads // self.kv_copies

    def on_devices(self, num_devices: int, *, by_experts: bool) -> ModelArch:
        """The model as `num_devices` share it.

        Where it has fewer kv heads than devices, each device gets a copy; the vocabulary is padded to equal parts.
        """
        heads = self.kv_heads.on_devices(num_devices)
        return replace(
            self,
            num_kv_heads=heads.number,
            kv_copies=heads.copies,
            layers=tuple(
                replace(layer, heads=layer.heads and layer.heads.on_devices(num_devices)) for layer in self.layers
            ),
            by_experts=by_experts,
            vocab_padding=-self.vocab_size % num_devices,
        )

    def with_padded_experts(self, padding: int) -> ModelArch:
        """The model with so many units of zeros after those of each expert."""

        def padded(layer: LayerSpec) -> LayerSpec:
            if isinstance(layer.mlp, MoeMlp):
                return replace(layer, mlp=replace(layer.mlp, padding=padding))
            return replace(layer, experts=layer.experts and replace(layer.experts, padding=padding))

        after = self.next_layer
        layers = tuple(map(padded, self.layers))
        return replace(self, layers=layers, next_layer=None if after is None else padded(after))

    def of_layers(self, first: int, stop: int) -> ModelArch:
        """The pipeline stage of layers first .. stop - 1."""
        stage = Stage(first, self.num_layers - stop)
        return replace(self, layers=self.layers[first:stop], head=self.head if stage.is_last else "none", stage=stage)

    @property
    def has_embedding(self) -> bool:
        """Whether it has the embedding, to embed tokens or as the head."""
        return self.stage.is_first or (self.tie_embeddings and self.head == "vocabulary")

    def for_context(self, context_length: int) -> ModelArch:
        """The model for sequences of up to `context_length` tokens, which decides on the factors of some ropes."""
        return replace(self, ropes=tuple(rope.for_context(context_length) for rope in self.ropes))


def serve_as(arch: ModelArch, *, is_embedding: bool, enable_embeddings: bool, matryoshka: bool) -> ModelArch:
    """`arch` as flags have it served: what it pools, and whether it generates. Raises `ConfigError`."""
    spec, can_generate = arch.folder_pooling, arch.head == "vocabulary"
    if enable_embeddings and not can_generate:
        raise ConfigError(f"--enable-embeddings serves them beside generation, but {arch.name} has no vocabulary head")
    generates = not is_embedding and can_generate and (enable_embeddings or not spec.made_for_it)
    if generates and not enable_embeddings:
        return arch
    # A model made for embeddings comes without the rows of a vocabulary head, even if its config.json says it has one.
    headless = not generates and spec.made_for_it and not spec.answer_ids and can_generate and not arch.tie_embeddings
    head = "none" if headless else arch.head
    spec = replace_struct(spec, matryoshka=spec.matryoshka or matryoshka, token_logits=head == "vocabulary")
    return replace(arch, pooling=spec, generates=generates, head=head)
