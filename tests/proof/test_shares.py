"""The shares of long runs that one change has to pass: together they are the whole run, and the commit chooses one."""

from __future__ import annotations

import argparse
from collections import Counter

import pytest

from proof import shares
from proof.program_runs import ALL_FACES, pieces, quarter_of
from proof.scenarios import SCENARIOS
from proof.shard import ON_BOTH, worlds
from proof.shares import add_share, share_of


def test_the_quarters_of_the_programs_are_all_programs() -> None:
    """Each piece is in one quarter, and each quarter has every face."""
    found = pieces(20_000)
    quarters = [quarter_of(found, quarter) for quarter in range(4)]
    assert Counter(map(str, found)) == Counter(str(piece) for quarter in quarters for piece in quarter)
    assert all({piece.face for piece in quarter} == set(ALL_FACES) for quarter in quarters)
    assert {sum(piece.num_programs for piece in quarter) for quarter in quarters} == {5100}


def test_the_halves_of_the_campaign_are_the_campaign() -> None:
    """Each half has every scenario, on either backend in turn, and only some of them on both."""
    halves, every = [worlds(half) for half in range(2)], worlds(None)
    assert sorted({*halves[0], *halves[1]}) == every == list(range(2 * len(SCENARIOS)))
    assert len({*halves[0]} & {*halves[1]}) == 2 * len(ON_BOTH) and {*ON_BOTH} <= {*SCENARIOS}
    for half in halves:
        assert {world // 2 for world in half} == set(range(len(SCENARIOS)))
        assert abs(len(half) - 2 * sum(world % 2 for world in half)) <= 2


@pytest.mark.parametrize(("given", "found"), [("", None), ("2", 2), ("auto", 1)])
def test_the_commit_chooses_a_share(given: str, found: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless one is given; without the option, everything is run."""
    monkeypatch.setattr(shares, "number_of_commit", lambda: 10)
    parser = argparse.ArgumentParser()
    add_share(parser, "third", 3, "the parts")
    words = ["--third", given] if given else []
    assert share_of(parser.parse_args(words).third, 3, "parts") == found
    with pytest.raises(SystemExit):
        parser.parse_args(["--third", "3"])
