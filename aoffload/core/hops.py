"""Hops: the tiers, in which directions blocks are copied between them, and how a copy ends."""

from __future__ import annotations

import enum
from typing import Final, NamedTuple

__all__ = ["BELOW", "CACHE_TIERS", "HIT_TIERS", "TIERS", "Direction", "Outcome", "Tier"]


class Tier(enum.IntEnum):
    """Where blocks live, nearest to the compute first. `TIERS` says how they lie to one another."""

    DEVICE = 0
    HOST = 1
    DISK = 2
    REMOTE = 3

    __hash__ = int.__hash__  # the default hashes the name each time, in Python


class TierRow(NamedTuple):
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
