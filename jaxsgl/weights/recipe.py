"""`Recipe`: which tensors of a checkpoint make a parameter, and what fills each part of it, as values.

A recipe only makes views of the tensors (cuts, reshapes, transposes), so that the loader can read what one device needs
and leave the rest. Owns these values, and which lengths a tensor's axes have in a model. Knows no tensor by name
(`families`), no arrangement (`pieces.py`) and no files. Used by all that make recipes or read them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
import numpy.typing as npt

from jaxsgl.models import ModelArch
from jaxsgl.models.encoder import NUM_BUCKETS
from jaxsgl.models.layer_spec import ChannelDeltaNet, DenseMlp, GroupedAttention, Selective

Path = tuple[Hashable, ...]  # of a parameter within the model, as ("layers", 3, "mlp", "down")
Place = tuple[int | slice, ...]  # a part of a parameter, by its leading axes; slices have step 1, () is all of it


class Numbers(Protocol):
    """What a piece is cut from: a NumPy array, or something that computes the part that is asked for."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Lengths of the axes."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of the numbers."""

    @property
    def nbytes(self) -> int:
        """Bytes of all numbers."""

    def __getitem__(self, box: tuple[slice, ...], /) -> npt.NDArray[Any]:
        """The numbers of a part."""


class Piece(NamedTuple):
    """A part of a parameter and what fills it: `parameter[place] = numbers`, in the parameter's dtype."""

    place: Place
    numbers: Numbers


def shape_of(pieces: Sequence[Piece]) -> tuple[int, ...]:
    """The shape of the array that `pieces` fill. Asserts that each one has its place's shape, and the sum of sizes."""
    shape: list[int] = []
    for place, numbers in pieces:
        lengths = iter(numbers.shape)
        ends = [part + 1 if isinstance(part, int) else (part.start or 0) + next(lengths) for part in place]
        ends += lengths
        shape = [max(pair) for pair in zip_longest(shape, ends, fillvalue=0)]
    for place, numbers in pieces:
        axes = zip((*place, *(slice(None) for _ in shape[len(place) :])), shape, strict=True)
        region = tuple(len(range(length)[part]) for part, length in axes if isinstance(part, slice))
        assert region == numbers.shape, f"numbers of shape {numbers.shape} for a part of shape {region}"
    filled = sum(math.prod(numbers.shape) for _, numbers in pieces)
    assert filled == math.prod(shape), f"{filled} numbers for shape {tuple(shape)}"
    return tuple(shape)


Tensor = npt.NDArray[Any]  # a checkpoint's, mapped: a view of it costs nothing, a copy reads all of it
Pieces = Callable[[ModelArch, tuple[Tensor, ...]], Iterator[Piece]]
Computed = Callable[[ModelArch, jax.Array], jax.Array]


@dataclass(frozen=True)
class Source:
    """One tensor of a checkpoint.

    Attributes:
      name: the tensor's name; `{}` stands for the layer's index.
      axes: the tensor's shape, as names of `sizes`; None: the reader checks shape and dtype.
      layer: the layer of `arch` that it is a tensor of; None: of the model.
      is_transposed: it is a stack of matrices `[in, out]`, whose rows are outputs elsewhere.
      has_ids: its numbers are integers.
    """

    name: str
    axes: tuple[str, ...] | None
    layer: int | None = None
    is_transposed: bool = False
    has_ids: bool = False


@dataclass(frozen=True)
class Recipe:
    """How a parameter is made: `pieces(arch, tensors of the sources)`, which fill it without gaps or overlaps.

    The pieces are views of the tensors. A small tensor may be computed with, as `tensors[0].astype(np.float32) + 1`; of
    a large one, each device would then read all.

    `computed(arch, filled array)`, if it is given, makes the parameter of what the pieces fill, in the dtype in which
    they are stored; it is traced, and must be hashable. The devices then hold both for a moment.
    """

    sources: tuple[Source, ...]
    pieces: Pieces
    computed: Computed | None = None


def sizes(arch: ModelArch, layer: int | None = None) -> dict[str, int]:
    """Length of every axis named by a `Source`: E, EI, EF and SF are experts, these and identities, F of an expert, and
    F of the shared ones; EL numbers of a latent that experts read; C are the classes of a classification head, T rows
    of learned positions; TT of types of tokens; S streams, SS shares of each in each, and R numbers of what stands
    next to attention (`models/streams.py`); DI and DO inputs and outputs of a matrix after pooling.

    Those that begin with V and go on are of the tower: its hidden size, its F, the merger's width, side and F,
    pixels, a patch, a head; rows of its table of positions, one more, those of an axis, axes, and 1; bins and taps of
    one that hears. Those with L are of a latent: what queries are made of, C, C + R; of all heads their queries, what
    makes keys and values, and values; of an index its keys, its heads, and all their queries. Those with G are of what
    recurs: of all heads q, k and v; k; taps; value heads, and twice as many; numbers of a value; all values; three
    times q, k and v; q, k, v and their gates; all that Mamba-2 makes of its input; what decays by channel, or steps of
    Mamba, are made of, and these with B and C; twice all values. Those with P are of embeddings of layers: numbers of
    one, rows, and numbers of all layers. Those with A are of windows and groups of tokens: what queries are made of;
    what a group of heads has, what all of these make; tokens of a group, what makes its entry, its key of an index;
    that key, heads of the index, all their queries; of connections (`models/connections.py`) the streams, all of their
    numbers, shares of them, 3; experts of a token.

    `layer` is one whose heads and MLP are meant, where layers differ; None: those of the model.
    """
    mixture, tower, latent, net = arch.mixture, arch.tower, arch.latent, arch.recurrent_net
    ffn_size = arch.ffn_size
    if layer is not None:
        mlp, arch = arch.layers[layer].mlp, arch.with_heads_of(arch.layers[layer])
        ffn_size = mlp.ffn_size if isinstance(mlp, DenseMlp) else ffn_size
    of_grouped = _of_grouped(arch, 0 if layer is None else layer)
    of_recurrent_net = {}
    if net is not None:
        of_recurrent_net = {
            "GC": net.key_heads * net.channels,
            "GK": net.key_heads * net.key_size,
            "GT": net.taps,
            "GN": net.value_heads,
            "G2N": 2 * net.value_heads,
            "GH": net.value_size,
            "GR": net.rank if isinstance(net, ChannelDeltaNet | Selective) else 0,
            "GX": net.rank + 2 * net.key_size if isinstance(net, Selective) else 0,
            "G2V": 2 * net.value_heads * net.value_size,
            "GV": net.value_heads * net.value_size,
            "G3C": 3 * net.key_heads * net.channels,
            "GCV": net.key_heads * net.channels + net.value_heads * net.value_size,
            "GI": net.key_heads * net.channels + net.value_heads * (net.value_size + net.num_gates),
        }
    of_tower = {}
    if tower is not None:
        of_tower = {
            "VM": tower.hidden_size,
            "V3M": tower.hidden_size + 2 * tower.layers.kv_size,
            "VF": tower.layers.ffn_size,
            "VG": tower.table_len,
            "V1": 1,
            "V1G": 1 + tower.table_len,
            "VA": tower.positioning.side,
            "V2": 2,
            "VH": tower.layers.head_dim,
            "VC": tower.patch_len,
            "VW": tower.merged_size,
            "VS": tower.merger.side,
            "VU": tower.merger.ffn_size,
            "VUH": tower.merger.ffn_size // 2,
            "VI": tower.patches.channels,
            "VB": 0 if tower.sound is None else tower.sound.bins,
            "V3": 3,
            "VT": tower.patches.frames,
            "VP": tower.patches.size,
        }
    of_latent = {}
    if latent is not None:
        of_latent = {
            "LQ": latent.q_rank or 0,
            "LC": latent.kv_rank,
            "LE": latent.kv_rank + latent.rotated,
            "NLQ": arch.num_heads * (latent.unrotated + latent.rotated),
            "NLB": arch.num_heads * (latent.unrotated + latent.value),
            "NLV": arch.num_heads * latent.value,
            "LI": latent.index.size if latent.index else 0,
            "LH": latent.index.num_heads if latent.index else 0,
            "LHI": latent.index.num_heads * latent.index.size if latent.index else 0,
        }
    of_dense: dict[str, int] = {}
    for index, module in enumerate(arch.folder_pooling.dense):
        of_dense |= {f"DI{index}": module.num_inputs, f"DO{index}": module.num_outputs}
    return {
        **of_tower,
        **of_dense,
        **of_latent,
        **of_grouped,
        **of_recurrent_net,
        "2NH": 2 * arch.num_heads * arch.head_dim if arch.output_gate == "number" else 0,
        "V": arch.vocab_size,
        "D": arch.hidden_size,
        "F": ffn_size,
        "H": arch.head_dim,
        "N": arch.num_heads,
        "K": arch.stored_kv_heads,
        "NH": arch.num_heads * arch.head_dim,
        "KH": arch.stored_kv_heads * arch.head_dim,
        "NV": arch.num_heads * (arch.value_dim or 0),
        "KV": arch.stored_kv_heads * (arch.value_dim or 0),
        "QKV": (arch.num_heads + 2 * arch.stored_kv_heads) * arch.head_dim,
        "2F": 2 * ffn_size,
        "2D": 2 * arch.hidden_size,
        "E": mixture.num_experts if mixture else 0,
        "EI": mixture.num_choices if mixture and mixture.num_identities else 0,
        "EF": mixture.ffn_size if mixture else 0,
        "2EF": 2 * mixture.ffn_size if mixture else 0,
        "EL": mixture.latent_size if mixture else 0,
        "C": len(arch.folder_pooling.labels),
        "SF": mixture.shared_ffn_size if mixture else 0,
        "2SF": 2 * mixture.shared_ffn_size if mixture else 0,
        "T": arch.num_positions,
        "TT": 0 if arch.encoder is None else arch.encoder.num_types,
        "TB": NUM_BUCKETS if arch.encoder is not None and arch.encoder.has_biases else 0,
        "P": arch.embedding_size,
        "PV": arch.layer_vocab_size,
        "PL": arch.num_layers * arch.embedding_size,
        "S": arch.num_streams if arch.num_streams > 1 else 0,
        "SS": arch.num_streams**2 if arch.num_streams > 1 else 0,
        "R": arch.laurel_rank,
        "1": 1,
    }


def _of_grouped(arch: ModelArch, layer: int) -> dict[str, int]:
    mixer, connections = arch.layers[layer].mixer, arch.connections
    if not isinstance(mixer, GroupedAttention) or connections is None:
        return {}
    lengths = {
        "AQ": mixer.q_rank,
        "AG": arch.num_heads * arch.head_dim // mixer.out_groups,
        "AO": mixer.out_groups * mixer.out_rank,
        "AN": connections.number,
        "AND": connections.number * arch.hidden_size,
        "AS": connections.number * (2 + connections.number),
        "A3": 3,
        "AT": arch.mixture.router.top_k if arch.mixture else 0,
    }
    groups = mixer.groups
    if groups is None:
        return lengths
    lengths |= {"AM": groups.size, "AE": groups.parts * arch.head_dim}
    if groups.index is None:
        return lengths
    heads, keys = groups.index.num_heads, groups.index.size
    return {**lengths, "AK": groups.parts * keys, "AI": keys, "AH": heads, "AHI": heads * keys}


def axes_lengths(source: Source, arch: ModelArch) -> tuple[int, ...]:
    """The shape that `arch` asks a tensor to have."""
    lengths = sizes(arch, source.layer)
    return tuple(lengths[axis] for axis in source.axes or ())
