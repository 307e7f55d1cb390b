"""One job between host memory and a cell, and the copies from and to host memory.

A lock of the job guards each copy, so that a job that was given up does not touch host memory any more.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Protocol

import attrs
import numpy as np
from numpy.typing import NDArray

from ..._kernel.plans import TransferPlan
from ..._transfer.lane import BlockChecksums
from .plans import CellLabel


@attrs.define(eq=False)
class CellJob:
    plan: TransferPlan
    label: CellLabel
    name: bytes
    """The key of the object."""
    node: str
    is_begun: bool = False
    is_given_up: bool = False
    _lock: threading.Lock = attrs.field(factory=threading.Lock)

    def give_up(self) -> bool:
        """Once this has returned, the job does not touch host memory any more. Returns False if the job was given up
        before."""
        with self._lock:
            before, self.is_given_up = self.is_given_up, True
        return not before

    def unless_given_up(self, touch: Callable[[], bool | None]) -> bool:
        """Call `touch`, which copies from or to host memory, unless the job was given up. Returns whether it was called
        and did not return False."""
        with self._lock:
            return not self.is_given_up and touch() is not False


class HostCells(Protocol):
    """Host memory. The copies are made with the lock of a job that is not given up."""

    def room(self, name: str, num_bytes: int) -> memoryview:
        """Other memory, which the calling thread has to itself until the end of its work. Each `name` has one size."""
        ...

    def copy_out(self, plan: TransferPlan, blocks: NDArray[np.uint8]) -> bool:
        """Copy the sources of `plan` to `blocks`, which are a whole cell. Returns False if a checksum differs."""
        ...

    def copy_in(self, plan: TransferPlan, blocks: NDArray[np.uint8]) -> None:
        """Copy `blocks` to the destinations of `plan`."""
        ...


@attrs.frozen
class HostRows:
    """`rows`: `uint8 [num_host_blocks, block_bytes]`. With `checksums`, each block is verified before it is stored, and
    its sum is recorded again after it was read back."""

    rows: NDArray[np.uint8]
    checksums: BlockChecksums | None
    _rooms: threading.local = attrs.field(init=False, factory=threading.local)

    def room(self, name: str, num_bytes: int) -> memoryview:
        found = getattr(self._rooms, name, None)
        if found is None:
            found = np.empty(num_bytes, np.uint8).data
            setattr(self._rooms, name, found)
        assert isinstance(found, memoryview)
        return found

    def copy_out(self, plan: TransferPlan, blocks: NDArray[np.uint8]) -> bool:
        _gather(self.rows, plan.source_ids, blocks)
        sums, pairs = self.checksums, zip(plan.source_ids, blocks, strict=True)
        return sums is None or all(sums.matches(host_id, row) for host_id, row in pairs)

    def copy_in(self, plan: TransferPlan, blocks: NDArray[np.uint8]) -> None:
        _scatter(blocks, self.rows, plan.destination_ids)
        if self.checksums is not None:
            for host_id in plan.destination_ids:
                self.checksums.record(host_id, self.rows[host_id])


def _gather(host: NDArray[np.uint8], host_ids: Sequence[int], blocks: NDArray[np.uint8]) -> None:
    """Copy host blocks to `blocks`, in one call for each stretch of neighbours, without the interpreter's lock."""
    for at, first, stop in _stretches(host_ids):
        np.copyto(blocks[at : at + stop - first], host[first:stop])


def _scatter(blocks: NDArray[np.uint8], host: NDArray[np.uint8], host_ids: Sequence[int]) -> None:
    """The opposite of `_gather`."""
    for at, first, stop in _stretches(host_ids):
        np.copyto(host[first:stop], blocks[at : at + stop - first])


def _stretches(ids: Sequence[int]) -> list[tuple[int, int, int]]:
    """Stretches of neighbours among `ids`: the index at which each begins, its first id, and the id after its last."""
    found: list[tuple[int, int, int]] = []
    for at, number in enumerate(ids):
        if found and found[-1][2] == number:
            begins, first, _ = found[-1]
            found[-1] = begins, first, number + 1
        else:
            found.append((at, number, number + 1))
    return found
