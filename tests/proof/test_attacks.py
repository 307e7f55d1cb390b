"""What `make attacks` makes of its figures. No attack is made here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from proof.attacks import __main__ as attacks
from proof.attacks.figures import Figure, table


@pytest.mark.parametrize(
    ("value", "is_least", "verdict"),
    [(2, False, "met"), (2.1, False, "MISSED"), (2, True, "met"), (1, True, "MISSED"), (float("inf"), False, "MISSED")],
)
def test_a_figure_stands_beside_its_limit(value: float, is_least: bool, verdict: str) -> None:
    """A figure at its limit is within it; what never comes is not."""
    assert Figure("A1", "a", "b", value, 2, "s", is_least).cells()[-1] == verdict


def test_an_attack_that_cannot_be_made_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is a row that says why, and the others are made."""

    def broken(tree: Path) -> Iterator[Figure]:
        """Something."""
        yield Figure("A1", "one", "x", 0, 1)
        raise RuntimeError("the victim is gone")

    def whole(tree: Path) -> Iterator[Figure]:
        yield Figure("A2", "two", "x", 0, 1)

    monkeypatch.setattr(attacks, "ATTACKS", {"A1": (broken,), "A2": (whole,)})
    found = attacks.run(["A1", "A2"], Path())
    assert [figure.is_met for figure in found] == [True, False, True]
    assert "| A1 | Something. | not measured: RuntimeError('the victim is gone') | never |" in table(found)


def test_an_attack_that_there_is_not_is_refused() -> None:
    """With the status of a mistake."""
    with pytest.raises(SystemExit) as ended:
        attacks.main(["Z9"])
    assert ended.value.code == 2
