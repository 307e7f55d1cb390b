"""The file system calls that the disk tier needs, and the slab: blocks copied between slots and host memory.

`PosixDirectory` implements the protocols for the operating system, `aoffload.testing` for a simulated disk.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import stat
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import attrs
import numpy as np
from numpy.typing import NDArray

from ...errors import ConfigError


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
        """On return, everything written and the length of the file survive a power failure."""
        ...

    def close(self) -> None: ...


class DiskDirectory(Protocol):
    """A directory that one process owns until it closes it."""

    def open(self, name: str) -> DiskFile:
        """Open the file `name`. A missing file is created empty."""
        ...

    def make_direct(self, file: DiskFile, block_bytes: int, address: int) -> DiskFile:
        """The same file, for blocks of `block_bytes` in memory at `address`. It bypasses the page cache if that works
        for them."""
        ...

    def close(self) -> None:
        """Release the directory for other processes. Close its files first."""
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
"""Maximum bytes of one read. The blocks of a read are verified during the next read, while they are in the CPU
cache."""
WRITE_BYTES = 32 * 2**20
"""Maximum bytes of one write. The sums of small blocks, computed meanwhile, hold the interpreter's lock. The thread
that writes waits for that lock once in each call."""


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


# -- posix -----------------------------------------------------------------------------------------------------------
#
# Files of the operating system: locked, allocated, and accessed without the page cache if that works.

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


def _check_owner(path: Path) -> None:
    found = path.stat()
    if not stat.S_ISDIR(found.st_mode):
        raise ConfigError("path", f"{path} is not a directory")
    if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & _OTHERS:
        raise ConfigError("path", f"{path} must be accessible to this user only: chown it, and chmod it to 0700")


def check_directory(path: str | os.PathLike[str], num_bytes: int) -> None:
    """Raise `ConfigError` if `PosixDirectory(path)`, or an allocation of `num_bytes` in the directory, is sure to fail.
    The check changes nothing, and does not find out whether another process uses the directory."""
    wanted, own_bytes = Path(path), 0
    try:
        folder = next(each for each in (wanted, *wanted.absolute().parents) if os.path.lexists(each))
        if folder == wanted:
            _check_owner(folder)
            own_bytes = sum(each.stat().st_blocks * BYTES_OF_BLOCKS for each in folder.iterdir() if each.is_file())
        elif not folder.is_dir():
            raise ConfigError("path", f"{wanted} cannot be made, because {folder} is not a directory")
        if not os.access(folder, os.W_OK | os.X_OK):
            raise ConfigError("path", f"{folder} cannot be written by this user: chown it, or name another directory")
        found = os.statvfs(folder)
    except OSError as error:
        raise ConfigError("path", f"{wanted} cannot be used: {error.strerror or error}") from error
    free_bytes = found.f_bavail * found.f_frsize + own_bytes
    if num_bytes > free_bytes:
        problem = f"is {num_bytes:,} bytes, but the disk of {wanted} has {free_bytes:,} bytes free"
        raise ConfigError("size", f"{problem}. Set a smaller size, or free space")


BYTES_OF_BLOCKS = 512
"""The unit of `st_blocks`."""


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
        _check_owner(self.path)

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
                os.ftruncate(self._descriptor, min(before, num_bytes))  # release the space that was allocated
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
