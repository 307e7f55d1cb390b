"""Last uses: the step that touched each device block last, so that a load waits only for uses of its destinations.

A forward may still run on the device when the step that holds its blocks has ended on the host. A load must not write
to a block before that forward is over. Steps are numbered in the order in which they end. The runtime records a fence
at the end of each step. Waiting for step `n` means waiting for the fences of all steps up to `n`.

    a request gives up a block    the block remembers the number of the request's last step
    a load takes blocks           it waits for the steps up to the largest number of its blocks

A request that was in no step, or was forked, may have computed outside of its steps. Its blocks get the number of the
next step to end, because that step's fence is later than all compute so far. Until that fence is recorded, the load
waits for all compute so far. After one commit that no step covers, every later load waits for all compute so far.
"""

from __future__ import annotations

from array import array
from typing import Final

import numpy as np

from .lifecycle import RequestState
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
        """Number of the last step that used each block. It is 1 at first, because earlier work counts as step 1."""
        self.num_ended = 0
        """Steps that have ended."""
        self.are_covered = num_blocks > 0
        """Whether a step has covered every commit so far. False, too, if an engine owns the blocks."""

    def step_ended(self) -> int:
        """Returns the number of the step that ends now."""
        self.num_ended += 1
        return self.num_ended

    def gave_up(self, holding: Holding, block_ids: array[int]) -> None:
        """Note the last step of `holding` for blocks of its tables that it gives up. They may contain null blocks."""
        if not self.are_covered or not (holding.last_step or holding.state in _COMPUTING):
            return  # `holding` has computed nothing, so the blocks keep their numbers
        number, of_block = holding.last_step or self.num_ended + 1, self._of_block
        if len(block_ids) < MANY:
            for block_id in block_ids:
                if of_block[block_id] < number:
                    of_block[block_id] = number
        else:
            known, at = np.frombuffer(of_block, np.int64), np.frombuffer(block_ids, np.int32)
            known[at] = np.maximum(known[at], number)

    def latest(self, block_ids: array[int]) -> int:
        """The number of the last step that may have touched these blocks; 0 if it is unknown or that step has not
        ended."""
        if not self.are_covered or not block_ids:
            return 0
        if len(block_ids) < MANY:
            number = max([self._of_block[block_id] for block_id in block_ids])
        else:
            number = int(np.frombuffer(self._of_block, np.int64)[np.frombuffer(block_ids, np.int32)].max())
        return number if number <= self.num_ended else 0
