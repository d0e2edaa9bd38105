"""The rule of Mamba over states that are kept between steps: every number of a state has a decay of its own. In XLA.

A state is `[h, v]` for all channels v together. For each token

    S = exp(-rates step) S;  S = S + k outer (step x);  out = (S^T q + d x) silu(z)

with a step of each channel. Nothing but a product of decays is left of a state after several tokens, so blocks are an
associative scan. `delta.py` calls these for tokens and blocks of 64 tokens; it knows whose they are. Source: Gu and
Dao, arXiv 2312.00752.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.delta_tokens import Heads, SelectiveVectors


def selective_decode(state: jax.Array, heads: Heads, vectors: SelectiveVectors) -> tuple[jax.Array, jax.Array]:
    """What a token of each sequence reads, `[S, 1, 1, v]`, and the states `[S, 1, 1, h, v]` after it."""
    decays, written = _changes(heads, vectors)
    state = state * decays + written
    return _read(state, heads), state


def selective_block(state: jax.Array, heads: Heads, vectors: SelectiveVectors) -> tuple[jax.Array, jax.Array]:
    """What 64 tokens read, `[64, 1, 1, v]`, and the state `[1, 1, h, v]` after them. Zeros change nothing."""
    decays, written = jax.lax.associative_scan(_joined, _changes(heads, vectors))
    states = decays * state + written
    return _read(states, heads), states[-1]


def _changes(heads: Heads, vectors: SelectiveVectors) -> tuple[jax.Array, jax.Array]:
    """What each token leaves of a state, and what it writes, `[T, 1, 1, h, v]`."""
    decays = jnp.exp(-jnp.exp(vectors.rates) * heads.log_decay[..., None, :])
    return decays, heads.k[:, :, None, :, None] * (heads.beta * heads.v)[..., None, :]


def _read(states: jax.Array, heads: Heads) -> jax.Array:
    return (states * heads.q[:, :, None, :, None]).sum(axis=-2)


def _joined(first: tuple[jax.Array, jax.Array], second: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """The changes of tokens and of those after them, as one."""
    return first[0] * second[0], second[0] * first[1] + second[1]
