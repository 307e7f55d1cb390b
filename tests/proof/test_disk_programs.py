"""Programs over runtimes with a disk: clean on all faces and over restarts, sharp enough for planted defects."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import islice

import pytest

from aoffload._tiers.disk.extension import DiskExtension
from aoffload._tiers.disk.loop import DiskWork
from aoffload.testing.slots import Slots
from proof.programs import GroupShape, Program, World, as_test, call, check_program, run_program
from proof.programs.program import Call, Face, Outcome
from proof.programs.runtime_face import KINDS, draw_and_run

FACES: tuple[Face, ...] = ("asyncio", "trio", "engine-asyncio", "engine-trio")
each_face = pytest.mark.parametrize("face", FACES)
MET = {"disk", "disk fault", "fetch", "reset disk", "restart", "restored"}
FULL = (GroupShape("full", 0, 2),)


def with_disks(face: Face, num_seeds: int) -> Iterator[tuple[Program, Outcome]]:
    """Programs that have a disk, of so many seeds: the world is the first that is drawn."""
    for seed in range(10_000, 10_000 + num_seeds):
        if KINDS[face].world(random.Random(f"program {face} {seed}")).num_disk_blocks:
            yield draw_and_run(face, seed, 48)


def no_law_broken(face: Face, num_programs: int) -> list[tuple[Program, Outcome]]:
    found = list(islice(with_disks(face, 4 * num_programs), num_programs))
    assert len(found) == num_programs
    for program, outcome in found:
        assert outcome.violation is None, as_test(program, "found", outcome.violation)
    return found


@each_face
def test_programs_with_a_disk_break_no_law(face: Face) -> None:
    """What only the disk has, what a failed forward has left there, a disk that fails, and a process that is killed:
    the right bytes or a miss, and nothing leaks."""
    met = set[str]().union(*(outcome.features for _, outcome in no_law_broken(face, 20)))
    assert met >= MET


@each_face
def test_a_program_with_restarts_that_is_run_again_comes_to_the_same(face: Face) -> None:
    """Each process finds what the one before it left."""
    found = [(program, outcome) for program, outcome in no_law_broken(face, 8) if "restart" in outcome.features]
    assert found
    for program, outcome in found:
        assert run_program(program) == outcome


INVALIDATION: tuple[Call, ...] = (
    call("request", who="a", tokens=(2, 3)), call("allocate", who="a"), call("step", who="a"), call("commit", who="a"),
    call("serve", who="b", tokens=(2, 3, 2, 2)), call("flush", who="b"), call("invalidate", who="a"),
    call("restart", how="killed"),
)  # fmt: skip
MENDED: dict[str, tuple[Face, World, tuple[Call, ...], int]] = {
    "killed while a store ends that was taken back": (
        "asyncio", World(FULL, 3, 100, 1000, "eager", num_disk_blocks=18, max_fetch_share=0.25), INVALIDATION, 80,
    ),
    "killed while a block is stored that has rotted": (
        "trio", World(FULL, 4, 100, 2, "eager", num_disk_blocks=200),
        (
            call("configure", verify=True), call("fault", kind="rot", at=2), call("serve", who="b", tokens=(3, 2)),
            call("reset", who="a"), call("reset", who="b"), call("serve", who="c", tokens=(3, 2, 1, 1, 2, 1)),
            call("flush", who="c"), call("restart", how="killed"), call("restored", who="b"),
            call("serve", who="a", tokens=(3, 2, 1)),
        ), 60,
    ),
    "another task loads while one waits for a fetch": (
        "engine-trio", World((GroupShape("window", 2, 2),), 3, 100, 1000, "eager", num_disk_blocks=200),
        (
            call("serve", who="b", tokens=(1, 1), salt="x"), call("request", who="b", tokens=(1, 1)),
            call("serve", who="a", tokens=(1, 1), hurry=True), call("flush", who="a"), call("evict", who="a"),
            call("reset", who="a", tier="HOST"), call("request", who="a", tokens=(1, 1, 3)),
            call("request_fetch", who="a", hurry=True), call("load", who="b", of="a"),
        ), 40,
    ),
}  # fmt: skip
"""What went wrong once: the face, the world, the calls, and in how many orders of its tasks they are made."""


@pytest.mark.parametrize("name", MENDED)
def test_what_went_wrong_once_goes_right(name: str) -> None:
    face, world, calls, num_orders = MENDED[name]
    for seed in range(num_orders):
        check_program(Program(face, world, calls, seed))


def is_found(face: Face) -> bool:
    return any(outcome.violation is not None for _, outcome in with_disks(face, 600))


def test_a_slot_that_another_process_takes_for_another_prompt_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A restart that mixes up slots gives a request the bytes of another."""
    proven = Slots.proven

    def mixed_up(self: Slots, components: object) -> object:
        self.content[:] = self.content[1:] + self.content[:1]
        for slot, record in self.records.items():
            object.__setattr__(record, "content", self.content[slot])
        return proven(self, components)  # type: ignore[arg-type]

    monkeypatch.setattr(Slots, "proven", mixed_up)
    assert is_found("asyncio")


def test_what_is_not_erased_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a failed forward left on the disk hits after a restart."""
    monkeypatch.setattr(DiskWork, "invalidate", lambda self: None)
    monkeypatch.setattr(DiskExtension, "take_forgotten", lambda self: [])
    assert is_found("engine-trio")
