"""Host memory that several ranks share.

Ranks that hold the same bytes on their devices store each block once, and every rank loads it. One process makes the
memory: the one that decides, or the first worker of vLLM. It passes the path of its open file (`/proc/PID/fd/N`) to the
other ranks, which map it. The file has no name in any directory, so a killed process leaves nothing behind: the system
frees the memory when the last process has unmapped it.

    rows       num_host_blocks * block_bytes     the blocks, as in private host memory
    checksums  num_host_blocks * DIGEST_BYTES    one per block, because a rank verifies what another one has stored
"""

from __future__ import annotations

import mmap
import os
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

from ..errors import ConfigError

DIGEST_BYTES = 16


class SharedMemory:
    """Memory of `num_bytes` for several processes of one user, until `close`."""

    def __init__(self, num_bytes: int) -> None:
        if not hasattr(os, "memfd_create"):
            raise ConfigError("num_replicas", "sharing host memory needs Linux (memfd_create)")
        self._file = os.memfd_create("aoffload", os.MFD_CLOEXEC)
        self.path = f"/proc/{os.getpid()}/fd/{self._file}"
        """Where the memory can be mapped, until `close`."""
        try:
            # Shared memory counts only once it is written to. So ask for as much private memory, which the system
            # refuses at once if there can never be that much.
            mmap.mmap(-1, max(1, num_bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close()
            os.ftruncate(self._file, num_bytes)
        except (OSError, OverflowError, MemoryError) as error:
            self.close()
            size = f"{num_bytes / 2**30:.1f} GiB of host memory"
            raise ConfigError("num_host_blocks", f"the system refuses {size} ({error})") from None

    def close(self) -> None:
        """Let no further process map it. Mappings stay."""
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)


def shared_size(num_blocks: int, block_bytes: int) -> int:
    """Bytes of the memory for `num_blocks` host blocks, with their checksums."""
    return num_blocks * (block_bytes + DIGEST_BYTES)


def map_rows(path: str, num_blocks: int, block_bytes: int, *advice: str) -> NDArray[np.uint8]:
    """The blocks in the memory at `path`: `uint8 [num_blocks, block_bytes]`."""
    rows, _ = _mapped(path, num_blocks, block_bytes, advice)
    return rows


def map_checksums(path: str, num_blocks: int, block_bytes: int) -> NDArray[np.uint8]:
    """The checksums in the memory at `path`: `uint8 [num_blocks, DIGEST_BYTES]`."""
    _, digests = _mapped(path, num_blocks, block_bytes, ())
    return digests


def allocated_bytes(path: str) -> int:
    """Bytes of the memory at `path` that some process has written to, or locked, already."""
    with suppress(OSError):
        return os.stat(path).st_blocks * 512
    return 0


def _mapped(
    path: str, num_blocks: int, block_bytes: int, advice: tuple[str, ...]
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    try:
        with open(path, "r+b", buffering=0) as file:
            memory = mmap.mmap(file.fileno(), max(1, shared_size(num_blocks, block_bytes)))
    except (OSError, ValueError, OverflowError) as error:
        raise ConfigError("num_replicas", f"the shared host memory cannot be mapped ({error})") from None
    for name in ("MADV_HUGEPAGE", *advice):
        with suppress(AttributeError, OSError):  # another kernel: only slower
            memory.madvise(getattr(mmap, name))
    size = num_blocks * block_bytes
    rows = np.frombuffer(memory, np.uint8, size).reshape(num_blocks, block_bytes)
    digests = np.frombuffer(memory, np.uint8, num_blocks * DIGEST_BYTES, size).reshape(num_blocks, DIGEST_BYTES)
    return rows, digests
