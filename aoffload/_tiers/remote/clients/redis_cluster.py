"""Objects in a cluster of servers that speak the protocol of Redis. What a lost node had is a miss.

key → slot (CRC16 of it, modulo 16,384) → node, as `CLUSTER SLOTS` of any node says. A `MOVED` answer corrects one slot
and is followed once; like a failure, it makes the next caller ask for all slots again.
"""

from __future__ import annotations

import binascii
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Self

from ....errors import ConfigError, StoreError
from .redis_node import Command, RedisLibrary, RedisNode, key_of, redis_library

NUM_SLOTS = 16_384
REFRESH_S = 1.0
"""The map of slots is not asked for more often."""
UNKNOWN = "cluster"
"""The node of every key until the map is known."""


def slot_of(key: bytes) -> int:
    return binascii.crc_hqx(key, 0) % NUM_SLOTS  # no braces in our keys: the whole key counts


class RedisClusterStore:
    """An `ObjectStore` in a cluster. Needs the extra `remote`. Connects when it is asked for something.

    Set `cluster-require-full-coverage no`, or a lost node ends the use of all others.
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
        """The node of each slot, empty where there is none. Empty: not known yet."""
        self._is_stale = True
        self._refreshed_s = -REFRESH_S
        self._failed_s: dict[str, float] = {}
        """When a node has failed last."""
        for host, port in seeds:
            self._node(host, port)

    @classmethod
    def from_url(cls, url: str, *more_urls: str) -> Self:
        """Nodes of the cluster to begin with; the others are asked for. User, password and encryption are those of the
        first URL."""
        library = redis_library()
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
        """The node that a `MOVED` answer names, which is noted; None for any other answer."""
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

    # -- which node has what ------------------------------------------------------------------------------------------

    def _node(self, host: str, port: int) -> RedisNode:
        name = f"{host}:{port}"
        found = self._nodes.get(name)
        if found is None:
            settings = {**self._settings, "host": host, "port": port}
            found = self._nodes[name] = RedisNode(self._library, self._make, settings, name)
        return found

    def _learn(self, timeout_s: float) -> None:
        """Ask for the slots if what is known may be wrong. One thread does that. The others go on with what they know,
        or wait if that is nothing."""
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
        """From the first node that answers. Those that have failed lately come last."""
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
        """`[[first, last, [host, port, ...], ...], ...]`; an empty host is the one that was asked."""
        slots = [""] * NUM_SLOTS
        try:
            for first, last, (host, port, *_), *_ in answer:
                with self._lock:
                    name = self._node(host.decode() if host else asked_host, int(port)).name
                slots[first : last + 1] = [name] * (last + 1 - first)
        except (TypeError, ValueError, AttributeError) as error:
            raise StoreError(f"what CLUSTER SLOTS answers is not understood: {error}") from error
        self._slots = slots[:NUM_SLOTS]
