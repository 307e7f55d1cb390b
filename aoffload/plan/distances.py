"""Exact stack distances: the hits of a trace in an LRU cache of any size, from one pass over it.

Imagine all blocks in the order of an LRU cache, newest first. A cache of `n` blocks holds the first `n` of them, so it
hits a block whose place (from 1 on) is at most `n`. A request puts its blocks on top, its first block uppermost,
because a prefix loses its tail first. So places grow along a prefix. The blocks that an earlier request was the last to
touch are contiguous, as one stretch of its tail. So places are computed per stretch, not per block.

    newest | request 7: a b c d | request 5: k l | request 2: .. m n o |  oldest       (2 has lost its head to others)
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence

import attrs
import numpy as np
from numpy.typing import NDArray

from .trace import Blocks, Trace

Counts = NDArray[np.int64]
Stretch = tuple[int, int, int, int, int]
"""The asking request, the last request that touched the stretch, the number of blocks above it, its first position in
the request, and its length. A tuple, because there is one for every few blocks of a trace."""


@attrs.frozen(eq=False)
class StackDistances:
    """Stretches of prompts that had been touched before, in the order of the trace. Equal positions of all columns
    belong together."""

    num_requests: int
    num_blocks: int
    """Number of different blocks: the size of a cache that never evicts."""
    request: Counts
    """The request that asks for the stretch."""
    last: Counts
    """The last request that touched it before."""
    above: Counts
    """Number of blocks above it. A cache of that many blocks has none of the stretch; a cache of one more has its first
    block."""
    length: Counts
    """Number of its blocks that are in the prompt, and may be hit."""
    touched: Counts
    """Number of its blocks that the request touches, those of the answer included."""
    added: Counts
    """For each request, the number of blocks that it puts on top."""
    at_s: NDArray[np.float64]
    """For each request, its time."""
    exact_from: int
    """The smallest size of a cache that has all blocks of every request left out, at any time."""

    @classmethod
    def of(cls, trace: Trace, left_out: Collection[int] = (), size: float = math.inf) -> StackDistances:
        """`left_out`: numbers of requests that touch nothing if all their blocks are in a cache of `size` blocks. If
        `size` is below `exact_from`, the distances count for a cache of that size only."""
        stack, rows, deepest = _Stack(len(trace.requests), trace.num_blocks), list[Stretch](), 0
        added = np.zeros(len(trace.requests), np.int64)
        for number, each in enumerate(trace.requests):
            found = stack.find(number, each.blocks)
            if number in left_out:
                place = found[-1][2] + found[-1][4] if found else 0
                if place <= size:
                    deepest = max(deepest, place)
                    continue
            stack.touch(number, each.blocks, found)
            added[number] = len(each.blocks)
            rows += found
        limits = np.array([each.num_prompt_blocks for each in trace.requests], np.int64)
        request, last, above, start, touched = np.array(rows, np.int64).reshape(-1, 5).T
        return cls(
            num_requests=len(trace.requests),
            num_blocks=trace.num_blocks,
            request=request,
            last=last,
            above=above,
            length=np.clip(limits[request] - start, 0, touched),
            touched=touched,
            added=added,
            at_s=np.array([each.at_s for each in trace.requests]),
            exact_from=deepest,
        )

    def hits(self, size: int) -> Counts:
        """Blocks that each request hits in a cache of `size` blocks."""
        found = np.clip(size - self.above, 0, self.length)
        return np.bincount(self.request, found, self.num_requests).astype(np.int64)

    def num_missing(self, size: int) -> int:
        """Number of blocks put on top that a cache of `size` blocks lacked, those of answers included. They are stored
        there."""
        return int(self.added.sum() - np.clip(size - self.above, 0, self.touched).sum())

    def curve(self) -> tuple[Counts, Counts]:
        """Total hits as a function of the size. It is linear between these points: sizes, hits."""
        ends = np.concatenate((self.above, self.above + self.length))
        steps = np.repeat((1, -1), len(self.above))
        order = np.argsort(ends, kind="stable")
        sizes, slopes = ends[order], np.cumsum(steps[order])
        hits = np.concatenate(([0], np.cumsum(np.diff(sizes) * slopes[:-1])))
        first = np.concatenate(([True], np.diff(sizes) > 0)) if len(sizes) else np.zeros(0, bool)
        return np.concatenate(([0], sizes[first])), np.concatenate(([0], hits[: len(sizes)][first]))

    def ages(self, size: int) -> list[float]:
        """For each request, from the first one that evicts from a cache of `size` blocks: the time since the oldest
        block in the cache was touched. Blocks that are requested again after a longer time miss."""
        at_s, last, touched = self.at_s.tolist(), self.last.tolist(), self.touched.tolist()
        stops = np.searchsorted(self.request, np.arange(self.num_requests), "right").tolist()
        left, found = [0] * self.num_requests, list[float]()
        oldest = kept = start = depth = 0
        for number, added in enumerate(self.added.tolist()):
            for row in range(start, stops[number]):
                left[last[row]] -= touched[row]
                depth -= touched[row]
                if last[row] >= oldest:
                    kept -= touched[row]
            start = stops[number]
            left[number] = added
            kept += added
            depth += added
            while oldest < number and kept - left[oldest] >= size:
                kept -= left[oldest]
                oldest += 1
            if depth > size:
                found.append(at_s[number] - at_s[oldest])
        return found


class _Stack:
    """The blocks by the request that touched them last, newest on top."""

    def __init__(self, num_requests: int, num_blocks: int) -> None:
        self._last: Blocks = np.full(num_blocks, -1, np.int32)
        self._counts = _Counts(num_requests)

    def find(self, number: int, blocks: Blocks) -> list[Stretch]:
        """The stretches of `blocks` that the stack has, for request `number`."""
        found, size = list[Stretch](), len(blocks)
        if not size:
            return found
        before, start = self._last[blocks], 0
        stops = (before[1:] != before[:-1]).nonzero()[0].tolist()
        stops.append(size - 1)
        for end, last in zip(stops, before[stops].tolist(), strict=True):
            if last < 0:
                break  # the stack has no block that follows a new one
            found.append((number, last, self._counts.behind(last), start, end + 1 - start))
            start = end + 1
        return found

    def touch(self, number: int, blocks: Blocks, found: Iterable[Stretch]) -> None:
        """Request `number` puts `blocks` on top. `found`: the stretches that the stack has already."""
        for _, last, _, _, length in found:
            self._counts.add(last, -length)
        self._counts.add(number, len(blocks))
        self._last[blocks] = number


class _Counts:
    """For each request, the number of blocks that it was the last to touch, in a binary indexed tree: sums in
    logarithmic time."""

    def __init__(self, size: int) -> None:
        self._sums = [0] * (size + 1)
        self._size = size
        self._total = 0

    def add(self, position: int, count: int) -> None:
        self._total += count
        sums, size, at = self._sums, self._size, position + 1
        while at <= size:
            sums[at] += count
            at += at & -at

    def behind(self, position: int) -> int:
        """The sum of all counts after `position`."""
        sums, at, found = self._sums, position + 1, 0
        while at:
            found += sums[at]
            at -= at & -at
        return self._total - found


def knee(sizes: Sequence[int] | Counts, hits: Sequence[int] | Counts, first: int) -> int:
    """The size, from `first` on, after which another block brings fewer hits than the average block up to the end. It
    is the point of the curve that is farthest above the straight line between its ends, or the end if no point is above
    it."""
    x, y = np.asarray(sizes, float), np.asarray(hits, float)
    at_first = float(np.interp(first, x, y))
    keep = x > first
    x, y = np.concatenate(([first], x[keep])), np.concatenate(([at_first], y[keep]))
    if len(x) < 3:
        return int(x[-1])
    line = y[0] + (y[-1] - y[0]) * (x - x[0]) / (x[-1] - x[0])
    above = y - line
    return int(x[np.flatnonzero(above >= above.max() - 1e-9 * y[-1])[-1]])
