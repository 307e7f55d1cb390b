"""Tiers below the host in the event loop of a runtime, and the program's own tier.

A runtime calls the methods of `TierWork` for each of its tiers below the host, the nearest tier first. So the runtime
does not depend on which tiers it has. The disk (`DiskWork`), the remote store (`RemoteWork`) and the program's own tier
(`LowerWork`) override the methods that they need.
"""

from __future__ import annotations

from collections.abc import Iterator

import anyio
import attrs

from ..._common.prefix import Prefix
from ..._common.tiers import Tier
from ..._extensions.assembly import AnyLedger
from ..._kernel.layout import Layout
from ..._runtime.worker import CopyWorker
from .extension import LowerTier


class TierWork:
    """Base of the tiers below the host of one runtime, in its event loop's thread."""

    num_fetches_skipped: int
    """Number of fetches that were not begun because the tier had failed or hangs."""

    @property
    def tier(self) -> Tier:
        raise NotImplementedError

    def identify(self, layout: Layout, namespace: str) -> None:
        """Called before the transport opens. `layout` and `namespace` identify the KV that the tier may hold."""

    async def open(self, hashing: anyio.CapacityLimiter | None) -> None:
        """Called once the transport is open. `hashing`: limits the threads that compute digests. Raises
        `TransferRefused` if the tier needs a thread and none can be started."""

    def store_more(self) -> None:
        """Plan stores. Called after each change that may have made one due."""

    def invalidate(self) -> None:
        """Called after an invalidation. The tier forgets the blocks of the failed forward."""

    async def reset(self, tier: Tier | None, timeout_s: float) -> None:
        """Called after the ledger, or only its tier `tier`, was reset. The tier forgets its blocks, if the reset
        includes it. Raises `TransferRefused` if it may not have forgotten them within `timeout_s` seconds."""

    def end(self) -> None:
        """Stop, because the runtime closes. Called before `flush`."""

    async def flush(self) -> None:
        """Store blocks that should outlive the runtime, because the runtime closes."""

    def remarks(self) -> Iterator[str]:
        """The lines of `explain` about the tier."""
        return iter(())


@attrs.define(eq=False)
class LowerWork(TierWork):
    """A `LowerTier` of one runtime, in its event loop's thread."""

    ledger: AnyLedger
    worker: CopyWorker
    extension: LowerTier
    block_bytes: int
    num_fetches_skipped: int = attrs.field(default=0, init=False)

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
        """Whether a fetch may begin. False if the tier hangs."""
        return not self.worker.copies.is_stalled(self.tier, Tier.HOST)

    def skip_fetch(self, request_id: str) -> None:
        """Count a fetch that was skipped because the tier hangs. The request computes the blocks."""
        self.num_fetches_skipped += 1

    def fetch_s(self, prefix: Prefix) -> float:
        """Seconds until a fetch of `prefix` that begins now would be over; 0 if the tier was not measured yet."""
        copies = self.worker.copies
        num_blocks = copies.call_ledger(self.ledger.fetches.num_blocks, prefix) or 0
        return copies.seconds(self.tier, Tier.HOST, num_blocks)
