"""When a job of several ranks is over, and how: pure bookkeeping, no threads."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from ...core.plan import Completion, Outcome

__all__ = ["JobTally", "merged"]

_WORST_FIRST = (Outcome.UNPROVEN, Outcome.CORRUPT, Outcome.FAILED, Outcome.LANDED)


def merged(reports: Sequence[Completion], num_blocks: int) -> Completion:
    """What the reports of all ranks about one job of `num_blocks` say together.

    UNPROVEN if any rank cannot say; LANDED only if every block landed on every rank. CORRUPT goes before FAILED, since
    it alone has bad entries forgotten; `num_landed` is the least in any case, so nothing behind it is used.
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
    """It was told to be UNPROVEN: proof that comes late is told, too."""


class JobTally:
    """The reports about every job that is not over on all ranks. Not thread-safe: its owner has a lock.

    A rank counts once per job: what it says later is ignored, unless it had said that it doesn't know.
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
        """Take back `begin`; whether nothing had been told of that job."""
        return self._jobs.pop(job_id, None) is not None

    def report(self, rank: int, completion: Completion) -> Completion | None:
        """Take in what `rank` reports; what is to be told, now that every rank has reported."""
        job = self._jobs.get(completion.job_id)
        if job is None:
            return None
        known = job.reports[rank]
        if known is not None and (known.outcome is not Outcome.UNPROVEN or completion.outcome is Outcome.UNPROVEN):
            return None
        job.reports[rank] = completion
        return self._conclusion(completion.job_id, job)

    def lose(self, rank: int, reason: str) -> list[Completion]:
        """`rank` is dead, and its copies with it: that proves them over. What is to be told, job by job."""
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
