"""The threads of the disk: they run the jobs between host memory and slots, loads before stores.

A disk that hangs blocks one thread for each of a few jobs, but never all threads of one direction. It never keeps the
process alive: the threads are daemons, and the memory and files that they use live as long as they do.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

import attrs
import numpy as np
from numpy.typing import NDArray

from ..._common.env import Env
from ..._common.tiers import Tier
from ..._config.tiers import DiskTier
from ..._kernel.layout import Layout
from ..._kernel.plans import Completion, TransferPlan
from ..._kernel.states import Direction, Outcome
from ..._transfer.breaker import MAX_MOVES, Breaker, StorageMove, Use, taken
from ..._transfer.lane import BlockChecksums
from ..._transfer.region import KVRegion, identity_of
from ..._transfer.transport import DiskStatistics
from ..._transfer.turns import started_thread, wait_precisely
from ...errors import ConfigError, TransferRefused, WrongState
from .files import DiskDirectory, PosixDirectory
from .plans import DiskPayload, DiskTrouble, RestoredRun
from .slots import DiskOutcome, DiskSlots
from .table import SlotLayout

NUM_THREADS = 4
MOST_RUNNING = {Direction.LOAD: 3, Direction.STORE: 2}
"""Maximum concurrent jobs. Loads are started before stores. Neither direction gets all threads, because a direction
that hangs would block the other one."""
USES = {Direction.LOAD: Use.LOAD, Direction.STORE: Use.STORE}
GENERATIONS = 2**64


@attrs.define
class DiskCounts:
    """Counts of one direction, since the slots were opened."""

    num_jobs: int = 0
    num_blocks: int = 0
    num_corrupt: int = 0
    num_failed: int = 0
    """Jobs that ended in an error of the disk."""
    seconds: float = 0.0
    """Summed duration of jobs; concurrent jobs count separately."""


class LocalDisk:
    """Implements `TransportDisk`: runs jobs on the slots in the files of `tier`. Each launched job gets one completion.

    `regions` are part of the identity of the KV there. `directory` opens the directory, of the operating system or
    simulated. `num_blocks` is the number of slots; 0 until `open`.
    """

    slots: DiskSlots
    """Set by `open`, as are the next four."""
    _host: NDArray[np.uint8]
    _checksums: BlockChecksums | None
    _deliver: Callable[[Completion], None]
    _env: Env

    def __init__(
        self, tier: DiskTier, regions: Sequence[KVRegion], directory: Callable[[str], DiskDirectory] = PosixDirectory
    ) -> None:
        self.tier, self.regions, self.directory = tier, regions, directory
        self.num_blocks = 0
        self._layout: SlotLayout | None = None
        self._fingerprint = b""
        self._counts = {direction: DiskCounts() for direction in MOST_RUNNING}
        self._moves: deque[StorageMove] = deque(maxlen=MAX_MOVES)
        """Changes of the breakers, until `take_moves`. Threads append."""
        self._first_generation = 0
        self._hear_trouble: Callable[[DiskTrouble], None] = lambda trouble: None
        self._on_superblock = threading.Lock()
        """Held while a reset or an erasure is written. A reset that gets the lock after a later reset writes
        nothing."""
        self._num_resets = 0
        self._turn = threading.Condition()
        """Guards everything below."""
        self._waiting: dict[Direction, deque[TransferPlan]] = {direction: deque() for direction in MOST_RUNNING}
        self._num_running = dict.fromkeys(MOST_RUNNING, 0)
        self._breakers = {direction: Breaker() for direction in MOST_RUNNING}
        self._to_forget: list[int] = []
        """Slots whose records a thread has to erase before the next store."""
        self._is_forgetting_due = self._is_forgetting = False
        self._num_forgets = 0
        self._given_up: set[int] = set()
        self._under_way: dict[int, int] = {}
        """By id of a launched job: the number of `forget` calls before its launch."""
        self._refusal = "the disk is not open"
        """Why new jobs are refused; empty while they are not."""
        self._is_abandoned = False
        self._is_closing = True
        """Whether no thread may start: before `open`, and after `stop_launching`."""
        self._threads: dict[threading.Thread, None] = {}

    def identify(self, layout: Layout, namespace: str) -> None:
        """Called before `open`. `layout` and `namespace` identify the KV, together with the regions."""
        block_bytes = sum(region.block_bytes for region in self.regions)
        widths = tuple(component.width for component in layout.components)
        leading = tuple(not component.number for component in layout.components)
        self._layout = SlotLayout(layout.unit_tokens, block_bytes, widths, leading)
        self._fingerprint = hashlib.sha256(identity_of(layout, namespace, self.regions).encode()).digest()

    def open(
        self, host: NDArray[np.uint8], checksums: BlockChecksums | None, deliver: Callable[[Completion], None], env: Env
    ) -> None:
        """Open or make the files within `open_timeout_s`, and start the threads. `ConfigError` if the files cannot be
        had. `TransferRefused` if a thread cannot be started: `stop_launching` and `join` then close the files.

        `checksums` are the sums of host blocks, which loads to the device verify: each block is verified before it is
        stored, and its sum is recorded again after it was read back.
        """
        if self._layout is None:
            raise WrongState("the disk has no layout yet: a runtime sets it before it opens the transport")
        open_slots = partial(
            DiskSlots.open, layout=self._layout, host=host, size_bytes=self.tier.size_bytes,
            fingerprint=self._fingerprint, draw_generation=lambda: env.random.getrandbits(63),
        )  # fmt: skip
        self.slots = opened_within(self.tier.open_timeout_s, lambda: open_slots(self.directory(self.tier.path)), env)
        self.num_blocks, self._first_generation = self.slots.num_slots, self.slots.generation
        self._host, self._checksums, self._deliver, self._env = host, checksums, deliver, env
        self._refusal, self._is_closing = "", False
        for number in range(NUM_THREADS):
            self._start(self._work, f"aoffload-disk-{number}")

    @property
    def num_slots(self) -> int:
        return self.num_blocks

    # -- jobs -----------------------------------------------------------------------------------------------------

    def launch(self, plan: TransferPlan) -> None:
        """Have a thread run the job. `TransferRefused` after closing, if the files must not be used any more, or if a
        store has no labels."""
        if plan.direction is Direction.STORE and not isinstance(plan.payload, DiskPayload):
            raise TransferRefused(f"job {plan.job_id}: {plan.payload!r} is not the payload of a store to the disk")
        with self._turn:
            if self._refusal:
                raise TransferRefused(self._refusal)
            self._under_way[plan.job_id] = self._num_forgets
            self._waiting[plan.direction].append(plan)
            self._turn.notify()

    def give_up(self, job_id: int) -> None:
        """Give up a job. Others may write to its source once this has returned, so a store records nothing from then
        on. The completion comes all the same, when the job is over."""
        with self._turn:
            if job_id in self._under_way:
                self._given_up.add(job_id)

    def forget(self, slots: Sequence[int]) -> None:
        """Make sure that neither a load nor a restart finds the blocks in these slots, or the old blocks in slots to
        which stores are under way. Stores wait until this is done, because they may write to the same slots."""
        with self._turn:
            if self._is_closing:
                raise TransferRefused(self._refusal)
            self._num_forgets += 1
            self._to_forget += slots
            self._is_forgetting_due = True
            self._turn.notify()

    def refuses(self, direction: Direction) -> bool:
        """Whether the disk is off, or the breaker of this direction is open, because jobs have failed."""
        with self._turn:
            return bool(self._refusal) or self._breakers[direction].is_open(self._env.now())

    def take_moves(self) -> Sequence[StorageMove]:
        return taken(self._moves)

    def statistics(self) -> DiskStatistics:
        loads, stores = (self._counts[direction] for direction in (Direction.LOAD, Direction.STORE))
        block_bytes = 0 if self._layout is None else self._layout.block_bytes
        with self._turn:
            found = [(USES[direction], breaker) for direction, breaker in self._breakers.items()]
            alone = tuple(breaker.left_alone(use) for use, breaker in found if breaker.is_on_trial)
        return DiskStatistics(
            num_loads=loads.num_jobs,
            num_stores=stores.num_jobs,
            blocks_loaded=loads.num_blocks,
            blocks_stored=stores.num_blocks,
            blocks_corrupt=loads.num_corrupt,
            bytes_loaded=loads.num_blocks * block_bytes,
            bytes_stored=stores.num_blocks * block_bytes,
            load_seconds=loads.seconds,
            store_seconds=stores.seconds,
            num_failures=loads.num_failed + stores.num_failed,
            left_alone=alone,
        )

    def turn_off(self, reason: str) -> None:
        """Refuse new jobs; launched jobs still run."""
        with self._turn:
            self._refusal = self._refusal or reason
            self._turn.notify_all()

    def _is_given_up(self, job_id: int) -> bool:
        return job_id in self._given_up

    def _work(self) -> None:
        wait_precisely()
        while (plan := self._next()) is not None:
            if not isinstance(plan, TransferPlan):
                self._erase(plan)
                continue
            completion = self._completed(plan)
            with self._turn:
                self._num_running[plan.direction] -= 1
                num_forgets = self._under_way.pop(plan.job_id)
                if plan.direction is Direction.STORE and num_forgets != self._num_forgets:
                    self._forget_before(plan, completion.num_landed)
                self._given_up.discard(plan.job_id)
                if self._is_closing:
                    self._turn.notify_all()  # otherwise this thread takes the next job itself
            self._deliver(completion)

    def _erase(self, slots: list[int]) -> None:
        with self._on_superblock:
            trouble = self.slots.forget(slots)
            if trouble is not None:  # `forget` may have raised the generation
                self._first_generation = (self.slots.generation - self._num_resets) % GENERATIONS
        if trouble is not None:
            if trouble.is_off:
                self.turn_off(trouble.reason)
            self._hear_trouble(trouble)
        with self._turn:
            self._is_forgetting = False
            self._turn.notify_all()

    def _forget_before(self, plan: TransferPlan, num_landed: int) -> None:
        """Blocks were forgotten during this store, perhaps the old blocks in its slots. So erase the records that the
        store has not replaced, and sync the others. Called before the completion is delivered, so that no other store
        writes to these slots first."""
        self._to_forget += plan.destination_ids[num_landed:]
        self._is_forgetting_due = True

    def _next(self) -> TransferPlan | list[int] | None:
        """Wait for the next job, or for slots to forget. None: the disk is closing, and nothing is left."""
        with self._turn:
            while True:
                if self._is_forgetting_due and not self._is_forgetting:
                    self._is_forgetting, self._is_forgetting_due = True, False
                    slots, self._to_forget = self._to_forget, []
                    return slots
                for direction, most in MOST_RUNNING.items():
                    if direction is Direction.STORE and self._is_forgetting:
                        continue
                    if self._waiting[direction] and self._num_running[direction] < most:
                        self._num_running[direction] += 1
                        return self._waiting[direction].popleft()
                if self._is_closing and not any(self._waiting.values()):
                    return None
                self._turn.wait()

    def _completed(self, plan: TransferPlan) -> Completion:
        if self._is_abandoned or self._is_given_up(plan.job_id):
            return Completion(plan.job_id, Outcome.FAILED, error="given up before it was begun")
        began_s = self._env.now()
        try:
            found = self._stored(plan) if plan.direction is Direction.STORE else self._loaded(plan)
        except Exception as error:  # noqa: BLE001 - becomes the outcome of this job, which is over: the next may succeed
            found = DiskOutcome(Outcome.FAILED, 0, error=repr(error))
        duration_s = max(0.0, self._env.now() - began_s)  # a clock that goes back costs a duration, not the thread
        self._count(plan, found, duration_s)
        num_bytes = found.num_landed * self.slots.layout.block_bytes
        return Completion(
            plan.job_id, found.outcome, found.num_landed, found.corrupt, found.error, num_bytes, duration_s
        )

    def _stored(self, plan: TransferPlan) -> DiskOutcome:
        payload, stop = DiskPayload.of(plan), self._first_changed(plan.source_ids)
        generation = self._generation_after(payload.generation)
        front = plan.destination_ids[:stop], plan.source_ids[:stop], payload.labels[:stop]
        found = self.slots.store(*front, generation, lambda: self._is_given_up(plan.job_id))
        if stop == plan.num_blocks or found.outcome is not Outcome.LANDED:
            return found
        return attrs.evolve(found, outcome=Outcome.FAILED, error="a block in host memory is not what was stored there")

    def _first_changed(self, host_ids: Sequence[int]) -> int:
        """The index of the first host block whose checksum differs; the number of blocks if there is none. A corrupt
        block must not be stored, because the disk would record a sum that makes it look right."""
        if self._checksums is not None:
            for index, host_id in enumerate(host_ids):
                if not self._checksums.matches(host_id, self._host[host_id]):
                    return index
        return len(host_ids)

    def _loaded(self, plan: TransferPlan) -> DiskOutcome:
        found = self.slots.load(plan.source_ids, plan.destination_ids)
        if self._checksums is not None:
            for host_id in plan.destination_ids[: found.num_landed]:
                self._checksums.record(host_id, self._host[host_id])
        return found

    def _count(self, plan: TransferPlan, found: DiskOutcome, duration_s: float) -> None:
        with self._turn:
            counts = self._counts[plan.direction]
            counts.num_jobs += 1
            counts.num_blocks += found.num_landed
            counts.num_corrupt += len(found.corrupt)
            counts.seconds += duration_s
            breaker, now, move = self._breakers[plan.direction], self._env.now(), None
            if found.outcome is not Outcome.FAILED:
                move = breaker.succeeded(now)
            elif not self._is_given_up(plan.job_id):
                counts.num_failed += 1
                move = breaker.failed(now, found.error)
        if move is not None:
            self._moves.append(StorageMove(Tier.DISK, USES[plan.direction], "", move))

    # -- a restart, and resets ------------------------------------------------------------------------------------

    def read_back(
        self, hear: Callable[[Sequence[RestoredRun]], None], over: Callable[[str], None],
        hear_trouble: Callable[[DiskTrouble], None],
    ) -> None:  # fmt: skip
        """Read the runs that an earlier process has left, in a thread of its own. `hear` is called there with each
        slice, and `over` at the end, with the reason of a failure or with an empty text. Store nothing before the end.
        `hear_trouble` is called in some thread whenever records could not be erased."""
        self._hear_trouble = hear_trouble

        def read() -> None:
            problem = ""
            try:
                for found in self.slots.survivors():
                    if self._is_closing:
                        problem = "closed before everything was read"
                        break
                    if found:
                        hear(found)
            except Exception as error:  # noqa: BLE001 - such as a lack of memory: runs that were not read are not used
                problem = repr(error)
            if problem:
                self.turn_off(f"the disk was not read to its end: {problem}")
            over(problem)

        self._start(read, "aoffload-disk-reader")

    def reset(self, num_resets: int, over: Callable[[str], None]) -> None:
        """Make sure that no restart finds blocks that were planned before the reset of this number. A thread of its own
        writes that, and calls `over` at the end, with the reason of a failure or with an empty text."""

        def reset() -> None:
            problem = ""
            with self._on_superblock:
                if num_resets > self._num_resets:
                    problem = self._raise_generation(num_resets)
            over(problem)

        self._start(reset, "aoffload-disk-reset")

    def disown(self) -> None:
        """Make sure that no restart finds blocks that are stored after the next reset."""
        if not self.num_blocks:
            raise TransferRefused(self._refusal)
        self.slots.disown()

    def _raise_generation(self, num_resets: int) -> str:
        try:
            self.slots.raise_generation(self._generation_after(num_resets))
        except OSError as error:
            self.turn_off(f"a reset did not reach the disk: {error}")
            return str(error)
        self._num_resets = num_resets
        return ""

    def _generation_after(self, num_resets: int) -> int:
        return (self._first_generation + num_resets) % GENERATIONS

    # -- the end --------------------------------------------------------------------------------------------------

    def stop_launching(self) -> None:
        """Refuse new jobs, and end the threads after the launched ones. May be called twice."""
        with self._turn:
            self._refusal = self._refusal or "the transport is closed"
            self._is_closing = True
            self._turn.notify_all()
            self._close_after_the_last()  # perhaps none could be started

    def join(self, timeout_s: float) -> bool:
        """Whether all threads ended within `timeout_s` seconds; then the files are closed. If not, no more jobs are
        begun, and the thread that ends last closes the files."""
        deadline_s = time.monotonic() + timeout_s  # not the `Env`'s clock: joining a thread takes real time
        with self._turn:
            threads = list(self._threads)
        for thread in threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))
        with self._turn:
            self._is_abandoned = bool(self._threads)
            return not self._is_abandoned

    def _start(self, work: Callable[[], None], name: str) -> None:
        def run() -> None:
            try:
                work()
            finally:
                self._ended()

        with self._turn:  # held until the thread is recorded, because it may end at once
            if self._is_closing:
                raise TransferRefused(self._refusal)
            self._threads[started_thread(self._env, run, name)] = None

    def _ended(self) -> None:
        """The calling thread ends."""
        with self._turn:  # held while the files are closed, so that they are closed when `join` returns True
            self._threads.pop(threading.current_thread(), None)
            self._close_after_the_last()

    def _close_after_the_last(self) -> None:
        """The last thread closes the files, because a hung call of another thread may have used them until then."""
        if self._is_closing and not self._threads and self.num_blocks:
            with suppress(OSError):
                self.slots.close()


def opened_within(timeout_s: float, open_slots: Callable[[], DiskSlots], env: Env) -> DiskSlots:
    """Call `open_slots` in a thread of its own, and return its result. `ConfigError("path")` if it takes longer than
    `timeout_s` seconds. The thread then closes the slots as soon as they are open; until then, the directory stays
    locked."""
    is_over = threading.Lock()  # taken by the thread once the slots are open, or by the caller once it gives up
    has_ended = threading.Event()
    found: list[DiskSlots] = []
    errors: list[Exception] = []

    def work() -> None:
        try:
            slots = open_slots()
            if is_over.acquire(blocking=False):
                found.append(slots)
            else:
                slots.close()
        except Exception as error:  # noqa: BLE001 - the caller raises it
            errors.append(error)
        has_ended.set()

    started_thread(env, work, "aoffload-disk-opener")
    if not has_ended.wait(timeout_s) and is_over.acquire(blocking=False):
        raise ConfigError("path", f"does not answer: it was not open within {timeout_s:g} s")
    has_ended.wait()
    if errors:
        raise errors[0]
    return found[0]
