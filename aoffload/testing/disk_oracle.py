"""The oracle of the disk: checks its contents, and the number of host blocks that fetches use."""

from __future__ import annotations

import attrs

from .._common.tiers import Tier
from .._extensions.transfers import Fetch
from .._runtime.runtime import AnyRuntime
from .._tiers.disk.loop import DiskState
from .faults import Faults
from .serving import SimulatedEngine
from .tag_disk import TagDisk
from .violations import Violation

__all__ = ["DiskOracle"]


@attrs.define(eq=False)
class DiskOracle:
    """Watches the disk tier of one runtime, if it has one."""

    runtime: AnyRuntime
    engine: SimulatedEngine
    faults: Faults

    @property
    def _disk(self) -> TagDisk | None:
        return self.engine.transport.disk

    def fetched(self, fetch: Fetch) -> None:
        """Check that all fetches together use no more than their share of the host."""
        ledger = self.runtime.ledger
        under_way = ledger.transfers.under_way.values()
        taken = sum(one.num_blocks for one in under_way if isinstance(one, Fetch))
        most = int(ledger.cache.tiers[Tier.HOST].pool.num_blocks * self.runtime.config.max_fetch_share)
        if fetch.num_blocks and taken > most:
            raise Violation("more than its share", f"fetches take {taken} blocks, and may take {most}")

    def check(self) -> None:
        """Check that each prefix on the disk is complete. After a gap, a restart would find nothing."""
        if self._disk is None or self.faults.fired or self.engine.num_invalidations:
            return
        for run in self.runtime.ledger.cache.index.runs.values():
            before, part = run.before, run.parts[Tier.DISK]
            if part.blocks and before is not None and before.parts[Tier.DISK].stop < before.stop:
                raise Violation("a tail without its head", f"{run} on the disk, behind {before}")

    def check_at_rest(self, told_corrupt: set[int]) -> None:
        """Check that no slot is leased, that no slot found corrupt can be found, and that a disk that is off is not
        used."""
        found, work = self.runtime.statistics().disk, self.runtime._session.disk
        if found is None or self._disk is None:
            return
        if self._disk.is_off and work is not None and work.state is DiskState.READY:
            raise Violation("a disk that is off", "the runtime goes on as if it were not")
        if found.num_pinned:
            raise Violation("a leak", f"at rest, slots are pinned: {found}")
        if found.num_quarantined and not self.faults.may_take_room:
            raise Violation("a leak", f"quarantined without a fault: {found}")
        for job_id in told_corrupt:
            for slot, generation in self._disk.corrupt.get(job_id, ()):
                if self._disk.memory.is_owned[slot] and self._disk.memory.generation[slot] == generation:
                    raise Violation("a bad entry was kept", f"slot {slot}")
