"""Invalidated KV is not found after a restart, whichever writes fail, and after a loss of power."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from copies import GUARD_S
from test_disk_records import labels, prompt

pytest.importorskip("xxhash", reason="the extra `disk` is not installed")

from disks import DiskCopies, Hanging, simulated

from aoffload import ConfigError
from aoffload._common.tiers import Tier
from aoffload._kernel.states import Direction, Outcome
from aoffload._tiers.disk.plans import ERASES, RestoredRun
from aoffload.errors import TransferRefused
from proof.disk.simulated_disk import DiskFault, SimulatedDisk

HOST, DISK = Tier.HOST, Tier.DISK
LABELS = labels(prompt(1, 2, 3, 4, 5, 6))
FAILS = [DiskFault.ERROR, DiskFault.PART_ERROR, DiskFault.SHORT, DiskFault.NO_SPACE]


@pytest.fixture
def open_disk(tmp_path: Path) -> Iterator[Callable[[SimulatedDisk], DiskCopies]]:
    opened: list[DiskCopies] = []

    def open_one(disk: SimulatedDisk) -> DiskCopies:
        opened.append(DiskCopies(tmp_path / "disk", disk))
        return opened[-1]

    yield open_one
    for copies in opened:
        copies.transport.close(GUARD_S)


def with_three(open_disk: Callable[[SimulatedDisk], DiskCopies], disk: SimulatedDisk) -> DiskCopies:
    """Three blocks of one prompt in slots 3, 4 and 9."""
    copies = open_disk(disk)
    assert copies.read_back() == []
    assert copies.move(HOST, DISK, [0, 1, 2], [3, 4, 9], LABELS[:3]).outcome is Outcome.LANDED
    return copies


def forget(copies: DiskCopies, *slots: int) -> None:
    """And wait until that is done."""
    copies.disk.forget(slots)
    wait_forgotten(copies)


def wait_forgotten(copies: DiskCopies) -> None:
    """What is stored later waits for it."""
    copies.move(HOST, DISK, [0], [40])


def left(
    open_disk: Callable[[SimulatedDisk], DiskCopies], disk: SimulatedDisk, copies: DiskCopies, *, power: bool = False
) -> list[list[int]]:
    """The slots that the next process finds, prompt by prompt; with `power`, power is lost before."""
    return [found.slots[0].tolist() for found in runs_left(open_disk, disk, copies, power=power)]


def runs_left(
    open_disk: Callable[[SimulatedDisk], DiskCopies], disk: SimulatedDisk, copies: DiskCopies, *, power: bool = False
) -> list[RestoredRun]:
    assert copies.transport.close(GUARD_S)
    disk.fault = lambda call: None
    if power:
        disk.lose_power()
    return open_disk(disk).read_back()


def written(disk: SimulatedDisk) -> None:
    """The system has written everything meanwhile."""
    for content in disk.files.values():
        content.settle()


def fails_first(disk: SimulatedDisk, fault: DiskFault, num_calls: int, kind: str = "write") -> None:
    """The next `num_calls` calls of that kind about the table fail."""
    calls = iter(range(num_calls))
    disk.fault = lambda call: (
        fault if (call.kind, call.name) == (kind, "table") and next(calls, None) is not None else None
    )


@pytest.mark.parametrize("fault", FAILS)
@pytest.mark.parametrize("num_calls", range(1, ERASES))
def test_an_erasure_that_fails_is_made_again(
    open_disk: Callable[[SimulatedDisk], DiskCopies], fault: DiskFault, num_calls: int
) -> None:
    """An error, and a write that was cut short, count as nothing erased. What was not taken back stays."""
    disk = simulated()
    copies = with_three(open_disk, disk)
    fails_first(disk, fault, num_calls)
    forget(copies, 9, 4)
    assert left(open_disk, disk, copies) == [[3]] and copies.troubles == []


def test_an_erasure_outlives_a_loss_of_power(open_disk: Callable[[SimulatedDisk], DiskCopies]) -> None:
    """Once it is done, no older version of the table may come back."""
    for seed in range(20):
        disk = simulated(seed)
        copies = with_three(open_disk, disk)
        written(disk)
        forget(copies, 3)
        assert left(open_disk, disk, copies, power=True) == []


@pytest.mark.parametrize("kind", ["write", "sync"])
def test_what_cannot_be_erased_takes_all_with_it(open_disk: Callable[[SimulatedDisk], DiskCopies], kind: str) -> None:
    """A restart finds nothing that was there. The disk is used as before: what is stored later is found, and resets
    work; what was planned before one is not found after it."""
    disk = simulated()
    copies = with_three(open_disk, disk)
    fails_first(disk, DiskFault.ERROR, ERASES, kind)
    forget(copies, 4)
    assert [trouble.is_off for trouble in copies.troubles] == [False]
    assert "a restart finds nothing" in copies.troubles[0].reason and "Input/output" in copies.troubles[0].reason
    assert copies.move(DISK, HOST, [3], [5]).outcome is Outcome.LANDED, "this process still finds the others"
    assert copies.move(HOST, DISK, [0], [7], LABELS[:1]).outcome is Outcome.LANDED
    assert left(open_disk, disk, copies) == [[7]]
    again = with_three(open_disk, disk := simulated())
    fails_first(disk, DiskFault.ERROR, ERASES, kind)
    forget(again, 4)
    assert again.reset(1) == ""
    again.move(HOST, DISK, [0], [7], LABELS[:1])
    again.move(HOST, DISK, [0], [8], LABELS[:1], generation=1)
    assert left(open_disk, disk, again) == [[8]]


def test_a_disk_that_takes_no_writes_is_emptied_and_used_no_more(
    open_disk: Callable[[SimulatedDisk], DiskCopies],
) -> None:
    """Neither the records nor the generation can be written: dropping the table works, and so a restart is right."""
    disk = simulated()
    copies = with_three(open_disk, disk)
    fails_first(disk, DiskFault.ERROR, 1000)
    copies.disk.forget([4])
    assert copies.transport.close(GUARD_S)
    assert [trouble.is_off for trouble in copies.troubles] == [True]
    assert "a restart finds nothing" in copies.troubles[0].reason
    assert left(open_disk, disk, copies) == []


def test_a_disk_on_which_nothing_works_is_used_no_more(open_disk: Callable[[SimulatedDisk], DiskCopies]) -> None:
    """It says that a restart may find invalidated KV, and what to do; a restart on such a disk is refused."""
    disk = simulated()
    copies = with_three(open_disk, disk)
    disk.fault = lambda call: DiskFault.ERROR if call.kind != "read" else None
    with suppress(TransferRefused):
        forget(copies, 4)
    assert copies.troubles[0].is_off and "a restart may find them: delete the files" in copies.troubles[0].reason
    assert copies.disk.refuses(Direction.LOAD) and copies.disk.refuses(Direction.STORE)
    with pytest.raises(TransferRefused, match="could not be erased"):
        copies.launch(HOST, DISK, [0], [1])
    assert copies.transport.close(GUARD_S)
    disk.fault = lambda call: DiskFault.ERROR if call.kind == "write" else None
    with pytest.raises(ConfigError, match="cannot be used"):
        open_disk(disk)


def test_what_a_store_under_way_was_to_replace_is_forgotten_with_the_rest(
    open_disk: Callable[[SimulatedDisk], DiskCopies],
) -> None:
    """The slots of a store still have the records of what they held before, which may be invalidated KV. If the store
    fails, they are erased; if it succeeds, its own records outlive a loss of power."""
    for seed in range(20):
        for fails in (False, True):
            disk = simulated(seed)
            copies = with_three(open_disk, disk)
            written(disk)
            hanging = Hanging(disk, lambda call: (call.kind, call.name) == ("write", "slab"))
            job_id = copies.launch(HOST, DISK, [5], [3], labels(prompt(7)))
            hanging.wait_for(1)
            copies.disk.forget([])  # what slot 3 held is part of it
            if fails:
                copies.transport.give_up(job_id)
            hanging.resume()
            assert copies.next().outcome is (Outcome.FAILED if fails else Outcome.LANDED)
            wait_forgotten(copies)
            assert LABELS[0].tokens not in [run.tokens[:16] for run in runs_left(open_disk, disk, copies, power=True)]


def test_records_that_could_not_be_written_are_erased_with_the_rest(
    open_disk: Callable[[SimulatedDisk], DiskCopies],
) -> None:
    """A slot whose new record was not written has its old one, and a loss of power may bring the old data back, too."""
    for seed in range(20):
        disk = simulated(seed)
        copies = with_three(open_disk, disk)
        written(disk)
        fails_first(disk, DiskFault.ERROR, 1)
        assert copies.move(HOST, DISK, [5], [3], labels(prompt(7))).outcome is Outcome.LANDED
        forget(copies)
        assert LABELS[0].tokens not in [run.tokens[:16] for run in runs_left(open_disk, disk, copies, power=True)]
