"""The slot table: a file with the superblock and, after it, one record for each slot; and the sums of both."""

from __future__ import annotations

import errno
import struct
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import attrs
import numpy as np
from numpy.typing import NDArray

from ..._common.arguments import as_tuple, check_int
from ..._common.extras import needed
from ..._common.prefix import TOKEN_BYTES
from ..._config.tiers import SUPERBLOCK_BYTES, record_bytes
from ..._transfer.turns import give_way, wait_precisely
from ...errors import ConfigError, InvalidArgument
from .files import DiskFile, neighbours
from .plans import BlockLabel

# -- sums ------------------------------------------------------------------------------------------------------------
#
# Sums of records and of data. They detect accidental damage, but any program that writes to the files can forge them.

with needed("disk", "a disk tier"):
    import xxhash

Found = TypeVar("Found")

DATA_SUM_BYTES = 16


def record_sum(record: Any, slot: int) -> int:
    """xxh3-64 of the bytes of a record in `slot`. The sum includes the slot number, so a record copied to another slot
    is invalid."""
    found: int = xxhash.xxh3_64_intdigest(record, slot)
    return found


def data_sum(block: Any) -> bytes:
    """xxh3-128 of the bytes of a block."""
    found: bytes = xxhash.xxh3_128_digest(block)
    return found


def as_rows(sums: Sequence[bytes]) -> NDArray[np.uint8]:
    """Sums of data as `uint8 [len(sums), 16]`."""
    return np.frombuffer(b"".join(sums), dtype=np.uint8).reshape(-1, DATA_SUM_BYTES)


class SlotSums:
    """The sum of the data in each slot, as this process knows it: `uint8 [num_slots, 16]`, no object per slot.

    A slot that holds nothing has a sum of zeros, which is not accepted for any data.
    """

    def __init__(self, num_slots: int) -> None:
        self._sums = np.zeros((num_slots, DATA_SUM_BYTES), dtype=np.uint8)

    def record_all(self, slots: Sequence[int] | NDArray[np.int64], sums: NDArray[np.uint8]) -> None:
        self._sums[np.asarray(slots, dtype=np.int64)] = sums

    def forget(self, slots: Sequence[int] | NDArray[np.int64]) -> None:
        self._sums[np.asarray(slots, dtype=np.int64)] = 0

    def of(self, slots: Sequence[int]) -> list[bytes]:
        """The present sums of these slots."""
        raw = self._sums[np.asarray(slots, dtype=np.int64)].tobytes()
        return [raw[at : at + DATA_SUM_BYTES] for at in range(0, len(raw), DATA_SUM_BYTES)]

    def is_still(self, slot: int, found: bytes) -> bool:
        recorded: bytes = self._sums[slot].tobytes()
        return recorded == found


def _prepare() -> None:
    wait_precisely()
    give_way()


class SumThreads:
    """Threads that compute sums while other threads wait for the disk. At 10 GB/s, sums would add a fifth to the time
    of a fast disk.

    With 0 threads, `start` does the work immediately. The work only reads memory, so it always ends.
    """

    def __init__(self, num_threads: int) -> None:
        self._pool = ThreadPoolExecutor(num_threads, "aoffload-sums", _prepare) if num_threads else None

    def start(self, work: Callable[[], Found]) -> Callable[[], Found]:
        """Begin `work`. Returns a function that waits for its result."""
        if self._pool is None:
            found = work()
            return lambda: found
        return self._pool.submit(work).result

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()


# -- records ---------------------------------------------------------------------------------------------------------
#
# The slot table as bytes: a superblock, then one record of a fixed size for each slot.
#
#     superblock   magic, version, fingerprint, generation, number of slots, sum          4096 bytes
#     record       sum | generation, write number, component, place, position,
#                  root digest, prefix digest through this unit, prefix digest before it,
#                  xxh3-128 of the data, tokens of the unit
#
# The sum of a record covers all bytes after it and the number of its slot. A record of zeros stands for an empty slot.

FORMAT_VERSION = 1
MAGIC = b"aoffloadslots\0\0\0"
DIGEST_BYTES = 32
_SUPERBLOCK = struct.Struct("<16sQ32sQQ")
_SUM = struct.Struct("<Q")
_HEAD = struct.Struct(f"<QQHHI{DIGEST_BYTES}s{DIGEST_BYTES}s{DIGEST_BYTES}s{DATA_SUM_BYTES}s")
MAX_WIDTH = 2**16 - 1
MAX_COMPONENTS = 62
"""Components are bits of an int64 of numpy."""


@attrs.frozen
class SlotLayout:
    """The contents of the slots. A unit of `unit_tokens` tokens has `widths[component]` blocks in each component, and
    each block has a slot. Where `leading[component]` is true (full attention), a unit counts only if all units before
    it are there; in a window it always counts."""

    unit_tokens: int
    block_bytes: int
    widths: tuple[int, ...]
    leading: tuple[bool, ...]

    def __attrs_post_init__(self) -> None:
        check_int("unit_tokens", self.unit_tokens, 1, error=ConfigError)
        check_int("block_bytes", self.block_bytes, 1, error=ConfigError)
        for width in as_tuple("widths", self.widths, "integers", ConfigError):
            check_int("widths", width, 0, MAX_WIDTH, ConfigError)
        if not 0 < len(self.widths) <= MAX_COMPONENTS or len(self.leading) != len(self.widths):
            raise ConfigError("leading", f"must have an item for each of the components, {len(self.widths)}")

    def encoded(self) -> bytes:
        """Everything here as bytes, for a fingerprint."""
        components = zip(self.widths, self.leading, strict=True)
        text = ",".join(f"{width}{'l' if leading else 'w'}" for width, leading in components)
        return f"{FORMAT_VERSION} {self.unit_tokens} {self.block_bytes} {text}".encode()


class RecordFormat:
    """Encodes and decodes the records of slots with units of `unit_tokens` tokens."""

    def __init__(self, unit_tokens: int) -> None:
        self.token_bytes = unit_tokens * TOKEN_BYTES
        self.num_bytes = record_bytes(unit_tokens)
        self._padding = bytes(self.num_bytes - _SUM.size - _HEAD.size - self.token_bytes)
        self.dtype = np.dtype(
            [
                ("sum", "<u8"), ("generation", "<u8"), ("number", "<u8"), ("component", "<u2"), ("place", "<u2"),
                ("position", "<u4"), ("root", "<u8", DIGEST_BYTES // 8), ("digest", "<u8", DIGEST_BYTES // 8),
                ("before", "<u8", DIGEST_BYTES // 8), ("data_sum", "u1", DATA_SUM_BYTES),
                ("tokens", "u1", self.token_bytes), ("padding", "u1", len(self._padding)),
            ]
        )  # fmt: skip

    def encoded(self, label: BlockLabel, slot: int, generation: int, number: int, data_sum: bytes) -> bytes:
        """The record of `slot`, for a label that `check` accepts."""
        place = (generation, number, label.component, label.place, label.position)
        head = _HEAD.pack(*place, label.root, label.digest, label.before or bytes(DIGEST_BYTES), data_sum)
        body = head + label.tokens + self._padding
        return _SUM.pack(record_sum(body, slot)) + body

    def check(self, label: BlockLabel) -> None:
        """`InvalidArgument` for a label that no record can have."""
        _check_digest("root", label.root)
        _check_digest("digest", label.digest)
        if label.position:
            _check_digest("before", label.before)
        if len(label.tokens) != self.token_bytes or (label.before and not label.position):
            raise InvalidArgument("labels", f"is not a label of a unit of {self.token_bytes // TOKEN_BYTES} tokens")
        check_int("labels", label.position, 0, 2**32 - 1)

    def zeros(self, num_records: int) -> bytes:
        """Records of empty slots."""
        return bytes(num_records * self.num_bytes)

    def decoded(self, raw: Any) -> NDArray[Any]:
        """The records in `raw` as a structured array, unchecked."""
        return np.frombuffer(raw, dtype=self.dtype)

    def sound(self, raw: Any, first_slot: int, generation: int) -> NDArray[np.int64]:
        """Indices of the records in `raw` that are of `generation` and have the right sum. `first_slot`: the slot of
        the first record."""
        records = self.decoded(raw)
        candidates = np.flatnonzero((records["generation"] == generation) & (records["sum"] != 0))
        sums, view, size = records["sum"].tolist(), memoryview(raw).cast("B"), self.num_bytes
        found = [
            index
            for index in candidates.tolist()
            if sums[index] == record_sum(view[index * size + _SUM.size : (index + 1) * size], first_slot + index)
        ]
        return np.array(found, dtype=np.int64)


def _check_digest(name: str, found: bytes) -> None:
    if len(found) != DIGEST_BYTES:
        raise InvalidArgument("labels", f"{name} must have {DIGEST_BYTES} bytes, has {len(found)}")


@attrs.frozen
class Superblock:
    """Identity of a table. Records of another generation do not count."""

    fingerprint: bytes
    generation: int
    num_slots: int

    def encoded(self) -> bytes:
        body = _SUPERBLOCK.pack(MAGIC, FORMAT_VERSION, self.fingerprint, self.generation, self.num_slots)
        return (body + _SUM.pack(record_sum(body, 0))).ljust(SUPERBLOCK_BYTES, b"\0")

    @classmethod
    def decoded(cls, raw: bytes) -> Superblock | None:
        """The superblock in `raw`; None for other bytes, such as a superblock that was written in part."""
        if len(raw) < SUPERBLOCK_BYTES:
            return None
        body = raw[: _SUPERBLOCK.size]
        magic, version, fingerprint, generation, num_slots = _SUPERBLOCK.unpack(body)
        (found,) = _SUM.unpack_from(raw, _SUPERBLOCK.size)
        if (magic, version, found) != (MAGIC, FORMAT_VERSION, record_sum(body, 0)):
            return None
        return cls(fingerprint, generation, num_slots)


# -- table -----------------------------------------------------------------------------------------------------------


class SlotTable:
    """Reads and writes records. Writes of records are not synced, because a lost or torn record counts as missing.
    Writes of the superblock are synced, and so are erasures that have to survive a power failure.

    A short write raises `OSError`, as a failed write does. Only one thread at a time may call a method that syncs,
    because the system reports an error of an earlier write only to the first thread that syncs.
    """

    def __init__(self, file: DiskFile, form: RecordFormat) -> None:
        self._file = file
        self.form = form

    def num_bytes(self, num_slots: int) -> int:
        return SUPERBLOCK_BYTES + num_slots * self.form.num_bytes

    def holds(self, num_slots: int) -> bool:
        """Whether the file has the length for `num_slots` slots."""
        return not self.num_more(num_slots)

    def num_more(self, num_slots: int) -> int:
        """Bytes by which the file has to grow for `num_slots` slots; negative if it has to shrink."""
        return self.num_bytes(num_slots) - self._file.num_bytes

    def superblock(self) -> Superblock | None:
        """The superblock at the start of the file; None if there is none."""
        raw = bytearray(SUPERBLOCK_BYTES)
        return Superblock.decoded(bytes(raw)) if self._file.read(0, [raw]) == len(raw) else None

    def keep(self, num_slots: int) -> None:
        """Make sure that the disk has space for the whole file."""
        self._file.allocate(self.num_bytes(num_slots))

    def drop(self) -> None:
        """Drop everything."""
        self._file.allocate(0)

    def start_empty(self, superblock: Superblock) -> None:
        """Allocate, after `drop`. The superblock is written last, with a new generation. So no earlier record counts,
        whichever of these writes a power failure undoes."""
        self._file.allocate(self.num_bytes(superblock.num_slots))
        self.replace(superblock)

    def replace(self, superblock: Superblock) -> None:
        """Write the superblock. On return, it survives a power failure."""
        self._write(0, superblock.encoded())
        self._file.sync()

    def write(self, first_slot: int, records: Sequence[bytes]) -> None:
        """Write the records of neighbouring slots. After an `OSError`, records may be written in part; their sums are
        wrong then."""
        self._write(self.num_bytes(first_slot), b"".join(records))

    def erase(self, first_slot: int, num_slots: int) -> None:
        """Write records of empty slots."""
        self._write(self.num_bytes(first_slot), self.form.zeros(num_slots))

    def erase_for_good(self, slots: Sequence[int]) -> None:
        """Erase the records of any slots, and sync: on return, the erasure survives a power failure."""
        for at in neighbours(slots):
            self.erase(slots[at.start], at.stop - at.start)
        self._file.sync()

    def drop_for_good(self) -> None:
        """Drop everything, and sync: on return, that survives a power failure."""
        self.drop()
        self._file.sync()

    def _write(self, offset: int, data: bytes) -> None:
        if self._file.write(offset, [data]) != len(data):
            raise OSError(errno.EIO, "the write was cut short")

    def sound(self, first_slot: int, num_slots: int, generation: int) -> tuple[NDArray[np.int64], NDArray[Any]]:
        """The slots among these whose record is of `generation` and has the right sum, and those records. Records that
        cannot be read are left out."""
        raw = bytearray(num_slots * self.form.num_bytes)
        try:
            self._file.read(self.num_bytes(first_slot), [raw])
        except OSError:
            raw = bytearray(len(raw))
        indices = self.form.sound(raw, first_slot, generation)
        return indices + first_slot, self.form.decoded(raw)[indices]
