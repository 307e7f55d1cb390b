"""Objects in Mooncake Store, which keeps them in the memory of the participating machines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

from ...._common.arguments import check_has, check_text
from ...._common.extras import needed
from ...._config.tiers import parse_bytes
from ....errors import ConfigError, StoreError


class MooncakeStore:
    """An `ObjectStore` in Mooncake Store. `client` is a `mooncake.store.MooncakeDistributedStore` after its `setup`;
    `from_addresses` makes one. Needs a package that contains `mooncake.store`, such as `mooncake-transfer-engine`.

    Its calls have no time-out. A call to a machine that hangs returns after half a minute, and blocks its thread until
    then. A second put of a key does not replace the object, which suffices for cells.
    """

    def __init__(self, client: Any) -> None:
        check_has("client", client, "store of Mooncake", "put get batch_is_exist remove close", ConfigError)
        self._client = client

    @classmethod
    def from_addresses(
        cls, master: str, local_hostname: str, *, metadata_server: str = "P2PHANDSHAKE", protocol: str = "tcp",
        rdma_devices: str = "", memory: int | str = "1GiB", buffer: int | str = "64MiB",
    ) -> Self:  # fmt: skip
        """Join the store with `memory` bytes, through the master at `master` (host and port). Raises `StoreError` if
        the setup fails."""
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
            raise StoreError(f"the setup of Mooncake Store at {master} failed: code {code}")
        return cls(client)

    def __repr__(self) -> str:
        return "<MooncakeStore>"

    def node_of(self, key: bytes) -> str:
        return "mooncake"

    def exist(self, keys: Sequence[bytes], timeout_s: float) -> list[bool]:
        found = self._client.batch_is_exist([_name(key) for key in keys]) if keys else []
        if any(code < 0 for code in found):
            raise StoreError(f"Mooncake Store failed to check which objects exist: code {min(found)}")
        return [code == 1 for code in found]

    def get(self, key: bytes, timeout_s: float) -> bytes | None:
        """Also returns None for an error, because the client does not distinguish an error from a missing object."""
        found: bytes = self._client.get(_name(key))
        return found or None

    def put(self, key: bytes, value: memoryview, timeout_s: float) -> None:
        code = self._client.put(_name(key), value)
        if code:
            raise StoreError(f"Mooncake Store failed to store an object of {len(value)} bytes: code {code}")

    def remove(self, key: bytes, timeout_s: float) -> None:
        """Removes the object even while other clients read it. That is safe, because a reader verifies each object."""
        name = _name(key)
        code = self._client.remove(name, True)
        if code and self._client.batch_is_exist([name]) != [0]:
            raise StoreError(f"Mooncake Store failed to remove an object: code {code}")

    def close(self) -> None:
        """Does nothing. The owner of the client closes it, because closing ends the reads of other machines from this
        one."""


def _name(key: bytes) -> str:
    return f"aoffload:{key.hex()}"
