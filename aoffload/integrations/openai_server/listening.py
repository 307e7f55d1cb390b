"""uvicorn around an application, and the way it ends."""

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
"""What open connections get to take in their last bytes once nobody is inside any more."""
BACKLOG = 2048


def bind(host: str, port: int) -> socket.socket:
    """A socket that has its address and does not listen yet. Raises `InvalidArgument` naming `port`."""
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
        # Uvicorn's own way to end at a signal knows nothing of `drain`: it cancels those inside after LAST_BYTES_S.
        self._server.capture_signals = contextlib.nullcontext
        self._admission = admission
        self._socket = sock

    @property
    def url(self) -> str:
        host, port = self._socket.getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Serve until `drain` is through; nothing is open afterwards. Started once clients can connect."""
        self._socket.listen(BACKLOG)  # whoever connects before uvicorn has begun waits in the kernel
        task_status.started()
        try:
            await self._server.serve(sockets=[self._socket])
        finally:
            self._socket.close()

    async def drain(self, timeout_s: float) -> None:
        """Take nobody in any more, let those inside get their answers, tell them to go after `timeout_s`; then end."""
        self._admission.drain()
        with anyio.move_on_after(timeout_s):
            await self._admission.wait_empty()
        self._admission.end()
        with anyio.move_on_after(LAST_BYTES_S):
            await self._admission.wait_empty()
        self._server.should_exit = True
