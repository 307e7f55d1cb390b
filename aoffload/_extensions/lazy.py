"""Lazy stores: blocks are stored in the host just before the next allocations would evict them.

Only full attention is deferred. The kernel stores windows at commits (see `commits`), because a request gives up the
blocks of a window while it still holds its prefix, so the device evicts them first.
"""

from __future__ import annotations

from .._common.arguments import check_int
from .._config.config import MAX_BLOCKS
from .._kernel.extension import LedgerExtension
from .._kernel.ledger import CoreLedger
from .._kernel.plans import TransferPlan
from .._kernel.records import Run
from .store_policies import StorePolicy
from .watermark import EvictionWatermark


class WriteBack(LedgerExtension):
    """Stores blocks that are about to be evicted (`Ledger.write_back`)."""

    def __init__(self, policy: StorePolicy) -> None:
        self._policy = policy

    def on_attach(self, ledger: CoreLedger) -> None:
        self._ledger = ledger
        self._watermark = EvictionWatermark(
            ledger.cache, ledger.jobs, ledger.stores, self._policy.num_watermark_blocks, (ledger.layout.full,)
        )

    def ask_deferred(self, run: Run, stop: int) -> bool:
        """Mark the path of `run`. Its blocks are stored once they are about to be evicted."""
        self._watermark.offer(run, stop)
        return True

    def plan(self) -> tuple[TransferPlan, ...]:
        """Plan stores of the blocks that the next allocations would evict.

        Call it after `commit` and `release`. The call is cheap if nothing has changed. The blocks may have been
        computed at any time, so the copies have to wait for all compute submitted to the device so far.
        """
        self._ledger.hooks.refuse_verb()
        num_blocks = self._policy.num_watermark_blocks
        self._watermark.num_blocks = check_int("store_policy.num_watermark_blocks", num_blocks, 0, MAX_BLOCKS)
        return self._ledger.plans_of(self._watermark.plan())
