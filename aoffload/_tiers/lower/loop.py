"""The program's own tier (`LowerTier`) in the event loop: plans its stores, and estimates the time of fetches."""

from __future__ import annotations

import attrs

from ..._extensions.assembly import AnyLedger
from ..._kernel.prefix import Prefix
from ..._kernel.states import Tier
from ..._runtime.worker import CopyWorker
from .extension import LowerTier


@attrs.define(eq=False)
class LowerWork:
    """A `LowerTier` of one runtime, in its event loop's thread."""

    ledger: AnyLedger
    worker: CopyWorker
    extension: LowerTier
    block_bytes: int
    num_fetches_skipped: int = attrs.field(default=0, init=False)
    """Number of fetches that were not begun because the tier hangs."""

    @property
    def tier(self) -> Tier:
        return self.extension.tier

    def store_more(self) -> None:
        """Store the blocks that host memory is about to evict. Called after each change that may have made a store
        due."""
        copies = self.worker.copies
        if most := copies.room_bytes(Tier.HOST, self.tier) // self.block_bytes:
            self.worker.submit(copies.call_ledger(self.extension.plan_stores, most) or ())

    @property
    def may_fetch(self) -> bool:
        """Whether a fetch is worth its time. False if the tier hangs."""
        return not self.worker.copies.is_stalled(self.tier, Tier.HOST)

    def skip_fetch(self, request_id: str) -> None:
        """Count a fetch that was skipped because the tier hangs. The request computes the blocks."""
        self.num_fetches_skipped += 1

    def fetch_s(self, prefix: Prefix) -> float:
        """Seconds until a fetch of `prefix` that begins now would be over; 0 if the tier was not measured yet."""
        copies = self.worker.copies
        num_blocks = copies.call_ledger(self.ledger.fetches.num_blocks, prefix) or 0
        return copies.seconds(self.tier, Tier.HOST, num_blocks)
