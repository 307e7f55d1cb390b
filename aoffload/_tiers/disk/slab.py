"""The slab: one file of slots, each of them the size of a block, and nothing else in it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from .files import DiskFile
from .neighbours import Stretch, stretch_at

__all__ = ["READ_BYTES", "Slab", "WRITE_BYTES"]


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
