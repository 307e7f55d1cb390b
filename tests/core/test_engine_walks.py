"""Random walks over all calls of `HostCache`: each request reads the right bytes or computes them."""

from __future__ import annotations

import pytest
from engine_random_walk import walks

MUST_HAPPEN = (
    "engine hit", "hit", "pending", "pending ended", "loading", "load landed", "load failed", "load corrupt",
    "load unproven", "left while loading", "store landed", "store failed", "store unproven", "not wanted",
    "proven late", "failed", "told", "told too late", "reset",
)  # fmt: skip


@pytest.mark.parametrize("with_windows", [False, True], ids=["full attention", "windows"])
def test_right_bytes_or_a_miss_in_blocks_that_an_engine_keeps(with_windows: bool) -> None:
    """The engine takes blocks back and reuses them at once, but for those that are held: a request reads its own
    prefix, what the host hands out is right unless somebody has yet to take it back, exactly what jobs touch is held,
    and when everybody has left the engine has all its blocks."""
    happened = walks(65, 250, with_windows=with_windows)
    must_happen = (*MUST_HAPPEN, "found") if with_windows else MUST_HAPPEN
    assert not [event for event in must_happen if not happened[event]], happened
