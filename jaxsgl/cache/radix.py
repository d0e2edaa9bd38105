"""The radix tree: prefixes that several requests share are kept once (SGLang's RadixAttention, Zheng et al. 2024).

An edge carries whole pages of tokens and the pages that hold their KV; siblings differ in their first page, and at the
root in their salt or their first page, so prefixes of different salts have no node in common but the root. A lock on
a node counts on all its ancestors, so `locks == 0` means that nothing below is in use. Only unlocked leaves
are evicted, least recently used first.

Eviction costs O(log n) per node: unlocked leaves stand in a heap, at most once each. A heap entry may be out of date
(its node was used, locked, removed or got children since); `evict` finds and corrects that when it pops the entry.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator
from itertools import islice, takewhile
from typing import cast

import numpy as np

from jaxsgl.cache.pages import DUMMY_PAGE, IntArray
from jaxsgl.cache.prefix import NO_PAGES, Edge, Insertion, Match, Peek, Span, TreeNode, WrongLocks

OUTLINED_CHILDREN = 2048  # of a node that `outline` looks at, the newest ones: a root may have 100,000


class Node:
    """`tokens [n, page_size]` on the edge from `parent`, and `pages [n]` that hold their KV; `salt` as of all below.

    `snapshot` is the place of the state after the last of them, if one is kept (`snapshots.py`).
    """

    __slots__ = ("children", "in_heap", "last_used", "locks", "pages", "parent", "salt", "snapshot", "tokens")

    def __init__(
        self, parent: Node | None, tokens: IntArray, pages: IntArray, last_used: int, salt: bytes = b""
    ) -> None:
        self.parent = parent
        self.tokens = tokens
        self.pages = pages
        self.last_used = last_used
        self.salt = salt
        self.locks = 0
        self.in_heap = False
        self.snapshot: int | None = None
        self.children: dict[bytes, Node] = {}

    @property
    def key(self) -> bytes:
        """Its place among the children of its parent."""
        below_root = self.parent is not None and self.parent.parent is None
        first_page = self.tokens[0].tobytes()
        return self.salt + first_page if below_root else first_page

    def common_pages(self, tokens: IntArray) -> int:
        """Leading pages that this edge and `tokens` share."""
        n = min(len(self.tokens), len(tokens))
        differs = (self.tokens[:n] != tokens[:n]).any(axis=1)
        first = int(differs.argmax()) if n else 0
        return first if n and differs[first] else n


class RadixCache:
    """The tree. A handle is the node at which a prefix ends; it stays valid while locked, also when nodes split."""

    keeps = True

    def __init__(self, page_size: int) -> None:
        self._clock = 0  # counts uses; the order of uses is all that LRU needs
        self._serial = 0  # breaks ties in the heap, nodes don't compare
        self._root = Node(None, np.empty((0, page_size), dtype=np.int32), NO_PAGES, 0)
        self._heap: list[tuple[int, int, Node]] = []
        self._num_pages = 0
        self._num_locked = 0

    @property
    def num_pages(self) -> int:
        """Pages in the tree."""
        return self._num_pages

    @property
    def num_evictable(self) -> int:
        """Pages in nodes that no lock holds."""
        return self._num_pages - self._num_locked

    def match(self, token_pages: IntArray, salt: bytes = b"") -> Match:
        """The longest cached prefix; a match that ends inside an edge splits it there."""
        node, pages = self._walk(token_pages, salt)
        return Match(node, pages)

    def peek(self, token_pages: IntArray, salt: bytes = b"") -> Peek:
        """What `match` would find; changes neither order of use nor edges."""
        node, depth = self._root, 0
        spans: list[Span] = []
        while depth < len(token_pages):
            page = token_pages[depth].tobytes()
            child = node.children.get(page if depth else salt + page)
            if child is None:
                break
            shared = child.common_pages(token_pages[depth:])
            spans.append(Span(child, shared, child.locks))
            depth += shared
            if shared < len(child.pages):
                break
            node = child
        return Peek(depth, tuple(spans), depth)

    def insert(self, token_pages: IntArray, pages: IntArray, held: Hashable = None, salt: bytes = b"") -> Insertion:
        """Adds the pages that the tree lacks: to the edge of `held` if possible, else as one new leaf.

        So a prompt that comes in many chunks is one edge, and not a chain of edges to walk for every chunk.
        """
        node, existing = self._walk(token_pages, salt)
        num_existing = len(existing)
        if num_existing < len(pages):
            new_tokens, new_pages = token_pages[num_existing:], pages[num_existing:]
            if node is held and node.locks == 1 and not node.children:
                self._lengthen(node, new_tokens, new_pages)
            else:
                node = self._add_leaf(node, new_tokens.copy(), new_pages.copy(), salt)
        taken = np.concatenate((existing, pages[num_existing:])) if num_existing else pages.copy()
        return Insertion(node, num_existing, taken)

    def lock(self, handle: Hashable) -> None:
        """Counts one lock on the node and its ancestors."""
        for node in self._path_up(cast(Node, handle)):
            if node.locks == 0:
                self._num_locked += len(node.pages)
            node.locks += 1

    def unlock(self, handle: Hashable) -> None:
        """Takes one lock off the node and its ancestors."""
        for node in self._path_up(cast(Node, handle)):
            assert node.locks > 0, "unlocked more often than locked"
            node.locks -= 1
            if node.locks == 0:
                self._num_locked -= len(node.pages)
                self._offer(node)

    def num_exclusive(self, handle: Hashable) -> int:
        """Pages on the way up to the first node with another lock."""
        alone = takewhile(lambda node: node.locks == 1, self._path_up(cast(Node, handle)))
        return sum(len(node.pages) for node in alone)

    def spans(self, handle: Hashable) -> tuple[Span, ...]:
        """The nodes of the prefix, from the one at which it ends up to the root."""
        return tuple(Span(node, len(node.pages), node.locks) for node in self._path_up(cast(Node, handle)))

    def evict(self, num_pages: int) -> IntArray:
        """Drops unlocked leaves, oldest first; of the last one only as much of its tail as is needed."""
        freed: list[IntArray] = []
        missing = num_pages
        while missing > 0 and self._heap:
            last_used, _, node = heapq.heappop(self._heap)
            node.in_heap = False
            if node.parent is None or node.locks or node.children:
                continue  # it comes back when it is unlocked, or when its last child goes
            if node.last_used != last_used:
                self._offer(node)  # it was used after it was put into the heap
                continue
            take = min(missing, len(node.pages))
            freed.append(node.pages[len(node.pages) - take :])
            missing -= take
            self._num_pages -= take
            if take < len(node.pages):
                self._cut_tail(node, take)
            else:
                self._remove_leaf(node)
        return np.concatenate(freed) if freed else NO_PAGES

    def flush(self) -> IntArray:
        """Drops all that no lock holds."""
        return self.evict(self.num_evictable)

    def rename(self, prefix: bytes) -> None:
        """Puts `prefix` before every salt, so that no request finds what is cached now."""
        self._root.children, nodes = {}, list(self._descendants())
        for node in nodes:
            node.salt = prefix + node.salt
            if node.parent is self._root:
                self._root.children[node.key] = node

    def edges(self) -> Iterator[Edge]:
        """One for each edge of the tree, parents before children."""
        for node in self._descendants():
            above = cast(Node, node.parent).pages
            yield Edge(node.tokens, node.pages, int(above[-1]) if len(above) else DUMMY_PAGE, node.salt)

    def outline(self, max_nodes: int) -> list[TreeNode]:
        """The `max_nodes` nodes that are in use or were used last, parents before children; changes nothing.

        A parent is in use, and was used last, at least as much as its children. Cost: O(`max_nodes` *
        `OUTLINED_CHILDREN`) at the very most, mostly that of one wide root.
        """
        found: list[TreeNode] = []
        heap: list[tuple[bool, int, int, int, Node]] = []
        order = 0

        def offer(parent: int, children: Iterable[Node]) -> None:
            nonlocal order
            for node in islice(children, OUTLINED_CHILDREN):
                order += 1
                heapq.heappush(heap, (not node.locks, -node.last_used, order, parent, node))

        offer(-1, reversed(self._root.children.values()))
        while heap and len(found) < max_nodes:
            *_, parent, node = heapq.heappop(heap)
            offer(len(found), reversed(node.children.values()))
            found.append(TreeNode(parent, len(node.pages), node.locks, len(node.children)))
        return found

    def owned_pages(self) -> IntArray:
        """All pages, after checking links, page counts and that evictable leaves are in the heap."""
        nodes = list(self._descendants())
        for node in nodes:
            assert len(node.tokens) == len(node.pages) > 0, "an edge without a page for each page of tokens"
            parent = node.parent
            assert parent is not None and parent.children.get(node.key) is node, "broken link"
            assert parent is self._root or parent.salt == node.salt, "prefixes of two salts in one branch"
            assert node.locks or node.children or node.in_heap, "an unlocked leaf that eviction can't find"
        in_heap = [node for _, _, node in self._heap]
        assert len({id(node) for node in in_heap}) == len(in_heap), "a node is in the heap twice"
        assert self._num_pages == sum(len(node.pages) for node in nodes), "num_pages is off"
        assert self._num_locked == sum(len(node.pages) for node in nodes if node.locks), "num_evictable is off"
        return np.concatenate([NO_PAGES, *(node.pages for node in nodes)])

    def wrong_locks(self, handles: Iterable[Hashable]) -> list[WrongLocks]:
        """Edges whose number of locks isn't that of the `handles` at or below them."""
        holders = Counter(node for handle in handles for node in self._path_up(cast(Node, handle)))
        return [
            WrongLocks(int(node.pages[0]), len(node.pages), node.locks, holders[node])
            for node in self._descendants()
            if node.locks != holders[node]
        ]

    def _walk(self, token_pages: IntArray, salt: bytes) -> tuple[Node, IntArray]:
        """Descends as far as `token_pages` goes, touching and if need be splitting nodes."""
        self._clock += 1
        node, depth = self._root, 0
        found: list[IntArray] = []
        while depth < len(token_pages):
            page = token_pages[depth].tobytes()
            child = node.children.get(page if depth else salt + page)
            if child is None:
                break
            shared = child.common_pages(token_pages[depth:])
            if shared < len(child.pages):
                child = self._split(child, shared)
            child.last_used = self._clock
            found.append(child.pages)
            depth += shared
            node = child
        return node, np.concatenate(found) if found else NO_PAGES

    def _split(self, node: Node, num_pages: int) -> Node:
        """Puts a new parent over `node` that takes its first `num_pages` pages; handles to `node` stay right."""
        parent = cast(Node, node.parent)
        upper = Node(parent, node.tokens[:num_pages], node.pages[:num_pages], node.last_used, node.salt)
        upper.locks = node.locks
        parent.children[upper.key] = upper
        node.tokens, node.pages, node.parent = node.tokens[num_pages:], node.pages[num_pages:], upper
        upper.children[node.key] = node
        return upper

    def _add_leaf(self, parent: Node, tokens: IntArray, pages: IntArray, salt: bytes) -> Node:
        leaf = Node(parent, tokens, pages, self._clock, salt)
        parent.children[leaf.key] = leaf
        self._num_pages += len(pages)
        self._offer(leaf)
        return leaf

    def _lengthen(self, leaf: Node, tokens: IntArray, pages: IntArray) -> None:
        leaf.tokens, leaf.pages = np.concatenate((leaf.tokens, tokens)), np.concatenate((leaf.pages, pages))
        self._num_pages += len(pages)
        self._num_locked += len(pages)

    def _cut_tail(self, node: Node, num_pages: int) -> None:
        node.tokens, node.pages = node.tokens[:-num_pages], node.pages[:-num_pages]
        self._offer(node)

    def _remove_leaf(self, node: Node) -> None:
        parent = cast(Node, node.parent)
        del parent.children[node.key]
        node.parent = None
        self._offer(parent)

    def _offer(self, node: Node) -> None:
        """Puts an unlocked leaf into the heap, unless it is there."""
        if node is self._root or node.locks or node.children or node.in_heap:
            return
        node.in_heap = True
        self._serial += 1
        heapq.heappush(self._heap, (node.last_used, self._serial, node))

    def _path_up(self, node: Node) -> Iterator[Node]:
        while node is not self._root:
            yield node
            node = cast(Node, node.parent)

    def _descendants(self) -> Iterator[Node]:
        """All nodes but the root, parents before children."""
        stack = list(self._root.children.values())
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            yield node
