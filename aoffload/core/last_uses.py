"""Last uses: which step touched each device block last, so that a load waits only for its own destinations.

A forward may still be running on the device when the step that held its blocks has ended on the host. A load must not
write into a block before that forward is over. Steps are numbered in the order in which they end, and whoever drives
the ledger records a fence at the end of each. Step `n` stands for all steps up to `n`.

    a request gives up a block    the block remembers the number of the request's last step
    a load takes blocks           it waits for the fences of the steps up to the largest of their numbers

A request that may have computed outside of its steps (it was in none, or was forked) leaves the number of the next step
to end: the fence of that one comes later than whatever was computed until now. Before it is recorded, the load waits
for all compute so far. Once something was committed that no step covers, every load does, for good.
"""

from __future__ import annotations

from array import array
from typing import Final

import numpy as np

from .lifecycle import Computing, RequestState
from .owners import Holding

__all__ = ["LastUses"]

MANY: Final = 100
"""From this many ids on, numpy is faster than a loop that makes each id a Python int."""
_COMPUTING = (RequestState.ALLOCATED, RequestState.RUNNING)


class LastUses:
    """The number of the last step by device block."""

    __slots__ = ("_of_block", "are_covered", "num_ended")

    def __init__(self, num_blocks: int) -> None:
        """`num_blocks`: with the null block; 0 if an engine owns the blocks, whose uses are not known."""
        self._of_block = array("q", [1]) * num_blocks
        """What happened before the first step is over with it."""
        self.num_ended = 0
        """Steps that have ended."""
        self.are_covered = num_blocks > 0
        """Whether every commit so far was of a step."""

    def step_ended(self) -> int:
        """Returns the number of the step that ends now."""
        self.num_ended += 1
        return self.num_ended

    def computed(self, holding: Holding) -> None:
        """`holding` is about to commit what it has computed."""
        if holding.computing is Computing.NOTHING and not holding.num_steps:
            self.are_covered = False

    def gave_up(self, holding: Holding, block_ids: array[int]) -> None:
        """`holding` gives up these blocks of its tables, null blocks among them."""
        if not self.are_covered or not (holding.last_step or holding.state in _COMPUTING):
            return  # or it has computed nothing: its blocks are what they were when it got them
        number, of_block = holding.last_step or self.num_ended + 1, self._of_block
        if len(block_ids) < MANY:
            for block_id in block_ids:
                if of_block[block_id] < number:
                    of_block[block_id] = number
        else:
            known, at = np.frombuffer(of_block, np.int64), np.frombuffer(block_ids, np.int32)
            known[at] = np.maximum(known[at], number)

    def latest(self, block_ids: array[int]) -> int:
        """The steps up to this number have touched these blocks; 0: it is not known which."""
        if not self.are_covered or not block_ids:
            return 0
        if len(block_ids) < MANY:
            number = max([self._of_block[block_id] for block_id in block_ids])
        else:
            number = int(np.frombuffer(self._of_block, np.int64)[np.frombuffer(block_ids, np.int32)].max())
        return number if number <= self.num_ended else 0
