"""Snapshots: states that are kept at places of the prefix tree, for models whose layers keep states by row.

A state holds all tokens before it, so a cached prefix is of use up to the deepest snapshot on its path, and matches end
there (`SnapshotCache`). Pages beyond are kept: they tell where prompts part. `Snapshots` hands out the places: each one
is free, in one node of the tree, or a border of one lease, the state of a running sequence at a page border. Taking one
where none is free drops the snapshot that was unused for longest, but none that a request just admitted is to read.
Borders have at most half of all places: however many sequences run, the rest stays for prefixes.

A place that came free may be handed out at once: steps run in order, and the step that reads it is launched already.
Owns places and their order of use; knows no requests. `manager.py` calls it.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from typing import cast

import numpy as np

from jaxsgl.cache.manager import SnapshotBooks
from jaxsgl.cache.pages import IntArray, Lease, full_pages
from jaxsgl.cache.prefix import NO_PAGES, Insertion, Match, Peek
from jaxsgl.cache.radix import Node, RadixCache

BORDERS = 2  # of a lease: the newest may lie beyond what the sequence turns out to have


class SnapshotCache(RadixCache):
    """The tree, in which matches end at snapshots.

    Attributes:
      free: places that nothing uses.
    """

    def __init__(self, page_size: int, first: int, count: int) -> None:
        super().__init__(page_size)
        self.free = list(range(first + count - 1, first - 1, -1))
        self._kept: OrderedDict[int, Node] = OrderedDict()  # by place, the one used last at the end

    @property
    def num_kept(self) -> int:
        """Snapshots in the tree."""
        return len(self._kept)

    def places(self) -> list[int]:
        """Those of all snapshots, after checking that the nodes know them."""
        of_nodes = {node.snapshot: node for node in self._descendants() if node.snapshot is not None}
        assert of_nodes == self._kept, "nodes and the order of use name different snapshots"
        return list(self._kept)

    def match(self, token_pages: IntArray, salt: bytes = b"") -> Match:
        """The longest cached prefix that ends at a snapshot."""
        self._clock += 1
        nodes = [cast(Node, span.node) for span in self.peek(token_pages, salt).spans]
        for node in nodes:
            node.last_used = self._clock
        if not nodes:
            return Match(self._root, NO_PAGES)
        place = nodes[-1].snapshot
        assert place is not None
        self._kept.move_to_end(place)
        return Match(nodes[-1], np.concatenate([node.pages for node in nodes]), place)

    def peek(self, token_pages: IntArray, salt: bytes = b"") -> Peek:
        """What `match` would find, and how far pages go on."""
        seen, spans, _ = super().peek(token_pages, salt)
        while spans and not _is_whole(spans[-1].node, spans[-1].num_pages):
            spans = spans[:-1]
        return Peek(sum(span.num_pages for span in spans), spans, seen)

    def insert(self, token_pages: IntArray, pages: IntArray, held: Hashable = None, salt: bytes = b"") -> Insertion:
        """See `RadixCache`; an edge that ends at a snapshot is not lengthened."""
        is_kept = held is not None and cast(Node, held).snapshot is not None
        return super().insert(token_pages, pages, None if is_kept else held, salt)

    def put(self, handle: Hashable, num_pages: int, place: int) -> bool:
        """Keeps the state at `place` as that after the first `num_pages` pages of a prefix; False if there is one."""
        path = list(self._path_up(cast(Node, handle)))
        end = sum(len(node.pages) for node in path)
        assert 0 < num_pages <= end, f"{end} pages are cached, which a snapshot after {num_pages} is not in"
        for node in path:
            first = end - len(node.pages)
            if first < num_pages:
                break
            end = first
        if num_pages < end:
            node = self._split(node, num_pages - first)
        if node.snapshot is not None:
            return False
        node.snapshot = place
        self._kept[place] = node
        return True

    def drop_oldest(self, pinned: Counter[int]) -> int | None:
        """Takes the snapshot that was unused for longest from the tree, but none that is `pinned`; its place."""
        place = next((place for place in self._kept if not pinned[place]), None)
        if place is not None:
            self._kept.pop(place).snapshot = None
        return place

    def _remove_leaf(self, node: Node) -> None:
        self._forget(node)
        super()._remove_leaf(node)

    def _cut_tail(self, node: Node, num_pages: int) -> None:
        self._forget(node)
        super()._cut_tail(node, num_pages)

    def _forget(self, node: Node) -> None:
        if node.snapshot is not None:
            del self._kept[node.snapshot]
            self.free.append(node.snapshot)
            node.snapshot = None


def _is_whole(node: Hashable, num_pages: int) -> bool:
    """Whether a prefix that has so many pages of `node` ends at its snapshot."""
    return cast(Node, node).snapshot is not None and num_pages == len(cast(Node, node).pages)


class Snapshots(SnapshotBooks):
    """The places of snapshots, and who has which.

    Attributes:
      num_dropped: snapshots that were taken from the tree for others so far.
    """

    def __init__(self, tree: SnapshotCache, page_size: int) -> None:
        self.num_dropped = 0
        self._tree = tree
        self._page_size = page_size
        self._all = sorted(tree.free)
        self._pins: Counter[int] = Counter()
        self._num_borders = 0
        self._most_borders = len(self._all) // 2

    @property
    def num_places(self) -> int:
        """Of all snapshots."""
        return len(self._all)

    @property
    def num_kept(self) -> int:
        """Snapshots in the tree."""
        return self._tree.num_kept

    def begin(self, lease: Lease, match: Match) -> None:
        """Pins the snapshot that the lease's first step reads, until `read`."""
        lease.source = match.snapshot
        if lease.source is not None:
            self._pins[lease.source] += 1

    def read(self, lease: Lease) -> None:
        """The step that reads the lease's snapshot is launched: later ones may overwrite it."""
        if lease.source is not None:
            self._pins[lease.source] -= 1
            lease.source = None

    def take(self) -> int | None:
        """A place for a new state; None if all are pinned, or borders of running sequences."""
        if self._tree.free:
            return self._tree.free.pop()
        place = self._tree.drop_oldest(self._pins)
        self.num_dropped += place is not None
        return place

    def give_back(self, place: int) -> None:
        """Takes back a place whose state no node and no request needs."""
        self._tree.free.append(place)

    def keep(self, lease: Lease, num_tokens: int, place: int) -> None:
        """Keeps the state after `num_tokens` tokens of the lease, whole pages that are in the tree if it shares any."""
        if lease.is_retired or not self._tree.put(lease.handle, full_pages(num_tokens, self._page_size), place):
            self.give_back(place)

    def border(self, lease: Lease, num_tokens: int) -> int | None:
        """A place for the state of a sequence after `num_tokens` tokens, whole pages; None if there is none for it.

        It takes the place of the older one of `BORDERS`, or of the only one, once borders have half of their places.
        """
        borders = [each for each in lease.borders if each[0] != num_tokens]
        again = [place for at, place in lease.borders if at == num_tokens]  # a step that was not launched
        most = BORDERS if self._num_borders < self._most_borders // 2 else 1
        while len(borders) >= most:
            self.give_back(borders.pop(0)[1])
        self._set_borders(lease, borders)
        place = again[0] if again else self.take() if self._num_borders < self._most_borders else None
        if place is not None:
            self._set_borders(lease, [*borders, (num_tokens, place)])
        return place

    def release(self, lease: Lease, num_tokens: int) -> None:
        """See `SnapshotBooks`."""
        newest = next((each for each in reversed(lease.borders) if each[0] <= num_tokens), None)
        if newest is not None:
            self._set_borders(lease, [each for each in lease.borders if each is not newest])
            self.keep(lease, *newest)

    def drop(self, lease: Lease) -> None:
        """See `SnapshotBooks`."""
        self.read(lease)
        for _, place in lease.borders:
            self.give_back(place)
        self._set_borders(lease, ())

    def _set_borders(self, lease: Lease, borders: Sequence[tuple[int, int]]) -> None:
        self._num_borders += len(borders) - len(lease.borders)
        lease.borders = tuple(borders)

    def wrong(self, leases: Iterable[Lease]) -> list[str]:
        """See `SnapshotBooks`."""
        leases = list(leases)
        try:
            in_tree = self._tree.places()
        except AssertionError as error:
            return [f"snapshots are broken: {error}"]
        borders = [place for lease in leases for _, place in lease.borders]
        counts = Counter([*self._tree.free, *in_tree, *borders])
        found = [
            f"place {place} of a snapshot is in {counts[place]} places" for place in self._all if counts[place] != 1
        ]
        if len(borders) != self._num_borders:
            found.append(f"{self._num_borders} borders are counted, but leases have {len(borders)}")
        pins = Counter(lease.source for lease in leases if lease.source is not None)
        if pins != +self._pins:
            found.append(f"snapshots {dict(+self._pins)} are pinned, but leases are to read {dict(pins)}")
        return found + [f"snapshot {place} is to be read, but dropped" for place in pins if place not in in_tree]
