"""Stack distances against a cache that is really kept, block by block."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from synthetic_traces import BLOCK_TOKENS, REQUESTS, Request, conversations, made, trace_of

from aoffload.plan.distances import StackDistances, knee
from aoffload.plan.trace import TracedRequest


class LRU:
    """The blocks of a cache, the next one to be evicted first: a prefix loses its tail before its head."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.blocks: dict[int, float] = {}
        self.num_stored = 0

    def serve(self, request: TracedRequest) -> tuple[int, float | None]:
        """Its hits; and how long ago the oldest block was touched, once blocks had to go."""
        ids = request.blocks.tolist()
        hits = next((at for at, each in enumerate(ids) if each not in self.blocks), len(ids))
        self.num_stored += len(ids) - hits
        for each in reversed(ids):
            self.blocks.pop(each, None)
            self.blocks[each] = request.at_s
        evicted = len(self.blocks) > self.size
        while len(self.blocks) > self.size:
            del self.blocks[next(iter(self.blocks))]
        self.has_evicted = getattr(self, "has_evicted", False) or evicted
        oldest = next(iter(self.blocks.values()), request.at_s)
        return min(hits, request.num_prompt_blocks), request.at_s - oldest if self.has_evicted else None


@given(REQUESTS)
def test_every_size_hits_what_a_cache_of_that_size_hits(asked: list[Request]) -> None:
    """Each request's hits, what is stored, and the ages at eviction, for all sizes from one pass."""
    trace = trace_of(asked)
    stack = StackDistances.of(trace)
    at, hits = stack.curve()
    for size in range(1, trace.num_blocks + 3):
        kept = LRU(size)
        found, ages = zip(*map(kept.serve, trace.requests), strict=True)
        assert stack.hits(size).tolist() == list(found)
        assert stack.num_missing(size) == kept.num_stored
        assert stack.ages(size) == [age for age in ages if age is not None]
        assert np.interp(size, at, hits) == sum(found)


@given(REQUESTS, st.sets(st.integers(0, 13)))
def test_requests_left_out_touch_nothing(asked: list[Request], left_out: set[int]) -> None:
    """As if the trace had not had them, but in their places."""
    trace = trace_of(asked)
    stack = StackDistances.of(trace, left_out)
    for size in range(1, trace.num_blocks + 2):
        kept = LRU(size)
        found = [0 if at in left_out else kept.serve(each)[0] for at, each in enumerate(trace.requests)]
        assert stack.hits(size).tolist() == found


def test_a_size_never_hits_less_than_a_smaller_one(tmp_path: Path) -> None:
    """And a cache that holds everything hits all that came before."""
    trace = made(tmp_path, 1, 400)
    stack = StackDistances.of(trace)
    totals = [int(stack.hits(size).sum()) for size in range(0, trace.num_blocks + 1, 50)]
    assert totals == sorted(totals)
    assert stack.hits(trace.num_blocks).sum() == trace.num_asked - trace.num_blocks
    assert len(conversations(1, 400)) == 400 and trace.block_tokens == BLOCK_TOKENS


@pytest.mark.parametrize(
    ("sizes", "hits", "first", "wanted"),
    [
        ([0, 10, 20, 100], [0, 50, 90, 100], 0, 20),  # steep up to 20, then flat
        ([0, 10, 20, 100], [0, 50, 90, 100], 20, 100),  # straight from 20 on: nothing bends
        ([0, 10, 50, 100], [0, 0, 0, 100], 0, 100),  # nothing comes back but all at once
        ([0, 100], [0, 100], 0, 100),
        ([0], [0], 5, 5),  # nothing comes back
    ],
)
def test_the_knee_is_where_the_curve_bends(sizes: list[int], hits: list[int], first: int, wanted: int) -> None:
    """The point farthest above the straight line from `first` to the end."""
    assert knee(sizes, hits, first) == wanted
