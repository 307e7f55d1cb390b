"""An error in the scheduler's half turns the cache off. It never ends vLLM's scheduler, in whose loop it happens."""

from __future__ import annotations

import logging
from typing import Any

import attrs

from .. import Tier
from .counts import blocks_of
from .messages import Commands, Reports, WeightsSeen
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

    def arrived(self, request: Any) -> None:
        if not self.off_reason:
            try:
                self.half.arrived(request)
            except Exception as error:  # noqa: BLE001
                self._turn_off(error)

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

    def finished(self, request: Any, block_ids: Any) -> dict[str, Any] | None:
        answers = None
        if not self.off_reason:
            try:
                answers = self.half.finished(request, block_ids)
            except Exception as error:  # noqa: BLE001
                self._turn_off(error)
        self.half.forget(request.request_id)
        return answers

    def frees_soon(self) -> bool:
        if not self.off_reason:
            try:
                return self.half.frees_soon()
            except Exception as error:  # noqa: BLE001
                self._turn_off(error)
        return False

    def reset(self) -> None:
        self.engine_reset()
        self.forget()

    def engine_reset(self) -> None:
        if not self.off_reason:
            try:
                self.half.engine_reset()
            except Exception as error:  # noqa: BLE001
                self._turn_off(error)

    def forget(self) -> None:
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
        _log.error("aoffload is off: it no longer loads or stores anything", exc_info=error)


# -- sleep -----------------------------------------------------------------------------------------------------------
#
# vLLM resets the cache before it sleeps. It does not tell connectors why it resets the cache, whether it will keep the
# weights, or whether other weights are loaded during sleep. So a reset only stops loads. The next step asks each worker
# how often it has slept, and whether it still has the weights with which all stored KV was computed.
#
#     as many sleeps as resets, the same weights    the tiers keep their KV
#     otherwise                                     the tiers forget their KV


class SleepGuard:
    """A guard for an engine with sleep mode."""

    def __init__(self, guard: Guard, num_ranks: int) -> None:
        self._guard, self._num_ranks = guard, num_ranks
        self.half, self.allocated, self.finished = guard.half, guard.allocated, guard.finished
        self.take_counts, self.hit_tiers, self.frees_soon = guard.take_counts, guard.hit_tiers, guard.frees_soon
        self._num_resets = 0
        """Resets since the workers last answered; 0: the weights are those of the cached KV."""
        self._question = 0
        """The number of the last question."""
        self._has_asked = False
        self._answers: dict[int, WeightsSeen] = {}

    @property
    def off_reason(self) -> str:
        return self._guard.off_reason

    @property
    def is_busy(self) -> bool:
        return self._guard.is_busy

    def reset(self) -> None:
        self._guard.engine_reset()
        self._num_resets += 1
        self._has_asked, self._answers = False, {}

    def arrived(self, request: Any) -> None:
        if not self._num_resets:  # nothing is fetched before the weights are known
            self._guard.arrived(request)

    def match(self, request: Any, num_local: int) -> int | None:
        if self._num_resets and not self.off_reason:
            return None  # vLLM has to ask again, because the step that begins now asks the workers
        return self._guard.match(request, num_local)

    def step(self, output: Any) -> Commands:
        commands = self._guard.step(output)
        if not self._num_resets or self._has_asked or self.off_reason:
            return commands
        self._has_asked = True
        self._question += 1
        return attrs.evolve(commands, weights_asked=self._question)

    def take(self, reports: Reports) -> set[str]:
        landed = self._guard.take(reports)
        if self._num_resets:
            self._hear(reports)
        return landed

    def _hear(self, reports: Reports) -> None:
        for said in reports.said:
            if isinstance(said, WeightsSeen) and self._has_asked and said.number == self._question:
                self._answers[said.rank] = said
        if len(self._answers) < self._num_ranks:
            return
        has_slept = all(answer.num_sleeps == self._num_resets for answer in self._answers.values())
        if has_slept and all(answer.is_same for answer in self._answers.values()):
            _log.info("aoffload: the weights are the same as before sleep: the cache keeps its KV")
        else:
            self._guard.forget()
        self._num_resets = 0

    def flush(self, worker: WorkerSide) -> None:
        if self._num_resets:  # not all workers have answered
            self._guard.forget()
        self._guard.flush(worker)
