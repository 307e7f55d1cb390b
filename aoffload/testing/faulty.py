"""A transport whose jobs fail as configured, for the tests of an engine. It uses real tensors and real copies."""

from __future__ import annotations

import enum
from array import array
from collections import Counter
from collections.abc import Callable
from functools import partial

import attrs

from .._common.arguments import check_has, check_int, check_type, number_of, shown
from .._common.env import Env
from .._kernel.plans import Completion, TransferPlan
from .._kernel.states import Direction, Outcome
from .._transfer.fences import Fence, RegionFences, WatchesRegions
from .._transfer.transport import (
    TRANSPORTS,
    PinProgress,
    ReportsPinning,
    SlowToOpen,
    TransferStatistics,
    Transport,
    WaitsOnlyAfter,
)
from ..errors import DeviceGone, InvalidArgument, TransferRefused

__all__ = ["FaultyTransport", "JobFault"]


class JobFault(enum.Enum):
    """Outcomes of a faulty job of a `FaultyTransport`."""

    FAIL = "fail"
    """The first half of the job's blocks is copied, the others are not, and the job ends FAILED."""
    CORRUPT = "corrupt"
    """As FAIL, but the job ends CORRUPT, and the other blocks differ from the stored bytes."""
    REFUSE = "refuse"
    """`launch` raises `TransferRefused`."""
    UNPROVEN = "unproven"
    """The job ends UNPROVEN at once. Its copy and the proof come late. The copy then writes to blocks that must not
    have another owner."""
    HANG = "hang"
    """The job does not end before its copy, which comes late."""


_LATE = (JobFault.UNPROVEN, JobFault.HANG)
_ENDS = {JobFault.FAIL: Outcome.FAILED, JobFault.CORRUPT: Outcome.CORRUPT}


class FaultyTransport:
    """A `Transport` around another one. Every `every`-th job goes wrong, with one of `faults` in turn, each a
    `JobFault` or its value. Only jobs of `direction` count; None: loads and stores.

    Late copies begin at `release`. With `late_s`, each also begins by itself, that many seconds after its launch; this
    needs a running event loop. Copies that have not begun when the transport is closed never begin. An engine that
    keeps its promises ends each request with the right bytes, or computes again, whatever goes wrong here.
    """

    def __init__(
        self,
        transport: Transport,
        *faults: JobFault | str,
        every: int = 3,
        direction: Direction | None = None,
        late_s: float | None = None,
    ) -> None:
        check_has("transport", transport, "Transport", TRANSPORTS)
        self.transport = transport
        self.faults = tuple(map(_fault, faults))
        if not self.faults:
            raise InvalidArgument("faults", f"must name at least one of {_known()}")
        self.every = check_int("every", every, 1)
        self.direction = None if direction is None else check_type("direction", direction, Direction)
        self.late_s = None if late_s is None else _seconds(late_s)
        self.num_faults: Counter[JobFault] = Counter()
        """How often each fault has happened."""
        self._num_jobs = 0
        self._wrong: dict[int, Completion] = {}
        """Completions of jobs of which only a part is copied."""
        self._held: dict[int, tuple[TransferPlan, Fence | None]] = {}
        """Late copies that have not begun."""
        self._watcher = transport if isinstance(transport, WatchesRegions) else None
        self._deliver: Callable[[Completion], None]
        self._env: Env

    def __repr__(self) -> str:
        happened = ", ".join(f"{fault.value}={count}" for fault, count in self.num_faults.items())
        return f"<FaultyTransport {self.transport!r} every={self.every} {happened or 'no fault yet'}>"

    def release(self) -> None:
        """Begin all late copies. Call it in the event loop's thread, like `launch`."""
        for job_id in tuple(self._held):
            self._begin_late(job_id)

    # -- the protocol ---------------------------------------------------------------------------------------------

    @property
    def num_device_blocks(self) -> int:
        return self.transport.num_device_blocks

    @property
    def block_bytes(self) -> int:
        return self.transport.block_bytes

    @property
    def num_regions(self) -> int:
        return 1 if self._watcher is None else self._watcher.num_regions

    @property
    def opens_slowly(self) -> bool:
        return isinstance(self.transport, SlowToOpen) and self.transport.opens_slowly

    @property
    def waits_only_after(self) -> bool:
        return isinstance(self.transport, WaitsOnlyAfter) and self.transport.waits_only_after

    def report_pinning(self, hear: Callable[[PinProgress], None]) -> None:
        if isinstance(self.transport, ReportsPinning):
            self.transport.report_pinning(hear)

    def open(self, num_host_blocks: int, *, verify: bool, deliver: Callable[[Completion], None], env: Env) -> None:
        self._deliver, self._env = deliver, env
        self.transport.open(num_host_blocks, verify=verify, deliver=self._over, env=env)

    def record_fence(self) -> Fence:
        return self.transport.record_fence()

    def launch(self, plan: TransferPlan, after: Fence | None) -> None:
        fault = self._fault_of(plan)
        if fault is None:
            self.transport.launch(plan, after)
            return
        self.num_faults[fault] += 1
        if fault is JobFault.REFUSE:
            raise TransferRefused(f"job {plan.job_id} is refused, as told")
        self.forget(plan.job_id)  # a region with half of its blocks is not loaded
        if fault in _LATE:
            self._hold(plan, after)
        else:
            self._launch_half(plan, after, _ENDS[fault])
        if fault is JobFault.UNPROVEN:
            self._deliver(Completion(plan.job_id, Outcome.UNPROVEN, error="unproven, as told"))

    def watch(self, job_id: int, fences: RegionFences) -> None:
        if self._watcher is not None:
            self._watcher.watch(job_id, fences)

    def forget(self, job_id: int) -> None:
        if self._watcher is not None:
            self._watcher.forget(job_id)

    def close(self, timeout_s: float) -> bool:
        return self.transport.close(timeout_s) and not self._held

    def statistics(self) -> TransferStatistics:
        return self.transport.statistics()

    # -- faults ---------------------------------------------------------------------------------------------------

    def _fault_of(self, plan: TransferPlan) -> JobFault | None:
        if self.direction not in (None, plan.direction):
            return None
        self._num_jobs += 1
        turn, rest = divmod(self._num_jobs, self.every)
        return None if rest else self.faults[(turn - 1) % len(self.faults)]

    def _launch_half(self, plan: TransferPlan, after: Fence | None, outcome: Outcome) -> None:
        half = plan.num_blocks // 2
        others = tuple(range(half, plan.num_blocks)) if outcome is Outcome.CORRUPT else ()
        end = Completion(plan.job_id, outcome, half, others, error=f"{outcome.value}, as told")
        if not half:
            self._deliver(end)
            return
        self._wrong[plan.job_id] = end
        try:
            self.transport.launch(_first(plan, half), after)
        except TransferRefused:  # nothing was started; after any other error its half may still end
            del self._wrong[plan.job_id]
            raise

    def _over(self, completion: Completion) -> None:
        """Called in the threads of `transport`."""
        end = self._wrong.pop(completion.job_id, None)
        if end is not None and completion.outcome is Outcome.LANDED:
            completion = attrs.evolve(end, num_bytes=completion.num_bytes, duration_s=completion.duration_s)
        self._deliver(completion)

    def _hold(self, plan: TransferPlan, after: Fence | None) -> None:
        self._held[plan.job_id] = plan, after
        if self.late_s is not None:
            begins_at = self._env.loop_clock()() + self.late_s
            self._env.call_at(begins_at, partial(self._begin_late, plan.job_id))

    def _begin_late(self, job_id: int) -> None:
        held = self._held.get(job_id)
        if held is None:
            return
        try:
            self.transport.launch(*held)
        except (TransferRefused, DeviceGone):  # closed meanwhile, or without a device: the copy never begins
            return
        del self._held[job_id]


def _first(plan: TransferPlan, num_blocks: int) -> TransferPlan:
    sources, destinations = array("i", plan.source_ids[:num_blocks]), array("i", plan.destination_ids[:num_blocks])
    return attrs.evolve(plan, source_ids=sources, destination_ids=destinations)


def _known() -> str:
    return ", ".join(fault.value for fault in JobFault)


def _fault(value: JobFault | str) -> JobFault:
    try:
        return JobFault(value)
    except ValueError:
        raise InvalidArgument("faults", f"must be of {_known()}, got {shown(value)}") from None


def _seconds(value: object) -> float:
    found = number_of(value)
    if found is None or not 0.0 <= found < float("inf"):
        raise InvalidArgument("late_s", f"must be a number of seconds, zero or more, got {shown(value)}")
    return found
