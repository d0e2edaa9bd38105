"""Drafts from weights: what a drafting model does in a step, and the program that drafts after it.

    forward program          the model, then `Drafting.read`: what drafting needs of each token goes to its page
    tokens are chosen        and, in a verify step, accepted
    draft program            `draft`: a chain of greedy tokens after each sequence's newest one; `StepHandle.drafts`

Everything that a drafter keeps is more layers of the KV pool, a function of the tokens up to its own place: so chunks,
cached prefixes, the host tier and retraction carry it along. What a chain computes is such only if its drafts are
right. It lies after the sequence's last token in the page that this one has begun, which is the request's own, and goes
on in scratch pages of the row. As after a verify step, the next step computes these places again from tokens that
stand, before any of them counts.

The draft program is launched right after the tokens are chosen; the host takes these in while it runs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jaxsgl.batch.inputs import StepArrays, StepKind
from jaxsgl.cache.pages import ends_page, page_of, pages_for, slots_on, tokens_in
from jaxsgl.engine.attending import Pages
from jaxsgl.engine.layer_state import LayerState
from jaxsgl.engine.state import KvBuffers
from jaxsgl.engine.tables import pages_of_seqs
from jaxsgl.models import Attend, Decoder, Params
from pallas_kernels import AttentionOptions, KernelChoice

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


class Seen(NamedTuple):
    """What a forward program shows of its step.

    Attributes:
      model: the model.
      token_ids: `[T]`, as the device knows them.
      hidden: `[T, D]` final hidden states, normalized.
      streams: the residual streams `[T, D]` that are tapped.
      arrays, kind: the step.
      table_SP: pages of its sequences.
      kernels: what it runs on.
    """

    model: Decoder
    token_ids: jax.Array
    hidden: jax.Array
    streams: dict[int, jax.Array]
    arrays: StepArrays[jax.Array]
    kind: StepKind
    table_SP: jax.Array
    kernels: KernelChoice


class Link(NamedTuple):
    """One step of all chains of a draft program.

    Attributes:
      model: the model.
      carried: `[S, ..]` what the step before left, or `begin`.
      tokens, positions: `[S]` the tokens to go on from.
      attend: attends in the drafter's own layers.
      kernels: what it runs on.
    """

    model: Decoder
    carried: jax.Array
    tokens: jax.Array
    positions: jax.Array
    attend: Attend
    kernels: KernelChoice


@dataclass(frozen=True, eq=False, kw_only=True)
class Drafting:
    """Nothing drafts. Others do. Arrays of its methods are those of a trace.

    Attributes:
      params: parameters, or their shapes.
      taps: the residual streams of the model that are read; see `StepContext`.
      num_drafts: k, the tokens of a chain; 0: there are no chains.
      options: of the layers that attend, which come first.
    """

    params: Params = field(default_factory=lambda: nnx.State({}))
    taps: tuple[int, ...] = ()
    num_drafts: int = 0
    options: tuple[AttentionOptions, ...] = ()

    def layers(self, scratch_pages: int) -> tuple[LayerState, ...]:
        """What it keeps by page, and in `scratch_pages` more."""
        return ()

    @cached_property
    def num_layers(self) -> int:
        """The number of them."""
        return len(self.layers(0))

    def read(self, params: Params, seen: Seen, kv: KvBuffers) -> KvBuffers:
        """`kv`, its own layers, with what it needs of the step's tokens."""
        return kv

    def ends(self, arrays: StepArrays[jax.Array], kind: StepKind) -> Ends | None:
        """What chains need of a step's sequences; None: there are no chains."""
        return ends_of(arrays, kind) if self.num_drafts else None

    def begin(self, params: Params, kv: KvBuffers, last_slots: jax.Array) -> jax.Array:
        """What a chain begins with, `[S, ..]`; `last_slots` are of the tokens before each sequence's newest one."""
        raise NotImplementedError("nothing drafts")

    def step(self, params: Params, link: Link) -> tuple[jax.Array, jax.Array]:
        """What the next step begins with, and the likeliest token `[S]` after those of `link`."""
        raise NotImplementedError("nothing drafts")


NO_DRAFTING = Drafting()


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

    @property
    def __name__(self) -> str:
        """Of the compiled program, in profiles."""
        return "draft"

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
        pages_SW = _pages_of_chains(positions, last_slots, scratch.pages(ends.rows), page_size)
        table_SP = _with_pages(table_SP, pages_SW, page_of(positions, page_size))
        carried = drafting.begin(jax.tree.unflatten(self.draft_treedef, draft_leaves), kv, last_slots)

        def one(place: jax.Array, carry: tuple[Any, ...]) -> tuple[Any, ...]:
            kv, carried, tokens, drafts = carry
            # As in `make_decode_steps`: weights are not to be converted before the loop.
            weights, of_drafter, place = jax.lax.optimization_barrier((leaves, draft_leaves, place))
            model = nnx.merge(self.graphdef, jax.tree.unflatten(self.treedef, weights))
            params = jax.tree.unflatten(self.draft_treedef, of_drafter)
            places = _places(positions + place, positions, pages_SW, table_SP, page_size)
            pages = Pages(kv, table_SP, places, "decode", drafting.options, self.kernels)
            link = Link(model, carried, tokens, positions + place, pages.attend, self.kernels)
            carried, tokens = drafting.step(params, link)
            # All k are written: a column alone is a slice of the buffer, at which a GPU's command buffers may end.
            drafts = jnp.where(jnp.arange(drafting.num_drafts) == place, tokens[:, None], drafts)
            return pages.buffers(), carried, tokens, drafts

        none = jnp.zeros((len(positions), drafting.num_drafts), jnp.int32)
        first = kv, carried, last_tokens[ends.rows], none
        kv, _, _, drafts = jax.lax.fori_loop(0, drafting.num_drafts, one, first)
        return kv, drafts


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
        per_row = _scratch_of_row(num_drafts, page_size)
        return cls(num_pages - (num_rows + 1) * per_row, per_row, page_size)

    def pages(self, rows: jax.Array) -> jax.Array:
        """`[S, W]`."""
        return self.first + rows[:, None] * self.per_row + jnp.arange(self.per_row, dtype=jnp.int32)


def scratch_pages(num_rows: int, num_drafts: int, page_size: int) -> int:
    """How many there are for so many rows and the dummy row."""
    return (num_rows + 1) * _scratch_of_row(num_drafts, page_size)


def _scratch_of_row(num_drafts: int, page_size: int) -> int:
    """The most pages that a chain fills or begins: what of it lies in a page that is begun needs none."""
    return pages_for(num_drafts, page_size)


class _ChainPlaces(NamedTuple):
    """Where the tokens of one step of all chains lie; see `Places`."""

    slots: jax.Array
    lengths: jax.Array
    query_offsets: jax.Array
    positions: jax.Array
    seen: None = None


def _places(
    positions: jax.Array, starts: jax.Array, pages_SW: jax.Array, table_SP: jax.Array, page_size: int
) -> _ChainPlaces:
    """Those of tokens at `positions [S]` of chains that began at `starts [S]`."""
    place = page_of(positions, page_size) - page_of(starts, page_size)
    page = jnp.take_along_axis(pages_SW, place[:, None], axis=1)[:, 0]
    lengths = jnp.minimum(positions + 1, tokens_in(table_SP.shape[1], page_size))
    offsets = jnp.arange(len(positions) + 1, dtype=jnp.int32)
    return _ChainPlaces(slots_on(page, positions, page_size), lengths, offsets, positions)


def slots_of_positions(table_SP: jax.Array, positions: jax.Array, page_size: int) -> jax.Array:
    """`[S]` the slots of a token of each sequence."""
    pages = jnp.take_along_axis(table_SP, page_of(positions, page_size)[:, None], axis=1)[:, 0]
    return slots_on(pages, positions, page_size)


def _pages_of_chains(starts: jax.Array, last_slots: jax.Array, scratch_SW: jax.Array, page_size: int) -> jax.Array:
    """`[S, W + 1]` the pages of chains from `starts [S]` on, after tokens at `last_slots [S]`."""
    begun = jnp.concatenate([page_of(last_slots, page_size)[:, None], scratch_SW], axis=1)
    new = jnp.concatenate([scratch_SW, scratch_SW[:, -1:]], axis=1)  # no chain reaches the last one
    return jnp.where(ends_page(starts, page_size)[:, None], new, begun)


def _with_pages(table_SP: jax.Array, pages_SW: jax.Array, first_page: jax.Array) -> jax.Array:
    """The table with these pages from `first_page [S]` on, as far as it reaches."""
    places = first_page[:, None] + jnp.arange(pages_SW.shape[1], dtype=jnp.int32)
    return table_SP.at[jnp.arange(len(table_SP))[:, None], places].set(pages_SW, mode="drop")


def own_layers(kv: KvBuffers, drafting: Drafting) -> KvBuffers:
    """The layers of `drafting`, which come last."""
    num_layers = len(kv.k) - drafting.num_layers
    return KvBuffers(kv.k[num_layers:], kv.v[num_layers:])


def with_own_layers(kv: KvBuffers, own: KvBuffers) -> KvBuffers:
    """`kv` with these as its last layers."""
    return kv._replace(k=kv.k[: len(kv.k) - len(own.k)] + own.k, v=kv.v[: len(kv.v) - len(own.v)] + own.v)
