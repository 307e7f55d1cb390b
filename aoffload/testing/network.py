"""Calls of a simulated store, and the threads that make them. All are actors of the scheduler."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

import attrs

from .._common.env import Env
from .._tiers.remote.calls import Steps, Threads
from ..errors import StoreError
from .faults import Faults
from .scheduler import Scheduler
from .simulated_store import StoreCall, StoreFault

__all__ = ["Network", "NetworkThreads"]

Work = TypeVar("Work")
SLOW_S = (0.015, 0.05, 0.8)
"""Delays of slow calls. Some are shorter than the time-out of a question, all are shorter than that of a load."""
LATE_S = (2.5, 15.0, 90.0)
"""Delays after which the job of a load was given up, and mostly that of a store, too."""
ANY = ("exist", "get", "put", "remove")
FAULTS_OF_CALLS = (
    ("remote_error", StoreFault.ERROR, ANY),
    ("remote_doubt", StoreFault.LATE_ERROR, ANY),
    ("remote_later", StoreFault.LATER, ("put", "remove")),
    ("remote_gone", StoreFault.GONE, ("exist", "get", "put")),
    ("remote_lost", StoreFault.LOST, ("put", "remove")),
    ("remote_poisoned", StoreFault.POISONED, ("get",)),
    ("remote_short", StoreFault.SHORT, ("get",)),
    ("remote_foreign", StoreFault.FOREIGN, ("get",)),
)


@attrs.define(eq=False)
class Network:
    """Carries the calls of one runtime. Each call is made at a step of its own, and its answer arrives at another
    one."""

    scheduler: Scheduler
    faults: Faults
    random: random.Random
    _hung: list[Steps[None]] = attrs.field(factory=list)
    """Work that never continues."""

    def fault(self, call: StoreCall) -> StoreFault | None:
        """The fault of the store for this call."""
        return next((fault for name, fault, kinds in FAULTS_OF_CALLS if call.kind in kinds and self._fire(name)), None)

    def later(self, write: Callable[[], Any]) -> None:
        """Apply a write after its call has failed."""
        self._soon("a write that has failed arrives", write, 0.004, *LATE_S)

    def _fire(self, name: str) -> bool:
        return self.faults.fire(name)

    def carry(
        self, name: str, steps: Steps[None], call: Callable[[], Any], go_on: Callable[[Callable[[], Any]], None]
    ) -> None:
        """Make the `call` of the work `steps` some time later. `go_on` gets a function that resumes the work."""
        delays: tuple[float, ...] = (0.0, 0.0, 0.001, 0.004)
        if self.faults.fire("remote_hang"):
            self._hung.append(steps)
            if self.random.random() < 0.5:
                self._soon(f"a call of {name} arrives", partial(_made, call), *delays)
            return
        if self.faults.fire("remote_late"):
            delays = LATE_S
        elif self.faults.fire("remote_slow"):
            delays = SLOW_S

        def make() -> None:
            try:
                resume: Callable[[], Any] = partial(steps.send, call())
            except StoreError as error:
                resume = partial(steps.throw, error)
            self._soon(f"{name} hears", partial(go_on, resume), 0.0, 0.0, 0.001)

        self._soon(f"a call of {name}", make, *delays)

    def _soon(self, name: str, run: Callable[[], None], *delays: float) -> None:
        self.scheduler.act(name, run, self.random.choice(delays))


def _made(call: Callable[[], Any]) -> None:
    with suppress(StoreError):
        call()


class NetworkThreads(Threads[Work]):
    """Threads that are actors. The work between two calls of the store is one step."""

    def __init__(self, *args: Any, network: Network) -> None:
        self._network = network
        super().__init__(*args)

    def _start(self, name: str, num_threads: int, env: Env) -> None:
        self._name = f"the store's {name} thread"
        self._num_alive = self._num_idle = num_threads
        self._is_looking = False

    def submit(self, work: Work) -> None:
        super().submit(work)
        self.look_again()

    def look_again(self) -> None:
        if self._num_idle and not self._is_looking:
            self._is_looking = True
            self._network.scheduler.act(f"{self._name} looks", self._look)

    def stop(self) -> None:
        super().stop()
        self._look()

    def join(self, deadline_s: float) -> bool:
        """Whether all have ended. It waits for none, because nothing runs meanwhile."""
        return not self._num_alive

    def _look(self) -> None:
        """An idle thread takes the next work. All threads end if there will never be more."""
        self._is_looking = False
        if not self._num_idle:
            return
        with self.lock:
            work = self._take(self._waiting)
        if work is not None:
            self._num_idle -= 1
            self.look_again()
            steps = self._do(work)
            self._go_on(steps, partial(next, steps))
        elif self._refusal and not self._waiting:
            self._num_alive, self._num_idle = self._num_alive - self._num_idle, 0
            if not self._num_alive:
                self._over()

    def _go_on(self, steps: Steps[None], resume: Callable[[], Any]) -> None:
        try:
            call = resume()
        except StopIteration:
            self._num_idle += 1
            self.look_again()
        else:
            self._network.carry(self._name, steps, call, partial(self._go_on, steps))
