"""Plans, which the core gives to a transport, and completions, which come back. Only these frozen values cross."""

from __future__ import annotations

import enum
from array import array
from typing import Final

import attrs

__all__ = [
    "BELOW", "CACHE_TIERS", "HIT_TIERS", "TIERS", "BlockLabel", "CellLabel", "Completion", "Direction", "Outcome",
    "Tier", "TierRow", "TransferPlan",
]  # fmt: skip


class Tier(enum.IntEnum):
    """Where blocks live, nearest to the compute first. `TIERS` says how they lie to one another."""

    DEVICE = 0
    HOST = 1
    DISK = 2
    REMOTE = 3

    __hash__ = int.__hash__  # the default hashes the name each time, in Python


@attrs.frozen
class TierRow:
    """What is fixed about a tier. Who pins and evicts its blocks is not: see `TierBlocks` and `EngineTier`."""

    tier: Tier
    above: Tier | None
    """The one tier that it is copied to, by loads, and filled from, by stores."""
    lowest_id: int
    """1 where block 0 is the null block."""


TIERS = (
    TierRow(Tier.DEVICE, above=None, lowest_id=1),
    TierRow(Tier.HOST, above=Tier.DEVICE, lowest_id=0),
    TierRow(Tier.DISK, above=Tier.HOST, lowest_id=0),
    TierRow(Tier.REMOTE, above=Tier.HOST, lowest_id=0),
)
"""The tiers, by number."""
BELOW: Final = next(row.tier for row in TIERS if row.above is Tier.DEVICE)
"""The tier right below the device: loads onto the device come from it, stores from the device go to it."""
HIT_TIERS: Final = (Tier.DEVICE, BELOW)
"""Where a hit may lie. What only a tier further down has is fetched first."""
CACHE_TIERS: Final = (Tier.DEVICE, Tier.HOST, Tier.DISK)
"""The tiers whose blocks the index knows. What a remote store has, only the store knows."""


class Direction(enum.Enum):
    """Of a hop, which is a source and a destination of copies: up the tiers, or down."""

    LOAD = "load"
    STORE = "store"


class Outcome(enum.Enum):
    """How a transfer ended. Only `UNPROVEN` leaves its destination in doubt."""

    LANDED = "landed"
    """Every block is proven at its destination. With a `num_landed` that is not all of them, it counts as FAILED."""
    FAILED = "failed"
    """Over for certain, but only the leading `num_landed` blocks are proven. Says nothing about the source."""
    CORRUPT = "corrupt"
    """Over for certain. The blocks at `corrupt` differ from what was stored; the first `num_landed` are proven."""
    UNPROVEN = "unproven"
    """The copy may still be writing: its destination is quarantined."""
    REFUSED = "refused"
    """Nothing was copied: what failed lately is left alone for a while. Else it counts as FAILED."""


@attrs.frozen(slots=True)
class BlockLabel:
    """What a block holds: place `place` of the unit at `position` in `band`, of the prefix whose digests through this
    unit and before it are `digest` and `before` (empty: there is nothing before it)."""

    band: int
    place: int
    position: int
    root: bytes
    digest: bytes
    before: bytes
    tokens: bytes
    """Of this unit, as little-endian int32."""


@attrs.frozen(slots=True)
class CellLabel:
    """Units `[start, stop)` of one band of the prefix whose digest through unit `stop` is `digest`: what a remote store
    keeps as one object. `stop - start` is a power of two, and `start` a multiple of it."""

    band: int
    digest: bytes
    start: int
    stop: int


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
    labels: tuple[BlockLabel | None, ...] = ()
    """Of a store to the disk: what each block holds. None where tokens alone do not prove it."""
    generation: int = 0
    """Of a store to the disk: how often that tier had been reset when the job was planned."""
    cell: CellLabel | None = None
    """From or to a remote store: the one cell that it copies. The ids on the remote side are the places of the blocks
    in the cell, in prefix order from 0; a load may leave out the front or the end of a cell."""

    @property
    def hop(self) -> tuple[Tier, Tier]:
        return self.source, self.destination

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
