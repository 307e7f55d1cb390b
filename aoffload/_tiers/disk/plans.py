"""Values that the ledger exchanges with the disk: the labels that a store writes with its blocks, and the runs that a
restart has found.

All are frozen and can be copied and pickled. They hold no reference into the ledger. This file is never compiled, so it
also has the protocol of a pool of slots.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
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
    """Number of the block among the `width` blocks that the unit has in the component."""
    position: int
    """The unit, counted from the start of the prompt."""
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
    """The label of each block of the plan. None if the tokens alone do not identify the contents; no restart finds such
    a block."""
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
