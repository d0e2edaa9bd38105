"""States of running requests during a step, and after one that verifies drafts.

A state holds all tokens before it, so it can't go back to the drafts that stand. A step that verifies reads through its
states and leaves them as they are, and keeps what its layers made of the tokens:

    forward: states are read  ->  logits, products  ->  tokens that stand  ->  settle: states move over these

The products are small, and going over the tokens again reads and writes the states once. So a state is always that of
tokens that stand, and nothing else knows that there were drafts.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jaxsgl.batch.inputs import StepArrays, StepKind
from jaxsgl.cache.pages import ends_page
from jaxsgl.engine.sampling.sampler import NOT_KEPT
from jaxsgl.engine.state import StateBuffers
from jaxsgl.models import Decoder, ModelArch
from pallas_kernels.delta import delta_decode, delta_extend, delta_run
from pallas_kernels.delta_tokens import Sequences, StateTokens
from pallas_kernels.short_conv import ConvTokens, conv_decode, conv_extend, conv_run

SETTLE_DONATES = (1,)  # states


class Unsettled(NamedTuple):
    """What moves states once it is known which tokens of a step stand.

    Attributes:
      products: of each layer with states, `[T, K', ...]` what it made of the step's tokens.
      seqs: whose tokens these are; of what is kept on the way, what lies after the tokens that stand isn't.
    """

    products: tuple[jax.Array, ...]
    seqs: Sequences


class Running:
    """The states of running requests during one trace: each layer that has some replaces its arrays.

    In a step that verifies drafts the states stay as they are, and `unsettled` has what moves them.
    """

    def __init__(
        self,
        states: StateBuffers,
        arrays: StepArrays[jax.Array],
        kind: StepKind,
        page_size: int,
        dummy_row: int,
        backend: str,
    ) -> None:
        self._layers: list[Any] = states.by_layer()
        self._decode, self._extend, self._run = _operations(states)
        self._arrays, self._kind, self._backend = arrays, kind, backend
        self._products: list[jax.Array] = []
        self._kept_to = None
        if kind == "decode" and arrays.snapshot_to is not None:
            is_kept = ends_page(arrays.positions + 1, page_size) & (arrays.snapshot_to != dummy_row)
            self._kept_to = jnp.where(is_kept, arrays.snapshot_to, -1)

    def recur(self, place: int, tokens: StateTokens | ConvTokens) -> jax.Array:
        """Moves the states of the layer over this step's tokens; `[T, K', r, v]`."""
        a, states = self._arrays, self._layers[place]
        out: jax.Array
        if self._kind == "decode":
            out, self._layers[place] = self._decode(
                tokens, states, a.positions, a.rows, self._kept_to, backend=self._backend
            )
        elif self._kind == "verify":
            tokens = tokens.in_one_part()
            self._products.append(tokens.product)
            out, self._layers[place] = self._run(tokens, states, self._seqs(), moves=False, backend=self._backend)
        else:
            out, self._layers[place] = self._extend(tokens, states, self._seqs(), backend=self._backend)
        return out

    def buffers(self) -> StateBuffers:
        """The states as the layers left them."""
        return StateBuffers.of_layers(self._layers)

    def unsettled(self) -> Unsettled | None:
        """What moves the states of a step that verifies drafts; None: it is another one."""
        return Unsettled(tuple(self._products), self._seqs()) if self._kind == "verify" else None

    def _seqs(self) -> Sequences:
        a = self._arrays
        starts = a.lengths - (a.query_offsets[1:] - a.query_offsets[:-1])
        kept: list[jax.Array | None] = [a.snapshot_at, a.snapshot_to]
        none = jnp.zeros((0, len(a.rows)), jnp.int32)
        at, to = (none if each is None else each for each in kept)
        source = a.rows if a.state_from is None else a.state_from
        return Sequences(a.query_offsets, starts, source, a.rows, at, to)


class SettleProgram:
    """The program that moves states over the tokens of a verify step that stand.

    Called with the leaves of the model's parameters, the states, what is unsettled, and `tokens [T]`: those chosen
    after each place, of which `accept` has marked what no sequence keeps. Returns the states.
    """

    def __init__(self, graphdef: nnx.GraphDef[Decoder], treedef: Any, backend: str) -> None:
        self._graphdef, self._treedef, self._backend = graphdef, treedef, backend

    def __call__(
        self, params: list[jax.Array], states: StateBuffers, unsettled: Unsettled, tokens: jax.Array
    ) -> StateBuffers:
        """See the class."""
        model = nnx.merge(self._graphdef, jax.tree.unflatten(self._treedef, params))
        return _settled(model, states, unsettled, tokens, self._backend)


def _settled(
    model: Decoder, states: StateBuffers, unsettled: Unsettled, tokens: jax.Array, backend: str
) -> StateBuffers:
    """The states after what stands: a sequence keeps one of `tokens [T]` for each of its first places that stand."""
    products, seqs = unsettled
    stand = jnp.cumsum(tokens != NOT_KEPT, dtype=jnp.int32)
    stand = jnp.concatenate([jnp.zeros(1, jnp.int32), stand])
    counts = stand[seqs.query_offsets[1:]] - stand[seqs.query_offsets[:-1]]
    ends = jnp.cumsum(counts, dtype=jnp.int32)
    offsets = jnp.concatenate([jnp.zeros(1, jnp.int32), ends])
    number = jnp.arange(len(tokens), dtype=jnp.int32)
    seq = jnp.minimum(jnp.sum(ends <= number[:, None], axis=1), len(counts) - 1)
    place = jnp.clip(seqs.query_offsets[seq] + number - offsets[seq], 0, len(tokens) - 1)
    kept_at = jnp.where(seqs.kept_at <= counts, seqs.kept_at, 0)
    standing = seqs._replace(query_offsets=offsets, kept_at=kept_at)
    *_, run = _operations(states)
    moved = []
    own = model.state_tokens([product[place] for product in products], seqs.starts)
    for of_layer, before in zip(own, states.by_layer(), strict=True):
        _, after = run(of_layer, before, standing, backend=backend)
        moved.append(after)
    return StateBuffers.of_layers(moved)


def product_of_token(arch: ModelArch, activations: jnp.dtype) -> jax.ShapeDtypeStruct | None:
    """`[K', ...]` what a layer with states makes of a token, on all devices; None: no layer has any."""
    net = arch.recurrent_net
    return None if net is None else jax.ShapeDtypeStruct((net.key_heads, net.token_rows), activations)


def _operations(states: StateBuffers) -> tuple[Any, Any, Any]:
    """What moves the states of such layers over one token of each sequence, over chunks, and over a few tokens."""
    return (delta_decode, delta_extend, delta_run) if states.matrices else (conv_decode, conv_extend, conv_run)
