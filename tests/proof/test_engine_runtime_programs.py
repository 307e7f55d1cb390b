"""Programs over a runtime whose device blocks are an engine's: clean on both backends, the same in every process, sharp
enough for planted defects."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from aoffload._host_cache.matches import Arrivals, EngineTier
from aoffload._runtime.request import EngineRequest
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

FACES: tuple[Face, ...] = ("engine-asyncio", "engine-trio")
each_face = pytest.mark.parametrize("face", FACES)
MOST_CALLS = 12
MET = {
    "engine hit", "host hit", "pending", "asked again", "load", "load_nowait", "load lost", "offer", "last offer",
    "invalidate", "step", "thread", "drafts", "no room", "evict", "run", "pin", "reset", "reset host", "flush",
    "cancel scope", "cancel request", "cancel runtime", "native cancel", "call scope", "deadline", "close", "done",
    "aborted: prefix_invalidated", "fail", "hang", "lose", "flip", "rot", "verify", "window", "chunk", "groups", "span",
}  # fmt: skip


@pytest.mark.parametrize(("face", "num_programs"), [("engine-asyncio", 40), ("engine-trio", 80)])
def test_programs_break_no_law(face: Face, num_programs: int) -> None:
    """An engine that frees at once, reuses what it frees and caches prefixes itself gets the right bytes or a miss,
    whoever is cancelled where; and in the end no block is held."""
    tally = explore_programs(face, 0, num_programs)
    assert not tally.broken, tally.broken[0]
    assert {name for pair in tally.pairs for name in pair} >= MET
    assert tally.num_calls > 25 * num_programs


@each_face
def test_a_program_that_is_run_again_comes_to_the_same(face: Face) -> None:
    """It is drawn while it runs; run from its calls alone, every event is the same. A line replays it."""
    for seed in range(5):
        program, outcome = replay_program(f"{face} seed={seed} calls=60")
        assert run_program(program) == outcome


# -- planted defects --------------------------------------------------------------------------------------------------


def _nobody_told(self: EngineRequest, from_token: int) -> None:
    self._session.ledger.invalidate(self._live(), from_token)


def _given_before_proof(self: EngineTier, block_ids: Any) -> None:
    quarantine(self, block_ids)
    self.unhold(block_ids)


def _asks_without_a_wake(self: Any, *, num_device_tokens: int) -> Any:
    return self._session.ledger.match_again(self._live(), num_device_tokens=num_device_tokens)


quarantine = EngineTier.quarantine
PLANTED: dict[str, tuple[Any, str, Callable[..., Any], tuple[str, ...]]] = {
    "copies hold nothing": (EngineTier, "hold", lambda self, block_ids: None, ("a job's blocks", "conservation")),
    "given back before the proof": (EngineTier, "quarantine", _given_before_proof, ("a job's blocks", "conservation")),
    "readers of a failed forward go on": (EngineRequest, "invalidate", _nobody_told, ("not told", "wrong bytes")),
    "who waits for another's load is not woken": (
        EngineRequest, "match_again_nowait", _asks_without_a_wake, ("a wait without a need",),
    ),
    "a wait for another's load is not bounded": (
        Arrivals, "pending_until", lambda self, record: 1e9, ("a wait past its bound",),
    ),
    "found blocks hold something else": (
        EngineTier, "find", lambda self, request_id, group, start, stop: [1] * (stop - start),
        ("wrong bytes", "stored twice"),
    ),
}  # fmt: skip


IN_THE_CORE = {name: pytest.mark.pure("plants a defect in the core") for name in list(PLANTED)[:2]}


@pytest.mark.parametrize("name", [pytest.param(name, marks=IN_THE_CORE.get(name, ())) for name in PLANTED])
def test_a_planted_defect_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As what it is."""
    where, method, defect, laws = PLANTED[name]
    monkeypatch.setattr(where, method, defect)
    assert (broken := first_broken()).violation.startswith(laws), broken


@pytest.mark.pure("plants a defect in the core")
def test_a_broken_program_is_shortened(monkeypatch: pytest.MonkeyPatch) -> None:
    """To the calls that it takes."""
    monkeypatch.setattr(EngineTier, "hold", lambda self, block_ids: None)
    assert len(first_broken().shortest(150).calls) <= MOST_CALLS


def first_broken(num_programs: int = 600) -> Broken:
    for first in range(0, num_programs, 10):
        if broken := explore_programs("engine-trio", first, 10).broken:
            return broken[0]
    raise AssertionError("the planted defect was not found")


# -- what programs have found -----------------------------------------------------------------------------------------

TOKENS = (1, 2, 3, 3, 3, 1, 1, 1, 1, 1, 3, 3, 2, 1, 1, 3, 1, 1, 1)


@each_face
def test_what_is_taken_back_is_waited_for_no_more(face: Face) -> None:
    """A request takes back what it has loaded, before it has offered: who was told to ask again is woken. It waited for
    `pending_timeout_s`."""
    calls = (
        call("serve", who="b", tokens=(2, 2)),
        call("evict", who="a"),
        call("request", who="b", tokens=(2, 2, 3)),
        call("load", who="b"),
        call("serve", who="a", tokens=(2, 2, 3)),
        call("invalidate", who="b"),
        call("request", who="a", tokens=(2,)),
    )
    world = World((GroupShape("full", 0, 2),), 3, 100, 1000, "eager")
    for seed in range(10):
        check_program(Program(face, world, calls, seed))


def test_asking_again_without_alarms_lets_time_pass() -> None:
    """The worker's task is cancelled natively: who is told to ask again waits, bounded. It asked without end."""
    calls = (
        call("configure", verify=True),
        call("fault", kind="rot", at=1),
        call("fault", kind="worker", at=55),
        call("serve", who="c", tokens=(*TOKENS, 3, 1, 1)),
        call("flush", who="a"),
        call("request", who="b", tokens=(1,), hurry=True),
        call("evict", who="a"),
        call("request", who="b", tokens=TOKENS),
        call("load", who="b", hurry=True),
        call("request", who="a", tokens=(1, 2, 3)),
        call("cancel", who="a", how="native", after=1),
        call("load", who="a"),
        call("serve", who="a", tokens=(1, 2, 3)),
    )
    world = World((GroupShape("full", 0, 2),), 12, 100, 2, "eager", 0.25)
    for seed in range(70, 90):
        check_program(Program("engine-asyncio", world, calls, seed))
