"""One server that speaks the protocol of Redis: its idle connections, and commands with a time-out of their own.

redis-py connects, authenticates and reads (with hiredis). Commands are packed here: large values go to the socket from
where they are. Nothing is tried twice.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from ...._common.arguments import check_text
from ...._common.extras import needed
from ....errors import ConfigError, StoreError

Command: TypeAlias = tuple[bytes | memoryview, ...]
MAX_IDLE = 16
"""Connections."""
CONNECT_S = 0.25
"""The least time that a command has for connecting, even if its own time-out is shorter. After a failure, only commands
connect again. Without this least time, a command could never connect to a server that is farther away than its
time-out."""


def key_of(key: bytes) -> bytes:
    """What a key is called in the server, so that people recognise it."""
    return b"aoffload:" + key.hex().encode()


class RedisLibrary:
    """What is used of redis-py."""

    def __init__(self) -> None:
        with needed("remote", "a store in Redis"):
            import hiredis  # noqa: F401 - found by redis-py; without it, large objects take five times as long
            import redis
        self.error: type[Exception] = redis.RedisError
        self.response_error: type[Exception] = redis.ResponseError
        self._from_url: Callable[..., Any] = redis.ConnectionPool.from_url

    def settings(self, url: str) -> tuple[Callable[..., Any], dict[str, Any]]:
        """How to connect to `url`: a class, and its keywords. `ConfigError("url")` for what is none."""
        try:
            pool = self._from_url(check_text("url", url), protocol=2)
        except Exception as error:
            scheme = str(url).partition(":")[0]  # never the whole: it may have a password
            raise ConfigError(
                "url", f"is no URL of a Redis server (redis, rediss or unix), got {scheme}:..."
            ) from error
        return pool.connection_class, dict(pool.connection_kwargs)


def redis_library() -> RedisLibrary:
    """`MissingExtra` where redis-py or hiredis is not installed."""
    return RedisLibrary()


class RedisNode:
    """A server. `make` connects with `settings`. Called by several threads."""

    def __init__(self, library: RedisLibrary, make: Callable[..., Any], settings: dict[str, Any], name: str) -> None:
        self.name = name
        self._library, self._make, self._settings = library, make, settings
        self._lock = threading.Lock()
        self._idle: list[Any] = []

    def run(self, commands: Sequence[Command], timeout_s: float) -> list[Any]:
        """The answers, errors among them. `StoreError` if the server is not reached, or takes longer."""
        connection = self._connection(timeout_s)
        try:
            connection.send_packed_command(packed(commands), check_health=False)
            answers = [self._answer(connection) for _ in commands]
        except (self._library.error, OSError) as error:
            connection.disconnect()
            self.close()  # the others are as old
            raise self._failed(error) from error
        except BaseException:
            connection.disconnect()
            raise
        self._keep(connection)
        return answers

    def one(self, command: Command, timeout_s: float) -> Any:
        """The answer. `StoreError` also if it is an error."""
        (answer,) = self.run([command], timeout_s)
        return self.checked(answer)

    def checked(self, answer: Any) -> Any:
        if isinstance(answer, Exception):
            raise self._failed(answer) from answer
        return answer

    def close(self) -> None:
        """Close the idle connections. Others are closed by who has them, or kept for the next command."""
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.disconnect()

    def _connection(self, timeout_s: float) -> Any:
        with self._lock:
            connection = self._idle.pop() if self._idle else None
        if connection is not None:
            connection._sock.settimeout(timeout_s)
            return connection
        connect_s = max(timeout_s, CONNECT_S)
        timeouts = {"socket_timeout": connect_s, "socket_connect_timeout": connect_s}
        connection = self._make(**{**self._settings, **timeouts})
        try:
            connection.connect()
        except (self._library.error, OSError) as error:
            raise self._failed(error) from error
        connection._sock.settimeout(timeout_s)
        return connection

    def _failed(self, error: Exception) -> StoreError:
        """Many errors name the server themselves."""
        return StoreError(f"{error}" if self.name in f"{error}" else f"{self.name}: {error}")

    def _answer(self, connection: Any) -> Any:
        """An error in the answer of the server says nothing about the answers after it."""
        try:
            return connection.read_response(disable_decoding=True, disconnect_on_error=False)
        except self._library.response_error as error:
            return error

    def _keep(self, connection: Any) -> None:
        with self._lock:
            if len(self._idle) < MAX_IDLE:
                self._idle.append(connection)
                return
        connection.disconnect()


def packed(commands: Sequence[Command]) -> list[bytes | memoryview]:
    """As they go over the wire: text and keys together, values as they are."""
    found: list[bytes | memoryview] = []
    text: list[bytes] = []
    for command in commands:
        text.append(b"*%d\r\n" % len(command))
        for word in command:
            text.append(b"$%d\r\n" % len(word))
            if isinstance(word, memoryview):
                found += [b"".join(text), word]
                text = []
            else:
                text.append(word)
            text.append(b"\r\n")
    return [*found, b"".join(text)]
