"""Merges the completions of several ranks into one per job: pure bookkeeping, no threads."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from ..._kernel.plans import Completion
from ..._kernel.states import Outcome

_WORST_FIRST = (Outcome.UNPROVEN, Outcome.CORRUPT, Outcome.FAILED, Outcome.REFUSED, Outcome.LANDED)


def merged(reports: Sequence[Completion], num_blocks: int) -> Completion:
    """One completion from the reports of all ranks about one job of `num_blocks` blocks.

    UNPROVEN if any rank reports it; LANDED only if every block landed on every rank. CORRUPT goes before FAILED, since
    only CORRUPT drops bad blocks from the cache. `num_landed` is the minimum, so no later block is used.
    """
    outcome = next(found for found in _WORST_FIRST if found in {report.outcome for report in reports})
    num_landed = min(report.num_landed for report in reports)
    if outcome is Outcome.LANDED and num_landed < num_blocks:
        outcome = Outcome.FAILED
    told = (f"rank {rank}: {report.error}" for rank, report in enumerate(reports) if report.error)
    return Completion(
        reports[0].job_id,
        outcome,
        num_landed,
        tuple(sorted({index for report in reports for index in report.corrupt})),
        "; ".join(told),
        sum(report.num_bytes for report in reports),
        max(report.duration_s for report in reports),
    )


@attrs.define(eq=False)
class _Job:
    num_blocks: int
    reports: list[Completion | None]
    """By rank; None while it has not reported."""
    is_in_doubt: bool = False
    """UNPROVEN was delivered; a late proof is delivered, too."""


class JobTally:
    """The reports about every job that is not over on all ranks. Not thread-safe: its owner has a lock.

    Only the first report of a rank about a job counts, unless it was UNPROVEN: then a later proof replaces it.
    """

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._jobs: dict[int, _Job] = {}

    def __len__(self) -> int:
        """Jobs that are not proven to be over on every rank."""
        return len(self._jobs)

    def begin(self, job_id: int, num_blocks: int) -> None:
        self._jobs[job_id] = _Job(num_blocks, [None] * self._num_ranks)

    def forget(self, job_id: int) -> bool:
        """Undo `begin`. Returns whether the job was still open, so that no outcome of it was delivered."""
        return self._jobs.pop(job_id, None) is not None

    def report(self, rank: int, completion: Completion) -> Completion | None:
        """Take the report of `rank`. Returns the completion to deliver if every rank has reported, otherwise None."""
        job = self._jobs.get(completion.job_id)
        if job is None:
            return None
        if self._num_ranks == 1 and completion.outcome is Outcome.LANDED and completion.num_landed >= job.num_blocks:
            del self._jobs[completion.job_id]  # as most end; a proof counts, whatever was reported before
            return completion
        known = job.reports[rank]
        if known is not None and (known.outcome is not Outcome.UNPROVEN or completion.outcome is Outcome.UNPROVEN):
            return None
        job.reports[rank] = completion
        return self._conclusion(completion.job_id, job)

    def lose(self, rank: int, reason: str) -> list[Completion]:
        """`rank` is dead, which proves its copies over. Returns the completions to deliver."""
        ends = (Completion(job_id, Outcome.FAILED, error=reason) for job_id in tuple(self._jobs))
        told = (self.report(rank, end) for end in ends)
        return [completion for completion in told if completion is not None]

    def _conclusion(self, job_id: int, job: _Job) -> Completion | None:
        reports = [report for report in job.reports if report is not None]
        if len(reports) < self._num_ranks:
            return None
        found = merged(reports, job.num_blocks)
        if found.outcome is not Outcome.UNPROVEN:
            del self._jobs[job_id]
            return found
        is_new, job.is_in_doubt = not job.is_in_doubt, True
        return found if is_new else None
