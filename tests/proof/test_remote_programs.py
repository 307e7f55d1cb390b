"""Programs over ledgers with a remote store: clean on both faces, sharp enough for planted defects."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import count, islice
from typing import Any

import pytest

from aoffload._tiers.fetch import rules as fetches
from aoffload._tiers.remote import rules as remote_stores
from aoffload._tiers.remote.memory import Removals
from aoffload._tiers.remote.plans import CellLabel
from aoffload._tiers.remote.rules import RemoteStores
from proof.programs import Program, as_test, call, check_program, run_program
from proof.programs.explore import LEDGERS, _draw_ledger_program
from proof.programs.program import Face, GroupShape, Outcome, World, draw_world

FACES: tuple[Face, ...] = ("ledger", "engine")
each_face = pytest.mark.parametrize("face", FACES)
MET = {
    "remote store", "remote store landed", "remote load landed", "remote load failed", "cell gone", "cell taken back",
    "told too much", "match fetched", "failed put arrives revoked", "revoked cell met",
}  # fmt: skip


def has_store(face: Face, seed: int) -> bool:
    """Whether the program of a seed has a remote store: its world is the first that is drawn."""
    drawn = random.Random(f"program {seed}" if face == "ledger" else f"program {face} {seed}")
    return LEDGERS[face].world(draw_world(drawn)).cell_units > 0


def with_stores(face: Face, num_programs: int) -> Iterator[tuple[Program, Outcome]]:
    """Programs that have a store."""
    for seed in islice((seed for seed in count() if has_store(face, seed)), num_programs):
        yield _draw_ledger_program(face, seed, 60)[:2]


def violations(face: Face, num_programs: int = 400) -> str:
    """The first law that is broken."""
    for _, outcome in with_stores(face, num_programs):
        if outcome.violation is not None:
            return str(outcome.violation)
    return ""


@each_face
def test_programs_with_a_store_break_no_law(face: Face) -> None:
    """Cells that are gone, spoiled, late, given up or taken back, answers that are no longer true, restarts: the right
    bytes or a miss, nothing leaks, and nothing that was invalidated stays in the store."""
    found = list(with_stores(face, 60 if face == "ledger" else 20))
    for program, outcome in found:
        assert outcome.violation is None, as_test(program, "found", outcome.violation)
    rare = {"revoked cell met"} if face == "engine" else set[str]()
    assert set[str]().union(*(outcome.features for _, outcome in found)) >= MET - rare


@each_face
def test_a_program_that_is_run_again_comes_to_the_same(face: Face) -> None:
    """The store included."""
    for program, outcome in with_stores(face, 6):
        again = run_program(program)
        assert (again.digest, again.violation) == (outcome.digest, None)


def test_what_stays_in_the_store_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a forward that has failed."""
    monkeypatch.setattr(RemoteStores, "invalidate", lambda self, sequence, first, stop: [])
    assert violations("ledger").startswith("bytes taken back")


@each_face
def test_a_failed_put_that_arrives_after_the_removal_is_noticed(face: Face, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that takes the end of a call for the end of its put loads what it has invalidated."""
    monkeypatch.setattr(Removals, "has_revoked", lambda self, label, number: False)
    assert violations(face).startswith("bytes taken back")


def test_what_is_removed_before_it_arrives_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is there again right after."""

    def at_once(self: RemoteStores) -> tuple[CellLabel, ...]:
        found, self.forgotten = tuple(self.forgotten.values()), {}
        return found

    monkeypatch.setattr(RemoteStores, "take_forgotten", at_once)
    assert violations("ledger").startswith("bytes taken back")


@pytest.mark.pure("plants a defect in the core")
@each_face
def test_cells_of_other_tokens_are_noticed(face: Face, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the index has beside the prompt is no part of it."""
    right = remote_stores.present_stop

    def too_far(path: Any, tier: Any, start: int, stop: int) -> int:
        return right(path, tier, start, path[-1].stop)

    monkeypatch.setattr(remote_stores, "present_stop", too_far)
    assert violations(face, 400)


@pytest.mark.pure("plants a defect in the core")
@each_face
def test_blocks_at_other_places_are_noticed(face: Face, monkeypatch: pytest.MonkeyPatch) -> None:
    """A load that begins in the middle of a cell takes its own blocks."""
    right = fetches.places_in_cells
    monkeypatch.setattr(
        fetches, "places_in_cells", lambda start, stop, units, width: right(0, stop - start, units, width)
    )
    assert violations(face, 240)


# -- what programs have found ----------------------------------------------------------------------------------------


def test_a_run_that_goes_on_with_other_tokens_is_not_stored_for_a_prompt() -> None:
    """The index holds a run that begins like the prompt; its last block is another prompt's."""
    world = World((GroupShape("full", 0, 2),), 3, 100, 1000, "eager", 0.25, 0.5, 5, cell_units=2)
    check_program(
        Program(
            "ledger",
            world,
            (
                call("admit", who="d6", tokens=[1, 1, 1, 1]),
                call("serve", tokens=[1, 1, 1, 1], new=[1]),
                call("serve", tokens=[1, 1, 1, 0]),
                call("remote_stores", most=1000),
            ),
        )
    )
