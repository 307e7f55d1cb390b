"""A client's visit: work that runs while the client is connected and has time left."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

import anyio

from ...errors import AoffloadError
from .admission import Admission
from .errors import ApiError, HungUp, unavailable

if TYPE_CHECKING:
    from starlette.types import Receive

__all__ = ["Visit"]


class Visit:
    """Runs work for a client in a task group, until it is done, the client leaves, time is up or the server ends.

    A task that reads from the connection notices that the client disconnects. The work is then cancelled where it
    waits, and the engine's request releases its blocks at that moment.
    """

    def __init__(self, receive: Receive, admission: Admission, timeout_s: float) -> None:
        self._receive = receive
        self._admission = admission
        self._timeout_s = timeout_s

    async def run(self, work: Callable[[], Awaitable[None]]) -> None:
        """Raises the `AoffloadError` or `ApiError` of `work`, `HungUp` if the client disconnects, and `ApiError` with
        503 if the server ends or 504 if the work takes too long."""
        errors: list[Exception] = []
        async with anyio.create_task_group() as group:

            async def end_after(wait: Callable[[], Awaitable[None]], error: Exception) -> None:
                await wait()
                errors.append(error)
                group.cancel_scope.cancel()

            group.start_soon(end_after, self._hung_up, HungUp())
            group.start_soon(end_after, self._admission.wait_ending, unavailable("the server was shut down meanwhile"))
            group.start_soon(end_after, self._out_of_time, _took_too_long(self._timeout_s))
            try:
                await work()
            except (AoffloadError, ApiError) as error:
                errors.append(error)
            group.cancel_scope.cancel()
        if errors:
            raise errors[0]

    async def _hung_up(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass  # the end of the body may come in a message of its own

    async def _out_of_time(self) -> None:
        await anyio.sleep(self._timeout_s)


def _took_too_long(timeout_s: float) -> ApiError:
    message = f"the answer was not complete after {timeout_s:g} seconds"
    return ApiError(504, message, kind="server_error", code="timeout")
