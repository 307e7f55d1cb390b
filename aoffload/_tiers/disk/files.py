"""What the disk tier needs of a file system. That of the operating system and a simulated one offer it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import attrs
import numpy as np
from numpy.typing import NDArray


class DiskFile(Protocol):
    """A file that is read and written at offsets, by any thread. Every call may raise `OSError`."""

    @property
    def num_bytes(self) -> int:
        """How long it is."""
        ...

    def allocate(self, num_bytes: int) -> None:
        """Make it `num_bytes` long, with space on the disk for all of it; what is new reads as zeros."""
        ...

    def write(self, offset: int, buffers: Sequence[Any]) -> int:
        """Write `buffers` one behind the other; how many bytes were written, which may be fewer."""
        ...

    def read(self, offset: int, buffers: Sequence[Any]) -> int:
        """Fill `buffers` one after the other; how many bytes were read, which may be fewer."""
        ...

    def sync(self) -> None:
        """Return when everything written, and the length, would outlive a loss of power."""
        ...

    def close(self) -> None: ...


class DiskDirectory(Protocol):
    """A directory that one process has for itself, until it is closed."""

    def open(self, name: str) -> DiskFile:
        """The file `name` as it is, or empty if there was none."""
        ...

    def make_direct(self, file: DiskFile, block_bytes: int, address: int) -> DiskFile:
        """The same file for blocks of `block_bytes` in memory at `address`: past the page cache where that works."""
        ...

    def close(self) -> None:
        """Let another process have it. Files are closed before."""
        ...


MAX_BUFFERS = 1024
"""Of one call: IOV_MAX of Linux."""


@attrs.frozen
class Stretch:
    """Blocks `[first, first + num_blocks)` of a job. Their slots begin at `slot` and follow each other."""

    first: int
    num_blocks: int
    slot: int
    host: tuple[slice, ...]
    """Where they are in host memory, in the order of their slots."""

    @property
    def stop(self) -> int:
        return self.first + self.num_blocks


def stretch_at(slots: Sequence[int], host_ids: Sequence[int], first: int, most: int) -> Stretch:
    """The blocks that move in one call with block `first`, at most `most`. Plain integers, in lists: for so few, arrays
    would take longer than a fast disk leaves time for."""
    at, stop = first, min(first + most, len(slots))
    buffers, begin = list[slice](), host_ids[first]
    while (at := at + 1) < stop and slots[at] == slots[at - 1] + 1:
        if host_ids[at] != host_ids[at - 1] + 1:
            if len(buffers) == MAX_BUFFERS - 1:
                break
            buffers.append(slice(begin, host_ids[at - 1] + 1))
            begin = host_ids[at]
    buffers.append(slice(begin, host_ids[at - 1] + 1))
    return Stretch(first, at - first, slots[first], tuple(buffers))


def neighbours(slots: Sequence[int]) -> Iterator[slice]:
    """The parts of a job whose slots follow each other."""
    first = 0
    for at in range(1, len(slots) + 1):
        if at == len(slots) or slots[at] != slots[at - 1] + 1:
            yield slice(first, at)
            first = at


READ_BYTES = 4 * 2**20
"""Bytes of a call that reads: what one has brought is compared beside the next, while the processor has it cached."""
WRITE_BYTES = 32 * 2**20
"""Bytes of a call that writes. Sums of small blocks, taken beside it, keep the interpreter's lock, for which the thread
that writes waits once a call."""


class Slab:
    """Moves blocks between slots and `host`, the host memory: `uint8 [num_host_blocks, block_bytes]`, contiguous.

    Slot `s` is at byte `s * block_bytes`, so that neighbours are one call. Straight: no buffer lies between them.
    """

    def __init__(self, file: DiskFile, host: NDArray[np.uint8]) -> None:
        self._file = file
        self._host = host
        self._block_bytes = int(host.shape[1])
        self.num_host = len(host)

    def stretch_at(self, slots: Sequence[int], host_ids: Sequence[int], first: int, call_bytes: int) -> Stretch:
        """The blocks that move in one call with block `first` of a job, of `call_bytes` at most or one block."""
        return stretch_at(slots, host_ids, first, max(1, call_bytes // self._block_bytes))

    def write(self, stretch: Stretch) -> int:
        """Write one stretch; how many whole blocks of it were written. Raises `OSError`."""
        written = self._file.write(stretch.slot * self._block_bytes, [self._host[part] for part in stretch.host])
        return written // self._block_bytes

    def read(self, stretch: Stretch) -> int:
        """Read one stretch; how many whole blocks of it were read. Raises `OSError`."""
        found = self._file.read(stretch.slot * self._block_bytes, [self._host[part] for part in stretch.host])
        return found // self._block_bytes

    def block(self, host_id: int) -> NDArray[np.uint8]:
        found: NDArray[np.uint8] = self._host[host_id]
        return found

    def close(self) -> None:
        self._file.close()
