"""The transport of several ranks: every plan goes to all ranks, and is over when it is over on all ranks."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Self

import attrs

from ..._common.arguments import as_tuple, check_has, check_int, check_text, number_of, shown
from ..._common.env import Env
from ..._kernel.plans import Completion, TransferPlan, agreeing, check_completion
from ..._kernel.states import Outcome
from ...errors import ConfigError, DeviceGone, InvalidArgument, TransferRefused, WrongState
from ..fences import Fence, OnlyAfter, PassedFence
from ..shared_memory import SharedMemory, shared_size
from ..transport import PinProgress, ReportsPinning, TransferStatistics
from .process import spawn_ranks
from .rank import RANKS, Rank
from .serving import Build

# -- tally -----------------------------------------------------------------------------------------------------------
#
# Merges the completions of several ranks into one per job: pure bookkeeping, no threads.

_WORST_FIRST = (Outcome.UNPROVEN, Outcome.CORRUPT, Outcome.FAILED, Outcome.REFUSED, Outcome.LANDED)


def merged(reports: Sequence[Completion], num_blocks: int) -> Completion:
    """One completion from the reports of all ranks about one job of `num_blocks` blocks.

    UNPROVEN if any rank reports it; LANDED only if every block landed on every rank. CORRUPT goes before FAILED, since
    only CORRUPT drops bad blocks from the cache. `num_landed` is the minimum, so no later block is used. The fields of
    each report agree (`agreeing`).
    """
    outcome = next(found for found in _WORST_FIRST if found in {report.outcome for report in reports})
    num_landed = min(num_blocks if report.outcome is Outcome.LANDED else report.num_landed for report in reports)
    told = (f"rank {rank}: {report.error}" for rank, report in enumerate(reports) if report.error)
    return Completion(
        reports[0].job_id,
        outcome,
        num_landed,
        tuple(sorted({index for report in reports for index in report.corrupt})),
        "; ".join(told),
        sum(report.num_bytes for report in reports),
        max(report.duration_s for report in reports),
    )


@attrs.define(eq=False)
class _Job:
    num_blocks: int
    reports: list[Completion | None]
    """By rank; None while it has not reported."""
    is_in_doubt: bool = False
    """UNPROVEN was delivered; a late proof is delivered, too."""


class JobTally:
    """The reports about every job that is not over on all ranks. Not thread-safe: its owner has a lock.

    Only the first report of a rank about a job counts, unless it was UNPROVEN: then a later proof replaces it.
    """

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = check_int("num_ranks", num_ranks, 1)
        self._jobs: dict[int, _Job] = {}

    def __len__(self) -> int:
        """Jobs that are not proven to be over on every rank."""
        return len(self._jobs)

    def begin(self, job_id: int, num_blocks: int) -> None:
        job_id, num_blocks = check_int("job_id", job_id, 0), check_int("num_blocks", num_blocks, 1)
        if job_id in self._jobs:
            raise InvalidArgument("job_id", f"is {job_id}, a job that is not over on all ranks")
        self._jobs[job_id] = _Job(num_blocks, [None] * self._num_ranks)

    def forget(self, job_id: int) -> bool:
        """Undo `begin`. Returns whether the job was still open, so that no outcome of it was delivered."""
        return self._jobs.pop(check_int("job_id", job_id, 0), None) is not None

    def report(self, rank: int, completion: Completion) -> Completion | None:
        """Take the report of `rank`. Returns the completion to deliver if every rank has reported, otherwise None."""
        check_int("rank", rank, 0, self._num_ranks - 1)
        check_completion(completion)
        job = self._jobs.get(completion.job_id)
        if job is None:
            return None
        completion = agreeing(completion, job.num_blocks)
        if self._num_ranks == 1 and completion.outcome is Outcome.LANDED:
            del self._jobs[completion.job_id]  # as most end; a proof counts, whatever was reported before
            return completion
        known = job.reports[rank]
        if known is not None and (known.outcome is not Outcome.UNPROVEN or completion.outcome is Outcome.UNPROVEN):
            return None
        job.reports[rank] = completion
        return self._conclusion(completion.job_id, job)

    def lose(self, rank: int, reason: str) -> list[Completion]:
        """Record that `rank` is dead, which proves that its copies are over. Returns the completions to deliver."""
        check_int("rank", rank, 0, self._num_ranks - 1)
        check_text("reason", reason)
        ends = (Completion(job_id, Outcome.FAILED, error=reason) for job_id in tuple(self._jobs))
        told = (self.report(rank, end) for end in ends)
        return [completion for completion in told if completion is not None]

    def _conclusion(self, job_id: int, job: _Job) -> Completion | None:
        reports = [report for report in job.reports if report is not None]
        if len(reports) < self._num_ranks:
            return None
        found = merged(reports, job.num_blocks)
        if found.outcome is not Outcome.UNPROVEN:
            del self._jobs[job_id]
            return found
        is_new, job.is_in_doubt = not job.is_in_doubt, True
        return found if is_new else None


# -- transport -------------------------------------------------------------------------------------------------------

_IDLE_S = 1.0
"""How long idle ranks may take to end."""
MAX_RANKS = 1024
MAX_FENCES = 4096
"""Maximum live fences. Further fences are refused, so commits are not stored while a device lags this much."""


@attrs.frozen(eq=False)
class RankFence:
    """A fence that every rank records on its own device, under this number.

    Only the ranks can tell whether it has passed. In this process it can be the `after` of a plan, but cannot be waited
    for. The ranks drop it when this object is garbage-collected.
    """

    number: int

    def query(self) -> bool:
        """Always False: only the ranks know."""
        return False

    def synchronize(self) -> None:
        """`WrongState`: only a rank can wait for it."""
        raise WrongState(f"fence {self.number} is recorded on the ranks' devices: only a rank can wait for it")


class RankTransport:
    """Implements `Transport` over `ranks` (`ProcessRank`, `LocalRank`, or any other `Rank`), in the order given.

    A plan goes to every rank, and is complete when every rank has completed its part: LANDED if all parts landed,
    UNPROVEN if any rank reports it, otherwise a failure with the blocks that landed on all ranks. The completion is
    delivered only when the last rank has reported or is dead, so the job keeps its blocks until then. When a rank dies,
    its jobs fail at once, and every later launch is refused, because a part of every block is lost. To go on, start the
    ranks again with a new transport and a new runtime.

    Capacity is fixed from the start: `num_device_blocks` is the minimum of the ranks, `block_bytes` the sum of their
    parts, and each rank opens the same number of host blocks.

    **Replicas.** Each group of `num_replicas` consecutive ranks holds the same bytes in every block. For MLA, one group
    has all ranks, because every rank needs the latents. If a model has fewer KV heads than ranks, a group has several
    ranks. The ranks of a group share one host memory and take turns with stores; every rank makes each load.
    `block_bytes` counts a group once. Linux only.
    """

    def __init__(self, ranks: Sequence[Rank], *, open_timeout_s: float = 600.0, num_replicas: int = 1) -> None:
        """`open_timeout_s`: seconds that the ranks may take to allocate. `ConfigError` without ranks, if `num_replicas`
        does not divide the number of ranks, or if the ranks of a group have blocks of different sizes."""
        self.ranks = as_tuple("ranks", ranks, "Rank", ConfigError)
        for index, rank in enumerate(self.ranks):
            check_has(f"ranks[{index}]", rank, "Rank", RANKS, ConfigError)
        _check_timeout("open_timeout_s", open_timeout_s)
        if not self.ranks:
            raise ConfigError("ranks", "is empty")
        self.num_replicas = _check_replicas(self.ranks, num_replicas)
        self.num_device_blocks = min(rank.num_device_blocks for rank in self.ranks)
        self.block_bytes = sum(rank.block_bytes for rank in self.ranks[:: self.num_replicas])
        self._memories: list[SharedMemory] = []
        """The shared host memory of each group of replicas."""
        self._open_timeout_s = open_timeout_s
        # Guards the tally and the refusal: when a rank dies, a job that begins is either refused or failed.
        # Reentrant: `deliver` may launch the next job at once.
        self._lock = threading.RLock()
        self._tally = JobTally(len(self.ranks))
        self._refusal: TransferRefused | None = TransferRefused("the transport is not open")
        self._is_opened = False
        self._deliver: Callable[[Completion], None] = lambda completion: None
        self._last_fence = 0
        self._fences: weakref.WeakSet[RankFence] = weakref.WeakSet()

    @classmethod
    def spawn(cls, build: Build | str, num_ranks: int, *, timeout_s: float = 600.0, num_replicas: int = 1) -> Self:
        """Start `num_ranks` processes that each call `build(rank, num_ranks)` for their tensors; see `ProcessRank`.
        `num_replicas`: how many consecutive ranks hold the same bytes.

        May block for `timeout_s` seconds, as `open` may. `ConfigError` names the rank that was not ready in time.
        """
        check_int("num_ranks", num_ranks, 1, MAX_RANKS, ConfigError)
        _check_timeout("timeout_s", timeout_s)
        _check_divides(num_replicas, num_ranks)
        ranks = spawn_ranks(build, num_ranks, timeout_s)
        try:
            return cls(ranks, open_timeout_s=timeout_s, num_replicas=num_replicas)
        except BaseException:
            for rank in ranks:
                rank.join(0.0)
            raise

    def __repr__(self) -> str:
        return f"<RankTransport ranks={len(self.ranks)} blocks={self.num_device_blocks} {self._refusal or 'open'}>"

    # -- opening and closing --------------------------------------------------------------------------------------

    @property
    def opens_slowly(self) -> bool:
        """Always True, because `open` waits for all ranks to allocate."""
        return True

    def report_pinning(self, hear: Callable[[PinProgress], None]) -> None:
        """Report the page-locking of ranks in this process to `hear`. Rank processes have their own log."""
        for rank in self.ranks:
            if isinstance(rank, ReportsPinning):
                rank.report_pinning(hear)

    def open(self, num_host_blocks: int, *, verify: bool, deliver: Callable[[Completion], None], env: Env) -> None:
        """Make every rank allocate. `ConfigError` names the rank and the size that it cannot allocate; all ranks are
        closed then.

        Blocks until the last rank has answered.
        """
        if self._is_opened:
            raise WrongState("this transport was opened before; make another one")
        self._is_opened = True
        self._deliver = deliver
        self._refusal = None
        try:
            self._open_ranks(num_host_blocks, verify, env)
        except BaseException:
            self.close(_IDLE_S)
            raise

    def _open_ranks(self, num_host_blocks: int, verify: bool, env: Env) -> None:
        deadline_s = time.monotonic() + self._open_timeout_s  # not the `Env`'s clock: allocating takes real time
        for index, rank in enumerate(self.ranks):
            report, lost = self._reporter(index), self._mourner(index)
            shared: dict[str, str] = {}
            if self.num_replicas > 1:
                if index % self.num_replicas == 0:
                    self._memories.append(SharedMemory(shared_size(num_host_blocks, rank.block_bytes)))
                shared = {"memory": self._memories[-1].path}
            try:
                rank.open(num_host_blocks, verify=verify, deliver=report, lost=lost, env=env, **shared)
            except ConfigError as error:
                raise ConfigError(error.argument, f"rank {index}: {error.problem}") from error
        for rank in self.ranks:
            rank.wait_open(max(0.0, deadline_s - time.monotonic()))
        self._close_memories()

    def _close_memories(self) -> None:
        """Close the files of the shared memory. Ranks keep what they have mapped."""
        for memory in self._memories:
            memory.close()

    def close(self, timeout_s: float) -> bool:
        """End every rank within `timeout_s` seconds; kill processes that take longer. Returns whether all copies have
        ended."""
        deadline_s = time.monotonic() + timeout_s
        self._refuse(TransferRefused("the transport is closed"))
        for rank in self.ranks:
            rank.stop(timeout_s)
        ended = [rank.join(max(0.0, deadline_s - time.monotonic())) for rank in self.ranks]
        self._close_memories()
        return all(ended)

    def _refuse(self, error: TransferRefused) -> None:
        """Refuse everything from now on with `error`. A lost rank makes all others useless: it holds a part of every
        block."""
        with self._lock:
            self._refusal = self._refusal or error

    # -- launching ------------------------------------------------------------------------------------------------

    def record_fence(self) -> Fence:
        """A fence on every rank, which the rank records after all earlier commands.

        Before the call, the engine must have submitted the forward to every rank's stream; on a CPU, it must know that
        the forward is over.
        """
        self._check_usable()
        if len(self._fences) >= MAX_FENCES:
            raise TransferRefused(f"{MAX_FENCES} fences are still needed")
        self._last_fence += 1
        fence = RankFence(self._last_fence)
        told: list[Rank] = []
        try:
            for rank in self.ranks:
                rank.record_fence(fence.number)
                told.append(rank)
        except DeviceGone as error:
            raise self._gone(len(told), error) from error
        finally:  # also if a later rank could not record it: then no plan ever names it
            weakref.finalize(fence, _release, told, fence.number).atexit = False
        self._fences.add(fence)
        return fence

    def launch(self, plan: TransferPlan, after: Fence | None) -> None:
        """Send the plan to every rank. `DeviceGone` if a rank is dead or its device is lost, `TransferRefused` for a
        fence that is not from `record_fence`."""
        number = self._number(after)
        with self._lock:
            self._check_usable()
            self._tally.begin(plan.job_id, plan.num_blocks)
        is_store = plan.source < plan.destination
        for index, rank in enumerate(self.ranks):
            if is_store and index % self.num_replicas != plan.job_id % self.num_replicas:
                # another replica stores it
                self._report(index, Completion(plan.job_id, Outcome.LANDED, plan.num_blocks))
                continue
            try:
                rank.launch(plan, number)
            except TransferRefused as error:
                refusal = self._gone(index, error) if isinstance(error, DeviceGone) else error
                self._not_started(index, plan, refusal)
                return
            except Exception as error:  # noqa: BLE001 - a driver error: this rank may have started the copy
                self._report(index, Completion(plan.job_id, Outcome.UNPROVEN, error=repr(error)))
                self._skip(index + 1, plan, "an earlier rank could not start")
                return

    def _not_started(self, index: int, plan: TransferPlan, error: TransferRefused) -> None:
        """Raise `error` only if no rank has begun; otherwise the job fails once the ranks that began have finished."""
        if index == 0:
            with self._lock:
                nothing_was_told = self._tally.forget(plan.job_id)
            if nothing_was_told:
                raise error
        self._skip(index, plan, str(error))

    def _gone(self, index: int, error: DeviceGone) -> DeviceGone:
        found = DeviceGone(f"rank {index}: {error}")
        self._refuse(found)
        return found

    def _skip(self, first: int, plan: TransferPlan, reason: str) -> None:
        for index in range(first, len(self.ranks)):
            self._report(index, Completion(plan.job_id, Outcome.FAILED, error=reason))

    def _number(self, after: Fence | None) -> int | None:
        if after is None or isinstance(after, PassedFence | OnlyAfter):
            return None  # the rank records its own fence, which is later than any that has passed
        if isinstance(after, RankFence) and after in self._fences:
            return after.number
        raise TransferRefused(f"after: ranks know only the fences of their own record_fence(), got {shown(after)}")

    def _check_usable(self) -> None:
        if self._refusal is not None:
            raise type(self._refusal)(*self._refusal.args)

    # -- reports, from any thread ---------------------------------------------------------------------------------

    def _reporter(self, index: int) -> Callable[[Completion], None]:
        return lambda completion: self._report(index, completion)

    def _mourner(self, index: int) -> Callable[[str], None]:
        return lambda reason: self._lose(index, reason)

    def _report(self, index: int, completion: Completion) -> None:
        # Delivered under the lock, or UNPROVEN could arrive after its late proof; `deliver` never blocks.
        with self._lock:
            told = self._tally.report(index, completion)
            if told is not None:
                self._deliver(told)

    def _lose(self, index: int, reason: str) -> None:
        with self._lock:
            self._refuse(DeviceGone(f"rank {index} is gone: {reason}"))
            for told in self._tally.lose(index, reason):
                self._deliver(told)

    # -- statistics -----------------------------------------------------------------------------------------------

    def statistics(self) -> TransferStatistics:
        """Counts over all ranks: the minimum of jobs and blocks (`blocks_corrupt`: the maximum), the sum of bytes, and
        the maximum of seconds. A store counts once for a group of replicas. A rank process reports its counts with each
        job that ends. The counts of a dead rank stay as it last reported them."""
        found = [rank.statistics() for rank in self.ranks]
        groups = [found[at : at + self.num_replicas] for at in range(0, len(found), self.num_replicas)]
        return TransferStatistics(
            num_loads=min(one.num_loads for one in found),
            num_stores=min(sum(one.num_stores for one in group) for group in groups),
            blocks_loaded=min(one.blocks_loaded for one in found),
            blocks_stored=min(sum(one.blocks_stored for one in group) for group in groups),
            blocks_verified=min(one.blocks_verified for one in found),
            blocks_corrupt=max(one.blocks_corrupt for one in found),
            bytes_loaded=sum(one.bytes_loaded for one in found),
            bytes_stored=sum(one.bytes_stored for one in found),
            load_seconds=max(one.load_seconds for one in found),
            store_seconds=max(one.store_seconds for one in found),
        )


def _release(ranks: Sequence[Rank], number: int) -> None:
    for rank in ranks:
        rank.release_fence(number)


def _check_divides(num_replicas: int, num_ranks: int) -> int:
    check_int("num_replicas", num_replicas, 1, num_ranks, ConfigError)
    if num_ranks % num_replicas:
        raise ConfigError("num_replicas", f"must divide the number of ranks, {num_ranks}, got {num_replicas}")
    return num_replicas


def _check_replicas(ranks: Sequence[Rank], num_replicas: int) -> int:
    _check_divides(num_replicas, len(ranks))
    for at in range(0, len(ranks), num_replicas):
        sizes = [rank.block_bytes for rank in ranks[at : at + num_replicas]]
        if len(set(sizes)) > 1:
            problem = f"is {num_replicas}, but ranks {at} to {at + num_replicas - 1} have blocks of {sizes} bytes"
            raise ConfigError("num_replicas", f"{problem}: replicas hold the same bytes")
    return num_replicas


def _check_timeout(name: str, value: object) -> None:
    seconds = number_of(value)
    if seconds is None or seconds < 0:
        raise ConfigError(name, f"must be a number of seconds, got {shown(value)}")
