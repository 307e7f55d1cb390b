"""The copy queue: launches planned jobs, bounds what is in flight, and gives up what takes too long.

    submit(plans)     queue; launch what the bounds allow, loads before stores
    deliver(done)     from any thread: a copy has ended
    advance()         settle what was delivered, give up what is late, launch what waits

It has no thread, no event loop and no timer. The worker of `OffloadRuntime` drives it from an event loop; an engine
that steps calls `advance` once a step.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, runtime_checkable

import attrs

from ..arguments import check_callable, check_has, check_int, check_type
from ..config import OffloadConfig
from ..core.arguments import check_completion
from ..core.ledger import Ledger
from ..core.lifecycle import JobState
from ..core.owners import nobody
from ..core.plan import Completion, Direction, Outcome, Tier, TransferPlan
from ..errors import DeviceGone, InvalidArgument, TransferRefused
from .copy_observer import OBSERVES, CopyObserver, NullCopyObserver
from .fence import Fence
from .region_fences import RegionWatch

__all__ = ["CopyQueue", "Launches"]


class Launches(Protocol):
    """What the queue needs of a `Transport`."""

    def launch(self, plan: TransferPlan, after: Fence | None) -> None:
        """Start copying once `after` has passed. `TransferRefused`: nothing was started, and no completion follows."""
        ...


@runtime_checkable
class RecordsFences(Protocol):
    def record_fence(self) -> Fence: ...


@attrs.frozen
class InFlight:
    num_bytes: int
    deadline: float


@attrs.define(eq=False)
class Hop:
    """The copies from one tier to another. Bounds and time-outs are counted for each hop: one that hangs stops only its
    own copies, and a load never waits for the room of stores."""

    source: Tier
    destination: Tier
    timeout_s: float
    queue: deque[tuple[TransferPlan, Fence | None]] = attrs.field(factory=deque)
    """Jobs to launch, each with the fence that it waits for."""
    in_flight: dict[int, InFlight] = attrs.field(factory=dict)
    """Launched jobs in launch order, which is the order of their deadlines."""
    num_bytes: int = 0
    overdue: set[int] = attrs.field(factory=set)
    """Launched jobs that were given up and have not reported since."""

    def forget(self, job_id: int) -> None:
        found = self.in_flight.pop(job_id, None)
        if found is not None:
            self.num_bytes -= found.num_bytes

    @property
    def next_deadline(self) -> float:
        return next(iter(self.in_flight.values())).deadline if self.in_flight else math.inf


@attrs.define(eq=False)
class CopyQueue:
    """Launches the jobs that `ledger` plans on `transport`, and settles their completions in the ledger.

    At most `max_jobs_in_flight` jobs and `max_bytes_in_flight` bytes of each hop are in flight; a job above the bound
    goes alone. A job without a completion after `transfer_timeout_s` (a store: `store_timeout_s`) is given up: its
    destination is quarantined, and its hop launches nothing more until it reports. A stalled transport thus makes
    misses, not queues. If the ledger itself fails, or the device is lost, the cache turns itself off: nothing is
    launched any more, and requests see only misses.

    `clock` counts seconds, such as `time.monotonic`. All calls belong to the ledger's thread, except for `deliver`.
    `block_bytes` is the size of a block over all regions. `wake` is called by `deliver`, in its thread; `ended` after
    jobs have ended, in the ledger's thread.
    """

    ledger: Ledger
    transport: Launches
    config: OffloadConfig
    clock: Callable[[], float] = attrs.field(kw_only=True)
    block_bytes: int = attrs.field(kw_only=True)
    observer: CopyObserver = attrs.field(kw_only=True, factory=NullCopyObserver)
    wake: Callable[[], object] = attrs.field(kw_only=True, default=nobody)
    ended: Callable[[], object] = attrs.field(kw_only=True, default=nobody)
    is_accepting: bool = attrs.field(init=False, default=True)
    off_reason: str = attrs.field(init=False, default="")
    """Why the cache has turned itself off; empty while it is on."""
    regions: RegionWatch = attrs.field(init=False)
    _hops: dict[tuple[Tier, Tier], Hop] = attrs.field(init=False, factory=dict)
    """Loads first: the order in which they are launched."""
    _inbox: deque[Completion] = attrs.field(init=False, factory=deque)
    _max_bytes: int = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        check_type("ledger", self.ledger, Ledger)
        check_has("transport", self.transport, "transport", "launch")
        check_type("config", self.config, OffloadConfig)
        check_has("observer", self.observer, "CopyObserver", OBSERVES)
        for name in ("clock", "wake", "ended"):
            check_callable(name, getattr(self, name))
        check_int("block_bytes", self.block_bytes, 1)
        self.regions = RegionWatch(self.transport)
        self._max_bytes = self.config.bytes_in_flight

    def __repr__(self) -> str:
        state = "on" if self.is_accepting else "off"
        num_queued = sum(len(hop.queue) for hop in self._hops.values())
        return f"<CopyQueue {state}, {num_queued} queued, {self.num_in_flight} in flight>"

    # -- launching ------------------------------------------------------------------------------------------------

    def submit(self, plans: Sequence[TransferPlan], after: Fence | None = None) -> None:
        """Queue `plans` (stores wait for `after`) and launch what may be launched now."""
        if not plans:
            return  # the usual case; queued jobs are launched when a completion makes room
        for plan in plans:
            hop = self._hop_of(plan)
            if not self.is_accepting or hop.overdue:
                self.refuse([plan])
                continue
            hop.queue.append((plan, after))
        self._dispatch()

    def _hop_of(self, plan: TransferPlan) -> Hop:
        found = self._hops.get(plan.hop)
        if found is None:
            is_load = plan.direction is Direction.LOAD
            timeout_s = self.config.transfer_timeout_s if is_load else self.config.store_bound_s
            found = Hop(plan.source, plan.destination, timeout_s)
            hops = [*self._hops.values(), found]
            hops.sort(key=lambda hop: (hop.destination > hop.source, hop.destination, hop.source))
            self._hops = {(hop.source, hop.destination): hop for hop in hops}
        return found

    def refuse(self, plans: Iterable[TransferPlan]) -> None:
        """Discard planned jobs that were never queued."""
        for plan in plans:
            self._discard(plan)

    def _discard(self, plan: TransferPlan) -> None:
        self.tell(self.ledger.discard, plan.job_id)
        self.regions.end(plan.job_id, "never started")

    def _dispatch(self) -> None:
        for hop in self._hops.values():
            while hop.queue:
                plan, after = hop.queue[0]
                num_bytes = len(plan.source_ids) * self.block_bytes
                if not self._may_launch(hop, num_bytes):
                    break
                hop.queue.popleft()
                if self.tell(self.ledger.launch, plan.job_id):
                    self._launch(hop, plan, after, num_bytes)
                else:
                    self.regions.end(plan.job_id, "nobody waits for it any more")

    def _may_launch(self, hop: Hop, num_bytes: int) -> bool:
        if not hop.in_flight:
            return True  # a job above the bound runs alone
        fits = hop.num_bytes + num_bytes <= self._max_bytes
        return fits and len(hop.in_flight) < self.config.max_jobs_in_flight

    def _launch(self, hop: Hop, plan: TransferPlan, after: Fence | None, num_bytes: int) -> None:
        hop.in_flight[plan.job_id] = InFlight(num_bytes, self.clock() + hop.timeout_s)
        hop.num_bytes += num_bytes
        try:
            self.regions.launch(plan.job_id)
            self.transport.launch(plan, after)
        except TransferRefused as error:
            self.deliver(Completion(plan.job_id, Outcome.FAILED, error=str(error)))
            if isinstance(error, DeviceGone):
                self.turn_off(str(error))
        except Exception as error:  # noqa: BLE001 - a driver error: what was started is unknown, the engine goes on
            self.deliver(Completion(plan.job_id, Outcome.UNPROVEN, error=repr(error)))

    # -- completions ----------------------------------------------------------------------------------------------

    def deliver(self, completion: Completion) -> None:
        """Accept a completion from any thread; never blocks. `advance` settles it. `InvalidArgument` for what is none:
        its job counts as under way until its time is over."""
        check_completion(completion)
        self._inbox.append(completion)
        self.wake()

    def advance(self) -> None:
        """Settle what was delivered, give up what is late, let pins lapse, and launch what waits."""
        self.settle_delivered()  # first: what was delivered in time is not late
        self.give_up_late()

    def settle_delivered(self) -> None:
        while self._inbox:
            completion = self._inbox.popleft()
            job = self.ledger.jobs.unsettled.get(completion.job_id)
            if job is not None and job.state is JobState.QUEUED:
                continue  # it was never launched: the report is of something else
            self._note_end(completion)
            self.tell(self.ledger.settle, completion)
            self.regions.settle(completion)
            if completion.outcome in (Outcome.FAILED, Outcome.UNPROVEN):
                self._ask_device()
        self._dispatch()
        self.ended()

    def _note_end(self, completion: Completion) -> None:
        for hop in self._hops.values():
            if completion.job_id in hop.in_flight:
                hop.forget(completion.job_id)
            if completion.job_id in hop.overdue and completion.outcome is not Outcome.UNPROVEN:
                hop.overdue.discard(completion.job_id)
                if not hop.overdue:
                    self.observer.transport_recovered(hop.source, hop.destination)

    def tell(self, function: Callable[..., Any], *args: object) -> Any:
        """Call into the ledger. A bug there turns the cache off, but must not end the caller: a loop, or a request."""
        try:
            return function(*args)
        except Exception as error:  # noqa: BLE001 - see above
            self.observer.worker_failed(error)
            # It refuses what it was given, such as `engine_blocks` that raise; or it has a bug.
            reason = str(error) if isinstance(error, InvalidArgument) else "the ledger failed"
            self.turn_off(reason)
            return None

    # -- giving up ------------------------------------------------------------------------------------------------

    @property
    def next_deadline(self) -> float:
        """When a copy in flight is late or a pin lapses, on `clock`; infinity if neither. `advance` is due then."""
        due = self.ledger.next_lapse
        for hop in self._hops.values():
            if hop.in_flight:
                due = min(due, hop.next_deadline)
        return due

    def give_up_late(self) -> None:
        """Give up the copies whose time is over, and let pins lapse."""
        now = self.clock()
        for hop in tuple(self._hops.values()):
            if hop.next_deadline <= now:
                late = [job_id for job_id, job in hop.in_flight.items() if job.deadline <= now]
                self.observer.transport_stalled(hop.source, hop.destination, len(late))
                self._give_up(hop, late, "no end within transfer_timeout_s")
        if self.ledger.next_lapse <= now:
            self.tell(self.ledger.lapse, now)

    def give_up(self, job_ids: Iterable[int], error: str) -> None:
        """Stop waiting for these launched jobs, as if their time were over."""
        wanted = set(job_ids)
        for hop in tuple(self._hops.values()):
            if mine := [job_id for job_id in hop.in_flight if job_id in wanted]:
                self._give_up(hop, mine, error)

    def _give_up(self, hop: Hop, job_ids: Iterable[int], error: str) -> None:
        """Stop waiting for launched jobs. Their destinations are quarantined until a late completion ends the doubt."""
        late = tuple(job_ids)
        for job_id in late:
            hop.forget(job_id)
            hop.overdue.add(job_id)
        for job_id in late:
            if job_id not in hop.overdue:
                continue  # whoever was woken has had it settled meanwhile
            given_up = Completion(job_id, Outcome.UNPROVEN, error=error)
            self.tell(self.ledger.settle, given_up)
            self.regions.settle(given_up)
        self._discard_queued(hop)
        self.ended()

    def turn_off(self, reason: str) -> None:
        """Launch nothing any more. Jobs in flight still report, or are given up at their deadline."""
        if self.is_accepting:
            self.is_accepting, self.off_reason = False, reason
            self.observer.cache_turned_off(reason)
            self.discard_queued()

    def _ask_device(self) -> None:
        """Turn off if the device is lost. A completion does not tell why a copy failed; recording a fence does."""
        if self.is_accepting and isinstance(self.transport, RecordsFences):
            try:
                self.transport.record_fence()
            except DeviceGone as error:
                self.turn_off(str(error))
            except Exception:  # noqa: BLE001 - refused, or a driver error: may be temporary, and nothing was started
                return

    def discard_queued(self) -> None:
        """Drop jobs that were never launched; requests that wait for them compute instead."""
        for hop in tuple(self._hops.values()):
            self._discard_queued(hop)
        self.ended()

    def _discard_queued(self, hop: Hop) -> None:
        queued = tuple(hop.queue)
        hop.queue.clear()
        for plan, _ in queued:
            self._discard(plan)

    def stop(self, error: str) -> None:
        """Launch nothing any more; what is still in flight is quarantined."""
        self.is_accepting = False
        self.discard_queued()
        self.settle_delivered()  # jobs without a completion are quarantined
        self.give_up([job_id for hop in self._hops.values() for job_id in hop.in_flight], error)

    # -- what is left ---------------------------------------------------------------------------------------------

    @property
    def num_in_flight(self) -> int:
        """Launched jobs that have neither ended nor been given up."""
        return sum(len(hop.in_flight) for hop in self._hops.values())

    @property
    def num_bytes_in_flight(self) -> int:
        return sum(hop.num_bytes for hop in self._hops.values())

    @property
    def overdue(self) -> frozenset[int]:
        """Launched jobs that were given up and have not reported since."""
        return frozenset(job_id for hop in self._hops.values() for job_id in hop.overdue)

    @property
    def oldest_job(self) -> float:
        """The first job that is queued or in flight; infinity if there is none."""
        queued = (hop.queue[0][0].job_id for hop in self._hops.values() if hop.queue)
        in_flight = (min(hop.in_flight) for hop in self._hops.values() if hop.in_flight)
        return min([*queued, *in_flight], default=math.inf)

    def in_flight_up_to(self, job_id: int) -> tuple[int, ...]:
        """The launched jobs up to `job_id` that have neither ended nor been given up."""
        return tuple(sorted(number for hop in self._hops.values() for number in hop.in_flight if number <= job_id))
