"""Reports on programs: each pair of features is met, forbidden for a reason, or missed."""

from __future__ import annotations

from typing import Any

import pytest

from proof import report_programs
from proof.features import FORBIDDEN, refusal
from proof.report_programs import RARE


def part(face: str, *pairs: tuple[str, str, int]) -> dict[str, Any]:
    """What one piece of a campaign has told."""
    return {
        "face": face, "programs": 20_000, "calls": 1_000_000, "layouts": ["one"], "pairs": list(pairs),
        "violations": [],
    }  # fmt: skip


def pair_line(*pairs: tuple[str, str, int]) -> Any:
    """The line about pairs of the ledger."""
    found = report_programs.lines([part("ledger", *pairs)])
    return next(line for line in found if "pairs of features on a ledger" in line.what)


BOTH = (("pin", "pin", 90), ("reset", "reset", 90))


def test_a_pair_that_was_met_is_met() -> None:
    """Nothing is missed where every two features have met."""
    line = pair_line(*BOTH, ("pin", "reset", 3))
    assert line.is_met and line.found.startswith("1 met, 0 forbidden, 0 missed")


def test_a_pair_that_nothing_forbids_is_missed() -> None:
    """It is named, and the line is not met."""
    line = pair_line(*BOTH)
    assert not line.is_met and "pin + reset" in line.found


def test_a_pair_that_cannot_be_is_forbidden() -> None:
    """For an empty pair the report has what forbids it."""
    line = pair_line(("lazy", "lazy", 90), ("off", "off", 90))
    assert line.is_met and "1 forbidden" in line.found
    text = "".join(report_programs.tables([part("ledger", ("lazy", "lazy", 90), ("off", "off", 90))]))
    assert "there is one store policy" in text


def test_a_pair_that_was_met_is_not_forbidden() -> None:
    """A reason that programs disprove is wrong."""
    line = pair_line(("lazy", "lazy", 90), ("off", "off", 90), ("lazy", "off", 1))
    assert not line.is_met and "lazy + off" in line.found


def test_what_hardly_any_program_meets_is_listed_apart() -> None:
    """It is in no pair, and it is not left out."""
    parts = [part("ledger", ("pin", "pin", 90), ("reset", "reset", RARE - 1))]
    assert pair_line(*parts[0]["pairs"]).is_met
    assert f"reset ({RARE - 1})" in "".join(report_programs.tables(parts))


def test_a_quarter_of_the_programs_may_miss_more() -> None:
    """By chance: of 21 pairs it may miss one, where all programs may miss none. It has a quarter of the programs."""
    names = [f"feature {number}" for number in range(7)]
    met = [(one, other, 50) for one in names for other in names if one <= other][:-2]
    one_missed = part("ledger", *met, (names[-1], names[-1], 50)) | {"programs": 5_000, "calls": 250_000}
    for is_short in (False, True):
        found = report_programs.lines([one_missed], is_short=is_short)
        lines = {line.what.partition(" (")[0]: line for line in found}
        assert "1 missed" in lines["pairs of features on a ledger"].found
        kinds = ("programs", "calls", "pairs of features on a ledger")
        assert [lines[kind].is_met for kind in kinds] == [is_short] * 3


@pytest.mark.parametrize("side", FORBIDDEN)
def test_a_refusal_holds_both_ways(side: str) -> None:
    """Whichever feature is named first."""
    for row in FORBIDDEN[side]:
        for one in row.these:
            for other in row.those - {one}:
                assert refusal(side, one, other) == refusal(side, other, one) != ""
