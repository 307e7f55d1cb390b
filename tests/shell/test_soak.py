"""Many requests for a while: nothing adds up that should not."""

from __future__ import annotations

import sys

import anyio
import pytest

from benchmarks.soak import Soak


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="resident memory is read from /proc")
@pytest.mark.parametrize(("backend", "num_requests", "num_at_a_time"), [("asyncio", 10_000, 1000), ("trio", 2000, 200)])
def test_soak(backend: str, num_requests: int, num_at_a_time: int) -> None:
    """Thousands of requests of 20 blocks, a tenth cancelled anywhere: every byte right, no pin left, memory flat."""
    soak = Soak(num_requests, num_at_a_time)
    result = anyio.run(soak.run, backend=backend)
    assert result.num_done + result.num_cancelled == num_requests
    assert 0.05 * num_requests < result.num_cancelled < 0.15 * num_requests
    assert result.num_blocks_checked > 20 * result.num_done
    assert result.num_blocks_loaded > num_requests
    assert (result.num_pinned, result.num_quarantined) == (0, 0)
    assert result.growth < 0.01, result.rss_bytes
