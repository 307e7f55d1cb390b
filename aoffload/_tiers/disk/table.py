"""The slot table: a file with the superblock and, after it, one record for each slot."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..._config.tiers import SUPERBLOCK_BYTES
from .files import DiskFile, neighbours
from .records import RecordFormat, Superblock


class SlotTable:
    """Reads and writes records. Writes of records are not synced, because a lost or torn record counts as missing.
    Writes of the superblock are synced, and so are erasures that have to outlive a loss of power.

    A write that is cut short raises `OSError`, as a write that fails does. Only one thread at a time may call a method
    that syncs, because the system reports an error of an earlier write only to the first thread that syncs.
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
        whichever of these writes a loss of power undoes."""
        self._file.allocate(self.num_bytes(superblock.num_slots))
        self.replace(superblock)

    def replace(self, superblock: Superblock) -> None:
        """Write the superblock. On return, it outlives a loss of power."""
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
        """Erase the records of any slots, and sync: on return, the erasure outlives a loss of power."""
        for at in neighbours(slots):
            self.erase(slots[at.start], at.stop - at.start)
        self._file.sync()

    def drop_for_good(self) -> None:
        """Drop everything, and sync: on return, that outlives a loss of power."""
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

    def close(self) -> None:
        self._file.close()
