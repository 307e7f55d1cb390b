"""The clients of a program: tasks that take their own calls, one after the other, and survive cancellations."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import anyio
import attrs

from aoffload._kernel.states import RequestState
from aoffload._runtime.request import Request
from aoffload.testing.clients import Client
from aoffload.testing.violations import Violation

from .program import Call
from .runtime_pins import ClientCalls
from .runtime_requests import Served

__all__ = ["Actor", "ClientEnded"]


class ClientEnded(Exception):  # noqa: N818 - what happened
    """A client leaves its request with an exception."""


@attrs.define(eq=False)
class Actor(ClientCalls):
    """One client. It has one request at a time, and pins, transfers and steps beside it."""

    calls: deque[Call | None] = attrs.field(factory=deque, init=False)
    scope: anyio.CancelScope | None = attrs.field(default=None, init=False)
    """The cancel scope around its request, opened before the request is entered."""
    client: Client | None = attrs.field(default=None, init=False)
    idle: anyio.Event = attrs.field(factory=anyio.Event, init=False)
    _wake: anyio.Event = attrs.field(factory=anyio.Event, init=False)

    def give(self, call: Call | None) -> None:
        self.calls.append(call)
        self.idle = anyio.Event()
        self._wake.set()

    # -- its task -------------------------------------------------------------------------------------------------

    async def run(self, client: Client) -> None:
        self.client = client
        try:
            while not await self._survive(self._live):
                pass
        finally:
            self._end_steps()
            for pin in self._pins:
                pin.__exit__(None, None, None)

    async def _survive(self, function: Callable[[], Awaitable[bool]]) -> bool:
        """Run `function`, and return its result; False if it was cancelled natively, which the client survives."""
        try:
            return await function()
        except asyncio.CancelledError:
            task = asyncio.current_task()
            assert task is not None
            while task.cancelling():
                task.uncancel()
            return False

    async def _live(self) -> bool:
        while (call := await self._next()) is not None:
            if call.name == "request":
                await self._session(call.args)
            else:
                await self._make(call)
        return True

    async def _next(self) -> Call | None:
        while not self.calls:
            self.idle.set()
            self._wake = anyio.Event()
            await self._wake.wait()
        return self.calls.popleft()

    async def _make(self, call: Call) -> None:
        await getattr(self, f"_do_{call.name}")(call.args)

    # -- a request's life -----------------------------------------------------------------------------------------

    async def _session(self, args: Any) -> None:
        request = self._open(args)
        if request is None:
            return
        self.was_struck = False
        try:
            with anyio.CancelScope() as self.scope:
                with suppress(ClientEnded):
                    await self._enter(request, args)
        except asyncio.CancelledError:
            self._left()
            raise
        self._left()

    def _left(self) -> None:
        """Clean up after the request's block was left, other than by a crash, and check how it ended."""
        served, self.served, self.scope = self.served, None, None
        self._end_steps()
        if served is not None:
            self.stage.left(served)
            self._check_end(served)

    def _open(self, args: Any) -> Request | None:
        self._num_requests += 1
        name = args.get("name") or f"{self.name}{self._num_requests}"
        found: Request | None = self.stage.attempt(f"request {name}", lambda: self.stage.open(name, args))
        return found

    async def _enter(self, request: Request, args: Any) -> None:
        entered = await self.stage.attempt_async(f"enter {request.request_id}", request.__aenter__)
        if entered is None:
            return
        # As `async with request` does it; but a refusal to enter is judged like that of any other call.
        try:
            self.served = self.stage.admitted(request, args)
            self.served.check_match(is_first=True)
            await self._serve()
        except BaseException as error:
            if not await request.__aexit__(type(error), error, error.__traceback__):
                raise
        else:
            await request.__aexit__(None, None, None)

    async def _serve(self) -> None:
        while True:
            call = await self._next()
            if call is None or call.name == "request":
                self.calls.appendleft(call)
                break
            if call.name == "leave":
                if not call.args.get("record"):
                    await self._finish_steps()
                if call.args.get("how") == "error":
                    self.stage.met("leave with an error")
                    raise ClientEnded
                break
            await self._make(call)

    def _check_end(self, served: Served) -> None:
        """The request is over: done with a commit, or aborted for a reason that follows from the program."""
        request, stage = served.request, self.stage
        stage.note(served.name, request.state.name, request.reason)
        if request.state is RequestState.DONE:
            if not served.num_commits:
                raise Violation("done with nothing", served.name)
            stage.met("done")
            return
        if request.state is not RequestState.ABORTED:
            raise Violation("a leak", f"{request!r} was left, and is not over")
        stage.met(f"aborted: {request.reason}")
        if request.reason not in stage.reasons(self, served):
            raise Violation("somebody was harmed", f"{served.name} was aborted: {request.reason}")
