"""The remote tier on the seam of the ledger: `Ledger.remote`."""

from __future__ import annotations

from collections.abc import Callable

import attrs

from ..._common.arguments import check_callable, check_int
from ..._common.tiers import Tier
from ..._config.tiers import RemoteTier, cell_units
from ..._extensions.store_policies import RequestCounts
from ..._kernel.base import CacheBase
from ..._kernel.extension import LedgerExtension
from ..._kernel.plans import TransferPlan
from ..._kernel.pools import ExtentPool, LeastRecentlyUsed, TierBlocks
from ..._kernel.records import Job
from ..._kernel.tokens import TokenSequence
from ...errors import ConfigError
from .plans import CellLabel
from .rules import RemoteStores, check_cell

PATIENCE = 2.0
"""The timeout of a job of a remote store, as a multiple of the timeout of its call. It is larger than 1 because the job
may wait for another job, so a store that keeps its timeouts is never given up."""


@attrs.frozen
class RemoteCounts:
    """Numbers of cells that are being copied or removed. Only the store knows the cells that it holds."""

    num_loads: int
    """Cells that are being loaded into the host."""
    num_stores: int
    """Cells that are being stored."""
    num_forgotten: int
    """Cells to remove from the store: see `take_forgotten`."""


class RemoteExtension(LedgerExtension):
    """Plans the copies of the remote tier (`Ledger.remote`, `HostCache.remote`)."""

    stores: RemoteStores

    def __init__(self, tier: RemoteTier, counts: RequestCounts) -> None:
        self._tier, self._counts = tier, counts

    def on_attach(self, ledger: CacheBase) -> None:
        self._ledger = ledger
        if ledger.layout.partial:
            others = "windows" if ledger.layout.windows else "a recurrent state"
            raise ConfigError("remote", f"supports full attention only: these groups have {others}")
        self.cell_units = cell_units(ledger.block_bytes * ledger.layout.width, self._tier.max_cell_bytes)
        """Number of units in a cell: see `cells_of`."""
        self._check_size()
        timeouts_s = PATIENCE * self._tier.load_timeout_s, PATIENCE * self._tier.store_timeout_s
        ledger.jobs.tiers[Tier.REMOTE] = TierBlocks(
            Tier.REMOTE, ExtentPool(0), LeastRecentlyUsed(), is_outside=True, timeouts_s=timeouts_s
        )
        self.stores = RemoteStores(ledger.cache, ledger.jobs, self._counts, self.cell_units)

    def _check_size(self) -> None:
        """Refuse cells that are larger than the share of all fetches, because they could never be loaded. Any size is
        allowed if the share is 0, because then fetches are off."""
        ledger = self._ledger
        num_blocks, share = self.cell_units * ledger.layout.width, ledger.config.max_fetch_share
        most = int(ledger.cache.tiers[Tier.HOST].pool.num_blocks * share)
        if share and num_blocks > most:
            bound = f"max_fetch_share of host memory is {most} blocks of {ledger.block_bytes} bytes"
            problem = f"makes cells of {num_blocks} blocks, which could never be loaded: {bound}"
            raise ConfigError("cell_bytes", problem)

    # -- the verbs ------------------------------------------------------------------------------------------------

    def plan_stores(self, max_blocks: int, is_wanted: Callable[[CellLabel], bool]) -> tuple[TransferPlan, ...]:
        """Plan stores of whole cells that are in the host and were requested twice, at most `max_blocks` blocks, the
        most recently requested first. Cheap if nothing has changed.

        `is_wanted` is called for each cell, and must return False if the store holds the cell.
        """
        ledger = self._ledger
        ledger.hooks.refuse_verb()
        check_int("max_blocks", max_blocks, 0)
        check_callable("is_wanted", is_wanted)
        ticket = ledger.num_admitted
        oldest = next(iter(ledger.live_requests.values())).ticket if ledger.live_requests else ticket
        return tuple([job.plan for job in self.stores.plan(max_blocks, is_wanted, ticket, oldest)])

    def take_forgotten(self) -> tuple[CellLabel, ...]:
        """The cells to remove from the store, because their KV was invalidated: all such cells for which a store may
        have been planned. A cell that a store under way may still write is returned only after the store is settled."""
        return self.stores.take_forgotten()

    @property
    def counts(self) -> RemoteCounts:
        """The numbers of cells that are being copied or removed."""
        links = [job.plan.link for job in self._ledger.jobs.unsettled.values()]
        num_loads, num_stores = links.count((Tier.REMOTE, Tier.HOST)), links.count((Tier.HOST, Tier.REMOTE))
        return RemoteCounts(num_loads, num_stores, len(self.stores.forgotten))

    # -- hooks ----------------------------------------------------------------------------------------------------

    def on_invalidated(self, sequence: TokenSequence, first: int, stop: int) -> list[Job]:
        """Invalidate the cells that hold these units or units after them."""
        return self.stores.invalidate(sequence, first, stop)

    def report_job(self, job: Job) -> None:
        check_cell(self._ledger.cache, job)
