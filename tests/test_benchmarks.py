"""`python -m benchmarks` prints every row, or says what is missing."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import peer, policies
from benchmarks.__main__ import BENCHMARKS, as_table, collect
from benchmarks.harness import Measured, Row, Sample, Subject, interleave

ROWS = [
    Row(
        name="cycle of 1,024 tokens", value=14.512, unit="us", against="peer", limit=302.0, ratio=20.81, wanted=15.0,
        spread="14-16",
    ),
    Row(name="lag", value=12345.6, unit="us", against="idle", limit=3.0, ratio=4.1, wanted=3.0, is_at_most=True),
]  # fmt: skip


def test_table_has_a_line_for_every_row() -> None:
    """Each row stands with its figures, rounded, beside what it is measured against, and says if that is enough."""
    _, *lines = as_table(ROWS).splitlines()
    assert lines[0].split()[4:] == ["14.5", "us", "14-16", "peer", "302", "20.8", "at", "least", "15:", "met"]
    assert lines[1].endswith("4.1  at most 3: MISSED")


def test_whoever_is_compared_takes_turns() -> None:
    """Each round begins with another one, and what came before the first round does not count."""
    called: list[str] = []

    def subject(name: str) -> Subject:
        def once() -> Sample:
            called.append(name)
            return Sample(1.0 if len(called) > 4 else 100.0, 0.5)

        return once

    found = interleave({"a": subject("a"), "b": subject("b")}, seconds=0.0, least=3)
    assert "".join(called) == "abababbaab"
    assert found["a"] == Measured(1.0, 1.0, 1.0, 0.5, 3)


def test_a_peer_answers_line_by_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer runs in an environment of its own, says what one unit took, and may print what it likes beside that."""
    python = tmp_path / "echo" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    (tmp_path / "echo_side.py").write_text(
        f"import sys; sys.path.insert(0, {str(peer.SCRIPTS)!r})\n"
        "import line\n"
        "def cycle(**about):\n    print('noise')\n    return line.timed(lambda: None, 0.001)\n"
        "line.serve({'cycle': cycle, 'say': lambda text: text})\n"
    )
    monkeypatch.setattr(peer, "ENVIRONMENTS", tmp_path)
    monkeypatch.setattr(peer, "SCRIPTS", tmp_path)
    with peer.Peer("echo") as echo:
        assert echo.ask("say", text="hello") == "hello"
        assert 0 <= echo.cycles(1, hashes=False)().wall_s < 1
        with pytest.raises(RuntimeError, match="echo ended in nothing"):
            echo.ask("nothing")


def test_a_peer_that_is_not_installed_is_named() -> None:
    """Whoever runs the benchmarks reads how to get the peer."""
    with pytest.raises(peer.MissingPeerError, match="make bench-peers"):
        peer.Peer("unheard of")


def test_a_missing_benchmark_is_named() -> None:
    """Whoever runs it reads which module is missing, not a traceback."""
    with pytest.raises(SystemExit, match=r"no benchmarks\.unheard_of"):
        collect(["unheard_of"], None)


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
