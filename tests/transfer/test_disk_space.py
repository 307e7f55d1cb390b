"""Disk space and the directory: a failed start changes nothing, and closing releases the directory."""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import random
import signal
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("xxhash", reason="the extra `disk` is not installed")

from test_disk_slots import BLOCK, SIZE, opened, stored

from aoffload._tiers.disk.files import PosixDirectory
from aoffload._tiers.disk.slots import DiskSlots
from aoffload._tiers.disk.table import SlotLayout
from aoffload._transfer.backends.base import anonymous_memory
from aoffload.errors import ConfigError
from proof.disk.simulated_disk import DiskFault, IOCall, SimulatedDisk


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


def forked(work: Callable[[], object]) -> int:
    """A child that does `work`, and ends."""
    if (child := os.fork()) == 0:
        try:
            work()
            os._exit(0)
        finally:
            os._exit(1)
    return child


def test_a_fork_does_not_keep_the_directory(path: Path) -> None:
    """A server that is killed while a child that it forked lives on: the next server may have the directory at once."""
    (hears, says), (waits, ends) = os.pipe(), os.pipe()

    def live_on() -> None:
        os.close(ends)
        os.write(says, b"child")
        os.read(waits, 1)  # until the test closes its end

    def serve() -> None:
        with closing(PosixDirectory(path)):
            forked(live_on)
            signal.pause()

    server = forked(serve)
    assert os.read(hears, 5) == b"child"
    assert _is_taken(path), "the child has given nothing away"
    os.kill(server, signal.SIGKILL)
    os.waitpid(server, 0)
    assert not _is_taken(path)
    for descriptor in (hears, says, waits, ends):
        os.close(descriptor)


def test_who_closes_lets_go_whatever_shares_its_file(path: Path) -> None:
    """A child that C code has forked knows nothing of the lock that it has inherited."""
    directory = PosixDirectory(path)
    inherited = os.dup(directory._lock.descriptor)
    directory.close()
    assert not _is_taken(path)
    os.close(inherited)


def test_a_fork_closes_nothing_of_its_own(path: Path, tmp_path: Path) -> None:
    """A child that closes the directory that it has inherited keeps the lock that it has taken itself, even if both
    had the same descriptor; and its parent keeps the directory."""
    inherited = PosixDirectory(path)

    def have_its_own() -> None:
        while (descriptor := os.open(os.devnull, os.O_RDONLY)) < inherited._lock.descriptor:
            pass  # keep it, so that no lower one is free
        os.close(descriptor)
        own = PosixDirectory(tmp_path / "own")
        inherited.close()
        assert own._lock.descriptor == inherited._lock.descriptor and _is_taken(own.path)

    assert os.waitpid(forked(have_its_own), 0)[1] == 0
    assert _is_taken(path)
    inherited.close()
    assert not _is_taken(path)


def test_a_fork_while_the_directory_is_locked_does_not_keep_it(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread forks right after the file was opened: the child does not know of it, so it is opened again."""
    waits, ends = os.pipe()
    children, real = list[int](), fcntl.flock

    def live_on() -> None:
        os.close(ends)
        os.read(waits, 1)

    def lock(descriptor: int, how: int) -> None:
        if not children:
            children.append(forked(live_on))
        real(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", lock)
    directory = PosixDirectory(path)
    monkeypatch.undo()
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, directory._lock.descriptor)  # as if this process were killed: the lock is not given back
    assert not _is_taken(path)
    directory.close()
    for descriptor in (waits, ends, nothing):
        os.close(descriptor)
    os.waitpid(children[0], 0)


def test_versions_before_exclude_this_one_and_the_other_way_round(path: Path) -> None:
    """They lock the same file with `flock`: two processes of different versions never have one directory."""
    path.mkdir(mode=0o700)
    before = os.open(path / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(before, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert _is_taken(path)
    fcntl.flock(before, fcntl.LOCK_UN)
    directory = PosixDirectory(path)
    with pytest.raises(BlockingIOError):
        fcntl.flock(before, fcntl.LOCK_EX | fcntl.LOCK_NB)
    directory.close()
    os.close(before)


def _is_taken(path: Path) -> bool:
    try:
        PosixDirectory(path).close()
    except ConfigError as error:
        return "in use" in str(error)
    return False
