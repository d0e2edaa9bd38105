"""Maps Hugging Face tensor names to our parameters, as data: which tensors make a parameter, and where each one lies.

A checkpoint stores projections as `[out, in]`; ours are `[..., in]`. A recipe says for each part of a parameter which
numbers of which tensor fill it. It only makes views of the tensors (cuts, reshapes, transposes), so that the loader can
read what one device needs and leave the rest. Knows no files; `loading.py` reads this table. Tensors that make no
parameter are in `tensor_files.py`. Recipes of a vision tower, whose layers are stacked, come last: `quantized.py` asks
for them first.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
import numpy.typing as npt

from jaxsgl.models import ModelArch
from jaxsgl.models.layer_spec import DenseMlp
from jaxsgl.models.rope import split_half_order

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
    """

    name: str
    axes: tuple[str, ...] | None
    layer: int | None = None
    is_transposed: bool = False


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
    """Length of every axis named by a `Source`: E, EF and SF are experts, F of an expert, and F of the shared ones; C
    are the classes of a classification head.

    Those that begin with V and go on are of the vision tower: its hidden size, its F, the merger's width, pixels. Those
    with L are of a latent: what queries are made of, C, C + R; of all heads their queries, what makes keys and values,
    and values. Those with G are of a gated delta-net: of all heads q, k and v; taps; value heads, and twice as many;
    numbers of a value; all values; q, k, v and their gates. Those with P are of embeddings of layers: numbers of one,
    rows, and numbers of all layers.

    `layer` is one whose heads and MLP are meant, where layers differ; None: those of the model.
    """
    mixture, vision, latent, net = arch.mixture, arch.vision, arch.latent, arch.delta_net
    ffn_size = arch.ffn_size
    if layer is not None:
        mlp, arch = arch.layers[layer].mlp, arch.with_heads_of(arch.layers[layer])
        ffn_size = mlp.ffn_size if isinstance(mlp, DenseMlp) else ffn_size
    of_delta_net = {}
    if net is not None:
        of_delta_net = {
            "GC": net.key_heads * net.channels,
            "GT": net.taps,
            "GN": net.value_heads,
            "G2N": 2 * net.value_heads,
            "GH": net.value_size,
            "GV": net.value_heads * net.value_size,
            "GCV": net.key_heads * net.channels + net.value_heads * net.value_size,
        }
    of_vision = {}
    if vision is not None:
        of_vision = {
            "VM": vision.hidden_size,
            "V3M": 3 * vision.hidden_size,
            "VF": vision.ffn_size,
            "VG": vision.table_side**2,
            "VW": vision.merged_size,
            "VI": vision.channels,
            "VT": vision.temporal_patch_size,
            "VP": vision.patch_size,
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
        }
    return {
        **of_vision,
        **of_latent,
        **of_delta_net,
        "2NH": 2 * arch.num_heads * arch.head_dim if arch.output_gate else 0,
        "V": arch.vocab_size,
        "D": arch.hidden_size,
        "F": ffn_size,
        "H": arch.head_dim,
        "N": arch.num_heads,
        "NH": arch.num_heads * arch.head_dim,
        "KH": arch.stored_kv_heads * arch.head_dim,
        "QKV": (arch.num_heads + 2 * arch.stored_kv_heads) * arch.head_dim,
        "2F": 2 * ffn_size,
        "2D": 2 * arch.hidden_size,
        "E": mixture.num_experts if mixture else 0,
        "EF": mixture.ffn_size if mixture else 0,
        "2EF": 2 * mixture.ffn_size if mixture else 0,
        "C": len(arch.folder_pooling.labels),
        "SF": mixture.shared_ffn_size if mixture else 0,
        "P": arch.embedding_size,
        "PV": arch.layer_vocab_size,
        "PL": arch.num_layers * arch.embedding_size,
        "1": 1,
    }


def axes_lengths(source: Source, arch: ModelArch) -> tuple[int, ...]:
    """The shape that `arch` asks a tensor to have."""
    lengths = sizes(arch, source.layer)
    return tuple(lengths[axis] for axis in source.axes or ())


def _as_is(arch: ModelArch, tensors: tuple[Tensor, ...]) -> Iterator[Piece]:
    yield Piece((), tensors[0])


def _norm(arch: ModelArch, tensors: tuple[Tensor, ...]) -> Iterator[Piece]:
    """A norm's scales, with the model's offset."""
    yield Piece((), _with_offset(arch, tensors[0]))


def _head_norm(arch: ModelArch, tensors: tuple[Tensor, ...]) -> Iterator[Piece]:
    """The scales `[H]` of a norm of queries or keys, in the order of their dimensions."""
    yield from _turned(arch, (), _with_offset(arch, tensors[0]), axis=0)


def _all_heads_norm(arch: ModelArch, tensors: tuple[Tensor, ...]) -> Iterator[Piece]:
    """The scales of a norm over all heads of queries `[N * H]`, to `[K, heads per kv head, H]`."""
    scales = _with_offset(arch, tensors[0]).reshape(arch.num_kv_heads, -1, arch.head_dim)
    yield from _turned(arch, (), scales, axis=2)


def _all_keys_norm(arch: ModelArch, tensors: tuple[Tensor, ...]) -> Iterator[Piece]:
    """The scales of a norm over all heads of keys `[K * H]`, to `[K, 1, H]`."""
    scales = _with_offset(arch, tensors[0]).reshape(arch.stored_kv_heads, 1, arch.head_dim)
    yield from _copied(arch, _turned(arch, (slice(None),), scales, axis=2))


def _with_offset(arch: ModelArch, scales: Tensor) -> Tensor:
    return scales if arch.norm_offset == 0 else scales.astype(np.float32) + np.float32(arch.norm_offset)


def fuse_heads(arch: ModelArch, tensors: tuple[Tensor, ...]) -> Iterator[Piece]:
    """Fuses q `[N * H]`, k and v `[K * H]` to `[K, G + 2, H]`; a trailing axis D stays."""
    q, k, v = tensors
    yield from _fuse_queries(arch, q.reshape(arch.num_heads, arch.head_dim, *q.shape[1:]), k, v)


def _queries_alone(arch: ModelArch, tensors: tuple[Tensor, ...]) -> Iterator[Piece]:
    """q `[N * H, D]` to `[K, G, H, D]`, of a layer that attends to another one's keys and values."""
    (q,) = tensors
    yield from _turned(arch, (), q.reshape(arch.num_kv_heads, -1, arch.head_dim, *q.shape[1:]), axis=2)


def _fuse_queries(arch: ModelArch, queries: Tensor, k: Tensor, v: Tensor) -> Iterator[Piece]:
    """`fuse_heads` of queries `[N, H, ...]`."""
    q = queries.reshape(arch.num_kv_heads, -1, *queries.shape[1:])
    k, v = (each.reshape(arch.stored_kv_heads, 1, arch.head_dim, *each.shape[1:]) for each in (k, v))
    group = q.shape[1]
    yield from _turned(arch, (slice(None), slice(0, group)), q, axis=2)
    yield from _copied(arch, _turned(arch, (slice(None), slice(group, group + 1)), k, axis=2))
    yield from _copied(arch, iter([Piece((slice(None), slice(group + 1, group + 2)), v)]))


def _copied(arch: ModelArch, pieces: Iterator[Piece]) -> Iterator[Piece]:
    """Pieces of the checkpoint's kv heads, along their first axis, for each of our heads."""
    if arch.kv_copies == 1:
        yield from pieces
        return
    for place, numbers in pieces:
        for head in range(arch.num_kv_heads):
            stored = head // arch.kv_copies
            yield Piece((slice(head, head + 1), *place[1:]), numbers[(slice(stored, stored + 1),)])


def _turned(arch: ModelArch, place: Place, heads: Tensor, axis: int) -> Iterator[Piece]:
    """The dimensions of heads, from the checkpoint's order to that of `rope_tables`; all ropes of a model share one.

    A piece for each run of dimensions that are equally far apart, since such a run is a view.
    """
    order = split_half_order(arch.ropes[0], arch.head_dim) if arch.ropes else None
    if order is None:
        yield Piece(place, heads)
        return
    first = 0
    while first < len(order):
        step = order[first + 1] - order[first] if first + 1 < len(order) and order[first + 1] > order[first] else 1
        count = 1
        while first + count < len(order) and order[first + count] == order[first] + count * step:
            count += 1
        run = slice(order[first], order[first] + count * step, step)
        places = (*place, *(slice(None) for _ in range(axis - len(place))), slice(first, first + count))
        yield Piece(places, heads[(*(slice(None) for _ in range(axis)), run)])
        first += count


def _fuse_split_heads(arch: ModelArch, tensors: tuple[Tensor, ...]) -> Iterator[Piece]:
    """`fuse_heads` of q, k and v that come as one tensor `[(N + 2 K) * H]`, one behind the other."""
    (fused,) = tensors
    queries, keys = arch.num_heads * arch.head_dim, arch.stored_kv_heads * arch.head_dim
    yield from fuse_heads(arch, (fused[:queries], fused[queries : queries + keys], fused[queries + keys :]))


def _split_gate_up(arch: ModelArch, tensors: tuple[Tensor, ...]) -> Iterator[Piece]:
    """Gate and up that come as one tensor `[2 * F, D]`, gate first, to `[2, F, D]`."""
    yield Piece((), tensors[0].reshape(2, -1, *tensors[0].shape[1:]))


def _fuse_gate_up(arch: ModelArch, tensors: tuple[Tensor, ...]) -> Iterator[Piece]:
    """Stacks gate and up `[F, D]` to `[2, F, D]`; biases `[F]` to `[2, F]`."""
    for row, tensor in enumerate(tensors):
        yield Piece((row,), tensor)


def _latent_queries(arch: ModelArch, tensors: tuple[Tensor, ...]) -> Iterator[Piece]:
    """Queries of all heads `[N * (D_n + R), in]` to `[N, D_n + R, in]`, what turns in the order of `rope_tables`."""
    heads = tensors[0].reshape(arch.num_heads, -1, *tensors[0].shape[1:])
    yield from _latent_rows(arch, (slice(None),), heads)


def _latent_entries(arch: ModelArch, tensors: tuple[Tensor, ...]) -> Iterator[Piece]:
    """`[C + R, D]`, what turns in the order of `rope_tables`."""
    yield from _latent_rows(arch, (), tensors[0])


def _latent_rows(arch: ModelArch, place: Place, rows: Tensor) -> Iterator[Piece]:
    """Rows on the axis after those of `place`, of which the last R turn."""
    assert arch.latent is not None
    turned, size = arch.latent.rotated, rows.shape[len(place)]
    still = size - turned
    runs = [(slice(0, still), slice(0, still)), (slice(still, size), slice(still, size))]
    if split_half_order(arch.ropes[0], turned) is not None:
        middle = still + turned // 2
        runs[1:] = [(slice(still, middle), slice(still, size, 2)), (slice(middle, size), slice(still + 1, size, 2))]
    for ours, theirs in runs:
        yield Piece((*place, ours), rows[(*place, theirs)])


def _latent_matrices(arch: ModelArch, tensors: tuple[Tensor, ...]) -> Iterator[Piece]:
    """What makes keys and values of all heads `[N * (D_n + D_v), C]`, to `[N, D_n + D_v, C]`."""
    yield Piece((), tensors[0].reshape(arch.num_heads, -1, tensors[0].shape[1]))


def _fuse_gated_heads(arch: ModelArch, tensors: tuple[Tensor, ...]) -> Iterator[Piece]:
    """`fuse_heads` where q `[N * 2 H, D]` has each head's gate after its query: to `[K, 2 G + 2, H, D]`, gates last."""
    yield from _fuse_without_gates(arch, tensors)
    groups = arch.num_heads // arch.num_kv_heads
    yield Piece((slice(None), slice(groups + 2, 2 * groups + 2)), next(_gates(arch, tensors)).numbers)


def _fuse_without_gates(arch: ModelArch, tensors: tuple[Tensor, ...]) -> Iterator[Piece]:
    """The same without the gates, `[K, G + 2, H]`."""
    q, k, v = tensors
    yield from _fuse_queries(arch, q.reshape(arch.num_heads, 2, arch.head_dim, *q.shape[1:])[:, 0], k, v)


def _gates(arch: ModelArch, tensors: tuple[Tensor, ...]) -> Iterator[Piece]:
    """The gates among these, `[K, G, H]`."""
    gates = tensors[0].reshape(arch.num_heads, 2, arch.head_dim, *tensors[0].shape[1:])[:, 1]
    yield Piece((), gates.reshape(arch.num_kv_heads, -1, *gates.shape[1:]))


def _delta_parts(arch: ModelArch) -> tuple[int, int, int, int]:
    """K' and, of a key head, the rows of q (as many as of k), of v (as many as of z) and of b (as many as of a)."""
    net = arch.delta_net
    assert net is not None
    return net.key_heads, net.key_size, net.group * net.value_size, net.group


def _by_key_head(arch: ModelArch, tensor: Tensor) -> Iterator[Tensor]:
    """q, k and v of all heads, one after the other `[K' * C, ...]`, each as `[K', rows, ...]`."""
    heads, h, values, _ = _delta_parts(arch)
    for first, size in ((0, h), (heads * h, h), (2 * heads * h, values)):
        part = tensor[first : first + heads * size]
        yield part.reshape(heads, size, *tensor.shape[1:])


def _in_rows(parts: Iterable[Tensor]) -> Iterator[Piece]:
    """Tensors `[K', rows, ...]`, one after the other on their second axis."""
    first = 0
    for part in parts:
        yield Piece((slice(None), slice(first, first + part.shape[1])), part)
        first += part.shape[1]


def _delta_inputs(arch: ModelArch, tensors: tuple[Tensor, ...]) -> Iterator[Piece]:
    """What makes q, k and v; z; b; a, to `[K', rows, D]`."""
    heads = arch.delta_net.key_heads if arch.delta_net else 0
    qkv, *others = tensors
    yield from _in_rows([*_by_key_head(arch, qkv), *(each.reshape(heads, -1, each.shape[1]) for each in others)])


def _delta_inputs_by_head(arch: ModelArch, tensors: tuple[Tensor, ...]) -> Iterator[Piece]:
    """The same of two tensors that have key heads first: q, k, v and z of each; b and a of each."""
    heads = arch.delta_net.key_heads if arch.delta_net else 0
    yield from _in_rows([each.reshape(heads, -1, each.shape[1]) for each in tensors])


def _delta_taps(arch: ModelArch, tensors: tuple[Tensor, ...]) -> Iterator[Piece]:
    """A depthwise convolution of all channels `[K' * C, 1, taps]`, to `[K', C, taps]`."""
    yield from _in_rows(_by_key_head(arch, tensors[0][:, 0]))


def _delta_decay(arch: ModelArch, tensors: tuple[Tensor, ...]) -> Iterator[Piece]:
    """A_log and dt_bias `[V']`, to `[K', 2, r]`."""
    heads, _, _, group = _delta_parts(arch)
    yield from _in_rows([each.reshape(heads, 1, group) for each in tensors])


def _rows_of_tokens(arch: ModelArch, tensors: tuple[Tensor, ...]) -> Iterator[Piece]:
    """The first V rows of a table that may have more."""
    yield Piece((), tensors[0][: arch.vocab_size])


def _router_norm(arch: ModelArch, tensors: tuple[Tensor, ...]) -> Iterator[Piece]:
    """The scales `[D]` of a router's input, over sqrt(D)."""
    yield Piece((), tensors[0].astype(np.float32) * np.float32(arch.hidden_size**-0.5))


_ATTENTION = "model.layers.{}.self_attn."
_DELTA_NET = "model.layers.{}.linear_attn."
_MLP = "model.layers.{}.mlp."

OF_MODEL: dict[Path, Recipe] = {
    ("embedding",): Recipe((Source("model.embed_tokens.weight", ("V", "D")),), _as_is),
    ("final_norm",): Recipe((Source("model.norm.weight", ("D",)),), _norm),
    ("lm_head",): Recipe((Source("lm_head.weight", ("V", "D")),), _as_is),
    ("score",): Recipe((Source("score.weight", ("C", "D")),), _as_is),
}

# Of a `next_arch`: what is around the checkpoint's layer after the last one.
OF_NEXT_LAYER: dict[Path, Recipe] = {
    ("token_norm",): Recipe((Source("model.layers.{}.enorm.weight", ("D",)),), _norm),
    ("state_norm",): Recipe((Source("model.layers.{}.hnorm.weight", ("D",)),), _norm),
    ("joined",): Recipe((Source("model.layers.{}.eh_proj.weight", ("D", "2D")),), _as_is),
    ("final_norm",): Recipe((Source("model.layers.{}.shared_head.norm.weight", ("D",)),), _norm),
}

# A row per layer, in one array.
OF_ALL_LAYERS: dict[Path, Recipe] = {
    ("vectors", "attention_norm"): Recipe((Source("model.layers.{}.input_layernorm.weight", ("D",)),), _norm),
    ("vectors", "mlp_norm"): Recipe((Source("model.layers.{}.post_attention_layernorm.weight", ("D",)),), _norm),
    ("vectors", "q_norm"): Recipe((Source(_ATTENTION + "q_norm.weight", ("H",)),), _head_norm),
    ("vectors", "k_norm"): Recipe((Source(_ATTENTION + "k_norm.weight", ("H",)),), _head_norm),
    ("vectors", "qkv_bias"): Recipe(
        (
            Source(_ATTENTION + "q_proj.bias", ("NH",)),
            Source(_ATTENTION + "k_proj.bias", ("KH",)),
            Source(_ATTENTION + "v_proj.bias", ("KH",)),
        ),
        fuse_heads,
    ),
    ("vectors", "sinks"): Recipe((Source(_ATTENTION + "sinks", ("N",)),), _as_is),
}

OF_LAYER: dict[Path, Recipe] = {
    ("attention", "qkv"): Recipe(
        (
            Source(_ATTENTION + "q_proj.weight", ("NH", "D")),
            Source(_ATTENTION + "k_proj.weight", ("KH", "D")),
            Source(_ATTENTION + "v_proj.weight", ("KH", "D")),
        ),
        fuse_heads,
    ),
    ("attention", "o"): Recipe((Source(_ATTENTION + "o_proj.weight", ("D", "NH")),), _as_is),
    ("attention", "o_bias"): Recipe((Source(_ATTENTION + "o_proj.bias", ("D",)),), _as_is),
    ("mlp", "gate_up"): Recipe(
        (Source(_MLP + "gate_proj.weight", ("F", "D")), Source(_MLP + "up_proj.weight", ("F", "D"))), _fuse_gate_up
    ),
    ("mlp", "gate_up_bias"): Recipe(
        (Source(_MLP + "gate_proj.bias", ("F",)), Source(_MLP + "up_proj.bias", ("F",))), _fuse_gate_up
    ),
    ("mlp", "down"): Recipe((Source(_MLP + "down_proj.weight", ("D", "F")),), _as_is),
    ("mlp", "down_bias"): Recipe((Source(_MLP + "down_proj.bias", ("D",)),), _as_is),
}


def _layer_norms(**names: str) -> dict[Path, Recipe]:
    """Norms of a layer by our names, with the checkpoint's."""
    return {
        ("vectors", ours): Recipe((Source(f"model.layers.{{}}.{theirs}.weight", ("D",)),), _norm)
        for ours, theirs in names.items()
    }


_FUSED_GATE_UP: dict[Path, Recipe] = {
    ("mlp", "gate_up"): Recipe((Source(_MLP + "gate_up_proj.weight", ("2F", "D")),), _split_gate_up)
}
_AFTER = _layer_norms(attention_out_norm="post_attention_layernorm", mlp_out_norm="post_feedforward_layernorm")
_NORMS_OF_ALL_HEADS: dict[Path, Recipe] = {
    ("vectors", "q_norm"): Recipe((Source(_ATTENTION + "q_norm.weight", ("NH",)),), _all_heads_norm),
    ("vectors", "k_norm"): Recipe((Source(_ATTENTION + "k_norm.weight", ("KH",)),), _all_keys_norm),
}
_HUNYUAN: dict[Path, Recipe] = {
    ("vectors", "q_norm"): Recipe((Source(_ATTENTION + "query_layernorm.weight", ("H",)),), _head_norm),
    ("vectors", "k_norm"): Recipe((Source(_ATTENTION + "key_layernorm.weight", ("H",)),), _head_norm),
}
_GEMMA = _layer_norms(
    attention_out_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    mlp_out_norm="post_feedforward_layernorm",
)

_GEMMA4: dict[Path, Recipe] = {
    **_GEMMA,
    **_layer_norms(
        mlp_part_norm="post_feedforward_layernorm_1",
        experts_part_norm="post_feedforward_layernorm_2",
        experts_norm="pre_feedforward_layernorm_2",
        embedding_norm="post_per_layer_input_norm",
    ),
    ("vectors", "router_norm"): Recipe((Source("model.layers.{}.router.scale", ("D",)),), _router_norm),
    ("vectors", "layer_factor"): Recipe((Source("model.layers.{}.layer_scalar", ("1",)),), _as_is),
    ("layer_embeddings", "table"): Recipe(
        (Source("model.embed_tokens_per_layer.weight", ("PV", "PL")),), _rows_of_tokens
    ),
    ("layer_embeddings", "projection"): Recipe(
        (Source("model.per_layer_model_projection.weight", ("PL", "D")),), _as_is
    ),
    ("layer_embeddings", "norm"): Recipe((Source("model.per_layer_projection_norm.weight", ("P",)),), _as_is),
    ("embedding_gate", "gate"): Recipe((Source("model.layers.{}.per_layer_input_gate.weight", ("P", "D")),), _as_is),
    ("embedding_gate", "out"): Recipe((Source("model.layers.{}.per_layer_projection.weight", ("D", "P")),), _as_is),
}
# Of layers that lack projections.
_READS_KEYS: dict[Path, Recipe] = {
    ("attention", "qkv"): Recipe((Source(_ATTENTION + "q_proj.weight", ("NH", "D")),), _queries_alone)
}
_VALUES_ARE_KEYS: dict[Path, Recipe] = {
    ("attention", "qkv"): Recipe(
        (
            Source(_ATTENTION + "q_proj.weight", ("NH", "D")),
            Source(_ATTENTION + "k_proj.weight", ("KH", "D")),
            Source(_ATTENTION + "k_proj.weight", ("KH", "D")),
        ),
        fuse_heads,
    ),
}

_LATENT: dict[Path, Recipe] = {
    ("attention", "q"): Recipe((Source(_ATTENTION + "q_proj.weight", ("NLQ", "D")),), _latent_queries),
    ("attention", "q_a"): Recipe((Source(_ATTENTION + "q_a_proj.weight", ("LQ", "D")),), _as_is),
    ("attention", "q_a_norm"): Recipe((Source(_ATTENTION + "q_a_layernorm.weight", ("LQ",)),), _as_is),
    ("attention", "q_b"): Recipe((Source(_ATTENTION + "q_b_proj.weight", ("NLQ", "LQ")),), _latent_queries),
    ("attention", "kv_a"): Recipe((Source(_ATTENTION + "kv_a_proj_with_mqa.weight", ("LE", "D")),), _latent_entries),
    ("attention", "kv_a_norm"): Recipe((Source(_ATTENTION + "kv_a_layernorm.weight", ("LC",)),), _as_is),
    ("attention", "kv_b"): Recipe((Source(_ATTENTION + "kv_b_proj.weight", ("NLB", "LC")),), _latent_matrices),
    ("attention", "q_a_bias"): Recipe((Source(_ATTENTION + "q_a_proj.bias", ("LQ",)),), _as_is),
    ("attention", "kv_a_bias"): Recipe((Source(_ATTENTION + "kv_a_proj_with_mqa.bias", ("LE",)),), _latent_entries),
    ("attention", "o"): Recipe((Source(_ATTENTION + "o_proj.weight", ("D", "NLV")),), _as_is),
}

_HYBRID: dict[Path, Recipe] = {
    ("attention", "qkv"): Recipe(
        (
            Source(_ATTENTION + "q_proj.weight", ("2NH", "D")),
            Source(_ATTENTION + "k_proj.weight", ("KH", "D")),
            Source(_ATTENTION + "v_proj.weight", ("KH", "D")),
        ),
        _fuse_gated_heads,
    ),
    ("vectors", "qkv_bias"): Recipe(
        (
            Source(_ATTENTION + "q_proj.bias", ("2NH",)),
            Source(_ATTENTION + "k_proj.bias", ("KH",)),
            Source(_ATTENTION + "v_proj.bias", ("KH",)),
        ),
        _fuse_without_gates,
    ),
    ("vectors", "gate_bias"): Recipe((Source(_ATTENTION + "q_proj.bias", ("2NH",)),), _gates),
    ("delta_net", "inputs"): Recipe(
        (
            Source(_DELTA_NET + "in_proj_qkv.weight", ("GC", "D")),
            Source(_DELTA_NET + "in_proj_z.weight", ("GV", "D")),
            Source(_DELTA_NET + "in_proj_b.weight", ("GN", "D")),
            Source(_DELTA_NET + "in_proj_a.weight", ("GN", "D")),
        ),
        _delta_inputs,
    ),
    ("delta_net", "qkvz"): Recipe(
        (
            Source(_DELTA_NET + "in_proj_qkv.weight", ("GC", "D")),
            Source(_DELTA_NET + "in_proj_z.weight", ("GV", "D")),
        ),
        _delta_inputs,
    ),
    ("delta_net", "gates"): Recipe(
        (
            Source(_DELTA_NET + "in_proj_b.weight", ("GN", "D")),
            Source(_DELTA_NET + "in_proj_a.weight", ("GN", "D")),
        ),
        _delta_inputs_by_head,
    ),
    ("delta_net", "output"): Recipe((Source(_DELTA_NET + "out_proj.weight", ("D", "GV")),), _as_is),
    ("vectors", "delta_taps"): Recipe((Source(_DELTA_NET + "conv1d.weight", ("GC", "1", "GT")),), _delta_taps),
    ("vectors", "delta_decay"): Recipe(
        (Source(_DELTA_NET + "A_log", ("GN",)), Source(_DELTA_NET + "dt_bias", ("GN",))), _delta_decay
    ),
    ("vectors", "delta_norm"): Recipe((Source(_DELTA_NET + "norm.weight", ("GH",)),), _as_is),
}
_QWEN3_NEXT: dict[Path, Recipe] = {
    **_HYBRID,
    ("delta_net", "inputs"): Recipe(
        (
            Source(_DELTA_NET + "in_proj_qkvz.weight", ("GCV", "D")),
            Source(_DELTA_NET + "in_proj_ba.weight", ("G2N", "D")),
        ),
        _delta_inputs_by_head,
    ),
    ("delta_net", "qkvz"): Recipe((Source(_DELTA_NET + "in_proj_qkvz.weight", ("GCV", "D")),), _delta_inputs_by_head),
    ("delta_net", "gates"): Recipe((Source(_DELTA_NET + "in_proj_ba.weight", ("G2N", "D")),), _delta_inputs_by_head),
}

# Recipes that differ from those above, or are missing there, by architecture.
OF_FAMILY: dict[str, Mapping[Path, Recipe]] = {
    "Phi3ForCausalLM": {
        ("attention", "qkv"): Recipe((Source(_ATTENTION + "qkv_proj.weight", ("QKV", "D")),), _fuse_split_heads),
        **_FUSED_GATE_UP,
    },
    "Olmo2ForCausalLM": {**_AFTER, **_NORMS_OF_ALL_HEADS},
    "Olmo3ForCausalLM": {**_AFTER, **_NORMS_OF_ALL_HEADS},
    "OlmoeForCausalLM": _NORMS_OF_ALL_HEADS,
    "MiniMaxM2ForCausalLM": _NORMS_OF_ALL_HEADS,
    "Exaone4ForCausalLM": _AFTER,
    "HunYuanDenseV1ForCausalLM": _HUNYUAN,
    "GlmForCausalLM": _FUSED_GATE_UP,
    "Glm4ForCausalLM": {
        **_layer_norms(attention_out_norm="post_self_attn_layernorm", mlp_out_norm="post_mlp_layernorm"),
        **_FUSED_GATE_UP,
    },
    "DeepseekV2ForCausalLM": _LATENT,
    "DeepseekV3ForCausalLM": _LATENT,
    "Glm4MoeLiteForCausalLM": _LATENT,
    "Qwen3NextForCausalLM": _QWEN3_NEXT,
    "Qwen3_5ForCausalLM": _HYBRID,
    "Qwen3_5MoeForCausalLM": _HYBRID,
    "Qwen3_5ForConditionalGeneration": _HYBRID,
    "Qwen3_5MoeForConditionalGeneration": _HYBRID,
    "Gemma2ForCausalLM": _GEMMA,
    "Gemma3ForCausalLM": _GEMMA,
    "Gemma3ForConditionalGeneration": _GEMMA,
    "Gemma4ForCausalLM": _GEMMA4,
    "Gemma4ForConditionalGeneration": _GEMMA4,
}
# Where the decoder is within "model.", beside a tower; the output head is outside. With the names of the other parts.
_QWEN_TOWER = ("model.visual.",)
_PROJECTED_TOWER = ("model.vision_tower.", "model.multi_modal_projector.")
_BESIDE_TOWER = {
    "Qwen3VLForConditionalGeneration": _QWEN_TOWER,
    "Qwen3VLMoeForConditionalGeneration": _QWEN_TOWER,
    "Qwen3_5ForConditionalGeneration": _QWEN_TOWER,
    "Qwen3_5MoeForConditionalGeneration": _QWEN_TOWER,
    "Gemma3ForConditionalGeneration": _PROJECTED_TOWER,
    "Mistral3ForConditionalGeneration": _PROJECTED_TOWER,
    "Gemma4ForConditionalGeneration": tuple(
        f"model.{part}." for part in ("vision_tower", "embed_vision", "audio_tower", "embed_audio")
    ),
}
_WITHIN = "model.language_model."
# How names begin in files where the decoder is a model of its own, beside the tower, and how recipes have them.
_OF_OWN_MODEL = {
    "language_model.model.": _WITHIN,
    "language_model.lm_head.": "lm_head.",
    "vision_tower.": "model.vision_tower.",
    "multi_modal_projector.": "model.multi_modal_projector.",
}

_HEADS = ("lm_head.", "score.")
_LISTED = re.compile(r"(\.experts)\.(gate_proj|up_proj|down_proj)\.(\d+)\.")
_STACKED = re.compile(r"(\.experts\.(?:gate_up|down)_proj)\.(\w+)")


def as_in_recipes(names: Iterable[str]) -> dict[str, str]:
    """The files' names by those that recipes have: decoders saved without a head lack the first part, older folders of
    decoders with a tower have the parts in another order, ModelOpt lists Qwen3-VL's experts by what they are, and a
    stack of experts may be called as a module is.
    """
    by_names = {_STACKED.sub(_of_stack, _LISTED.sub(r"\1.\3.\2.", name)): name for name in names}
    return {recipes: by_names[name] for recipes, name in _of_decoder(list(by_names)).items()}


def _of_stack(name: re.Match[str]) -> str:
    return name[1] if name[2] == "weight" else f"{name[1]}_{name[2]}"


def _of_decoder(stored: list[str]) -> dict[str, str]:
    if "embed_tokens.weight" in stored:
        return {name if name.startswith(_HEADS) else f"model.{name}": name for name in stored}
    if "language_model.model.embed_tokens.weight" not in stored:
        return dict(zip(stored, stored, strict=True))

    def renamed(name: str) -> str:
        start = next((each for each in _OF_OWN_MODEL if name.startswith(each)), "")
        return _OF_OWN_MODEL.get(start, "") + name.removeprefix(start)

    return {renamed(name): name for name in stored}


def stored_name(name: str, arch: ModelArch) -> str:
    """What recipes call a tensor of the decoder, which is `name` where the model is nothing but a decoder."""
    is_within = arch.name in _BESIDE_TOWER and name.startswith("model.")
    return _WITHIN + name.removeprefix("model.") if is_within else name


def own_name(name: str, arch: ModelArch) -> str | None:
    """The inverse of `stored_name`; None for a tensor of a part of the model that is not served."""
    if arch.name not in _BESIDE_TOWER:
        return name
    if name.startswith(_BESIDE_TOWER[arch.name]):
        return name if arch.vision is not None and arch.vision.has_tower else None
    return "model." + name.removeprefix(_WITHIN) if name.startswith(_WITHIN) else name


def recipe_of(path: Path, arch: ModelArch) -> Recipe:
    """The recipe of the parameter at `path`, with the layers' indices filled in."""
    own = {**OF_FAMILY.get(arch.name, {}), **(OF_NEXT_LAYER if arch.stage.is_next else {})}

    def named(sources: tuple[Source, ...], layer: int | None = None) -> tuple[Source, ...]:
        place = arch.stage.layers_before + (layer or 0)
        return tuple(Source(stored_name(source.name.format(place), arch), source.axes, layer) for source in sources)

    if path[0] == "vectors":
        recipe = own.get(path) or OF_ALL_LAYERS[path]
        layers = tuple(_layers_of(str(path[1]), arch))
        rows = [named(recipe.sources, layer) for layer in layers]
        pieces = recipe.pieces
        if path[1] in ("q_norm", "k_norm") and len(arch.all_heads) > 1:
            pieces = partial(_padded, pieces, max(heads.size for heads in arch.all_heads))
        return Recipe(tuple(itertools.chain(*rows)), partial(_stack_layers, pieces, layers))
    if path[0] != "layers":
        recipe = own.get(path) or OF_MODEL[path]
        return Recipe(named(recipe.sources), recipe.pieces, recipe.computed)
    assert isinstance(path[1], int)
    spec = arch.layers[path[1]]
    if spec.keys_from is not None or spec.values_are_keys:
        own |= _VALUES_ARE_KEYS if spec.values_are_keys else _READS_KEYS
    recipe = own.get(path[2:]) or OF_LAYER[path[2:]]
    return Recipe(named(recipe.sources, path[1]), recipe.pieces, recipe.computed)


def path_in_model(path: Path, arch: ModelArch) -> Path:
    """The path of a parameter of a pipeline stage in the whole model."""
    before = arch.stage.layers_before
    return (path[0], before + path[1], *path[2:]) if path[0] == "layers" and isinstance(path[1], int) else path


def with_heads_at(path: Path, arch: ModelArch) -> ModelArch:
    """The model as if all layers had the kv heads of that which the parameter at `path` belongs to."""
    if path[0] != "layers" or not isinstance(path[1], int):
        return arch
    return arch.with_heads_of(arch.layers[path[1]])


def _layers_of(vectors: str, arch: ModelArch) -> Iterable[int]:
    """The layers that have rows in these vectors: all, or those of one kind."""
    if vectors == "q_norm":
        return arch.attention_layers + arch.reading_layers
    if vectors in ("k_norm", "qkv_bias", "gate_bias", "sinks"):
        return arch.attention_layers
    return arch.delta_layers if vectors.startswith("delta_") else range(arch.num_layers)


def _stack_layers(
    of_layer: Pieces, layers: tuple[int, ...], arch: ModelArch, tensors: tuple[Tensor, ...]
) -> Iterator[Piece]:
    """Row l is what `of_layer` makes of the tensors of the l-th of these layers; all have equally many."""
    per_layer = len(tensors) // len(layers)
    for row, layer in enumerate(layers):
        own = arch.with_heads_of(arch.layers[layer])
        for place, numbers in of_layer(own, tensors[row * per_layer : (row + 1) * per_layer]):
            yield Piece((row, *place), numbers)


def _padded(of_head: Pieces, width: int, arch: ModelArch, tensors: tuple[Tensor, ...]) -> Iterator[Piece]:
    """The scales `[H]` of heads' norms, with zeros up to the width of the model's largest heads."""
    for place, numbers in of_head(arch, tensors):
        yield Piece(place or (slice(0, arch.head_dim),), numbers)
    if arch.head_dim < width:
        yield Piece((slice(arch.head_dim, width),), np.zeros(width - arch.head_dim, np.float32))


TOWER_PREFIX = "model.visual."

_TOWER_BLOCK = "blocks.{}."
# Our name -> the tensor's name without ".weight" and ".bias", and the axes of the weights; `{}` stands for the index.
_TOWER: dict[str, tuple[str, tuple[str, ...]]] = {
    "patches": ("patch_embed.proj", ("VM", "VI", "VT", "VP", "VP")),
    "qkv": (_TOWER_BLOCK + "attn.qkv", ("V3M", "VM")),
    "o": (_TOWER_BLOCK + "attn.proj", ("VM", "VM")),
    "fc1": (_TOWER_BLOCK + "mlp.linear_fc1", ("VF", "VM")),
    "fc2": (_TOWER_BLOCK + "mlp.linear_fc2", ("VM", "VF")),
    "norm1": (_TOWER_BLOCK + "norm1", ("VM",)),
    "norm2": (_TOWER_BLOCK + "norm2", ("VM",)),
    "positions": ("pos_embed", ("VG", "VM")),
}
_TOWER_MERGER = {"norm": "norm", "fc1": "linear_fc1", "fc2": "linear_fc2"}
_TOWER_MERGER_AXES = {"fc1": ("VW", "VW"), "fc2": ("D", "VW")}


def recipe_of_tower(path: Path, arch: ModelArch) -> Recipe | None:
    """The recipe of the parameter at `path`; None unless it belongs to a vision tower."""
    if path[0] != "visual":
        return None
    assert arch.vision is not None
    names = [str(part) for part in path[1:]]
    is_bias = names[-1].endswith("_bias")
    own = names[-1].removesuffix("_bias")
    count = 1
    axes: tuple[str, ...]
    if names[0] == "merger":
        tensor, axes = f"merger.{_TOWER_MERGER[own]}", _TOWER_MERGER_AXES.get(own, ("VM",))
    elif names[0] == "deepstack":
        tensor, axes = f"deepstack_merger_list.{{}}.{_TOWER_MERGER[own]}", _TOWER_MERGER_AXES.get(own, ("VW",))
        count = len(arch.vision.deepstack_layers)
    else:
        tensor, axes = _TOWER[own]
        count = arch.vision.num_layers if tensor.startswith(_TOWER_BLOCK) else 1
    ending, axes = (".bias", axes[:1]) if is_bias else (".weight", axes)
    sources = tuple(Source(TOWER_PREFIX + tensor.format(index) + ending, axes) for index in range(count))
    if "{}" in tensor:
        return Recipe(sources, _stacked_layers)
    return Recipe(sources, _flat_patches if own == "patches" and not is_bias else _whole_tensor)


def _whole_tensor(arch: ModelArch, tensors: tuple[Tensor, ...]) -> Iterator[Piece]:
    yield Piece((), tensors[0])


def _flat_patches(arch: ModelArch, tensors: tuple[Tensor, ...]) -> Iterator[Piece]:
    """A convolution whose windows don't overlap is a product of flattened patches."""
    yield Piece((), tensors[0].reshape(len(tensors[0]), -1))


def _stacked_layers(arch: ModelArch, tensors: tuple[Tensor, ...]) -> Iterator[Piece]:
    for index, tensor in enumerate(tensors):
        yield Piece((index,), tensor)
