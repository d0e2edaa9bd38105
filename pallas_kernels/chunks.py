"""Attention within chunks of positions, for kernels that know of none: they get other page tables and lengths.

A query at position p sees the positions from p // chunk * chunk on. Chunks begin where pages do, so what it sees is
what it would see of a sequence that begins with its chunk:

    pages of a sequence     | 7 3 | 9 4 | 2 . |      chunks of two pages
    newest token in page 2          -> a sequence of one page, 2
    last tokens in 4 and 2          -> two sequences: 9 4 with those in 4, and 2 with those in 2

Owns this arithmetic. Never knows how a kernel attends. Called by `api`; XLA computes it once for all layers of a step.
"""

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.options import AttentionOptions
from pallas_kernels.paged_kv import PagedKv


def in_newest_chunk(kv: PagedKv, options: AttentionOptions) -> tuple[PagedKv, AttentionOptions]:
    """For a decode: the cache of the newest token's chunk of each sequence, and the options without chunks.

    Raises:
        ValueError: chunks that don't begin where pages do.
    """
    chunk = _chunk_of(kv, options)
    if chunk is None:
        return kv, _without(options)
    begins = jnp.maximum(kv.lengths - 1, 0) // chunk * chunk
    return _from(kv, begins, kv.lengths - begins, chunk), _without(options)


def split_at_chunks(
    query_offsets: jax.Array, num_tokens: int, kv: PagedKv, options: AttentionOptions
) -> tuple[jax.Array, PagedKv, AttentionOptions]:
    """For an extend of T = `num_tokens`: each sequence becomes a fixed number of sequences, one for each chunk that its
    queries may lie in; returns their offsets and cache, and the options without chunks.

    Those without a query are padding, which may stand between others.

    Raises:
        ValueError: chunks that don't begin where pages do.
    """
    chunk = _chunk_of(kv, options)
    if chunk is None:
        return query_offsets, kv, _without(options)
    most = min(1 + -(-(num_tokens - 1) // chunk), -(-kv.max_len // chunk))
    ends = kv.lengths[:, None]
    first = ends - (query_offsets[1:] - query_offsets[:-1])[:, None]  # position of a sequence's first query
    chunk_begins = first // chunk * chunk + jnp.arange(most, dtype=jnp.int32) * chunk
    begins = jnp.clip(chunk_begins, first, ends)
    counts = jnp.clip(chunk_begins + chunk, first, ends) - begins
    lengths = jnp.where(counts > 0, begins + counts - chunk_begins, 0).reshape(-1)
    offsets = (query_offsets[:-1, None] + begins - first).reshape(-1)
    repeated = dataclasses.replace(kv, page_table=jnp.repeat(kv.page_table, most, axis=0))
    return (
        jnp.append(offsets, query_offsets[-1]),
        _from(repeated, chunk_begins.reshape(-1), lengths, chunk),
        _without(options),
    )


def _chunk_of(kv: PagedKv, options: AttentionOptions) -> int | None:
    """The chunk, unless no sequence is longer."""
    chunk = options.chunk
    if chunk is None or chunk >= kv.max_len:
        return None
    if chunk % kv.page_size:
        raise ValueError(f"chunk is {chunk}; it must be a multiple of the page size, which is {kv.page_size}")
    return chunk


def _from(kv: PagedKv, begins: jax.Array, lengths: jax.Array, chunk: int) -> PagedKv:
    """The cache of sequences that begin at `begins [S]` and have at most `chunk` tokens."""
    pages = (begins // kv.page_size)[:, None] + jnp.arange(chunk // kv.page_size, dtype=jnp.int32)
    table = jnp.take_along_axis(kv.page_table, jnp.minimum(pages, kv.page_table.shape[1] - 1), axis=1)
    return dataclasses.replace(kv, page_table=table, lengths=lengths)


def _without(options: AttentionOptions) -> AttentionOptions:
    return options if options.chunk is None else dataclasses.replace(options, chunk=None)
