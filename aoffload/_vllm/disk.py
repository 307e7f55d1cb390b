"""The disk in the scheduler: it stores blocks there, and restores the blocks that an earlier process left.

READING    the blocks of an earlier process come in, one millisecond per step; nothing is stored
READY      blocks that host memory is about to evict are stored, within the day's budget
OFF        the disk must not be used any more
"""

from __future__ import annotations

import enum
import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence

import attrs

from aoffload import DiskTier, HostCache, Tier

from .._tiers.disk.plans import DiskTrouble
from .._tiers.write_rate import DailyBudget
from .._transfer.breaker import Breaker, BreakerMove, StorageMove, Use, in_words
from ..ledger import Completion, CopyQueue, Outcome, RestoredRun, TransferPlan
from .counts import Counts
from .messages import ReadingOver, ResetOver, Said, TieredOutbox

_log = logging.getLogger("vllm.aoffload")
TURN_S = 0.001
"""Seconds per step for taking in restored blocks."""
MAX_BLOCKS = 256
"""Blocks per store. The scheduler's loop computes a label for each of them."""
LOADS, STORES = (Tier.DISK, Tier.HOST), (Tier.HOST, Tier.DISK)
USES = {LOADS: Use.LOAD, STORES: Use.STORE}


class DiskState(enum.Enum):
    READING = "reading"
    READY = "ready"
    OFF = "off"


@attrs.define(eq=False)
class DiskSide:
    """One per engine with a disk. All calls come from the thread of vLLM's scheduler, and none waits."""

    ledger: HostCache
    queue: CopyQueue
    outbox: TieredOutbox
    counts: Counts
    tier: DiskTier
    block_bytes: int
    clock: Callable[[], float]
    state: DiskState = attrs.field(default=DiskState.READING, init=False)
    budget: DailyBudget = attrs.field(init=False)
    _breakers: dict[tuple[Tier, Tier], Breaker] = attrs.field(init=False)
    _found: deque[RestoredRun] = attrs.field(factory=deque, init=False)
    """Restored runs that the ledger does not have yet."""
    _reading: str | None = attrs.field(default=None, init=False)
    """Why the reading failed; empty if it succeeded. None: it has not ended."""
    _num_resets: int = attrs.field(default=0, init=False)
    """Resets that were sent to the worker, or that the next step will send."""
    _num_resets_over: int = attrs.field(default=0, init=False)

    def __attrs_post_init__(self) -> None:
        self.budget = DailyBudget(self.tier.daily_bytes)
        self._breakers = {link: Breaker() for link in (LOADS, STORES)}

    @property
    def is_busy(self) -> bool:
        """Whether vLLM has to run more steps, because restored blocks come in or a reset is not complete."""
        return self.state is DiskState.READING or self._num_resets > self._num_resets_over

    def gauges(self) -> dict[str, float]:
        """Bytes that may still be written today, whether the disk is off, and whether its loads or stores are disabled
        for a while."""
        alone = {f"left_alone|disk|{USES[link].value}": float(one.is_on_trial) for link, one in self._breakers.items()}
        is_off = self.state is DiskState.OFF
        return {"disk_budget_bytes": self.budget.left(self.clock()), "disk_off": float(is_off), **alone}

    # -- reports of the worker ------------------------------------------------------------------------------------

    def take(self, said: Iterable[Said]) -> None:
        for report in said:
            if isinstance(report, RestoredRun):
                self._found.append(report)
            elif isinstance(report, ReadingOver):
                self._reading = report.problem
            elif isinstance(report, ResetOver):
                self._num_resets_over = max(self._num_resets_over, report.num_resets)
                if report.problem:
                    self._turn_off(f"a restart may find blocks from before a reset: {report.problem}")
            elif isinstance(report, DiskTrouble):
                if report.is_off:
                    self._turn_off(report.reason)
                else:
                    _log.warning("aoffload: the disk: %s", report.reason)

    def copied(self, plan: TransferPlan, completion: Completion) -> None:
        """A copy has ended. A disk that fails is disabled for a while."""
        breaker = self._breakers.get(plan.link)
        if breaker is None:
            return
        move: BreakerMove | None = None
        if completion.outcome is Outcome.FAILED:
            move = breaker.failed(self.clock(), completion.error)
        elif completion.outcome is not Outcome.UNPROVEN:
            move = breaker.succeeded(self.clock())
        if move is not None:
            _log.warning("aoffload: %s", in_words(StorageMove(Tier.DISK, USES[plan.link], "", move)))

    def _take_in(self) -> None:
        """Take in restored blocks, for at most `TURN_S` of this step."""
        if self.state is not DiskState.READING:
            return
        until = self.clock() + TURN_S
        while self._found:
            self.counts.counted["restored_blocks"] += self.ledger.disk.restore(self._found.popleft())
            if self.clock() >= until:
                return
        if self._reading is None:
            return
        if self._reading:
            self._turn_off(f"the blocks of an earlier process were not read: {self._reading}")
        else:
            self.state = DiskState.READY
            _log.info("aoffload: the disk holds %d blocks", self.ledger.cache.tiers[Tier.DISK].num_cached)

    def _turn_off(self, reason: str) -> None:
        self.state = DiskState.OFF
        self.counts.turned_off("disk")
        _log.error("aoffload: the disk is no longer used: %s", reason)

    def reset(self) -> None:
        """The ledger has forgotten everything, so no restart may find it. The next step tells the worker."""
        if self.state is not DiskState.OFF:
            self._num_resets = self.ledger.disk.num_resets
            self.outbox.reset(self._num_resets)

    # -- storing --------------------------------------------------------------------------------------------------

    def look(self) -> None:
        """Take in some of the restored blocks. Store blocks that host memory is about to evict. While the disk is idle,
        also store blocks that were requested twice."""
        self._take_in()
        if forgotten := self.ledger.disk.take_forgotten():
            self.outbox.forget(forgotten)
        if self.state is DiskState.READY and (most := self._num_storable()):
            is_low, is_idle = self.budget.is_low(self.clock()), not any(map(self._num_under_way, (LOADS, STORES)))
            self._store(self.ledger.disk.plan_stores(most, is_idle=is_idle, only_requested_twice=is_low))

    def flush(self) -> bool:
        """The engine ends: store the blocks that the disk lacks. Returns whether to wait and call again."""
        if self.state is not DiskState.READY:
            return False
        if most := self._num_storable():
            self._store(self.ledger.disk.plan_flush(most))
        return bool(self._num_under_way(STORES))

    def _num_under_way(self, link: tuple[Tier, Tier]) -> int:
        return self.queue.num_under_way(*link)

    def _num_storable(self) -> int:
        """Number of blocks that may be stored now. It is 0 if the disk fails, and it grows as queued copies end."""
        now = self.clock()
        if self._breakers[STORES].is_open(now):
            return 0
        return min(MAX_BLOCKS, min(self.queue.room_bytes(*STORES), self.budget.left(now)) // self.block_bytes)

    def _store(self, plans: Sequence[TransferPlan]) -> None:
        self.queue.submit(plans)
        unsettled = self.ledger.jobs.unsettled
        num_blocks = sum(plan.num_blocks for plan in plans if plan.job_id in unsettled)  # the queue refused the others
        if num_blocks:
            self.budget.spend(num_blocks * self.block_bytes, self.clock())

    @property
    def may_fetch(self) -> bool:
        """Whether a fetch from the disk can be worth its time. It is not if the disk failed lately, or hangs."""
        is_off = self.state is DiskState.OFF or self._breakers[LOADS].is_open(self.clock())
        return not is_off and not self.queue.is_stalled(*LOADS)
