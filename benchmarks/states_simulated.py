"""Simulated caches of a model with a recurrent state, block by block: when checkpoints are made, and what is evicted.

All of them match alike: a prompt hits up to its deepest checkpoint that has all KV before it. Prompts are whole blocks;
what follows the last whole block hits nothing. A checkpoint weighs `weight` blocks.

    kv_alone       no checkpoints: the KV hits up to the first missing block. LRU
    lru            checkpoints where `places` says so, in one LRU order with the KV
    by_worth       our rule, computed exactly and from scratch: what `CheckpointOrder` does at a small cost
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from aoffload._eviction.checkpoints import INNER
from aoffload.plan.trace import Blocks, Trace

__all__ = ["PEERS", "by_worth", "ends_and_branches", "kv_alone", "lru", "prompts"]

Places = Callable[[int, int, int], Iterable[int]]
"""Where a request makes checkpoints, from the end of its hit, the end of its cached KV, and its length, in blocks."""


def every(num_blocks: int) -> Places:
    """At each multiple of `num_blocks`."""
    return lambda hit, cached, length: range((hit // num_blocks + 1) * num_blocks, length + 1, num_blocks)


def chunks(num_blocks: int) -> Places:
    """Where a chunk of a chunked prefill ends; the last chunk ends with the prompt."""
    return lambda hit, cached, length: [*range(hit + num_blocks, length, num_blocks), length]


def ends_and_branches(hit: int, cached: int, length: int) -> Iterable[int]:
    """At the end of the prompt, and where its cached KV ends."""
    return [cached, length] if hit < cached < length else [length]


PEERS: dict[str, Places] = {
    "a checkpoint at every block": every(1),
    "one every 2,048 tokens": every(4),
    "one every 8,192 tokens": every(16),
    "one at each chunk of 8,192 tokens and at the end": chunks(16),
}


def prompts(trace: Trace) -> list[Blocks]:
    """The blocks of each prompt that it may hit: at least one token is computed."""
    return [each.blocks[: (each.num_tokens - 1) // trace.block_tokens] for each in trace.requests]


class _Tree:
    """Cached KV: a tree of blocks. A block is evicted when it has no child."""

    def __init__(self, num_blocks: int) -> None:
        self.is_cached = np.zeros(num_blocks, bool)
        self.num_children = np.zeros(num_blocks, np.int32)
        self.last_use = np.zeros(num_blocks, np.int64)
        self._parents = np.full(num_blocks, -1, np.int64)
        self._depths = np.zeros(num_blocks, np.int32)
        self.num_cached = 0
        self._leaves: list[tuple[int, float, int]] = []
        """A heap of the last use, the negative depth and the block of what may be a leaf."""

    def matched(self, prompt: Blocks) -> int:
        is_cached = self.is_cached[prompt]
        return len(prompt) if is_cached.all() else int(is_cached.argmin())

    def use(self, prompt: Blocks, cached: int, now: int) -> None:
        """All of `prompt`, of which the first `cached` blocks were cached, is cached and used."""
        self.last_use[prompt] = now
        if cached == len(prompt):
            return
        new = prompt[cached:]
        self.is_cached[new] = True
        self._depths[new] = np.arange(cached, len(prompt))
        self.num_children[new] = 1
        self.num_children[new[-1]] = 0
        self._parents[new[1:]] = new[:-1]
        self._parents[new[0]] = -1
        if cached:
            self._parents[new[0]] = prompt[cached - 1]
            self.num_children[prompt[cached - 1]] += 1
        self.num_cached += len(new)
        self.may_be_leaf(int(new[-1]))

    def may_be_leaf(self, block: int) -> None:
        heapq.heappush(self._leaves, (int(self.last_use[block]), -float(self._depths[block]), block))

    def oldest(self, without: Blocks | None = None) -> tuple[int, float, int] | None:
        """The leaf that was used least recently; `without`: none of these, by block."""
        leaves = self._leaves
        while leaves:
            last_use, depth, block = leaves[0]
            is_out = without is not None and without[block]
            if not self.is_cached[block] or self.num_children[block] or is_out:
                heapq.heappop(leaves)
            elif self.last_use[block] != last_use:
                heapq.heapreplace(leaves, (int(self.last_use[block]), depth, block))
            else:
                return leaves[0]
        return None

    def evict(self, block: int) -> None:
        self.is_cached[block] = False
        self.num_cached -= 1
        parent = int(self._parents[block])
        if parent >= 0:
            self.num_children[parent] -= 1
            if not self.num_children[parent]:
                self.may_be_leaf(parent)


def kv_alone(asked: Sequence[Blocks], num_blocks: int, capacity: int) -> int:
    """Blocks that all prompts hit."""
    tree, hits = _Tree(num_blocks), 0
    for now, prompt in enumerate(asked, 1):
        if len(prompt):
            cached = tree.matched(prompt)
            hits += cached
            tree.use(prompt, cached, now)
        while tree.num_cached > capacity and (leaf := tree.oldest()) is not None:
            tree.evict(leaf[2])
    return hits


def _deepest(has_one: Blocks, prompt: Blocks) -> int:
    """The end of the deepest checkpoint on the path of `prompt`; 0 if there is none."""
    found = np.flatnonzero(has_one[prompt])
    return int(found[-1]) + 1 if len(found) else 0


def lru(asked: Sequence[Blocks], num_blocks: int, capacity: int, weight: float, places: Places) -> int:
    """Blocks that all prompts hit. A hit uses its checkpoint, and all KV of its prompt. A checkpoint whose KV is
    evicted goes with it, which is kinder than what a peer does."""
    tree, hits, weighs = _Tree(num_blocks), 0, 0.0
    has_one: Blocks = np.zeros(num_blocks, np.int32)
    last_use = np.zeros(num_blocks, np.int64)
    oldest: list[tuple[int, float, int]] = []
    for now, prompt in enumerate(asked, 1):
        if not len(prompt):
            continue
        cached = tree.matched(prompt)
        hit = _deepest(has_one, prompt[:cached])
        hits += hit
        if hit:
            last_use[prompt[hit - 1]] = now
        tree.use(prompt, cached, now)
        for end in places(hit, cached, len(prompt)):
            block = int(prompt[end - 1])
            last_use[block] = now
            if not has_one[block]:
                has_one[block] = 1
                weighs += weight
                heapq.heappush(oldest, (now, 0.5 - end, block))
        while tree.num_cached + weighs > capacity:
            leaf = tree.oldest()
            while oldest and (not has_one[oldest[0][2]] or last_use[oldest[0][2]] != oldest[0][0]):
                _, depth, block = heapq.heappop(oldest)
                if has_one[block]:
                    heapq.heappush(oldest, (int(last_use[block]), depth, block))
            if oldest and (leaf is None or oldest[0] < leaf):
                block = heapq.heappop(oldest)[2]
            else:
                assert leaf is not None, "holds nothing"
                block = leaf[2]
                tree.evict(block)
            weighs -= weight * int(has_one[block])
            has_one[block] = 0
    return hits


class _Checkpoint:
    __slots__ = ("above", "below", "block", "last_use", "path", "stop")

    def __init__(self, path: Blocks, stop: int, above: _Checkpoint | None, now: int) -> None:
        self.path = path
        self.stop = stop
        self.block = int(path[stop - 1])
        self.above = above
        self.below: list[_Checkpoint] = []
        self.last_use = now


class _Worth:
    """Checkpoints of a tree, and what each is worth."""

    def __init__(self, tree: _Tree, weight: float) -> None:
        self.tree = tree
        self.weight = weight
        self.at: dict[int, _Checkpoint] = {}
        self.has_one: Blocks = np.zeros(len(tree.is_cached), np.int32)
        self._quotients: dict[_Checkpoint, float] = {}
        self._roots: list[_Checkpoint] = []

    def quotient(self, one: _Checkpoint) -> float:
        """The blocks that it saves, for each that its eviction frees."""
        start = one.above.stop if one.above is not None else 0
        freed, share, num_children = self.weight, 1.0, self.tree.num_children
        if not one.below:
            branches = np.flatnonzero(num_children[one.path[: one.stop - 1]] > 1)
            freed += one.stop - max(start, int(branches[-1]) + 1 if len(branches) else 0)
        elif num_children[one.block] == 1:
            share = INNER
        return share * (one.stop - start) / freed

    def compute(self, one: _Checkpoint | None) -> None:
        if one is not None:
            self._quotients[one] = self.quotient(one)

    def add(self, path: Blocks, stop: int, now: int) -> None:
        found = self.at.get(int(path[stop - 1]))
        if found is not None:
            found.last_use = now
            return
        deepest = _deepest(self.has_one, path[:stop])
        above = self.at[int(path[deepest - 1])] if deepest else None
        one = _Checkpoint(path, stop, above, now)
        around = self._roots if above is None else above.below
        one.below = [each for each in around if each.stop > stop and each.path[stop - 1] == one.block]
        for each in one.below:
            each.above = one
            around.remove(each)
        around.append(one)
        self.at[one.block], self.has_one[one.block] = one, 1
        for each in (one, *one.below):
            self.compute(each)

    def remove(self, one: _Checkpoint) -> None:
        del self.at[one.block], self._quotients[one]
        self.has_one[one.block] = 0
        around = self._roots if one.above is None else one.above.below
        around.remove(one)
        around += one.below
        for each in one.below:
            each.above = one.above
            self.compute(each)
        self.compute(one.above)

    def used(self, path: Blocks) -> None:
        for block in path[np.flatnonzero(self.has_one[path])]:
            self.compute(self.at[int(block)])

    def least(self, now: int) -> _Checkpoint:
        """A quotient that is out of date, because a branch is no longer one, is computed again."""
        while True:
            found = min(self._quotients, key=lambda one: self._quotients[one] / (now - one.last_use + 1))
            before = self._quotients[found]
            self.compute(found)
            if math.isclose(before, self._quotients[found]):
                return found


def by_worth(asked: Sequence[Blocks], num_blocks: int, capacity: int, weight: float) -> int:
    """Blocks that all prompts hit."""
    tree, hits = _Tree(num_blocks), 0
    worth = _Worth(tree, weight)
    for now, prompt in enumerate(asked, 1):
        if not len(prompt):
            continue
        cached = tree.matched(prompt)
        hit = _deepest(worth.has_one, prompt[:cached])
        hits += hit
        tree.use(prompt, cached, now)
        for end in (hit, *ends_and_branches(hit, cached, len(prompt))):
            if end:
                worth.add(prompt, end, now)
        worth.used(prompt)
        while tree.num_cached + weight * len(worth.at) > capacity:
            tail = tree.oldest(worth.has_one)
            if tail is not None:
                tree.evict(tail[2])
                continue
            one = worth.least(now)
            worth.remove(one)
            if not tree.num_children[one.block]:
                tree.may_be_leaf(one.block)
    return hits
