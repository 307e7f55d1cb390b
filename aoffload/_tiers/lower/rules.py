"""The rules of a tier below the host whose blocks are in the index: which blocks it stores. Such tiers are the disk and
the program's own tier (`LowerTier`).

First, blocks are stored that the host is about to evict; then blocks that were requested twice; and at the end all
others. The tier holds no suffix without its prefix. The caller decides how many blocks may be written, and when.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from ..._common.tiers import Tier
from ..._extensions.quotas import QuotaAccounts
from ..._extensions.store_policies import RequestCounts
from ..._extensions.watermark import EvictionWatermark
from ..._kernel.base import CacheBase
from ..._kernel.index import covered
from ..._kernel.jobs import Stores, left_of
from ..._kernel.pools import TierBlocks
from ..._kernel.records import NO_LIMIT, Job, Part, Run
from ..._kernel.tokens import TokenSequence

HOST_WATERMARK = 8
"""The first 1/8 of the host blocks in eviction order is stored before eviction."""
STEPS = 16
"""The watermark is divided into this many steps. The host is scanned again once its free blocks have decreased by one
step."""
MAX_SCANNED = 64
"""Maximum number of parts that one call scans for blocks that were requested twice."""
MIN_REMEMBERED = 64
"""Scanned parts that are remembered before those that are gone are dropped for the first time."""


@dataclass(slots=True, eq=False)
class LowerStores:
    watermark: EvictionWatermark
    counts: RequestCounts | None = None
    """None if the tier does not store blocks because they were requested twice."""
    quotas: Callable[[], QuotaAccounts | None] = lambda: None
    """The accounts of tenants; None without quotas."""
    _came_to: tuple[object, ...] = ()
    """The state at the last scan for blocks that the host is about to evict."""
    _turns: dict[Run, int] = field(default_factory=dict)
    """Runs that the tier lacked at that scan, each with the number of blocks that may still be stored for it. Empty
    once each run has had its turn. Without turns, the writes to a tier that is smaller than the watermark would never
    end, because each store would bring back blocks that the store before it has evicted."""
    _scanned: dict[Part, int] = field(default_factory=dict)
    """Scanned parts, each with its `last_use` then. Such a part needs no scan until its next use: its blocks that were
    requested twice were in the tier, or its account could not store them."""
    _scanned_at: int = 0
    """Number of resets of the tier at the last scan."""
    _max_remembered: int = MIN_REMEMBERED
    """Entries of `_scanned` above which those of parts that are gone are dropped."""
    _host: TierBlocks = field(init=False)
    _there: TierBlocks = field(init=False)
    _least_blocks: int = field(init=False)
    """The smallest number of blocks per unit of any component."""

    def __post_init__(self) -> None:
        self._host, self._there = self.watermark.source, self.watermark.there
        self._least_blocks = min(
            component.width for component in self.watermark.cache.layout.components if component.width
        )

    def plan(self, most: int, *, is_idle: bool, only_requested_twice: bool) -> list[Job]:
        """Store at most `most` blocks that the host is about to evict. With `is_idle`, store also blocks that were
        requested twice, as far as the tier has free slots."""
        watermark, jobs = self.watermark, list[Job]()
        if most <= 0:
            return []
        wanted = self._requested_stop if only_requested_twice else self._whole_stop
        before, self._came_to = self._came_to, (*self._nearness(), only_requested_twice)
        if self._came_to != before:
            self._turns = {run: self._num_blocks(run, self._host) for run in watermark.about_to_lose(wanted)}
        if self._turns:
            jobs += self._take_turns(most, wanted)
        if is_idle and not watermark.nothing_changed():
            num_free = self._there.pool.num_free  # evict nothing, or stores would never end
            left = min(left_of(most, jobs), num_free)
            jobs += watermark.store(self._requested_twice(left), self._requested_stop, left, num_free)
            if left_of(most, jobs) <= 0:
                watermark.seen = ()  # more blocks may be left to store, even if nothing changes
        return jobs

    @property
    def are_due(self) -> bool:
        """Whether `plan`, called with the same arguments as last time, may find more blocks to store."""
        watermark = self.watermark
        return bool(self._turns) or self._nearness() != self._came_to[:2] or watermark.state() != watermark.seen

    def _take_turns(self, most: int, wanted: Callable[[Run], int]) -> list[Job]:
        """Store the runs that still have a turn, in the eviction order of the scan, because stores change the order.
        The turn of a run ends when no block of it is left to store, or when a store has evicted other blocks of the
        same run from the tier. If `most` ends the call within a run, the next call continues with this run."""
        jobs, least = list[Job](), self._least_blocks
        runs = set(self.watermark.about_to_lose(wanted))
        if not self.watermark.jobs.num_stored_now(self._host.tier):  # during stores, `runs` lacks some runs
            self._turns = {run: turn for run, turn in self._turns.items() if turn and run in runs}
        for run in list(self._turns):
            left = min(left_of(most, jobs), self._turns[run]) if run in runs else 0
            if left > 0:
                before = self._num_blocks(run, self._there)
                found = self.watermark.store([run], wanted, left)
                jobs += found
                over = left_of(left, found)
                is_over = over >= least or self._num_blocks(run, self._there) < before
                self._turns[run] = 0 if is_over else self._turns[run] - (left - over)
            if left_of(most, jobs) < least:
                return jobs
        self._turns.clear()
        return jobs

    @staticmethod
    def _num_blocks(run: Run, blocks: TierBlocks) -> int:
        """Number of blocks that a tier holds on the path of `run`."""
        return sum(len(part.blocks) for each in run.path() for part in each.parts_in(blocks.tier))

    def _nearness(self) -> tuple[object, ...]:
        """A value that changes once the host has used one more step of the watermark, or the tier was reset."""
        host = self._host
        return (host.num_evicted - host.pool.num_free) // self.watermark.step, self._there.num_resets

    def plan_flush(self, most: int) -> list[Job]:
        """Store at most `most` blocks that the tier lacks, the most recently used first. Only blocks that fit into the
        tier together are stored, so no call evicts a block that an earlier call has stored."""
        parts = list(self._host.order)[::-1]
        stops = self._stops_that_fit(parts)

        def wanted(run: Run) -> int:
            return min(self._whole_stop(run), stops.get(run, run.start))

        return self.watermark.store(self.watermark.lacking(parts, NO_LIMIT, wanted), wanted, most)

    def _stops_that_fit(self, parts: list[Part]) -> dict[Run, int]:
        """For each run of `parts`, the unit up to which the tier can hold it. Runs on their way to the tier come first:
        they are pinned, so no eviction order has them."""
        jobs = [job for job in self.watermark.jobs.unsettled.values() if job.plan.destination is self._there.tier]
        runs = [run for job in jobs for run in job.run.path()] + [part.run for part in parts]
        stops, left, width = dict[Run, int](), self._there.capacity, self.watermark.cache.layout.width
        quotas, own = self.quotas(), dict[int, int]()
        for run in dict.fromkeys(runs):
            num_blocks = sum(self._num_held(part) for part in run.parts_in(self._host.tier))
            number = 0 if quotas is None else quotas.number_of(run)
            ceiling = NO_LIMIT if quotas is None else quotas.ceiling(self._there.tier, number)
            fits = min(left, own.setdefault(number, ceiling))
            stops[run] = run.stop if num_blocks <= fits else run.start + fits // width  # the end is evicted first
            left -= min(num_blocks, fits)
            own[number] = max(0, own[number] - num_blocks)
        return stops

    def _num_held(self, part: Part) -> int:
        """Blocks that the tier has of a run and component once it has those of the host's `part`, too."""
        first, stop = covered(part.run.part(self._there.tier, part.component))
        num_shared = max(0, min(stop, part.stop) - max(first, part.first))
        return (stop - first + part.stop - part.first - num_shared) * part.width

    def _whole_stop(self, run: Run) -> int:
        """The unit up to which host and tier together hold the path of `run` without a gap (a corrupt block). No later
        block could be published."""
        source, destination = self.watermark.stores.source, self.watermark.stores.destination
        if not run.parts[source].width:
            return run.stop
        for current in run.whole_path():
            reached = max(current.parts[source].stop, covered(current.parts[destination])[1])
            if reached < current.stop:
                return reached
        return run.stop

    def _requested_stop(self, run: Run) -> int:
        assert self.counts is not None
        return min(self._whole_stop(run), self.counts.requested_stop(TokenSequence.of_path(run), run.stop))

    def _requested_twice(self, num_blocks: int) -> list[Run]:
        """Runs with about `num_blocks` blocks that were requested twice, that the tier may lack, and that their
        accounts may store without evicting their own blocks."""
        if self._scanned_at != self._there.num_resets:
            self._scanned_at = self._there.num_resets
            self._scanned.clear()
        found: dict[Run, None] = {}
        left: dict[int, int] = {}
        scanned, num_scanned = self._scanned, 0
        for part in self._host.order:
            if num_blocks <= 0 or num_scanned == MAX_SCANNED:
                break
            if scanned.get(part) == part.last_use:
                continue
            num_scanned += 1
            is_lacking = bool(self.watermark.lacking((part,), 1, self._requested_stop))
            if is_lacking and (part.run in found or self._fits(part.run, left)):
                found[part.run] = None
                num_blocks -= len(part.blocks)
            else:
                scanned[part] = part.last_use
        if len(scanned) > self._max_remembered:
            self._scanned = {
                part: use for part, use in scanned.items() if part.run.parts and part.blocks and part.last_use == use
            }
            self._max_remembered = 2 * len(self._scanned) + MIN_REMEMBERED
        return list(found)

    def _fits(self, run: Run, left: dict[int, int]) -> bool:
        """Whether the account of `run` may store it without evicting its own blocks. `left`: by account, the blocks
        that are left for further runs of the scan."""
        quotas = self.quotas()
        if quotas is None:
            return True
        number, num_blocks = quotas.number_of(run), self._num_blocks(run, self._host)
        may_store = left.setdefault(number, quotas.num_left(self._there.tier, number))
        if num_blocks > may_store:
            return False
        left[number] = may_store - num_blocks
        return True


def stores_to(ledger: CacheBase, tier: Tier, counts: RequestCounts | None = None) -> LowerStores:
    """The `LowerStores` from the host of `ledger` to `tier`. `counts` has the requests that blocks had."""
    cache, jobs = ledger.cache, ledger.jobs
    host, there = cache.tiers[Tier.HOST].pool.num_blocks, cache.tiers[tier].pool.num_blocks
    recurrent = ledger.layout.recurrent
    checkpoint = 0 if recurrent is None else recurrent.width  # it is evicted as a whole, beside the KV of a prompt
    most = min(max(ledger.layout.width, host // HOST_WATERMARK) + checkpoint, there)
    down = Stores(cache, jobs, ledger.moves, Tier.HOST, tier)
    # The step skips scans after small changes, because a scan for blocks that were requested twice walks the host's
    # eviction order.
    return LowerStores(
        EvictionWatermark(cache, jobs, down, most, ledger.layout.components, max(1, most // STEPS)),
        counts,
        lambda: ledger.find(QuotaAccounts),
    )
