"""The copy worker: launches planned jobs on the transport and settles their completions in the ledger."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextvars import copy_context
from functools import partial
from typing import Any

import anyio
import attrs

from .config import OffloadConfig
from .core.ledger import Ledger
from .core.plan import Completion, Direction, Outcome, TransferPlan
from .env import Env
from .errors import DeviceGone, TransferRefused
from .telemetry import Telemetry
from .transfer.fence import Fence
from .transfer.region_fences import RegionWatch
from .transfer.transport import Transport

__all__ = ["CopyWorker"]


Queue = deque[tuple[TransferPlan, Fence | None]]
"""Jobs to launch, each with the fence that it waits for."""


@attrs.frozen
class InFlight:
    num_bytes: int
    deadline: float


@attrs.define(eq=False)
class CopyWorker:
    """Launches loads before stores; jobs and bytes in flight are bounded.

    `submit` launches at once if the bounds allow. Completions arrive from any thread through a deque and one coalesced
    wake-up of the event loop, whose callback settles them; the worker's task only watches deadlines. A launched job
    without a completion in time is given up: its destination is quarantined, and nothing more is launched until it
    reports. A stalled transport thus makes misses, not queues. If the ledger itself fails, or the device is lost, the
    cache turns itself off: nothing is launched any more, and requests see only misses.
    """

    ledger: Ledger
    transport: Transport
    config: OffloadConfig
    env: Env
    telemetry: Telemetry
    regions: RegionWatch = attrs.field(
        init=False, default=attrs.Factory(lambda self: RegionWatch(self.transport), takes_self=True)
    )
    _loads: Queue = attrs.field(factory=deque)
    _stores: Queue = attrs.field(factory=deque)
    _in_flight: dict[int, InFlight] = attrs.field(factory=dict)
    """Launched jobs in launch order, which is the order of their deadlines."""
    _num_bytes: int = 0
    _max_bytes: int = 0
    _block_bytes: int = 0
    _overdue: set[int] = attrs.field(factory=set)
    _alarms: dict[anyio.Event, float] = attrs.field(factory=dict)
    """Events and the times to set them."""
    _inbox: deque[Completion] = attrs.field(factory=deque)
    _calls: deque[Callable[[], None]] = attrs.field(factory=deque)
    _looks_at: float = math.inf
    """When the task checks deadlines next."""
    _is_signalled: bool = False
    _wake_loop: Callable[[], None] = lambda: None
    _clock: Callable[[], float] = lambda: 0.0
    """Not `anyio.current_time`: a commit may come from a plain callback of the loop, outside of any task."""
    _settled: anyio.Event | None = None
    """Set when jobs have ended. Created by the task that waits for it; other callers may run outside of any task."""
    # `start` creates these three: a runtime may be created before there is an event loop.
    _sleep: anyio.CancelScope = attrs.field(init=False)
    _scope: anyio.CancelScope = attrs.field(init=False)
    """Shields the task: cancelling the engine must not end it before the transfers under way."""
    has_begun: anyio.Event = attrs.field(init=False)
    """Set when the task runs: from then on it survives native cancellation."""
    is_accepting: bool = True
    off_reason: str = ""
    """Why the cache has turned itself off; empty while it is on."""
    _has_ended: bool = False

    # -- launching ------------------------------------------------------------------------------------------------

    def submit(self, plans: Sequence[TransferPlan], after: Fence | None = None) -> None:
        """Queue `plans` (stores wait for `after`) and launch what may be launched now."""
        if not plans:
            return  # the usual case; queued jobs are launched when a completion makes room
        for plan in plans:
            if not self.is_accepting or self._overdue:
                self.refuse([plan])
                continue
            queue = self._loads if plan.direction is Direction.LOAD else self._stores
            queue.append((plan, after))
        self._dispatch()

    def refuse(self, plans: Iterable[TransferPlan]) -> None:
        """Discard planned jobs that were never queued."""
        for plan in plans:
            self._discard(plan)

    def _discard(self, plan: TransferPlan) -> None:
        self._tell(self.ledger.discard, plan.job_id)
        self.regions.end(plan.job_id, "never started")

    def _dispatch(self) -> None:
        for queue in (self._loads, self._stores):
            while queue:
                plan, after = queue[0]
                num_bytes = len(plan.source_ids) * self._block_bytes
                if not self._may_launch(num_bytes):
                    return
                queue.popleft()
                if self._tell(self.ledger.launch, plan.job_id):
                    self._launch(plan, after, num_bytes)
                else:
                    self.regions.end(plan.job_id, "nobody waits for it any more")

    def _may_launch(self, num_bytes: int) -> bool:
        if not self._in_flight:
            return True  # a job above the bound runs alone
        fits = self._num_bytes + num_bytes <= self._max_bytes
        return fits and len(self._in_flight) < self.config.max_jobs_in_flight

    def _launch(self, plan: TransferPlan, after: Fence | None, num_bytes: int) -> None:
        deadline = self._clock() + self.config.transfer_timeout_s
        self._in_flight[plan.job_id] = InFlight(num_bytes, deadline)
        self._num_bytes += num_bytes
        if len(self._in_flight) == 1:
            self._wake_by(deadline)  # it may have had none while nothing was in flight
        try:
            self.regions.launch(plan.job_id)
            self.transport.launch(plan, after)
        except TransferRefused as error:
            self.deliver(Completion(plan.job_id, Outcome.FAILED, error=str(error)))
            if isinstance(error, DeviceGone):
                self.turn_off(str(error))
        except Exception as error:  # noqa: BLE001 - a driver error: what was started is unknown, the engine goes on
            self.deliver(Completion(plan.job_id, Outcome.UNPROVEN, error=repr(error)))

    def watch(self, expires_at: float) -> None:
        """Have a new pin lapse at `expires_at`."""
        if self._has_ended:
            self._tell(self.ledger.drop_pins)  # no task checks deadlines any more
        else:
            self._wake_by(expires_at)

    def set_alarm(self, event: anyio.Event, after_s: float) -> None:
        """Set `event` after `after_s` seconds, unless it is cleared before.

        A cancel scope with a deadline would cost the waiting task ten times as much. Once the worker's task has ended,
        the event is set at once: there is nothing left to wait for.
        """
        if self._has_ended:
            event.set()
        else:
            self._alarms[event] = deadline = self._clock() + after_s
            self._wake_by(deadline)

    def clear_alarm(self, event: anyio.Event) -> bool:
        """Remove the alarm of `event`. Returns whether it was still pending."""
        return self._alarms.pop(event, None) is not None

    def _wake_by(self, deadline: float) -> None:
        if deadline < self._looks_at:
            self._looks_at = self._sleep.deadline = deadline

    # -- completions ----------------------------------------------------------------------------------------------

    def deliver(self, completion: Completion) -> None:
        """Accept a completion from any thread; never blocks."""
        self._inbox.append(completion)
        self._signal()

    def call_soon(self, function: Callable[[], None]) -> None:
        """Have the worker call `function` soon. For any thread, and for finalisers."""
        self._calls.append(function)
        self._signal()

    def _signal(self) -> None:
        if not self._is_signalled:
            self._is_signalled = True
            self._wake_loop()

    def drain(self) -> None:
        """Run queued calls and settle delivered completions. The flag is cleared first, so later ones signal again."""
        self._is_signalled = False
        while self._calls:
            self._tell(self._calls.popleft())
        while self._inbox:
            completion = self._inbox.popleft()
            self._forget(completion.job_id)
            if completion.job_id in self._overdue and completion.outcome is not Outcome.UNPROVEN:
                self._overdue.discard(completion.job_id)
                if not self._overdue:
                    self.telemetry.transport_recovered()
            self._tell(self.ledger.settle, completion)
            self.regions.settle(completion)
            if completion.outcome in (Outcome.FAILED, Outcome.UNPROVEN):
                self._ask_device()
        self._dispatch()
        self._notify_settled()

    def _notify_settled(self) -> None:
        if self._settled is not None:
            self._settled.set()
            self._settled = None

    def _forget(self, job_id: int) -> None:
        found = self._in_flight.pop(job_id, None)
        if found is not None:
            self._num_bytes -= found.num_bytes

    def _tell(self, function: Callable[..., Any], *args: object) -> Any:
        """Call into the ledger. A bug there turns the cache off, but must not end this task or a calling request."""
        try:
            return function(*args)
        except Exception as error:  # noqa: BLE001 - see above
            self.telemetry.worker_failed(error)
            self.turn_off("the ledger failed")
            return None

    def turn_off(self, reason: str) -> None:
        """Launch nothing any more. Jobs in flight still report, or are given up at their deadline."""
        if self.is_accepting:
            self.is_accepting, self.off_reason = False, reason
            self.telemetry.cache_turned_off(reason)
            self.discard_queued()

    def _ask_device(self) -> None:
        """Turn off if the device is lost. A completion does not tell why a copy failed; recording a fence does."""
        if self.is_accepting:
            try:
                self.transport.record_fence()
            except DeviceGone as error:
                self.turn_off(str(error))
            except TransferRefused:
                return  # may be temporary

    def give_up(self, job_ids: Iterable[int], error: str) -> None:
        """Stop waiting for launched jobs. Their destinations are quarantined until a late completion ends the doubt."""
        for job_id in tuple(job_ids):
            self._forget(job_id)
            self._overdue.add(job_id)
            given_up = Completion(job_id, Outcome.UNPROVEN, error=error)
            self._tell(self.ledger.settle, given_up)
            self.regions.settle(given_up)
        self.discard_queued()

    def discard_queued(self) -> None:
        """Drop jobs that were never launched; requests that wait for them compute instead."""
        queued = [*self._loads, *self._stores]
        self._loads.clear()
        self._stores.clear()
        for plan, _ in queued:
            self._discard(plan)
        self._notify_settled()

    # -- the task -------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Bind to the running event loop."""
        self.has_begun = anyio.Event()
        self._sleep, self._scope = anyio.CancelScope(), anyio.CancelScope(shield=True)
        self._max_bytes, self._block_bytes = self.config.bytes_in_flight, self.transport.block_bytes
        self._clock = self.env.loop_clock()
        # In the context of the task that opens the runtime, as the worker's task: loggers find its context variables.
        self._wake_loop = self.env.loop_waker(partial(copy_context().run, self._wake))

    def _wake(self) -> None:
        """Called by the event loop. Also settles late completions after the worker's task has ended."""
        try:
            self.drain()
        except Exception as error:  # noqa: BLE001 - a supervisor, as in `run`: trio would end of it
            self._fail(error)

    async def run(self) -> None:
        """Watch deadlines until `end`. An error here must not end the engine."""
        with self._scope:
            self.has_begun.set()
            try:
                await self._work()
            except anyio.get_cancelled_exc_class() as error:
                if self._scope.cancel_called:
                    raise
                # A native `asyncio.Task.cancel`. Re-raised, it would cancel the group's other tasks, too.
                self._fail(error)
            except Exception as error:  # noqa: BLE001 - a supervisor: the cache turns itself off, the requests go on
                self._fail(error)
            finally:
                self._has_ended = True
                self._ring(math.inf)
                self._tell(self.ledger.drop_pins)

    async def _work(self) -> None:
        while True:
            self._looks_at = self._next_deadline()
            with anyio.CancelScope(deadline=self._looks_at) as self._sleep:
                await anyio.Event().wait()  # not `sleep_forever`, a timer in asyncio: a loop with a timer is never idle
            self.drain()  # what has been delivered in time is not late
            self._check_deadlines()

    def _fail(self, error: BaseException) -> None:
        self.telemetry.worker_failed(error)
        self.turn_off("the worker failed")
        self.stop("the worker failed")

    def _next_deadline(self) -> float:
        transfers = next(iter(self._in_flight.values())).deadline if self._in_flight else math.inf
        return min(transfers, min(self._alarms.values(), default=math.inf), self.ledger.next_lapse)

    def _check_deadlines(self) -> None:
        now = self._clock()
        late = [job_id for job_id, job in self._in_flight.items() if job.deadline <= now]
        if late:
            self.telemetry.transport_stalled(len(late))
            self.give_up(late, "no end within transfer_timeout_s")
        self._ring(now)
        self._tell(self.ledger.lapse, now)

    def _ring(self, now: float) -> None:
        for event in [event for event, deadline in self._alarms.items() if deadline <= now]:
            self.clear_alarm(event)
            event.set()

    async def wait_idle(self) -> None:
        """Wait until every job planned so far is over or given up."""
        await self.wait_over(self.ledger.jobs.last_id)

    async def wait_over(self, job_id: int) -> None:
        """Wait until every job up to `job_id` is over or given up; jobs planned later don't delay it."""
        while self._oldest() <= job_id:
            await self.wait_settled()

    async def wait_settled(self) -> None:
        """Wait until completions were settled, or queued jobs dropped."""
        if self._settled is None:
            self._settled = anyio.Event()
        await self._settled.wait()

    def in_flight_up_to(self, job_id: int) -> tuple[int, ...]:
        """The launched jobs up to `job_id` that have not ended."""
        return tuple(number for number in self._in_flight if number <= job_id)

    def _oldest(self) -> float:
        queued = (queue[0][0].job_id for queue in (self._loads, self._stores) if queue)
        return min(*queued, *self._in_flight, math.inf, math.inf)

    def stop(self, error: str) -> None:
        """Launch nothing any more; what is still in flight is quarantined."""
        self.is_accepting = False
        self.discard_queued()
        self.drain()  # settle what was delivered: jobs without a completion are quarantined
        self.give_up(self._in_flight, error)

    def end(self) -> None:
        """End the task."""
        self._scope.cancel()
