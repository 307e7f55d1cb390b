"""The configuration of the tiers below the host and of the eviction, and sizes written as text.

DiskTier     the directory, the size on the disk, and the daily writes
RemoteTier   a store of objects that others share, with time-outs and a rate
eviction     a name, `LearnedEviction`, or a factory of eviction orders
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import Any, Protocol

import attrs

from .._common.arguments import check_bool, check_has, number_of, shown
from ..errors import ConfigError

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def parse_bytes(argument: str, value: int | str) -> int:
    """`8589934592`, `"8GiB"`, `"512 MB"` → bytes."""
    if type(value) is int:
        size: float = value
    elif isinstance(value, str):
        found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", value)
        if found is None or found[2].upper() not in _UNITS:
            raise ConfigError(argument, f"is not a size: {shown(value)} (examples: 8589934592, '8GiB', '512MB')")
        size = float(found[1]) * _UNITS[found[2].upper()]
    else:
        raise ConfigError(argument, f"must be an int or a string such as '8GiB', got {shown(value)}")
    if not 1 <= size < 2**60:
        raise ConfigError(argument, f"must be at least 1 byte and below 1 EiB, got {shown(value)}")
    return int(size)


SUPERBLOCK_BYTES = 4096
ROUNDING_BYTES = 4 * 4096
"""Maximum bytes that a file system adds by rounding up: two files and their directory."""
RECORD_BYTES = 144
"""Size of a record of the slot table, without the tokens of its unit."""
TOKEN_BYTES = 4
MAX_SLOTS = 2**31 - 1
MAX_FLUSH_S = 1e9


def record_bytes(unit_tokens: int) -> int:
    """Bytes of one record of the slot table, for units of `unit_tokens` tokens."""
    return -(-(RECORD_BYTES + unit_tokens * TOKEN_BYTES) // 8) * 8


def num_slots_in(size_bytes: int, block_bytes: int, unit_tokens: int) -> int:
    """Blocks of `block_bytes` that fit into `size_bytes` on a disk, with their records. `ConfigError("size")` if
    none fits."""
    found = (size_bytes - SUPERBLOCK_BYTES - ROUNDING_BYTES) // (block_bytes + record_bytes(unit_tokens))
    if found < 1:
        raise ConfigError("size", f"{size_bytes} bytes are too few for one block of {block_bytes} bytes")
    return min(found, MAX_SLOTS)


def _path(value: Any) -> str:
    try:
        found = os.fspath(value)
        os.fsencode(found)
    except (TypeError, UnicodeEncodeError):  # a lone surrogate, which names no file
        found = None
    if not isinstance(found, str) or not found or "\0" in found:
        raise ConfigError("path", f"must be the path of a directory, got {shown(value)}")
    return found


def _size(_: object, attribute: Any, value: Any) -> None:
    parse_bytes(attribute.name, value)


def _seconds(_: object, attribute: Any, value: object) -> None:
    seconds = number_of(value)
    if seconds is None or not 0 <= seconds <= MAX_FLUSH_S:
        raise ConfigError(attribute.name, f"must be a number of seconds up to 1e9, got {shown(value)}")


@attrs.frozen
class DiskTier:
    """A disk tier below host memory, in the directory `path`. Only one process at a time may use the directory.

    `size` (bytes, or text such as "200GiB") is the maximum size on the disk, and is allocated at the start.
    `daily_writes` limits the bytes written within any 24 hours; None: `size`. On closing, the blocks of host memory
    that the disk lacks are written, for at most `close_flush_s` seconds; 0 writes none. The start fails if the files
    are not open within `open_timeout_s` seconds. See docs/disk.md.
    """

    path: str = attrs.field(converter=_path)
    size: int | str = attrs.field(validator=_size)
    daily_writes: int | str | None = attrs.field(default=None, validator=attrs.validators.optional(_size))
    close_flush_s: float = attrs.field(default=5.0, validator=_seconds)
    open_timeout_s: float = attrs.field(default=60.0, validator=_seconds)

    @property
    def size_bytes(self) -> int:
        return parse_bytes("size", self.size)

    @property
    def daily_bytes(self) -> int:
        """Bytes that may be written within 24 hours."""
        return self.size_bytes if self.daily_writes is None else parse_bytes("daily_writes", self.daily_writes)

    def num_slots(self, block_bytes: int, unit_tokens: int) -> int:
        """Number of blocks of `block_bytes` that fit on the disk, in units of `unit_tokens` tokens. Raises
        `ConfigError("size")` if none fits."""
        return num_slots_in(self.size_bytes, block_bytes, unit_tokens)


MAX_CELL_BYTES = 4 * 2**20
"""Default maximum size of a cell, unless one unit is larger."""
MIN_SECRET_BYTES = 16
MAX_SECONDS = 3600.0


def cell_units(unit_bytes: int, max_bytes: int = MAX_CELL_BYTES) -> int:
    """Units of one cell, a power of two: as many as fit into `max_bytes`, at least one. `unit_bytes`: on one rank."""
    return 1 << max(0, (max_bytes // max(1, unit_bytes)).bit_length() - 1)


class ObjectStore(Protocol):
    """A store of immutable objects under keys of 32 bytes. Other processes may share it.

    Several threads call the methods at the same time. A call may block for about `timeout_s` seconds at most. A call
    that fails raises `StoreError`; another exception, or an answer of another type, counts as a failure, too. An object
    may vanish at any time, because the store evicts objects by its own rules.
    """

    def exist(self, keys: Sequence[bytes], timeout_s: float) -> Sequence[bool]:
        """For each key, whether the store has its object. All keys belong to one node (see `node_of`)."""
        ...

    def get(self, key: bytes, timeout_s: float) -> bytes | memoryview | None:
        """The object; None if there is none. The caller copies a view before it verifies the content, because the store
        may use its buffer again. The caller does not copy `bytes`."""
        ...

    def put(self, key: bytes, value: memoryview, timeout_s: float) -> None:
        """Store an object, and replace an older one if the store can do that. After the call, the caller reuses the
        memory of `value`."""
        ...

    def remove(self, key: bytes, timeout_s: float) -> None:
        """Remove the object if there is one."""
        ...

    def node_of(self, key: bytes) -> str:
        """The name of the node: the part of the store that has this key. If calls to a node fail, the node is disabled
        for a while. Must not block. Also called in the event loop's thread, where a `KeyboardInterrupt` or `SystemExit`
        is passed on."""
        ...

    def close(self) -> None:
        """Close all connections. Calls under way may fail."""
        ...


def _store(_: object, attribute: Any, value: Any) -> None:
    check_has(attribute.name, value, "ObjectStore", "exist get put remove node_of close", ConfigError)


def _secret(_: object, attribute: Any, value: Any) -> None:
    if type(value) is not bytes or len(value) < MIN_SECRET_BYTES:  # never shown: it may be nearly right
        raise ConfigError(attribute.name, f"must be `bytes` with a length of at least {MIN_SECRET_BYTES}, or None")


def _positive_seconds(_: object, attribute: Any, value: object) -> None:
    seconds = number_of(value)
    if seconds is None or not 0 < seconds <= MAX_SECONDS:
        raise ConfigError(attribute.name, f"must be a positive number of seconds up to 3600, got {shown(value)}")


def _rate(_: object, attribute: Any, value: Any) -> None:
    parse_bytes(attribute.name, value)


@attrs.frozen
class RemoteTier:
    """A remote tier below host memory: `store` (see `aoffload.stores`), which other machines may share.

    With a `secret` (at least 16 random bytes, the same for all processes that share the store) objects are encrypted
    and cannot be forged. Without one, a checksum detects accidental damage only, and any writer to the store can change
    the KV that a model reads.

    A query to the store takes at most `ask_timeout_s` seconds. A load or store of one cell fails after `load_timeout_s`
    or `store_timeout_s` seconds. At most `max_write_rate` bytes (a number, or text such as "64MiB") are written per
    second. A cell is one object of at most `cell_bytes`. Only whole cells hit, and only processes with the same
    `cell_bytes` share cells. See docs/remote.md.
    """

    store: ObjectStore = attrs.field(validator=_store)
    secret: bytes | None = attrs.field(default=None, validator=attrs.validators.optional(_secret), repr=False)
    ask_timeout_s: float = attrs.field(default=0.02, validator=_positive_seconds, kw_only=True)
    load_timeout_s: float = attrs.field(default=1.0, validator=_positive_seconds, kw_only=True)
    store_timeout_s: float = attrs.field(default=5.0, validator=_positive_seconds, kw_only=True)
    max_write_rate: int | str = attrs.field(default="128MiB", validator=_rate, kw_only=True)
    cell_bytes: int | str = attrs.field(default=MAX_CELL_BYTES, validator=_rate, kw_only=True)

    @property
    def max_cell_bytes(self) -> int:
        return parse_bytes("cell_bytes", self.cell_bytes)

    @property
    def write_bytes_per_s(self) -> int:
        return parse_bytes("max_write_rate", self.max_write_rate)


NAMES = ("lru", "learned")
ORDER = "add add_newer add_back remove oldest are_adjacent __iter__"
"""Methods that an order of a program must have. `asked` is not one of them, because nothing is counted for it."""


def _is_bool(_: object, attribute: Any, value: object) -> None:
    check_bool(attribute.name, value)


@attrs.frozen
class LearnedEviction:
    """Learned eviction in the host and on the disk; with `device`, also on the device."""

    device: bool = attrs.field(default=False, validator=_is_bool)


def check_eviction(value: object) -> None:
    """Raise `ConfigError("eviction")` for an invalid value. A factory makes an order here, which is checked."""
    if type(value) is str:
        if value not in NAMES:
            raise ConfigError("eviction", f"must be one of {', '.join(NAMES)}, got {shown(value)}")
    elif not isinstance(value, LearnedEviction):
        new_order(value)


def new_order(factory: object, key: str = "eviction") -> Any:
    """An order that `factory` makes. `ConfigError` names `key` if it makes none."""
    if not callable(factory):
        problem = f"must be 'lru', 'learned', a LearnedEviction or a factory of eviction orders, got {shown(factory)}"
        raise ConfigError("eviction", problem)
    try:
        order = factory()
    except Exception as error:
        raise ConfigError(key, f"could not make an eviction order: {type(error).__name__}: {error}") from error
    check_has(key, order, "factory of eviction orders", ORDER, ConfigError)
    return order
