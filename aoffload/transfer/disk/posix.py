"""Files of the operating system: locked, allocated, and read and written past the page cache where that works."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import stat
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import ConfigError
from .files import DiskFile

__all__ = ["PosixDirectory", "PosixFile"]

LOCK = "lock"
ALIGNMENTS = (512, 4096)
"""What offset, length and address of a direct call have to be a multiple of: the first that works is taken."""
_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_FILE = os.O_RDWR | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0)


class PosixDirectory:
    """The directory at `path`, made if it is missing, for this process alone: mode 0700, locked with `flock`.

    `ConfigError("path")` where another process has it, where others may enter it, or where it cannot be used at all.
    A directory that was there keeps its mode, so that a mistaken path changes nothing.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._process_id = os.getpid()
        try:
            self._make()
            self._lock = os.open(self.path / LOCK, _FILE | os.O_CREAT, 0o600)
        except OSError as error:
            raise ConfigError("path", f"{self.path} cannot be used: {error.strerror or error}") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock)
            if error.errno != errno.EWOULDBLOCK:
                raise ConfigError("path", f"{self.path} cannot be locked: {error.strerror or error}") from error
            raise ConfigError("path", f"{self.path} is in use by another process, or by this one") from None

    def _make(self) -> None:
        with suppress(FileExistsError):
            self.path.mkdir(mode=0o700, parents=True)
        found = self.path.stat()
        if not stat.S_ISDIR(found.st_mode):
            raise ConfigError("path", f"{self.path} is no directory")
        if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & _OTHERS:
            raise ConfigError("path", f"{self.path} must be this user's alone: chown it, and chmod it to 0700")

    def open(self, name: str) -> PosixFile:
        return PosixFile(os.open(self.path / name, _FILE | os.O_CREAT, 0o600))

    def make_direct(self, file: DiskFile, block_bytes: int, address: int) -> DiskFile:
        """`file` with O_DIRECT, if `block_bytes` and `address` are aligned as a trial on the file finds that they have
        to be; else through the page cache, from which every block is dropped again."""
        assert isinstance(file, PosixFile)
        alignment = _alignment_of(file)
        if alignment and not block_bytes % alignment and not address % alignment:
            file.set_direct(True)
        else:
            file.drop_behind = True
        return file

    def close(self) -> None:
        if os.getpid() == self._process_id:  # a fork has inherited the lock: it neither keeps it nor gives it away
            with suppress(OSError):
                fcntl.flock(self._lock, fcntl.LOCK_UN)
        os.close(self._lock)

    def __repr__(self) -> str:
        return f"<PosixDirectory {self.path}>"


class PosixFile:
    """A file by its descriptor. The system's calls let go of the interpreter lock."""

    MAX_BEHIND = 8

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.is_direct = False
        self.drop_behind = False
        """Whether what was written or read is dropped from the page cache."""
        self._behind: deque[tuple[int, int]] = deque()

    @property
    def num_bytes(self) -> int:
        return os.fstat(self._descriptor).st_size

    def allocate(self, num_bytes: int) -> None:
        before = self.num_bytes
        try:
            os.ftruncate(self._descriptor, min(before, num_bytes))
            if num_bytes:
                os.posix_fallocate(self._descriptor, 0, num_bytes)
        except OSError:
            with suppress(OSError):
                os.ftruncate(self._descriptor, min(before, num_bytes))  # give back what was allocated in vain
            raise

    def write(self, offset: int, buffers: Sequence[Any]) -> int:
        written = os.pwritev(self._descriptor, buffers, offset)
        if self.drop_behind:
            self._drop(offset, written)
        return written

    def read(self, offset: int, buffers: Sequence[Any]) -> int:
        found = os.preadv(self._descriptor, buffers, offset)
        if self.drop_behind:
            self._drop(offset, found)
        return found

    def sync(self) -> None:
        os.fsync(self._descriptor)

    def close(self) -> None:
        os.close(self._descriptor)

    def set_direct(self, on: bool) -> None:
        """Go past the page cache from now on. `OSError` where the file system cannot."""
        flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
        direct = getattr(os, "O_DIRECT", 0)
        if not direct:
            raise OSError(errno.EINVAL, "this system has no O_DIRECT")
        fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags | direct if on else flags & ~direct)
        self.is_direct = on

    def _drop(self, offset: int, num_bytes: int) -> None:
        """Drop these bytes from the page cache. Written ones are clean only later: the call starts that, and one that
        follows some writes behind drops them."""
        self._behind.append((offset, num_bytes))
        os.posix_fadvise(self._descriptor, offset, num_bytes, os.POSIX_FADV_DONTNEED)
        if len(self._behind) > self.MAX_BEHIND:
            with suppress(IndexError):  # another thread may have taken it
                os.posix_fadvise(self._descriptor, *self._behind.popleft(), os.POSIX_FADV_DONTNEED)


def _alignment_of(file: PosixFile) -> int:
    """What direct calls on `file` have to be aligned to; 0 where none works. Reads a little and writes it back."""
    memory = np.frombuffer(mmap.mmap(-1, 4 * ALIGNMENTS[-1]), dtype=np.uint8)
    for alignment in ALIGNMENTS:
        part = memory[alignment : 2 * alignment]
        try:
            file.set_direct(True)
            if file.read(alignment, [part]) == alignment == file.write(alignment, [part]):
                return alignment
        except OSError:
            continue
        finally:
            with suppress(OSError):
                file.set_direct(False)
    return 0
