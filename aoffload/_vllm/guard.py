"""An error in the scheduler's half turns the cache off. It never ends vLLM's scheduler, in whose loop it happens."""

from __future__ import annotations

import logging
from typing import Any

from .. import Tier
from .counts import blocks_of
from .messages import Commands, Reports
from .scheduler import SchedulerSide
from .worker import WorkerSide

# -- flush -----------------------------------------------------------------------------------------------------------
#
# The end of an engine whose process has both halves: store the blocks on disk that only host memory has.


def flush(half: SchedulerSide, worker: WorkerSide) -> None:
    """Store the blocks that the disk lacks, for at most `close_flush_s`. vLLM runs no more steps that would store
    them."""
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


# -- guard -----------------------------------------------------------------------------------------------------------

_log = logging.getLogger("vllm.aoffload")


class Guard:
    """The hooks of `SchedulerSide`. After one of them has raised, requests compute instead of loading."""

    def __init__(self, half: SchedulerSide) -> None:
        self.half = half
        self.off_reason = ""
        """Empty while the cache is on."""

    def match(self, request: Any, num_local: int) -> int | None:
        if not self.off_reason:
            try:
                return self.half.match(request, num_local)
            except Exception as error:  # noqa: BLE001 - any bug: vLLM goes on without a cache
                self._turn_off(error)
        return 0

    def allocated(self, request: Any, num_external: int) -> None:
        if not self.off_reason:
            try:
                self.half.allocated(request, num_external)
            except Exception as error:  # noqa: BLE001
                self._turn_off(error)
        if self.off_reason:
            self.half.refuse(request, num_external)

    def hit_tiers(self, request_id: str, num_external: int) -> dict[Tier, int]:
        if not self.off_reason:
            try:
                return self.half.hit_tiers(request_id, num_external)
            except Exception as error:  # noqa: BLE001
                self._turn_off(error)
        return {Tier.HOST: num_external} if num_external else {}

    def step(self, output: Any) -> Commands:
        if not self.off_reason:
            try:
                return self.half.step(output)
            except Exception as error:  # noqa: BLE001
                self._turn_off(error)
        return self.half.give_up()

    def take(self, reports: Reports) -> set[str]:
        if not self.off_reason:
            try:
                return self.half.take(reports)
            except Exception as error:  # noqa: BLE001
                self._turn_off(error)
        self.half.settle(reports)
        return set()

    def finished(self, request: Any, block_ids: Any) -> None:
        if not self.off_reason:
            try:
                self.half.finished(request, block_ids)
            except Exception as error:  # noqa: BLE001
                self._turn_off(error)
        self.half.forget(request.request_id)

    def frees_soon(self) -> bool:
        if not self.off_reason:
            try:
                return self.half.frees_soon()
            except Exception as error:  # noqa: BLE001
                self._turn_off(error)
        return False

    def reset(self) -> None:
        if not self.off_reason:
            try:
                self.half.reset()
            except Exception as error:  # noqa: BLE001 - what is not forgotten is never loaded
                self._turn_off(error)

    def flush(self, worker: WorkerSide) -> None:
        """The engine ends, and this process has both halves."""
        if not self.off_reason:
            try:
                flush(self.half, worker)
            except Exception as error:  # noqa: BLE001 - the engine ends all the same
                self._turn_off(error)

    def take_counts(self) -> dict[str, float]:
        """The counts since the last call, and the gauges. It returns them once a second, and before vLLM may stop
        running steps for a while. Otherwise, or if nothing was counted, it returns nothing."""
        half, counts = self.half, self.half.counts
        if not counts.counted:
            return {}
        if counts.clock() < counts.due_at and (half.requests or self.is_busy):
            return {}
        counted = counts.take()
        gauges = blocks_of(half.ledger.cache.tiers)
        if half.lower is not None:
            gauges |= half.lower.gauges()
        return counted | gauges | {"off": float(bool(self.off_reason))}

    @property
    def is_busy(self) -> bool:
        return self.half.is_ending if self.off_reason else self.half.is_busy

    def _turn_off(self, error: Exception) -> None:
        self.off_reason = repr(error)
        self.half.turn_off(self.off_reason)
        self.half.counts.turned_off("all")
        _log.error("aoffload is off: nothing is loaded or stored any more", exc_info=error)
