"""Objects in Mooncake Store, in the memory of the machines that take part."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

from ...._common.arguments import check_has, check_text
from ...._config.tiers import parse_bytes
from ...._common.extras import needed
from ....errors import ConfigError, StoreError


class MooncakeStore:
    """An `ObjectStore` in Mooncake Store. `client` is a `mooncake.store.MooncakeDistributedStore` after its `setup`;
    `from_addresses` makes one. Needs one of its distributions, such as `mooncake-transfer-engine`.

    Its calls know no time-out: one to a machine that hangs returns after half a minute, and its thread is kept for so
    long. A second put of a key changes nothing there, which is what cells need.
    """

    def __init__(self, client: Any) -> None:
        check_has("client", client, "store of Mooncake", "put get batch_is_exist remove close", ConfigError)
        self._client = client

    @classmethod
    def from_addresses(
        cls, master: str, local_hostname: str, *, metadata_server: str = "P2PHANDSHAKE", protocol: str = "tcp",
        rdma_devices: str = "", memory: int | str = "1GiB", buffer: int | str = "64MiB",
    ) -> Self:  # fmt: skip
        """Take part with `memory`, through the master at `master` (host and port). `StoreError` if that is refused."""
        texts = {
            name: check_text(name, value)
            for name, value in (
                ("master", master), ("local_hostname", local_hostname), ("metadata_server", metadata_server),
                ("protocol", protocol), ("rdma_devices", rdma_devices),
            )
        }  # fmt: skip
        sizes = parse_bytes("memory", memory), parse_bytes("buffer", buffer)
        with needed("mooncake", "a store in Mooncake"):
            from mooncake.store import MooncakeDistributedStore
        client = MooncakeDistributedStore()
        where = texts["local_hostname"], texts["metadata_server"]
        code = client.setup(*where, *sizes, texts["protocol"], texts["rdma_devices"], texts["master"])
        if code:
            raise StoreError(f"Mooncake Store at {master} was not set up: code {code}")
        return cls(client)

    def __repr__(self) -> str:
        return "<MooncakeStore>"

    def node_of(self, key: bytes) -> str:
        return "mooncake"

    def exist(self, keys: Sequence[bytes], timeout_s: float) -> list[bool]:
        found = self._client.batch_is_exist([_name(key) for key in keys]) if keys else []
        if any(code < 0 for code in found):
            raise StoreError(f"Mooncake Store does not say what exists: {min(found)}")
        return [code == 1 for code in found]

    def get(self, key: bytes, timeout_s: float) -> bytes | None:
        """An error and a missing object are the same there."""
        found: bytes = self._client.get(_name(key))
        return found or None

    def put(self, key: bytes, value: memoryview, timeout_s: float) -> None:
        code = self._client.put(_name(key), value)
        if code:
            raise StoreError(f"Mooncake Store has not stored an object of {len(value)} bytes: code {code}")

    def remove(self, key: bytes, timeout_s: float) -> None:
        """Also if it is being read: what reads it compares what it has read."""
        name = _name(key)
        code = self._client.remove(name, True)
        if code and self._client.batch_is_exist([name]) != [0]:
            raise StoreError(f"Mooncake Store has not removed an object: code {code}")

    def close(self) -> None:
        """Does nothing: who made the client closes it, since that ends what others read from this machine."""


def _name(key: bytes) -> str:
    return f"aoffload:{key.hex()}"
