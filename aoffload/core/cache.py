"""The prefix cache: the index, the blocks of every tier, and the references that pin them.

Full attention counts references per run and tier. A lease counts on the run it ends at; a referenced run counts once on
the run before it. So a lease pins its path from the end to the root, taking it costs one step for each run that was not
pinned, and an unpinned run never has a pinned one behind it:

    root <- [0,40) <- [40,48) <- [48,50)      leases: a ends at 48, b at 50
              1          1+1         1        [40,48): lease a, and the referenced child [48,50)

Of a window band a lease pins only the blocks from some unit on, where a run begins. It counts on each run from that
one to the last of its path. Blocks that have left the window stay cached while there is room, and a prefix that ends
there may still hit.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from ..errors import LeaseError
from .eviction import EvictionOrder
from .groups import Band, Layout
from .hops import Tier
from .index import RunIndex
from .last_uses import LastUses
from .observing import shielded
from .records import Lease, Part, Run
from .splits import SplitsAndMerges
from .tiers import TierBlocks
from .tokens import TokenSequence
from .watching import BlockWatcher

__all__ = ["PrefixCache"]


class PrefixCache(SplitsAndMerges):
    """The cached runs, their blocks in every tier, and the leases on them. Never waits, and never raises for lack of
    room: callers check `room` first."""

    def __init__(
        self,
        layout: Layout,
        tiers: tuple[TierBlocks, ...],
        new_order: Callable[[Tier], EvictionOrder],
        last_uses: LastUses,
    ) -> None:
        super().__init__(layout, tiers)
        self.last_uses = last_uses
        self._new_order = new_order
        self.epoch = self.index.epoch
        """Counts resets. Runs of another epoch are not findable."""
        self.has_disk = len(tiers) > Tier.DISK

    def watch(self, watcher: BlockWatcher | None) -> None:
        """Report to `watcher` every change of what is cached, in all tiers but engine-owned ones."""
        for tier in self.tiers:
            tier.watcher = None if tier.is_outside or watcher is None else shielded(watcher, "part_changed all_cleared")

    # -- leases ---------------------------------------------------------------------------------------------------

    def lease(self, tier: Tier, run: Run, starts: Sequence[int] | None = None, *, is_use: bool = True) -> Lease:
        """Pin the path of `run` in `tier`; of each window the units from its entry in `starts` on, or those needed to
        continue computing at the end of `run`.

        Without `is_use`, the lease does not refresh LRU positions: blocks that no other lease has used by its release
        return to their old place in the eviction order. A store leases its source so, or lazy stores would reverse the
        order."""
        blocks = self.tiers[tier]
        self.full.pin(blocks, run, is_use)
        lease = Lease(tier, run)
        if self.windows:
            lease.starts = list(self.layout.window_starts(run.stop) if starts is None else starts)
            self._pin_windows(lease, is_use)
        return lease

    def _pin_windows(self, lease: Lease, is_use: bool) -> None:
        blocks, run = self.tiers[lease.tier], lease.run
        for window, start in zip(self.windows, lease.starts, strict=True):
            if start < run.stop:
                if start != run.start:
                    self.split_path(run, start)
                window.pin(blocks, run, start, is_use)

    def release(self, lease: Lease) -> None:
        """End a lease. Blocks that no other lease pins become evictable, the tail of the path first."""
        if lease.released:
            raise LeaseError(f"{lease.tier.name} lease on {lease.run} released twice")
        lease.released = True
        blocks = self.tiers[lease.tier]
        if self.windows:
            for window, start in zip(self.windows, lease.starts, strict=True):
                if start < lease.run.stop:
                    window.unpin(blocks, lease.run, start)
        let_go = self.full.unpin(blocks, lease.run)
        for left in self.merge(let_go) if len(let_go) > 1 else let_go:
            self.tidy(left)

    def move_lease(self, lease: Lease, run: Run) -> None:
        """Move the end of `lease` forward or back to `run`, which is on the same path."""
        if lease.run is run:
            return
        blocks, old = self.tiers[lease.tier], lease.run
        self.full.pin(blocks, run, is_use=True)
        for window, start in zip(self.windows, lease.starts, strict=True):
            if run.stop > old.stop:
                window.pin(blocks, run, max(start, old.stop), is_use=True)
            else:
                window.unpin(blocks, old, max(start, run.stop))
        lease.run = run
        if run.stop < old.stop:
            lease.starts = [min(start, run.stop) for start in lease.starts]
        let_go = self.full.unpin(blocks, old)
        for left in self.merge(let_go) if len(let_go) > 1 else let_go:
            self.tidy(left)

    def slide_lease(self, lease: Lease, band: Band, start: int) -> None:
        """Unpin the units of `band` before `start`. They stay cached until their room is needed."""
        at = band.number - 1
        if lease.starts[at] >= start:
            return
        window, blocks = self.windows[at], self.tiers[lease.tier]
        for current in reversed(_between(lease.run, lease.starts[at], start)):
            if current.stop <= start:
                window.unpin(blocks, current, current.start)
            elif not self.shift_boundary(current, start, lease.tier, band):
                head = self.split(current, start)
                window.unpin(blocks, head, head.start)
        lease.starts[at] = start

    def pinned_by_none_but(self, leases: Iterable[Lease]) -> list[Part]:
        """The parts that no lease but `leases`, all of one tier, pins."""
        counts: Counter[Part] = Counter()
        for lease in leases:
            current: Run | None = lease.run
            while current is not None:
                part = current.parts[lease.tier]
                counts[part] += 1
                if counts[part] < part.num_references:
                    break
                current = current.before
            for number, start in enumerate(lease.starts, 1):
                for run in _between(lease.run, start, lease.run.stop):
                    counts[run.part(lease.tier, number)] += 1
        return [part for part, count in counts.items() if count == part.num_references]

    def split_path(self, run: Run, at: int) -> None:
        """Split a run on the path of `run`, so that one begins at unit `at`, which lies on it."""
        current: Run | None = run
        while current is not None and current.start > at:
            current = current.before
        if current is not None and current.start < at:
            self.split(current, at)

    def path_to(self, sequence: TokenSequence, stop: int) -> Run:
        """The run of the index that ends at unit `stop` of `sequence`; inserts what is missing."""
        last, position = None, 0
        for run, agreed in list(self.index.walk(sequence, stop)):
            last, position = self.cut(run, agreed), agreed
        return self.insert_behind(last, sequence, position, stop)

    def insert_behind(self, last: Run | None, sequence: TokenSequence, start: int, stop: int, key: bytes = b"") -> Run:
        """Insert units `[start, stop)` of `sequence`, none of which the index has, behind `last`; `key`: that of the
        first, if it is known. Returns the last run. Nothing keeps the runs yet."""
        while start < stop:
            upto = sequence.run_stop(start, stop)
            last = self.index.insert(sequence, last, start, upto, key)
            start, key = upto, b""
        assert last is not None, "a path to nowhere"
        return last

    # -- blocks ---------------------------------------------------------------------------------------------------

    def take(self, tier: Tier, num_blocks: int) -> array[int]:
        """Take `num_blocks` blocks of `tier`, evicting as many as needed. The caller has checked `room`."""
        blocks = self.tiers[tier]
        while (short := num_blocks - blocks.pool.num_free) > 0:
            part = blocks.order.oldest()
            assert part is not None, "room was promised"
            num_units = min(-(-short // part.width), part.stop - part.first)
            blocks.trim(part, num_units)
            blocks.num_evicted += num_units * part.width
            self.tidy(part.run)
        return blocks.pool.take(num_blocks)

    def give(self, tier: Tier, block_ids: array[int]) -> None:
        if block_ids:
            self.tiers[tier].pool.give(block_ids)

    def forget(self, part: Part, position: int) -> None:
        """Withdraw the unit at `position` of `part`, whose bytes are wrong. `part` has references, so the blocks become
        a tombstone.

        The units behind it in the run are split off and keep their blocks. A match finds them again once the gap is
        filled.
        """
        run = part.run
        if position + 1 < run.stop and part.stop > position + 1:
            part = self.split(run, position + 1).part(part.tier, part.band)
        first, stop = part.first, part.stop
        part.entomb(position, part.drop_behind(position))
        self.tiers[part.tier].part_changed(part, first, stop)

    def reset(self) -> None:
        """Swap the index: nothing cached so far is findable any more. Pinned blocks stay until they are unpinned."""
        self.epoch += 1
        self.index = RunIndex(self.layout, self.epoch, self.index.tiers)
        for tier in self.tiers:
            for part in list(tier.order):
                tier.pool.give(part.clear())
            tier.order = self._new_order(tier.tier)
            tier.all_cleared(self.epoch)
        # All tiers but an engine-owned device, which is the first, have the same watcher: it is told once.
        if (watcher := self.tiers[-1].watcher) is not None:
            watcher.all_cleared(self.epoch)

    def reset_tier(self, tier: Tier) -> None:
        """Make all blocks of one tier unfindable. Unpinned ones are freed, pinned ones once they are unpinned."""
        runs = list(self.index.runs.values())
        for run in runs:
            for part in run.parts_in(tier):
                self.withdraw_part(part)
        self.tiers[tier].count_reset()
        for run in runs:
            self.tidy(run)

    def withdraw_part(self, part: Part) -> None:
        """Make the blocks of `part` unfindable: they are freed or, if it is pinned, become a tombstone. Jobs in flight
        to it publish nothing."""
        job, tier = part.incoming, self.tiers[part.tier]
        while job is not None and job.stop > part.run.start:
            job.publish_nothing()
            if job.parked is not None:  # it has landed: a restart would find it
                tier.taken_back(job.plan.destination_ids)
            job = job.predecessor
        part.awaits(None)  # these jobs add nothing any more
        first, stop = part.first, part.stop
        if part.blocks and not part.num_references:
            tier.make_pinned(part)  # takes it out of the eviction order
            tier.pool.give(part.clear())
        elif part.blocks:
            part.entomb(first, part.clear())
        if first < stop and part.run.epoch == self.epoch:  # else a reset has reported it already
            tier.part_changed(part, first, stop)

    def withdraw_all(self, wrong: Iterable[Run]) -> None:
        """Withdraw the `wrong` runs, of any epoch, and all runs behind them in the index, whichever request has
        computed them. A run behind a wrong one would be findable again once the wrong one is computed anew."""
        for tier in self.tiers:
            tier.freed_are_taken_back()
        heads = set(wrong)
        behind = [run for run in self.index.runs.values() if not heads.isdisjoint(run.path())] if heads else []
        for run in (*(run for run in wrong if run.epoch != self.epoch), *behind):
            for part in run.parts:
                self.tiers[part.tier].taken_back(part.blocks)
                self.withdraw_part(part)
        for run in behind:
            self.tidy(run)


def _between(run: Run, start: int, stop: int) -> list[Run]:
    """The runs on the path of `run` that overlap units `[start, stop)`, last first."""
    found: list[Run] = []
    for current in run.path():
        if current.stop <= start:
            break
        if current.start < stop:
            found.append(current)
    return found
