"""A client's visit: as long as it is there, and there is time."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

import anyio

from ...errors import AoffloadError
from .admission import Admission
from .errors import ApiError, HungUp, unavailable

if TYPE_CHECKING:
    from starlette.types import Receive

__all__ = ["Visit", "read_body"]


class Visit:
    """Runs work for a client in a task group of its own. What ends it first, ends all of it.

    Whoever hangs up is noticed by a task that reads from its connection: then the work is cancelled where it waits, and
    a request of the engine lets go of its blocks in that moment.
    """

    def __init__(self, receive: Receive, admission: Admission, timeout_s: float) -> None:
        self._receive = receive
        self._admission = admission
        self._timeout_s = timeout_s

    async def run(self, work: Callable[[], Awaitable[None]]) -> None:
        """Raises what `work` did of `AoffloadError` and `ApiError`; `HungUp` if the client went; `ApiError` with 503 or
        504 if the server ends or it took too long."""
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


async def read_body(receive: Receive, most_bytes: int) -> bytes | None:
    """The body. None: it is longer than that; all of it was taken from the connection all the same, or the client would
    still be sending when it is told. Raises `HungUp`."""
    body = bytearray()
    is_too_long, more = False, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise HungUp
        if is_too_long or len(body) + len(message.get("body", b"")) > most_bytes:
            is_too_long = True
            body.clear()
        else:
            body += message.get("body", b"")
        more = message.get("more_body", False)
    return None if is_too_long else bytes(body)
