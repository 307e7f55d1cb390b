"""A lane: the copies of one direction, submitted and ended in launch order.

A job passes through two threads. The submitting thread makes the device wait for the job's fences, submits the copies
and takes the next job, so the device is not idle while a thread waits for an earlier copy. The completing thread waits
for each submitted copy in turn, verifies it and delivers its completion.

    launch -> [queue] -> submitting thread -> [ends] -> completing thread -> deliver
                               |                                                ^
                               +-- no earlier job is open, and the copy is over +

On a CPU a copy is over when its submission returns. The submitting thread then delivers the completion itself, so the
second thread is started only when a copy first has to be waited for.

**Small copies.** Handing a job to a copy thread and back costs a few microseconds when the process is idle, and many
times that while the event loop holds the interpreter lock. A small copy costs less than that. So `copy_now` copies in
the thread that launches, if no earlier job of the lane is open. Its completion is delivered as usual. A load that waits
for the copy settles the completion in the same turn of the loop (`CopyQueue.settle_now`); otherwise the next turn
settles it. Two bounds keep the loop responsive: the size of one copy, which is measured when the transport opens, and
the bytes copied in one turn. The number of copies has no bound, because handing a small copy to a thread would block
the loop for as long as making the copy.

The lanes of a transport share a `DeviceLoss`: once the device is lost, no lane starts a copy. If `verify` is set,
stores record `BlockChecksums`, and loads compare them.
"""

from __future__ import annotations

import enum
import hashlib
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue

import attrs
import numpy as np
from numpy.typing import NDArray

from .._common.env import Env
from .._kernel.plans import Completion, TransferPlan
from .._kernel.states import CORRUPT, FAILED, LANDED, STORE, UNPROVEN, Direction
from ..errors import DeviceGone, TransferRefused
from .backends.base import CopyBackend, CopyStopped, LostDevice
from .fences import PASSED, Fence, is_known_to_have_passed
from .shared_memory import DIGEST_BYTES
from .turns import started_thread, wait_precisely


class BlockChecksums:
    """The checksums of all host blocks, as one array `uint8 [num_host_blocks, 16]`: no object per block.

    A block that was never stored has an all-zero checksum, which matches no bytes: loading it reports it as corrupt.
    BLAKE2b is the fastest collision-resistant hash of the standard library (measured: 0.4 GB/s, and 0.24 GB/s for
    SHA-256 without hardware support), and it releases the GIL.
    """

    def __init__(self, num_host_blocks: int, digests: NDArray[np.uint8] | None = None) -> None:
        """`digests`: memory for the checksums, all zero. Other processes may share this memory."""
        own = np.zeros((num_host_blocks, DIGEST_BYTES), dtype=np.uint8)
        self._digests = own if digests is None else digests

    def close(self) -> None:
        """Release the memory, which other processes may share."""
        self._digests = np.zeros((0, DIGEST_BYTES), dtype=np.uint8)

    def record(self, host_id: int, block: NDArray[np.uint8]) -> None:
        self._digests[host_id] = np.frombuffer(_digest(block), dtype=np.uint8)

    def matches(self, host_id: int, block: NDArray[np.uint8]) -> bool:
        recorded: bytes = self._digests[host_id].tobytes()
        return recorded == _digest(block)


def _digest(block: NDArray[np.uint8]) -> bytes:
    return hashlib.blake2b(block.data, digest_size=DIGEST_BYTES).digest()


class DeviceLoss:
    """Shared by the threads of a transport: set by the first thread that finds the device lost, and never reset."""

    def __init__(self) -> None:
        self.reason = ""
        """Empty while the device answers."""

    def notice(self, error: BaseException | None) -> None:
        """Record the loss if `error` is a `LostDevice`. Called before the error is reported."""
        if isinstance(error, LostDevice):
            self.reason = self.reason or f"device lost: {error}"

    def check(self) -> None:
        """Raise `DeviceGone` once a loss is recorded."""
        if self.reason:
            raise DeviceGone(self.reason)


MOST_BYTES = 64 * 1024
"""Maximum bytes of a copy made at once, however long a hand-over to a thread takes on this machine."""
TURN_BYTES = 512 * 1024
"""Maximum bytes copied at once in one turn of the event loop. Copying them takes some 50 microseconds."""
NUM_ROUNDS = 15
MOST_S = 0.005
"""Maximum time after which a round of the measurement begins, because handing over takes tens of milliseconds while
other threads compute."""
SAMPLE_BYTES = 2**20


def hand_over_bytes(hand_over: Callable[[], object]) -> int:
    """How many bytes a thread copies in the time that `hand_over` takes, at most `MOST_BYTES`. `hand_over` hands a job
    to another thread and waits for the answer. Takes about a millisecond, or one hand-over."""
    source = np.ones(SAMPLE_BYTES, dtype=np.uint8)
    destination = np.ones_like(source)
    handed: list[float] = []
    copied: list[float] = []
    end_s = time.perf_counter() + MOST_S
    while not handed or (len(handed) < NUM_ROUNDS and time.perf_counter() < end_s):
        began_s = time.perf_counter()
        hand_over()
        handed.append(time.perf_counter() - began_s)
        began_s = time.perf_counter()
        np.copyto(destination, source)
        copied.append(time.perf_counter() - began_s)
    return min(MOST_BYTES, int(SAMPLE_BYTES * statistics.median(handed) / max(1e-9, statistics.median(copied))))


class _Stop(enum.Enum):
    STOP = enum.auto()


@attrs.frozen
class _Job:
    plan: TransferPlan
    before: tuple[Fence, ...]
    """Fences that have to pass before the first byte moves."""
    number: int
    """Its place in launch order."""


@attrs.frozen
class _End:
    """A job that was submitted, or that failed before. It still has to be completed."""

    plan: TransferPlan
    number: int
    complete: Callable[[], Completion]
    """Waits until the copy is over, and returns its completion."""
    fence: Fence | None = PASSED
    """`complete` does not block once this fence has passed. None: `complete` may wait for the whole lane."""

    @property
    def is_over(self) -> bool:
        return self.fence is not None and _has_passed(self.fence)


@attrs.define
class LaneCounts:
    """Written by the thread that completes a job; only one thread does at a time."""

    num_jobs: int = 0
    num_blocks: int = 0
    num_verified: int = 0
    num_corrupt: int = 0
    copy_seconds: float = 0.0


class CopyLane:
    """The copies of one direction and their two threads. Loads and stores have a lane each, so a store that waits for a
    long forward does not delay a load."""

    def __init__(
        self,
        direction: Direction,
        backend: CopyBackend,
        checksums: BlockChecksums | None,
        deliver: Callable[[Completion], object],
        env: Env,
        loss: DeviceLoss,
    ) -> None:
        self.direction = direction
        self.counts = LaneCounts()
        self._backend = backend
        self._checksums = checksums
        self._deliver = deliver
        self._env = env
        self._loss = loss
        self._queue: SimpleQueue[_Job | _Stop | SimpleQueue[None]] = SimpleQueue()
        """Launched jobs for the submitting thread. A queue among them is a probe, which it answers (`hand_over`)."""
        self._ends: SimpleQueue[_End | _Stop] = SimpleQueue()
        """Submitted jobs for the completing thread."""
        self._in_hand: _Job | None = None
        """The job that the submitting thread works on."""
        self._completing: list[_End] = []
        """Taken from `_ends`, and not delivered yet."""
        self._completed: list[Completion] = []
        """The completions of the first jobs in `_completing`."""
        self._last_end_s = 0.0
        # Guards `_num_launched`, `_num_over` and both refusals together with the queues: no job is queued for a thread
        # that has ended.
        self._gate = threading.Lock()
        self._num_launched = self._num_over = 0
        """Both numbers are equal while the lane is idle."""
        self._refusal = ""
        """Why the lane launches nothing more; empty while it does."""
        self._completing_ended = ""
        """Why the completing thread completes nothing more; empty while it can run."""
        self._abandoned = False
        """Whether `join` has stopped waiting for the threads: they start no copy any more."""
        # The frames of both threads refer to this lane, so a copy that hangs keeps the memory of both sides alive.
        self._completer: threading.Thread | None = None
        self._thread = started_thread(env, self._submit_all, f"aoffload-{direction.value}")

    # -- launching ------------------------------------------------------------------------------------------------

    def launch(self, plan: TransferPlan, before: tuple[Fence, ...]) -> None:
        """Queue a job. `TransferRefused` after closing, or if a thread of the lane has died."""
        with self._gate:
            if self._refusal or not self._thread.is_alive():
                raise TransferRefused(self._refusal or f"the {self.direction.value} thread is gone")
            self._queue.put(_Job(plan, before, self._num_launched))
            self._num_launched += 1

    def copy_now(self, plan: TransferPlan, before: tuple[Fence, ...], deliver: Callable[[Completion], object]) -> bool:
        """Copy in the calling thread, and deliver the completion. Returns False, without copying, if the copy would
        have to wait for an earlier job or a fence. Only for backends whose copies are over when `copy` returns. Raises
        `TransferRefused` like `launch`."""
        completion: Completion | None = None
        try:
            with self._gate:  # `stop_launching` takes the gate before the memory is released
                if self._refusal:
                    raise TransferRefused(self._refusal)
                if self._num_over != self._num_launched or not all(map(is_known_to_have_passed, before)):
                    return False
                began_s = self._env.now()
                try:
                    self._backend.copy(plan)
                    completion = self._proven(plan, len(plan.source_ids), began_s)
                except Exception as error:  # noqa: BLE001 - becomes the outcome of this job, as in the thread
                    self._loss.notice(error)
                    completion = self._failed(plan, began_s, error)
                except BaseException:  # a signal handler raised: the copy has stopped, and no block is proven
                    completion = _never_started(plan, "the copy was interrupted")
                    raise
        finally:
            if completion is not None:
                deliver(completion)
        return True

    def hand_over(self) -> None:
        """Wait until the submitting thread has answered: to measure how long that takes."""
        answered: SimpleQueue[None] = SimpleQueue()
        self._queue.put(answered)
        answered.get()

    def stop_launching(self) -> None:
        """Refuse new jobs, and end the threads after the launched ones. May be called twice."""
        with self._gate:
            if not self._refusal:
                self._refusal = "the transport is closed"
                self._queue.put(_Stop.STOP)

    def join(self, timeout_s: float) -> bool:
        """Whether the lane ended within `timeout_s` seconds. If not, it starts no more jobs even if its copy ends."""
        deadline_s = time.monotonic() + timeout_s  # joining a thread takes real time
        self._thread.join(max(0.0, timeout_s))
        if self._completer is not None:
            self._completer.join(max(0.0, deadline_s - time.monotonic()))
        self._abandoned = self._thread.is_alive() or (self._completer is not None and self._completer.is_alive())
        return not self._abandoned

    # -- the submitting thread ------------------------------------------------------------------------------------

    def _submit_all(self) -> None:
        wait_precisely()
        try:
            with self._backend.thread_scope(self.direction):
                while (job := self._queue.get()) is not _Stop.STOP:
                    if isinstance(job, SimpleQueue):
                        job.put(None)
                        continue
                    self._in_hand = job
                    self._pass_on(self._submitted(job))
                    self._in_hand = None
        except LostDevice as error:  # raised on entering or leaving the thread's scope
            self._loss.notice(error)
        finally:
            self._end_submitting()

    def _submitted(self, job: _Job) -> _End:
        plan = job.plan
        refusal = "the transport was closed before the copy started" if self._abandoned else ""
        if refusal := refusal or self._loss.reason or self._completing_ended:
            return _End(plan, job.number, partial(_never_started, plan, refusal))
        began_s = self._env.now()
        is_started = False
        try:
            self._backend.wait_for(self.direction, job.before)
            began_s, is_started = self._env.now(), True
            fence = self._backend.copy(plan)
        except Exception as error:  # noqa: BLE001 - becomes the outcome of this job; the next one may succeed
            self._loss.notice(error)
            if is_started:
                end = _End(plan, job.number, partial(self._failed, plan, began_s, error), fence=None)
            else:
                end = _End(plan, job.number, partial(_never_started, plan, repr(error)))
        else:
            end = _End(plan, job.number, partial(self._landed, plan, began_s, fence), fence)
        return end

    def _pass_on(self, end: _End) -> None:
        """Complete `end` after all jobs before it: in this thread if that needs no waiting, else in the completing
        thread."""
        if self._num_over == end.number and end.is_over and not self._completing_ended:
            self._deliver_all([end.complete()])
            return
        if self._completer is None:
            name = f"aoffload-{self.direction.value}-ends"
            with suppress(TransferRefused):  # no thread left: this one waits itself, and submits the next job late
                self._completer = started_thread(self._env, self._complete_all, name)
        with self._gate:
            if self._completer is not None and not self._completing_ended:
                self._ends.put(end)
                return
        self._deliver_all([_in_doubt(end.plan, self._completing_ended) if self._completing_ended else end.complete()])

    def _end_submitting(self) -> None:
        """Called when the submitting thread ends, orderly or by an error. Each job that it will not submit gets a
        completion."""
        with self._gate:
            self._refusal = self._refusal or self._loss.reason or f"the {self.direction.value} thread died"
        reason = f"the {self.direction.value} thread ended"
        died_with = self._in_hand
        if died_with is not None:
            self._pass_on(_End(died_with.plan, died_with.number, partial(_in_doubt, died_with.plan, reason)))
        while not self._queue.empty():
            job = self._queue.get()
            if isinstance(job, _Job):
                self._pass_on(_End(job.plan, job.number, partial(_never_started, job.plan, reason)))
        self._ends.put(_Stop.STOP)
        if died_with is not None:
            self._outlive_copies()

    # -- the completing thread ------------------------------------------------------------------------------------

    def _complete_all(self) -> None:
        wait_precisely()
        try:
            with self._backend.thread_scope(self.direction):
                end = self._ends.get()
                while end is not _Stop.STOP:
                    end = self._complete_burst(end)
        except LostDevice as error:
            self._loss.notice(error)
        finally:
            self._end_completing()

    def _complete_burst(self, end: _End) -> _End | _Stop:
        """Wait for `end`, and deliver it with all later ones that are over by then, because the event loop that the
        first delivery wakes then finds all of them. Returns the next one, or the stop."""
        following: _End | _Stop | None = end
        while isinstance(following, _End) and (following is end or following.is_over):
            self._completing.append(following)
            self._completed.append(following.complete())
            try:
                following = self._ends.get_nowait()
            except Empty:
                following = None
        if isinstance(following, _End):
            self._completing.append(following)
        self._deliver_all(self._completed)
        self._completing, self._completed = [], []
        return self._ends.get() if following is None else following

    def _end_completing(self) -> None:
        """Called when the completing thread ends, orderly or by an error. Jobs that it did not deliver are in doubt:
        UNPROVEN."""
        reason = f"the {self.direction.value} thread ended"
        with self._gate:
            self._completing_ended = reason
            if not self._refusal:
                self._refusal = self._loss.reason or f"the {self.direction.value} thread died"
                self._queue.put(_Stop.STOP)
            while not self._ends.empty():
                if (end := self._ends.get()) is not _Stop.STOP:
                    self._completing.append(end)
        doubts = [_in_doubt(end.plan, reason) for end in self._completing[len(self._completed) :]]
        self._deliver_all([*self._completed, *doubts])
        if doubts:
            self._outlive_copies()

    def _outlive_copies(self) -> None:
        """Wait in a thread whose frame refers to both memories: it keeps them until the device has finished."""
        with suppress(Exception):
            self._backend.settle(self.direction)

    # -- completions ----------------------------------------------------------------------------------------------

    def _deliver_all(self, completions: Sequence[Completion]) -> None:
        for completion in completions:
            self._deliver(completion)
        with self._gate:
            self._num_over += len(completions)

    def _landed(self, plan: TransferPlan, began_s: float, fence: Fence) -> Completion:
        try:
            fence.synchronize()
        except Exception as error:  # noqa: BLE001 - a lost device, say: the copy may still be writing
            self._loss.notice(error)
            return _in_doubt(plan, repr(error))
        return self._proven(plan, plan.num_blocks, began_s)

    def _failed(self, plan: TransferPlan, began_s: float, error: Exception) -> Completion:
        num_copied = error.num_copied if isinstance(error, CopyStopped) else 0
        reason = repr(error.__cause__ or error)
        try:
            self._backend.settle(self.direction)
        except Exception as doubt:  # noqa: BLE001 - unknown whether the started part of the copy is over
            self._loss.notice(doubt)
            return _in_doubt(plan, f"{reason}, then {doubt!r}")
        proven = self._proven(plan, num_copied, began_s)
        return attrs.evolve(proven, outcome=FAILED, corrupt=(), error=reason)

    def _proven(self, plan: TransferPlan, num_copied: int, began_s: float) -> Completion:
        """The completion of a copy whose leading `num_copied` blocks are at their destination, after verification."""
        now_s, counts = self._env.now(), self.counts
        # Time in which several jobs ran is counted once.
        counts.copy_seconds += now_s - max(began_s, self._last_end_s)
        self._last_end_s = now_s
        counts.num_jobs += 1
        counts.num_blocks += num_copied
        duration_s = max(0.0, now_s - began_s)  # a clock that goes back costs a duration, not the thread
        num_bytes = num_copied * self._backend.block_bytes
        landed = Completion(plan.job_id, LANDED, num_copied, num_bytes=num_bytes, duration_s=duration_s)
        try:
            self._backend.after_copy(plan)
            corrupt = () if self._checksums is None else self._verify(plan, num_copied, self._checksums)
            self._backend.after_verify(plan)
        except Exception as error:  # noqa: BLE001 - reading back failed: the copy is over, and nothing proven
            self._loss.notice(error)
            return attrs.evolve(landed, outcome=FAILED, num_landed=0, error=repr(error))
        if corrupt:
            problem = f"{len(corrupt)} of {num_copied} blocks hold other bytes than were stored"
            return attrs.evolve(landed, outcome=CORRUPT, num_landed=corrupt[0], corrupt=corrupt, error=problem)
        return landed

    def _verify(self, plan: TransferPlan, num_copied: int, checksums: BlockChecksums) -> tuple[int, ...]:
        """For a load: indices of blocks that differ from the stored ones. For a store: records the checksums.

        Checksums are taken from the source blocks, which the job still leases, so a load also notices a store that was
        not over yet when its fence passed.
        """
        if self.direction is STORE:
            for block_id, host_id in zip(plan.source_ids[:num_copied], plan.destination_ids, strict=False):
                checksums.record(host_id, self._backend.device_block(block_id))
            return ()
        pairs = zip(plan.source_ids[:num_copied], plan.destination_ids, strict=False)
        # Read back from the device, where compute reads: this also finds blocks that were copied to the wrong place.
        found = tuple(
            index
            for index, (host_id, block_id) in enumerate(pairs)
            if not checksums.matches(host_id, self._backend.device_block(block_id))
        )
        self.counts.num_corrupt += len(found)
        self.counts.num_verified += num_copied - len(found)
        return found


def _never_started(plan: TransferPlan, reason: str) -> Completion:
    return Completion(plan.job_id, FAILED, error=reason)


def _in_doubt(plan: TransferPlan, reason: str) -> Completion:
    return Completion(plan.job_id, UNPROVEN, error=reason)


def _has_passed(fence: Fence) -> bool:
    try:
        return fence.query()
    except Exception:  # noqa: BLE001 - `synchronize` raises it again, and `_landed` makes an outcome of it
        return True
