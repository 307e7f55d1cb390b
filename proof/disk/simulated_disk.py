"""A disk that loses, tears and reorders writes. It implements the file protocol of the system's disk.

A process sees its own writes at once. Until a file is synced, each of its pages (`PAGE_BYTES`) may be there in any
version that it had since: `lose_power` picks one for each. `kill` ends only the process, whose writes stay.
"""

from __future__ import annotations

import enum
import errno
import random
import threading
from collections.abc import Callable, Sequence
from typing import Any

import attrs

from aoffload._tiers.disk.files import DiskFile
from aoffload.errors import ConfigError

__all__ = ["Crash", "DiskFault", "IOCall", "SimulatedDirectory", "SimulatedDisk", "SimulatedFile"]

PAGE_BYTES = 64


class Crash(BaseException):
    """The process ends here. No clean-up of it reaches the disk."""


class DiskFault(enum.Enum):
    ERROR = "EIO, and nothing was done"
    PART_ERROR = "EIO, and a part was done"
    NO_SPACE = "ENOSPC, and nothing was done"
    SHORT = "a part was done, which is told"
    LOST = "a write that is told as done, and is not"
    HANG = "the call waits; it is done when it is let go"
    KILL = "the process is killed when a part was done"
    POWER = "power is lost when a part was done"


@attrs.frozen
class IOCall:
    """One call of a process: number, kind (`open`, `allocate`, `read`, `write`, `sync`) and file."""

    number: int
    kind: str
    name: str


@attrs.define(eq=False)
class Content:
    """A file on the disk. `pending` has, for each page since the last sync, its versions, the one on the disk first.
    One thread may write while another one syncs."""

    name: str
    now: bytearray = attrs.field(factory=bytearray)
    pending: dict[int, list[bytes]] = attrs.field(factory=dict)
    lengths: list[int] = attrs.field(factory=lambda: [0])
    _lock: Any = attrs.field(factory=threading.RLock, init=False)

    def change(self, offset: int, data: bytes) -> None:
        """Apply a write within the file."""
        pages = range(offset // PAGE_BYTES, -(-(offset + len(data)) // PAGE_BYTES))
        with self._lock:
            for page in pages:
                self.pending.setdefault(page, [self.page(page)])
            self.now[offset : offset + len(data)] = data
            for page in pages:
                self.pending[page].append(self.page(page))

    def page(self, number: int) -> bytes:
        return bytes(self.now[number * PAGE_BYTES : (number + 1) * PAGE_BYTES])

    def resize(self, num_bytes: int) -> None:
        with self._lock:
            if num_bytes < len(self.now):
                for page in range(num_bytes // PAGE_BYTES, -(-len(self.now) // PAGE_BYTES)):
                    self.pending.setdefault(page, [self.page(page)])
                del self.now[num_bytes:]
            self.now.extend(bytes(num_bytes - len(self.now)))
            for page, versions in self.pending.items():
                versions.append(self.page(page))
            self.lengths.append(num_bytes)

    def settle(self) -> None:
        with self._lock:
            self.pending.clear()
            self.lengths = [len(self.now)]

    def lose(self, pick: Callable[[int], int]) -> None:
        """Each page, and the length, becomes one of its versions."""
        with self._lock:
            num_bytes = self.lengths[pick(len(self.lengths))]
            kept = bytearray(self.now[:num_bytes].ljust(num_bytes, b"\0"))
            for page, versions in self.pending.items():
                at = page * PAGE_BYTES
                size = min(PAGE_BYTES, num_bytes - at)
                if size > 0:
                    kept[at : at + size] = versions[pick(len(versions))][:size].ljust(size, b"\0")
            self.now = kept
            self.settle()


class SimulatedDisk:
    """The files of one directory, which outlive the processes that open it.

    `fault` is asked before every call, and says what goes wrong. `hang` is called for a call that hangs, and returns
    when it is to be done after all. `wrote` is told of each write as it is done.
    """

    def __init__(self, rng: random.Random, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.files: dict[str, Content] = {}
        self.fault: Callable[[IOCall], DiskFault | None] = lambda call: None
        self.hang: Callable[[IOCall], None] = lambda call: None
        self.wrote: Callable[[str, int, bytes], None] = lambda name, offset, data: None
        self.num_calls = 0
        self.num_open = 0
        self.max_allocated_bytes = 0
        self._rng = rng
        self._life = 0
        self._owner: SimulatedDirectory | None = None

    def __repr__(self) -> str:
        return f"<SimulatedDisk {len(self.files)} files, {self.num_open} open>"

    def directory(self) -> SimulatedDirectory:
        """`ConfigError("path")` while another process has it."""
        if self._owner is not None:
            raise ConfigError("path", "is in use by another process")
        self._owner = SimulatedDirectory(self, self._life)
        return self._owner

    @property
    def is_locked(self) -> bool:
        return self._owner is not None

    @property
    def allocated_bytes(self) -> int:
        return sum(len(content.now) for content in self.files.values())

    def kill(self) -> None:
        """The process ends: what it wrote stays, and its files and its lock are gone."""
        self._life += 1
        self._owner, self.num_open = None, 0

    def lose_power(self) -> None:
        """The same for the machine: what was not synced stays in any version, page by page, all the newest or all the
        oldest."""
        self.kill()
        share = self._rng.choice((0.0, 0.2, 0.5, 0.8, 1.0))

        def pick(num_versions: int) -> int:
            newest = num_versions - 1
            return newest if self._rng.random() < share else self._rng.randrange(num_versions)

        for content in self.files.values():
            content.lose(pick)

    def rot(self, name: str) -> int:
        """Change a byte of the file `name` where it lies; returns where."""
        content = self.files[name]
        at = self._rng.randrange(len(content.now))
        data = bytes([content.now[at] ^ self._rng.randrange(1, 256)])
        content.now[at : at + 1] = data
        page = at // PAGE_BYTES
        if page in content.pending:
            content.pending[page].append(content.page(page))
        return at

    # -- what files call ----------------------------------------------------------------------------------------------

    def check_life(self, life: int) -> None:
        if life != self._life:
            raise Crash

    def begin(self, life: int, kind: str, name: str) -> DiskFault | None:
        """A call of a process begins: what goes wrong with it. Errors without any effect are raised here."""
        self.check_life(life)
        call = IOCall(self.num_calls, kind, name)
        self.num_calls += 1
        found = self.fault(call)
        if found is DiskFault.HANG:
            self.hang(call)
            self.check_life(life)
            return None
        if found is DiskFault.ERROR or (found is DiskFault.PART_ERROR and kind not in ("read", "write")):
            raise OSError(errno.EIO, "Input/output error")
        if found is DiskFault.NO_SPACE and kind != "read":
            raise OSError(errno.ENOSPC, "No space left on device")
        return found

    def end(self, fault: DiskFault | None) -> None:
        """The call was done, perhaps in part."""
        if fault is DiskFault.KILL:
            self.kill()
            raise Crash
        if fault is DiskFault.POWER:
            self.lose_power()
            raise Crash
        if fault is DiskFault.PART_ERROR:
            raise OSError(errno.EIO, "Input/output error")

    def part_of(self, num_bytes: int, fault: DiskFault | None) -> int:
        """How many of so many bytes a call with this fault reads or writes."""
        if fault is DiskFault.LOST:
            return 0
        whole = fault is None or fault is DiskFault.NO_SPACE
        return num_bytes if whole else self._rng.randrange(num_bytes + 1)

    def release(self) -> None:
        self._owner = None

    def note_allocated(self) -> None:
        self.max_allocated_bytes = max(self.max_allocated_bytes, self.allocated_bytes)


class SimulatedDirectory:
    """A `DiskDirectory` on a simulated disk."""

    def __init__(self, disk: SimulatedDisk, life: int) -> None:
        self._disk, self._life = disk, life

    def open(self, name: str) -> SimulatedFile:
        fault = self._disk.begin(self._life, "open", name)
        self._disk.end(fault)
        content = self._disk.files.setdefault(name, Content(name))
        self._disk.num_open += 1
        return SimulatedFile(self._disk, self._life, content)

    def make_direct(self, file: DiskFile, block_bytes: int, address: int) -> DiskFile:
        return file

    def close(self) -> None:
        self._disk.check_life(self._life)
        self._disk.release()


class SimulatedFile:
    """A `DiskFile` on a simulated disk."""

    def __init__(self, disk: SimulatedDisk, life: int, content: Content) -> None:
        self._disk, self._life, self._content = disk, life, content

    @property
    def num_bytes(self) -> int:
        self._disk.check_life(self._life)
        return len(self._content.now)

    def allocate(self, num_bytes: int) -> None:
        fault = self._disk.begin(self._life, "allocate", self._content.name)
        if self._disk.allocated_bytes - len(self._content.now) + num_bytes > self._disk.num_bytes:
            raise OSError(errno.ENOSPC, "No space left on device")
        self._content.resize(num_bytes)
        self._disk.note_allocated()
        self._disk.end(fault)

    def write(self, offset: int, buffers: Sequence[Any]) -> int:
        fault = self._disk.begin(self._life, "write", self._content.name)
        data = b"".join(bytes(buffer) for buffer in buffers)  # as they are now: a call that hung reads them late
        written = self._disk.part_of(len(data), fault)
        if offset + written > len(self._content.now):
            self._content.resize(offset + written)
            self._disk.note_allocated()
        self._content.change(offset, data[:written])
        self._disk.wrote(self._content.name, offset, data[:written])
        self._disk.end(fault)
        return len(data) if fault is DiskFault.LOST else written

    def read(self, offset: int, buffers: Sequence[Any]) -> int:
        fault = self._disk.begin(self._life, "read", self._content.name)
        wanted = sum(memoryview(buffer).nbytes for buffer in buffers)
        data = bytes(self._content.now[offset : offset + self._disk.part_of(wanted, fault)])
        at = 0
        for buffer in buffers:
            view = memoryview(buffer).cast("B")
            part = data[at : at + len(view)]
            view[: len(part)] = part
            at += len(part)
        self._disk.end(fault)
        return len(data)

    def sync(self) -> None:
        fault = self._disk.begin(self._life, "sync", self._content.name)
        self._disk.end(fault)
        self._content.settle()

    def close(self) -> None:
        self._disk.check_life(self._life)
        self._disk.num_open -= 1
