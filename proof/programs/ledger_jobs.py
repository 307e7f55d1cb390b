"""Calls about jobs: a copy is launched, ends in any way, is proven late, or writes on."""

from __future__ import annotations

from collections.abc import Iterable

from aoffload._kernel.plans import Completion, TransferPlan
from aoffload._kernel.records import Job
from aoffload._kernel.states import Direction, JobState, Outcome

from .ledger_state import LedgerState

__all__ = ["JobCalls"]


class JobCalls(LedgerState):
    """Jobs are named by request, direction and running number: `r1:load:0`."""

    def take(self, plans: Iterable[TransferPlan]) -> None:
        for plan in plans:
            job = self.ledger.jobs.unsettled[plan.job_id]
            stem = f"{job.request_id or 'watermark'}:{plan.direction.value}"
            self.plans[f"{stem}:{self.num_planned[stem]}"] = plan
            self.num_planned[stem] += 1
            self._note("components", job.component)

    def job(self, name: str) -> Job | None:
        return self.ledger.jobs.unsettled.get(self.plans[name].job_id) if name in self.plans else None

    def do_launch(self, job: str) -> str:
        if job not in self.plans:
            return "skipped"
        plan = self.plans[job]
        if not self.ledger.launch(plan.job_id):
            if self.job(job) is None:
                del self.plans[job]
            return "not wanted"
        self._begins(plan)
        return "launched"

    def _begins(self, plan: TransferPlan) -> None:
        self.bytes.spoil(plan.destination, plan.destination_ids)  # a launched copy may write at any time
        for block_id in plan.destination_ids:
            self.rotten.pop((plan.destination, block_id), None)
        self._begin_writing(plan)

    def _begin_writing(self, plan: TransferPlan) -> None:
        """What its destination holds is lost from now on."""

    def do_settle(self, job: str, outcome: str = "landed", at: int = 0) -> str:
        """The copy is over. FAILED: `at` blocks have arrived. CORRUPT: block `at` is corrupt, of a load at its source,
        of a store at its destination."""
        found, plan = self.job(job), self.plans.get(job)
        if found is None or plan is None or found.state is not JobState.LAUNCHED or found.parked is not None:
            return "skipped"
        how, index = Outcome(outcome), at % plan.num_blocks
        rotten = [number for number, block_id in enumerate(plan.source_ids) if (plan.source, block_id) in self.rotten]
        if rotten:
            # Every load of a corrupt block ends so. A store has the sum of what it reads, and stops there.
            how = Outcome.CORRUPT if plan.direction is Direction.LOAD else Outcome.FAILED
            index = rotten[0]
        num_landed = {Outcome.LANDED: plan.num_blocks, Outcome.UNPROVEN: 0}.get(how, index)
        self._copy(plan, num_landed)
        corrupt = (index,) if how is Outcome.CORRUPT else ()
        if corrupt and plan.direction is Direction.LOAD:
            self.bytes.spoil(plan.source, [plan.source_ids[index]])
            self.rotten[plan.source, plan.source_ids[index]] = found
        completion = Completion(plan.job_id, how, num_landed, corrupt)
        del self.plans[job]
        if how is Outcome.UNPROVEN:
            self.unproven[job] = plan
        else:
            self.over[job] = completion
        self.features.add(f"{plan.direction.value} {how.value}")
        self._settle(completion, plan)
        return how.value

    def _settle(self, completion: Completion, plan: TransferPlan) -> None:
        self.ledger.settle(completion)

    def _copy(self, plan: TransferPlan, num_landed: int) -> None:
        self.bytes.spoil(plan.destination, plan.destination_ids[num_landed:])
        for source_id, block_id in zip(plan.source_ids[:num_landed], plan.destination_ids[:num_landed], strict=True):
            self.bytes.copy(plan.source, source_id, plan.destination, block_id)

    def do_land(self, who: str = "") -> str:
        """All jobs planned so far land, in order; with `who`, only those of that request."""
        for name in [name for name in self.plans if not who or name.startswith(f"{who}:")]:
            self.do_launch(name)
            self.do_settle(name)
        return "landed"

    def do_discard(self, job: str) -> str:
        found = self.job(job)
        if found is None or found.state is not JobState.QUEUED:
            return "skipped"
        self.ledger.discard(self.plans.pop(job).job_id)
        self.features.add("discard")
        return "discarded"

    def do_late(self, job: str) -> str:
        """Late proof that an unproven copy is over."""
        if job not in self.unproven:
            return "skipped"
        plan = self.unproven.pop(job)
        self._copy(plan, plan.num_blocks)
        self._begin_writing(plan)  # it was given up: nobody has written down that it is there
        self.over[job] = Completion(plan.job_id, Outcome.LANDED, plan.num_blocks)
        self.ledger.settle(self.over[job])
        self.features.add("late proof")
        return "proven"

    def do_stray(self, job: str) -> str:
        """An unproven copy writes on."""
        if job not in self.unproven:
            return "skipped"
        plan = self.unproven[job]
        self.bytes.spoil(plan.destination, plan.destination_ids)
        return "written"

    def do_again(self, job: str) -> str:
        """A completion is delivered again."""
        if job not in self.over:
            return "skipped"
        self.ledger.settle(self.over[job])
        return "again"
