"""The ledger's calls about a remote store, which other processes use too."""

from __future__ import annotations

from collections.abc import Callable

from ..arguments import check_callable
from .arguments import check_int
from .ledger_disk import DiskOfLedger
from .plan import CellLabel, TransferPlan

__all__ = ["RemoteOfLedger"]


class RemoteOfLedger(DiskOfLedger):
    """Calls that need `OffloadConfig.remote`. Without it, nothing is ever planned for a remote store."""

    @property
    def cell_units(self) -> int:
        """Units of a cell: see `cells_of`. 0 without a remote store."""
        return 0 if self._remote_stores is None else self._remote_stores.cell_units

    def plan_remote_stores(self, max_blocks: int, is_wanted: Callable[[CellLabel], bool]) -> tuple[TransferPlan, ...]:
        """Stores of whole cells that are in the host and were asked for twice, at most `max_blocks` blocks; what was
        asked for last comes first. Cheap if nothing has changed.

        `is_wanted` is asked for each cell, with the ledger in the middle of this call: False for what the store has."""
        if self._moves.is_telling:
            raise self._in_report("plan_remote_stores")
        check_int("max_blocks", max_blocks, 0)
        check_callable("is_wanted", is_wanted)
        if self._remote_stores is None:
            return ()
        ticket = self._num_admitted
        oldest = next(iter(self.holdings.values())).ticket if self.holdings else ticket
        return tuple([job.plan for job in self._remote_stores.plan(max_blocks, is_wanted, ticket, oldest)])

    def take_forgotten_cells(self) -> tuple[CellLabel, ...]:
        """The cells to remove from the store, since `invalidate` has taken back what they hold: all of which a store
        may have been planned. Those that a store under way may still bring there are kept until it is settled."""
        return () if self._remote_stores is None else self._remote_stores.take_forgotten()
