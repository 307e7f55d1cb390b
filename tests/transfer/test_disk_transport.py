"""A transport with a disk: stored blocks are loaded again, and a disk that hangs or fails delays no other job."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from copies import GUARD_S
from test_disk_records import labels, prompt

pytest.importorskip("xxhash", reason="the extra `disk` is not installed")

from disks import BLOCK, DiskCopies, Hanging, simulated

from aoffload import ConfigError, DiskTier
from aoffload._common.tiers import Tier
from aoffload._kernel.plans import TransferPlan
from aoffload._kernel.states import Direction, Outcome
from aoffload._tiers.disk.lanes import NUM_THREADS
from aoffload._transfer.backends.base import RegionBackend
from aoffload._transfer.breaker import Closed, Opened, Use
from aoffload._transfer.local import LocalTransport
from aoffload.errors import TransferRefused, WrongState
from proof.disk.simulated_disk import DiskFault, IOCall, SimulatedDisk

DEVICE, HOST, DISK = Tier.DEVICE, Tier.HOST, Tier.DISK
LABELS = labels(prompt(1, 2, 3, 4, 5, 6))


@pytest.fixture
def open_disk(tmp_path: Path) -> Iterator[Callable[..., DiskCopies]]:
    opened: list[DiskCopies] = []

    def open_one(disk: SimulatedDisk | None = None, **options: Any) -> DiskCopies:
        opened.append(DiskCopies(tmp_path / "disk", disk, **options))
        return opened[-1]

    yield open_one
    for copies in opened:
        assert copies.transport.close(GUARD_S)


@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize("is_simulated", [False, True])
def test_blocks_go_down_to_the_disk_and_up_again(
    open_disk: Callable[..., DiskCopies], verify: bool, is_simulated: bool
) -> None:
    """Bytes are those of the device, whichever host blocks they pass, also where each load is compared."""
    copies = open_disk(simulated() if is_simulated else None, verify=verify)
    before = copies.pool.clone()
    assert copies.move(DEVICE, HOST, [1, 2, 3], [4, 5, 6]).outcome is Outcome.LANDED
    stored = copies.move(HOST, DISK, [4, 5, 6], [9, 3, 4], LABELS[:3])
    assert (stored.outcome, stored.num_landed, stored.num_bytes) == (Outcome.LANDED, 3, 3 * BLOCK)
    assert copies.move(DISK, HOST, [9, 3, 4], [0, 8, 1]).outcome is Outcome.LANDED
    copies.pool.zero_()
    assert copies.move(HOST, DEVICE, [0, 8, 1], [7, 8, 9]).outcome is Outcome.LANDED
    assert copies.pool[[7, 8, 9]].equal(before[[1, 2, 3]])
    found, transfers = copies.disk.statistics(), copies.transport.statistics()
    assert (found.num_loads, found.num_stores, found.blocks_loaded, found.bytes_stored) == (1, 1, 3, 3 * BLOCK)
    assert (transfers.num_loads, transfers.num_stores, transfers.blocks_corrupt) == (1, 1, 0)


@pytest.mark.parametrize("is_simulated", [False, True])
def test_another_process_finds_what_was_stored(open_disk: Callable[..., DiskCopies], is_simulated: bool) -> None:
    """Its slots, tokens and bytes."""
    disk = simulated() if is_simulated else None
    first = open_disk(disk)
    first.move(DEVICE, HOST, [1, 2, 3], [0, 1, 2])
    first.move(HOST, DISK, [0, 1, 2], [9, 3, 4], LABELS[:3])
    assert first.transport.close(GUARD_S)
    second = open_disk(disk, seed=1)
    (found,) = second.read_back()
    assert (found.start, found.stop, found.slots[0].tolist()) == (0, 3, [9, 3, 4])
    assert second.move(DISK, HOST, [9, 3, 4], [5, 6, 7]).outcome is Outcome.LANDED
    second.move(HOST, DEVICE, [5, 6, 7], [1, 2, 3])
    assert second.pool[[1, 2, 3]].equal(first.pool[[1, 2, 3]])


def test_a_reset_outlives_the_process(open_disk: Callable[..., DiskCopies]) -> None:
    """What was planned before it is not found, even if it is stored after it; and a reset that ends after a later one
    does not take that one back."""
    disk = simulated()
    first = open_disk(disk)
    first.move(HOST, DISK, [0], [1], LABELS[:1])
    assert first.reset(2) == "" == first.reset(1)
    first.move(HOST, DISK, [1], [2], LABELS[1:2], generation=1)
    first.move(HOST, DISK, [0], [7], LABELS[:1], generation=2)
    first.transport.close(GUARD_S)
    assert [found.slots[0].tolist() for found in open_disk(disk).read_back()] == [[7]]


def test_a_reset_that_fails_ends_the_use_of_the_disk(open_disk: Callable[..., DiskCopies]) -> None:
    """A restart may find what was to be forgotten: at least nothing is added to it."""
    disk = simulated()
    copies = open_disk(disk)
    disk.fault = lambda call: DiskFault.ERROR if call.kind == "sync" else None
    assert "Input/output" in copies.reset(1)
    with pytest.raises(TransferRefused, match="a reset did not reach the disk"):
        copies.move(HOST, DISK, [0], [1], LABELS[:1], generation=1)
    assert copies.disk.refuses(Direction.LOAD) and copies.disk.refuses(Direction.STORE)
    assert copies.move(DEVICE, HOST, [1], [0]).outcome is Outcome.LANDED


@pytest.mark.parametrize(
    ("kind", "link", "other"),
    [("write", (HOST, DISK), (DISK, HOST)), ("read", (DISK, HOST), (HOST, DISK))],
)
def test_a_direction_that_hangs_leaves_threads_to_the_other(
    open_disk: Callable[..., DiskCopies], kind: str, link: tuple[Tier, Tier], other: tuple[Tier, Tier]
) -> None:
    """However many of its jobs hang; copies of the device go on, too."""
    disk = simulated()
    copies = open_disk(disk)
    copies.move(HOST, DISK, list(range(6)), list(range(6)), LABELS)
    hanging = Hanging(disk, lambda call: call.kind == kind and call.name == "slab")
    try:
        hung = {copies.launch(*link, [number], [number + 8]) for number in range(6)}
        hanging.wait_for(2)
        copies.guard_s = 10.0
        assert copies.move(DEVICE, HOST, [1], [0]).outcome is Outcome.LANDED
        if other == (DISK, HOST):
            assert copies.move(*other, [5], [5]).outcome is Outcome.LANDED
        else:
            assert copies.move(*other, [5], [20], LABELS[5:]).outcome is Outcome.LANDED
    finally:
        hanging.resume()
    assert {copies.next().job_id for _ in hung} == hung


def test_closing_waits_no_longer_than_it_is_told_to(open_disk: Callable[..., DiskCopies]) -> None:
    """The thread that hangs closes the files when it ends: then another process may have them."""
    disk = simulated()
    copies = open_disk(disk)
    hanging = Hanging(disk, lambda call: call.kind == "write")
    try:
        copies.launch(HOST, DISK, [0], [0], LABELS[:1])
        queued = [copies.launch(HOST, DISK, [number], [number]) for number in (1, 2, 3)]
        hanging.wait_for(2)
        assert not copies.transport.close(0.01)
        assert disk.is_locked
    finally:
        hanging.resume()
    assert copies.disk.join(10.0) and not disk.is_locked, "idle threads end without being told again"
    assert copies.transport.close(GUARD_S)
    found = {completion.job_id: completion for completion in (copies.next() for _ in range(4))}
    assert {found[job_id].outcome for job_id in queued[1:]} == {Outcome.FAILED}  # never begun


def test_what_is_given_up_is_not_recorded(open_disk: Callable[..., DiskCopies]) -> None:
    """Its source is somebody else's by the time the disk goes on: neither this process nor a restart finds it."""
    disk = simulated()
    copies = open_disk(disk)
    hanging = Hanging(disk, lambda call: call.kind == "write" and call.name == "slab")
    try:
        job_id = copies.launch(HOST, DISK, [0], [5], LABELS[:1])
        hanging.wait_for(1)
        copies.transport.give_up(job_id)
        copies.host[0] = 77  # type: ignore[index]
    finally:
        hanging.resume()
    assert copies.next().outcome is Outcome.FAILED
    assert copies.move(DISK, HOST, [5], [1]).outcome is Outcome.CORRUPT
    copies.transport.close(GUARD_S)
    assert open_disk(disk).read_back() == []


def test_what_is_given_up_in_the_middle_takes_back_what_was_recorded(open_disk: Callable[..., DiskCopies]) -> None:
    """Slots that are no neighbours are written and recorded one after the other: nothing of the job is found."""
    writes = itertools.count()
    given_up_at(open_disk, [5, 9, 7], lambda call: call.kind == "write" and call.name == "slab" and next(writes) == 2)


def test_what_is_given_up_while_it_is_recorded_is_taken_back(open_disk: Callable[..., DiskCopies]) -> None:
    """Its blocks are there, and what they hold may have been overwritten since: no restart finds them."""
    given_up_at(open_disk, [5, 6, 7], lambda call: call.kind == "write" and call.name == "table")


def given_up_at(open_disk: Callable[..., DiskCopies], slots: list[int], wanted: Callable[[IOCall], bool]) -> None:
    """A store is given up at the call that is wanted: it has landed nothing, now and after a restart."""
    disk = simulated()
    copies = open_disk(disk)
    hanging = Hanging(disk, wanted)
    try:
        job_id = copies.launch(HOST, DISK, [0, 1, 2], slots, LABELS[:3])
        hanging.wait_for(1)
        copies.transport.give_up(job_id)
    finally:
        hanging.resume()
    ended = copies.next()
    assert (ended.outcome, ended.num_landed) == (Outcome.FAILED, 0)
    assert copies.move(DISK, HOST, [5], [1]).outcome is Outcome.CORRUPT
    copies.transport.close(GUARD_S)
    assert open_disk(disk).read_back() == []


def test_what_is_given_up_before_it_begins_touches_nothing(open_disk: Callable[..., DiskCopies]) -> None:
    """A load would overwrite host blocks that somebody else may get once its end is told."""
    disk = simulated()
    copies = open_disk(disk)
    copies.move(HOST, DISK, [0, 1, 2, 3], [0, 1, 2, 3], LABELS[:4])
    hanging = Hanging(disk, lambda call: call.kind == "read")
    try:
        for number in range(3):
            copies.launch(DISK, HOST, [number], [8 + number])
        hanging.wait_for(3)
        last = copies.launch(DISK, HOST, [3], [12])
        copies.transport.give_up(last)
        num_calls = disk.num_calls
    finally:
        hanging.resume()
    found = {completion.job_id: completion for completion in (copies.next() for _ in range(4))}
    assert (found[last].outcome, found[last].error) == (Outcome.FAILED, "given up before it was begun")
    assert disk.num_calls == num_calls


def test_a_disk_that_fails_is_left_alone_for_a_while(open_disk: Callable[..., DiskCopies]) -> None:
    """Two failures in a row, then half a second, then twice as long; a success ends it. The other direction goes on."""
    disk = simulated()
    copies = open_disk(disk)
    refuses = copies.disk.refuses
    disk.fault = lambda call: DiskFault.ERROR if call.kind == "write" and call.name == "slab" else None
    for expected in (False, True):
        assert copies.move(HOST, DISK, [0], [0]).outcome is Outcome.FAILED
        assert (refuses(Direction.STORE), refuses(Direction.LOAD)) == (expected, False)
    copies.clock.seconds = 0.5
    assert not refuses(Direction.STORE)
    copies.move(HOST, DISK, [0], [0])
    copies.clock.seconds = 1.4
    assert refuses(Direction.STORE)
    disk.fault = lambda call: None
    copies.clock.seconds = 1.5
    assert not refuses(Direction.STORE)
    assert copies.move(HOST, DISK, [0], [0]).outcome is Outcome.LANDED
    disk.fault = lambda call: DiskFault.ERROR if call.kind == "write" and call.name == "slab" else None
    copies.move(HOST, DISK, [0], [0])
    assert not refuses(Direction.STORE)
    assert copies.disk.statistics().num_failures == 4
    first, again, back = copies.disk.take_moves()
    assert all((moved.tier, moved.use, moved.node) == (DISK, Use.STORE, "") for moved in (first, again, back))
    assert isinstance(first.move, Opened) and isinstance(again.move, Opened) and first.move.error
    assert [(move.for_s, move.num_failures, move.is_first) for move in (first.move, again.move)] == [
        (0.5, 2, True), (1.0, 3, False),
    ]  # fmt: skip
    assert back.move == Closed(1.5, 0) and not copies.disk.take_moves()


def test_a_host_block_that_has_changed_is_not_stored(open_disk: Callable[..., DiskCopies]) -> None:
    """With `verify`, memory that fails does not get a sum of its own on the disk."""
    copies = open_disk(verify=True)
    copies.move(DEVICE, HOST, [1, 2], [0, 1])
    copies.host[1, 7] ^= 1  # type: ignore[index]
    found = copies.move(HOST, DISK, [0, 1], [0, 1], LABELS[:2])
    assert (found.outcome, found.num_landed) == (Outcome.FAILED, 1)
    assert copies.move(DISK, HOST, [0], [5]).outcome is Outcome.LANDED
    assert copies.move(DISK, HOST, [1], [6]).outcome is Outcome.CORRUPT


def test_what_is_forgotten_is_found_by_nobody(open_disk: Callable[..., DiskCopies]) -> None:
    """Neither by a load nor by a restart; what is stored in its slot afterwards is."""
    disk = simulated()
    copies = open_disk(disk)
    copies.move(HOST, DISK, [0, 1], [4, 5], LABELS[:2])
    writes = itertools.count()
    hanging = Hanging(disk, lambda call: call.kind == "write" and call.name == "table" and next(writes) == 0)
    try:
        copies.disk.forget([4, 5])
        hanging.wait_for(1)
        job_id = copies.launch(HOST, DISK, [0], [4], LABELS[:1])
        copies.wait_until_idle(NUM_THREADS - 1)
        assert copies.disk.statistics().num_stores == 1  # the second one waits
    finally:
        hanging.resume()
    assert copies.next().job_id == job_id
    assert copies.move(DISK, HOST, [4], [7]).outcome is Outcome.LANDED
    assert copies.move(DISK, HOST, [5], [7]).outcome is Outcome.CORRUPT
    copies.transport.close(GUARD_S)
    assert [found.slots[0].tolist() for found in open_disk(disk).read_back()] == [[4]]


@pytest.mark.parametrize("link", [(DISK, DEVICE), (DEVICE, DISK), (DISK, DISK)])
def test_the_disk_has_ways_to_the_host_only(open_disk: Callable[..., DiskCopies], link: tuple[Tier, Tier]) -> None:
    """And its slots have bounds, as all blocks do."""
    copies = open_disk()
    with pytest.raises(TransferRefused, match="has no link from"):
        copies.launch(*link, [1], [2])
    with pytest.raises(TransferRefused, match="destination_ids must be in"):
        copies.launch(HOST, DISK, [1], [copies.disk.num_slots])


@pytest.mark.parametrize("payload", [None, LABELS[0], tuple(LABELS[:1])])
def test_a_store_without_a_payload_is_refused(open_disk: Callable[..., DiskCopies], payload: object) -> None:
    """Before anything is written: the disk would not know what the slots hold. A load needs none."""
    copies = open_disk()
    plan = TransferPlan(1, HOST, DISK, array("i", [0]), array("i", [3]), payload)
    with pytest.raises(TransferRefused, match="not the payload of a store"):
        copies.transport.launch(plan, None)
    assert copies.move(HOST, DISK, [0], [3], LABELS[:1]).outcome is Outcome.LANDED
    assert copies.move(DISK, HOST, [3], [5]).outcome is Outcome.LANDED


def test_a_transport_without_a_disk_has_no_way_there(tmp_path: Path) -> None:
    """Nor has one whose disk was never told what it is for; it leaves nothing open."""
    copies = DiskCopies(tmp_path / "disk", simulated())
    copies.transport.close(GUARD_S)
    plain = LocalTransport(copies.pool)
    plain.open(4, verify=False, deliver=print, env=copies.clock)
    copies.transport = plain
    with pytest.raises(TransferRefused, match="has no link from"):
        copies.launch(HOST, DISK, [1], [2])
    assert plain.close(GUARD_S) and plain.disk is None
    unknown = LocalTransport(copies.pool, disk=DiskTier(str(tmp_path / "other"), 1 << 20))
    with pytest.raises(WrongState, match="layout"):
        unknown.open(4, verify=False, deliver=print, env=copies.clock)
    assert not (tmp_path / "other").exists()


def test_a_backend_without_host_memory_takes_no_disk(tmp_path: Path) -> None:
    """The disk reads and writes host memory itself."""
    copies = DiskCopies(tmp_path / "disk", simulated())
    copies.transport.close(GUARD_S)
    with pytest.raises(ConfigError, match="host memory") as refusal:
        LocalTransport(copies.pool, RegionBackend, DiskTier("x", 1 << 20))  # type: ignore[arg-type]
    assert refusal.value.argument == "backend"
