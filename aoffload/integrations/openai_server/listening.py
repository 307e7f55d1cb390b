"""Runs an application in uvicorn and shuts it down."""

from __future__ import annotations

import contextlib
import socket
from typing import TYPE_CHECKING

import anyio
import uvicorn
from anyio.abc import TaskStatus

from ...errors import InvalidArgument
from .admission import Admission

if TYPE_CHECKING:
    from starlette.types import ASGIApp

__all__ = ["Listener", "bind"]

LAST_BYTES_S = 2
"""Seconds that open connections get at the end to receive their last bytes."""
BACKLOG = 2048


def bind(host: str, port: int) -> socket.socket:
    """A socket bound to its address, not listening yet. Raises `InvalidArgument` naming `host` or `port`."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        found = socket.socket(family, kind, protocol)
    except OSError as error:
        raise InvalidArgument("host", f"{host!r} can't be listened at: {error}") from error
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(address)
    except OSError as error:
        found.close()
        raise InvalidArgument("port", f"{host}:{port} can't be had: {error}") from error
    return found


class Listener:
    """Serves an application on a socket until it is drained."""

    def __init__(self, app: ASGIApp, admission: Admission, sock: socket.socket) -> None:
        config = uvicorn.Config(
            app,
            lifespan="off",
            log_config=None,
            access_log=False,
            backlog=BACKLOG,
            timeout_graceful_shutdown=LAST_BYTES_S,
        )
        self._server = uvicorn.Server(config)
        # Uvicorn's own handling of signals bypasses `drain`: it cancels requests after LAST_BYTES_S.
        self._server.capture_signals = contextlib.nullcontext
        self._admission = admission
        self._socket = sock

    @property
    def url(self) -> str:
        host, port = self._socket.getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Serve until `drain` is done, then close the socket. Reports `started` once clients can connect."""
        self._socket.listen(BACKLOG)  # clients that connect before uvicorn has begun wait in the kernel
        task_status.started()
        try:
            await self._server.serve(sockets=[self._socket])
        finally:
            self._socket.close()

    async def drain(self, timeout_s: float) -> None:
        """Refuse new requests, let admitted ones finish for up to `timeout_s`, end the rest; then stop serving."""
        self._admission.drain()
        with anyio.move_on_after(timeout_s):
            await self._admission.wait_empty()
        self._admission.end()
        with anyio.move_on_after(LAST_BYTES_S):
            await self._admission.wait_empty()
        self._server.should_exit = True
