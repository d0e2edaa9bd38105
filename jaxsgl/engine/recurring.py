"""Gated delta-nets of a step's layers over the states of running requests, and the snapshots that a step takes.

Called by `step`. Knows the step's arrays and no model.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxsgl.batch.inputs import StepArrays, StepKind
from jaxsgl.cache.pages import ends_page
from jaxsgl.engine.state import StateBuffers
from pallas_kernels.delta import DeltaStates, DeltaTokens, Sequences, delta_decode, delta_extend


class Running:
    """The states of running requests during one trace: each layer that has some replaces its arrays."""

    def __init__(
        self,
        states: StateBuffers,
        arrays: StepArrays[jax.Array],
        kind: StepKind,
        page_size: int,
        dummy_row: int,
        backend: str,
    ) -> None:
        assert kind != "verify", "a state can't go back to the drafts that stand"
        self._layers = [DeltaStates(*arrays_of_layer) for arrays_of_layer in zip(*states, strict=True)]
        self._arrays, self._kind, self._backend = arrays, kind, backend
        self._kept_to = None
        if kind == "decode" and arrays.snapshot_to is not None:
            is_kept = ends_page(arrays.positions + 1, page_size) & (arrays.snapshot_to != dummy_row)
            self._kept_to = jnp.where(is_kept, arrays.snapshot_to, -1)

    def recur(self, place: int, tokens: DeltaTokens) -> jax.Array:
        """Moves the states of the layer over this step's tokens; `[T, K', r, v]`."""
        a, states = self._arrays, self._layers[place]
        if self._kind == "decode":
            out, self._layers[place] = delta_decode(
                tokens, states, a.positions, a.rows, self._kept_to, backend=self._backend
            )
        else:
            starts = a.lengths - (a.query_offsets[1:] - a.query_offsets[:-1])
            kept: list[jax.Array | None] = [a.snapshot_at, a.snapshot_to]
            none = jnp.zeros((0, len(a.rows)), jnp.int32)
            at, to = (none if each is None else each for each in kept)
            source = a.rows if a.state_from is None else a.state_from
            seqs = Sequences(a.query_offsets, starts, source, a.rows, at, to)
            out, self._layers[place] = delta_extend(tokens, states, seqs)
        return out

    def buffers(self) -> StateBuffers:
        """The states as the layers left them."""
        return StateBuffers(*zip(*self._layers, strict=True))
