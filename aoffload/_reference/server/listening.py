"""Runs an application in uvicorn and shuts it down."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
import uvicorn
from anyio.abc import TaskStatus

from ...errors import InvalidArgument
from .admission import Admission
from .connections import Connections

if TYPE_CHECKING:
    from starlette.types import ASGIApp

__all__ = ["Listener", "bind", "max_connections_here"]

LAST_BYTES_S = 2
"""Seconds that open connections get at the end to receive their last bytes."""
QUEUE = 2048
"""Connections that wait in the kernel until they are accepted."""
ACCEPTED_AT_ONCE = 4
"""Connections accepted in one turn of the loop. They are counted some turns later and have descriptors by then."""
RESERVED_FILES = 32
"""Descriptors kept for everything else, beside those that are open already."""
MAX_HEADER_BYTES = 16 * 1024


def bind(host: str, port: int) -> socket.socket:
    """A socket bound to its address, not listening yet. Raises `InvalidArgument` naming `host` or `port`."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        found = socket.socket(family, kind, protocol)
    except (OSError, UnicodeError) as error:
        raise InvalidArgument("host", f"{host!r:.100} can't be listened at: {error}") from error
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(address)
    except OSError as error:
        found.close()
        name = "host" if error.errno == errno.EADDRNOTAVAIL else "port"
        raise InvalidArgument(name, f"{host}:{port} can't be had: {error}") from error
    return found


def max_connections_here(wanted: int) -> int:
    """`wanted`, or as many connections as this process may have descriptors for."""
    try:
        import resource

        num_open = len(os.listdir("/proc/self/fd" if Path("/proc/self/fd").is_dir() else "/dev/fd"))
    except (ImportError, OSError):
        return wanted  # a system without such a limit, or one that does not tell
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return wanted
    return max(1, min(wanted, limit - num_open - RESERVED_FILES))


class _Uvicorn(uvicorn.Server):  # type: ignore[misc]  # has no types here
    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for sock in sockets or ():
            sock.listen(QUEUE)  # asyncio uses one number for this queue and for what it accepts at once


class Listener:
    """Serves an application on a socket until it is drained."""

    def __init__(
        self, app: ASGIApp, admission: Admission, sock: socket.socket, connections: Connections | None = None
    ) -> None:
        self._connections = Connections() if connections is None else connections
        config = uvicorn.Config(
            app,
            http=self._connections.protocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            backlog=ACCEPTED_AT_ONCE,
            h11_max_incomplete_event_size=MAX_HEADER_BYTES,
            timeout_graceful_shutdown=LAST_BYTES_S,
        )
        self._server = _Uvicorn(config)
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
        self._socket.listen(QUEUE)  # clients that connect before uvicorn has begun wait in the kernel
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
        await self._connections.close(LAST_BYTES_S)
        self._server.should_exit = True
