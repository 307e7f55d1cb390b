"""A lane: the thread that copies on one hop and ends its jobs in order."""

from __future__ import annotations

import enum
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue

import attrs

from ..core.hops import Direction, Outcome
from ..core.plan import Completion, TransferPlan
from ..env import Env
from ..errors import TransferRefused
from .backends.base import CopyBackend, CopyStopped, LostDevice
from .checksums import BlockChecksums
from .fence import Fence
from .loss import DeviceLoss
from .starting import started_thread
from .turns import wait_precisely

__all__ = ["CopyLane", "LaneCounts"]


class _Stop(enum.Enum):
    STOP = enum.auto()


@attrs.frozen
class _Job:
    plan: TransferPlan
    before: tuple[Fence, ...]
    """Fences that have to pass before the first byte moves."""


@attrs.frozen
class _Running:
    plan: TransferPlan
    fence: Fence
    began_s: float


@attrs.define
class LaneCounts:
    """Written by the lane's thread only."""

    num_jobs: int = 0
    num_blocks: int = 0
    num_verified: int = 0
    num_corrupt: int = 0
    copy_seconds: float = 0.0


class CopyLane:
    """Loads and stores have a lane each: a store that waits for a long forward must not hold back a load.

    Jobs of a lane start and end in launch order. Several may be running: the thread starts a job as soon as it is
    queued, and waits for the oldest one only when there is nothing to start.
    """

    def __init__(
        self,
        direction: Direction,
        backend: CopyBackend,
        checksums: BlockChecksums | None,
        deliver: Callable[[Completion], None],
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
        self._queue: SimpleQueue[_Job | _Stop] = SimpleQueue()
        self._running: deque[_Running] = deque()
        self._starting: _Job | None = None
        self._last_end_s = 0.0
        # Guards `_refusal` together with the queue: nothing may be queued after a lane that ends has drained it.
        self._gate = threading.Lock()
        self._refusal = ""
        self._abandoned = False
        # The thread's frame refers to this lane, so a copy that hangs keeps the memory of both sides alive.
        self._thread = started_thread(env, self._work, f"aoffload-{direction.value}")

    def launch(self, plan: TransferPlan, before: tuple[Fence, ...]) -> None:
        with self._gate:
            if self._refusal or not self._thread.is_alive():
                raise TransferRefused(self._refusal or f"the {self.direction.value} thread is gone")
            self._queue.put(_Job(plan, before))

    def stop_launching(self) -> None:
        """Refuse new jobs, and end the thread after the launched ones. May be called twice."""
        with self._gate:
            if not self._refusal:
                self._refusal = "the transport is closed"
                self._queue.put(_Stop.STOP)

    def join(self, timeout_s: float) -> bool:
        """Whether the lane ended within `timeout_s` seconds. If not, it starts no more jobs even if its copy ends."""
        self._thread.join(max(0.0, timeout_s))
        self._abandoned = self._thread.is_alive()
        return not self._abandoned

    def _work(self) -> None:
        wait_precisely()
        try:
            with self._backend.thread_scope(self.direction):
                while (job := self._next_job()) is not _Stop.STOP:
                    self._start(job)
                    self._finish_passed()
        except LostDevice as error:  # raised on entering or leaving the thread's scope
            self._loss.notice(error)
        finally:
            self._give_up()

    def _next_job(self) -> _Job | _Stop:
        while True:
            try:
                job = self._queue.get(block=not self._running)
            except Empty:
                self._finish_oldest()
                continue
            while job is _Stop.STOP and self._running:
                self._finish_oldest()
            return job

    def _start(self, job: _Job) -> None:
        refusal = "the transport was closed before the copy started" if self._abandoned else self._loss.reason
        if refusal:
            self._deliver(_never_started(job.plan, refusal))
            return
        self._starting = job
        try:
            self._backend.wait_for(self.direction, job.before)
        except Exception as error:  # noqa: BLE001 - becomes the outcome of this job; nothing of it was started
            self._loss.notice(error)
            self._finish_unstarted(job.plan, error)
            return
        began_s = self._env.now()
        try:
            fence = self._backend.copy(job.plan)
        except Exception as error:  # noqa: BLE001 - becomes the outcome of this job; the next one may succeed
            self._loss.notice(error)
            self._finish_failed(job.plan, began_s, error)
        else:
            self._starting = None
            self._running.append(_Running(job.plan, fence, began_s))

    def _finish_passed(self) -> None:
        while self._running and _has_passed(self._running[0].fence):
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        running = self._running[0]
        try:
            running.fence.synchronize()
        except Exception as error:  # noqa: BLE001 - a lost device, say: the copy may still be writing
            self._loss.notice(error)
            completion = Completion(running.plan.job_id, Outcome.UNPROVEN, error=repr(error))
        else:
            completion = self._proven(running.plan, running.plan.num_blocks, running.began_s)
        self._running.popleft()
        self._deliver(completion)

    def _finish_unstarted(self, plan: TransferPlan, error: Exception) -> None:
        while self._running:
            self._finish_oldest()
        self._starting = None
        self._deliver(_never_started(plan, repr(error)))

    def _finish_failed(self, plan: TransferPlan, began_s: float, error: Exception) -> None:
        while self._running:
            self._finish_oldest()
        num_copied = error.num_copied if isinstance(error, CopyStopped) else 0
        reason = repr(error.__cause__ or error)
        try:
            self._backend.settle(self.direction)
        except Exception as doubt:  # noqa: BLE001 - unknown whether the started part of the copy is over
            self._loss.notice(doubt)
            completion = Completion(plan.job_id, Outcome.UNPROVEN, error=f"{reason}, then {doubt!r}")
        else:
            proven = self._proven(plan, num_copied, began_s)
            completion = attrs.evolve(proven, outcome=Outcome.FAILED, corrupt=(), error=reason)
        self._starting = None
        self._deliver(completion)

    def _proven(self, plan: TransferPlan, num_copied: int, began_s: float) -> Completion:
        """The completion of a copy whose leading `num_copied` blocks are at their destination, after verification."""
        duration_s = self._count_copy(num_copied, began_s)
        num_bytes = num_copied * self._backend.block_bytes
        landed = Completion(plan.job_id, Outcome.LANDED, num_copied, num_bytes=num_bytes, duration_s=duration_s)
        try:
            self._backend.after_copy(plan)
            corrupt = self._verify(plan, num_copied)
            self._backend.after_verify(plan)
        except Exception as error:  # noqa: BLE001 - reading back failed: the copy is over, and nothing proven
            self._loss.notice(error)
            return attrs.evolve(landed, outcome=Outcome.FAILED, num_landed=0, error=repr(error))
        if corrupt:
            problem = f"{len(corrupt)} of {num_copied} blocks hold other bytes than were stored"
            return attrs.evolve(landed, outcome=Outcome.CORRUPT, num_landed=corrupt[0], corrupt=corrupt, error=problem)
        return landed

    def _count_copy(self, num_copied: int, began_s: float) -> float:
        now_s = self._env.now()
        # Time in which several jobs ran is counted once.
        self.counts.copy_seconds += now_s - max(began_s, self._last_end_s)
        self._last_end_s = now_s
        self.counts.num_jobs += 1
        self.counts.num_blocks += num_copied
        return max(0.0, now_s - began_s)  # a clock that goes back costs a duration, not the thread

    def _verify(self, plan: TransferPlan, num_copied: int) -> tuple[int, ...]:
        """For a load: indices of blocks that differ from what was stored. For a store: records the checksums.

        Checksums are taken from the source blocks, which the job still leases, so a load also notices a store that was
        not over yet when its fence passed.
        """
        if self._checksums is None:
            return ()
        if self.direction is Direction.STORE:
            for block_id, host_id in zip(plan.source_ids[:num_copied], plan.destination_ids, strict=False):
                self._checksums.record(host_id, self._backend.device_block(block_id))
            return ()
        pairs = zip(plan.source_ids[:num_copied], plan.destination_ids, strict=False)
        # Read back from the device, where compute reads: this also finds blocks that were copied to the wrong place.
        found = tuple(
            index
            for index, (host_id, block_id) in enumerate(pairs)
            if not self._checksums.matches(host_id, self._backend.device_block(block_id))
        )
        self.counts.num_corrupt += len(found)
        self.counts.num_verified += num_copied - len(found)
        return found

    def _give_up(self) -> None:
        """Called when the thread ends, in order or not: delivers a completion for each job that it will not finish."""
        with self._gate:
            self._refusal = self._refusal or self._loss.reason or f"the {self.direction.value} thread died"
        reason = f"the {self.direction.value} thread ended"
        plans_in_doubt = [running.plan for running in self._running]
        plans_in_doubt += [self._starting.plan] if self._starting is not None else []
        for plan in plans_in_doubt:
            self._deliver(Completion(plan.job_id, Outcome.UNPROVEN, error=reason))
        while not self._queue.empty():
            job = self._queue.get()
            if job is not _Stop.STOP:
                self._deliver(_never_started(job.plan, reason))
        if plans_in_doubt:
            # This frame refers to both memories, and keeps them until the device has finished with them.
            with suppress(Exception):
                self._backend.settle(self.direction)


def _never_started(plan: TransferPlan, reason: str) -> Completion:
    return Completion(plan.job_id, Outcome.FAILED, error=reason)


def _has_passed(fence: Fence) -> bool:
    try:
        return fence.query()
    except Exception:  # noqa: BLE001 - `synchronize` raises it again, and there it becomes an outcome
        return True
