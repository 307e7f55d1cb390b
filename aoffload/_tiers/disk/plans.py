"""Values that the ledger exchanges with the disk: the labels that a store writes with its blocks, and the runs that a
restart has found.

All are frozen and can be copied and pickled. They hold no reference into the ledger. This file is never compiled, so it
also has the protocol of a pool of slots.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Protocol

import attrs

from ..._kernel.plans import TransferPlan
from ..._kernel.protocols import DevicePool
from ...errors import InvalidArgument


@attrs.frozen(slots=True)
class BlockLabel:
    """The contents of a block on a disk, so that a restart can find the block again."""

    component: int
    place: int
    """Place of the block among the `width` blocks that the unit has in the component."""
    position: int
    """Number of the unit, counted from the start of the prompt."""
    root: bytes
    """Digest of the root keys."""
    digest: bytes
    """Digest of the prefix through this unit."""
    before: bytes
    """Digest of the prefix before this unit; empty for the first unit."""
    tokens: bytes
    """The tokens of this unit, as little-endian int32."""


@attrs.frozen(slots=True)
class DiskPayload:
    """The payload of a store to the disk."""

    labels: tuple[BlockLabel | None, ...]
    """The label of each block of the plan. None if the tokens alone do not identify the contents of the block; no
    restart finds such a block."""
    generation: int
    """Number of resets of the disk when the job was planned. A restart finds only blocks of the last generation."""

    @classmethod
    def of(cls, plan: TransferPlan) -> DiskPayload:
        """The payload of `plan`. `InvalidArgument` if `plan` is not a store to a disk."""
        payload = plan.payload
        if not isinstance(payload, cls):
            raise InvalidArgument("plan", f"{plan.job_id} must have a DiskPayload, has {type(payload).__name__}")
        return payload


@attrs.frozen
class RestoredRun:
    """Units `[start, stop)` of one prefix that an earlier process has left on the disk. Their digests were checked
    against their tokens."""

    root: bytes
    before: bytes
    """The digest of the prefix before unit `start`; empty for the first unit."""
    digest: bytes
    """The digest of the prefix up to `stop`."""
    start: int
    stop: int
    tokens: bytes
    slots: tuple[array[int], ...]
    """For each component, the slots of these units on the disk, in order; empty if the disk has none in that
    component."""


class TakesIds(DevicePool, Protocol):
    """A pool of slots. A restart takes the slots of restored blocks by their ids. The default is a `SlotPool`."""

    def are_free(self, block_ids: Sequence[int]) -> bool: ...

    def take_ids(self, block_ids: array[int]) -> None:
        """Take exactly these ids. The caller has checked that they are free."""
        ...


# -- forgetting ------------------------------------------------------------------------------------------------------
#
# Invalidated blocks on a disk whose writes may fail: three ways to hide them from a restart, tried in this order.
#
#     erase the records             a restart does not find the blocks
#     raise the generation          a restart finds nothing that was stored until then
#     drop the table                the same; this process stops using the disk, because it cannot raise the generation
#     all of these have failed      a restart may find the blocks, so the log has to say it
#
# The data and the sum of such a block match, so no check after a restart would notice it.

ERASES = 3
"""Attempts to erase records, because a write may fail once and then succeed."""


@attrs.frozen
class DiskTrouble:
    """All attempts to erase the records of invalidated blocks have failed."""

    reason: str
    is_off: bool
    """Whether the disk must not be used any more."""


def forgotten(
    erase: Callable[[], None], raise_generation: Callable[[], None], drop: Callable[[], None]
) -> DiskTrouble | None:
    """Try these calls in order, until one of them does not raise `OSError`: then no restart finds the invalidated
    blocks. Returns None if the records were erased."""
    for _ in range(ERASES):
        try:
            erase()
        except OSError as error:
            reason = f"invalidated blocks could not be erased: {error.strerror or error}"
        else:
            return None
    for empty, is_off in ((raise_generation, False), (drop, True)):
        try:
            empty()
        except OSError:
            continue
        return DiskTrouble(f"{reason}; a restart finds nothing that was stored until now", is_off)
    return DiskTrouble(f"{reason}; a restart may find them: delete the files before the next start", is_off=True)
