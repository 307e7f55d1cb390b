"""Random walks over all calls of `Ledger`: each request reads the right bytes or computes them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import pytest
from random_walk import UNIT, Walk

NUM_WALKS = 100
NUM_WALKS_WITH_WINDOWS = 75
ONCE_WRONG = (5268, 5327, 5337, 6384, 7165)
"""Walks that found chains of jobs broken by an early end, and invalidation that reached too far or not far enough."""
ONCE_WRONG_WITH_WINDOWS = (418, 1914, 3129)
"""Walks that found blocks that were taken back twice, and a grant for another match than the one it was asked for."""
MUST_HAPPEN = (
    "device hit", "host hit", "queued", "granted", "withdrawn", "loading", "load shared", "load abandoned", "committed",
    "extended", "done", "aborted", "stepped", "invalidated", "tainted", "reset", "load landed", "load failed",
    "load corrupt", "load unproven", "store landed", "store failed", "store unproven", "proven late",
    "preempted", "resumed", "resumed with a hit", "stored on nobody's behalf",
)  # fmt: skip
TOO_RARE = ("load unproven", "load shared", "load abandoned")
"""With windows, in that many walks."""


def walk_all(
    seeds: Iterable[int], num_calls: int, *, with_windows: bool = False, is_plain: bool = False
) -> Counter[str]:
    happened: Counter[str] = Counter()
    for seed in seeds:
        walk = Walk(seed, with_windows=with_windows, is_plain=is_plain)
        try:
            happened += walk.run(num_calls)
        except Exception as error:
            error.add_note(f"Walk({seed}, with_windows={with_windows}), at {walk.last}")
            raise
    return happened


def test_right_bytes_or_a_miss() -> None:
    """Whatever is called in whatever order, and however transfers end: a request reads its own prefix or computes it,
    every block is in one hand, and nothing is pinned when everybody has left."""
    happened = walk_all(range(NUM_WALKS), 300) + walk_all(ONCE_WRONG, 400, is_plain=True)
    assert not [event for event in MUST_HAPPEN if not happened[event]], happened


def test_right_bytes_or_a_miss_in_groups_of_any_kind() -> None:
    """The same with groups of limited reach: what attention still reads is right, the rest may be null."""
    happened = walk_all(range(NUM_WALKS_WITH_WINDOWS), 200, with_windows=True)
    happened += walk_all(ONCE_WRONG_WITH_WINDOWS, 600, with_windows=True, is_plain=True)
    missing = [event for event in MUST_HAPPEN if not happened[event] and event not in TOO_RARE]
    assert not missing, happened


def test_right_bytes_or_a_miss_where_long_runs_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same where every prompt is longer than the longest run, and hardly a run grows: runs are cut, joined and
    moved on beside places that none of them may go over."""
    monkeypatch.setattr("aoffload._kernel.tokens.MAX_RUN_TOKENS", 3 * UNIT)
    monkeypatch.setattr("aoffload._kernel.leases.MAX_GROWN_BYTES", 4 * UNIT)
    happened = walk_all(range(20), 300) + walk_all(range(60), 200, with_windows=True)
    rare = {*TOO_RARE, "load failed"}
    assert not [event for event in MUST_HAPPEN if not happened[event] and event not in rare], happened
