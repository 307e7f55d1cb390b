"""Ranks stopped by a debugger, by a full disk, or by a signal."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from .figures import Figure
from .victims import PROGRAMS, Victim, started

__all__ = ["orphans", "stops"]

ORPHANED_S = 5.0


def stops(tree: Path) -> Iterator[Figure]:
    """One of two ranks is stopped while 12 requests store."""
    with _ranks(tree) as (victim, pids):
        _serve(victim)
        os.kill(pids[1], signal.SIGSTOP)
        longest_s, num_slow = _serve(victim)
        later_s, _ = _serve(victim)
    attack = "SIGSTOP of one of 2 ranks, then 12 requests"
    yield Figure("C5", attack, f"the slowest one ({num_slow:.0f} took more than 2 s)", longest_s, 15.0, "s")
    yield Figure("C5", attack, "the slowest of the next 12", later_s, 2.0, "s")


def orphans(tree: Path) -> Iterator[Figure]:
    """A rank is stopped, and its parent killed."""
    with _ranks(tree) as (victim, pids):
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        victim.process.kill()
        victim.process.wait()
        time.sleep(ORPHANED_S)
        left = sum(map(_is_alive, pids))
    attack = "SIGSTOP of 2 ranks, SIGKILL of their parent"
    yield Figure("C6", attack, f"ranks that live {ORPHANED_S:.0f} s later", left, 0)


@contextmanager
def _ranks(tree: Path) -> Iterator[tuple[Victim, list[int]]]:
    with started(tree, [str(PROGRAMS / "two_ranks.py")]) as victim:
        pids = [int(word) for word in victim.first_line.split()]
        if len(pids) != 2:
            victim.process.wait()
            raise RuntimeError(victim.stderr_text)
        try:
            yield victim, pids
        finally:
            for pid in filter(_is_alive, pids):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def _serve(victim: Victim) -> tuple[float, float]:
    """Seconds of the slowest request, and how many were slow."""
    victim.stdin.write(b"serve\n")
    victim.stdin.flush()
    longest, num_slow = victim.next_line().split()
    return float(longest), float(num_slow)


def _is_alive(pid: int) -> bool:
    """Not one that has ended and was not waited for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
