"""The tiers: where blocks live.

Blocks move between tiers. Each tier except `DEVICE` has one tier above it. A load copies to the tier above, and a store
copies from it:

    DEVICE  <- loads -  HOST  <- loads -  DISK, CUSTOM, REMOTE
            - stores ->       - stores ->

Only blocks on the device and in the host count for a hit. KV that only a lower tier has is fetched into the host first.
"""

from __future__ import annotations

import enum
from typing import Final, NamedTuple

from ..errors import InvalidArgument
from .arguments import shown


class Tier(enum.IntEnum):
    """Where blocks live, nearest to the compute first. `TIERS` says which tier is above which."""

    DEVICE = 0
    HOST = 1
    DISK = 2
    CUSTOM = 3
    """A tier that the program adds as an extension (`LowerTier`)."""
    REMOTE = 4

    __hash__ = int.__hash__  # the default hashes the name each time, in Python


# The members as constants, here and in `_kernel/states`, because the kernel reads about a hundred of them for each
# request. In Python 3.11, `Tier.DEVICE` takes 30 times as long to read as a global name.
DEVICE: Final = Tier.DEVICE
HOST: Final = Tier.HOST
DISK: Final = Tier.DISK
CUSTOM: Final = Tier.CUSTOM
REMOTE: Final = Tier.REMOTE


class TierRow(NamedTuple):
    """The facts about a tier that no configuration changes. `TierBlocks` and `EngineTier` say who evicts its blocks."""

    tier: Tier
    above: Tier | None
    """The tier to which its loads copy, and from which its stores copy. None: there is none above."""
    lowest_id: int
    """The first usable block id: 1 in a tier whose block 0 is the null block."""
    is_indexed: bool = True
    """Whether the index knows the blocks of the tier. False: only the tier itself knows its contents."""
    leaves_doubt: bool = True
    """Whether a copy from or to the tier leaves its destination in doubt when it is given up, so that the destination
    goes into quarantine. False: late data is verified, and the copy does not touch host memory any more."""


TIERS = (
    TierRow(Tier.DEVICE, above=None, lowest_id=1),
    TierRow(Tier.HOST, above=Tier.DEVICE, lowest_id=0),
    TierRow(Tier.DISK, above=Tier.HOST, lowest_id=0),
    TierRow(Tier.CUSTOM, above=Tier.HOST, lowest_id=0),
    TierRow(Tier.REMOTE, above=Tier.HOST, lowest_id=0, is_indexed=False, leaves_doubt=False),
)
"""The tiers, by number. Those that the index knows come first."""
BELOW: Final = next(row.tier for row in TIERS if row.above is Tier.DEVICE)
"""The tier right below the device: loads onto the device come from it, stores from the device go to it."""
HIT_TIERS: Final = (Tier.DEVICE, BELOW)
"""Tiers that can serve a hit directly; KV of lower tiers must be fetched first."""
CACHE_TIERS: Final = tuple(row.tier for row in TIERS if row.is_indexed)
"""Tiers whose blocks the index knows, if they are configured."""
LOWER_TIERS: Final = tuple(row.tier for row in TIERS if row.above is BELOW)
"""Tiers below the host: their part of a hit must be fetched first."""


def check_tier(name: str, tier: object) -> Tier:
    if not isinstance(tier, Tier):
        raise InvalidArgument(name, f"must be a Tier such as Tier.HOST, got {shown(tier)}")
    return tier
