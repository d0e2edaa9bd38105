"""Depthwise and causal convolutions over a few tokens, whose last inputs are kept between steps. In XLA.

A place keeps what the convolution has read of a sequence's last tokens, `[taps, K, C]`, that of position p in slot p
modulo taps: so a token writes one slot, and reads others. `delta.py` convolves so before it moves states, and
`short_conv.py` does nothing else.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.delta_tokens import Sequences


def convolve_decode(
    mixed: jax.Array,
    taps: jax.Array,
    inputs: jax.Array,
    positions: jax.Array,
    place: jax.Array,
    kept_to: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """One token of each of S sequences, `mixed [S, K, C]` convolved with `taps [K, C, taps]`, and the kept inputs.

    `inputs [P, taps, K, C]` are read and written at `place [S]`, and written at `kept_to [S]` besides where that is not
    -1; the tokens are at `positions [S]`.
    """
    num_taps = taps.shape[-1]
    is_slot = _like_slots(positions[:, None] % num_taps == jnp.arange(num_taps))
    # All slots are written, so that XLA reads them before: it would copy the kept arrays.
    slots = jnp.where(is_slot, mixed.astype(jnp.float32)[:, None], inputs[place])
    window = _in_order(slots, positions[:, None] + jnp.arange(1 - num_taps, 1))
    convolved = (window * jnp.moveaxis(taps, -1, 0)).sum(axis=1)
    if kept_to is None:
        return convolved, inputs.at[place].set(slots, mode="promise_in_bounds")
    # Without a loop over those that are kept, which the host of a GPU would step.
    places = jnp.concatenate([place, jnp.where(kept_to < 0, len(inputs), kept_to)])
    return convolved, inputs.at[places].set(jnp.concatenate([slots, slots]), mode="drop")


def convolve_extend(
    mixed: jax.Array, taps: jax.Array, inputs: jax.Array, seqs: Sequences
) -> tuple[jax.Array, jax.Array]:
    """The same of all tokens of a step, `mixed [T, K, C]`: the inputs are kept as `seqs` says. Padding is any."""
    offsets, mixed = seqs.query_offsets, mixed.astype(jnp.float32)
    counts = offsets[1:] - offsets[:-1]
    seq_of = jnp.minimum(
        jnp.searchsorted(offsets[1:], jnp.arange(len(mixed)), side="right", method="compare_all"), len(counts) - 1
    )
    before = _in_order(inputs[seqs.source], seqs.starts[:, None] + jnp.arange(1 - taps.shape[-1], 0))
    return _convolved(mixed, taps, before, seq_of, offsets), _kept(mixed, before, inputs, seqs)


def kept_inputs(mixed: jax.Array, inputs: jax.Array, seqs: Sequences) -> jax.Array:
    """What `convolve_extend` keeps, of tokens that something else convolves."""
    before = _in_order(inputs[seqs.source], seqs.starts[:, None] + jnp.arange(1 - inputs.shape[1], 0))
    return _kept(mixed.astype(jnp.float32), before, inputs, seqs)


def _kept(mixed: jax.Array, before: jax.Array, inputs: jax.Array, seqs: Sequences) -> jax.Array:
    """The kept inputs after tokens `mixed [T, K, C]`, whose sequences go on from `before [S, taps - 1, K, C]`."""
    offsets = seqs.query_offsets
    counts = offsets[1:] - offsets[:-1]
    for at, to in ((counts, seqs.place), *zip(seqs.kept_at, seqs.kept_to, strict=True)):
        last = _in_slots(_last_inputs(mixed, before, offsets, at), seqs.starts + at)
        inputs = inputs.at[to].set(last, mode="promise_in_bounds")
    return inputs


def _convolved(
    mixed: jax.Array, taps: jax.Array, before: jax.Array, seq_of: jax.Array, offsets: jax.Array
) -> jax.Array:
    """`[T, K, C]` the convolution of `mixed [T, K, C]`, whose sequences go on from `before [S, taps - 1, K, C]`."""
    num_taps = taps.shape[-1]
    place = jnp.arange(len(mixed)) - offsets[seq_of]  # in its sequence's chunk
    out = mixed * taps[..., -1]
    for back in range(1, num_taps):
        shifted = jnp.pad(mixed, ((back, 0), (0, 0), (0, 0)))[: len(mixed)]  # there may be fewer tokens than taps
        early = before[seq_of, jnp.clip(num_taps - 1 - back + place, 0, num_taps - 2)]
        out = out + jnp.where((place >= back)[:, None, None], shifted, early) * taps[..., -1 - back]
    return out


def _in_order(slots: jax.Array, positions: jax.Array) -> jax.Array:
    """`[S, n, K, C]` the inputs of the tokens at `positions [S, n]`, of `slots [S, taps, K, C]`; zeros before 0."""
    return jnp.where(_like_slots(positions >= 0), _picked(slots, positions), 0.0)


def _picked(slots: jax.Array, numbers: jax.Array) -> jax.Array:
    """`[S, n, K, C]` the slots that `numbers [S, n]` modulo taps name, by choices: a gather would be a kernel."""
    num_taps = slots.shape[1]
    found = slots[:, :1]
    for number in range(1, num_taps):
        found = jnp.where(_like_slots(numbers % num_taps == number), slots[:, number : number + 1], found)
    return jnp.broadcast_to(found, (*numbers.shape, *slots.shape[2:]))


def _like_slots(x: jax.Array) -> jax.Array:
    return x[..., None, None]


def _in_slots(last: jax.Array, ends: jax.Array) -> jax.Array:
    """The inputs `[S, taps, K, C]` of the last tokens before positions `ends [S]`, oldest first, in their slots."""
    return _picked(last, jnp.arange(last.shape[1]) - ends[:, None])


def _last_inputs(mixed: jax.Array, before: jax.Array, offsets: jax.Array, counts: jax.Array) -> jax.Array:
    """`[S, taps, K, C]` what the convolution has read of a sequence's last tokens, after `counts [S]` in this step."""
    early = before.shape[1]
    place = counts[:, None] - early - 1 + jnp.arange(early + 1)  # [S, taps], below 0 in `before`
    seqs = jnp.arange(len(counts))[:, None]
    of_before = before[seqs, jnp.clip(early + place, 0, early - 1)]
    late = mixed[jnp.clip(offsets[:-1, None] + place, 0, len(mixed) - 1)]
    return jnp.where((place >= 0)[..., None, None], late, of_before)
