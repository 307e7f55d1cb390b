"""Programs over runtimes whose model has a recurrent state: clean on both backends, the same when they are run again,
sharp enough for planted defects."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any

import pytest

from aoffload._extensions.invalidation import Invalidation
from aoffload._host_cache.host_cache import HostCache
from aoffload._kernel import commits, leases
from aoffload._kernel.commits import Commits
from proof import report_programs
from proof.program_runs import ALL_FACES, STATE_FACES, pieces, shares, state_pieces
from proof.programs import (
    Broken,
    Face,
    GroupShape,
    Program,
    World,
    call,
    check_program,
    explore_programs,
    replay_program,
    run_program,
)

OURS: tuple[Face, ...] = ("asyncio-states", "trio-states")
ENGINES: tuple[Face, ...] = ("engine-asyncio-states", "engine-trio-states")
MET = {"checkpoint", "invalidate", "step", "fail", "drafts", "disk", "state", "done", "groups"}
MET_BY_OURS = MET | {
    "reset",
    "checkpoint hit",
    "checkpoint left out",
    "preempt",
    "resume",
    "run_step",
    "commit_step",
    "load",
}
MET_BY_ENGINES = MET | {"checkpoint loaded", "engine hit", "host hit", "thread", "offer", "load", "no room"}


@pytest.mark.parametrize(
    ("face", "num_programs", "met"),
    [
        (OURS[0], 50, MET_BY_OURS), (OURS[1], 50, MET_BY_OURS), (ENGINES[0], 20, MET_BY_ENGINES), (ENGINES[1], 20, MET),
    ],
)  # fmt: skip
def test_programs_with_states_break_no_law(face: Face, num_programs: int, met: set[str]) -> None:
    """Who continues gets the state of exactly its tokens; nothing else makes a checkpoint findable than its name; and
    whoever has read what a failed forward has left is told."""
    tally = explore_programs(face, 0, num_programs, 48)
    assert not tally.broken, tally.broken[0]
    assert {name for pair in tally.pairs for name in pair} >= met


@pytest.mark.parametrize("face", [*OURS, *ENGINES])
def test_a_program_that_is_run_again_comes_to_the_same(face: Face) -> None:
    """A line replays it, and its calls alone do."""
    for seed in range(3):
        program, outcome = replay_program(f"{face} seed={seed} calls=48")
        assert run_program(program) == outcome


# -- planted defects --------------------------------------------------------------------------------------------------


publish, release, published = Commits._publish, leases._release_checkpoints, leases.publish_checkpoint


def _all_that_was_planned(self: Commits, request: Any, num_tokens: int, wanted: int, written: Any = ()) -> Any:
    planned = request.checkpoints.planned if request.checkpoints is not None else {}
    written = sorted(at for at in planned if at * self.cache.layout.unit_tokens <= num_tokens)
    return publish(self, request, num_tokens, wanted, written)


def _keeps_the_hit(cache: Any, request: Any, checkpoints: Any) -> None:
    resume = checkpoints.resume[:]
    release(cache, request, checkpoints)
    checkpoints.resume = resume


def _in_another_order(cache: Any, request: Any, position: int) -> None:
    checkpoints = request.checkpoints
    checkpoints.planned[position] = array("i", reversed(checkpoints.planned[position]))
    published(cache, request, position)


PLANTED: dict[str, tuple[Any, str, Callable[..., Any], Face, tuple[str, ...]]] = {
    "what was left out is found": (Commits, "_publish", _all_that_was_planned, "trio-states", ("may not hit", "wrong")),
    "the checkpoint of the hit is named for ever": (
        leases, "_release_checkpoints", _keeps_the_hit, "asyncio-states", ("no state", "conservation"),
    ),
    "rows in another order": (commits, "publish_checkpoint", _in_another_order, "trio-states", ("wrong bytes",)),
    "a checkpoint beside the KV of another request stays": (
        Invalidation, "_withdraw_checkpoints", lambda self, sources: None, "trio-states", ("wrong bytes", "not told"),
    ),
    "who continued from a wrong checkpoint is not told": (
        Invalidation, "_checkpoints_read_by", lambda self, other, sources: [], "trio-states", ("not told",),
    ),
    "a load without its checkpoint counts": (
        HostCache, "_ready_stop", lambda self, arrival: arrival.stop, "engine-trio-states", ("wrong bytes",),
    ),
}  # fmt: skip


@pytest.mark.pure("plants a defect in the core")
@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_defect_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As what it is."""
    where, method, defect, face, laws = PLANTED[name]
    monkeypatch.setattr(where, method, defect)
    assert (broken := first_broken(face)).violation.startswith(laws), broken


def first_broken(face: Face, num_programs: int = 400) -> Broken:
    for first in range(0, num_programs, 10):
        if broken := explore_programs(face, first, 10, 48).broken:
            return broken[0]
    raise AssertionError("the planted defect was not found")


# -- by hand ----------------------------------------------------------------------------------------------------------

HYBRID = World((GroupShape("full", 0, 2), GroupShape("state", 2, 2)), 40, 40, 1000, "eager")


@pytest.mark.parametrize("face", OURS)
def test_a_checkpoint_is_found_on_the_device_and_in_the_host(face: Face) -> None:
    """The second prompt continues from the device, and the third one from the host."""
    calls = (
        call("serve", who="a", tokens=(1, 2, 3, 1, 2)), call("request", who="a", tokens=(1, 2, 3, 1, 2, 3)),
        call("allocate", who="a"), call("load", who="a"), call("step", who="a"), call("commit", who="a"),
        call("leave", who="a"), call("flush", who="a"), call("reset", who="a", tier="DEVICE"),
        call("request", who="b", tokens=(1, 2, 3, 1, 2)), call("allocate", who="b"), call("load", who="b"),
        call("step", who="b"), call("commit", who="b"),
    )  # fmt: skip
    outcome = run_program(Program(face, HYBRID, calls))
    assert outcome.violation is None
    assert {"checkpoint", "checkpoint hit", "device hit", "load"} <= outcome.features


@pytest.mark.parametrize("face", ENGINES)
def test_an_engine_writes_a_checkpoint_among_accepted_drafts(face: Face) -> None:
    """Its prefix is that of the tokens that were accepted."""
    calls = (
        call("request", who="a", tokens=(1, 2, 3)), call("load", who="a"),
        call("step", who="a", drafts=(1, 2), also=2), call("offer", who="a", new=(1, 2)),
        call("request", who="b", tokens=(1, 2, 3, 1, 2)), call("step", who="b"), call("offer", who="b"),
    )  # fmt: skip
    program = Program(face, HYBRID, calls)
    check_program(program)
    assert {"checkpoint", "engine hit", "drafts"} <= run_program(program).features


# -- in the campaign --------------------------------------------------------------------------------------------------


def test_every_face_has_a_share_of_the_campaign() -> None:
    """Those with states, too, and a run of their own has these alone."""
    assert {piece.face for piece in pieces(1)} == set(ALL_FACES) == set(shares())
    assert {piece.face for piece in state_pieces(1)} == set(STATE_FACES)
    assert sum(piece.num_programs for piece in state_pieces(5_000)) >= 5_000


def test_the_report_counts_calls_with_states() -> None:
    """It says how many, and what programs with states should have met and never did."""
    part = {
        "face": "states", "programs": 30_000, "calls": 2_000_000, "layouts": [], "violations": [],
        "pairs": [[one, one, 3] for one in report_programs.OF_STATES["states"]],
    }  # fmt: skip
    counts, never = report_programs.state_lines([part])[1], report_programs.state_lines([part])[3]
    assert counts.is_met and "states 2,000,000" in counts.what
    assert not never.is_met and "trio-states: checkpoint" in never.found and "'states: checkpoint'" not in never.found
    assert "| states | checkpoint | 3 |" in "".join(report_programs.state_tables([part]))
