"""A process that is killed during stores: the next one reads right bytes or misses, and most stored blocks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import anyio
import pytest
from serving import prompt

pytest.importorskip("xxhash", reason="the extra `disk` is not installed")

from disk_serving import SIZE, assert_quiet, with_disk

NUM_STORED = 10
HERE = Path(__file__).parent


def kill_a_server(place: Path) -> int:
    """Let one serve until it has stored some prompts, and kill it in the middle of the next. How many it had stored."""
    command = [sys.executable, str(HERE / "disk_child.py"), str(place)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (HERE.parents[1], HERE.parent, HERE)))}
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    assert child.stdout is not None
    try:
        for line in child.stdout:
            if int(line) == NUM_STORED:
                break
    finally:
        child.kill()
        left = child.communicate()[0].split()
    assert child.returncode == -signal.SIGKILL
    return NUM_STORED + len(left)


def test_a_killed_process_leaves_right_bytes(tmp_path: Path) -> None:
    """Twice in a row. Nine tenths of what it had on the disk hits again, and the files are no larger than they may."""

    async def look(num_stored: int) -> None:
        async with with_disk(tmp_path) as engine:
            await engine.runtime.disk.wait_restored()
            found = [await engine.serve(prompt(seed, 17)) for seed in range(1, num_stored + 4)]
            assert found[:num_stored].count(16) >= 0.9 * num_stored, found
            await assert_quiet(engine.runtime)

    for _ in range(2):
        anyio.run(look, kill_a_server(tmp_path), backend="trio")
    assert sum(each.stat().st_blocks * 512 for each in (tmp_path / "disk").iterdir()) <= SIZE * 1.01
