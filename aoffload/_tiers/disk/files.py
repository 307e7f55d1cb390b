"""The file system as the disk tier needs it, and the slab: blocks copied between slots and host memory.

`posix` implements the protocols for the operating system, `aoffload.testing` for a simulated disk.
"""

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
        """The length of the file."""
        ...

    def allocate(self, num_bytes: int) -> None:
        """Make the file `num_bytes` long, with space on the disk for all of it. New bytes are zeros."""
        ...

    def write(self, offset: int, buffers: Sequence[Any]) -> int:
        """Write `buffers` one after the other. Returns the number of bytes written, which may be fewer."""
        ...

    def read(self, offset: int, buffers: Sequence[Any]) -> int:
        """Fill `buffers` one after the other. Returns the number of bytes read, which may be fewer."""
        ...

    def sync(self) -> None:
        """On return, everything written and the length of the file outlive a loss of power."""
        ...

    def close(self) -> None: ...


class DiskDirectory(Protocol):
    """A directory that one process has to itself until it closes it."""

    def open(self, name: str) -> DiskFile:
        """The file `name`; made, and empty, if it was missing."""
        ...

    def make_direct(self, file: DiskFile, block_bytes: int, address: int) -> DiskFile:
        """The same file, for blocks of `block_bytes` in memory at `address`. It goes past the page cache if that works
        for them."""
        ...

    def close(self) -> None:
        """Let another process have the directory. Close its files before."""
        ...


MAX_BUFFERS = 1024
"""Maximum buffers of one call: IOV_MAX of Linux."""


@attrs.frozen
class Stretch:
    """Blocks `[first, first + num_blocks)` of a job, in neighbouring slots from `slot` on."""

    first: int
    num_blocks: int
    slot: int
    host: tuple[slice, ...]
    """The rows of host memory, in the order of the slots."""

    @property
    def stop(self) -> int:
        return self.first + self.num_blocks


def stretch_at(slots: Sequence[int], host_ids: Sequence[int], first: int, most: int) -> Stretch:
    """The blocks that move in one call with block `first`, at most `most`. Works on lists of integers, because arrays
    would take too long for so few, compared with a fast disk."""
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
    """The parts of a job with neighbouring slots."""
    first = 0
    for at in range(1, len(slots) + 1):
        if at == len(slots) or slots[at] != slots[at - 1] + 1:
            yield slice(first, at)
            first = at


READ_BYTES = 4 * 2**20
"""Maximum bytes of one read. The blocks of a read are verified beside the next read, while the processor has them in
its cache."""
WRITE_BYTES = 32 * 2**20
"""Maximum bytes of one write. Sums of small blocks, taken beside it, hold the interpreter's lock. The thread that
writes waits for that lock once in each call."""


class Slab:
    """Moves blocks between slots and `host`, the host memory: `uint8 [num_host_blocks, block_bytes]`, contiguous.

    Slot `s` is at byte `s * block_bytes`, so neighbours move in one call. There is no buffer in between.
    """

    def __init__(self, file: DiskFile, host: NDArray[np.uint8]) -> None:
        self._file = file
        self._host = host
        self._block_bytes = int(host.shape[1])
        self.num_host = len(host)

    def stretch_at(self, slots: Sequence[int], host_ids: Sequence[int], first: int, call_bytes: int) -> Stretch:
        """The blocks that move in one call with block `first` of a job: at most `call_bytes`, but at least one
        block."""
        return stretch_at(slots, host_ids, first, max(1, call_bytes // self._block_bytes))

    def write(self, stretch: Stretch) -> int:
        """Write one stretch. Returns the number of whole blocks that were written. Raises `OSError`."""
        written = self._file.write(stretch.slot * self._block_bytes, [self._host[part] for part in stretch.host])
        return written // self._block_bytes

    def read(self, stretch: Stretch) -> int:
        """Read one stretch. Returns the number of whole blocks that were read. Raises `OSError`."""
        found = self._file.read(stretch.slot * self._block_bytes, [self._host[part] for part in stretch.host])
        return found // self._block_bytes

    def block(self, host_id: int) -> NDArray[np.uint8]:
        found: NDArray[np.uint8] = self._host[host_id]
        return found

    def close(self) -> None:
        self._file.close()
