"""The threads of the remote tier: some for loads and some for stores, so that neither waits for the other.

    load    get the object, prove it, and only then copy its blocks to host memory
    store   copy the blocks out of host memory, and only then seal and put them

Host memory is touched under a lock of the job, and not at all once the job was given up. So host blocks are never in
doubt, whatever the store does.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, Protocol

import attrs
import numpy as np
from numpy.typing import NDArray

from ..._common.env import Env
from ..._config.tiers import RemoteTier
from ..._kernel.layout import Layout
from ..._kernel.plans import Completion, TransferPlan
from ..._kernel.states import Direction, Outcome
from ..._transfer.breaker import StorageMove, Use, taken
from ..._transfer.lane import BlockChecksums
from ..._transfer.region import KVRegion, identity_of
from ..._transfer.transport import RemoteStatistics
from ...errors import StoreError, TransferRefused, WrongState
from .calls import LOAD_THREADS, STORE_THREADS, MakesThreads, Steps, StoreCalls, Threads
from .cells import Cells, CellShape, cells_of_tier
from .memory import CellMemory, Known, Removals
from .plans import CellLabel
from .questions import Questions

# -- jobs ------------------------------------------------------------------------------------------------------------
#
# One job between host memory and a cell, and the copies from and to host memory.
#
# A lock of the job guards each copy, so that a job that was given up does not touch host memory any more.


@attrs.define(eq=False)
class CellJob:
    plan: TransferPlan
    label: CellLabel
    name: bytes
    """The key of the object."""
    node: str
    is_begun: bool = False
    is_given_up: bool = False
    _lock: threading.Lock = attrs.field(factory=threading.Lock)

    def give_up(self) -> bool:
        """Once this has returned, the job does not touch host memory any more. Returns False if the job was given up
        before."""
        with self._lock:
            before, self.is_given_up = self.is_given_up, True
        return not before

    def unless_given_up(self, touch: Callable[[], bool | None]) -> bool:
        """Call `touch`, which copies from or to host memory, unless the job was given up. Returns whether it was called
        and did not return False."""
        with self._lock:
            return not self.is_given_up and touch() is not False


class HostCells(Protocol):
    """Host memory. The copies are made with the lock of a job that is not given up."""

    def room(self, name: str, num_bytes: int) -> memoryview:
        """Other memory, which the calling thread has to itself until the end of its work. Each `name` has one size."""
        ...

    def copy_out(self, plan: TransferPlan, blocks: NDArray[np.uint8]) -> bool:
        """Copy the sources of `plan` to `blocks`, which are a whole cell. Returns False if a checksum differs."""
        ...

    def copy_in(self, plan: TransferPlan, blocks: NDArray[np.uint8]) -> None:
        """Copy `blocks` to the destinations of `plan`."""
        ...


@attrs.frozen
class HostRows:
    """`rows`: `uint8 [num_host_blocks, block_bytes]`. With `checksums`, each block is verified before it is stored, and
    its sum is recorded again after it was read back."""

    rows: NDArray[np.uint8]
    checksums: BlockChecksums | None
    _rooms: threading.local = attrs.field(init=False, factory=threading.local)

    def room(self, name: str, num_bytes: int) -> memoryview:
        found = getattr(self._rooms, name, None)
        if found is None:
            found = np.empty(num_bytes, np.uint8).data
            setattr(self._rooms, name, found)
        assert isinstance(found, memoryview)
        return found

    def copy_out(self, plan: TransferPlan, blocks: NDArray[np.uint8]) -> bool:
        _gather(self.rows, plan.source_ids, blocks)
        sums, pairs = self.checksums, zip(plan.source_ids, blocks, strict=True)
        return sums is None or all(sums.matches(host_id, row) for host_id, row in pairs)

    def copy_in(self, plan: TransferPlan, blocks: NDArray[np.uint8]) -> None:
        _scatter(blocks, self.rows, plan.destination_ids)
        if self.checksums is not None:
            for host_id in plan.destination_ids:
                self.checksums.record(host_id, self.rows[host_id])


def _gather(host: NDArray[np.uint8], host_ids: Sequence[int], blocks: NDArray[np.uint8]) -> None:
    """Copy host blocks to `blocks`, in one call for each stretch of neighbours, without the interpreter's lock."""
    for at, first, stop in _stretches(host_ids):
        np.copyto(blocks[at : at + stop - first], host[first:stop])


def _scatter(blocks: NDArray[np.uint8], host: NDArray[np.uint8], host_ids: Sequence[int]) -> None:
    """The opposite of `_gather`."""
    for at, first, stop in _stretches(host_ids):
        np.copyto(host[first:stop], blocks[at : at + stop - first])


def _stretches(ids: Sequence[int]) -> list[tuple[int, int, int]]:
    """Stretches of neighbours among `ids`: the index at which each begins, its first id, and the id after its last."""
    found: list[tuple[int, int, int]] = []
    for at, number in enumerate(ids):
        if found and found[-1][2] == number:
            begins, first, _ = found[-1]
            found[-1] = begins, first, number + 1
        else:
            found.append((at, number, number + 1))
    return found


# -- lanes -----------------------------------------------------------------------------------------------------------

USES = {Direction.LOAD: Use.LOAD, Direction.STORE: Use.STORE}


@attrs.define
class RemoteCounts:
    """Counts of one direction, since the tier was opened."""

    num_jobs: int = 0
    num_blocks: int = 0
    num_bytes: int = 0
    seconds: float = 0.0


@attrs.frozen
class Ended:
    outcome: Outcome
    num_landed: int = 0
    error: str = ""
    num_written: int = 0
    """Blocks that crossed the network, or may have crossed it: 0 if the store already had the cell."""


def failed(error: str) -> Ended:
    return Ended(Outcome.FAILED, error=error)


class RemoteLanes:
    """Runs jobs on the store of `tier`, in `threads`. Every launched job gets one completion. `TransferRefused` if a
    thread cannot be started: then the others have ended, too."""

    def __init__(
        self, tier: RemoteTier, cells: Cells, host: HostCells, deliver: Callable[[Completion], None], env: Env,
        threads: MakesThreads = Threads,
    ) -> None:  # fmt: skip
        self.cells = cells
        self.calls = StoreCalls(tier.store, cells, env)
        self.memory = CellMemory()
        self.removals = Removals()
        self.counts = {direction: RemoteCounts() for direction in USES}
        self.num_missing = self.num_corrupt = self.num_removed = 0
        self._tier, self._host, self._deliver, self._env = tier, host, deliver, env
        self._lock = threading.Lock()
        """Guards the jobs and the counts."""
        self._jobs: dict[int, CellJob] = {}
        self._num_ended = 0
        over = self._ended
        with ExitStack() as unless_all_run:
            self._loads: Threads[CellJob] = threads("load", LOAD_THREADS, self._next_load, self._run, over, env)
            unless_all_run.callback(self._loads.end)
            self._stores: Threads[CellJob | CellLabel] = threads(
                "store", STORE_THREADS, self._next_store, self._run_or_remove, over, env
            )
            unless_all_run.callback(self._stores.end)
            self.questions = Questions(self.calls, self.memory, self.removals, tier.ask_timeout_s, over, env, threads)
            unless_all_run.pop_all()

    # -- in the event loop's thread -------------------------------------------------------------------------------

    def launch(self, plan: TransferPlan) -> None:
        """Have a thread run the job. `TransferRefused` after closing, or if the payload or the ids are not those of a
        cell."""
        label = plan.payload
        if not isinstance(label, CellLabel) or not self.cells.is_cell(label):
            raise TransferRefused(f"job {plan.job_id}: {label!r} is not a cell of this tier")
        positions = plan.source_ids if plan.direction is Direction.LOAD else plan.destination_ids
        first, num_blocks = positions[0] if positions else 0, self.cells.shape.num_blocks
        if list(positions) != list(range(first, first + plan.num_blocks)) or first + plan.num_blocks > num_blocks:
            raise TransferRefused(f"job {plan.job_id}: {list(positions)} are not blocks of a cell, in their order")
        if plan.direction is Direction.STORE and plan.num_blocks != num_blocks:
            raise TransferRefused(f"job {plan.job_id}: {plan.num_blocks} of {num_blocks} blocks are not a whole cell")
        name = self.calls.name(label)
        job = CellJob(plan, label, name, self.calls.node_of(name))
        with self._lock:
            self._jobs[plan.job_id] = job
        lane = self._loads if plan.direction is Direction.LOAD else self._stores
        try:
            lane.submit(job)
        except TransferRefused:
            self._forget_job(job)
            raise

    def give_up(self, job_id: int) -> None:
        """Give up a job. Others may use its host blocks once this has returned. The completion comes all the same, when
        the job is over."""
        with self._lock:
            job = self._jobs.get(job_id)
        if job is not None and job.give_up() and job.is_begun:
            self.calls.note_failure(USES[job.plan.direction], job.node, "it took too long")

    def ask(self, labels: Sequence[CellLabel], hear: Callable[[int], None]) -> None:
        self.questions.ask(labels, hear)

    def is_wanted(self, label: CellLabel) -> bool:
        if self.removals.holds(label):
            return False  # store it again once the cell was removed
        if self.memory.of(label, self._env.now()) is Known.PRESENT:
            return False
        return not self._refuses_store(label)  # it would fail at once

    def forget(self, labels: Sequence[CellLabel]) -> None:
        self.removals.add(labels)
        wrong = {(label.component, label.digest) for label in labels}
        with self._lock:
            jobs = [job for job in self._jobs.values() if (job.label.component, job.label.digest) in wrong]
        for job in jobs:
            job.give_up()  # loads that are launched later find the removal
        self._stores.look_again()

    def refuses(self, direction: Direction) -> bool:
        if direction is Direction.STORE:
            self._stores.look_again()  # a removal may be due again by now
        now = self._env.now()
        uses = (Use.ASK, Use.LOAD) if direction is Direction.LOAD else (Use.STORE,)  # each load follows a question
        return self.removals.has_lost_count or any(self.calls.nodes[use].refuse_all(now) for use in uses)

    # -- loads ----------------------------------------------------------------------------------------------------

    def _next_load(self, waiting: deque[CellJob]) -> CellJob | None:
        return _take(waiting, lambda job: self._may_take(job))

    def _may_take(self, job: CellJob) -> bool:
        """Whether a thread should take this job now, to run it or to refuse it."""
        use = USES[job.plan.direction]
        if job.is_given_up or self.calls.refuses(use, job.node):
            return True
        if not self.calls.nodes[use].has_room(job.node):
            return False
        job.is_begun = True
        self.calls.nodes[use].begin(job.node)
        return True

    def _loaded(self, job: CellJob) -> Steps[Ended]:
        now = self._env.now()
        if self.removals.holds(job.label) or self.memory.of(job.label, now) is Known.CORRUPT:
            return failed("the cell in the store is corrupt or invalidated")
        found = yield from self.calls.get(job.node, job.name, self._tier.load_timeout_s)
        if found is None:
            self.memory.note(job.label, Known.ABSENT, self._env.now())
            with self._lock:
                self.num_missing += 1
            return failed("the store does not have the cell")
        room = partial(self._host.room, "blocks", self.cells.shape.num_bytes)
        blocks = self.cells.open(job.label, found, room)
        if blocks is None:
            self.memory.note(job.label, Known.CORRUPT, self._env.now())
            with self._lock:
                self.num_corrupt += 1
            return failed("the object in the store is not this cell")
        number = self.cells.number_of(found)
        if number is not None and self.removals.has_revoked(job.label, number):
            with self._lock:
                self.num_corrupt += 1
            self.removals.add([job.label])  # the put of this object arrived after the removal
            self._stores.look_again()
            return failed("the cell in the store was invalidated")
        self.memory.note_seen(job.label, True, self._env.now())
        first = job.plan.source_ids[0] if job.plan.source_ids else 0
        if not job.unless_given_up(lambda: self._host.copy_in(job.plan, blocks[first:])):
            return failed("given up before it was copied")
        return Ended(Outcome.LANDED, job.plan.num_blocks, num_written=job.plan.num_blocks)

    # -- stores and removals --------------------------------------------------------------------------------------

    def _next_store(self, waiting: deque[CellJob | CellLabel]) -> CellJob | CellLabel | None:
        label = self.removals.take(lambda label: not self._refuses_store(label), self._env.now())
        return label if label is not None else _take(waiting, lambda job: self._may_take(job))

    def _refuses_store(self, label: CellLabel) -> bool:
        return self.calls.refuses(Use.STORE, self.calls.node_of(self.calls.name(label)))

    def _run_or_remove(self, work: CellJob | CellLabel) -> Steps[None]:
        return self._run(work) if isinstance(work, CellJob) else self._remove(work)

    def _remove(self, label: CellLabel) -> Steps[None]:
        name, is_removed = self.calls.name(label), False
        node, nodes = self.calls.node_of(name), self.calls.nodes[Use.STORE]
        nodes.begin(node)
        try:
            yield from self.calls.call(
                Use.STORE, node, lambda: self.calls.store.remove(name, self._tier.store_timeout_s)
            )
            is_removed = True
        except StoreError:
            return  # the removal is tried again later, and the cell is not used meanwhile
        finally:
            nodes.end(node)
            if is_removed:
                self.memory.note(label, Known.ABSENT, self._env.now())
            self.removals.done(label, is_removed, self._env.now())
        with self._lock:
            self.num_removed += 1

    def _stored(self, job: CellJob) -> Steps[Ended]:
        number = self.removals.begin_store(job.label)
        if number is None:
            return failed("an older cell has not been removed yet")
        try:
            return (yield from self._written(job, number))
        finally:
            self.removals.end_store(job.label)

    def _written(self, job: CellJob, number: int) -> Steps[Ended]:
        calls, store, timeout_s = self.calls, self.calls.store, self._tier.store_timeout_s
        known = self.memory.of(job.label, self._env.now())
        if known is Known.CORRUPT:  # a store may silently keep the old object
            yield from calls.call(Use.STORE, job.node, lambda: store.remove(job.name, timeout_s))
        elif known is Known.PRESENT or (yield from calls.has(job.node, job.name, timeout_s)):
            self.memory.note(job.label, Known.PRESENT, self._env.now())
            return Ended(Outcome.LANDED, job.plan.num_blocks)
        made = self._host.room("made", self.cells.object_bytes)
        if not job.unless_given_up(lambda: self._host.copy_out(job.plan, self.cells.blocks_in(made))):
            return failed("given up, or its blocks are not what was stored there")
        self.cells.seal(job.label, made, number)
        try:
            yield from calls.call(Use.STORE, job.node, lambda: store.put(job.name, made, timeout_s))
        except StoreError as error:
            self.removals.doubt(job.label, self._env.now())
            return Ended(Outcome.FAILED, error=str(error), num_written=job.plan.num_blocks)
        self.memory.note(job.label, Known.PRESENT, self._env.now())
        return Ended(Outcome.LANDED, job.plan.num_blocks, num_written=job.plan.num_blocks)

    # -- any job --------------------------------------------------------------------------------------------------

    def _run(self, job: CellJob) -> Steps[None]:
        direction, began_s = job.plan.direction, self._env.now()
        ended = yield from self._outcome(job)
        duration_s = max(0.0, self._env.now() - began_s)  # a clock that goes back costs a duration, not the thread
        num_bytes = ended.num_written * self.cells.shape.block_bytes
        with self._lock:
            self._jobs.pop(job.plan.job_id, None)
            counts = self.counts[direction]
            counts.num_jobs += 1
            if ended.outcome is Outcome.LANDED:
                counts.num_blocks += ended.num_written
                counts.num_bytes += num_bytes
            counts.seconds += duration_s
        self._deliver(
            Completion(job.plan.job_id, ended.outcome, ended.num_landed, (), ended.error, num_bytes, duration_s)
        )

    def _outcome(self, job: CellJob) -> Steps[Ended]:
        use = USES[job.plan.direction]
        if not job.is_begun and job.is_given_up:
            return failed("given up before it was begun")
        if not job.is_begun:
            self.calls.nodes[use].refused(job.node)
            return Ended(Outcome.REFUSED, error=f"{job.node or 'the store'} is suspended after failures")
        try:
            return (yield from (self._stored(job) if use is Use.STORE else self._loaded(job)))
        except StoreError as error:
            return failed(str(error))
        except Exception as error:  # noqa: BLE001 - becomes the outcome of this job, which is over: the next may succeed
            return failed(repr(error))
        finally:
            self.calls.nodes[use].end(job.node)

    def _forget_job(self, job: CellJob) -> None:
        with self._lock:
            self._jobs.pop(job.plan.job_id, None)

    # -- the end --------------------------------------------------------------------------------------------------

    def stop_launching(self) -> None:
        """Refuse new jobs, and end the threads after the launched ones. May be called twice."""
        for threads in (self._loads, self._stores, self.questions):
            threads.stop()

    def join(self, timeout_s: float) -> bool:
        """Whether all threads ended within `timeout_s` seconds; then the store's connections are closed."""
        deadline_s = time.monotonic() + timeout_s  # not the `Env`'s clock: joining a thread takes real time
        ended = [threads.join(deadline_s) for threads in (self._loads, self._stores, self.questions)]
        return all(ended)

    def _ended(self) -> None:
        """The threads of one use have ended. After the last use, close the connections."""
        with self._lock:
            self._num_ended += 1
            is_last = self._num_ended == len(Use)
        if is_last:
            self.calls.close()


def _take(waiting: deque[Any], may_take: Callable[[CellJob], bool]) -> CellJob | None:
    """Remove and return the first job for which `may_take` returns True."""
    for number, job in enumerate(waiting):
        if may_take(job):
            del waiting[number]
            assert isinstance(job, CellJob)
            return job
    return None


# -- local -----------------------------------------------------------------------------------------------------------
#
# `LocalRemote`: the remote tier of a local transport, opened together with the host memory.


@attrs.define(eq=False)
class LaneRemote:
    """Implements `TransportRemote` with lanes that a derived class opens. Until then, it answers that the store has
    nothing."""

    tier: RemoteTier
    _shape: CellShape | None = attrs.field(default=None, init=False)
    _lanes: RemoteLanes | None = attrs.field(default=None, init=False)

    def _known_shape(self) -> CellShape:
        if self._shape is None:
            raise WrongState("the remote tier has no layout yet: a runtime sets it before opening")
        return self._shape

    @property
    def num_blocks(self) -> int:
        """Blocks of a cell, because the block ids of this tier are places in a cell."""
        return 0 if self._shape is None else self._shape.num_blocks

    def launch(self, plan: TransferPlan) -> None:
        if self._lanes is None:
            raise TransferRefused("the remote tier is not open")
        self._lanes.launch(plan)

    def give_up(self, job_id: int) -> None:
        if self._lanes is not None:
            self._lanes.give_up(job_id)

    def connect(self, hear: Callable[[], None]) -> None:
        if self._lanes is None:
            hear()
        else:
            self._lanes.questions.connect(self.tier.load_timeout_s, hear)

    def ask(self, labels: Sequence[CellLabel], hear: Callable[[int], None]) -> None:
        if self._lanes is None:
            hear(0)
        else:
            self._lanes.ask(labels, hear)

    def is_wanted(self, label: CellLabel) -> bool:
        return self._lanes is not None and self._lanes.is_wanted(label)

    def forget(self, labels: Sequence[CellLabel]) -> None:
        if self._lanes is not None and labels:
            self._lanes.forget(labels)

    def refuses(self, direction: Direction) -> bool:
        return self._lanes is None or self._lanes.refuses(direction)

    def take_moves(self) -> Sequence[StorageMove]:
        return () if self._lanes is None else taken(self._lanes.calls.moves)

    def statistics(self) -> RemoteStatistics:
        lanes = self._lanes
        if lanes is None:
            return RemoteStatistics()
        loads, stores = lanes.counts[Direction.LOAD], lanes.counts[Direction.STORE]
        return RemoteStatistics(
            num_loads=loads.num_jobs,
            num_stores=stores.num_jobs,
            blocks_loaded=loads.num_blocks,
            blocks_stored=stores.num_blocks,
            bytes_loaded=loads.num_bytes,
            bytes_stored=stores.num_bytes,
            load_seconds=loads.seconds,
            store_seconds=stores.seconds,
            cells_missing=lanes.num_missing,
            cells_corrupt=lanes.num_corrupt,
            cells_removed=lanes.num_removed,
            num_failures=lanes.calls.num_failures,
            num_questions=lanes.questions.num_questions,
            question_seconds=lanes.questions.seconds,
            num_unknown=lanes.questions.num_unknown,
            left_alone=lanes.calls.left_alone(),
        )

    def stop_launching(self) -> None:
        if self._lanes is not None:
            self._lanes.stop_launching()

    def join(self, timeout_s: float) -> bool:
        """Whether all threads ended within `timeout_s` seconds, and the connections to the store are closed."""
        return self._lanes is None or self._lanes.join(timeout_s)


@attrs.define(eq=False)
class LocalRemote(LaneRemote):
    """Opens lanes on the store of `tier`. `regions` are part of the identity of the cells."""

    regions: Sequence[KVRegion]

    def identify(self, layout: Layout, namespace: str) -> None:
        """Called before `open`. `layout` and `namespace` identify the KV, together with the regions."""
        block_bytes = sum(region.block_bytes for region in self.regions)
        self._shape = CellShape.of(
            layout, identity_of(layout, namespace, self.regions), block_bytes, self.tier.max_cell_bytes
        )

    def open(
        self, host: NDArray[np.uint8], checksums: BlockChecksums | None, deliver: Callable[[Completion], None], env: Env
    ) -> None:
        """Start the threads, without a call to the store. `MissingExtra` names the packages that are not installed."""
        cells = cells_of_tier(self._known_shape(), self.tier.secret)
        self._lanes = RemoteLanes(self.tier, cells, HostRows(host, checksums), deliver, env)
