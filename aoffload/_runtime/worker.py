"""The copy worker: the task that runs the copy queue, which never waits, in one event loop.

Completions arrive in threads of the transport, at any time. The ledger may change only in the event loop's thread, so a
thread only appends its completion to the queue and wakes the loop; the loop's callback (`_wake`) settles all that was
delivered by then. One wake-up is enough for many completions: `_is_signalled` is set by the first one, and cleared
before the callback looks, so a later completion signals again and none is lost. The callback is not the worker's task,
for two reasons: waking a task takes one more turn of the loop, and completions also have to be settled when the task
has ended.

A small copy of CPU tensors is over when `launch` returns. A task that waits for a load calls `settle_now`, which
settles such copies without the callback, so the task needs no event.

The worker's task only watches deadlines: of copies in flight, of pins, of steps, and the alarms of waiting tasks. It
sleeps in a cancel scope until the next deadline, and moves the scope's deadline when an earlier one comes up. A waiting
task sets an alarm here instead of using a cancel scope of its own, because a scope with a deadline costs ten times as
much. The task is shielded from cancellation, because copies under way need their deadlines even while the engine ends.
An error in it must not end the engine: the cache turns itself off, and the requests compute.

`SlowWatch` reports, once each, a wait for blocks and a step that take too long.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from contextvars import copy_context
from functools import partial

import anyio
import attrs

from .._common.env import Env
from .._config.config import OffloadConfig
from .._extensions.assembly import AnyLedger
from .._extensions.status import Holder, SlowStep, SlowWait
from .._kernel.events import WorkerFailed
from .._kernel.plans import TransferPlan
from .._kernel.records import Step, Waiter
from .._observe.log import Telemetry
from .._observe.observers import Observers
from .._transfer.copy_queue import CopyQueue
from .._transfer.fences import Fence
from .._transfer.transport import Transport

MAX_AGE_S = 1.0
"""Maximum age of the list of holders in an event, because many long waits may be reported together."""
ROUNDING_S = 1e-3


@attrs.define(eq=False)
class SlowWatch:
    """Reports long waits and long steps, once each. It has no timer of its own: each wait sets an alarm of the copy
    worker, and the worker's task checks the steps."""

    ledger: AnyLedger
    config: OffloadConfig
    observers: Observers
    now: Callable[[], float]
    """The clock of the ledger's ages and of the worker's alarms."""
    _reported: set[Waiter] = attrs.field(factory=set)
    """Waiters whose long wait was reported."""
    _last_step: int = 0
    """Steps up to this one were reported, or have ended."""
    _biggest: tuple[Holder, ...] = ()
    _biggest_at: float = -math.inf

    # -- waits for blocks -----------------------------------------------------------------------------------------

    def left_s(self, waiter: Waiter | None) -> float | None:
        """Seconds until the wait is a long one; None if it will not be reported."""
        slow_s = self.config.slow_wait_s
        if slow_s is None or waiter is None or waiter.joined_s is None or waiter in self._reported:
            return None
        return max(0.0, waiter.joined_s + slow_s - self.now())

    def check_wait(self, waiter: Waiter) -> None:
        """Called when the alarm of `waiter` is set, or when the worker's task has ended. Reports the wait at most
        once."""
        self._reported = {one for one in self._reported if one.request.waiter is one and not one.is_over} | {waiter}
        waited_s, slow_s = self.now() - (waiter.joined_s or 0.0), self.config.slow_wait_s or math.inf
        if not waiter.is_over and waited_s >= slow_s - ROUNDING_S:
            self.observers.observe(SlowWait(self.ledger.reports.wait_for_room(waiter, [*self._holders()])))

    def _holders(self) -> tuple[Holder, ...]:
        if self.now() >= self._biggest_at + MAX_AGE_S:
            self._biggest, self._biggest_at = self.ledger.reports.holders(), self.now()
        return self._biggest

    # -- steps ----------------------------------------------------------------------------------------------------

    def _next_step(self) -> tuple[Step | None, float]:
        """The oldest step that was not reported, and the time at which it is open for too long."""
        step = next((step for step in self.ledger.reports.steps if step.step_id > self._last_step), None)
        slow_s = self.config.slow_step_s
        return step, math.inf if step is None or slow_s is None else step.begun_s + slow_s

    @property
    def next_deadline(self) -> float:
        return self._next_step()[1]

    def check_steps(self) -> None:
        """Report the steps that have been open for too long by now."""
        now = self.now()
        while True:
            step, deadline = self._next_step()
            if step is None or deadline > now:
                return
            self._last_step = step.step_id
            self.observers.observe(SlowStep(self.ledger.reports.step(step)))


@attrs.define(eq=False)
class CopyWorker:
    """Drives the copy queue of a runtime."""

    ledger: AnyLedger
    transport: Transport
    config: OffloadConfig
    env: Env
    telemetry: Telemetry
    copies: CopyQueue = attrs.field(init=False)
    slow: SlowWatch | None = attrs.field(init=False, default=None)
    """Set by `Session.begin`."""
    after_settled: Callable[[], None] | None = attrs.field(init=False, default=None)
    """Called after completions were settled, because a lower tier may have more to store. Set if there is one."""
    _alarms: dict[anyio.Event, float] = attrs.field(factory=dict)
    """Events and the times to set them."""
    _calls: deque[Callable[[], None]] = attrs.field(factory=deque)
    _wakes_at: float = math.inf
    """When the task checks deadlines next."""
    _is_signalled: bool = False
    _wake_loop: Callable[[], None] = lambda: None
    _clock: Callable[[], float] = lambda: 0.0
    """Not `anyio.current_time`: a commit may come from a plain callback of the loop, outside of any task."""
    _settled: anyio.Event | None = None
    """Set when jobs have ended. Created by the task that waits for it, because other callers may run outside of any
    task."""
    # `start` creates these three: a runtime may be created before there is an event loop.
    _sleep: anyio.CancelScope = attrs.field(init=False)
    _scope: anyio.CancelScope = attrs.field(init=False)
    """Shields the task: cancelling the engine must not end it before the transfers under way."""
    has_begun: anyio.Event = attrs.field(init=False)
    """Set when the task runs: from then on it survives native cancellation."""
    _has_ended: bool = False

    def __attrs_post_init__(self) -> None:
        self.copies = CopyQueue(
            self.ledger,
            self.transport,
            self.config,
            clock=self._clock,
            block_bytes=self.transport.block_bytes,
            observer=self.telemetry,
            wake=self._signal,
            ended=self._notify_settled,
            in_steps=False,
        )

    # -- copies -------------------------------------------------------------------------------------------------------

    def submit(self, plans: Sequence[TransferPlan], after: Fence | None = None) -> None:
        """Queue `plans` (stores wait for `after`) and launch what may be launched now."""
        if plans:
            self.copies.submit(plans, after)
            self._wake_by(self.copies.next_deadline)

    # -- deadlines ----------------------------------------------------------------------------------------------------

    def watch(self, expires_at: float) -> None:
        """Check deadlines at `expires_at`, when a new pin or hint lapses."""
        if self._has_ended:
            self.copies.call_ledger(self.ledger.pins.drop)  # no task checks deadlines any more
        else:
            self._wake_by(expires_at)

    def step_begins(self) -> None:
        """Have the task check steps in `slow_step_s` seconds, at the latest."""
        slow_s = self.config.slow_step_s
        if slow_s is not None:
            self._wake_by(self._clock() + slow_s)

    @property
    def has_alarms(self) -> bool:
        """Whether its task runs, and can set an event at a given time."""
        return not self._has_ended

    def set_alarm(self, event: anyio.Event, after_s: float) -> None:
        """Set `event` after `after_s` seconds, unless it is cleared before.

        Once the worker's task has ended, the event is set immediately: there is nothing left to wait for.
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
        if deadline < self._wakes_at:
            self._wakes_at = self._sleep.deadline = deadline

    # -- wake-ups -----------------------------------------------------------------------------------------------------

    def call_soon(self, function: Callable[[], None]) -> None:
        """Have the worker call `function` soon. For any thread, and for finalisers."""
        self._calls.append(function)
        self._signal()

    def _signal(self) -> None:
        if not self._is_signalled:
            self._is_signalled = True
            self._wake_loop()

    def drain(self) -> None:
        """Run queued calls and settle delivered completions. The flag is cleared first, so that later completions
        signal again."""
        self._is_signalled = False
        while self._calls:
            self.copies.call_ledger(self._calls.popleft())
        self.copies.settle_delivered()
        if self.after_settled is not None:
            self.after_settled()
        self._wake_by(self.copies.next_deadline)

    def settle_now(self) -> bool:
        """Settle the completions that are there, without waiting for the loop's callback: those of copies that `launch`
        has made itself, and those that threads have delivered. Returns whether there were any, and True after an
        error."""
        try:
            return self.copies.settle_now()
        except Exception as error:  # noqa: BLE001 - as in `_wake`
            self._fail(error)
            return True

    def _notify_settled(self) -> None:
        if self._settled is not None:
            self._settled.set()
            self._settled = None

    # -- the task -----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Bind to the running event loop."""
        self.has_begun = anyio.Event()
        self._sleep, self._scope = anyio.CancelScope(), anyio.CancelScope(shield=True)
        self.copies.clock = self._clock = self.env.loop_clock()
        # In the context of the task that opens the runtime, as the worker's task: loggers find its context variables.
        self._wake_loop = self.env.loop_waker(partial(copy_context().run, self._wake))

    def _wake(self) -> None:
        """Called by the event loop. Also settles late completions after the worker's task has ended."""
        try:
            self.drain()
        except Exception as error:  # noqa: BLE001 - a supervisor, as in `run`: an error here would end trio
            self._fail(error)

    async def run(self) -> None:
        """Watch deadlines until `end`. An error here must not end the engine."""
        with self._scope:
            self.has_begun.set()
            try:
                await self._work()
            except anyio.get_cancelled_exc_class():
                if self._scope.cancel_called:
                    raise
                # A native `asyncio.Task.cancel`, as when a loop is torn down: the worker has not failed. If this were
                # raised again, it would cancel the other tasks of the group, too.
                self._give_up("the worker was cancelled")
            except Exception as error:  # noqa: BLE001 - a supervisor: the cache turns itself off, the requests continue
                self._fail(error)
            finally:
                self._has_ended = True
                self._ring(math.inf)
                self.copies.call_ledger(self.ledger.pins.drop)

    async def _work(self) -> None:
        while True:
            slow = math.inf if self.slow is None else self.slow.next_deadline
            self._wakes_at = min(self.copies.next_deadline, slow, min(self._alarms.values(), default=math.inf))
            with anyio.CancelScope(deadline=self._wakes_at) as self._sleep:
                await anyio.Event().wait()  # not `sleep_forever`, a timer in asyncio: a loop with a timer is never idle
            self.drain()  # a completion that was delivered in time is not late
            self.copies.give_up_late()
            if self.after_settled is not None:
                self.after_settled()
            if self.slow is not None:
                self.slow.check_steps()
            self._ring(self._clock())

    def _fail(self, error: BaseException) -> None:
        self.telemetry.observe(WorkerFailed(error))
        self._give_up("the worker failed")

    def _give_up(self, reason: str) -> None:
        self.copies.turn_off(reason)
        self.copies.stop(reason)

    def _ring(self, now: float) -> None:
        """Set the events whose alarms are due."""
        for event in [event for event, deadline in self._alarms.items() if deadline <= now]:
            self.clear_alarm(event)
            event.set()

    # -- waiting ------------------------------------------------------------------------------------------------------

    async def wait_idle(self) -> None:
        """Wait until every job planned so far is over or given up."""
        await self.wait_over(self.ledger.jobs.last_id)

    async def wait_over(self, job_id: int) -> None:
        """Wait until every job up to `job_id` is over or given up; jobs planned later do not delay it."""
        while self.copies.oldest_job <= job_id:
            await self.wait_settled()

    async def wait_settled(self) -> None:
        """Wait until completions were settled, or queued jobs dropped."""
        if self._settled is None:
            self._settled = anyio.Event()
        await self._settled.wait()

    def end(self) -> None:
        """End the task."""
        self._scope.cancel()
