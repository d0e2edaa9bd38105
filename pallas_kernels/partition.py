"""How attention is cut for a chip: an extend into query tiles, a decode into items of KV tiles that are merged again.

Owns the table of query tiles, the list of a decode's items and the chains that programs take them in. Never knows how a
tile or an item is computed, how items are merged, or how a page is read. Called by the Pallas backends.

Items follow Flash-Decoding (Dao, Haziza, Massa, Sizov, 2023). A program per (sequence, kv head) leaves most of a chip
idle while the batch is small, and waits for its longest sequence while it isn't, so long sequences are cut into splits:
parts of the KV. Every split yields a softmax of its own, and a second pass weighs them by their log-sum-exp. How many
items there may be follows from shapes, since it is the grid of a compiled program; how long they are follows from the
batch's real lengths, on the device, so that the width of the page table decides nothing.

Chains follow guided self-scheduling (Polychronopoulos, Kuck, 1987): a program that begins takes as many items as make
up its share of the work that is left. So few programs begin while much is left, and the last ones are short.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.options import AttentionOptions
from pallas_kernels.paged_kv import PagedKv
from pallas_kernels.target import target_device

# Columns of the table of query tiles: a tile's sequence, its first token, the token after its last, and the position of
# the first token. Of the items of a decode: sequence, first KV tile, the tile after the last, position of the query,
# number among the items of the sequence.
SEQUENCE, BEGIN, END, POSITION, SPLIT = range(5)

# The merge is unrolled over the splits of a sequence, so their number is bounded: by this, or by twice what fills the
# chip with sequences of one length if that is more ...
_MAX_SPLITS = 8
# ... and by this many times as many programs as run at once, beyond which merging costs more than it saves.
_MAX_WAVES = 8

# Tokens of a split in fixed order: those between two multiples. Tiles of all kernels divide it.
FIXED_SPLIT_TOKENS = 1024

# Items that are added up by comparing all pairs; splits in fixed order may be far more.
_MOST_COMPARED = 4096
# A chain in fixed point: an item takes a part of it.
_CHAIN = 1 << 16
# The last chains need not become shorter than this part of an even share of the work.
_SHORTEST_CHAIN = 4

# `lse` of a row that has seen nothing. Finite, so that the difference of two of them is 0 and not NaN.
EMPTY_LSE = -1e30

# Scores times this are the exponents of 2 that kernels compute with.
LOG2_E = math.log2(math.e)


def query_tiles(
    lengths: jax.Array, query_offsets: jax.Array, num_tokens: int, tile_queries: int, align: int = 1
) -> jax.Array:
    """Cut ragged queries into tiles of at most tile_queries tokens of one sequence; `[num_tiles, 4]` int32, see above.

    A tile's tokens lie among the tile_queries tokens from the multiple of `align` at or before its first one; only a
    sequence's first tile may begin between two multiples. `align` divides tile_queries.

    The table is computed on the device; XLA computes it once for all layers of a step, since it depends on lengths and
    offsets alone.

    Tiles lie in the order of their tokens. Padding tokens, from query_offsets[S] on, become tiles without KV (position
    -num_tokens or below), so that their output gets written. The number of tiles is an upper bound; those at the end
    that don't exist hold no tokens.
    """
    num_seqs = lengths.shape[0]
    ends = jnp.append(query_offsets[1:], jnp.int32(num_tokens))
    counts = ends - query_offsets
    first_positions = jnp.append(lengths, -num_tokens) - counts
    before = query_offsets % align  # tokens of others in a sequence's first tile
    num_tiles = jnp.where(counts > 0, (before + counts + tile_queries - 1) // tile_queries, 0)
    tiles_end = jnp.cumsum(num_tiles)
    most = -(-(num_tokens + (align - 1) * (num_seqs + 1)) // tile_queries) + num_seqs + 1
    tile = jnp.arange(most, dtype=jnp.int32)
    seq = jnp.minimum(jnp.sum(tile[:, None] >= tiles_end, axis=1), num_seqs)
    first = (query_offsets - before)[seq] + (tile - (tiles_end - num_tiles)[seq]) * tile_queries
    begin = jnp.maximum(first, query_offsets[seq])
    end = jnp.minimum(first + tile_queries, ends[seq])
    position = first_positions[seq] + begin - query_offsets[seq]
    return jnp.stack([jnp.minimum(seq, num_seqs - 1), begin, end, position], 1).astype(jnp.int32)


@dataclasses.dataclass(frozen=True)
class SplitPlan:
    """What shapes and chip fix about the items of a decode."""

    num_items: int
    """I, the items that there may be: the grid beside the kv heads. As many as sequences where none is split."""
    max_splits: int
    """The most items that one sequence is cut into; 1 means that each item is a whole sequence: no second pass."""
    items_at_once: int
    """The items of a kv head that fill the chip."""
    min_tiles: int
    """The fewest KV tiles that a split should hold."""
    tile_tokens: int
    """Tokens of a KV tile."""
    is_fixed: bool = False
    """Whether splits lie between multiples of `min_tiles`, whatever the batch."""

    @property
    def is_chained(self) -> bool:
        """Whether a program may take several items; with no more than two rounds of them each would take one."""
        return self.num_items > 2 * self.items_at_once

    @property
    def num_chains(self) -> int:
        """C, the chains that there may be, which `chain_items` explains."""
        # A chain holds at least half of the share that is due to it, which begins as an even one and shrinks
        # exponentially, down to the shortest.
        most = 2 * self.items_at_once * (1 + math.log(_SHORTEST_CHAIN))
        return min(self.num_items, math.floor(most) + 2)


def plan_splits(
    kv: PagedKv, options: AttentionOptions, blocks: Mapping[str, int], programs_per_item: int = 1
) -> SplitPlan:
    """The plan for a decode of `kv` on the target device, where so many programs share an item of a kv head.

    `blocks` are the kernel's sizes: tile_tokens, min_split_tokens, the fewest tokens that a split should hold, and
    programs_per_core, how many programs a core runs at once.
    """
    programs_at_once = target_device().num_cores * blocks["programs_per_core"]
    items_at_once = max(1, programs_at_once // (kv.num_kv_heads * programs_per_item))
    if options.in_fixed_order:
        whole = -(-kv.max_len // FIXED_SPLIT_TOKENS)
        # A window may begin and end inside of splits.
        most = min(whole, -(-options.longest_view(kv.max_len) // FIXED_SPLIT_TOKENS) + 1)
        tile_tokens = blocks["tile_tokens"]
        assert FIXED_SPLIT_TOKENS % tile_tokens == 0, f"tiles have {tile_tokens} tokens: splits must hold whole ones"
        return SplitPlan(
            kv.num_seqs * most, most, items_at_once, FIXED_SPLIT_TOKENS // tile_tokens, tile_tokens, is_fixed=True
        )
    possible = max(1, options.longest_view(kv.max_len) // blocks["min_split_tokens"])
    max_splits = min(possible, most_splits(kv.num_seqs, items_at_once))
    num_items = min(kv.num_seqs * max_splits, kv.num_seqs + items_at_once)
    min_tiles = max(1, blocks["min_split_tokens"] // blocks["tile_tokens"])
    return SplitPlan(num_items, max_splits, items_at_once, min_tiles, blocks["tile_tokens"])


def most_splits(num_seqs: int, items_at_once: int) -> int:
    """The most splits of a sequence that may pay for their merge, where items_at_once items of a kv head fill the chip.

    1 if the sequences alone fill the chip several times: then the long ones begin first, and that must do.
    """
    evenly = -(-items_at_once // num_seqs)
    return max(1, min(items_at_once, max(_MAX_SPLITS, 2 * evenly), _MAX_WAVES * items_at_once // num_seqs))


class Splits(NamedTuple):
    """The items of a decode, computed on the device.

    XLA computes them once for all layers of a step, since they depend on the lengths alone.
    """

    items: jax.Array
    """`[I, 5]` int32, see above; items that don't exist come last and hold no tiles."""
    counts: jax.Array
    """`[S]` items of each sequence: none of a padding row, except where no sequence is split."""


def split_sequences(plan: SplitPlan, lengths: jax.Array, options: AttentionOptions) -> Splits:
    """Cut sequences of `lengths [S]` into items, as even as the batch allows.

    An item holds about as many tiles as all sequences have together over the number of items that fill the chip, so
    only sequences longer than that are cut, each into equal parts. The largest items come first: those that begin last
    are then the shortest, and so is the time in which a part of the chip has nothing to do.

    In fixed order an item holds what a sequence has between two multiples of `min_tiles`, and the longest sequences
    come first.
    """
    last = lengths - 1
    first_tile = options.first_visible(last) // plan.tile_tokens
    tiles = jnp.where(lengths > 0, last // plan.tile_tokens - first_tile + 1, 0)
    num_seqs = lengths.shape[0]
    if plan.max_splits == 1:
        size, count = tiles, jnp.ones_like(tiles)
    elif plan.is_fixed:
        size, count = tiles, -(-(first_tile + tiles) // plan.min_tiles) - first_tile // plan.min_tiles
    else:
        even = -(-jnp.sum(tiles) // plan.items_at_once)
        parts = -(-tiles // jnp.maximum(even, plan.min_tiles))
        size = -(-tiles // jnp.clip(parts, 1, plan.max_splits))
        count = -(-tiles // jnp.maximum(size, 1))
    # Sums over comparisons and not sorts, which a GPU runs as several kernels.
    seq = jnp.arange(num_seqs, dtype=jnp.int32)
    comes_before = (size > size[:, None]) | ((size == size[:, None]) & (seq < seq[:, None]))
    first_item = jnp.sum(jnp.where(comes_before, count, 0), axis=1)
    number = jnp.arange(plan.num_items, dtype=jnp.int32)[:, None] - first_item  # [I, S] of an item in its sequence
    is_mine = (number >= 0) & (number < count)
    if plan.is_fixed and plan.max_splits > 1:
        multiple = (first_tile // plan.min_tiles + number) * plan.min_tiles
        begin = jnp.maximum(first_tile, multiple)
        end = jnp.minimum(multiple + plan.min_tiles, first_tile + tiles)
    else:
        begin = first_tile + number * size
        end = jnp.minimum(begin + size, first_tile + tiles)
    columns = [jnp.broadcast_to(column, is_mine.shape) for column in (seq, begin, end, last, number)]
    items = jnp.sum(jnp.where(is_mine[..., None], jnp.stack(columns, axis=-1), 0), axis=1)
    return Splits(items.astype(jnp.int32), count)


def chain_items(plan: SplitPlan, splits: Splits) -> jax.Array:
    """Give the items to chains, each of which one program computes: chain c has items [c] to [c + 1] of the `[C + 1]`.

    Items are in their order, the largest first. A chain gets the share of one of `items_at_once` programs in what the
    items before have left over, and never more than its last item beyond that; a tile is added to each item for its
    beginning and end. Chains that aren't needed come last and are empty. XLA computes this once for all layers of a
    step.
    """
    exists = jnp.arange(plan.num_items) < jnp.sum(splits.counts)
    cost = jnp.where(exists, splits.items[:, END] - splits.items[:, BEGIN] + 1, 0)
    before = _sums_before(cost)
    work = before[-1] + cost[-1]
    left = jnp.maximum((work - before) * _SHORTEST_CHAIN, work)
    share = -(-left // (plan.items_at_once * _SHORTEST_CHAIN))
    fit = jnp.maximum(share // jnp.maximum(cost, 1), 1)  # items like this one that the chain would hold
    begins = _sums_before(jnp.where(exists, -(-_CHAIN // fit), 0))
    chain = jnp.arange(plan.num_chains + 1, dtype=jnp.int32)[:, None]
    return jnp.sum((begins < chain * _CHAIN) & exists, axis=1, dtype=jnp.int32)


def _sums_before(values: jax.Array) -> jax.Array:
    """For each value of `[I]` the sum of those before it; of few by comparisons, which a GPU runs as one kernel."""
    if values.shape[0] > _MOST_COMPARED:
        return jnp.cumsum(values, dtype=values.dtype) - values
    place = jnp.arange(values.shape[0])
    return jnp.sum(jnp.where(place < place[:, None], values, 0), axis=1)
