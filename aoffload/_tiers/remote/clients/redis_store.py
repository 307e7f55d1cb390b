"""Objects in one server that speaks the protocol of Redis, such as Valkey."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

from .redis_node import RedisNode, key_of, redis_library


class RedisStore:
    """An `ObjectStore` in one server. Needs the extra `remote`. Connects when it is asked for something.

    Objects have no time to live: let the server evict (`maxmemory-policy allkeys-lru`).
    """

    def __init__(self, node: RedisNode) -> None:
        self._node = node

    @classmethod
    def from_url(cls, url: str) -> Self:
        """`redis://`, `rediss://` or `unix://`, as redis-py takes them, with user, password and database."""
        library = redis_library()
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
