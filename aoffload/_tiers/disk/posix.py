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

import attrs
import numpy as np

from ...errors import ConfigError
from .files import DiskFile

LOCK = "lock"
ALIGNMENTS = (512, 4096)
"""Alignments of offset, length and address of a direct call, in bytes: the first that works is taken."""
_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_FILE = os.O_RDWR | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0)


@attrs.define(eq=False)
class _Lock:
    """An open file that is locked until it is closed."""

    descriptor: int


class _Locks:
    """The locks of this process, which a forked child does not keep.

    A `flock` belongs to the open file, which a forked child shares. So a child that outlives a killed parent would keep
    the directory locked. Therefore each child closes these files when it begins. The lock stays as long as the parent
    lives, because the parent has the file open, too.

    `fcntl` locks are not inherited, but a process loses them when it closes any descriptor of the file. Versions of
    this package that take `flock` would not see them either. A child that C code forks keeps the lock until it ends or
    runs another program.
    """

    def __init__(self) -> None:
        self._held = set[_Lock]()
        self._num_forks = 0
        """Counts the beginnings and the ends of forks."""
        os.register_at_fork(before=self._forks, after_in_parent=self._forks, after_in_child=self._let_go)

    def take(self, path: Path) -> _Lock:
        """Lock the file at `path`, and make it if it is missing. `BlockingIOError` if another open file has the
        lock."""
        while True:
            num_forks, lock = self._num_forks, _Lock(os.open(path, _FILE | os.O_CREAT, 0o600))
            try:
                fcntl.flock(lock.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os.close(lock.descriptor)
                raise
            self._held.add(lock)
            if num_forks == self._num_forks:
                return lock
            self.give(lock)  # a child that another thread has forked meanwhile may share it

    def give(self, lock: _Lock) -> None:
        """Unlock and close. A forked child has closed it already."""
        if lock in self._held:
            self._held.remove(lock)
            with suppress(OSError):
                fcntl.flock(lock.descriptor, fcntl.LOCK_UN)
            os.close(lock.descriptor)

    def _forks(self) -> None:
        self._num_forks += 1

    def _let_go(self) -> None:
        for lock in self._held:
            with suppress(OSError):
                os.close(lock.descriptor)
        self._held.clear()


_locks = _Locks()


class PosixDirectory:
    """The directory at `path`, made if it is missing, for this process alone: mode 0700, locked with `flock`. A child
    that Python forks does not keep the lock.

    Raises `ConfigError("path")` if another process has the directory, if other users may enter it, or if it cannot be
    used. A directory that exists keeps its mode, so that a wrong path changes nothing.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        try:
            self._make()
            self._lock = _locks.take(self.path / LOCK)
        except BlockingIOError:
            raise ConfigError("path", f"{self.path} is in use by another process, or by this one") from None
        except OSError as error:
            raise ConfigError("path", f"{self.path} cannot be used: {error.strerror or error}") from error

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
        """`file` with O_DIRECT, if `block_bytes` and `address` have the alignment that a trial on the file finds to be
        needed. Otherwise the file goes through the page cache, and every block is dropped from the cache again."""
        assert isinstance(file, PosixFile)
        alignment = _alignment_of(file)
        if alignment and not block_bytes % alignment and not address % alignment:
            file.set_direct(True)
        else:
            file.drop_behind = True
        return file

    def close(self) -> None:
        _locks.give(self._lock)

    def __repr__(self) -> str:
        return f"<PosixDirectory {self.path}>"


class PosixFile:
    """A file by its descriptor. Its calls release the interpreter lock."""

    MAX_BEHIND = 8

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.is_direct = False
        self.drop_behind = False
        """Whether bytes that were written or read are dropped from the page cache."""
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
        """Go past the page cache from now on. `OSError` if the file system cannot."""
        flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
        direct = getattr(os, "O_DIRECT", 0)
        if not direct:
            raise OSError(errno.EINVAL, "this system has no O_DIRECT")
        fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags | direct if on else flags & ~direct)
        self.is_direct = on

    def _drop(self, offset: int, num_bytes: int) -> None:
        """Drop these bytes from the page cache. Written bytes are clean only later: this call starts to write them
        back, and a later call, `MAX_BEHIND` writes after it, drops them."""
        self._behind.append((offset, num_bytes))
        os.posix_fadvise(self._descriptor, offset, num_bytes, os.POSIX_FADV_DONTNEED)
        if len(self._behind) > self.MAX_BEHIND:
            with suppress(IndexError):  # another thread may have taken it
                os.posix_fadvise(self._descriptor, *self._behind.popleft(), os.POSIX_FADV_DONTNEED)


def _alignment_of(file: PosixFile) -> int:
    """The alignment of direct calls on `file`; 0 if no direct call works. Reads a little and writes it back."""
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
