"""How attention is cut for a chip: an extend into query tiles, the KV of a decode into splits that are merged again.

Owns the table of query tiles, how many splits there are, which KV tiles each of them covers, and the merge of their
partial outputs. Never knows how a tile or a split is computed or how a page is read. Called by the Pallas backends.

Splits follow Flash-Decoding (Dao, Haziza, Massa, Sizov, 2023). A program per (sequence, kv head) leaves most of a chip
idle while the batch is small, so a third axis is added: parts of the KV. Every part yields a softmax of its own,
and a second pass weighs them by their log-sum-exp.
"""

import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from pallas_kernels.options import AttentionOptions
from pallas_kernels.paged_kv import PagedKv
from pallas_kernels.target import target_device

# Columns of the table of query tiles: a tile's sequence, its first token, the token after its last, and the position of
# the first token.
SEQUENCE, BEGIN, END, POSITION = range(4)

# Fewer splits are taken as long as they fill the chip to this share of the best that any number of splits reaches.
_GOOD_FILLING = 0.85
# What one program should read at most, so that one long sequence among short ones doesn't hold up the whole batch ...
_LONG_SPLIT_TOKENS = 4096
# ... as long as there are at most this many times as many programs as run at once (most of them are empty then).
_MAX_WAVES = 8
_MAX_SPLITS = 64

# `lse` of a split without tokens. Finite, so that the difference of two of them is 0 and not NaN.
EMPTY_LSE = -1e30


def query_tiles(lengths: jax.Array, query_offsets: jax.Array, num_tokens: int, tile_queries: int) -> jax.Array:
    """Cut ragged queries into tiles of at most tile_queries tokens of one sequence; `[num_tiles, 4]` int32, see above.

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
    num_tiles = (counts + tile_queries - 1) // tile_queries
    tiles_end = jnp.cumsum(num_tiles)
    tile = jnp.arange(-(-num_tokens // tile_queries) + num_seqs + 1, dtype=jnp.int32)
    seq = jnp.minimum(jnp.sum(tile[:, None] >= tiles_end, axis=1), num_seqs)
    done = (tile - (tiles_end - num_tiles)[seq]) * tile_queries
    begin = query_offsets[seq] + done
    end = jnp.minimum(begin + tile_queries, ends[seq])
    return jnp.stack([jnp.minimum(seq, num_seqs - 1), begin, end, first_positions[seq] + done], 1).astype(jnp.int32)


def num_splits_of(kv: PagedKv, options: AttentionOptions, blocks: Mapping[str, int]) -> int:
    """How many splits a decode of `kv` has on the target device.

    `blocks` are the kernel's sizes: min_split_tokens, the fewest tokens that a split should hold, and
    programs_per_core, how many programs a core runs at once.
    """
    return choose_num_splits(
        kv.num_seqs,
        kv.num_kv_heads,
        options.longest_view(kv.max_len),
        min_tokens=blocks["min_split_tokens"],
        programs_at_once=target_device().num_cores * blocks["programs_per_core"],
    )


def choose_num_splits(
    num_seqs: int, num_kv_heads: int, longest_kv: int, *, min_tokens: int, programs_at_once: int
) -> int:
    """How many splits to cut every sequence into, from shapes alone.

    `longest_kv` is the most tokens that any sequence can have in view (P * page_size, or the window if that is less);
    `min_tokens` what a split should at least hold; `programs_at_once` how many programs the chip runs concurrently.
    The fewest splits whose last wave of programs is about as full as any number of splits could make it; more where a
    single program would have too much to read. 1 means: no second pass.
    """
    num_programs = num_seqs * num_kv_heads
    most = min(_MAX_SPLITS, max(1, longest_kv // min_tokens))

    def filling(num_splits: int) -> float:
        """The share of the chip that is busy, over all waves of equally long programs."""
        waves = -(-num_programs * num_splits // programs_at_once)
        return num_programs * num_splits / (waves * programs_at_once)

    best = max(filling(n) for n in range(1, most + 1))
    fewest = next(n for n in range(1, most + 1) if filling(n) >= _GOOD_FILLING * best)
    for_long_ones = min(-(-longest_kv // _LONG_SPLIT_TOKENS), _MAX_WAVES * programs_at_once // num_programs)
    return min(most, max(fewest, for_long_ones))


def split_tiles(
    kv_range: tuple[jax.Array, jax.Array], split: jax.Array, num_splits: int, tile_tokens: int
) -> tuple[jax.Array, jax.Array]:
    """First tile of a split and the tile after its last, for a sequence whose KV in view is first..last, inclusive.

    The tiles of tile_tokens that touch the range are dealt evenly by the sequence's real length. Begin >= end means
    that the split holds nothing, as for all splits of a padding row, whose last is -1.
    """
    first, last = kv_range
    begin = first // tile_tokens
    end = (last + tile_tokens) // tile_tokens
    per_split = (end - begin + num_splits - 1) // num_splits
    split_begin = begin + split * per_split
    return split_begin, jnp.minimum(split_begin + per_split, end)


def merge_splits(partials: jax.Array, lse: jax.Array) -> jax.Array:
    """The attention over all splits, float32 `[S, N, H]`.

    Args:
        partials: float32 `[splits, S, N, H]`, each split's own softmax-weighted sum of V. Not read where a split holds
            nothing, so that a kernel may leave it unwritten there.
        lse: float32 `[splits, S, N]`, the base-2 logarithm of each split's sum of 2 ** score, where the scores are
            those of the softmax times log2(e); `EMPTY_LSE` for a split that holds nothing. A sequence of such
            splits alone (a padding row) yields zeros.
    """
    # Written out over the splits, not as reductions: XLA then makes one elementwise kernel of it, or two.
    num_splits = partials.shape[0]
    top = functools.reduce(jnp.maximum, [lse[split] for split in range(num_splits)])
    total, merged = jnp.zeros_like(top), jnp.zeros_like(partials[0])
    for split in range(num_splits):
        is_empty = lse[split] <= EMPTY_LSE
        weight = jnp.where(is_empty, 0.0, jnp.exp2(lse[split] - top))
        total += weight
        merged += weight[..., None] * jnp.where(is_empty[..., None], 0.0, partials[split])
    # Where anything is seen the total is at least 1, the weight of the top split.
    return merged / jnp.maximum(total, 1.0)[..., None]
