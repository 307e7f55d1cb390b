"""Idle paths: finds the block to evict among the ends of the paths that no request uses.

Cached runs form a tree, because prompts begin with the same tokens. A run without its prefix is never found, so the
ends of paths, the *leaves*, are evicted first. A run becomes a leaf when all runs after it are gone:

    [system prompt] <- [session 1] <- [its last turns]      leaf
                    <- [session 2]                          leaf

For each bucket of `ReturnTimes`, the leaves are sorted by their last use. Leaves of a bucket whose ages are in the same
bin are worth the same, so only the oldest of them is compared with others: a few leaves for each bucket.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Iterator
from heapq import heapify, heappop, heappush
from typing import Generic, TypeVar

from .returns import ENDS, ReturnTimes, bin_of

Node = TypeVar("Node")
Leaf = tuple[int, int, Node]
"""The last use of a leaf in ticks, a number that no other leaf has, and the leaf."""
Entry = tuple[int, int, int, Node | None]
"""Of a node, its bucket, its last use, its number, and its parent. The parent need not be idle."""
Candidate = tuple[float, int, int, Node]
"""The worth of a leaf, and the leaf as in `Leaf`."""

MAX_REQUESTS_BETWEEN = 16
"""Maximum number of requests between two comparisons of all leaves, because their worth changes with their age."""


MAX_CHANGED = 4096
"""Nodes that may wait to be sorted."""


class IdlePaths(Generic[Node]):
    """Nodes of a tree that are idle, each with its bucket and its last use."""

    def __init__(self, times: ReturnTimes) -> None:
        self._times = times
        self._entries: dict[Node, Entry[Node]] = {}
        self._children: dict[Node, dict[Node, None]] = {}
        """Of each node that has any, its idle children. The node need not be idle."""
        self._changed: dict[Node, None] = {}
        """Nodes that may have become leaves, or may no longer be leaves. Most nodes change several times between two
        questions for a leaf, so they are sorted at the next question, or once they are more than `MAX_CHANGED`."""
        self._keys: dict[Node, tuple[int, int, int]] = {}
        """Of each leaf, its bucket, its last use and its number, as it was sorted."""
        self._leaves: dict[int, list[Leaf[Node]]] = {}
        """By bucket, those that have leaves; the oldest first."""
        self._best: dict[int, Candidate[Node]] = {}
        """By bucket, the leaf that is worth least. Missing: it has to be found."""
        self._least: Candidate[Node] | None = None
        """The leaf that is worth least. None: it has to be found."""
        self._compared_at = (-1, 0)
        """`num_computed` of the times and their number of requests, when all leaves were compared last."""
        self._num_added = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, node: Node) -> bool:
        return node in self._entries

    def nodes(self) -> Iterable[Node]:
        """All idle nodes, in any order."""
        return self._entries.keys()

    def add(self, node: Node, parent: Node | None, bucket: int, last_use: int) -> None:
        self._num_added = number = self._num_added + 1
        self._entries[node] = (bucket, last_use, number, parent)
        changed = self._changed
        changed[node] = None
        if parent is not None:
            children = self._children.get(parent)
            if children is None:
                self._children[parent] = {node: None}
                changed[parent] = None
            else:
                children[node] = None
        if len(changed) > MAX_CHANGED:
            self._sort()

    def remove(self, node: Node) -> None:
        parent = self._entries.pop(node)[3]
        self._changed[node] = None
        if parent is None:
            return
        children = self._children[parent]
        del children[node]
        if not children:
            del self._children[parent]
            self._changed[parent] = None

    def move(self, node: Node, bucket: int, last_use: int | None = None) -> None:
        """Put an idle node into another bucket. `last_use`: it was used again."""
        _, before, number, parent = self._entries[node]
        self._entries[node] = (bucket, before if last_use is None else last_use, number, parent)
        self._changed[node] = None

    def reparent(self, node: Node, parent: Node | None) -> None:
        """An idle node has another parent from now on."""
        bucket, last_use, _, _ = self._entries[node]
        self.remove(node)
        self.add(node, parent, bucket, last_use)

    def adopt(self, node: Node) -> None:
        """The children of an idle node become those of its parent, because the node leaves the tree."""
        if node in self._children:
            for child in (*self._children[node],):
                self.reparent(child, self._entries[node][3])

    def _sort(self) -> None:
        """Sort the leaves among the nodes that have changed."""
        entries, children, keys = self._entries, self._children, self._keys
        for node in self._changed:
            entry, old = entries.get(node), keys.get(node)
            key = None if entry is None or node in children else entry[:3]
            if key == old:
                continue
            if old is not None:
                self._unlink(old)
                del keys[node]
            if key is not None:
                self._link(key, node)
                keys[node] = key
        self._changed.clear()

    def _link(self, key: tuple[int, int, int], node: Node) -> None:
        bucket, last_use, number = key
        leaf = (last_use, number, node)
        leaves = self._leaves.get(bucket)
        if leaves is None:
            self._leaves[bucket] = [leaf]
        else:
            insort(leaves, leaf)
            best = self._best.get(bucket)
            if best is None:
                return
            times = self._times
            candidate = (times.worth[bucket][bin_of(times.now - last_use)], *leaf)
            if candidate < best:
                self._best[bucket] = candidate
                self._least = None

    def _unlink(self, key: tuple[int, int, int]) -> None:
        bucket, last_use, number = key
        leaves = self._leaves[bucket]
        del leaves[bisect_left(leaves, (last_use, number))]
        best = self._best.get(bucket)
        if best is not None and best[2] == number:
            del self._best[bucket]
            self._least = None
        if not leaves:
            del self._leaves[bucket]

    # -- questions ------------------------------------------------------------------------------------------------

    def least_worth(self) -> Node | None:
        """The leaf that is worth least; the oldest of those that are worth the same."""
        if self._changed:
            self._sort()
        times = self._times
        computed, compared = self._compared_at
        if computed != times.num_computed or times.num_requests - compared >= MAX_REQUESTS_BETWEEN:
            self._compared_at = (times.num_computed, times.num_requests)
            self._best.clear()
            self._least = None
        if len(self._best) < len(self._leaves):
            for bucket in self._leaves:
                if bucket not in self._best:
                    self._best[bucket] = self._least_of(bucket)
            self._least = None
        if self._least is None:
            self._least = min(self._best.values(), default=None)
        return None if self._least is None else self._least[3]

    def _least_of(self, bucket: int) -> Candidate[Node]:
        leaves, worth, now = self._leaves[bucket], self._times.worth[bucket], self._times.now
        at, least, found = 0, float("inf"), leaves[0]
        while at < len(leaves):
            number = bin_of(now - leaves[at][0])
            if worth[number] < least:
                least, found = worth[number], leaves[at]
            if not number:
                break
            at = bisect_right(leaves, (now - ENDS[number - 1], float("inf")), at + 1)
        return (least, *found)

    def oldest(self) -> Node | None:
        """The leaf that was used least recently."""
        if self._changed:
            self._sort()
        return min([leaves[0] for leaves in self._leaves.values()])[2] if self._leaves else None

    def in_order(self, *, by_worth: bool) -> Iterator[Node]:
        """All nodes in the order in which they would be evicted now. Changes nothing, and sorts no leaves."""
        times = self._times

        def key(node: Node) -> tuple[float, int, int, Node]:
            bucket, last_use, number, _ = self._entries[node]
            worth = times.worth[bucket][bin_of(times.now - last_use)] if by_worth else 0.0
            return (worth, last_use, number, node)

        heap = [key(node) for node in self._entries if node not in self._children]
        heapify(heap)
        num_left = {node: len(children) for node, children in self._children.items() if node in self._entries}
        while heap:
            node = heappop(heap)[3]
            yield node
            parent = self._entries[node][3]
            if parent in num_left:
                num_left[parent] -= 1
                if not num_left[parent]:
                    heappush(heap, key(parent))
