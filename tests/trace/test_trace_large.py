"""Logs of any length need bounded memory, with every option."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.synthetic_log import write_synthetic

NUM_SMALL, NUM_LARGE = 20_000, 120_000
GROWTH_BYTES = {"summary": 2e6, "request": 2e6, "perfetto": 2e6, "html": 6e6}
"""How much more a log six times as long may take. Only the page holds what it draws: some 30 bytes an event."""

STATUS = Path("/proc/self/status")
"""Where Linux says how large a process ever was; `ru_maxrss` says how large the one was that started it, too."""
PROGRAM = f"""
import pathlib, sys
from aoffload.trace.command import main
status = main(sys.argv[1:])
print(pathlib.Path("{STATUS}").read_text().split("VmHWM:")[1].split()[0], file=sys.stderr)
raise SystemExit(status)
"""


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[int, Path]]:
    directory = tmp_path_factory.mktemp("large")
    found = {num: directory / f"{num}.log" for num in (NUM_SMALL, NUM_LARGE)}
    for num, path in found.items():
        write_synthetic(path, num)
    yield found
    for path in found.values():
        path.unlink()


def peak_bytes(log: Path, command: list[str]) -> tuple[int, str]:
    """The largest resident size of a process that does that, and what it printed."""
    run = [sys.executable, "-c", PROGRAM, str(log), *command]
    done = subprocess.run(run, capture_output=True, check=True, text=True)
    return int(done.stderr) * 1024, done.stdout


@pytest.mark.slow
@pytest.mark.skipif(not STATUS.exists(), reason="only Linux says how large a process was")
@pytest.mark.parametrize("name", list(GROWTH_BYTES))
def test_memory_does_not_grow_with_the_log(name: str, logs: dict[int, Path], tmp_path: Path) -> None:
    """Six times the events take hardly more memory: not even a number for each is kept."""
    argument = {"request": ["req-000007"], "perfetto": [str(tmp_path / "f")], "html": [str(tmp_path / "f")]}
    command = [name, *argument.get(name, [])]
    small, _ = peak_bytes(logs[NUM_SMALL], command)
    large, text = peak_bytes(logs[NUM_LARGE], command)
    print(f"{name}: {small / 1e6:.2f} MB for {NUM_SMALL:,} events, {large / 1e6:.2f} MB for {NUM_LARGE:,}")
    assert large - small < GROWTH_BYTES[name]
    if name == "summary":
        assert f"{NUM_LARGE:,} events" in text
