"""Hands out the calls of a program to its clients, and cancels clients."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import anyio

from aoffload.testing.simulation import Simulation

from .program import Call, Program
from .runtime_clients import Actor
from .runtime_stage import Stage

__all__ = ["Director"]

SETTLE_S = 0.1
"""How long the next call waits for the one before it, unless that one has `hurry`: every copy is over by then."""


class Director(Stage):
    """Hands out the calls in their order, each to the client that it names."""

    ACTOR: ClassVar[type[Actor]] = Actor

    def __init__(self, program: Program, simulation: Simulation) -> None:
        super().__init__(program, simulation)
        self.actors: dict[str, Actor] = {}
        self._strikes: list[tuple[Actor, str, int]] = []
        simulation.scheduler.before_step = self._before_step

    # -- handing out ----------------------------------------------------------------------------------------------

    async def run(self, calls: Iterator[Call]) -> None:
        while await self._live(calls):
            self.begin_again()
            self.met("restart")
        if self.was_closed:
            await self._hand_out(calls)  # on a runtime that is closed
            await self._end_clients()

    async def _live(self, calls: Iterator[Call]) -> bool:
        """Serve until the runtime is closed. Whether another one comes after it."""
        async with self.runtime:
            ended_by = await self._hand_out(calls)
            if ended_by is not None and ended_by.name == "restart":
                await self._end_process(is_killed=ended_by.args.get("how") == "killed")
            elif not self.was_closed:
                await self._end_clients()
                await self.runtime.flush()
        if ended_by is None or ended_by.name != "restart":
            return False
        disk = self.engine.transport.disk
        if self.slots is None and disk is not None:  # who hangs keeps the files: only its end gives them to another
            self.slots = disk.after_a_kill() if disk.under_way or disk.is_resetting else disk.slots
        return True

    async def _end_process(self, *, is_killed: bool) -> None:
        """The clients end. What a process leaves that is killed now is what it would leave from here on."""
        self.slots, disk = None, self.engine.transport.disk
        if is_killed and disk is not None:
            for actor in self.actors.values():
                actor.calls.clear()
            self.slots = disk.after_a_kill()
        await self._end_clients()
        self.actors = {}

    async def _hand_out(self, calls: Iterator[Call]) -> Call | None:
        """Hand out calls up to the end, or to the first `close` or `restart`, which is returned."""
        for call in calls:
            if call.name == "cancel":
                self._arm(call.args)
            elif call.name == "close" and not self.was_closed:
                self.was_closed = True
                self.met("close")
                return call
            elif call.name == "restart" and self.engine.transport.disk is not None and not self.was_closed:
                return call
            elif "who" in call.args:
                actor = self._actor(call.args["who"])
                actor.give(call)
                if not call.args.get("hurry"):
                    await self._settle(actor)
        return None

    def _actor(self, name: str) -> Actor:
        if name not in self.actors:
            actor = self.actors[name] = self.ACTOR(name, self)
            self.simulation.spawn(name, actor.run)
        return self.actors[name]

    @staticmethod
    async def _settle(actor: Actor) -> None:
        with anyio.move_on_after(SETTLE_S):
            await actor.idle.wait()

    async def _end_clients(self) -> None:
        for actor in self.actors.values():
            actor.give(None)
        for actor in self.actors.values():
            await self._over(actor)

    async def _over(self, actor: Actor) -> None:
        for client in self.simulation.clients:
            if client.name == actor.name:
                await client.wait_over()

    # -- cancelling -----------------------------------------------------------------------------------------------

    def _arm(self, args: Any) -> None:
        """Cancel the victim when it has been suspended `after` more times."""
        actor = self.actors.get(args["who"])
        if actor is not None:
            at = self.simulation.scheduler.steps_of[actor.name] + args.get("after", 0)
            self._strikes.append((actor, args["how"], at))

    def _before_step(self) -> None:
        self.simulation.injector.strike()
        if self._strikes:
            self._strikes = [strike for strike in self._strikes if not self._strike(*strike)]

    def _strike(self, actor: Actor, how: str, at: int) -> bool:
        """Cancel `actor` if its time has come. False: not yet."""
        if self.simulation.scheduler.steps_of[actor.name] < at:
            return False
        served, client = actor.served, actor.client
        if how == "request":
            if served is not None:
                self.struck(served)
                served.request.cancel("injected")
                self.met("cancel request")
        elif how == "native" and client is not None and client.task is not None:
            if client.is_running:
                actor.was_struck = True
                client.task.cancel()
                self.met("native cancel")
        elif actor.scope is not None:
            actor.was_struck = True
            actor.scope.cancel()
            self.met("native cancel" if how == "native" else "cancel scope")
        return True
