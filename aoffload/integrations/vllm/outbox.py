"""The scheduler's end of the copies: plans leave with the next step, and come back when every rank is done."""

from __future__ import annotations

from ...ledger import Completion, TransferPlan
from ...transfer.ranks.tally import JobTally
from ...transport import Fence
from .messages import Reports

__all__ = ["Outbox"]


class Outbox:
    """What a `CopyQueue` launches into. The step that carries a plan to the workers is its fence."""

    def __init__(self, num_ranks: int) -> None:
        self._tally = JobTally(num_ranks)
        self._loads: list[TransferPlan] = []
        self._stores: list[TransferPlan] = []

    def launch(self, plan: TransferPlan, after: Fence | None) -> None:
        self._tally.begin(plan.job_id, plan.num_blocks)
        (self._loads if plan.destination < plan.source else self._stores).append(plan)

    @property
    def has_plans(self) -> bool:
        """Whether any plan leaves with this step."""
        return bool(self._loads or self._stores)

    def take(self) -> tuple[tuple[TransferPlan, ...], tuple[TransferPlan, ...]]:
        """The loads and the stores that leave with this step."""
        loads, stores = tuple(self._loads), tuple(self._stores)
        self._loads.clear()
        self._stores.clear()
        return loads, stores

    def joined(self, reports: Reports) -> list[Completion]:
        """Jobs that are over on every rank now."""
        over: list[Completion] = []
        for rank, completions in sorted(reports.by_rank.items()):
            for completion in completions:
                told = self._tally.report(rank, completion)
                if told is not None:
                    over.append(told)
        return over
