"""`python -m benchmarks` prints every row, or says what is missing."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import policies
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


TRACE = [[1, 2, 3], [4, 5, 6], [1, 2, 3], [7, 8], [1, 2, 9], [4, 5, 6]]
"""On a device of seven blocks: the third finds the first one still there, the others have to come from the host."""


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps({"timestamp": 0, "hash_ids": ids}) + "\n" for ids in TRACE))
    return path


@pytest.mark.parametrize(
    ("policy", "counted"), [("off", (5, 0, 0, 0)), ("eager", (5, 3, 9, 3)), ("selective", (5, 0, 6, 0))]
)
def test_a_replay_counts_blocks(trace: Path, policy: Any, counted: tuple[int, ...]) -> None:
    """Every id is one block that is asked for; hits and copies are those that one counts by hand."""
    found = policies.replay(policy, policy, policies.read_trace(trace), 7, 20)
    assert (found.num_device_hits, found.num_host_hits, found.num_stored, found.num_loaded) == counted


def test_the_study_prints_a_line_for_every_policy(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From the command line, with as many requests as asked for."""
    policies.main(["--trace", str(trace), "--device", "7", "--host", "20", "--limit", "3", "--frontier", "2"])
    about, heading, *lines = capsys.readouterr().out.splitlines()
    assert about == "3 requests, 9 blocks asked for"
    assert heading.split()[:3] == ["policy", "device", "hits"]
    assert [line.split("  ")[0] for line in lines] == ["off", "eager", "lazy", "selective", "lazy, 2"]
