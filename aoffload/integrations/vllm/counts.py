"""What the scheduler's half counts: flat names, as vLLM carries them to its log and to Prometheus.

`jobs|load|landed` is the metric `jobs` with the label values `load` and `landed`.
"""

from __future__ import annotations

from collections import defaultdict

from aoffload import RuntimeObserver

from ...core.records import Job
from ...ledger import Holding, JobState, LedgerStatistics

__all__ = ["Counts", "blocks_of"]


class Counts(RuntimeObserver):
    """Hears of the ledger's jobs."""

    def __init__(self) -> None:
        self._counted: defaultdict[str, float] = defaultdict(float)

    def job_moved(self, job: Job, old: JobState, reason: str) -> None:
        direction, completion = job.plan.direction.value, job.completion
        if job.state is JobState.DISCARDED:
            self._counted[f"jobs|{direction}|discarded"] += 1
        elif completion is not None:
            self._counted[f"jobs|{direction}|{completion.outcome.value}"] += 1
            self._counted[f"copied_blocks|{direction}"] += completion.num_landed
            self._counted[f"copied_bytes|{direction}"] += completion.num_bytes
            self._counted[f"copy_seconds|{direction}"] += completion.duration_s

    def store_skipped(self, holding: Holding | None, num_blocks: int, reason: str) -> None:
        self._counted[f"skipped_store_blocks|{reason}"] += num_blocks

    def lost(self, num_tokens: int) -> None:
        """A load has brought `num_tokens` fewer than vLLM was promised."""
        self._counted["lost_tokens"] += num_tokens

    def turned_off(self) -> None:
        self._counted["turned_off"] += 1

    def take(self) -> dict[str, float]:
        """What was counted since the last call."""
        found = dict(self._counted)
        self._counted.clear()
        return found


def blocks_of(statistics: LedgerStatistics) -> dict[str, float]:
    """Host blocks by state, and blocks of vLLM that copies hold."""
    host, device = statistics.host, statistics.device
    return {
        "blocks|host|free": host.num_free,
        "blocks|host|cached": host.num_cached,
        "blocks|host|pinned": host.num_pinned,
        "blocks|host|quarantined": host.num_quarantined,
        "blocks|device|pinned": device.num_pinned,
        "blocks|device|quarantined": device.num_quarantined,
    }
