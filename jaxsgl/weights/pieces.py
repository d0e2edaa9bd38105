"""How the tensors of a checkpoint fill a parameter: q, k and v by kv head, gate and up one after the other, and so on.

A checkpoint stores projections as `[out, in]`; ours are `[..., in]`. Each function takes the tensors of one parameter
and yields its pieces, which are views of them; a small tensor may be computed with. Knows no names; `families` says
which parameter is filled by which function, and what differs from a checkpoint fuses with them, too (`adapters.py`,
`eagle.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from jaxsgl.models import ModelArch
from jaxsgl.models.rope import split_half_order
from jaxsgl.models.units import XIELU_SLOPE
from jaxsgl.weights.recipe import Piece, Pieces, Place, Tensor


def as_is(arch: ModelArch, tensors: tuple[Tensor, ...]) -> Iterator[Piece]:
    """The one tensor, which has the parameter's shape."""
    yield Piece((), tensors[0])


def stacked(arch: ModelArch, tensors: tuple[Tensor, ...]) -> Iterator[Piece]:
    """Tensors of one shape, one after the other on a new first axis: gate and up `[F, D]` to `[2, F, D]`."""
    for row, tensor in enumerate(tensors):
        yield Piece((row,), tensor)


def split_gate_up(arch: ModelArch, tensors: tuple[Tensor, ...]) -> Iterator[Piece]:
    """Gate and up that come as one tensor `[2 * F, D]`, gate first, to `[2, F, D]`."""
    yield Piece((), tensors[0].reshape(2, -1, *tensors[0].shape[1:]))


def split_up_gate(arch: ModelArch, tensors: tuple[Tensor, ...]) -> Iterator[Piece]:
    """Gate and up that come as one tensor `[2 * F, D]`, up first, to `[2, F, D]`."""
    up, gate = np.split(tensors[0], 2)
    yield Piece((0,), gate)
    yield Piece((1,), up)


def norm(arch: ModelArch, tensors: tuple[Tensor, ...]) -> Iterator[Piece]:
    """A norm's scales, with the model's offset."""
    yield Piece((), _with_offset(arch, tensors[0]))


def ones(arch: ModelArch, tensors: tuple[Tensor, ...]) -> Iterator[Piece]:
    """The scales of a norm that multiplies by none."""
    yield Piece((), np.ones(arch.hidden_size, np.float32))


def head_norm(arch: ModelArch, tensors: tuple[Tensor, ...]) -> Iterator[Piece]:
    """The scales `[H]` of a norm of queries or keys, in the order of their dimensions."""
    yield from _turned(arch, (), _with_offset(arch, tensors[0]), axis=0)


def all_heads_norm(arch: ModelArch, tensors: tuple[Tensor, ...]) -> Iterator[Piece]:
    """The scales of a norm over all heads of queries `[N * H]`, to `[K, heads per kv head, H]`."""
    scales = _with_offset(arch, tensors[0]).reshape(arch.num_kv_heads, -1, arch.head_dim)
    yield from _turned(arch, (), scales, axis=2)


def all_keys_norm(arch: ModelArch, tensors: tuple[Tensor, ...]) -> Iterator[Piece]:
    """The scales of a norm over all heads of keys `[K * H]`, to `[K, 1, H]`."""
    scales = _with_offset(arch, tensors[0]).reshape(arch.stored_kv_heads, 1, arch.head_dim)
    yield from _copied(arch, _turned(arch, (slice(None),), scales, axis=2))


def norms_of_heads(of_all: Pieces, arch: ModelArch, tensors: tuple[Tensor, ...]) -> Iterator[Piece]:
    """What `of_all` makes of the scales of all heads, of which each is a tensor `[H]`."""
    yield from of_all(arch, (np.stack(tensors),))


def of_transposed(of_rows: Pieces, arch: ModelArch, tensors: tuple[Tensor, ...]) -> Iterator[Piece]:
    """What `of_rows` makes of matrices `[out, in]`, which come as `[in, out]`."""
    yield from of_rows(arch, tuple(each.swapaxes(-1, -2) for each in tensors))


def heads_by_group(arch: ModelArch, tensors: tuple[Tensor, ...]) -> Iterator[Piece]:
    """`fuse_heads` of one tensor `[(N + 2 K) * H]` with queries, key and value of each kv head one after the other."""
    (fused,) = tensors
    stored = fused.reshape(arch.stored_kv_heads, -1, arch.head_dim, *fused.shape[1:])
    group = arch.num_heads // arch.num_kv_heads
    # A view of the queries of several kv heads has no axis for copies of these.
    parts = [slice(head, head + 1) for head in range(len(stored))] if arch.kv_copies > 1 else [slice(0, len(stored))]
    for part in parts:
        ours = slice(part.start * arch.kv_copies, part.stop * arch.kv_copies)
        queries = stored[part, :-2].reshape(-1, group, *stored.shape[2:])
        yield from _turned(arch, (ours, slice(0, group)), queries, axis=2)
    yield from _copied(arch, _turned(arch, (slice(None), slice(group, group + 1)), stored[:, -2:-1], axis=2))
    yield from _copied(arch, iter([Piece((slice(None), slice(group + 1, group + 2)), stored[:, -1:])]))


def _with_offset(arch: ModelArch, scales: Tensor) -> Tensor:
    return scales if arch.norm_offset == 0 else scales.astype(np.float32) + np.float32(arch.norm_offset)


def fuse_heads(arch: ModelArch, tensors: tuple[Tensor, ...]) -> Iterator[Piece]:
    """Fuses q `[N * H]`, k and v `[K * H]` to `[K, G + 2, H]`; a trailing axis D stays."""
    q, k, v = tensors
    yield from _fuse_queries(arch, q.reshape(arch.num_heads, arch.head_dim, *q.shape[1:]), k, v)


def queries_alone(arch: ModelArch, tensors: tuple[Tensor, ...]) -> Iterator[Piece]:
    """q `[N * H, D]` to `[K, G, H, D]`, of a layer that attends to another one's keys and values."""
    (q,) = tensors
    yield from _turned(arch, (), q.reshape(arch.num_kv_heads, -1, arch.head_dim, *q.shape[1:]), axis=2)


def _fuse_queries(arch: ModelArch, queries: Tensor, k: Tensor, v: Tensor) -> Iterator[Piece]:
    """`fuse_heads` of queries `[N, H, ...]`."""
    q = queries.reshape(arch.num_kv_heads, -1, *queries.shape[1:])
    k, v = (each.reshape(arch.stored_kv_heads, 1, -1, *each.shape[1:]) for each in (k, v))
    group, width = q.shape[1], v.shape[2]
    yield from _turned(arch, (slice(None), slice(0, group)), q, axis=2)
    yield from _copied(arch, _turned(arch, (slice(None), slice(group, group + 1)), k, axis=2))
    for first in range(0, arch.head_dim, width):  # after a narrow value copies of it follow, which nothing reads
        place = slice(None), slice(group + 1, group + 2), slice(first, min(first + width, arch.head_dim))
        yield from _copied(arch, iter([Piece(place, v[:, :, : arch.head_dim - first])]))


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
    """The dimensions of heads, from the checkpoint's order to that of `rope_tables`; `arch` has the layer's rope.

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


def fuse_split_heads(arch: ModelArch, tensors: tuple[Tensor, ...]) -> Iterator[Piece]:
    """`fuse_heads` of q, k and v that come as one tensor `[(N + 2 K) * H]`, one behind the other."""
    (fused,) = tensors
    queries, keys = arch.num_heads * arch.head_dim, arch.stored_kv_heads * arch.head_dim
    yield from fuse_heads(arch, (fused[:queries], fused[queries : queries + keys], fused[queries + keys :]))


def latent_queries(arch: ModelArch, tensors: tuple[Tensor, ...]) -> Iterator[Piece]:
    """Queries of all heads `[N * (D_n + R), in]` to `[N, D_n + R, in]`, what turns in the order of `rope_tables`."""
    heads = tensors[0].reshape(arch.num_heads, -1, *tensors[0].shape[1:])
    yield from _latent_rows(arch, (slice(None),), heads)


def latent_entries(arch: ModelArch, tensors: tuple[Tensor, ...]) -> Iterator[Piece]:
    """`[C + R, D]`, what turns in the order of `rope_tables`."""
    yield from _latent_rows(arch, (), tensors[0])


def latent_norm(arch: ModelArch, tensors: tuple[Tensor, ...]) -> Iterator[Piece]:
    """The scales `[C]` of a latent's norm, times the latent's factor."""
    assert arch.latent is not None
    factor = arch.latent.factor
    yield Piece((), tensors[0] if factor == 1 else tensors[0].astype(np.float32) * np.float32(factor))


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


def index_queries(arch: ModelArch, tensors: tuple[Tensor, ...]) -> Iterator[Piece]:
    """Queries of an index `[heads * I, in]` to `[heads, I, in]`, what turns in the order of `rope_tables`."""
    assert arch.latent is not None and arch.latent.index is not None
    heads = tensors[0].reshape(arch.latent.index.num_heads, -1, tensors[0].shape[1])
    yield from _index_rows(arch, (slice(None),), heads)


def index_keys(arch: ModelArch, tensors: tuple[Tensor, ...]) -> Iterator[Piece]:
    """`[I, D]`, or a vector of its norm, what turns in the order of `rope_tables`."""
    yield from _index_rows(arch, (), tensors[0])


def _index_rows(arch: ModelArch, place: Place, rows: Tensor) -> Iterator[Piece]:
    """Rows on the axis after those of `place`, of which the first R turn."""
    assert arch.latent is not None and arch.latent.index is not None
    turned, size = arch.latent.rotated, rows.shape[len(place)]
    runs = [(slice(0, size), slice(0, size))]
    if arch.latent.index.interleaved:
        middle, still = turned // 2, slice(turned, size)
        runs = [(slice(0, middle), slice(0, turned, 2)), (slice(middle, turned), slice(1, turned, 2)), (still, still)]
    for ours, theirs in runs:
        if ours.start < ours.stop:
            yield Piece((*place, ours), rows[(*place, theirs)])


def parts_of_groups(arch: ModelArch, tensors: tuple[Tensor, ...]) -> Iterator[Piece]:
    """What groups of tokens are made of, `[parts * H, ..]`, and keys of an index, to `[parts, H + I, ..]`."""
    parts = tensors[0].shape[0] // arch.head_dim
    yield from _side_by_side(tensor.reshape(parts, -1, *tensor.shape[1:]) for tensor in tensors)


def parts_of_groups_by_place(arch: ModelArch, tensors: tuple[Tensor, ...]) -> Iterator[Piece]:
    """The same of each place in a group, `[m, parts * H]` to `[m, parts, H + I]`."""
    for place, numbers in parts_of_groups(arch, tuple(tensor.T for tensor in tensors)):
        assert isinstance(numbers, np.ndarray)
        yield Piece((slice(None), *place), numbers.transpose(2, 0, 1))


def by_head(arch: ModelArch, tensors: tuple[Tensor, ...]) -> Iterator[Piece]:
    """`[N * H, in]` to `[N, H, in]`."""
    yield Piece((), tensors[0].reshape(arch.num_heads, -1, *tensors[0].shape[1:]))


def by_index_head(arch: ModelArch, tensors: tuple[Tensor, ...]) -> Iterator[Piece]:
    """Queries of an index of groups `[heads * I, in]`, to `[heads, I, in]`."""
    index = next(groups.index for groups in arch.token_groups if groups.index is not None)
    yield Piece((), tensors[0].reshape(index.num_heads, -1, tensors[0].shape[1]))


def by_out_group(arch: ModelArch, tensors: tuple[Tensor, ...]) -> Iterator[Piece]:
    """What heads' outputs are multiplied by first, `[G * rank, in]` to `[G, rank, in]`."""
    assert arch.grouped is not None
    yield Piece((), tensors[0].reshape(arch.grouped.out_groups, -1, tensors[0].shape[1]))


def latent_matrices(arch: ModelArch, tensors: tuple[Tensor, ...]) -> Iterator[Piece]:
    """What makes keys and values of all heads `[N * (D_n + D_v), C]`, to `[N, D_n + D_v, C]`."""
    yield Piece((), tensors[0].reshape(arch.num_heads, -1, tensors[0].shape[1]))


def fuse_gated_heads(arch: ModelArch, tensors: tuple[Tensor, ...]) -> Iterator[Piece]:
    """`fuse_heads` where q `[N * 2 H, D]` has each head's gate after its query: to `[K, 2 G + 2, H, D]`, gates last."""
    yield from fuse_without_gates(arch, tensors)
    groups = arch.num_heads // arch.num_kv_heads
    yield Piece((slice(None), slice(groups + 2, 2 * groups + 2)), next(gates(arch, tensors)).numbers)


def fuse_without_gates(arch: ModelArch, tensors: tuple[Tensor, ...]) -> Iterator[Piece]:
    """The same without the gates, `[K, G + 2, H]`."""
    q, k, v = tensors
    yield from _fuse_queries(arch, q.reshape(arch.num_heads, 2, arch.head_dim, *q.shape[1:])[:, 0], k, v)


def gates(arch: ModelArch, tensors: tuple[Tensor, ...]) -> Iterator[Piece]:
    """The gates among these, `[K, G, H]`."""
    of_heads = tensors[0].reshape(arch.num_heads, 2, arch.head_dim, *tensors[0].shape[1:])[:, 1]
    yield Piece((), of_heads.reshape(arch.num_kv_heads, -1, *of_heads.shape[1:]))


def fuse_heads_and_gates(arch: ModelArch, tensors: tuple[Tensor, ...]) -> Iterator[Piece]:
    """`fuse_heads` of q, k and v, with gates `[N * H, D]` of the queries last: to `[K, 2 G + 2, H, D]`."""
    *heads, of_queries = tensors
    yield from fuse_heads(arch, tuple(heads))
    groups = arch.num_heads // arch.num_kv_heads
    numbers = of_queries.reshape(arch.num_kv_heads, groups, arch.head_dim, -1)
    yield Piece((slice(None), slice(groups + 2, 2 * groups + 2)), numbers)


def gates_of_heads(arch: ModelArch, tensors: tuple[Tensor, ...]) -> Iterator[Piece]:
    """A row for each query head `[N, D]`, to `[K, G, D]`."""
    yield Piece((), tensors[0].reshape(arch.num_kv_heads, -1, tensors[0].shape[1]))


def _recurrent_parts(arch: ModelArch) -> tuple[int, int, int, int]:
    """K' and, of a key head, the rows of q (as many as of k), of v (as many as of z) and its value heads."""
    net = arch.recurrent_net
    assert net is not None
    return net.key_heads, net.key_size, net.group * net.value_size, net.group


def _by_key_head(arch: ModelArch, tensor: Tensor) -> Iterator[Tensor]:
    """q, k and v of all heads, one after the other `[K' * C, ...]`, each as `[K', rows, ...]`."""
    heads, h, values, _ = _recurrent_parts(arch)
    for first, size in ((0, h), (heads * h, h), (2 * heads * h, values)):
        part = tensor[first : first + heads * size]
        yield part.reshape(heads, size, *tensor.shape[1:])


def _side_by_side(parts: Iterable[Tensor]) -> Iterator[Piece]:
    """Tensors `[K', rows, ...]`, one after the other on their second axis."""
    first = 0
    for part in parts:
        yield Piece((slice(None), slice(first, first + part.shape[1])), part)
        first += part.shape[1]


def delta_inputs(arch: ModelArch, tensors: tuple[Tensor, ...]) -> Iterator[Piece]:
    """What makes q, k and v; z; b; a, to `[K', rows, D]`."""
    heads = arch.recurrent_net.key_heads if arch.recurrent_net else 0
    qkv, *others = tensors
    yield from _side_by_side([*_by_key_head(arch, qkv), *(each.reshape(heads, -1, each.shape[1]) for each in others)])


def delta_inputs_by_head(arch: ModelArch, tensors: tuple[Tensor, ...]) -> Iterator[Piece]:
    """The same of two tensors that have key heads first: q, k, v and z of each; b and a of each."""
    heads = arch.recurrent_net.key_heads if arch.recurrent_net else 0
    yield from _side_by_side([each.reshape(heads, -1, each.shape[1]) for each in tensors])


def delta_taps(arch: ModelArch, tensors: tuple[Tensor, ...]) -> Iterator[Piece]:
    """A depthwise convolution of all channels `[K' * C, 1, taps]`, to `[K', C, taps]`."""
    yield from _side_by_side(_by_key_head(arch, tensors[0][:, 0]))


def by_value_head(arch: ModelArch, tensors: tuple[Tensor, ...]) -> Iterator[Piece]:
    """Vectors `[V']`, as A_log and dt_bias, to `[K', 2, r]`."""
    heads, _, _, group = _recurrent_parts(arch)
    yield from _side_by_side([each.reshape(heads, 1, group) for each in tensors])


def delta_rates(arch: ModelArch, tensors: tuple[Tensor, ...]) -> Iterator[Piece]:
    """A_log and dt_bias `[V']`, to `[K', 2, r]`, or 3 where b may be more than 1."""
    yield from by_value_head(arch, tensors)
    heads, _, _, group = _recurrent_parts(arch)
    net = arch.recurrent_net
    if net is not None and net.most_written != 1:
        yield Piece((slice(None), slice(2, 3)), np.full((heads, 1, group), net.most_written, np.float32))


def of_channels(arch: ModelArch, tensors: tuple[Tensor, ...]) -> Iterator[Piece]:
    """Taps of a convolution `[C, 1, taps]` and vectors `[C]`, to `[C, taps + 3]`."""
    taps, *others = tensors
    yield Piece((), np.concatenate([taps[:, 0], *(each[:, None] for each in others)], axis=1, dtype=np.float32))


def channel_rates(arch: ModelArch, tensors: tuple[Tensor, ...]) -> Iterator[Piece]:
    """A_log `[1, 1, K', 1]` and dt_bias `[K' h]`, to `[K', 2, h]`."""
    heads, h, _, _ = _recurrent_parts(arch)
    of_heads, of_channels = tensors
    yield Piece((slice(None), slice(0, 1)), np.broadcast_to(of_heads.reshape(heads, 1, 1), (heads, 1, h)))
    yield Piece((slice(None), slice(1, 2)), of_channels.reshape(heads, 1, h))


def by_key_head(arch: ModelArch, tensors: tuple[Tensor, ...]) -> Iterator[Piece]:
    """A matrix of all key heads `[K' * rows, in]`, to `[K', rows, in]`."""
    yield Piece((), tensors[0].reshape(_recurrent_parts(arch)[0], -1, tensors[0].shape[1]))


def delta_taps_apart(arch: ModelArch, tensors: tuple[Tensor, ...]) -> Iterator[Piece]:
    """`delta_taps` of three convolutions, one after the other."""
    yield from delta_taps(arch, (np.concatenate(tensors),))


def _mamba_channels(arch: ModelArch, tensor: Tensor) -> Iterator[Tensor]:
    """x, B and C of all groups, one after the other `[K' * C, ...]`: C, B and x, each as `[K', rows, ...]`."""
    groups, h, values, _ = _recurrent_parts(arch)
    x, b, c = (
        tensor[first : first + groups * size].reshape(groups, size, *tensor.shape[1:])
        for first, size in ((0, values), (groups * values, h), (groups * (values + h), h))
    )
    yield from (c, b, x)


def mamba_inputs(arch: ModelArch, tensors: tuple[Tensor, ...]) -> Iterator[Piece]:
    """z; x, B and C; dt, to `[K', rows, D]`: C, B, x, z and dt of each group."""
    yield from _side_by_side(_of_mamba(arch, tensors[0]))


def mamba_channels_and_gates(arch: ModelArch, tensors: tuple[Tensor, ...]) -> Iterator[Piece]:
    """Of the same, all but dt."""
    yield from _side_by_side(_of_mamba(arch, tensors[0])[:-1])


def mamba_steps(arch: ModelArch, tensors: tuple[Tensor, ...]) -> Iterator[Piece]:
    """Of the same, dt, to `[K', r, D]`."""
    yield from _side_by_side(_of_mamba(arch, tensors[0])[-1:])


def _of_mamba(arch: ModelArch, of_all: Tensor) -> list[Tensor]:
    """C, B, x, z and dt of what makes them, each by group, `[K', rows, ..]`."""
    groups, h, values, _ = _recurrent_parts(arch)
    mixed = groups * (2 * values + 2 * h)
    z, xbc, dt = of_all[: groups * values], of_all[groups * values : mixed], of_all[mixed:]
    return [*_mamba_channels(arch, xbc), *(each.reshape(groups, -1, *of_all.shape[1:]) for each in (z, dt))]


def mamba_taps(arch: ModelArch, tensors: tuple[Tensor, ...]) -> Iterator[Piece]:
    """A depthwise convolution of all channels `[K' * C, 1, taps]`, to `[K', C, taps]`."""
    yield from _side_by_side(_mamba_channels(arch, tensors[0][:, 0]))


def mamba_bias(arch: ModelArch, tensors: tuple[Tensor, ...]) -> Iterator[Piece]:
    """Its bias `[K' * C]`, to `[K', C]`."""
    yield from _side_by_side(_mamba_channels(arch, tensors[0]))


def mamba_norm(arch: ModelArch, tensors: tuple[Tensor, ...]) -> Iterator[Piece]:
    """Scales `[V' v]`, to `[K', r v]`."""
    yield Piece((), tensors[0].reshape(_recurrent_parts(arch)[0], -1))


def conv_inputs(arch: ModelArch, tensors: tuple[Tensor, ...]) -> Iterator[Piece]:
    """What makes b, c and x of all channels, one after the other `[3 * K' * C, D]`, to `[K', 3 C, D]`."""
    groups = _recurrent_parts(arch)[0]
    yield from _side_by_side(each.reshape(groups, -1, each.shape[1]) for each in np.split(tensors[0], 3))


def conv_taps(arch: ModelArch, tensors: tuple[Tensor, ...]) -> Iterator[Piece]:
    """A depthwise convolution `[K' * C, 1, taps]`, to `[K', C, taps]`."""
    yield Piece((), tensors[0].reshape(_recurrent_parts(arch)[0], -1, tensors[0].shape[2]))


def rows_of_tokens(arch: ModelArch, tensors: tuple[Tensor, ...]) -> Iterator[Piece]:
    """The first V rows of a table that may have more; where it has fewer, the first row for all further tokens."""
    table = tensors[0][: arch.vocab_size]
    yield Piece((slice(0, len(table)),), table)
    for row in range(len(table), arch.vocab_size):
        yield Piece((slice(row, row + 1),), table[:1])


def router_norm(arch: ModelArch, tensors: tuple[Tensor, ...]) -> Iterator[Piece]:
    """The scales `[D]` of a router's input, over sqrt(D)."""
    yield Piece((), tensors[0].astype(np.float32) * np.float32(arch.hidden_size**-0.5))


def xielu_curve(arch: ModelArch, tensors: tuple[Tensor, ...]) -> Iterator[Piece]:
    """How much xIELU bends above 0 and below: the softplus of two numbers `[1]`, and below the slope at 0 more."""
    above, below = (np.logaddexp(np.float32(0), each.astype(np.float32)) for each in tensors)
    yield Piece((), np.concatenate([above, below + np.float32(XIELU_SLOPE)]))


def flat_patches(arch: ModelArch, tensors: tuple[Tensor, ...]) -> Iterator[Piece]:
    """A convolution whose windows don't overlap is a product of flattened patches."""
    yield Piece((), tensors[0].reshape(len(tensors[0]), -1))


def convolved_frames(arch: ModelArch, tensors: tuple[Tensor, ...]) -> Iterator[Piece]:
    """Weights `[out, in, taps]` of a convolution, to those of `taps` frames one after the other."""
    yield Piece((), tensors[0].transpose(0, 2, 1).reshape(len(tensors[0]), -1))


def around_zeros(arch: ModelArch, tensors: tuple[Tensor, ...]) -> Iterator[Piece]:
    """The biases of q and v, of which k, between them, has none."""
    q, v = tensors
    yield from in_rows(arch, (q, np.zeros_like(q), v))


def squares_by_patch(arch: ModelArch, tensors: tuple[Tensor, ...]) -> Iterator[Piece]:
    """Weights `[out, M * 4]` of squares of patches, whose numbers lie by channel, to those of patches one by one."""
    assert arch.tower is not None
    by_channel = tensors[0].reshape(len(tensors[0]), arch.tower.hidden_size, -1)
    yield Piece((), by_channel.transpose(0, 2, 1).reshape(tensors[0].shape))


def convolved_squares(arch: ModelArch, tensors: tuple[Tensor, ...]) -> Iterator[Piece]:
    """Weights `[out, M, 2, 2]` of a convolution over squares of patches, to those of patches one by one."""
    yield Piece((), tensors[0].transpose(0, 2, 3, 1).reshape(len(tensors[0]), -1))


def patches_by_pixel(arch: ModelArch, tensors: tuple[Tensor, ...]) -> Iterator[Piece]:
    """Weights `[M, C]` of patches whose numbers lie pixel by pixel, to those of patches that lie channel by channel."""
    assert arch.tower is not None
    by_pixel = tensors[0].reshape(len(tensors[0]), -1, arch.tower.patches.channels)
    yield Piece((), by_pixel.transpose(0, 2, 1).reshape(tensors[0].shape))


def pixels_by_channel(arch: ModelArch, tensors: tuple[Tensor, ...]) -> Iterator[Piece]:
    """The same of what pixels of a patch have, `[C]`."""
    assert arch.tower is not None
    yield Piece((), tensors[0].reshape(-1, arch.tower.patches.channels).transpose(1, 0).reshape(-1))


def table_by_axis(arch: ModelArch, tensors: tuple[Tensor, ...]) -> Iterator[Piece]:
    """Tables `[rows, n, M]` of n axes, one after the other."""
    yield Piece((), tensors[0].transpose(1, 0, 2).reshape(-1, tensors[0].shape[-1]))


def one_table(arch: ModelArch, tensors: tuple[Tensor, ...]) -> Iterator[Piece]:
    """Tables `[n, rows, M]`, one after the other."""
    yield Piece((), tensors[0].reshape(-1, tensors[0].shape[-1]))


def first_row(arch: ModelArch, tensors: tuple[Tensor, ...]) -> Iterator[Piece]:
    """The first of the rows `[rows, M]`, or `[1, rows, M]`."""
    yield Piece((), tensors[0].reshape(-1, tensors[0].shape[-1])[0])


def all_but_first(arch: ModelArch, tensors: tuple[Tensor, ...]) -> Iterator[Piece]:
    """The others."""
    yield Piece((), tensors[0].reshape(-1, tensors[0].shape[-1])[1:])


def axial_heads(arch: ModelArch, tensors: tuple[Tensor, ...]) -> Iterator[Piece]:
    """q, k and v `[M, M]` of a tower one after the other; see `axial_norm`."""
    assert arch.tower is not None
    q, k, v = tensors
    turned = (
        each.reshape(arch.tower.layers.num_heads, 4, -1, each.shape[-1])[:, _AXIAL].reshape(each.shape)
        for each in (q, k)
    )
    yield from in_rows(arch, (*turned, v))


def axial_norm(arch: ModelArch, tensors: tuple[Tensor, ...]) -> Iterator[Piece]:
    """Scales `[H]` of a tower's queries or keys.

    The first half of the numbers turns with columns and the second one with rows, each as a whole head does; in ours
    rows come first, and halves of both stand together.
    """
    yield Piece((), tensors[0].reshape(4, -1)[_AXIAL].reshape(-1))


_AXIAL = [2, 0, 3, 1]  # where quarters of a head stand in checkpoints


def numbers_in_fours(arch: ModelArch, tensors: tuple[Tensor, ...]) -> Iterator[Piece]:
    """Single numbers, to rows of 4."""
    for index, number in enumerate(tensors):
        yield Piece((index // 4, index % 4), number.reshape(()))


def transposed(arch: ModelArch, tensors: tuple[Tensor, ...]) -> Iterator[Piece]:
    """A matrix `[in, out]`."""
    yield Piece((), tensors[0].T)


def in_rows(arch: ModelArch, tensors: tuple[Tensor, ...]) -> Iterator[Piece]:
    """Tensors one after the other on their first axis."""
    first = 0
    for tensor in tensors:
        yield Piece((slice(first, first + len(tensor)),), tensor)
        first += len(tensor)


def stacked_rows(of_row: Pieces, count: int, arch: ModelArch, tensors: tuple[Tensor, ...]) -> Iterator[Piece]:
    """Row r of `count` is what `of_row` makes of the r-th part of the tensors; all have equally many."""
    per_row = len(tensors) // count
    for row in range(count):
        for place, numbers in of_row(arch, tensors[row * per_row : (row + 1) * per_row]):
            yield Piece((row, *place), numbers)


def stack_layers(
    of_layer: Pieces, layers: tuple[int, ...], arch: ModelArch, tensors: tuple[Tensor, ...]
) -> Iterator[Piece]:
    """Row l is what `of_layer` makes of the tensors of the l-th of these layers; all have equally many."""
    per_layer = len(tensors) // len(layers)
    for row, layer in enumerate(layers):
        own = arch.with_heads_of(arch.layers[layer])
        for place, numbers in of_layer(own, tensors[row * per_layer : (row + 1) * per_layer]):
            yield Piece((row, *place), numbers)


def padded(of_head: Pieces, width: int, arch: ModelArch, tensors: tuple[Tensor, ...]) -> Iterator[Piece]:
    """The scales `[H]` of heads' norms, with zeros up to the width of the model's largest heads."""
    for place, numbers in of_head(arch, tensors):
        yield Piece(place or (slice(0, arch.head_dim),), numbers)
    if arch.head_dim < width:
        yield Piece((slice(arch.head_dim, width),), np.zeros(width - arch.head_dim, np.float32))
