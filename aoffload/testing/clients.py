"""Clients: tasks whose outcome is recorded, however they end. Also the log that counts the runtime's events."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from random import Random
from typing import Any, Protocol

import anyio
import attrs
import trio

from .._kernel.states import RequestState
from .._runtime.request import Request
from ..errors import InvalidArgument, OutOfBlocks, RequestAborted, RuntimeClosed
from .asks import Ask
from .engine import ForwardFailed
from .faults import Faults
from .plans import Plan
from .scheduler import Scheduler
from .serving import SimulatedEngine
from .violations import Violation

__all__ = ["Client", "Log", "Run"]

FAILURES = {"worker_failed"}
TIMEOUTS = {"transport_stalled"}


class Run(Protocol):
    """The part of a simulation that its clients use."""

    plan: Plan
    random: Random
    scheduler: Scheduler
    faults: Faults
    clients: list[Client]
    engines: list[SimulatedEngine]
    asks: list[Ask]
    violations: list[Violation]

    @property
    def may_recompute(self) -> bool: ...


@attrs.define(eq=False)
class Client:
    """One task of a scenario. `outcome`: D done, R done but part of a hit was recomputed, A aborted, X rejected."""

    name: str
    function: Callable[[Client], Awaitable[None]]
    simulation: Run
    task: asyncio.Task[None] | None = None
    outcome: str = ""
    error: BaseException | None = None
    request: Request | None = None
    was_injected: bool = False
    may_abort: tuple[str, ...] = ()
    """Reasons besides injections for which requests of the client may be aborted."""
    may_raise: tuple[type[Exception], ...] = (RuntimeClosed, RequestAborted)
    """Errors that the client may end with when the runtime closes or its copy worker dies."""
    is_running: bool = False
    _scope: anyio.CancelScope = attrs.field(factory=anyio.CancelScope)
    _outer: anyio.CancelScope = attrs.field(factory=anyio.CancelScope)
    _over: anyio.Event = attrs.field(factory=anyio.Event)
    _coroutine: Any = None

    @property
    def num_suspensions(self) -> int:
        return self.simulation.scheduler.steps_of[self.name]

    async def serve(self, engine: SimulatedEngine, ask: Ask) -> None:
        """Serve one request, and record its outcome."""
        self.simulation.asks.append(ask)

        def watch(request: Request) -> None:
            self.request = request

        await engine.serve(self.name, ask, watch)
        self.ended()

    def ended(self) -> None:
        """Record the outcome when the request's block ends without an exception."""
        request = self.request
        if request is None or request.state is RequestState.DONE:
            self.outcome = "D"
            if any(self.name in engine.recomputed for engine in self.simulation.engines):
                self.outcome = "R"
            for engine in self.simulation.engines:
                # A request that ended before the failure was known can't be invalidated any more.
                if self.name in engine.misled and engine.num_invalidations:
                    raise Violation("wrong bytes", f"{self.name} was served what a failed forward had written")
        elif request.state is RequestState.ABORTED:
            self.outcome = "A"

    async def run(self) -> None:
        """The task's body. No exception leaves it."""
        self._coroutine = _current_coroutine()
        self.is_running = True
        try:
            with self._outer, self._scope:
                await self.function(self)
                self.outcome = self.outcome or "D"
        except BaseException as error:  # noqa: BLE001 - judged by `check`; a violation ends the run
            self.error = error
            self.outcome = "X" if isinstance(error, (InvalidArgument, OutOfBlocks, RuntimeClosed)) else "A"
            if isinstance(error, Violation):
                self.simulation.violations.append(error)
        finally:
            self.outcome = self.outcome or "A"
            self.is_running = False
            self._over.set()

    async def wait_over(self) -> None:
        await self._over.wait()

    def coroutines(self) -> Iterator[Any]:
        """The coroutines of the client, and of tasks that end with it: tasks that `OffloadRuntime.run` spawns, and an
        engine's loop."""
        yield self._coroutine
        if self.simulation.plan.backend == "asyncio":
            names = {f"aoffload {self.name}"} | ({"aoffload engine"} if self.name == "main" else set())
            for task in asyncio.all_tasks(asyncio.get_running_loop()):
                if task.get_name() in names:
                    yield task.get_coro()

    def cancel(self, kind: str) -> bool:
        """Cancel the client in one of the ways of `Cancel.blows`. Returns False if its request has ended, or if there
        is none."""
        if kind == "request":
            if self.request is None or self.request.state in (RequestState.DONE, RequestState.ABORTED):
                return False
            self.request.cancel("injected")
        elif kind == "scope":
            self._scope.cancel()
        elif self.task is not None:
            self.task.cancel()
        else:
            self._outer.cancel()
        self.was_injected = True
        return True

    def check(self) -> None:
        """Raise `Violation` unless the client is done without a lost hit, or an injection or its own options explain
        the outcome."""
        if self.outcome == "R" and not self.simulation.may_recompute:
            raise Violation("a hit was lost", f"{self.name} had to compute what it had matched")
        if self.was_injected or self.outcome in ("D", "R") or self._is_explained():
            return
        reason = self.request.reason if self.request is not None else ""
        raise Violation("somebody was harmed", f"{self.name} ended {self.outcome} ({reason or self.error!r})")

    def _is_explained(self) -> bool:
        """Whether an abort or a rejection follows from its own options, or from a fault that was injected elsewhere."""
        faults, error = self.simulation.faults, self.error
        was_closed = self.simulation.clients[0].was_injected or "runtime_closed" in self.may_abort
        if error is None:
            reason = self.request.reason if self.request is not None else ""
            return reason in self.may_abort or (was_closed and reason == "runtime_closed")
        if isinstance(error, OutOfBlocks):
            # With windows, a request may fit only because of its load, which may be lost in a fault.
            has_windows = any(engine.runtime.ledger.layout.windows for engine in self.simulation.engines)
            return error.retryable or faults.may_take_room or (has_windows and bool(faults.fired))
        if isinstance(error, ForwardFailed):
            return bool(faults.fired["compute"])
        # A worker that is cancelled before its first step can't survive. The task that opens the runtime gets an error.
        return (was_closed or bool(faults.fired["worker"])) and isinstance(error, self.may_raise)


def _current_coroutine() -> Any:
    try:
        return trio.lowlevel.current_task().coro
    except RuntimeError:
        task = asyncio.current_task()
        assert task is not None
        return task.get_coro()


class Log:
    """A logger that counts events. With `keep_lines` it also stores the lines."""

    def __init__(self, scheduler: Scheduler, faults: Faults, keep_lines: bool = False) -> None:
        self.counts: Counter[str] = Counter()
        self.lines: list[str] = []
        self.failures: list[str] = []
        self._scheduler = scheduler
        self._faults = faults
        self._keep_lines = keep_lines
        self._num_timeouts = 0

    def bind(self, **values: Any) -> Log:
        return self

    def debug(self, event: str, **values: Any) -> None:
        self._take(event, values)

    info = warning = error = debug

    def _take(self, event: str, values: dict[str, Any]) -> None:
        self.counts[event] += 1
        if event in FAILURES and not (self._faults.fired["worker"] or self._faults.fired["bug"]):
            self.failures.append(f"{event}: {values.get('error')}")
        if event in TIMEOUTS:
            self._num_timeouts += 1
        if self._keep_lines:
            about = " ".join(f"{name}={value}" for name, value in values.items())
            self.lines.append(f"{self._scheduler.step:5d}  t={self._scheduler.now:<10.4f} {event} {about}")
        if self._faults.fire("log"):
            raise OSError("no space left on the disk of the log")

    def take_timeouts(self) -> int:
        """Timeouts since the last call."""
        number, self._num_timeouts = self._num_timeouts, 0
        return number
