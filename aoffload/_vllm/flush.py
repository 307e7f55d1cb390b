"""The end of an engine whose process has both halves: the disk takes what only host memory has."""

from __future__ import annotations

from .scheduler import SchedulerSide
from .worker import WorkerSide

__all__ = ["flush"]


def flush(half: SchedulerSide, worker: WorkerSide) -> None:
    """Store on the disk what it lacks, for `close_flush_s` at most: there are no steps any more that would do it."""
    disk = None if half.lower is None else half.lower.disk
    if disk is None or not disk.tier.close_flush_s:
        return
    until = worker.copies.clock() + disk.tier.close_flush_s
    while (left := until - worker.copies.clock()) > 0:
        if (reports := worker.take_reports()) is not None:
            half.take(reports)
        may_be_more = disk.flush()
        commands = half.end_step()
        worker.load(commands)
        worker.start(commands.stores, commands.uses)
        if not may_be_more and not half.ledger.jobs.unsettled:
            return
        worker.copies.wait_for_any(left)
