"""Makes the injections between the steps of a run: the plan's cancellations, leaps of time, dead workers."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs

from .clients import Client, Log
from .faults import Faults
from .injection import ANY_STEP, Cancel, await_lines
from .plans import Plan
from .scheduler import Scheduler

__all__ = ["Injector"]

PACKAGE = Path(__file__).parents[1]
TESTING = str(PACKAGE / "testing")
LEAP_S = 150.0
BLOCKED_S = 1.0
WORKER = "aoffload copy worker"


@attrs.define(eq=False)
class Injector:
    """Injects before each step, and records the awaits of the package at which a cancellation met a task."""

    plan: Plan
    scheduler: Scheduler
    faults: Faults
    log: Log
    clients: list[Client]
    notes_waits: bool
    num_cancels: int = 0
    await_lines: set[tuple[str, int]] = attrs.field(factory=set)
    waits: dict[tuple[str, int], Cancel] = attrs.field(factory=dict)
    _pending: list[tuple[Cancel, list[str]]] = attrs.field(init=False)
    _num_noted: Counter[str] = attrs.field(factory=Counter)

    def __attrs_post_init__(self) -> None:
        self._pending = [(cancel, list(cancel.blows)) for cancel in self.plan.cancels]

    def strike(self) -> None:
        if self.faults.planned:
            self._strike_the_rest()
        for cancel, blows in self._pending:
            if blows:
                self._cancel(cancel, blows)
        if self.num_cancels:
            for client in self.clients:
                if client.was_injected and client.is_running:
                    # the point where the cancellation arrives, perhaps only the next checkpoint
                    self.await_lines.update(_lines(client))
        if self.notes_waits:
            self._note_waits()

    def _strike_the_rest(self) -> None:
        if self.faults.fire("leap"):
            self.scheduler.jump(LEAP_S)
        if self.faults.fire("block"):
            self.scheduler.jump(BLOCKED_S)
        if self.log.counts["runtime_opened"] and self.faults.fire("worker"):
            self._cancel_worker()

    def _cancel(self, cancel: Cancel, blows: list[str]) -> None:
        if cancel.victim == ANY_STEP:
            due = self.scheduler.step >= cancel.at + len(cancel.blows) - len(blows)
            alive = [client for client in self.clients if client.is_running and client.name != "main"]
            if not due or not alive:
                return
            client = next((one for one in alive if one.was_injected), alive[cancel.at % len(alive)])
        else:
            found = [client for client in self.clients if client.name == cancel.victim and client.is_running]
            if not found or found[0].num_suspensions <= cancel.at + len(cancel.blows) - len(blows):
                return
            client = found[0]
        if client.cancel(blows[0]):
            blows.pop(0)
            self.num_cancels += 1

    def _note_waits(self) -> None:
        for client in self.clients:
            number = client.num_suspensions
            if client.is_running and self._num_noted[client.name] < number:
                self._num_noted[client.name] = number
                for line in _lines(client):
                    self.waits.setdefault(line, Cancel(client.name, number - 1))

    def _cancel_worker(self) -> None:
        """Cancel the copy worker natively. It does nothing on trio, where a task of a nursery has no native cancel."""
        if self.plan.backend == "asyncio":
            for task in asyncio.all_tasks(asyncio.get_running_loop()):
                if task.get_name() == WORKER:
                    self.await_lines.update(_served_lines(task.get_coro()))
                    task.cancel()
                    self.num_cancels += 1


def _lines(client: Client) -> Iterator[tuple[str, int]]:
    for coroutine in client.coroutines():
        yield from _served_lines(coroutine)


def _served_lines(coroutine: Any) -> Iterator[tuple[str, int]]:
    """File and line of each await of the package, `testing` excluded, that the coroutine is in."""
    for path, line in await_lines(coroutine):
        if path.startswith(f"{PACKAGE}/") and not path.startswith(TESTING):
            yield path[len(str(PACKAGE)) + 1 :], line
