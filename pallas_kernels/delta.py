"""The gated delta rule over states that are kept between steps, and the convolution before it; in XLA, but for what a
backend has. And Mamba-2, whose rule is the same without the correction; a rule whose states decay by channel; and
Mamba (`selective.py`).

A state is a matrix `[h, v]` for each value head, and the last inputs of the convolution. For each token

    S = a S;  S = S + k outer (b (v - S^T k));  out = rms_norm(S^T q) w silu(z)    of a gated delta-net
    S = a S;  S = S + k outer (b v);            out = rms_norm((S^T q + d v) silu(z)) w    of Mamba-2

a is one number of a value head, or in `ChannelTokens` one for each row of S, and then z has a sigmoid.

`delta_decode` does that for one token of each sequence. `delta_extend` takes blocks of 64 tokens, in which a unit
triangular system gives the corrected values of all tokens at once, and moves the state by one product a block. Blocks
lie at absolute positions, multiples of 64, and are computed one after the other in one loop: so a block's numbers
depend neither on chunks nor on what else is in a step. Sequences of one token in such a step, as those that decode in
mixed steps, take no block: all of them are decoded at once.

`delta_run` takes runs of a few tokens, and may leave the states as they are: drafts are verified so.

All read and write places of the kept arrays in place, if the program owns these. A sequence that begins at position 0
begins with a state of zeros, whatever its place holds.

Sources: Yang et al., arXiv 2412.06464 (the chunked form); Dao and Gu, arXiv 2405.21060 (Mamba-2); Kimi Linear (arXiv
2510.26692, decays by channel).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from pallas_kernels.backend import DeltaScan
from pallas_kernels.convolution import convolve_decode, convolve_extend, kept_inputs
from pallas_kernels.delta_tokens import (
    BLOCK,
    ChannelTokens,
    Heads,
    SelectiveTokens,
    Sequences,
    Solved,
    SolvedByChannel,
    StateTokens,
)
from pallas_kernels.dispatch import choose_kernel_or_xla, refusals_of
from pallas_kernels.selective import selective_block, selective_decode
from pallas_kernels.target import target_device

_DIRECT = 8  # rows of a part that is inverted row by row


class DeltaStates(NamedTuple):
    """The kept states of one layer.

    Attributes:
      matrices: `[P, K, r, h, v]` float32, of P places, K key heads and r value heads of each.
      inputs: `[P, taps, K, C]` float32, what the convolution has read of the last tokens (`convolution.py`).
    """

    matrices: jax.Array
    inputs: jax.Array


def delta_decode(
    tokens: StateTokens,
    states: DeltaStates,
    positions: jax.Array,
    place: jax.Array,
    kept_to: jax.Array | None = None,
    *,
    backend: str = "auto",
    interpret: bool = False,
) -> tuple[jax.Array, DeltaStates]:
    """What each of S sequences reads from its state after one token more, `[S, K, r, v]`, and the states.

    `positions [S]` are the tokens'; states are at `place [S]`, and go to `kept_to [S]` besides where that is not -1.
    `backend` has the op, or is "auto" or "xla"; `interpret` runs a Pallas one in its interpreter. Raises `ValueError`
    for one that can't run here.
    """
    scan = _scan(tokens, states, backend, interpret)
    if scan is not None:
        to = jnp.full_like(place, -1) if kept_to is None else kept_to
        seqs = Sequences(jnp.arange(len(place) + 1), positions, place, place, (to >= 0)[None], to[None])
        out, *after = scan(tokens, *states, seqs, interpret)
        return out, DeltaStates(*after)
    kernel = choose_kernel_or_xla(
        "delta_decode", lambda each: each.delta_step, backend, tokens, states.matrices, interpret=interpret
    )
    if kernel is not None:
        to = jnp.full_like(place, -1) if kept_to is None else kept_to
        out, *after = kernel(tokens, *states, positions, place, to, interpret)
        return tokens.finished(out), DeltaStates(*after)
    convolved, inputs = convolve_decode(tokens.mixed, tokens.taps, states.inputs, positions, place)
    heads = tokens.heads(_activated(tokens, convolved))
    states = states._replace(inputs=inputs)
    read, states = _decoded(heads, states, place, positions > 0, kept_to, tokens)
    return tokens.gated(read, heads.v), states


def _decoded(
    heads: Heads,
    states: DeltaStates,
    place: jax.Array,
    has_state: jax.Array,
    kept_to: jax.Array | None,
    tokens: StateTokens,
) -> tuple[jax.Array, DeltaStates]:
    """`delta_decode` of matrices in XLA; the inputs are those after the token, and are copied to `kept_to`, too."""
    read, state = _moved(_or_zeros(has_state, states.matrices[place]), heads, tokens)
    after = states._replace(matrices=states.matrices.at[place].set(state, mode="promise_in_bounds"))
    return read, after if kept_to is None else _copied(after, place, kept_to)


def _moved(state: jax.Array, heads: Heads, tokens: StateTokens) -> tuple[jax.Array, jax.Array]:
    """What a token of each sequence reads, `[S, K, r, v]`, and the states `[S, K, r, h, v]` after it."""
    if isinstance(tokens, SelectiveTokens):
        return selective_decode(state, heads, tokens.vectors)
    state = state * jnp.exp(heads.log_decay)[..., None]
    k, q = heads.k[:, :, None, :, None], heads.q[:, :, None, :, None]
    values = heads.v - (state * k).sum(axis=-2) if tokens.corrects else heads.v
    state = state + k * (values * heads.beta[..., None])[..., None, :]
    return (state * q).sum(axis=-2), state


def _scan(tokens: StateTokens, states: DeltaStates, backend: str, interpret: bool) -> DeltaScan | None:
    """The kernel that goes through all tokens of a step, if the backend, or "auto", has one."""
    if backend not in ("auto", *refusals_of(lambda each: each.delta_scan, tokens, *states)):
        return None
    return choose_kernel_or_xla(
        "delta_decode", lambda each: each.delta_scan, backend, tokens, *states, interpret=interpret
    )


def _activated(tokens: StateTokens, convolved: jax.Array) -> jax.Array:
    """What `tokens.heads` takes, of `convolved [T, K, C]`."""
    return jax.nn.silu(convolved if tokens.bias is None else convolved + tokens.bias)


def _copied(states: DeltaStates, place: jax.Array, to: jax.Array) -> DeltaStates:
    """The states with those at `place [S]` also at `to [S]`, where that is not -1; costs nothing where none is."""
    first = jnp.argsort(to < 0, stable=True)  # sequences whose states are copied come first

    def one(i: jax.Array, states: DeltaStates) -> DeltaStates:
        s = first[i]
        return DeltaStates(*(
            jax.lax.dynamic_update_index_in_dim(each, each.at[place[s]].get(mode="promise_in_bounds"), to[s], 0)
            for each in states
        ))  # fmt: skip

    copied: DeltaStates = jax.lax.fori_loop(0, (to >= 0).sum(), one, states)
    return copied


def delta_extend(
    tokens: StateTokens, states: DeltaStates, seqs: Sequences, *, backend: str = "auto", interpret: bool = False
) -> tuple[jax.Array, DeltaStates]:
    """What each token reads from its sequence's state, `[T, K, r, v]` (any for padding), and the states.

    `backend` and `interpret` are those of `delta_decode`. A backend that goes through blocks may round factors of
    products to bfloat16 where that is the tokens' dtype.
    """
    scan = _scan(tokens, states, backend, interpret)
    if scan is not None:
        read, *after = scan(tokens, *states, seqs, interpret)
        return read, DeltaStates(*after)
    if isinstance(tokens, SelectiveTokens) and (ran := _ran(tokens, states, seqs, backend, interpret)) is not None:
        return ran
    kernel = choose_kernel_or_xla(
        "delta_decode", lambda each: each.delta_decode, backend, tokens, states.matrices, interpret=interpret
    )
    of_blocks = choose_kernel_or_xla(
        "delta_decode", lambda each: each.delta_blocks, backend, tokens, states.matrices, interpret=interpret
    )
    num_tokens, offsets = tokens.num_tokens, seqs.query_offsets
    counts = offsets[1:] - offsets[:-1]
    convolved, inputs = convolve_extend(tokens.mixed, tokens.taps, states.inputs, seqs)
    heads = tokens.heads(_activated(tokens, convolved))
    states = DeltaStates(states.matrices, inputs)
    is_alone = (counts == 1) & ((seqs.source == seqs.place) | (seqs.starts == 0))
    blocks = _Blocks.of(seqs, jnp.where(is_alone, 0, counts), num_tokens)
    padded = Heads(*map(_between_blocks, heads))
    out = jnp.zeros((num_tokens + 2 * BLOCK, *heads.v.shape[1:]), jnp.float32)

    def decode(states: DeltaStates, out: jax.Array) -> tuple[DeltaStates, jax.Array]:
        mine = _of_tokens_alone(heads, seqs, is_alone)
        kept_to = jnp.where(is_alone & (seqs.kept_at == 1), seqs.kept_to, -1).max(axis=0, initial=-1)
        has_state = ~is_alone | (seqs.starts > 0)
        if kernel is None:
            read, states = _decoded(mine, states, seqs.place, has_state, kept_to, tokens)
        else:
            log_decay = mine.log_decay if isinstance(tokens, ChannelTokens) else mine.log_decay[..., 0]
            each = mine.q, mine.k, mine.v, jnp.exp(log_decay), mine.beta
            read, matrices = kernel(*each, states.matrices, seqs.place, has_state, kept_to, tokens.corrects, interpret)
            states = states._replace(matrices=matrices)
        at = jnp.where(is_alone, offsets[:-1] + BLOCK, len(out))
        return states, out.at[at].set(read, mode="drop")

    if of_blocks is None:
        # A loop of one turn or none, as others here: XLA leaves the arrays in place.
        count = is_alone.any().astype(jnp.int32)
        states, out = jax.lax.fori_loop(0, count, lambda _, carry: decode(*carry), (states, out))
        matrices, out = _looped(padded, states.matrices, out, seqs, blocks, tokens)
    else:
        states, out = decode(states, out)
        factors = jnp.dtype(jnp.bfloat16 if tokens.dtype == jnp.bfloat16 else jnp.float32)
        given = _given(padded, blocks, tokens, factors)
        out, matrices = of_blocks(*given, states.matrices, out, seqs, blocks.counts, interpret)
    return tokens.gated(out[BLOCK:-BLOCK], heads.v), states._replace(matrices=matrices)


def delta_run(
    tokens: StateTokens,
    states: DeltaStates,
    seqs: Sequences,
    *,
    moves: bool = True,
    backend: str = "auto",
    interpret: bool = False,
) -> tuple[jax.Array, DeltaStates]:
    """`delta_extend` of sequences that have few tokens each; the states stay as they are unless it `moves` them.

    A backend goes from token to token, where blocks of 64 would be of padding, most of them.
    """
    seqs_of_kernel = seqs if moves else seqs.nowhere()
    scan = _scan(tokens, states, backend, interpret)
    if scan is not None:
        read, *after = scan(tokens, *states, seqs_of_kernel, interpret)
        return read, DeltaStates(*after)
    if (ran := _ran(tokens, states, seqs_of_kernel, backend, interpret, moves=moves)) is not None:
        return ran
    if moves:
        return delta_extend(tokens, states, seqs, backend=backend, interpret=interpret)
    # No sooner than the product: else all layers' copies are made at once, and are in memory together.
    source, product = jax.lax.optimization_barrier((seqs.source, tokens.product))
    copies = DeltaStates(*(each.at[source].get(mode="promise_in_bounds") for each in states))
    tokens = replace(tokens, product=product)
    read, _ = delta_extend(tokens, copies, seqs.apart(), backend=backend, interpret=interpret)
    return read, states


def _ran(
    tokens: StateTokens, states: DeltaStates, seqs: Sequences, backend: str, interpret: bool, *, moves: bool = True
) -> tuple[jax.Array, DeltaStates] | None:
    """What the backend's kernel for runs makes of these tokens, or None if the backend has no such kernel."""
    kernel = choose_kernel_or_xla(
        "delta_decode", lambda each: each.delta_run, backend, tokens, states.matrices, interpret=interpret
    )
    if kernel is None:
        return None
    read, matrices = kernel(tokens, *states, seqs, interpret)
    inputs = kept_inputs(tokens.mixed, states.inputs, seqs) if moves else states.inputs
    return tokens.finished(read), DeltaStates(matrices, inputs)


def _looped(
    padded: Heads, matrices: jax.Array, out: jax.Array, seqs: Sequences, blocks: _Blocks, tokens: StateTokens
) -> tuple[jax.Array, jax.Array]:
    """All blocks in XLA's loop: the states after them, and `out` with what their tokens read."""

    def one(block: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        matrices, out = carry
        seq, index = blocks.seq[block], blocks.index[block]
        first = blocks.first_token(block) + BLOCK  # in the padded arrays
        is_mine = blocks.is_mine(block)
        place = seqs.place[seq]
        source = jnp.where(index == 0, seqs.source[seq], place)
        has_state = (index > 0) | (seqs.starts[seq] > 0)
        state = _loaded(matrices, source, has_state, tokens.corrects)
        mine = (jnp.where(_like(is_mine, part), part, 0.0) for part in (_cut(each, first) for each in padded))
        read, state = _block(state, Heads(*mine), tokens)
        kept = _cut(out, first)
        out = jax.lax.dynamic_update_slice_in_dim(out, jnp.where(_like(is_mine, read), read, kept), first, 0)
        matrices = jax.lax.dynamic_update_index_in_dim(matrices, state, place, 0)
        for at, to in zip(seqs.kept_at, seqs.kept_to, strict=True):
            matrices = _written(matrices, state, to[seq], at[seq] == blocks.end(block))
        return matrices, out

    looped: tuple[jax.Array, jax.Array] = jax.lax.fori_loop(0, blocks.count, one, (matrices, out))
    return looped


def _given(
    padded: Heads, blocks: _Blocks, tokens: StateTokens, factors: jnp.dtype
) -> tuple[Heads | None, Solved | SolvedByChannel | None]:
    """What a kernel of blocks takes of the tokens, with factors of products in their dtype."""

    def of_all(what: Callable[[Heads], tuple[jax.Array, ...]]) -> tuple[jax.Array, ...]:
        def one(block: jax.Array) -> tuple[jax.Array, ...]:
            is_mine = blocks.is_mine(block) & (block < blocks.count)
            mine = (jnp.where(_like(is_mine, part), part, 0.0) for part in (
                _cut(each, blocks.first_token(block) + BLOCK) for each in padded
            ))  # fmt: skip
            return what(Heads(*mine))

        return jax.vmap(one)(jnp.arange(len(blocks.seq)))

    if isinstance(tokens, ChannelTokens):
        values, decay, *others = of_all(_of_channels)
        keys, queries, scores, left = (each.astype(factors) for each in others)
        return None, SolvedByChannel(Solved(values, keys, blocks.first), queries, scores, left, decay)
    solved: Solved | None = None
    if tokens.corrects:
        values, keys = of_all(_corrected)
        solved = Solved(values, keys.astype(factors), blocks.first)
    rounded = padded._replace(**{name: getattr(padded, name).astype(factors) for name in ("q", "k", "v")})
    return rounded._replace(log_decay=padded.log_decay[..., 0]), solved


def _of_channels(heads: Heads) -> tuple[jax.Array, ...]:
    """Of `SolvedByChannel` values, the decay, keys, queries, scores, and what is left of keys."""
    total = _totals(heads)
    q, k = (_of_key_heads(each) for each in (heads.q, heads.k))
    last = total[..., -1:, :]
    values, keys = _corrected(heads)
    decay, found = jnp.exp(last[..., 0, :]), _found(q, k, total)
    return values, decay, keys, q * jnp.exp(total), found, k * jnp.exp(last - total)


def _of_tokens_alone(heads: Heads, seqs: Sequences, is_alone: jax.Array) -> Heads:
    """The tokens `[S, ...]` of sequences that have one; of the others what leaves their states as they are."""
    token = jnp.minimum(seqs.query_offsets[:-1], len(heads.q) - 1)
    mine = Heads(*(each[token] for each in heads))
    return mine._replace(log_decay=_or_zeros(is_alone, mine.log_decay), beta=_or_zeros(is_alone, mine.beta))


def _loaded(matrices: jax.Array, place: jax.Array, has_state: jax.Array, corrects: bool) -> jax.Array:
    """The state `[K, r, h, v]` at a place; zeros unless `has_state`."""
    if corrects or target_device().platform != "cpu":
        return jnp.where(has_state, matrices.at[place].get(mode="promise_in_bounds"), 0.0)

    # What writes a state is no reader of all that read it before, where nothing is corrected: XLA's fusions of a CPU,
    # which read it twice, would then have it copy all states.
    def load(_: jax.Array, state: jax.Array) -> jax.Array:
        return matrices.at[place].get(mode="promise_in_bounds")

    state: jax.Array = jax.lax.fori_loop(0, has_state.astype(jnp.int32), load, jnp.zeros_like(matrices[0]))
    return state


def _written(matrices: jax.Array, state: jax.Array, place: jax.Array, is_due: jax.Array) -> jax.Array:
    """`matrices` with `state` at a place, if that is due."""

    def write(_: jax.Array, matrices: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_index_in_dim(matrices, state, place, 0)

    written: jax.Array = jax.lax.fori_loop(0, is_due.astype(jnp.int32), write, matrices)
    return written


@dataclass(frozen=True)
class _Blocks:
    """Which tokens are in which block. Blocks of a sequence follow each other, as sequences do.

    Attributes:
      count: of all blocks, int32.
      seq: `[B]` the sequence of each.
      index: `[B]` which of its sequence's blocks it is.
      first: `[S]` the first block of each sequence.
      starts, offsets, counts: `[S]` of sequences: first position, first token, tokens.
    """

    count: jax.Array
    seq: jax.Array
    index: jax.Array
    first: jax.Array
    starts: jax.Array
    offsets: jax.Array
    counts: jax.Array

    @classmethod
    def of(cls, seqs: Sequences, counts: jax.Array, num_tokens: int) -> _Blocks:
        num_seqs = len(counts)
        most = min(num_tokens, num_tokens // BLOCK + 2 * num_seqs)
        num_blocks = jnp.where(counts > 0, -(-(seqs.starts % BLOCK + counts) // BLOCK), 0)
        ends = jnp.cumsum(num_blocks)
        numbers = jnp.arange(most)
        seq = jnp.minimum(jnp.searchsorted(ends, numbers, side="right", method="compare_all"), num_seqs - 1)
        index = numbers - (ends - num_blocks)[seq]
        return cls(ends[-1], seq, index, ends - num_blocks, seqs.starts, seqs.query_offsets[:-1], counts)

    def first_token(self, block: jax.Array) -> jax.Array:
        """The token at the block's first position; below its sequence's first one if that lies inside the block."""
        seq, start = self.seq[block], self.starts[self.seq[block]]
        return self.offsets[seq] + (start // BLOCK + self.index[block]) * BLOCK - start

    def end(self, block: jax.Array) -> jax.Array:
        """How many of its sequence's tokens in this step the block ends after."""
        seq = self.seq[block]
        return jnp.minimum(self.first_token(block) + BLOCK - self.offsets[seq], self.counts[seq])

    def is_mine(self, block: jax.Array) -> jax.Array:
        """`[64]` whether a token from `first_token` on belongs to the block's sequence."""
        place = self.first_token(block) - self.offsets[self.seq[block]] + jnp.arange(BLOCK)
        return (place >= 0) & (place < self.counts[self.seq[block]])


def _block(state: jax.Array, heads: Heads, tokens: StateTokens) -> tuple[jax.Array, jax.Array]:
    """What 64 tokens read, `[64, K, r, v]`, and the state `[K, r, h, v]` after them. Zeros change nothing."""
    if isinstance(tokens, SelectiveTokens):
        return selective_block(state, heads, tokens.vectors)
    total = _totals(heads)
    q, k = (_of_key_heads(each) for each in (heads.q, heads.k))
    left = jnp.exp(total[..., -1:, :] - total)
    if tokens.corrects:
        values, keys = _corrected(heads)
        written = values - _dot("krah,krhv->krav", keys, state)
    else:
        written = jnp.moveaxis(heads.beta, 0, -1)[..., None] * jnp.moveaxis(heads.v, 0, 2)
    read = _dot("krah,krhv->krav", q * jnp.exp(total), state)
    read = read + _dot("krab,krbv->krav", _found(q, k, total), written)
    state = state * jnp.exp(total[..., -1, :])[..., None] + _dot("krah,krav->krhv", k * left, written)
    return jnp.moveaxis(read, 2, 0), state


def _corrected(heads: Heads) -> tuple[jax.Array, jax.Array]:
    """What 64 tokens write after a state of zeros, `[K, r, 64, v]`, and what of another is less: see `Solved`."""
    total, k = _totals(heads), _of_key_heads(heads.k)
    beta, v = jnp.moveaxis(heads.beta, 0, -1)[..., None], jnp.moveaxis(heads.v, 0, 2)
    is_before = jnp.tri(BLOCK, k=-1, dtype=bool)
    system = jnp.where(is_before, beta * _found(k, k, total), 0.0)
    known = jnp.concatenate([beta * v, beta * k * jnp.exp(total)], axis=-1)
    values, keys = jnp.split(_dot("krab,krbc->krac", _inverse(system), known), (v.shape[-1],), axis=-1)
    return values, keys


def _totals(heads: Heads) -> jax.Array:
    """`[K, r, 64, 1 or h]` of log a from the block's first token on."""
    return jnp.moveaxis(jnp.cumsum(heads.log_decay, axis=0), 0, 2)


def _found(x: jax.Array, k: jax.Array, total: jax.Array) -> jax.Array:
    """`[K, r, 64, 64]` what rows of `x [K, 1, 64, h]` find of each key, as much as is left of it; 0 of later ones."""
    if total.shape[-1] == 1:
        return _dot("kiah,kibh->kiab", x, k) * _since(total[..., 0])
    return _found_by_channel(x, k, total)


def _since(total: jax.Array) -> jax.Array:
    """`[..., n, n]` how much of what one of n tokens wrote is left at a later one; 0 at earlier ones."""
    lower = jnp.tri(total.shape[-1], dtype=bool)
    return jnp.exp(jnp.where(lower, total[..., :, None] - total[..., None, :], -jnp.inf))


def _found_by_channel(x: jax.Array, k: jax.Array, total: jax.Array) -> jax.Array:
    """`_found` where each number of a key decays by itself.

    What is left cannot be multiplied after the product, and the factors before it, exp(total) and exp(-total), may be
    too large. So the block is halved, and its halves again, down to parts of 8: what a later half finds of the earlier
    one is a product of x and k, both as they have decayed to where the halves meet, where no factor exceeds 1. Within a
    part there are few pairs, and each has its own factors.
    """

    def parts(each: jax.Array, size: int) -> jax.Array:
        return jnp.broadcast_to(each, total.shape).reshape(*total.shape[:2], BLOCK // size, size, total.shape[-1])

    x_parts, k_parts, totals = (parts(each, _DIRECT) for each in (x, k, total))
    left = jnp.moveaxis(_since(jnp.moveaxis(totals, -1, -2)), -3, -1)  # [K, r, parts, 8, 8, h]
    found = (x_parts[..., :, None, :] * k_parts[..., None, :, :] * left).sum(axis=-1)
    size = _DIRECT
    while size < BLOCK:
        totals = parts(total, size)
        before, after = totals[:, :, 0::2], totals[:, :, 1::2]
        meet = after[..., :1, :]  # after the later half's first token
        of_x, of_k = parts(x, size)[:, :, 1::2] * jnp.exp(after - meet), parts(k, size)[:, :, 0::2]
        far = _dot("krpah,krpbh->krpab", of_x, of_k * jnp.exp(meet - before))
        found = _joined(found[:, :, 0::2], far, found[:, :, 1::2])
        size *= 2
    return found[:, :, 0]


def _joined(first: jax.Array, corner: jax.Array, second: jax.Array) -> jax.Array:
    """Lower triangular matrices of two halves, and what stands between them, as one of twice the size."""
    above = jnp.concatenate([first, jnp.zeros_like(first)], axis=-1)
    return jnp.concatenate([above, jnp.concatenate([corner, second], axis=-1)], axis=-2)


def _of_key_heads(x: jax.Array) -> jax.Array:
    """`[K, 1, 64, h]`."""
    return jnp.moveaxis(x, 0, 1)[:, None]


def _inverse(system: jax.Array) -> jax.Array:
    """The inverse of I + `system [K, r, 64, 64]`, which is strictly lower triangular.

    Small parts on the diagonal are inverted row by row, then pairs of parts are joined by products. XLA's
    `triangular_solve` is LAPACK's on a CPU, whose calls wait for each other where several devices share the threads:
    for ever, if each of them is in such a call.
    """

    def cut(row: int, column: int, size: int) -> jax.Array:
        return system[..., row * size : (row + 1) * size, column * size : (column + 1) * size]

    size, unit = _DIRECT, jnp.eye(_DIRECT)
    parts = jnp.stack([cut(i, i, size) for i in range(BLOCK // size)], axis=2)  # [K, r, 64 / size, size, size]
    rows = jnp.broadcast_to(unit[:1], (*parts.shape[:3], 1, size))
    for i in range(1, size):
        row = unit[i] - (parts[..., i, :i, None] * rows).sum(axis=-2)
        rows = jnp.concatenate([rows, row[..., None, :]], axis=-2)
    while size < BLOCK:
        first, second = rows[:, :, 0::2], rows[:, :, 1::2]
        between = jnp.stack([cut(2 * i + 1, 2 * i, size) for i in range(BLOCK // size // 2)], axis=2)
        corner = -_dot("krpab,krpbc->krpac", second, _dot("krpab,krpbc->krpac", between, first))
        rows = _joined(first, corner, second)
        size *= 2
    return rows[:, :, 0]


def _dot(axes: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """A product in float32 with all of its bits, whatever the device would rather do."""
    return jnp.einsum(axes, a, b, precision="highest")


def _between_blocks(x: jax.Array) -> jax.Array:
    """`x [T, ...]` with a block of zeros on both sides, so that a block may reach over its tokens."""
    return jnp.pad(x, ((BLOCK, BLOCK), *((0, 0) for _ in x.shape[1:])))


def _cut(x: jax.Array, first: ArrayLike) -> jax.Array:
    part: jax.Array = jax.lax.dynamic_slice_in_dim(x, first, BLOCK, 0)
    return part


def _like(mask: jax.Array, x: jax.Array) -> jax.Array:
    """A mask of leading rows, for all of `x`."""
    return mask.reshape(len(mask), *(1 for _ in x.shape[1:]))


def _or_zeros(mask: jax.Array, x: Any) -> jax.Array:
    """Rows of `x` where the mask holds, else zeros."""
    return jnp.where(_like(mask, x), x, 0.0)
