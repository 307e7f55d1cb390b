"""The report of `make attacks`. No attack is made here."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from proof.attacks import __main__ as attacks
from proof.attacks.figures import Figure, table

ROOT = Path(__file__).parents[2]


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

    monkeypatch.setattr(attacks, "ATTACKS", {"A1": (broken,), "C5": (whole,)})
    found = attacks.run(["A1", "C5"], Path())
    assert [figure.is_met for figure in found] == [True, False, True]
    assert "| A1 | Something. | not measured: RuntimeError('the victim is gone') | never |" in table(found)


PROGRAM = """
import time
from pathlib import Path
from proof.attacks import __main__ as attacks
from proof.attacks.figures import Figure

def attack(name, value):
    def made(tree):
        began_s = time.monotonic()
        Path(str(tree), name).touch()
        while not Path(str(tree), {"A1": "A1", "A2": "A3", "A3": "A2"}[name]).exists():
            assert time.monotonic() < began_s + 30, "they are not made at the same time"
        yield Figure(name, "x", "y", value, 1)
    return (made,)

attacks.ATTACKS = {"A1": attack("A1", 0), "A2": attack("A2", float("inf")), "A3": attack("A3", 1)}
found = attacks.run(["A3", "A1", "A2"], Path(TREE))
assert [(one.finding, one.is_met) for one in found] == [("A3", True), ("A1", True), ("A2", False)], found
"""


def test_two_attacks_are_made_at_a_time(tmp_path: Path) -> None:
    """And those that measure time alone, before; the table has them in the order that was asked for."""
    program = PROGRAM.replace("TREE", repr(str(tmp_path)))
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    printed = [line.partition(" ")[0] for line in done.stdout.splitlines()]
    assert printed[:2] == ["Finding", "A1"] and sorted(printed[2:]) == ["A2", "A3"], done.stdout


def test_an_attack_that_there_is_not_is_refused() -> None:
    """With the status of a mistake."""
    with pytest.raises(SystemExit) as ended:
        attacks.main(["Z9"])
    assert ended.value.code == 2
