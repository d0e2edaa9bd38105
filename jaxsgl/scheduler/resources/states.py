"""States as a resource: which steps keep one as a snapshot, so that later requests begin there.

A snapshot is taken

    where prompts part        the cache has pages of a longer prefix than it has a state for: at the end of these pages
    at a prompt's last page   for samples of one prompt, and for prompts that come again
    at a sequence's last page for the next turn of a chat, which begins with this one's prompt and answer

It costs a place only, and is left out where none is free: nothing waits for one. `cache/snapshots.py` keeps the books.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from jaxsgl.batch.build import Work
from jaxsgl.cache.manager import CacheManager
from jaxsgl.cache.pages import IntArray
from jaxsgl.cache.snapshots import Snapshots
from jaxsgl.scheduler.plan import Action, Part
from jaxsgl.scheduler.req import Req
from jaxsgl.scheduler.resources.resource import Resource


class States(Resource):
    """Takes snapshots.

    Args:
      cache: the pool.
      snapshots: its places.
      num_rows: of running requests.

    Attributes:
      epoch: rises as snapshots are dropped, with which the prefixes of waiting requests get shorter.
      borders: `[rows + 1]` int32, where each row's state goes once more in the next decode step that fills a page; the
        dummy row for nowhere. Batches are built with it.
    """

    def __init__(self, cache: CacheManager, snapshots: Snapshots, num_rows: int) -> None:
        self.borders: IntArray = np.full(num_rows + 1, num_rows, np.int32)
        self._cache, self._snapshots, self._dummy = cache, snapshots, num_rows
        self._parting: dict[Req, int] = {}  # tokens up to which the cache had pages, of requests between chunks
        self._taken: list[tuple[Req, int, int]] = []  # request, tokens, place of states that the next step keeps

    def admitted(self, req: Req) -> None:
        """Notes where the request's prompt parts from what is cached."""
        seen = self._cache.peek(req.matchable_ids, req.namespace).num_seen
        self._parting[req] = self._cache.tokens_of(seen)

    def placed(self, work: Work, req: Req) -> Work:
        """Has the chunk begin at the request's snapshot, if it is its first, and keep the states that are wanted."""
        assert req.lease is not None
        stop, last = work.start + len(work.token_ids), self._cache.page_floor(req.extend_to - 1)
        kept = []
        for end in () if req.lease.is_retired else sorted({self._parting.get(req, 0), last}):
            place = self._snapshots.take() if work.start < end <= stop else None
            if place is not None:
                self._taken.append((req, end, place))
                kept.append((end - work.start, place))
        self.epoch = self._snapshots.num_dropped
        return replace(work, state_from=req.lease.source, snapshots=tuple(kept))

    def not_launched(self) -> None:
        """Takes back the places that the step was to fill."""
        for _, _, place in self._taken:
            self._snapshots.give_back(place)
        self._taken.clear()

    def decoding(self, decodes: Sequence[Part]) -> None:
        """Finds places for the states of those that fill a page."""
        for req, count in decodes:
            assert req.lease is not None
            place = self._border(req, self._cache.page_floor(req.kv_len + count))
            self.borders[req.lease.row] = self._dummy if place is None else place

    def placed_decode(self, work: Work, req: Req) -> Work:
        """Likewise for a request that decodes in a step that extends prompts, or verifies its drafts.

        Of drafts that don't stand the end of the page has no state, and the next step to reach it takes its place
        again. No step passes it without: it is the first one that the tokens may fill.
        """
        end = self._cache.page_floor(work.start) + self._cache.tokens_of(1)
        place = self._border(req, end) if end <= work.start + len(work.token_ids) else None
        return work if place is None else replace(work, snapshots=((end - work.start, place),))

    def _border(self, req: Req, end: int) -> int | None:
        """A place for the state at `end`, that of a page, if the request has fewer tokens by now; None for none."""
        assert req.lease is not None
        fills_page = end > req.kv_len and not req.lease.is_retired
        place = self._snapshots.border(req.lease, end) if fills_page else None
        self.epoch = self._snapshots.num_dropped
        return place

    def launched(self, chunks: Sequence[Part]) -> None:
        """What the chunks begin with may be overwritten by later steps."""
        for req, _ in chunks:
            assert req.lease is not None
            self._snapshots.read(req.lease)
            if not req.extend_left:
                self._parting.pop(req, None)

    def carried_out(self, actions: Iterable[Action]) -> None:
        """Gives the states that the step keeps to the prefix cache, whose pages it has by now."""
        for req, num_tokens, place in self._taken:
            assert req.lease is not None
            self._snapshots.keep(req.lease, num_tokens, place)
        self._taken.clear()

    def left(self, req: Req, ends: bool) -> None:
        """Forgets the request; its lease gives back its places."""
        self._parting.pop(req, None)

    def dump(self) -> dict[str, Any]:
        """How many snapshots there are."""
        books = self._snapshots
        return {"snapshots": {"places": books.num_places, "kept": books.num_kept, "dropped_total": books.num_dropped}}
