"""Runs a process in a session of its own, and in any case ends everything that it has started."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Clock", "Ended", "Ends", "ends_within", "run_process"]

LAST_WORDS = ((signal.SIGINT, 5.0), (signal.SIGABRT, 2.0))
"""Signals before the kill, each with seconds to react: SIGINT, for a report of what was done so far; then SIGABRT, for
a traceback of each thread."""
GRACE_S = sum(seconds for _, seconds in LAST_WORDS)

Clock = Callable[[], float]
Ends = Callable[["subprocess.Popen[bytes]", float], bool]
"""Waits for a process for that many seconds; returns whether it has ended."""


@dataclass(frozen=True)
class Ended:
    took_s: float
    problem: str
    """Empty: it has exited with status 0."""


def ends_within(process: subprocess.Popen[bytes], seconds: float) -> bool:
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return False
    return True


def run_process(
    command: Sequence[str], limit_s: float, log: Path, ends: Ends = ends_within, clock: Clock = time.monotonic
) -> Ended:
    """Run `command` for `limit_s` at most, including the time to end it. Its output goes to `log`."""
    # Unbuffered output, and a traceback on an abort: a process that hangs says where.
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}
    began_s = clock()
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment, start_new_session=True
        )
    try:
        is_over = ends(process, max(0.0, limit_s - GRACE_S))
        if not is_over:
            _ask_to_end(process, ends)
    finally:
        _kill(process)
    took_s = clock() - began_s
    return Ended(took_s, _problem(process.returncode) if is_over else f"ended after {took_s:.0f} s, its limit")


def _ask_to_end(process: subprocess.Popen[bytes], ends: Ends) -> None:
    for number, patience_s in LAST_WORDS:
        _signal(process, number)
        if ends(process, patience_s):
            return


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill the whole session, also what a process has left behind that ended by itself."""
    _signal(process, signal.SIGKILL)
    process.wait()


def _signal(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def _problem(status: int) -> str:
    if status < 0:
        return f"died of {signal.Signals(-status).name}"
    return f"exit status {status}" if status else ""
