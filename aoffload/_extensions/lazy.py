"""Lazy stores: blocks are stored in the host just before the next allocations would evict them."""

from __future__ import annotations

from .._kernel.extension import LedgerExtension
from .._kernel.ledger import CoreLedger
from .._kernel.plans import TransferPlan
from .._kernel.records import Run
from .watermark import EvictionWatermark


class WriteBack(LedgerExtension):
    """`Ledger.write_back`."""

    def __init__(self, num_watermark_blocks: int) -> None:
        self._num_watermark_blocks = num_watermark_blocks

    def on_attach(self, ledger: CoreLedger) -> None:
        self._ledger = ledger
        self._watermark = EvictionWatermark(ledger.cache, ledger.jobs, ledger.stores, self._num_watermark_blocks)

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
        return self._ledger.plans_of(self._watermark.plan())
