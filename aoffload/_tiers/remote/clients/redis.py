"""Objects in servers that speak the Redis protocol: one server, or a cluster. Each command has its own time-out.

redis-py connects, authenticates and reads (with hiredis). This module packs the commands, so that large values are sent
without a copy. No command is retried.
"""

from __future__ import annotations

import binascii
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Self, TypeAlias

from ...._common.arguments import check_text
from ...._common.extras import needed
from ....errors import ConfigError, StoreError

Command: TypeAlias = tuple[bytes | memoryview, ...]
MAX_IDLE = 16
"""Maximum idle connections of a server."""
CONNECT_S = 0.25
"""Minimum time for connecting, even if the time-out of the command is shorter. After a failure, only commands connect
again. Without this minimum, a command could never connect to a server whose round trip is longer than its time-out."""


def key_of(key: bytes) -> bytes:
    """The name of a key in the server, readable for administrators."""
    return b"aoffload:" + key.hex().encode()


class RedisLibrary:
    """The parts of redis-py that this module uses. Raises `MissingExtra` if redis-py or hiredis is not installed."""

    def __init__(self) -> None:
        with needed("remote", "a store in Redis"):
            import hiredis  # noqa: F401 - found by redis-py; without it, large objects take five times as long
            import redis
        self.error: type[Exception] = redis.RedisError
        self.response_error: type[Exception] = redis.ResponseError
        self._from_url: Callable[..., Any] = redis.ConnectionPool.from_url

    def settings(self, url: str) -> tuple[Callable[..., Any], dict[str, Any]]:
        """The connection class for `url`, and its keyword arguments. Raises `ConfigError("url")` if `url` is
        invalid."""
        try:
            pool = self._from_url(check_text("url", url), protocol=2)
        except Exception as error:
            scheme = str(url).partition(":")[0]  # never show the whole URL: it may have a password
            raise ConfigError(
                "url", f"is not a URL of a Redis server (redis, rediss or unix), got {scheme}:..."
            ) from error
        return pool.connection_class, dict(pool.connection_kwargs)


class RedisNode:
    """A server. `make` connects with `settings`. Several threads may call it."""

    def __init__(self, library: RedisLibrary, make: Callable[..., Any], settings: dict[str, Any], name: str) -> None:
        self.name = name
        self._library, self._make, self._settings = library, make, settings
        self._lock = threading.Lock()
        self._idle: list[Any] = []

    def run(self, commands: Sequence[Command], timeout_s: float) -> list[Any]:
        """Run `commands`, and return their answers, which may be errors. Raises `StoreError` if the server is not
        reached, or takes longer than `timeout_s`."""
        connection = self._connection(timeout_s)
        try:
            connection.send_packed_command(packed(commands), check_health=False)
            answers = [self._answer(connection) for _ in commands]
        except (self._library.error, OSError) as error:
            connection.disconnect()
            self.close()  # the idle connections are as old
            raise self._failed(error) from error
        except BaseException:
            connection.disconnect()
            raise
        self._keep(connection)
        return answers

    def one(self, command: Command, timeout_s: float) -> Any:
        """Run one command, and return its answer. Raises `StoreError` also if the answer is an error."""
        (answer,) = self.run([command], timeout_s)
        return self.checked(answer)

    def checked(self, answer: Any) -> Any:
        if isinstance(answer, Exception):
            raise self._failed(answer) from answer
        return answer

    def close(self) -> None:
        """Close the idle connections. A connection in use is closed by its thread, or kept for the next command."""
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
        """Add the name of the server, unless the error has it already."""
        return StoreError(f"{error}" if self.name in f"{error}" else f"{self.name}: {error}")

    def _answer(self, connection: Any) -> Any:
        """Read one answer. An error answer is returned, not raised, because the answers after it still have to be
        read."""
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
    """The bytes to send: commands and keys joined, large values as they are."""
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


# -- redis store -----------------------------------------------------------------------------------------------------
#
# Objects in one server that speaks the protocol of Redis, such as Valkey.


class RedisStore:
    """An `ObjectStore` in one server. Needs the extra `remote`. Connects at the first call.

    Objects have no time to live: let the server evict (`maxmemory-policy allkeys-lru`).
    """

    def __init__(self, node: RedisNode) -> None:
        self._node = node

    @classmethod
    def from_url(cls, url: str) -> Self:
        """A store from a URL with `redis://`, `rediss://` or `unix://`, as redis-py accepts it, with user, password and
        database."""
        library = RedisLibrary()
        make, settings = library.settings(url)
        where = settings.get("path") or f"{settings.get('host', 'localhost')}:{settings.get('port', 6379)}"
        return cls(RedisNode(library, make, settings, where))

    def __repr__(self) -> str:
        return f"<RedisStore {self._node.name}>"

    def node_of(self, key: bytes) -> str:
        return self._node.name

    def exist(self, keys: Sequence[bytes], timeout_s: float) -> list[bool]:
        answers = self._node.run([(b"EXISTS", key_of(key)) for key in keys], timeout_s)
        return [self._node.checked(answer) == 1 for answer in answers]

    def get(self, key: bytes, timeout_s: float) -> bytes | None:
        found = self._node.one((b"GET", key_of(key)), timeout_s)
        return found if isinstance(found, bytes) else None

    def put(self, key: bytes, value: memoryview, timeout_s: float) -> None:
        self._node.one((b"SET", key_of(key), value), timeout_s)

    def remove(self, key: bytes, timeout_s: float) -> None:
        self._node.one((b"UNLINK", key_of(key)), timeout_s)

    def close(self) -> None:
        self._node.close()


# -- redis cluster ---------------------------------------------------------------------------------------------------
#
# Objects in a cluster of servers that speak the Redis protocol. The objects of a lost node count as missing.
#
# key → slot (CRC16 of the key, modulo 16,384) → node, from the `CLUSTER SLOTS` answer of any node. A `MOVED` answer
# corrects one slot and is followed once. After such an answer or a failure, the next call queries all slots again.

NUM_SLOTS = 16_384
REFRESH_S = 1.0
"""Minimum seconds between two queries of the slot map."""
UNKNOWN = "cluster"
"""The node of every key until the slot map is known."""


def slot_of(key: bytes) -> int:
    return binascii.crc_hqx(key, 0) % NUM_SLOTS  # our keys have no braces, so the slot depends on the whole key


class RedisClusterStore:
    """An `ObjectStore` in a cluster. Needs the extra `remote`. Connects at the first call.

    Set `cluster-require-full-coverage no`. Otherwise the loss of one node disables all other nodes.
    """

    def __init__(
        self, library: RedisLibrary, make: Callable[..., Any], settings: dict[str, Any],
        seeds: Sequence[tuple[str, int]],
    ) -> None:  # fmt: skip
        self._library, self._make, self._settings = library, make, settings
        self._lock = threading.Lock()
        self._refreshing = threading.Lock()
        self._nodes: dict[str, RedisNode] = {}
        self._slots: list[str] = []
        """The node of each slot, empty for a slot without a node. The list is empty until the map is known."""
        self._is_stale = True
        self._refreshed_s = -REFRESH_S
        self._failed_s: dict[str, float] = {}
        """The time of the last failure of each node."""
        for host, port in seeds:
            self._node(host, port)

    @classmethod
    def from_url(cls, url: str, *more_urls: str) -> Self:
        """A store for the cluster that has these nodes; the other nodes are found through them. User, password and
        encryption are those of the first URL."""
        library = RedisLibrary()
        found = [library.settings(each) for each in (url, *more_urls)]
        make, settings = found[0]
        if "path" in settings or settings.get("db"):
            raise ConfigError("url", "must have a host and no database, for a cluster")
        seeds = [(str(each.get("host", "localhost")), int(each.get("port", 6379))) for _, each in found]
        return cls(library, make, settings, seeds)

    def __repr__(self) -> str:
        return f"<RedisClusterStore {', '.join(self._nodes)}>"

    def node_of(self, key: bytes) -> str:
        slots = self._slots
        return (slots[slot_of(key_of(key))] if slots else "") or UNKNOWN

    def exist(self, keys: Sequence[bytes], timeout_s: float) -> list[bool]:
        self._learn(timeout_s)
        groups: dict[str, list[int]] = {}
        for number, key in enumerate(keys):
            groups.setdefault(self.node_of(key), []).append(number)
        found = [False] * len(keys)
        for name, numbers in groups.items():
            answers = self._run(name, [(b"EXISTS", key_of(keys[number])) for number in numbers], timeout_s)
            for number, answer in zip(numbers, answers, strict=True):
                found[number] = self._moved_to(answer) is None and self._nodes[name].checked(answer) == 1
        return found

    def get(self, key: bytes, timeout_s: float) -> bytes | None:
        found = self._run_one((b"GET", key_of(key)), key, timeout_s)
        return found if isinstance(found, bytes) else None

    def put(self, key: bytes, value: memoryview, timeout_s: float) -> None:
        self._run_one((b"SET", key_of(key), value), key, timeout_s)

    def remove(self, key: bytes, timeout_s: float) -> None:
        self._run_one((b"UNLINK", key_of(key)), key, timeout_s)

    def close(self) -> None:
        with self._lock:
            nodes = list(self._nodes.values())
        for node in nodes:
            node.close()

    # -- commands -----------------------------------------------------------------------------------------------------

    def _run_one(self, command: Command, key: bytes, timeout_s: float) -> Any:
        self._learn(timeout_s)
        name = self.node_of(key)
        (answer,) = self._run(name, [command], timeout_s)
        moved = self._moved_to(answer)
        if moved is not None:
            name = moved
            (answer,) = self._run(name, [command], timeout_s)
        return self._nodes[name].checked(answer)

    def _run(self, name: str, commands: Sequence[Command], timeout_s: float) -> list[Any]:
        node = self._nodes.get(name)
        if node is None:
            raise StoreError(f"no node of the cluster has the slot of this key ({', '.join(self._nodes)})")
        try:
            return node.run(commands, timeout_s)
        except StoreError:
            self._failed_s[name] = time.monotonic()
            self._is_stale = True
            raise

    def _moved_to(self, answer: Any) -> str | None:
        """The node that a `MOVED` answer names, after recording it in the map; None for any other answer."""
        if not isinstance(answer, self._library.response_error):
            return None
        words = str(answer).removeprefix("MOVED ").split()
        if type(answer).__name__ != "MovedError" and not str(answer).startswith("MOVED "):
            return None
        host, _, port = words[-1].rpartition(":")
        if len(words) != 2 or not words[0].isdecimal() or not host or not port.isdecimal():
            return None
        self._is_stale = True
        with self._lock:
            found = self._node(host, int(port)).name
            if int(words[0]) < len(self._slots):
                self._slots[int(words[0])] = found
        return found

    # -- the slot map -------------------------------------------------------------------------------------------------

    def _node(self, host: str, port: int) -> RedisNode:
        name = f"{host}:{port}"
        found = self._nodes.get(name)
        if found is None:
            settings = {**self._settings, "host": host, "port": port}
            found = self._nodes[name] = RedisNode(self._library, self._make, settings, name)
        return found

    def _learn(self, timeout_s: float) -> None:
        """Query the slot map if it may be wrong. One thread does that. The other threads use the old map, or wait if
        there is none."""
        if not self._is_stale or time.monotonic() < self._refreshed_s + REFRESH_S:
            return
        has_waited = self._refreshing.acquire(timeout=timeout_s) if not self._slots else False
        if not has_waited and not self._refreshing.acquire(blocking=False):
            return
        try:
            if self._is_stale and time.monotonic() >= self._refreshed_s + REFRESH_S:
                self._refresh(timeout_s)
        finally:
            self._refreshing.release()

    def _refresh(self, timeout_s: float) -> None:
        """Query the slot map from the first node that answers. Nodes that have failed lately are tried last."""
        for name in sorted(self._nodes, key=lambda name: self._failed_s.get(name, -1.0)):
            try:
                answer = self._nodes[name].one((b"CLUSTER", b"SLOTS"), timeout_s)
                self._take_up(answer, name.rpartition(":")[0])
            except StoreError:
                self._failed_s[name] = time.monotonic()
                continue
            self._is_stale, self._refreshed_s = False, time.monotonic()
            return
        self._refreshed_s = time.monotonic()

    def _take_up(self, answer: Any, asked_host: str) -> None:
        """Read the answer `[[first, last, [host, port, ...], ...], ...]`. An empty host stands for the node that
        answered."""
        slots = [""] * NUM_SLOTS
        try:
            for first, last, (host, port, *_), *_ in answer:
                with self._lock:
                    name = self._node(host.decode() if host else asked_host, int(port)).name
                slots[first : last + 1] = [name] * (last + 1 - first)
        except (TypeError, ValueError, AttributeError) as error:
            raise StoreError(f"the answer to CLUSTER SLOTS is not valid: {error}") from error
        self._slots = slots[:NUM_SLOTS]
