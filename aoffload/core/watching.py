"""Who is told which blocks are cached: of any class. This file is never compiled, so that it can derive from this."""

from __future__ import annotations

from typing import Protocol

from .records import Part

__all__ = ["BlockWatcher"]


class BlockWatcher(Protocol):
    """Receives each change of the set of cached blocks, right after the change and in the middle of a call. It must not
    call the ledger. Its exceptions are dropped. Blocks that move from one run to another stay cached and are not
    reported."""

    def part_changed(self, part: Part, first: int, stop: int) -> object:
        """`part` held units `[first, stop)` of its run, and holds `[part.first, part.stop)` now."""

    def all_cleared(self, epoch: int) -> object:
        """Nothing is cached any more. What is cached later belongs to `epoch`."""
