"""Connections of clients, bounded before a request is admitted: in number, in time, and in bytes that nobody reads."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import anyio
import attrs
from uvicorn.protocols.http.h11_impl import H11Protocol

from .readings import READ_TIMEOUT_S

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

__all__ = ["Connection", "Connections"]

MAX_CONNECTIONS = 1024
MAX_UNREAD_BYTES = 16 * 2**20


@attrs.define(eq=False)
class Connections:
    """The open connections. One too many takes the place of the one that has kept the server waiting longest."""

    max_open: int = MAX_CONNECTIONS
    max_unread_bytes: int = MAX_UNREAD_BYTES
    """Of answers that are complete for the server: bytes that clients have not read yet."""
    timeout_s: float = READ_TIMEOUT_S
    """A header has to be complete after that time, and some of a complete answer read."""
    num_cut: int = attrs.field(default=0, init=False)
    """Connections ended because of these bounds."""
    _open: set[Connection] = attrs.field(factory=set, init=False)
    _waiting: OrderedDict[Connection, None] = attrs.field(factory=OrderedDict, init=False)
    """Those without a whole request, the longest first: idle, sending a header or a body, or reading an answer."""
    _is_closed: bool = attrs.field(default=False, init=False)
    _empty: anyio.Event = attrs.field(factory=anyio.Event, init=False)

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, connection: object) -> bool:
        return connection in self._open

    def protocol(self, **options: Any) -> Connection:
        """What uvicorn calls for each connection that it accepts."""
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
        """Its request is complete: it is not kept waiting any more."""
        self._waiting.pop(connection, None)

    def is_answered(self, connection: Connection) -> None:
        """Its answer is complete; what of it was not read counts from here on."""
        self._waiting[connection] = None
        self._waiting.move_to_end(connection)
        if connection.num_unread_bytes:
            self._bound_unread()

    def cut(self, connection: Connection) -> None:
        """Close it at once, whatever it was about to be told."""
        self.num_cut += 1
        self.leave(connection)
        connection.transport.abort()

    async def close(self, timeout_s: float) -> None:
        """Close all of them, and refuse further ones. What was answered may be read for up to `timeout_s`."""
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
        """Answer one request. A response that was begun and not finished ends the connection at once: nobody reads it,
        and closing it in order would wait for that."""
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
            await asyncio.sleep(0)  # until uvicorn has heard of it

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
            self._set_deadline()  # its client reads, if slowly
        else:
            self._connections.cut(self)
