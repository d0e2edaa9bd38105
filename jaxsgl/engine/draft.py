"""Drafts from weights: what a drafting model does in a step, and the program that drafts after it.

    forward program          the model, then `Drafting.read`: what drafting needs of each token goes to its page
    tokens are chosen        and, in a verify step, accepted
    draft program            `draft`: a chain of greedy tokens after each sequence's newest one; `StepHandle.drafts`

Everything that a drafter keeps is more layers of the KV pool, a function of the tokens up to its own place: so chunks,
cached prefixes, the host tier and retraction carry it along. What a chain computes is such only if its drafts are
right, so it goes to scratch pages of the row: a copy of the sequence's last page, and as many more as the chain may
reach. The next step computes these places again from tokens that stand.

The draft program is launched right after the tokens are chosen; the host takes these in while it runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from jaxsgl.batch.inputs import StepArrays, StepKind
from jaxsgl.cache.pages import page_of, pages_for, slots_on, tokens_in
from jaxsgl.engine.layer_state import LayerState
from jaxsgl.engine.state import KvBuffers
from jaxsgl.engine.tables import pages_of_seqs
from jaxsgl.models import Decoder, Params
from pallas_kernels import AttentionOptions, FusedQkv, KernelChoice, PagedKv, store_and_decode

DRAFT_DONATES = (2,)  # kv


class Ends(NamedTuple):
    """Where the sequences of a step end, for the draft program; C are choices, as in `Bucket.num_choices`.

    Attributes:
      rows: `[S]` row of each sequence, the dummy row for padding and where no token is kept.
      choice_rows: `[C]` row of each chosen token's sequence.
      positions: `[C]` position of each chosen token.
    """

    rows: jax.Array
    choice_rows: jax.Array
    positions: jax.Array


def ends_of(arrays: StepArrays[jax.Array], kind: StepKind) -> Ends:
    """Those of a step."""
    if kind != "verify":
        return Ends(arrays.sample_rows, arrays.sample_rows, arrays.lengths)
    assert arrays.token_rows is not None
    return Ends(arrays.sample_rows, arrays.token_rows, arrays.positions + 1)


class Attending(Protocol):
    """Stores the keys and values of a token of each sequence in a layer of the drafter, and attends; `[S, N, H]`."""

    def __call__(self, layer: int, qkv: FusedQkv, options: AttentionOptions, /) -> jax.Array:
        """`layer` counts the drafter's own."""
        ...


class Drafting(Protocol):
    """A model that drafts. Arrays of its methods are those of a trace."""

    @property
    def taps(self) -> tuple[int, ...]:
        """The residual streams of the model that it reads; see `Decoder.__call__`."""
        ...

    @property
    def params(self) -> Params:
        """Its parameters, or their shapes."""
        ...

    @property
    def num_drafts(self) -> int:
        """k, the tokens of a chain."""
        ...

    def layers(self, scratch_pages: int) -> tuple[LayerState, ...]:
        """What it keeps by page, and in `scratch_pages` more."""
        ...

    def read(
        self,
        params: Params,
        model: Decoder,
        token_ids: jax.Array,
        streams: dict[int, jax.Array],
        arrays: StepArrays[jax.Array],
        kind: StepKind,
        kv: KvBuffers,
        table_SP: jax.Array,
        kernels: KernelChoice,
    ) -> KvBuffers:
        """`kv`, its own layers, with what it needs of the step's tokens."""
        ...

    def begin(self, params: Params, kv: KvBuffers, last_slots: jax.Array) -> jax.Array:
        """What a chain begins with, `[S, ..]`; `last_slots` are of the tokens before each sequence's newest one."""
        ...

    def step(
        self,
        params: Params,
        model: Decoder,
        carried: jax.Array,
        tokens: jax.Array,
        positions: jax.Array,
        attend: Attending,
        kernels: KernelChoice,
    ) -> tuple[jax.Array, jax.Array]:
        """What the next step begins with, and the likeliest token after `tokens [S]` at `positions [S]`."""
        ...


@dataclass(frozen=True, eq=False)
class DraftProgram:
    """Makes the draft program of a drafter and its model.

    Attributes:
      drafting: the drafter.
      graphdef, treedef: structure of the model and its parameters.
      draft_treedef: structure of the drafter's.
      kernels: what its attention runs on.
    """

    drafting: Drafting
    graphdef: nnx.GraphDef[Decoder]
    treedef: Any
    draft_treedef: Any
    kernels: KernelChoice

    def __call__(
        self,
        leaves: list[jax.Array],
        draft_leaves: list[jax.Array],
        kv: KvBuffers,
        page_table: jax.Array,
        last_tokens: jax.Array,
        tokens: jax.Array,
        ends: Ends,
    ) -> tuple[KvBuffers, jax.Array]:
        """`(kv, drafts [S, k])` after `tokens [C]`, those that were chosen, where -1 is not kept.

        `kv` are the drafter's layers; the newest token of each sequence is in `last_tokens`.
        """
        drafting = self.drafting
        dummy_row, page_size = len(last_tokens) - 1, kv.k[0].shape[2]
        newest = jnp.zeros_like(last_tokens).at[ends.choice_rows].max(jnp.where(tokens >= 0, ends.positions, 0))
        positions = jnp.where(ends.rows == dummy_row, 0, newest[ends.rows])
        table_SP = pages_of_seqs(page_table, ends.rows, positions, page_size)
        before = jnp.maximum(positions - 1, 0)
        last_slots = slots_of_positions(table_SP, before, page_size)
        scratch = Scratch.of(kv.k[0].shape[0], dummy_row, drafting.num_drafts, page_size)
        pages_SW = scratch.pages(ends.rows)
        sources = table_SP[
            jnp.arange(len(positions)), jnp.minimum(page_of(positions, page_size), table_SP.shape[1] - 1)
        ]
        kv = _copied(kv, sources, pages_SW[:, 0])
        table_SP = _with_scratch(table_SP, pages_SW, page_of(positions, page_size))
        carried = drafting.begin(jax.tree.unflatten(self.draft_treedef, draft_leaves), kv, last_slots)

        def one(carry: tuple[Any, ...], place: jax.Array) -> tuple[tuple[Any, ...], jax.Array]:
            kv, carried, tokens = carry
            # As in `make_decode_steps`: weights are not to be converted before the loop.
            weights, of_drafter, place = jax.lax.optimization_barrier((leaves, draft_leaves, place))
            model = nnx.merge(self.graphdef, jax.tree.unflatten(self.treedef, weights))
            params = jax.tree.unflatten(self.draft_treedef, of_drafter)
            pages = _ChainPages(kv, table_SP, positions + place, scratch, pages_SW, positions, self.kernels)
            carried, tokens = drafting.step(
                params, model, carried, tokens, positions + place, pages.attend, self.kernels
            )
            return (pages.buffers(), carried, tokens), tokens

        first = kv, carried, last_tokens[ends.rows]
        (kv, _, _), drafts = jax.lax.scan(one, first, jnp.arange(drafting.num_drafts))
        return kv, drafts.T


@dataclass(frozen=True)
class Scratch:
    """The pages where chains lie, after those of the pool: W for each row.

    Attributes:
      first: the first of them.
      per_row: W.
      page_size: tokens of each.
    """

    first: int
    per_row: int
    page_size: int

    @classmethod
    def of(cls, num_pages: int, num_rows: int, num_drafts: int, page_size: int) -> Scratch:
        """Those of an array of `num_pages` pages in all."""
        per_row = _pages_of_chain(num_drafts, page_size)
        return cls(num_pages - (num_rows + 1) * per_row, per_row, page_size)

    def pages(self, rows: jax.Array) -> jax.Array:
        """`[S, W]`."""
        return self.first + rows[:, None] * self.per_row + jnp.arange(self.per_row, dtype=jnp.int32)


def scratch_pages(num_rows: int, num_drafts: int, page_size: int) -> int:
    """How many there are for so many rows and the dummy row."""
    return (num_rows + 1) * _pages_of_chain(num_drafts, page_size)


def _pages_of_chain(num_drafts: int, page_size: int) -> int:
    """The most pages that a chain reaches: it may begin at the end of its first one."""
    return pages_for(page_size - 1 + num_drafts, page_size)


class _ChainPages:
    """The drafter's layers at one step of all chains."""

    def __init__(
        self,
        kv: KvBuffers,
        table_SP: jax.Array,
        positions: jax.Array,
        scratch: Scratch,
        pages_SW: jax.Array,
        starts: jax.Array,
        kernels: KernelChoice,
    ) -> None:
        page_size = scratch.page_size
        self._k, self._v = list(kv.k), list(kv.v)
        self._table, self._kernels = table_SP, kernels
        self._lengths = jnp.minimum(positions + 1, tokens_in(table_SP.shape[1], page_size))
        place = page_of(positions, page_size) - page_of(starts, page_size)
        page = jnp.take_along_axis(pages_SW, place[:, None], axis=1)[:, 0]
        self._slots = slots_on(page, positions, page_size)

    def attend(self, layer: int, qkv: FusedQkv, options: AttentionOptions) -> jax.Array:
        """See `Attending`."""
        paged = PagedKv(self._k[layer], self._v[layer], self._table, self._lengths)
        out, kv = store_and_decode(
            qkv, paged, self._slots, options, None, backend=self._kernels.store_and_decode, parts=self._kernels
        )
        self._k[layer], self._v[layer] = kv.k, kv.v
        return kv.kept(qkv.num_kv_heads).own_numbers(out, qkv.head_dim)

    def buffers(self) -> KvBuffers:
        """The layers as the step left them."""
        return KvBuffers(tuple(self._k), tuple(self._v))


def slots_of_positions(table_SP: jax.Array, positions: jax.Array, page_size: int) -> jax.Array:
    """`[S]` the slots of a token of each sequence."""
    pages = jnp.take_along_axis(table_SP, page_of(positions, page_size)[:, None], axis=1)[:, 0]
    return slots_on(pages, positions, page_size)


def _copied(kv: KvBuffers, sources: jax.Array, targets: jax.Array) -> KvBuffers:
    """The layers that have scratch pages, with pages `sources [S]` at `targets [S]`."""
    longest = max(len(array) for array in kv.k)

    def copied(array: jax.Array) -> jax.Array:
        return array.at[targets].set(array[sources], mode="promise_in_bounds") if len(array) == longest else array

    return KvBuffers(tuple(map(copied, kv.k)), tuple(map(copied, kv.v)))


def _with_scratch(table_SP: jax.Array, pages_SW: jax.Array, first_page: jax.Array) -> jax.Array:
    """The table with scratch pages from `first_page [S]` on, as far as it reaches."""
    places = first_page[:, None] + jnp.arange(pages_SW.shape[1], dtype=jnp.int32)
    return table_SP.at[jnp.arange(len(table_SP))[:, None], places].set(pages_SW, mode="drop")


def own_layers(kv: KvBuffers, num_layers: int) -> KvBuffers:
    """The layers after the model's `num_layers`."""
    return KvBuffers(kv.k[num_layers:], kv.v[num_layers:])


def with_own_layers(kv: KvBuffers, num_layers: int, own: KvBuffers) -> KvBuffers:
    """`kv` with these in their places."""
    return KvBuffers(kv.k[:num_layers] + own.k, kv.v[:num_layers] + own.v)
