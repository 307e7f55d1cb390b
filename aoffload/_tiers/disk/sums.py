"""Sums of records and of data. They find accidents, but they do not stop a program that writes to the files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from ..._common.extras import needed
from ..._transfer.turns import give_way, wait_precisely

with needed("disk", "a disk tier"):
    import xxhash

Found = TypeVar("Found")

DATA_SUM_BYTES = 16


def record_sum(record: Any, slot: int) -> int:
    """xxh3-64 of the bytes of a record in `slot`. A record that was written to another slot has another sum."""
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
    """Threads that take sums while other threads wait for the disk. At 10 GB/s, sums would add a fifth to the time of a
    fast disk.

    With 0 threads, `start` does the work at once. The work only reads memory, so it always ends.
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
