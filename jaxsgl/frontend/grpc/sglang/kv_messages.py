"""Our cache events as SGLang's messages: batches of events, and snapshots of all that is cached cut into chunks.

A block is a page of our KV cache. Pure functions; kv_log.py calls them.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence

from smg_grpc_proto.generated import common_pb2

from jaxsgl.messages import CacheCleared, CacheEvent, PagesRemoved, PagesStored

CHUNK_BLOCKS = 1024  # about 100 KB; gateways take messages of up to 4 MiB


def batch_of(events: Sequence[CacheEvent], number: int, event_ids: Iterator[int]) -> common_pb2.KvEventBatch:
    """The batch `number`."""
    converted = [_event(event, event_id) for event, event_id in zip(events, event_ids, strict=False)]
    return common_pb2.KvEventBatch(sequence_number=number, timestamp=time.time(), events=converted, dp_rank=0)


def num_blocks(batch: common_pb2.KvEventBatch) -> int:
    """Blocks that a batch tells of."""
    return sum(len(event.stored.blocks) + len(event.removed.block_hashes) for event in batch.events)


def snapshot_chunks(
    stored: Sequence[PagesStored], last: int, chunk_blocks: int = CHUNK_BLOCKS
) -> list[common_pb2.KvEventBatch]:
    """All that is cached, as chunks whose numbers end at `last`; if that is 0 they start at 1.

    Args:
      stored: parents before children.
      last: the number of the last batch that `stored` includes. There are at most as many chunks.
      chunk_blocks: blocks in a chunk at most, unless `last` asks for larger ones.
    """
    total = sum(len(event.hashes) for event in stored)
    if last:
        chunk_blocks = max(chunk_blocks, -(-total // last))
    groups: list[list[CacheEvent]] = list(_groups(stored, chunk_blocks)) or [[]]
    groups[0].insert(0, CacheCleared())
    first = last - len(groups) + 1 if last else 1
    chunks = [batch_of(group, number, itertools.repeat(0)) for number, group in enumerate(groups, first)]
    for index, chunk in enumerate(chunks):
        chunk.snapshot.CopyFrom(common_pb2.KvSnapshotChunk(index=index, count=len(chunks), blocks=total))
    return chunks


def _groups(stored: Sequence[PagesStored], size: int) -> Iterator[list[CacheEvent]]:
    """The same pages in groups of `size`, and the last one of what is left."""
    group: list[CacheEvent] = []
    room = size
    for event in stored:
        start = 0
        while start < len(event.hashes):
            count = min(room, len(event.hashes) - start)
            group.append(_part(event, start, start + count))
            start += count
            room -= count
            if not room:
                yield group
                group, room = [], size
    if group:
        yield group


def _part(event: PagesStored, start: int, stop: int) -> PagesStored:
    """Its pages from `start` to `stop`."""
    tokens_each = len(event.token_ids) // len(event.hashes)
    token_ids = event.token_ids[start * tokens_each : stop * tokens_each]
    return PagesStored(event.hashes[start:stop], token_ids, event.hashes[start - 1] if start else event.parent)


def _event(event: CacheEvent, event_id: int) -> common_pb2.KvCacheEvent:
    match event:
        case PagesStored():
            return common_pb2.KvCacheEvent(event_id=event_id, stored=_stored(event))
        case PagesRemoved(hashes):
            removed = common_pb2.KvBlocksRemoved(block_hashes=hashes)
            return common_pb2.KvCacheEvent(event_id=event_id, removed=removed)
        case CacheCleared():
            return common_pb2.KvCacheEvent(event_id=event_id, cleared=common_pb2.KvCacheCleared())


def _stored(event: PagesStored) -> common_pb2.KvBlocksStored:
    size = len(event.token_ids) // len(event.hashes)
    blocks = [
        common_pb2.KvBlock(block_hash=name, token_ids=event.token_ids[i * size : (i + 1) * size], block_size=size)
        for i, name in enumerate(event.hashes)
    ]
    return common_pb2.KvBlocksStored(blocks=blocks, parent_block_hash=event.parent)
