"""The disk tier in the event loop of a runtime: restores, stores, invalidations and resets.

The ledger's rules (`rules.py`) decide which blocks the disk should have, and the lanes copy the bytes in threads. This
module connects both in the event loop's thread. It has four states:

    READING    blocks that an earlier process left are restored; nothing is stored. A thread reads them in slices and
               requests a turn of the event loop for each; a turn takes at most a millisecond
    READY      blocks that host memory is about to evict are stored, within the daily budget. Stores are planned after
               each change that may have made one due. While the disk is idle, blocks that were requested twice are
               stored, too
    FLUSHING   the runtime closes: the other blocks are stored, for at most `close_flush_s`
    OFF        closed, or the disk has failed: nothing is stored or fetched

A restart must not find wrong bytes, so two changes of the ledger have to reach the disk. After a failed forward, the
records of the slots with its blocks are erased, including slots that a store under way still writes. After a reset,
nothing is stored until the disk has confirmed the reset, because the disk could not distinguish new blocks from blocks
before the reset.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import anyio
import attrs

from ..._common.env import Env
from ..._common.prefix import Prefix
from ..._common.tiers import Tier
from ..._extensions.assembly import AnyLedger
from ..._kernel.layout import Layout
from ..._kernel.plans import TransferPlan
from ..._kernel.states import Direction, JobState, NoEpoch
from ..._observe.log import Telemetry
from ..._runtime.worker import CopyWorker
from ..._transfer.breaker import in_lines
from ..._transfer.transport import TransportDisk
from ...errors import TransferRefused
from ..lower.loop import TierWork
from ..write_rate import DailyBudget
from .plans import DiskTrouble, RestoredRun

TURN_S = 0.001
"""Maximum time for restored runs in one turn of the event loop."""
MAX_BLOCKS = 256
"""Maximum blocks per call that plans stores, because the event loop makes a label for each of them."""


class DiskState(enum.Enum):
    READING = "reading"
    READY = "ready"
    FLUSHING = "flushing"
    OFF = "off"


@attrs.define(eq=False)
class DiskWork(TierWork):
    """The disk tier of one runtime, in its event loop's thread."""

    ledger: AnyLedger
    worker: CopyWorker
    disk: TransportDisk
    block_bytes: int
    env: Env
    telemetry: Telemetry
    tier = Tier.DISK
    state: DiskState = attrs.field(default=DiskState.OFF, init=False)
    num_restored: int = attrs.field(default=0, init=False)
    """Number of blocks of an earlier process that were restored."""
    num_fetches_skipped: int = attrs.field(default=0, init=False)
    budget: DailyBudget = attrs.field(init=False)
    is_restored: anyio.Event = attrs.field(init=False)
    """Set when the reading is over, even if it failed. Made by `open`, because there may be no event loop before."""
    _found: deque[RestoredRun] = attrs.field(factory=deque, init=False)
    """Runs that were read and are not in the ledger yet. The reading thread appends to it."""
    _end: str | None = attrs.field(default=None, init=False)
    """How the reading ended: an empty text, or why it failed. None: not yet."""
    _turn: Callable[[], None] = attrs.field(init=False, default=lambda: None)
    _is_turn_due: bool = attrs.field(default=False, init=False)
    """Whether a turn was requested and has not begun. Only one is requested, because several turns in one round of the
    event loop would be one long turn."""
    _began_s: float = attrs.field(default=0.0, init=False)
    _num_resets: int = attrs.field(default=0, init=False)
    """Number of the ledger's resets that have reached the disk."""

    def __attrs_post_init__(self) -> None:
        self.budget = DailyBudget(self.disk.tier.daily_bytes)

    # -- a restart ------------------------------------------------------------------------------------------------

    def identify(self, layout: Layout, namespace: str) -> None:
        self.disk.identify(layout, namespace)

    async def open(self, hashing: anyio.CapacityLimiter | None) -> None:
        """Begin to read, in a thread. Raises `TransferRefused` if no thread can be started; then the disk stays
        off."""
        self.is_restored = anyio.Event()
        self._turn = self.env.loop_waker(self._take_in)
        self._began_s = self.env.now()
        self.disk.read_back(self._hear, self._over, self._hear_trouble)
        self.state = DiskState.READING  # in time: the first turn of the loop is still to come
        self.telemetry.disk_opened(self.disk.tier.path, self.disk.num_slots)

    def _hear(self, found: Sequence[RestoredRun]) -> None:
        """Called in the reading thread."""
        self._found.extend(found)
        self._ask_for_turn()

    def _over(self, problem: str) -> None:
        """Called in the reading thread, after the last `_hear`."""
        self._end = problem
        self._ask_for_turn()

    def _ask_for_turn(self) -> None:
        if not self._is_turn_due:
            self._is_turn_due = True
            self._turn()

    def _take_in(self) -> None:
        """A turn of the event loop: restore runs in the ledger, until the turn's time is over."""
        self._is_turn_due = False  # first, so that a slice that comes from now on requests another turn
        end = self._end  # read before the runs, because no run comes after the end
        until_s = self.env.now() + TURN_S
        while self._found:
            run = self._found.popleft()
            if self.state is DiskState.READING:  # after a reset, the ledger restores no runs
                self.num_restored += self.worker.copies.call_ledger(self.ledger.disk.restore, run) or 0
            if self.env.now() >= until_s:
                self._ask_for_turn()
                return
        if end is None or self.state is not DiskState.READING:
            return
        if end:
            self._fail(end)
            return
        self.state = DiskState.READY
        self.telemetry.disk_restored(self.num_restored, self.env.now() - self._began_s)
        self.is_restored.set()
        self.store_more()

    def _hear_trouble(self, trouble: DiskTrouble) -> None:
        """Called in a thread of the disk."""
        self.worker.call_soon(partial(self._in_trouble, trouble))

    def _in_trouble(self, trouble: DiskTrouble) -> None:
        if trouble.is_off:
            self._fail(trouble.reason)
        else:
            self.telemetry.disk_records_dropped(trouble.reason)

    def _fail(self, problem: str) -> None:
        self.state = DiskState.OFF
        self.telemetry.disk_turned_off(problem)
        self.is_restored.set()

    # -- storing --------------------------------------------------------------------------------------------------

    def store_more(self) -> None:
        """Store the blocks that host memory is about to evict; while the disk is idle, also blocks that were requested
        twice. Called after each change that may have made a store due."""
        for move in self.disk.take_moves():
            self.telemetry.storage_moved(move)
        self._forget_more()
        if self.state is not DiskState.READY or not self.ledger.disk.stores_are_due:
            return
        if not (most := self._num_storable()):
            return
        copies, is_low = self.worker.copies, self.budget.is_low(self.env.now())
        is_busy = copies.num_under_way(Tier.HOST, Tier.DISK) or copies.num_under_way(Tier.DISK, Tier.HOST)
        plan = partial(self.ledger.disk.plan_stores, most, is_idle=not is_busy, only_requested_twice=is_low)
        self._store(copies.call_ledger(plan) or ())

    def invalidate(self) -> None:
        """Erase the records of the blocks of a failed forward, both of stored blocks and of blocks whose stores are
        under way."""
        wrong = [
            job.plan
            for job in self.ledger.jobs.unsettled.values()
            if job.epoch is NoEpoch.INVALIDATED and job.plan.destination is Tier.DISK and job.state is JobState.LAUNCHED
        ]
        self.worker.copies.invalidate_sources(plan.job_id for plan in wrong)
        on_their_way = [slot for plan in wrong for slot in plan.destination_ids]  # includes copies that have just ended
        self._forget([*self.ledger.disk.take_forgotten(), *on_their_way])
        self.store_more()

    def _forget_more(self) -> None:
        """Erase also the records of slots whose copies were given up and have ended since."""
        if slots := self.ledger.disk.take_forgotten():
            self._forget(slots)

    def _forget(self, slots: Sequence[int]) -> None:
        """Erase the records of `slots`, and the old records of slots that stores under way overwrite. `slots` may be
        empty."""
        try:
            self.disk.forget(slots)
        except TransferRefused as error:
            self.telemetry.transport_failed(error)

    def _num_storable(self) -> int:
        """Number of blocks that may be stored now. 0 if the disk fails or has not confirmed the last reset. Queued
        stores reduce the number until they end."""
        if self.disk.refuses(Direction.STORE) or self._num_resets < self.ledger.disk.num_resets:
            return 0
        room = self.worker.copies.room_bytes(Tier.HOST, Tier.DISK)
        return min(MAX_BLOCKS, min(room, self.budget.left(self.env.now())) // self.block_bytes)

    def _store(self, plans: Sequence[TransferPlan]) -> None:
        self.worker.submit(plans)
        unsettled = self.ledger.jobs.unsettled
        num_blocks = sum(plan.num_blocks for plan in plans if plan.job_id in unsettled)  # the other stores were refused
        if num_blocks:
            self.budget.spend(num_blocks * self.block_bytes, self.env.now())

    # -- fetching -------------------------------------------------------------------------------------------------

    @property
    def may_fetch(self) -> bool:
        """Whether a fetch may begin. False if the disk has failed recently or hangs."""
        is_off = self.state is DiskState.OFF or self.disk.refuses(Direction.LOAD)
        return not is_off and not self.worker.copies.is_stalled(Tier.DISK, Tier.HOST)

    def skip_fetch(self, request_id: str) -> None:
        """Count a fetch that was skipped because loads from the disk have failed. The request computes the blocks."""
        if self.state is not DiskState.OFF and self.disk.refuses(Direction.LOAD):
            self.num_fetches_skipped += 1
            self.telemetry.fetch_skipped(request_id, Tier.DISK)

    def remarks(self) -> Iterator[str]:
        alone = self.disk.statistics().left_alone
        yield from in_lines("the disk", alone)
        if alone and self.num_fetches_skipped:
            yield f"fetches from the disk skipped so far: {self.num_fetches_skipped:,}"

    def fetch_s(self, prefix: Prefix) -> float:
        """Seconds until a fetch of `prefix` that begins now would be over; 0 if the disk was not measured yet."""
        copies, link = self.worker.copies, (Tier.DISK, Tier.HOST)
        num_blocks = self.worker.copies.call_ledger(self.ledger.fetches.num_blocks, prefix) or 0
        return copies.seconds(*link, num_blocks)

    # -- reset ----------------------------------------------------------------------------------------------------

    async def reset(self, tier: Tier | None, timeout_s: float) -> None:
        """If the reset includes the disk, wait until the disk has confirmed the ledger's last reset. From then on no
        restart finds blocks from before the reset. Raises `TransferRefused` if the confirmation takes longer than
        `timeout_s` seconds, or if the disk fails; a failed disk is turned off. Nothing is stored before the
        confirmation."""
        if tier not in (None, Tier.DISK):
            return
        ended, problems, number = anyio.Event(), list[str](), self.ledger.disk.num_resets

        def over(problem: str) -> None:
            self.worker.call_soon(partial(settle, problem))

        def settle(problem: str) -> None:
            if problem:
                self._fail(f"a reset did not reach the disk: {problem}")
            else:
                self._num_resets = max(self._num_resets, number)  # an earlier reset may end after a later one
            problems.append(problem)
            ended.set()

        try:
            self.disk.reset(number, over)
        except TransferRefused as error:
            settle(str(error))
        with anyio.move_on_after(timeout_s):
            await ended.wait()
        problem = problems[0] if problems else f"not over within {timeout_s:g} s"
        if problem:
            raise TransferRefused(
                f"a reset did not reach the disk, so a restart may find blocks from before: {problem}"
            )

    # -- the end --------------------------------------------------------------------------------------------------

    async def flush(self) -> None:
        """Store the blocks that the disk lacks, for at most `close_flush_s` seconds, because the runtime closes."""
        flush_s = self.disk.tier.close_flush_s
        try:
            if flush_s and self.state is not DiskState.OFF:
                with anyio.CancelScope(shield=True, deadline=anyio.current_time() + flush_s):
                    await self.is_restored.wait()
                    await self._flush()
        finally:
            self.state = DiskState.OFF
            self.is_restored.set()

    async def _flush(self) -> None:
        await self.worker.wait_idle()  # waits also for copies into host memory
        if self.state is DiskState.READY:
            self.state = DiskState.FLUSHING
        self._forget_more()
        while self.state is DiskState.FLUSHING and self.worker.copies.is_accepting:
            if most := self._num_storable():
                self._store(self.worker.copies.call_ledger(self.ledger.disk.plan_flush, most) or ())
            if not self.worker.copies.num_under_way(Tier.HOST, Tier.DISK):
                return
            await self.worker.wait_settled()
