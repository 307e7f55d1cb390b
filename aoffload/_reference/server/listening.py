"""Runs an application in uvicorn and shuts it down: connections, signals, and the log."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import signal
import socket
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import anyio
import attrs
import uvicorn
from anyio.abc import TaskStatus
from uvicorn.protocols.http.h11_impl import H11Protocol

from ..._common.env import Env
from ...errors import InvalidArgument
from .admission import READ_TIMEOUT_S, Admission
from .errors import LOGGER

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send


# -- connections -----------------------------------------------------------------------------------------------------
#
# Connections of clients before a request is admitted. They are bounded in number, in time, and in unread bytes.

MAX_CONNECTIONS = 1024
MAX_UNREAD_BYTES = 16 * 2**20


@attrs.define(eq=False)
class Connections:
    """The open connections. When there are too many, the one that has kept the server waiting longest is closed."""

    max_open: int = MAX_CONNECTIONS
    max_unread_bytes: int = MAX_UNREAD_BYTES
    """Bound on the unread bytes of answers that are complete for the server."""
    timeout_s: float = READ_TIMEOUT_S
    """Time limit for a complete header, and for reading more of a complete answer."""
    num_cut: int = attrs.field(default=0, init=False)
    """Connections ended because of these bounds."""
    _open: set[Connection] = attrs.field(factory=set, init=False)
    _waiting: OrderedDict[Connection, None] = attrs.field(factory=OrderedDict, init=False)
    """Those without a whole request, the longest waiting first: idle, sending a header or a body, or reading an
    answer."""
    _is_closed: bool = attrs.field(default=False, init=False)
    _empty: anyio.Event = attrs.field(factory=anyio.Event, init=False)

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, connection: object) -> bool:
        return connection in self._open

    def protocol(self, **options: Any) -> Connection:
        """Called by uvicorn for each connection that it accepts."""
        return Connection(self, **options)

    def enter(self, connection: Connection) -> None:
        self._open.add(connection)
        self._waiting[connection] = None
        if self._is_closed or len(self._open) > self.max_open:
            self.cut(connection if self._is_closed else next(iter(self._waiting)))

    def leave(self, connection: Connection) -> None:
        self._open.discard(connection)
        self._waiting.pop(connection, None)
        if not self._open:
            self._empty.set()

    def has_request(self, connection: Connection) -> None:
        """Its request is complete, so its deadline ends."""
        self._waiting.pop(connection, None)

    def is_answered(self, connection: Connection) -> None:
        """Its answer is complete. The unread part counts from now on."""
        self._waiting[connection] = None
        self._waiting.move_to_end(connection)
        if connection.num_unread_bytes:
            self._bound_unread()

    def cut(self, connection: Connection) -> None:
        """Close it at once, even if an answer is due."""
        self.num_cut += 1
        self.leave(connection)
        connection.transport.abort()

    async def close(self, timeout_s: float) -> None:
        """Close all connections, and refuse further ones. Clients may read complete answers for up to `timeout_s`."""
        self._is_closed = True
        for connection in tuple(self._open):
            connection.shutdown()  # now, or once its answer is complete
        with anyio.move_on_after(timeout_s):
            while self._open:
                self._empty = anyio.Event()
                await self._empty.wait()
        for connection in tuple(self._open):
            self.cut(connection)

    def _bound_unread(self) -> None:
        unread = {connection: size for connection in self._waiting if (size := connection.num_unread_bytes)}
        num_bytes = sum(unread.values())
        for connection, size in unread.items():
            if num_bytes <= self.max_unread_bytes:
                return
            num_bytes -= size
            self.cut(connection)


class Connection(H11Protocol):  # type: ignore[misc]  # uvicorn has no types here
    """Uvicorn's protocol, with a deadline whenever no request is being answered."""

    def __init__(self, connections: Connections, **options: Any) -> None:
        super().__init__(**options)
        self._connections = connections
        self._answer: Any = options["config"].loaded_app
        self.app = self._attend
        self._num_answering = 0
        self._num_unread = 0
        """Bytes that were unread when the deadline was set."""
        self._deadline: asyncio.TimerHandle | None = None

    @property
    def num_unread_bytes(self) -> int:
        return int(self.transport.get_write_buffer_size())

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._set_deadline()
        self._connections.enter(self)

    def connection_lost(self, error: Exception | None) -> None:
        self._drop_deadline()
        self._connections.leave(self)
        super().connection_lost(error)

    async def _attend(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request. A response that was begun and not finished closes the connection at once: no client reads
        it, and an orderly close would wait for one."""
        self._drop_deadline()
        self._num_answering += 1
        is_whole = False

        async def receiving() -> Any:
            message = await receive()
            if not message.get("more_body", False):
                self._connections.has_request(self)
            return message

        async def sending(message: Any) -> None:
            nonlocal is_whole
            await send(message)
            is_whole = message["type"] == "http.response.body" and not message.get("more_body", False)

        try:
            await self._answer(scope, receiving, sending)
        finally:
            self._num_answering -= 1
            if not self._num_answering and self in self._connections:
                self._set_deadline()
                self._connections.is_answered(self)
        if not is_whole:
            self.transport.abort()
            await asyncio.sleep(0)  # until uvicorn has noticed it

    def _set_deadline(self) -> None:
        self._drop_deadline()
        self._num_unread = self.num_unread_bytes
        self._deadline = self.loop.call_later(self._connections.timeout_s, self._is_late)

    def _drop_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _is_late(self) -> None:
        if 0 < self.num_unread_bytes < self._num_unread:
            self._set_deadline()  # its client reads, though slowly
        else:
            self._connections.cut(self)


# -- listening -------------------------------------------------------------------------------------------------------

LAST_BYTES_S = 2
"""Seconds that open connections get at the end to receive their last bytes."""
QUEUE = 2048
"""Connections that wait in the kernel until they are accepted."""
ACCEPTED_AT_ONCE = 4
"""Connections accepted in one turn of the loop. They are counted some turns later and have descriptors by then."""
RESERVED_FILES = 32
"""Descriptors reserved for everything else, besides those that are open already."""
MAX_HEADER_BYTES = 16 * 1024


def bind(host: str, port: int) -> socket.socket:
    """A socket bound to its address, not listening yet. Raises `InvalidArgument` naming `host` or `port`."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        found = socket.socket(family, kind, protocol)
    except (OSError, UnicodeError) as error:
        raise InvalidArgument("host", f"cannot listen at {host!r:.100}: {error}") from error
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(address)
    except OSError as error:
        found.close()
        name = "host" if error.errno == errno.EADDRNOTAVAIL else "port"
        raise InvalidArgument(name, f"cannot listen at {host}:{port}: {error}") from error
    return found


def max_connections_here(wanted: int) -> int:
    """`wanted`, or fewer if this process may not open that many descriptors."""
    try:
        import resource

        num_open = len(os.listdir("/proc/self/fd" if Path("/proc/self/fd").is_dir() else "/dev/fd"))
    except (ImportError, OSError):
        return wanted  # a system without such a limit, or without a way to read it
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return wanted
    return max(1, min(wanted, limit - num_open - RESERVED_FILES))


class _Uvicorn(uvicorn.Server):  # type: ignore[misc]  # has no types here
    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for sock in sockets or ():
            sock.listen(QUEUE)  # asyncio uses one number for this queue and for the number accepted at once


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
        """Serve until `drain` has ended, then close the socket. Reports `started` once clients can connect."""
        self._socket.listen(QUEUE)  # clients that connect before uvicorn has begun wait in the kernel
        task_status.started()
        try:
            await self._server.serve(sockets=[self._socket])
        finally:
            self._socket.close()

    async def drain(self, timeout_s: float) -> None:
        """Refuse new requests, let admitted ones finish for up to `timeout_s`, and end the rest. Then stop serving."""
        self._admission.drain()
        with anyio.move_on_after(timeout_s):
            await self._admission.wait_empty()
        self._admission.end()
        with anyio.move_on_after(LAST_BYTES_S):
            await self._admission.wait_empty()
        await self._connections.close(LAST_BYTES_S)
        self._server.should_exit = True


# -- signals ---------------------------------------------------------------------------------------------------------
#
# SIGTERM and Ctrl-C for a process that ends on the first one, however often they come.

NUMBERS = (signal.SIGTERM, signal.SIGINT)


class EndSignals:
    """Handles SIGTERM and SIGINT from its construction, in a running event loop, to the end of the process.

    The old handlers are not restored: a signal that comes while the process ends would kill it, and its exit status
    would not be 0.
    """

    def __init__(self) -> None:
        self._num_seen = 0
        self._news = anyio.Event()
        self._wake = Env().loop_waker(self._tell)
        for number in NUMBERS:
            signal.signal(number, self._take)

    async def wait(self, num_signals: int) -> None:
        """Wait until `num_signals` signals have come in all."""
        while self._num_seen < num_signals:
            self._news = anyio.Event()
            await self._news.wait()

    def ignore(self) -> None:
        """From now on, signals are ignored."""
        for number in NUMBERS:
            signal.signal(number, signal.SIG_IGN)

    def _take(self, _number: int, _frame: FrameType | None) -> None:
        self._num_seen += 1
        self._wake()

    def _tell(self) -> None:
        self._news.set()


# -- quiet -----------------------------------------------------------------------------------------------------------
#
# Bounds on the log messages that clients can cause.

LOGGERS = ("uvicorn.error", "asyncio", LOGGER)
MAX_LINES = 5
PERIOD_S = 60.0
MAX_KINDS = 256
MAX_KIND = 32
"""Characters of a message that identify its kind. asyncio appends addresses after them."""


@attrs.define
class _Count:
    began_s: float
    num_lines: int = 0


@attrs.define(eq=False)
class BoundedLog:
    """A filter of `logging`: it passes at most `MAX_LINES` of each kind of message in `PERIOD_S`. The next one says how
    many were dropped."""

    clock: Callable[[], float] = time.monotonic
    _counts: dict[tuple[str, str], _Count] = attrs.field(factory=dict, init=False)
    """By logger and the beginning of the format string."""

    def __call__(self, record: logging.LogRecord) -> bool:
        now = self.clock()
        if len(self._counts) >= MAX_KINDS:
            self._counts.clear()
        count = self._counts.setdefault((record.name, str(record.msg)[:MAX_KIND]), _Count(now))
        if now - count.began_s >= PERIOD_S:
            if count.num_lines > MAX_LINES:
                record.msg = f"{record.msg} (and {count.num_lines - MAX_LINES} more like it)"
            count.began_s, count.num_lines = now, 0
        count.num_lines += 1
        return count.num_lines <= MAX_LINES


@contextmanager
def bounded_logs() -> Iterator[None]:
    """Bound the loggers of the server and of its libraries, for the duration of the block."""
    bound = BoundedLog()
    loggers = [logging.getLogger(name) for name in LOGGERS]
    for logger in loggers:
        logger.addFilter(bound)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(bound)
