from __future__ import annotations

from collections import Counter

from walk import Walk

NUM_WALKS = 160
ONCE_WRONG = (5268, 5327, 5337, 6384, 7165)
"""Walks that found chains of jobs broken by an early end, and invalidation that reached too far or not far enough."""
MUST_HAPPEN = (
    "device hit", "host hit", "queued", "granted", "withdrawn", "loading", "load shared", "load abandoned", "committed",
    "extended", "done", "aborted", "stepped", "invalidated", "tainted", "reset", "load landed", "load failed",
    "load corrupt", "load unproven", "store landed", "store failed", "store unproven", "proven late",
    "stored on nobody's behalf",
)  # fmt: skip


def test_right_bytes_or_a_miss() -> None:
    """Whatever is called in whatever order, and however transfers end: a request reads its own prefix or computes it,
    every block is in one hand, and nothing is pinned when everybody has left."""
    happened: Counter[str] = Counter()
    for seed in (*ONCE_WRONG, *range(NUM_WALKS)):
        walk = Walk(seed, is_plain=seed in ONCE_WRONG)
        try:
            happened += walk.run(400 if seed in ONCE_WRONG else 300)
        except Exception as error:
            error.add_note(f"Walk({seed}), at {walk.last}")
            raise
    assert not [event for event in MUST_HAPPEN if not happened[event]], happened
