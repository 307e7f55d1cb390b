"""Programs over a `HostCache`: the violations that they find, and the programs that once found one."""

from __future__ import annotations

from typing import Any

import pytest

from aoffload._host_cache.host_cache import HostCache
from aoffload._host_cache.matches import Arrivals, EngineTier
from aoffload._kernel.records import LedgerRequest
from proof.programs import Broken, GroupShape, Program, World, call, check_program, explore_programs

ZEROS = [0] * 9


def found(num_programs: int = 600) -> Broken:
    """The first broken program."""
    for first in range(0, num_programs, 20):
        if broken := explore_programs("engine", first, 20).broken:
            return broken[0]
    raise AssertionError("nothing was found")


def test_programs_break_no_law() -> None:
    """An engine that frees at once, reuses what it frees, and caches prefixes itself gets the right bytes or a miss."""
    tally = explore_programs("engine", 0, 150)
    assert not tally.broken, tally.broken[0]
    assert tally.num_programs == 150 and tally.num_calls > 7_500
    met = {name for pair in tally.pairs for name in pair}
    assert {
        "engine hit",
        "host hit",
        "pending",
        "load lost",
        "invalidate",
        "told",
        "reset host",
        "window",
        "pin",
    } <= met


@pytest.mark.parametrize(
    ("name", "law"),
    [
        pytest.param("hold", "a job's blocks", marks=pytest.mark.pure("plants a defect in the core")),
        pytest.param("unhold", "a job's blocks", marks=pytest.mark.pure("plants a defect in the core")),
        ("find", "wrong bytes"),
    ],
)
def test_what_the_engine_is_told_wrongly_is_noticed(name: str, law: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that a job touches and does not hold, holds for ever, or that hold something else, are found."""
    wrong: dict[str, Any] = {
        "hold": lambda self, block_ids: None,
        "unhold": lambda self, block_ids: None,
        "find": lambda self, request_id, group, start, stop: [1] * (stop - start),
    }
    monkeypatch.setattr(EngineTier, name, wrong[name])
    broken = found()
    told = broken.violation.removeprefix("events: ")  # an observer may be the first to see it
    assert told.startswith(law) or "integrity" in told or "held by no job" in told, broken
    assert len(broken.shortest().calls) <= 8


@pytest.mark.pure("plants a defect in the core")
def test_who_is_not_told_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that goes on with the blocks that a failed forward has left in the engine's cache breaks a law."""

    def nobody(self: HostCache, other: LedgerRequest, record: LedgerRequest, from_token: int) -> bool:
        return False

    monkeypatch.setattr(HostCache, "_may_have_read", nobody)
    assert found().violation.startswith(("not told", "bytes taken back"))


@pytest.mark.pure("plants a defect in the core")
def test_a_wait_that_nobody_ends_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pending request is woken when there is nothing left to wait for."""
    monkeypatch.setattr(Arrivals, "over", lambda self, record: [])
    assert found().violation.startswith("a wait without a need")


# -- what programs have found ----------------------------------------------------------------------------------------


def test_a_hit_at_whose_end_nothing_is_needed_is_no_load() -> None:
    """At the end of a chunk no block is needed: the request runs at once. It was LOADING for ever, without a job."""
    calls = (
        call("serve", tokens=[0] * 20),
        call("admit", who="a", tokens=ZEROS),
        call("ask", who="a", fewer=2),
        call("load", who="a"),
        call("admit", who="b", tokens=ZEROS),
        call("ask", who="b", fewer=2),
        call("compute", who="a", stop=9),
    )
    check_program(Program("engine", World((GroupShape("chunk", 8, 4),), 9, 100, 1000, "eager"), calls))


def test_a_block_shorter_than_a_unit_may_be_that_of_other_tokens() -> None:
    """Prompts that part inside of a unit share blocks of the groups whose blocks are shorter: what one of them has
    computed wrongly is invalidated for both."""
    calls = (
        call("admit", who="a", tokens=[0, 1], spans=[(1, 2, b"dog")]),
        call("admit", who="b", tokens=[0, 1]),
        call("compute", who="a", stop=2),
        call("compute", who="b", stop=9),
        call("serve", tokens=[0, 1, 0, 1]),
        call("invalidate", who="a", from_token=0),
    )
    groups = (GroupShape("chunk", 9, 2), GroupShape("window", 4, 1))
    check_program(Program("engine", World(groups, 10, 200, 1000, "eager"), calls))


def test_an_engine_may_know_less_of_what_is_embedded() -> None:
    """Prompts with an image of the same digest from the same token on, but of another length, are other prompts here;
    an engine that only looks at where an image begins shares blocks of them."""
    calls = (
        call("admit", who="a", tokens=[0] * 5, spans=[(2, 5, b"cat")]),
        call("compute", who="a", stop=7),
        call("admit", who="b", tokens=[0] * 9, spans=[(2, 9, b"cat")]),
        call("invalidate", who="a", from_token=2),
    )
    check_program(Program("engine", World((GroupShape("full", 0, 2),), 4, 100, 1000, "eager"), calls))
