"""Slots in files of the system: stored blocks are loaded, also after a restart, and failures are reported."""

from __future__ import annotations

import errno
import itertools
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_disk_records import labels, prompt

pytest.importorskip("xxhash", reason="the extra `disk` is not installed")

from aoffload._kernel.states import Outcome
from aoffload._tiers.disk.files import WRITE_BYTES, PosixDirectory, PosixFile, Slab
from aoffload._tiers.disk.slots import DiskOutcome, DiskSlots
from aoffload._tiers.disk.table import SlotLayout, SlotTable
from aoffload._transfer.backends.base import anonymous_memory
from aoffload.errors import ConfigError, InvalidArgument

BLOCK = 4096
SIZE = 1 << 20
LANDED = DiskOutcome(Outcome.LANDED, 6)
LABELS = labels(prompt(1, 2, 3, 4, 5, 6))


def opened(
    path: Path, block_bytes: int = BLOCK, size_bytes: int = SIZE, fingerprint: bytes = b"a", num_host: int = 16
) -> DiskSlots:
    host = anonymous_memory(num_host, block_bytes)
    host[:] = np.random.default_rng(0).integers(0, 256, host.shape, dtype=np.uint8)
    layout = SlotLayout(4, block_bytes, (1,), (True,))
    return DiskSlots.open(
        PosixDirectory(path), layout, host, size_bytes=size_bytes, fingerprint=fingerprint,
        draw_generation=lambda: random.getrandbits(63),
    )  # fmt: skip


def host_of(slots: DiskSlots) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return slots._slab._host


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "disk"


@pytest.fixture
def slots(path: Path) -> Iterator[DiskSlots]:
    found = opened(path)
    yield found
    found.close()


def stored(slots: DiskSlots) -> None:
    """Six blocks, host rows 0 to 5, in two stretches."""
    assert slots.store([3, 4, 5, 9, 10, 11], [0, 1, 2, 5, 4, 3], LABELS, slots.generation) == LANDED


def test_what_was_stored_is_loaded(slots: DiskSlots) -> None:
    """In any order, into any host blocks."""
    stored(slots)
    assert slots.load([11, 3, 10, 4, 9, 5], range(8, 14)) == LANDED
    host = host_of(slots)
    assert (host[8:14] == host[[3, 0, 4, 1, 5, 2]]).all()


@pytest.mark.parametrize("block_bytes", [4096, 3 * 4096, 1000, 512])
def test_a_restart_finds_it(path: Path, block_bytes: int) -> None:
    """With blocks that go past the page cache, and with blocks of a size that does not."""
    first = opened(path, block_bytes)
    stored(first)
    first.close()
    second = opened(path, block_bytes)
    found = [each for part in second.survivors() for each in part]
    assert [each.slots[0].tolist() for each in found] == [[3, 4, 5, 9, 10, 11]]
    host = host_of(second)
    expected = host[[0, 1, 2, 5, 4, 3]].copy()
    assert second.load([3, 4, 5, 9, 10, 11], range(6, 12)) == LANDED
    assert (host[6:12] == expected).all()
    second.close()


def test_what_is_not_found_is_not_loaded(path: Path) -> None:
    """Slots count for nothing until their records are read: nobody knows what is in them."""
    first = opened(path)
    stored(first)
    first.close()
    second = opened(path)
    assert second.load([3], [0]).outcome is Outcome.CORRUPT
    second.close()


@pytest.mark.parametrize("change", [{"fingerprint": b"b"}, {"size_bytes": SIZE + 65536}, {"block_bytes": 2 * BLOCK}])
def test_another_fingerprint_or_shape_starts_empty(path: Path, change: dict[str, Any]) -> None:
    """Also when the first one comes back: what it had is gone."""
    first = opened(path)
    stored(first)
    first.close()
    for arguments in (change, {}):
        other = opened(path, **arguments)
        assert [each for part in other.survivors() for each in part] == []
        other.close()


def test_nothing_of_before_a_reset_is_found(path: Path) -> None:
    """Neither what was stored, nor what was planned before it and stored after it."""
    first = opened(path)
    generation = first.generation
    stored(first)
    first.reset()
    first.store([20, 21], [0, 1], LABELS[:2], generation)
    first.store([30], [0], LABELS[:1], first.generation)
    first.close()
    second = opened(path)
    assert [each.slots[0].tolist() for part in second.survivors() for each in part] == [[30]]
    second.close()


def test_a_block_without_a_label_is_for_this_process_only(path: Path) -> None:
    """And takes the place of what a restart would have found there."""
    first = opened(path)
    stored(first)
    assert first.store([5], [0], [None], first.generation).outcome is Outcome.LANDED
    assert first.load([5], [9]).outcome is Outcome.LANDED
    first.close()
    second = opened(path)
    assert [each.slots[0].tolist() for part in second.survivors() for each in part] == [[3, 4]]
    second.close()


def test_each_changed_byte_is_a_corrupt_block(slots: DiskSlots, path: Path) -> None:
    """Only the blocks that differ are said to, and those before the first count; they are forgotten for good."""
    stored(slots)
    for at, slot in ((7, 4), (BLOCK - 1, 10)):
        with (path / "slab").open("r+b", buffering=0) as slab:
            slab.seek(slot * BLOCK + at)
            byte = slab.read(1)
            slab.seek(slot * BLOCK + at)
            slab.write(bytes([byte[0] ^ 1]))
    found = slots.load([3, 4, 5, 9, 10, 11], range(6, 12))
    assert (found.outcome, found.num_landed, found.corrupt) == (Outcome.CORRUPT, 1, (1, 4))
    assert slots.load([4], [6]).outcome is Outcome.CORRUPT
    slots.close()
    second = opened(path)
    assert [each.slots[0].tolist() for part in second.survivors() for each in part] == [[3]]
    second.close()
    slots._held.callback(lambda: None)  # the fixture closes it again


class Failing:
    """A file whose calls do what is said, one after another, and then what they should."""

    def __init__(self, file: Any, *faults: Callable[[Callable[..., int]], Callable[..., int]]) -> None:
        self._file, self._faults = file, iter(faults)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def _call(self, name: str, offset: int, buffers: Any) -> int:
        fault = next(self._faults, None)
        real = getattr(self._file, name)
        return real(offset, buffers) if fault is None else fault(real)(offset, buffers)

    def write(self, offset: int, buffers: Any) -> int:
        return self._call("write", offset, buffers)

    def read(self, offset: int, buffers: Any) -> int:
        return self._call("read", offset, buffers)


def error(number: int) -> Any:
    def call(real: Any) -> Any:
        raise OSError(number, os.strerror(number))

    return call


def cut_to(num_blocks: float) -> Any:
    def call(real: Any) -> Any:
        def moved(offset: int, buffers: Any) -> int:
            whole = np.concatenate([buffer.reshape(-1) for buffer in buffers])[: int(num_blocks * BLOCK)]
            if real.__name__ == "write":
                return int(num_blocks * BLOCK)
            found = np.empty_like(whole)
            real(offset, [found]) if len(found) % BLOCK == 0 and len(found) else None
            at = 0
            for buffer in buffers:
                part = found[at : at + buffer.size]
                buffer.reshape(-1)[: len(part)] = part
                at += buffer.size
            return len(whole)

        return moved

    return call


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize(("at", "num_landed"), [(0, 0), (1, 3)])
def test_a_failed_call_leaves_what_came_before_it(slots: DiskSlots, number: int, at: int, num_landed: int) -> None:
    """The blocks of earlier calls count, the others do not; the slots go on working."""
    for name in ("store", "load"):
        slots._slab._file = Failing(slots._slab._file, *[lambda real: real] * at, error(number))
        if name == "store":
            found = slots.store([3, 4, 5, 9, 10, 11], range(6), LABELS, slots.generation)
        else:
            found = slots.load([3, 4, 5, 9, 10, 11], range(6, 12))
        assert (found.outcome, found.num_landed, found.corrupt) == (Outcome.FAILED, num_landed, ())
        assert os.strerror(number) in found.error
        stored(slots)


def test_a_short_call_is_gone_on_with(slots: DiskSlots) -> None:
    """From the last whole block; one that does not finish a block has failed."""
    slots._slab._file.set_direct(False)  # type: ignore[attr-defined]
    stored(slots)
    slots._slab._file = Failing(slots._slab._file, cut_to(2))
    assert slots.load([3, 4, 5, 9, 10, 11], range(6, 12)) == LANDED
    for name in ("store", "load"):
        slots._slab._file = Failing(slots._slab._file, lambda real: real, cut_to(0.5))
        if name == "load":
            found = slots.load([3, 4, 5, 9, 10, 11], range(6, 12))
        else:
            found = slots.store([3, 4, 5, 9, 10, 11], range(6), LABELS, slots.generation)
        assert (found.outcome, found.num_landed) == (Outcome.FAILED, 3) and "cut short" in found.error
        stored(slots)


def test_a_store_that_was_given_up_writes_nothing(slots: DiskSlots) -> None:
    """Its host blocks may be somebody else's by now."""
    answers = iter([True])
    found = slots.store([3], [0], LABELS[:1], slots.generation, lambda: next(answers))
    assert (found.outcome, found.num_landed) == (Outcome.FAILED, 0)
    assert [each for part in slots.survivors() for each in part] == []


def test_a_store_that_is_given_up_meanwhile_records_nothing(slots: DiskSlots, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for a moment: a crash in it would leave records of what was written over its source."""
    written: list[Any] = []
    monkeypatch.setattr(SlotTable, "write", lambda *given: written.append(given))
    answers = itertools.chain([False], itertools.repeat(True))
    found = slots.store([3, 4], [0, 1], LABELS[:2], slots.generation, lambda: next(answers))
    assert (found.outcome, found.num_landed, written) == (Outcome.FAILED, 0, [])


def test_a_load_that_is_late_forgets_nothing_of_others(slots: DiskSlots, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was given up, and its slot is another's by the time that it reads."""
    stored(slots)
    read = Slab.read

    def late(slab: Slab, stretch: Any) -> int:
        monkeypatch.undo()
        assert slots.store([3], [6], labels(prompt(9)), slots.generation).outcome is Outcome.LANDED
        return read(slab, stretch)

    monkeypatch.setattr(Slab, "read", late)
    assert slots.load([3], [8]).outcome is Outcome.CORRUPT
    assert slots.load([3], [9]).outcome is Outcome.LANDED
    assert (host_of(slots)[9] == host_of(slots)[6]).all()


@pytest.mark.parametrize(
    ("name", "arguments"),
    [("slots", ([-1], [0])), ("slots", ([10**6], [0])), ("host_ids", ([0], [16])), ("host_ids", ([0], [-1])),
     ("host_ids", ([0, 1], [0]))],
)  # fmt: skip
def test_ids_out_of_range_are_refused_by_name(
    slots: DiskSlots, name: str, arguments: tuple[list[int], list[int]]
) -> None:
    """Before anything moves: after the last slot is the end of the file, and of its size."""
    with pytest.raises(InvalidArgument) as refusal:
        slots.load(*arguments)
    assert refusal.value.argument == name
    with pytest.raises(InvalidArgument):
        slots.store(*arguments, LABELS[: len(arguments[0])], slots.generation)
    with pytest.raises(InvalidArgument, match="labels"):
        slots.store([0, 1], [0, 1], LABELS[:1], slots.generation)


def test_one_process_has_a_directory(slots: DiskSlots, path: Path) -> None:
    """A second opener is told which argument is taken, and the first goes on."""
    with pytest.raises(ConfigError, match="in use") as refusal:
        PosixDirectory(path)
    assert refusal.value.argument == "path"
    stored(slots)


def test_files_are_for_this_user_only(slots: DiskSlots, path: Path) -> None:
    """KV is as secret as the prompts that it was computed from."""
    assert path.stat().st_mode & 0o777 == 0o700
    assert {each.stat().st_mode & 0o777 for each in path.iterdir()} == {0o600}


def test_a_file_is_no_directory(path: Path) -> None:
    """What is wrong is said: its rights are not."""
    path.write_text("mine")
    with pytest.raises(ConfigError, match="is not a directory"):
        PosixDirectory(path)
    assert path.read_text() == "mine"


def test_a_directory_that_others_may_enter_is_refused(path: Path) -> None:
    """It stays as it is: a mistaken path changes nothing."""
    path.mkdir(mode=0o755)
    path.chmod(0o755)
    with pytest.raises(ConfigError, match="0700") as refusal:
        PosixDirectory(path)
    assert refusal.value.argument == "path"
    assert path.stat().st_mode & 0o777 == 0o755 and not list(path.iterdir())


def test_a_path_that_is_no_directory_is_named(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch(mode=0o600)
    for path in (file, file / "below"):
        with pytest.raises(ConfigError) as refusal:
            PosixDirectory(path)
        assert refusal.value.argument == "path"


def test_a_link_is_not_followed(path: Path, tmp_path: Path) -> None:
    """Nobody has the slab written over a file of theirs."""
    mine = tmp_path / "mine"
    mine.write_text("kept")
    path.mkdir(mode=0o700)
    (path / "slab").symlink_to(mine)
    with pytest.raises(ConfigError) as refusal:
        opened(path)
    assert refusal.value.argument == "path" and mine.read_text() == "kept"
    (path / "slab").unlink()
    opened(path).close()


@pytest.mark.parametrize("size_bytes", [SIZE, SIZE + 4095, 10 * SIZE + 1])
def test_the_files_take_no_more_than_their_size(path: Path, size_bytes: int) -> None:
    """All of it from the start on, so the disk is never found full later; and of it nothing is wasted."""
    slots = opened(path, size_bytes=size_bytes)
    taken = sum(each.stat().st_blocks * 512 for each in (path, *path.iterdir()))
    assert 0.95 * size_bytes < taken <= size_bytes
    slots.close()
    opened(path, size_bytes=SIZE // 2).close()
    assert sum(each.stat().st_blocks * 512 for each in (path, *path.iterdir())) <= SIZE // 2


def test_a_size_for_no_slot_is_refused(path: Path) -> None:
    with pytest.raises(ConfigError) as refusal:
        opened(path, size_bytes=16384)
    assert refusal.value.argument == "size"


def test_a_full_disk_is_known_at_the_start(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The argument is named, what was allocated in vain goes back, and nothing stays open."""

    def full(self: PosixFile, num_bytes: int) -> None:
        if num_bytes > SIZE // 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(PosixFile, "allocate", full)
    descriptors = set(os.listdir("/proc/self/fd"))
    with pytest.raises(ConfigError) as refusal:
        opened(path)
    assert refusal.value.argument == "size" and set(os.listdir("/proc/self/fd")) == descriptors
    monkeypatch.undo()
    opened(path).close()


def test_large_jobs_go_in_several_calls(path: Path) -> None:
    """Whatever their size, blocks land where they belong."""
    num_blocks = WRITE_BYTES // 65536 + 3
    slots = opened(path, block_bytes=65536, size_bytes=48 << 20, num_host=2 * num_blocks)
    ids = np.arange(num_blocks)
    given = list(itertools.islice(itertools.repeat(None), num_blocks))
    assert slots.store(ids + 2, ids, given, slots.generation).num_landed == num_blocks
    assert slots.load(ids + 2, ids + num_blocks).outcome is Outcome.LANDED
    assert (host_of(slots)[:num_blocks] == host_of(slots)[num_blocks:]).all()
    slots.close()


def test_blocks_of_an_odd_size_leave_the_page_cache(path: Path) -> None:
    """Without O_DIRECT the system is asked to drop what was read or written; with it nothing has to be."""
    for block_bytes, is_direct in ((1000, False), (4096, True)):
        slots = opened(path, block_bytes)
        file = slots._slab._file
        assert isinstance(file, PosixFile) and file.drop_behind is not file.is_direct
        if not is_direct:
            assert not file.is_direct
        slots.close()
