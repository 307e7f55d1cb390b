"""What the scheduler's half counts: flat names, as vLLM carries them to its log and to Prometheus.

`jobs|load|host|landed` is the metric `jobs` with the label values `load`, `host` and `landed`: a load from the host.
"""

from __future__ import annotations

import logging
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable

from aoffload import RuntimeObserver, Tier

from ..._kernel.pools import TierBlocks
from ..._kernel.records import Job
from ...ledger import JobState, LedgerRequest, Outcome

__all__ = ["Counts", "blocks_of"]

_log = logging.getLogger("vllm.aoffload")

STATES = ("free", "cached", "pinned", "quarantined")
HELD = ("pinned", "quarantined")
REPORT_S = 1.0
"""Reporting in every step would cost more than counting."""


class Counts(RuntimeObserver):
    """Hears of the ledger's jobs, and of what the copy queue notices."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.failure: BaseException | None = None
        """What the ledger raised and never should."""
        self.num_failed = 0
        """Copies that did not land. Each may have cost a request what was found for it."""
        self.counted: defaultdict[str, float] = defaultdict(float)
        """Since the last `take`."""
        self.clock, self.due_at = clock, -math.inf
        """What was counted has to be reported at that time of the clock."""

    def job_moved(self, job: Job, old: JobState, reason: str) -> None:
        if job.state is JobState.LAUNCHED:
            return
        plan, completion, counted = job.plan, job.completion, self.counted
        link = _hop(*plan.link)
        if job.state is JobState.DISCARDED:
            counted[f"jobs|{link}|discarded"] += 1
        elif completion is not None:
            has_landed = completion.outcome is Outcome.LANDED
            self.num_failed += not has_landed
            counted[f"jobs|{link}|{'landed' if has_landed else completion.outcome.value}"] += 1
            counted[f"copied_blocks|{link}"] += completion.num_landed
            counted[f"copied_bytes|{link}"] += completion.num_bytes
            counted[f"copy_seconds|{link}"] += completion.duration_s

    def store_skipped(self, record: LedgerRequest | None, num_blocks: int, reason: str) -> None:
        self.counted[f"skipped_store_blocks|{reason}"] += num_blocks

    def transport_stalled(self, source: Tier, destination: Tier, num_jobs: int) -> None:
        self.counted[f"overdue_jobs|{_hop(source, destination)}"] += num_jobs
        _log.warning("aoffload: %d copies take too long; until they end, there are no others of their kind", num_jobs)

    def transport_recovered(self, source: Tier, destination: Tier) -> None:
        _log.warning("aoffload: the copies that took too long are over")

    def loads_paused(self, num_quarantined: int) -> None:
        _log.warning("aoffload: nothing is loaded while %d blocks of vLLM are in quarantine", num_quarantined)

    def loads_resumed(self, num_quarantined: int) -> None:
        _log.warning("aoffload: there are loads again")

    def worker_failed(self, error: BaseException) -> None:
        self.failure = error

    def cache_turned_off(self, reason: str) -> None:
        """Nothing: the guard tells it, with the error."""

    def load_declined(self, request_id: str, num_tokens: int, load_s: float, compute_s: float) -> None:
        self.counted["declined_loads"] += 1

    def lost(self, num_tokens: int) -> None:
        """A load has brought `num_tokens` fewer than vLLM was promised."""
        self.counted["lost_tokens"] += num_tokens

    def turned_off(self, what: str) -> None:
        self.counted[f"turned_off|{what}"] += 1

    def take(self) -> dict[str, float]:
        """What was counted since the last call."""
        found = dict(self.counted)
        self.counted.clear()
        self.due_at = self.clock() + REPORT_S
        return found


def _hop(source: Tier, destination: Tier) -> str:
    """The direction, and the tier below: loads come from it, stores go to it."""
    return f"{'load' if destination < source else 'store'}|{max(source, destination).name.lower()}"


def blocks_of(tiers: Iterable[TierBlocks]) -> dict[str, float]:
    """Blocks of each tier by state; of vLLM's own, those that copies hold."""
    found: dict[str, float] = {}
    for tier in tiers:
        statistics, name = tier.statistics(), tier.tier.name.lower()
        for state in HELD if tier.is_outside else STATES:
            found[f"blocks|{name}|{state}"] = getattr(statistics, f"num_{state}")
    return found
