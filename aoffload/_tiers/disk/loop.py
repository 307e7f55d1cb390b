"""The disk tier in the event loop: what a runtime reads back, stores, invalidates and resets there.

The ledger's rules (`rules.py`) say which blocks the disk should have; the lanes move the bytes, in threads. This room
connects both in the loop's thread, and decides when:

    READING    slices of the blocks that an earlier process left enter the ledger; nothing is stored. The reading thread
               only appends a slice and asks for a turn of the loop; a turn takes at most a millisecond
    READY      stores the blocks that host memory is about to evict, within the daily budget. It looks for them after
               each change that may have made one due; while the disk is idle, also blocks that were requested twice
    FLUSHING   the runtime closes: stores the rest, for at most `close_flush_s`
    OFF        closed, or the disk must not be used any more: nothing is stored or fetched

A restart must not find wrong bytes, so two changes of the ledger have to reach the disk. After a failed forward, the
slots that have its blocks are forgotten, also those that a store under way still writes. After a reset, nothing is
stored until the disk has confirmed the reset, because the disk could not tell such a block from those before.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import anyio
import attrs

from ..._assembly import AnyLedger
from ..._kernel.plans import TransferPlan
from ..._kernel.prefix import Prefix
from ..._kernel.states import Direction, JobState, NoEpoch, Tier
from ..._observe.log import Telemetry
from ..._runtime.worker import CopyWorker
from ..._transfer.breaker import in_lines
from ..._transfer.transport import TransportDisk
from ...env import Env
from ...errors import TransferRefused
from ..write_rate import DailyBudget
from .forgetting import DiskTrouble
from .plans import RestoredRun

TURN_S = 0.001
"""Maximum time for restored runs in one turn of the event loop."""
MAX_BLOCKS = 256
"""Maximum blocks stored at once, because the event loop makes a label for each of them."""


class DiskState(enum.Enum):
    READING = "reading"
    READY = "ready"
    FLUSHING = "flushing"
    OFF = "off"


@attrs.define(eq=False)
class DiskWork:
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
    """Blocks of an earlier process that were found."""
    num_fetches_skipped: int = attrs.field(default=0, init=False)
    """Fetches that were not begun because loads from the disk had failed."""
    budget: DailyBudget = attrs.field(init=False)
    is_restored: anyio.Event = attrs.field(init=False)
    """Set when the reading is over, however it ended. Made by `begin`: there may be no event loop before."""
    _found: deque[RestoredRun] = attrs.field(factory=deque, init=False)
    """Runs that were read and are not in the ledger yet. The reading thread appends."""
    _end: str | None = attrs.field(default=None, init=False)
    """How the reading ended: an empty text, or why it failed. None: not yet."""
    _turn: Callable[[], None] = attrs.field(init=False, default=lambda: None)
    _is_turn_due: bool = attrs.field(default=False, init=False)
    """A turn was requested and has not begun. Several in one round of the event loop would be one long turn."""
    _began_s: float = attrs.field(default=0.0, init=False)
    _num_resets: int = attrs.field(default=0, init=False)
    """How many of the ledger's resets have reached the disk."""

    def __attrs_post_init__(self) -> None:
        self.budget = DailyBudget(self.disk.tier.daily_bytes)

    # -- a restart ------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Begin to read, in a thread. Called in the event loop, once the transport is open. `TransferRefused` if no
        thread can be started: then the disk stays off."""
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
        self._is_turn_due = False  # first: a slice that comes from now on requests another turn
        end = self._end  # before the runs: no run comes after the end
        until_s = self.env.now() + TURN_S
        while self._found:
            run = self._found.popleft()
            if self.state is DiskState.READING:  # after a reset, the ledger restores none of them
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
        """A forward has failed: no restart finds its blocks, neither those that were stored nor those under way."""
        wrong = [
            job.plan
            for job in self.ledger.jobs.unsettled.values()
            if job.epoch is NoEpoch.INVALIDATED and job.plan.destination is Tier.DISK and job.state is JobState.LAUNCHED
        ]
        self.worker.copies.invalidate_sources(plan.job_id for plan in wrong)
        on_their_way = [slot for plan in wrong for slot in plan.destination_ids]  # even if its copy has just ended
        self._forget([*self.ledger.disk.take_forgotten(), *on_their_way])
        self.store_more()

    def _forget_more(self) -> None:
        """Forget also the slots of copies that were given up and have ended since."""
        if slots := self.ledger.disk.take_forgotten():
            self._forget(slots)

    def _forget(self, slots: Sequence[int]) -> None:
        """Let no restart find these slots, nor the old content of slots that stores under way replace. `slots` may be
        empty."""
        try:
            self.disk.forget(slots)
        except TransferRefused as error:
            self.telemetry.transport_failed(error)

    def _num_storable(self) -> int:
        """Blocks that may be stored now: none on a disk that fails or has not confirmed the last reset, and more only
        as the queued stores end."""
        if self.disk.refuses(Direction.STORE) or self._num_resets < self.ledger.disk.num_resets:
            return 0
        room = self.worker.copies.room_bytes(Tier.HOST, Tier.DISK)
        return min(MAX_BLOCKS, min(room, self.budget.left(self.env.now())) // self.block_bytes)

    def _store(self, plans: Sequence[TransferPlan]) -> None:
        self.worker.submit(plans)
        unsettled = self.ledger.jobs.unsettled
        num_blocks = sum(plan.num_blocks for plan in plans if plan.job_id in unsettled)  # the others were refused
        if num_blocks:
            self.budget.spend(num_blocks * self.block_bytes, self.env.now())

    # -- fetching -------------------------------------------------------------------------------------------------

    @property
    def may_fetch(self) -> bool:
        """Whether a fetch is worth its time: not on a disk that has failed lately, or hangs."""
        is_off = self.state is DiskState.OFF or self.disk.refuses(Direction.LOAD)
        return not is_off and not self.worker.copies.is_stalled(Tier.DISK, Tier.HOST)

    def skip_fetch(self, request_id: str) -> None:
        """Count a request that computes blocks that the disk has, because loads from the disk have failed."""
        if self.state is not DiskState.OFF and self.disk.refuses(Direction.LOAD):
            self.num_fetches_skipped += 1
            self.telemetry.fetch_skipped(request_id, Tier.DISK)

    def remarks(self) -> Iterator[str]:
        """The lines about it in `explain`."""
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
        """The ledger was reset: all of it, or `tier`. If that concerns the disk, wait until the disk has confirmed the
        ledger's last reset: from then on no restart finds blocks from before. `TransferRefused` if that takes longer
        than `timeout_s` seconds, or if the disk fails, which is turned off then. Nothing is stored before the
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
                self._num_resets = max(self._num_resets, number)  # of two resets, the earlier may end after the later
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
            raise TransferRefused(f"a reset did not reach the disk, and a restart may find what was there: {problem}")

    # -- the end --------------------------------------------------------------------------------------------------

    async def flush(self) -> None:
        """The runtime closes: store the blocks that the disk lacks, for at most `close_flush_s` seconds."""
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
        await self.worker.wait_idle()  # also copies on their way into host memory
        if self.state is DiskState.READY:
            self.state = DiskState.FLUSHING
        self._forget_more()
        while self.state is DiskState.FLUSHING and self.worker.copies.is_accepting:
            if most := self._num_storable():
                self._store(self.worker.copies.call_ledger(self.ledger.disk.plan_flush, most) or ())
            if not self.worker.copies.num_under_way(Tier.HOST, Tier.DISK):
                return
            await self.worker.wait_settled()
