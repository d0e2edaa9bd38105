"""What one layer of a decoder is made of: its mixer, window, rope table and MLP, as values that can be compared.

Owns the description of a layer. Never knows config.json or parameters: `layer_config` reads it, `ModelArch` holds one
for each layer, `decoder_layers` builds them, and the engine's step asks for their windows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal, TypeAlias

from jaxsgl.models.quantization import WeightFormat
from pallas_kernels import Router


@dataclass(frozen=True)
class Stage:
    """Where the layers of a pipeline stage are in the model: the embedding is on the first one, the head on the last.

    Attributes:
      layers_before, layers_after: on other stages.
      is_next: whether it is the checkpoint's layer after all of the model's, which predicts one token more.
      is_draft_head: whether files call that layer a draft head, `mtp`.
    """

    layers_before: int = 0
    layers_after: int = 0
    is_next: bool = False
    is_draft_head: bool = False

    @property
    def is_first(self) -> bool:
        """Whether it embeds tokens."""
        return self.layers_before == 0

    @property
    def is_last(self) -> bool:
        """Whether it has the final norm and the head."""
        return self.layers_after == 0


WHOLE = Stage()  # of a model that has one


@dataclass(frozen=True)
class Index:
    """What chooses the tokens that a query attends to (`pallas_kernels/token_index.py`).

    Attributes:
      num_heads: of the index.
      size: I, numbers of its keys, of which the first R turn.
      num_chosen: tokens that a query attends to at most.
      interleaved: a checkpoint turns numbers 2 i and 2 i + 1 of these together; else i and i + R / 2.
      is_shared: the layer has none of its own, and attends to what the last layer with one chose.
    """

    num_heads: int
    size: int
    num_chosen: int
    interleaved: bool
    is_shared: bool = False


@dataclass(frozen=True)
class Latent:
    """Attention over a latent (`models/mixers.py`).

    Attributes:
      q_rank: numbers that queries are made of; None: they are made of x.
      kv_rank: C, numbers that keys and values are made of.
      rotated: R, numbers of a key that turn with its position, the same for all heads.
      unrotated: numbers of a head's key that don't turn.
      value: numbers of a head's value.
      has_bias: what makes the latent, what queries are made of, and the output have biases.
      factor: on the normalized latent.
      index: what chooses tokens; None: all are attended to.
    """

    q_rank: int | None
    kv_rank: int
    rotated: int
    unrotated: int
    value: int
    has_bias: bool = False
    factor: float = 1.0
    index: Index | None = None

    @property
    def entry_size(self) -> int:
        """Numbers that the cache has of a token: latent, what turns, and the key of an index, for which layers that
        share a choice have room, too.
        """
        return self.kv_rank + self.rotated + (0 if self.index is None else self.index.size)

    @property
    def own_index(self) -> Index | None:
        """The index that the layer has parameters of."""
        return None if self.index is None or self.index.is_shared else self.index


@dataclass(frozen=True)
class TokenGroups:
    """Groups of consecutive tokens, of each of which one entry is made (`pallas_kernels/grouped_tokens.py`).

    Attributes:
      size: m, tokens of a group.
      overlaps: an entry is made of the tokens of the group before, too, by numbers of their own.
      index: what chooses the entries that a query attends to, by keys that are made as entries are; None: it attends to
        all.
    """

    size: int
    overlaps: bool = False
    index: Index | None = None

    @property
    def parts(self) -> int:
        """Of what a token has for groups: for the entry of the next one, if groups overlap, and for that of its own."""
        return 2 if self.overlaps else 1

    def entry_size(self, head_dim: int) -> int:
        """W, numbers of an entry: a head's, then those of a key of the index."""
        return head_dim + (0 if self.index is None else self.index.size)


@dataclass(frozen=True)
class GroupedAttention:
    """Attention to the tokens of a window, and to entries of whole groups of tokens (`models/grouped.py`).

    Attributes:
      q_rank: numbers that queries are made of.
      rotated: R, the last numbers of a head, which turn in pairs of neighbours; those of an index's key likewise.
      out_groups: G, consecutive heads whose output has a product of its own first.
      out_rank: numbers that each of these makes.
      groups: of tokens; None: queries attend to the window alone.
    """

    q_rank: int
    rotated: int
    out_groups: int
    out_rank: int
    groups: TokenGroups | None = None


@dataclass(frozen=True)
class Connections:
    """Of each block to several residual streams, which it reads and writes by shares (`models/connections.py`).

    Attributes:
      number: n, of streams.
      iterations: of what makes the shares between streams add up to 1.
      eps: added to shares and to their sums.
    """

    number: int
    iterations: int
    eps: float


@dataclass(frozen=True)
class RecurrentNet:
    """What keeps a state of fixed size in the place of keys and values of all tokens.

    Attributes:
      key_heads: K'.
      value_heads: V', a multiple of K': consecutive ones share a key head.
      key_size, value_size: h and v, numbers of a head.
      taps: tokens that the convolution before it reads, the newest included.
      most_written: of what corrects a delta-net's state, at most this share is written.
      out_factor: on what is read, as it goes back to the stream.
      norm_eps: added to mean squares of what is read; None: what other norms of the model add.
    """

    key_heads: int
    value_heads: int
    key_size: int
    value_size: int
    taps: int
    most_written: float = 1.0
    norm_eps: float | None = None
    out_factor: float = 1.0

    plural: ClassVar[str]  # what such layers are called
    module: ClassVar[str]  # what its parameters are called within a layer
    shared: ClassVar[str]  # what devices have whole ones of
    num_gates: ClassVar[int]  # numbers of each value head and token besides

    @property
    def group(self) -> int:
        """r, value heads of a key head."""
        return self.value_heads // self.key_heads

    @property
    def channels(self) -> int:
        """C, what is convolved for each key head: q, k, and v of its value heads."""
        return 2 * self.key_size + self.group * self.value_size

    @property
    def rows(self) -> int:
        """Of each key head, what a layer makes of a token but for `num_gates`: what is convolved, and gates of v."""
        return self.channels + self.group * self.value_size

    @property
    def gate_rows(self) -> int:
        """Of each key head, the rest of what products of x make of a token."""
        return self.num_gates * self.group

    @property
    def token_rows(self) -> int:
        """Of each key head, all that a layer makes of a token."""
        return self.rows + self.gate_rows


@dataclass(frozen=True)
class DeltaNet(RecurrentNet):
    """A gated delta-net (`models/mixers.py`)."""

    plural = "gated delta-nets"
    module = "delta_net"
    shared = "key heads"
    num_gates = 2  # a and b

    @property
    def rate_shape(self) -> tuple[int, int]:
        """Of each key head, the numbers by which states decay and are written (`pallas_kernels/delta_tokens.py`)."""
        return 2 if self.most_written == 1 else 3, self.group


@dataclass(frozen=True)
class ChannelDeltaNet(DeltaNet):
    """A delta-net with a decay for each number of a key, and as many value heads as key heads (`models/mixers.py`).

    Attributes:
      rank: numbers that the decays of all heads are made of, and as many that gates of what is read are made of.
    """

    plural = "delta-nets"
    module = "channel_delta_net"
    shared = "heads"
    num_gates = 1  # b

    rank: int = 0

    @property
    def rows(self) -> int:
        """Only what is convolved: gates of v are made of `rank` numbers."""
        return self.channels

    @property
    def token_rows(self) -> int:
        """With gates of v, and decays."""
        return self.rows + self.gate_rows + self.value_size + self.key_size

    @property
    def rate_shape(self) -> tuple[int, int]:
        """A_log and dt_bias."""
        return 2, self.key_size


@dataclass(frozen=True)
class Mamba(RecurrentNet):
    """A layer of Mamba-2 (`models/mixers.py`), in the same words: its groups are key heads, with C as q and B as k, and
    its heads value heads, with x as v.

    Attributes:
      normalizes: what the heads of a group read is normalized.
      row_factors: on C, B, x, z and dt of a group; (): none has one.
    """

    plural = "layers of Mamba-2"
    module = "mamba"
    shared = "groups"
    num_gates = 1

    normalizes: bool = True
    row_factors: tuple[float, ...] = ()


@dataclass(frozen=True)
class Selective(RecurrentNet):
    """A layer of Mamba (`models/mixers.py`), in the same words: all channels are one value head, and a state has
    `key_size` numbers of each.

    Attributes:
      rank: R, numbers that steps are made of.
    """

    plural = "layers of Mamba"
    module = "selective"
    shared = "groups"
    num_gates = 0

    rank: int = 0

    @property
    def channels(self) -> int:
        """x alone is convolved."""
        return self.value_size


@dataclass(frozen=True)
class ShortConv(RecurrentNet):
    """A convolution between two gates (`pallas_kernels/short_conv.py`), in the same words: groups of channels are key
    heads of one value head, and no matrix is kept, so `key_size` is 0.
    """

    plural = "short convolutions"
    module = "conv"
    shared = "groups of channels"
    num_gates = 0

    @property
    def rows(self) -> int:
        """b, c and x."""
        return 3 * self.channels


RECURRENT_NETS: tuple[type[RecurrentNet], ...] = (DeltaNet, ChannelDeltaNet, Mamba, Selective, ShortConv)

Mixer: TypeAlias = Literal["attention"] | Latent | GroupedAttention | RecurrentNet


@dataclass(frozen=True)
class KvHeads:
    """The kv heads of a layer, and how many query heads share them.

    Attributes:
      number: K, how many there are; on devices that share them with the copies that these need.
      size: H, numbers of a head, and of a query head.
      copies: each kv head of the checkpoint stands for so many consecutive ones, which are equal.
      queries: N, where the layer has another number of query heads than the model; None: it has that.
    """

    number: int
    size: int
    copies: int = 1
    queries: int | None = None

    @property
    def stored(self) -> int:
        """The kv heads of the checkpoint."""
        return self.number // self.copies

    def on_devices(self, num_devices: int) -> KvHeads:
        """The heads as so many devices share them: where these are more than heads, each gets a copy."""
        copies = num_devices // self.stored if num_devices % self.stored == 0 else 1
        return replace(self, number=self.stored * copies, copies=copies)


@dataclass(frozen=True)
class DenseMlp:
    """An MLP that every token passes through.

    Attributes:
      ffn_size: F.
      sparsity: the share of a token's units that are off, as their gates are distributed; 0: all may be on.
    """

    ffn_size: int
    sparsity: float = 0.0


@dataclass(frozen=True)
class Clamp:
    """A gated unit with bounds, gate * sigmoid(alpha * gate) * (up + offset).

    Attributes:
      limit: the gate is at most this, and up lies within it on both sides.
      alpha, offset: see above.
    """

    limit: float
    alpha: float
    offset: float = 1.0


@dataclass(frozen=True)
class MoeMlp:
    """A mixture of experts: each token passes through the few that a router chooses.

    Attributes:
      num_experts: of the layer.
      ffn_size: F of each expert.
      router: how they are chosen.
      bias: the experts' products have biases.
      clamp: the experts' gated unit, and that of shared ones; None: the model's activation.
      by_token: a table has the experts of each token, and the router says their shares alone.
      shared_ffn_size: F of the experts that all tokens pass through, as one MLP; 0: there are none.
      shared_scale: factor on their result.
      shared_gate: their result is multiplied by a sigmoid of each token.
      expert_factors: an expert's share is multiplied by a number of its own.
      padding: units of zeros after an expert's F, so that devices have whole groups of weights.
      latent_size: numbers of what experts read and make, with a product before them and one after; 0: D.
      scales_inputs: an expert reads x times the sigmoid of its logit, and its result is added as it is. Only where a
        token has one expert (top_k is 1, and the share that the router's rule gives is 1).
      num_identities: so many experts more, after the others, compute nothing: x is their result.
    """

    num_experts: int
    ffn_size: int
    router: Router
    bias: bool = False
    clamp: Clamp | None = None
    by_token: bool = False
    shared_ffn_size: int = 0
    shared_scale: float = 1.0
    shared_gate: bool = False
    expert_factors: bool = False
    padding: int = 0
    latent_size: int = 0
    scales_inputs: bool = False
    num_identities: int = 0

    @property
    def num_choices(self) -> int:
        """Experts that the router chooses from."""
        return self.num_experts + self.num_identities

    @property
    def num_units(self) -> int:
        """The units of an expert: F of the checkpoint's, then padding."""
        return self.ffn_size + self.padding

    def width(self, hidden_size: int) -> int:
        """Numbers of what experts read and make, in a model of this hidden size."""
        return self.latent_size or hidden_size


@dataclass(frozen=True)
class LayerSpec:
    """One layer: a mixer, then an MLP, or one of both alone.

    Attributes:
      mlp: what follows the mixer; None: the next layer does.
      window: a token attends to so many tokens, itself included; None: to all before it.
      chunk: it attends to none before the last position that is a multiple of this; None: there is no such limit.
      rope: which of the model's ropes turns queries and keys; None: they are not turned.
      unit_heads: queries and keys are brought to unit mean square, each head by itself, without scales.
      mixer: what mixes tokens; None: nothing does.
      unquantized: which of its `matrices` keep the model's dtype where others are quantized.
      stored_in: which of these the checkpoint has quantized, and how: they are dequantized as they are loaded.
      heads: its kv heads, where they are not the model's.
      values_are_keys: the keys' projection makes the values, too.
      keys_from: it has queries alone, and attends to what the layer of this index, one before it, keeps; such layers
        are the last ones. None: to what it keeps itself.
      experts: a mixture next to `mlp`: both read the residual stream, by norms of their own.
      shortcut: `experts` read what `mlp` reads, and their result is added at the end of the next layer.
      has_sinks: its query heads have attention sinks.
      also_attends: it attends next to its mixer, which keeps a state, and adds what both make of what they read.
      embedding_size: P, numbers of the embedding that the layer has of each token (`models/layer_embedding.py`); 0:
        none.
    """

    mlp: DenseMlp | MoeMlp | None
    window: int | None = None
    rope: int | None = 0
    mixer: Mixer | None = "attention"
    unquantized: frozenset[str] = frozenset()
    stored_in: tuple[tuple[str, WeightFormat], ...] = ()
    heads: KvHeads | None = None
    values_are_keys: bool = False
    keys_from: int | None = None
    experts: MoeMlp | None = None
    embedding_size: int = 0
    chunk: int | None = None
    unit_heads: bool = False
    also_attends: bool = False
    shortcut: bool = False
    has_sinks: bool = False

    @property
    def matrices(self) -> frozenset[str]:
        """The names of its matrices that a checkpoint may have quantized."""
        if self.mixer is None:
            of_mixer = set[str]()
        elif isinstance(self.mixer, RecurrentNet):
            of_mixer = {"state_inputs", "state_output"} | ({"qkv", "o"} if self.also_attends else set())
        elif isinstance(self.mixer, GroupedAttention):
            of_mixer = {"q_a", "q_b", "kv", "o_b"}
        elif not isinstance(self.mixer, Latent):
            of_mixer = {"qkv", "o"}
        else:
            of_mixer = {"kv_a", "kv_b", "o"} | ({"q"} if self.mixer.q_rank is None else {"q_a", "q_b"})
            of_mixer |= {"index_q", "index_k"} if self.mixer.own_index is not None else set()
        of_mlp = {"gate_up", "down"} if isinstance(self.mlp, DenseMlp) else set()
        if isinstance(self.mlp, MoeMlp):
            of_mlp = {"experts", "shared"}
        if self.experts is not None:
            of_mlp |= {"experts"}
        of_embedding = {"embedding_gate", "embedding_out"} if self.embedding_size else set()
        return frozenset(of_mixer | of_mlp | of_embedding)
