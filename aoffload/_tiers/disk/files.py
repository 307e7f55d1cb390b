"""What the disk tier needs of a file system. That of the operating system and a simulated one offer it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

__all__ = ["DiskDirectory", "DiskFile"]


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
