"""What a runtime says that is not open."""

from __future__ import annotations

import pytest
from serving import TensorBlocks, config

from aoffload import OffloadRuntime, RuntimeClosed

pytestmark = pytest.mark.anyio


async def test_before_and_behind_its_block_it_says_which() -> None:
    """Who calls it too early has to enter it; who calls it too late has nothing left to enter."""
    runtime = OffloadRuntime(config(4), TensorBlocks(5).tensors)
    with pytest.raises(RuntimeClosed, match="is not open: use it inside"):
        runtime.lookup([1, 2, 3])
    async with runtime:
        runtime.lookup([1, 2, 3])
    with pytest.raises(RuntimeClosed, match="is closed: its `async with` block is over"):
        runtime.lookup([1, 2, 3])
