"""The disk tier on the seam of the ledger: `Ledger.disk`."""

from __future__ import annotations

from array import array

from ..._common.arguments import check_bool, check_int
from ..._common.tiers import Tier
from ..._config.tiers import DiskTier
from ..._extensions.store_policies import RequestCounts
from ..._kernel.base import CacheBase
from ..._kernel.extension import Build, LedgerExtension
from ..._kernel.plans import TransferPlan
from ..._kernel.protocols import EvictionOrder
from ..._kernel.records import Job
from ..lower.rules import stores_to
from .plans import RestoredRun
from .rules import DiskBlocks, Restores, SlotPool, check_restored


class DiskExtension(LedgerExtension):
    """Plans the copies of the disk (`Ledger.disk`, `HostCache.disk`)."""

    _blocks: DiskBlocks

    def __init__(self, tier: DiskTier, counts: RequestCounts) -> None:
        self._tier, self._counts = tier, counts

    def on_build(self, build: Build) -> None:
        self._pool = SlotPool(self._tier.num_slots(build.block_bytes, build.layout.unit_tokens))
        build.add_tier(Tier.DISK, self._pool.num_blocks, self._make_tier)

    def _make_tier(self, order: EvictionOrder) -> DiskBlocks:
        self._blocks = DiskBlocks(Tier.DISK, self._pool, order, used=self._pool.used)
        return self._blocks

    def on_attach(self, ledger: CacheBase) -> None:
        self._ledger = ledger
        self._restores: Restores | None = Restores(ledger.cache, self._blocks, self._pool)
        """None after the first store to disk or a reset, because from then on the slots that an earlier process has
        written may have other contents."""
        self._stores = stores_to(ledger, Tier.DISK, self._counts)

    def on_resetting(self, tier: Tier | None) -> None:
        if tier in (None, Tier.DISK):
            self._restores = None

    # -- the verbs ------------------------------------------------------------------------------------------------

    def plan_stores(
        self, max_blocks: int, *, is_idle: bool = False, only_requested_twice: bool = False
    ) -> tuple[TransferPlan, ...]:
        """Plan stores to disk of the blocks that the host evicts next, at most `max_blocks` blocks. `is_idle`: also
        store blocks that were requested twice. `only_requested_twice`: store only blocks that were requested twice.
        Cheap if nothing has changed."""
        self._ledger.hooks.refuse_verb()
        check_int("max_blocks", max_blocks, 0)
        check_bool("is_idle", is_idle)
        check_bool("only_requested_twice", only_requested_twice)
        return self._planned(self._stores.plan(max_blocks, is_idle=is_idle, only_requested_twice=only_requested_twice))

    @property
    def stores_are_due(self) -> bool:
        """Whether `plan_stores` may find blocks that it did not find last time. Cheap."""
        return self._stores.are_due

    def plan_flush(self, max_blocks: int) -> tuple[TransferPlan, ...]:
        """Plan stores to disk of the blocks in the host, at most `max_blocks` blocks, the most recently used first."""
        self._ledger.hooks.refuse_verb()
        check_int("max_blocks", max_blocks, 0)
        return self._planned(self._stores.plan_flush(max_blocks))

    def _planned(self, jobs: list[Job]) -> tuple[TransferPlan, ...]:
        if jobs:
            self._restores = None  # the stores may write to slots that an earlier process has left
        return self._ledger.plans_of(jobs)

    def take_forgotten(self) -> array[int]:
        """The slots on disk whose contents were invalidated since the last call. Erase their records, so that no
        restart finds them."""
        return self._blocks.take_forgotten()

    @property
    def num_resets(self) -> int:
        """Number of resets of the disk since this ledger was made: see `DiskPayload.generation`."""
        return self._blocks.num_resets

    def restore(self, run: RestoredRun) -> int:
        """Restore a run that an earlier process has left on disk. Returns the number of its slots that are in use now.

        Restore a prefix before the runs that follow it. Requests may run meanwhile. Restore all runs before the first
        store to disk, because nothing is restored after that store or after a reset. A run that follows no cached run
        is skipped, and so are units that are cached already."""
        self._ledger.hooks.refuse_verb()
        found = check_restored(run, self._ledger.cache)
        return 0 if self._restores is None else self._restores.restore(found)
