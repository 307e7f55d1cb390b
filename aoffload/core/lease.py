"""A lease: the single-use token that owns references."""

from __future__ import annotations

import attrs

from ..errors import LeaseError
from .index import Run
from .plan import Tier

__all__ = ["Lease"]


@attrs.define(eq=False)
class Lease:
    """Pins, in one tier, the blocks of `run` and of every run before it. Taken and released by the `PrefixCache`.

    It holds run objects, never block ids or keys: a split puts a new head before the run, which then lies on the
    path and stays pinned, and nothing that happens in the index can make it let go of the wrong blocks.
    """

    tier: Tier
    run: Run
    starts: list[int] = attrs.field(factory=list)
    """For each band of limited reach: the unit, always the start of a run, from which on its blocks are pinned, too.
    Beyond the end of `run` while none of them is."""
    released: bool = False

    def spend(self) -> None:
        """Mark as released; releasing twice raises."""
        if self.released:
            raise LeaseError(f"{self.tier.name} lease on {self.run} released twice")
        self.released = True
