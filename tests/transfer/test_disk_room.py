"""Room on the disk, and the directory: a start that fails changes nothing, and who closes leaves it to the next one."""

from __future__ import annotations

import errno
import itertools
import os
import random
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("xxhash", reason="the extra `disk` is not installed")

from test_disk_slots import BLOCK, SIZE, opened, stored

from aoffload.errors import ConfigError
from aoffload.testing.simulated_disk import DiskFault, IOCall, SimulatedDisk
from aoffload.transfer.backends.base import anonymous_memory
from aoffload.transfer.disk.posix import PosixDirectory
from aoffload.transfer.disk.records import SlotLayout
from aoffload.transfer.disk.slots import DiskSlots


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "disk"


def on(disk: SimulatedDisk, **changes: Any) -> DiskSlots:
    arguments = {"size_bytes": SIZE, "fingerprint": b"a", "draw_generation": lambda: 100, **changes}
    return DiskSlots.open(
        disk.directory(), SlotLayout(4, BLOCK, (1,), (True,)), anonymous_memory(16, BLOCK), **arguments
    )


def test_a_size_without_room_changes_nothing() -> None:
    """What is cached there is found again with the size of before, and no room is kept: neither of the slab, of which
    all but the table has room, nor beside what was there."""
    disk = SimulatedDisk(random.Random(0), 2 * SIZE)
    for name, size_bytes in (("at first", 2 * SIZE + 40_000), ("at first", 10 * SIZE)):
        with pytest.raises(ConfigError) as refusal:
            on(disk, size_bytes=size_bytes)
        assert (refusal.value.argument, disk.allocated_bytes) == ("size", 0), name
    first = on(disk)
    stored(first)
    first.close()
    before = {name: bytes(content.now) for name, content in disk.files.items()}
    for changes in ({"size_bytes": 2 * SIZE + 40_000}, {"size_bytes": 10 * SIZE, "fingerprint": b"b"}):
        with pytest.raises(ConfigError) as refusal:
            on(disk, **changes)
        assert refusal.value.argument == "size" and not disk.is_locked
        assert {name: bytes(content.now) for name, content in disk.files.items()} == before
    second = on(disk)
    assert [each.slots[0].tolist() for part in second.survivors() for each in part] == [[3, 4, 5, 9, 10, 11]]
    second.close()


def test_a_start_that_fails_later_keeps_no_room() -> None:
    """Somebody else has filled the disk meanwhile, or it fails."""
    disk = SimulatedDisk(random.Random(0), 2 * SIZE)
    on(disk).close()
    for kind, number in (("allocate", 1), ("sync", 0)):
        calls = itertools.count()

        def fault(call: IOCall, kind: str = kind, number: int = number, calls: Any = calls) -> DiskFault | None:
            is_it = (call.kind, call.name) == (kind, "table") and next(calls) == number
            return DiskFault.NO_SPACE if is_it else None

        disk.fault = fault
        with pytest.raises(ConfigError):
            on(disk, fingerprint=b"b")
        assert disk.allocated_bytes == 0
        disk.fault = lambda call: None
        on(disk).close()


def test_a_full_file_system_keeps_what_is_there(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same with the system's files: a file that could not grow has the length of before."""
    first = opened(path)
    stored(first)
    first.close()

    def full(descriptor: int, offset: int, num_bytes: int) -> None:
        if num_bytes > SIZE:
            os.ftruncate(descriptor, SIZE)  # as far as it went
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    taken = {each: each.stat().st_size for each in path.iterdir()}
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ConfigError) as refusal:
        opened(path, size_bytes=4 * SIZE)
    assert refusal.value.argument == "size" and {each: each.stat().st_size for each in path.iterdir()} == taken
    monkeypatch.undo()
    second = opened(path)
    assert [each.slots[0].tolist() for part in second.survivors() for each in part] == [[3, 4, 5, 9, 10, 11]]
    second.close()


def test_a_fork_does_not_keep_the_directory(path: Path) -> None:
    """It has inherited the lock with its descriptor: who opened it and closes it lets go of it all the same."""
    directory = PosixDirectory(path)
    inherited = os.dup(directory._lock)
    directory.close()
    PosixDirectory(path).close()
    os.close(inherited)


def test_a_fork_does_not_give_the_directory_away(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it closes what it has inherited, the process that opened it has it as before."""
    directory = PosixDirectory(path)
    original = os.dup(directory._lock)
    monkeypatch.setattr(os, "getpid", lambda: -1)
    directory.close()
    monkeypatch.undo()
    with pytest.raises(ConfigError, match="in use"):
        PosixDirectory(path)
    os.close(original)
    PosixDirectory(path).close()
