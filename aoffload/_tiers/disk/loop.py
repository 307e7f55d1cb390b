"""What a runtime does with its disk: reads back what an earlier process left, writes behind, resets, and ends.

READING    slices of what was left enter the ledger, at most a millisecond of a turn of the loop; nothing is stored
READY      stores what host memory is about to evict, within the day's budget
FLUSHING   the runtime closes: stores what is left, for a while
OFF        closed, or the disk must not be used any more; nothing is stored or fetched
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import anyio
import attrs

from ..._kernel.ledger import Ledger
from ..._kernel.plans import RestoredRun, TransferPlan
from ..._kernel.prefix import Prefix
from ..._kernel.records import Job
from ..._kernel.states import Direction, JobState, NoEpoch, Tier
from ..._observe.log import Telemetry
from ..._runtime.worker import CopyWorker
from ..._transfer.breaker import in_lines
from ..._transfer.transport import TransportDisk
from ...env import Env
from ...errors import TransferRefused
from ..write_rate import DailyBudget
from .forgetting import DiskTrouble

__all__ = ["DiskState", "DiskWork"]


TURN_S = 0.001
"""How much of a turn of the event loop what was read back may take."""
MAX_BLOCKS = 256
"""Stored at once: a label for each of them is made in the event loop."""


class DiskState(enum.Enum):
    READING = "reading"
    READY = "ready"
    FLUSHING = "flushing"
    OFF = "off"


@attrs.define(eq=False)
class DiskWork:
    """The disk tier of one runtime, in its event loop's thread."""

    ledger: Ledger
    worker: CopyWorker
    disk: TransportDisk
    block_bytes: int
    env: Env
    telemetry: Telemetry
    state: DiskState = attrs.field(default=DiskState.OFF, init=False)
    num_restored: int = attrs.field(default=0, init=False)
    """Blocks of an earlier process that were found."""
    num_fetches_skipped: int = attrs.field(default=0, init=False)
    """Not begun, since loads are left alone."""
    budget: DailyBudget = attrs.field(init=False)
    is_restored: anyio.Event = attrs.field(init=False)
    """Set when the reading is over, however it ended. Made by `begin`: there may be no event loop before."""
    _found: deque[RestoredRun] = attrs.field(factory=deque, init=False)
    """Read, and not in the ledger yet. The reading thread appends."""
    _end: str | None = attrs.field(default=None, init=False)
    """How the reading ended: an empty text, or why it failed. None: not yet."""
    _turn: Callable[[], None] = attrs.field(init=False, default=lambda: None)
    _is_turn_due: bool = attrs.field(default=False, init=False)
    """A turn was asked for, and has not begun: several in one round of the event loop would be one long one."""
    _began_s: float = attrs.field(default=0.0, init=False)
    _num_resets: int = attrs.field(default=0, init=False)
    """How many of the ledger's resets have reached the disk."""

    def __attrs_post_init__(self) -> None:
        self.budget = DailyBudget(self.disk.tier.daily_bytes)

    # -- a restart ------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Begin to read, in a thread. Called in the event loop, once the transport is open. `TransferRefused` where
        there is no thread for it: then the disk stays off."""
        self.is_restored = anyio.Event()
        self._turn = self.env.loop_waker(self._take_in)
        self._began_s = self.env.now()
        self.disk.read_back(self._hear, self._over, self._hear_trouble)
        self.state = DiskState.READING  # in time for what was read: a turn of the loop takes it in
        self.telemetry.disk_opened(self.disk.tier.path, self.disk.num_slots)

    def _hear(self, found: Sequence[RestoredRun]) -> None:
        """Called in the reading thread."""
        self._found.extend(found)
        self._ask_for_turn()

    def _over(self, problem: str) -> None:
        """Called in the reading thread, behind the last `_hear`."""
        self._end = problem
        self._ask_for_turn()

    def _ask_for_turn(self) -> None:
        if not self._is_turn_due:
            self._is_turn_due = True
            self._turn()

    def _take_in(self) -> None:
        """A turn of the event loop: give the ledger what was read, until the turn's time is over."""
        self._is_turn_due = False  # before anything is looked at: what comes from now on asks again
        end = self._end  # before the rest is looked at: nothing comes behind it
        until_s = self.env.now() + TURN_S
        while self._found:
            run = self._found.popleft()
            if self.state is DiskState.READING:  # a reset meanwhile: the ledger takes none of it
                self.num_restored += self.worker.copies.tell(self.ledger.restore, run) or 0
            if self.env.now() >= until_s:
                self._ask_for_turn()
                return
        if end is not None and self.state is DiskState.READING:
            self._restored(end)

    def _restored(self, problem: str) -> None:
        if problem:
            self._fail(problem)
            return
        self.state = DiskState.READY
        self.telemetry.disk_restored(self.num_restored, self.env.now() - self._began_s)
        self.is_restored.set()
        self.look()

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

    def look(self) -> None:
        """Store what host memory is about to evict; while the disk has nothing to do, also what was asked for twice.
        Called after whatever may have changed that."""
        for move in self.disk.take_moves():
            self.telemetry.storage_moved(move)
        self._forget_more()
        if self.state is not DiskState.READY or not self.ledger.disk_stores_are_due:
            return
        if not (most := self._num_storable()):
            return
        is_low = self.budget.is_low(self.env.now())
        plan = partial(self.ledger.plan_disk_stores, most, is_idle=self._is_idle, only_asked_twice=is_low)
        self._store(self.worker.copies.tell(plan) or ())

    def take_back(self) -> None:
        """A forward has failed: what was stored of it, and what is on its way, is found by no restart."""
        unsettled = self.ledger.jobs.unsettled.values()
        wrong = [job.plan for job in unsettled if job.epoch is NoEpoch.INVALIDATED and _is_on_its_way(job)]
        self.worker.copies.take_back(plan.job_id for plan in wrong)
        on_their_way = [slot for plan in wrong for slot in plan.destination_ids]  # even if its copy has just ended
        self._forget([*self.ledger.take_forgotten_slots(), *on_their_way])
        self.look()

    def _forget_more(self) -> None:
        """Forget also the slots that a copy left behind after it was given up."""
        if slots := self.ledger.take_forgotten_slots():
            self._forget(slots)

    def _forget(self, slots: Sequence[int]) -> None:
        """Have no restart find these slots, nor the old content of slots that stores under way replace. `slots` may be
        empty."""
        try:
            self.disk.forget(slots)
        except TransferRefused as error:
            self.telemetry.transport_failed(error)

    @property
    def _is_idle(self) -> bool:
        links = ((Tier.HOST, Tier.DISK), (Tier.DISK, Tier.HOST))
        return not any(self.worker.copies.num_under_way(*link) for link in links)

    def _num_storable(self) -> int:
        """Blocks that may be stored now: none on a disk that fails or has not heard of the last reset, more only when
        what is queued gets done."""
        if self.disk.refuses(Direction.STORE) or self._num_resets < self.ledger.num_disk_resets:
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
        """A request computes what the disk has, since loads are left alone."""
        if self.state is not DiskState.OFF and self.disk.refuses(Direction.LOAD):
            self.num_fetches_skipped += 1
            self.telemetry.fetch_skipped(request_id, Tier.DISK)

    def remarks(self) -> Iterator[str]:
        """What `explain` says of it."""
        alone = self.disk.statistics().left_alone
        yield from in_lines("the disk", alone)
        if alone and self.num_fetches_skipped:
            yield f"fetches from the disk skipped so far: {self.num_fetches_skipped:,}"

    def fetch_s(self, prefix: Prefix) -> float:
        """Seconds until a fetch of `prefix` that begins now would be over; 0 if nothing is known of the disk yet."""
        copies, link = self.worker.copies, (Tier.DISK, Tier.HOST)
        num_blocks = self.worker.copies.tell(self.ledger.num_fetch_blocks, prefix) or 0
        return copies.seconds(*link, num_blocks)

    # -- reset ----------------------------------------------------------------------------------------------------

    async def reset(self, timeout_s: float) -> None:
        """Wait until no restart finds what the ledger has just forgotten. `TransferRefused` if that is not so within
        `timeout_s` seconds. Where the disk does not take it, it is not used any more; until it has, nothing is stored.
        """
        ended, problems, number = anyio.Event(), list[str](), self.ledger.num_disk_resets

        def over(problem: str) -> None:
            self.worker.call_soon(partial(settle, problem))

        def settle(problem: str) -> None:
            self._reset_over(number, problem)
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

    def _reset_over(self, num_resets: int, problem: str) -> None:
        if problem:
            self._fail(f"a reset did not reach the disk: {problem}")
        else:
            self._num_resets = max(self._num_resets, num_resets)  # of two, the earlier may be over behind the later

    # -- the end --------------------------------------------------------------------------------------------------

    async def flush(self) -> None:
        """The runtime closes: store what the disk lacks, for at most `close_flush_s` seconds."""
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
        await self.worker.wait_idle()  # what is on its way into host memory, too
        if self.state is DiskState.READY:
            self.state = DiskState.FLUSHING
        self._forget_more()
        while self.state is DiskState.FLUSHING and self.worker.is_accepting:
            if most := self._num_storable():
                self._store(self.worker.copies.tell(self.ledger.plan_disk_flush, most) or ())
            if not self.worker.copies.num_under_way(Tier.HOST, Tier.DISK):
                return
            await self.worker.wait_settled()


def _is_on_its_way(job: Job) -> bool:
    return job.plan.destination is Tier.DISK and job.state is JobState.LAUNCHED
