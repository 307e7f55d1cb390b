"""The remote tier as a configuration names it: a store of objects that others share, and what may be asked of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import attrs

from .arguments import check_has, number_of, shown
from .errors import ConfigError
from .sizes import parse_bytes

__all__ = ["MAX_CELL_BYTES", "ObjectStore", "RemoteTier", "cell_units"]

MAX_CELL_BYTES = 4 * 2**20
"""What a cell has at most by default, unless one unit has more."""
MIN_SECRET_BYTES = 16
MAX_SECONDS = 3600.0


def cell_units(unit_bytes: int, max_bytes: int = MAX_CELL_BYTES) -> int:
    """Units of one cell, a power of two: as many as fit into `max_bytes`, at least one. `unit_bytes`: of one rank."""
    return 1 << max(0, (max_bytes // max(1, unit_bytes)).bit_length() - 1)


class ObjectStore(Protocol):
    """A store of immutable objects under keys of 32 bytes, which others share.

    Calls come from several threads at a time and may block, each for about `timeout_s` seconds at most. They raise
    `StoreError` if they fail; another exception, or an answer of another type, counts as a failure, too. An object may
    vanish at any time: the store evicts what it likes.
    """

    def exist(self, keys: Sequence[bytes], timeout_s: float) -> Sequence[bool]:
        """For each of the keys, all of one node, whether there is an object."""
        ...

    def get(self, key: bytes, timeout_s: float) -> bytes | memoryview | None:
        """The object; None if there is none. A view is copied before it is proved: it may be of a buffer that is used
        again. `bytes` are not copied."""
        ...

    def put(self, key: bytes, value: memoryview, timeout_s: float) -> None:
        """Store an object, in place of an older one if the store can do that. `value` is the caller's again
        afterwards."""
        ...

    def remove(self, key: bytes, timeout_s: float) -> None:
        """Remove the object if there is one."""
        ...

    def node_of(self, key: bytes) -> str:
        """Which part of the store has this key: what fails together is left alone together. Does not block. Also called
        in the event loop's thread, where a `KeyboardInterrupt` or `SystemExit` is passed on."""
        ...

    def close(self) -> None:
        """Close all connections. Calls under way may fail."""
        ...


def _store(_: object, attribute: Any, value: Any) -> None:
    check_has(attribute.name, value, "ObjectStore", "exist get put remove node_of close", ConfigError)


def _secret(_: object, attribute: Any, value: Any) -> None:
    if type(value) is not bytes or len(value) < MIN_SECRET_BYTES:  # never shown: it may be nearly right
        raise ConfigError(attribute.name, f"must be `bytes`, at least {MIN_SECRET_BYTES} of them, or None")


def _seconds(_: object, attribute: Any, value: object) -> None:
    seconds = number_of(value)
    if seconds is None or not 0 < seconds <= MAX_SECONDS:
        raise ConfigError(attribute.name, f"must be a positive number of seconds up to 3600, got {shown(value)}")


def _rate(_: object, attribute: Any, value: Any) -> None:
    parse_bytes(attribute.name, value)


@attrs.frozen
class RemoteTier:
    """A remote tier below host memory: `store` (see `aoffload.stores`), which other machines may share.

    With a `secret` (at least 16 random bytes, the same for all who share the store) objects are encrypted and cannot
    be forged; without, a sum finds accidents only, and whoever writes to the store decides what a model reads. Asking
    what is there takes at most `ask_timeout_s`; a load or store of one cell that takes longer than `load_timeout_s` or
    `store_timeout_s` has failed. At most `max_write_rate` bytes (a number, or text such as "64MiB") are written a
    second. What is stored as one object, a cell, has at most `cell_bytes`: only whole cells hit, and only those who
    have the same size share any. See docs/remote.md.
    """

    store: ObjectStore = attrs.field(validator=_store)
    secret: bytes | None = attrs.field(default=None, validator=attrs.validators.optional(_secret), repr=False)
    ask_timeout_s: float = attrs.field(default=0.02, validator=_seconds, kw_only=True)
    load_timeout_s: float = attrs.field(default=1.0, validator=_seconds, kw_only=True)
    store_timeout_s: float = attrs.field(default=5.0, validator=_seconds, kw_only=True)
    max_write_rate: int | str = attrs.field(default="128MiB", validator=_rate, kw_only=True)
    cell_bytes: int | str = attrs.field(default=MAX_CELL_BYTES, validator=_rate, kw_only=True)

    @property
    def max_cell_bytes(self) -> int:
        return parse_bytes("cell_bytes", self.cell_bytes)

    @property
    def write_bytes_per_s(self) -> int:
        return parse_bytes("max_write_rate", self.max_write_rate)
