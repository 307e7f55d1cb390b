"""Bounds on memory before admission: connections, headers, bodies, unread answers."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import anyio.abc
import attrs
import pytest
from http_bench import BACKENDS, GUARD_S, Caller, let_threads_run, serving

from aoffload._reference.server.admission import Readings
from aoffload._reference.server.errors import ApiError, unavailable
from aoffload._reference.server.listening import Connections, Listener, bind, max_connections_here
from aoffload.integrations.openai_server import Admission, ServerOptions

pytestmark = pytest.mark.anyio
on_sockets = pytest.mark.parametrize("anyio_backend", ["asyncio"])
HALF = b"POST / HTTP/1.1\r\nhost: 127.0.0.1\r\nx: "


@attrs.define(eq=False)
class Sender:
    """A client that sends parts of a body when it is told to."""

    sent: Any = attrs.field(init=False)
    arriving: Any = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.sent, self.arriving = anyio.create_memory_object_stream[dict[str, Any]](10)

    def send(self, part: bytes, more: bool = True) -> None:
        self.sent.send_nowait({"type": "http.request", "body": part, "more_body": more})

    async def receive(self) -> Any:
        return await self.arriving.receive()

    def close(self) -> None:
        self.sent.close()
        self.arriving.close()


@asynccontextmanager
async def reading(readings: Readings, num_senders: int) -> AsyncIterator[tuple[list[Sender], list[Any]]]:
    """Bodies that are being read, the oldest first, and how each of them ended."""
    senders, ends = [Sender() for _ in range(num_senders)], [None] * num_senders

    async def read(number: int) -> None:
        try:
            ends[number] = await readings.read(senders[number].receive, 1000)
        except ApiError as error:
            ends[number] = error.status

    with anyio.fail_after(GUARD_S):
        async with anyio.create_task_group() as group:
            for number in range(num_senders):
                group.start_soon(read, number)
                while len(readings) <= number:
                    await anyio.lowlevel.checkpoint()
            yield senders, ends
    for sender in senders:
        sender.close()
    assert (len(readings), readings.num_bytes) == (0, 0)


async def until(condition: Callable[[], bool]) -> None:
    with anyio.fail_after(GUARD_S):
        while not condition():
            await let_threads_run()


@BACKENDS
async def test_unfinished_bodies_are_bounded_in_sum() -> None:
    """The oldest one gives way, with 503; a request that is complete is read."""
    readings = Readings(max_bytes=100)
    async with reading(readings, 3) as (senders, ends):
        for sender in senders[:2]:
            sender.send(bytes(50))
        await until(lambda: readings.num_bytes == 100)
        senders[2].send(bytes(50))
        await until(lambda: ends[0] is not None)
        assert (ends[0], readings.num_bytes) == (503, 100)
        for sender in senders[1:]:
            sender.send(b"", more=False)
    assert ends == [503, bytes(50), bytes(50)]


@BACKENDS
async def test_a_body_that_is_too_long_takes_no_room() -> None:
    """It is read to its end, and nothing of it is kept."""
    readings = Readings(max_bytes=2000)
    async with reading(readings, 1) as ((sender,), ends):
        sender.send(bytes(900))
        sender.send(bytes(200))
        await until(lambda: not sender.arriving.statistics().current_buffer_used and readings.num_bytes == 0)
        sender.send(bytes(900), more=False)
    assert ends == [None]


@BACKENDS
async def test_a_body_has_its_time() -> None:
    """408 once that is up."""
    async with reading(Readings(timeout_s=0.01), 1) as ((sender,), ends):
        sender.send(b"{")
        await until(lambda: ends[0] is not None)
    assert ends == [408]


async def never() -> Any:
    """Nobody may ask for it."""
    raise AssertionError


@BACKENDS
async def test_half_a_body_ends_when_the_server_drains() -> None:
    """503, and so does every later one."""
    admission = Admission(4)
    async with reading(admission.readings, 2) as (_, ends):
        admission.drain()
        await until(lambda: None not in ends)
        with pytest.raises(ApiError) as late:
            await admission.readings.read(never, 10)
    assert (ends, late.value.status) == ([503, 503], 503)


@BACKENDS
async def test_half_a_body_takes_no_place() -> None:
    """Who sends it is counted among the bodies, not among the requests, and is told so when it has to go."""
    async with serving() as bench:
        caller, parts = Caller.of(bench), Sender()
        caller.receive = parts.receive  # type: ignore[method-assign]
        async with anyio.create_task_group() as clients:
            clients.start_soon(caller.call)
            parts.send(b"{")
            readings = bench.service.admission.readings
            await until(lambda: readings.num_bytes == 1)
            assert bench.service.admission.num_inside == 0
            assert (await bench.complete())["choices"]
            readings.end(lambda: unavailable("it is over"))
        parts.close()
    assert caller.status == 503


def test_connections_stay_below_the_limit_of_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    """With room for everything else; where there is no limit, as many as were asked for."""
    resource = pytest.importorskip("resource")
    monkeypatch.setattr(resource, "getrlimit", lambda _: (10_000, 10_000))
    assert 9_000 < max_connections_here(50_000) < 9_968
    assert max_connections_here(100) == 100
    monkeypatch.setattr(resource, "getrlimit", lambda _: (8, 8))
    assert max_connections_here(100) == 1
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, 0))
    assert max_connections_here(100) == 100


# -- over sockets ---------------------------------------------------------------------------------------------------


@attrs.frozen
class Served:
    connections: Connections
    port: int
    clients: list[socket.socket] = attrs.field(factory=list)

    def connect(self, data: bytes = b"") -> socket.socket:
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.settimeout(GUARD_S)
        client.connect(("127.0.0.1", self.port))
        client.sendall(data)
        self.clients.append(client)
        return client

    async def ask(self, client: socket.socket | None = None) -> bytes:
        """What the server answers to a request on that connection."""
        client = client or self.connect()
        client.sendall(b"GET / HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n")
        return await anyio.to_thread.run_sync(client.recv, 4096)


async def answer(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 204, "headers": []})
    await send({"type": "http.response.body", "body": b""})


@asynccontextmanager
async def served(connections: Connections, app: Any = answer) -> AsyncIterator[Served]:
    with bind("127.0.0.1", 0) as sock:
        listener = Listener(app, Admission(8), sock, connections)
        async with anyio.create_task_group() as group:
            await group.start(listener.run)
            found = Served(connections, sock.getsockname()[1])
            try:
                with anyio.fail_after(GUARD_S):
                    yield found
            finally:
                for client in found.clients:
                    client.close()
            await listener.drain(0.1)
    assert len(connections) == 0


async def is_cut(client: socket.socket) -> bool:
    """Whether the server has closed the connection; waits for it."""
    try:
        while await anyio.to_thread.run_sync(client.recv, 4096):
            pass
    except ConnectionError:
        pass
    return True


@on_sockets
async def test_one_connection_too_many_takes_the_place_of_the_oldest_idle_one() -> None:
    """A connected client is served on, and so is a new one, however many connect and say nothing."""
    async with served(Connections(max_open=4)) as server:
        known = server.connect()
        silent = [server.connect(HALF) for _ in range(3)]
        await until(lambda: len(server.connections) == 4)
        assert (await server.ask(known)).startswith(b"HTTP/1.1 204")
        assert (await server.ask()).startswith(b"HTTP/1.1 204")
        assert await is_cut(silent[0])
        assert (await server.ask(known)).startswith(b"HTTP/1.1 204")
        assert len(server.connections) == 4


@on_sockets
async def test_a_request_that_is_answered_makes_no_room() -> None:
    """Where everybody is being served, the new one is closed."""
    goes_on, num_inside = anyio.Event(), 0

    async def slow(scope: Any, receive: Any, send: Any) -> None:
        nonlocal num_inside
        await receive()
        num_inside += 1
        await goes_on.wait()
        await answer(scope, receive, send)

    async with served(Connections(max_open=2), slow) as server:
        first = [server.connect(HALF + b"\r\n\r\n") for _ in range(2)]
        await until(lambda: num_inside == 2)
        assert await is_cut(server.connect())
        goes_on.set()
        for client in first:
            assert (await anyio.to_thread.run_sync(client.recv, 100)).startswith(b"HTTP/1.1 204")


@on_sockets
@pytest.mark.parametrize("data", [b"", HALF, HALF + b"\r\n\r\n" + HALF], ids=["nothing", "half", "a second half"])
async def test_a_header_has_its_time(data: bytes) -> None:
    """A connection without a whole request is closed, also one that has had an answer."""
    async with served(Connections(timeout_s=0.05)) as server:
        assert await is_cut(server.connect(data))


@on_sockets
async def test_an_answer_that_nobody_reads_is_dropped() -> None:
    """Once nothing of it was read for as long as a header may take."""

    async def long(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": bytes(2**24)})

    async with served(Connections(timeout_s=0.05), long) as server:
        server.connect(HALF + b"\r\n\r\n")
        await until(lambda: server.connections.num_cut == 1)
        assert len(server.connections) == 0


@on_sockets
async def test_who_asks_on_and_reads_nothing_is_cut_off() -> None:
    """Answers that need no admission have a time of their own, or each of these clients had a connection for ever."""
    async with serving() as bench, served(Connections(timeout_s=GUARD_S), bench.app) as server:
        client = server.connect()
        asked, num_sent = b"GET /v1/models HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n", 0
        await until(lambda: len(server.connections) == 1)
        client.setblocking(False)
        while len(server.connections) == 1:
            with contextlib.suppress(BlockingIOError, ConnectionError):
                num_sent += client.send((asked * 1000)[num_sent % len(asked) :])
            await let_threads_run()


@on_sockets
async def test_an_answer_that_breaks_off_ends_its_connection_at_once() -> None:
    """Nobody waits until what was sent of it is read."""

    async def broken(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": bytes(2**24), "more_body": True})

    async with served(Connections(timeout_s=GUARD_S), broken) as server:
        server.connect(HALF + b"\r\n\r\n")
        await until(lambda: len(server.connections) == 0 and server.connections._is_closed is False)
        assert await is_cut(server.clients[0])


@attrs.define(eq=False)
class Reader:
    """Stands for a connection with bytes that its client has not read."""

    num_unread_bytes: int
    was_cut: bool = False

    @property
    def transport(self) -> Reader:
        return self

    def abort(self) -> None:
        self.was_cut = True


def test_unread_answers_are_bounded_in_sum() -> None:
    """The oldest ones go; a client that has read its answer stays."""
    connections = Connections(max_unread_bytes=100)
    readers: list[Any] = [Reader(size) for size in (60, 0, 30, 50)]
    for reader in readers:
        connections.enter(reader)
        connections.is_answered(reader)
    assert [reader.was_cut for reader in readers] == [True, False, False, False]


def test_the_defaults_fit_one_another() -> None:
    """A body that may be sent can be read."""
    options = ServerOptions()
    assert options.max_body_bytes <= options.max_reading_bytes
    assert (options.max_connections, options.max_unread_bytes) == (Connections().max_open, 2**24)
