"""Plans, which the core gives to a transport, and completions, which come back. Only these frozen values cross."""

from __future__ import annotations

import enum
from array import array

import attrs

__all__ = ["HIT_TIERS", "Completion", "Direction", "Outcome", "Tier", "TransferPlan"]


class Tier(enum.IntEnum):
    """Where blocks live, nearest to the compute first."""

    DEVICE = 0
    HOST = 1

    __hash__ = int.__hash__  # the default hashes the name each time, in Python


HIT_TIERS = (Tier.DEVICE, Tier.HOST)
"""Where a hit may lie: on the device, and in the tier that loads come from."""


class Direction(enum.Enum):
    LOAD = "load"
    STORE = "store"


class Outcome(enum.Enum):
    """How a transfer ended. Only `UNPROVEN` leaves its destination in doubt."""

    LANDED = "landed"
    """Every block is proven at its destination."""
    FAILED = "failed"
    """Over for certain, but only the leading `num_landed` blocks are proven. Says nothing about the source."""
    CORRUPT = "corrupt"
    """Over for certain. The blocks at `corrupt` differ from what was stored; the first `num_landed` are proven."""
    UNPROVEN = "unproven"
    """The copy may still be writing: its destination is quarantined."""


@attrs.frozen
class TransferPlan:
    """Copy block `source_ids[i]` of tier `source` to block `destination_ids[i]` of tier `destination`, for every i.

    The order is prefix order. Ids are distinct on each side and never name the null block.
    """

    job_id: int
    source: Tier
    destination: Tier
    source_ids: array[int]
    destination_ids: array[int]

    @property
    def direction(self) -> Direction:
        return Direction.LOAD if self.destination < self.source else Direction.STORE

    @property
    def num_blocks(self) -> int:
        return len(self.source_ids)


@attrs.frozen
class Completion:
    """The result of one plan. `num_landed`: proven blocks at its front. `corrupt`: indices into its ids."""

    job_id: int
    outcome: Outcome
    num_landed: int = 0
    corrupt: tuple[int, ...] = ()
    error: str = ""
    num_bytes: int = 0
    duration_s: float = 0.0
