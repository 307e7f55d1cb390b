"""`python -m benchmarks` prints every row, or says what is missing."""

from __future__ import annotations

import importlib

import pytest

from benchmarks.__main__ import BENCHMARKS, KEYS, as_table, collect

ROWS = [
    {"name": "cycle of 1,024 tokens", "value": 4.512, "unit": "us", "limit": 302, "ratio": 0.0149},
    {"name": "load", "value": 12345.6, "unit": "GB/s", "limit": None, "ratio": None},
]


def test_table_has_a_line_for_every_row() -> None:
    """Under a heading, each row stands with its figures, rounded, and a dash for what it does not have."""
    heading, *lines = as_table(ROWS).splitlines()
    assert tuple(heading.split()) == KEYS
    assert [line.split()[-4:] for line in lines] == [["4.51", "us", "302", "0.0149"], ["12,346", "GB/s", "-", "-"]]


def test_a_missing_benchmark_is_named() -> None:
    """Whoever runs it reads which module is missing, not a traceback."""
    with pytest.raises(SystemExit, match=r"no benchmarks\.unheard_of"):
        collect(["unheard_of"])


@pytest.mark.parametrize("name", BENCHMARKS)
def test_benchmarks_are_there(name: str) -> None:
    """Every benchmark that the command runs is a module with `run`."""
    module = importlib.import_module(f"benchmarks.{name}")
    assert callable(module.run)
