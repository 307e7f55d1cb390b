"""Counts of the scheduler's half, as flat names, which vLLM can carry to its log and to Prometheus.

`jobs|load|host|landed` is the metric `jobs` with the label values `load`, `host` and `landed`: a load from the host.
"""

from __future__ import annotations

import logging
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

from aoffload import Tier

from .._kernel.pools import TierBlocks
from ..host_cache import LoadsPaused, LoadsResumed
from ..ledger import (
    Event,
    HintAnswered,
    JobMoved,
    JobState,
    Outcome,
    StoreSkipped,
    TransportRecovered,
    TransportStalled,
    WorkerFailed,
)

_log = logging.getLogger("vllm.aoffload")

STATES = ("free", "cached", "pinned", "quarantined")
HELD = ("pinned", "quarantined")
REPORT_S = 1.0
"""Seconds between two reports. Reporting in every step would cost more than counting."""


class Counts:
    """An observer of the ledger's jobs and of the copy queue. It counts both."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.failure: BaseException | None = None
        """An error of the ledger that should never happen."""
        self.num_failed = 0
        """Copies that failed. For each of them, a request may have lost its hit."""
        self.counted: defaultdict[str, float] = defaultdict(float)
        """Counts since the last `take`."""
        self.clock, self.due_at = clock, -math.inf
        """`due_at`: the time of the clock at which the counts have to be reported."""

    def wants_move(self, kind: type[Event], state: Any) -> bool:
        """Whether a move is counted: only the ends of jobs are."""
        return kind is JobMoved and state is not JobState.LAUNCHED

    def observe(self, event: Event) -> None:
        match event:
            case JobMoved() if event.new is not JobState.LAUNCHED:
                self._count_job(event)
            case StoreSkipped():
                self.counted[f"skipped_store_blocks|{event.reason}"] += event.num_blocks
            case HintAnswered():
                self.counted[f"hints|{event.verb.value}|{event.outcome.value}|{event.reason.value}"] += 1
            case TransportStalled():
                self.counted[f"overdue_jobs|{_link(event.source, event.destination)}"] += event.num_jobs
                late = "aoffload: %d copies exceed transfer_timeout_s; no more copies of this kind start until they end"
                _log.warning(late, event.num_jobs)
            case TransportRecovered():
                _log.warning("aoffload: the copies that took too long are over")
            case LoadsPaused():
                paused = "aoffload: nothing is loaded while %d blocks of vLLM are in quarantine"
                _log.warning(paused, event.num_quarantined)
            case LoadsResumed():
                _log.warning("aoffload: loads have resumed")
            case WorkerFailed():
                self.failure = event.error

    def _count_job(self, event: JobMoved) -> None:
        plan, completion, counted = event.job.plan, event.job.completion, self.counted
        link = _link(*plan.link)
        if event.new is JobState.DISCARDED:
            counted[f"jobs|{link}|discarded"] += 1
        elif completion is not None:
            has_landed = completion.outcome is Outcome.LANDED
            self.num_failed += not has_landed
            counted[f"jobs|{link}|{'landed' if has_landed else completion.outcome.value}"] += 1
            counted[f"copied_blocks|{link}"] += completion.num_landed
            counted[f"copied_bytes|{link}"] += completion.num_bytes
            counted[f"copy_seconds|{link}"] += completion.duration_s

    def load_declined(self, request_id: str, num_tokens: int, load_s: float, compute_s: float) -> None:
        self.counted["declined_loads"] += 1

    def lost(self, num_tokens: int) -> None:
        """A load has brought `num_tokens` fewer than the scheduler promised vLLM."""
        self.counted["lost_tokens"] += num_tokens

    def turned_off(self, what: str) -> None:
        self.counted[f"turned_off|{what}"] += 1

    def take(self) -> dict[str, float]:
        """The counts since the last call."""
        found = dict(self.counted)
        self.counted.clear()
        self.due_at = self.clock() + REPORT_S
        return found


def _link(source: Tier, destination: Tier) -> str:
    """The direction, and the tier below: the source of a load, or the destination of a store."""
    return _LINKS[source, destination]


_LINKS = {
    (one, other): f"{'load' if other < one else 'store'}|{max(one, other).name.lower()}"
    for one in Tier
    for other in Tier
}


def blocks_of(tiers: Iterable[TierBlocks]) -> dict[str, float]:
    """Blocks of each tier by state. Of vLLM's own blocks, only those that copies hold."""
    found: dict[str, float] = {}
    for tier in tiers:
        statistics, name = tier.statistics(), tier.tier.name.lower()
        for state in HELD if tier.is_outside else STATES:
            found[f"blocks|{name}|{state}"] = getattr(statistics, f"num_{state}")
    return found
