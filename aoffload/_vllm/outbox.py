"""The scheduler's end of the copies: plans leave with the next step, and come back when every rank is done."""

from __future__ import annotations

from collections.abc import Iterable

from .._transfer.ranks.tally import JobTally
from ..ledger import CellLabel, Completion, TransferPlan
from ..transport import Fence
from .messages import Commands, DiskCommands, LoadReport, Question, Reports

__all__ = ["Outbox", "TieredOutbox"]


class Outbox:
    """What a `CopyQueue` launches into. The step that carries a plan to the workers is its fence."""

    def __init__(self, num_ranks: int) -> None:
        self._tally = JobTally(num_ranks)
        self._loads: list[TransferPlan] = []
        self._stores: list[TransferPlan] = []
        self._given_up: list[int] = []
        self._forgotten: list[int] = []
        self._num_resets = 0
        self._questions: list[Question] = []

    def launch(self, plan: TransferPlan, after: Fence | None) -> None:
        self._tally.begin(plan.job_id, plan.num_blocks)
        (self._loads if plan.destination < plan.source else self._stores).append(plan)

    @property
    def is_empty(self) -> bool:
        """Whether this step has no command for the workers."""
        return not (self._loads or self._stores or self._has_commands)

    @property
    def _has_commands(self) -> bool:
        """Whether there is something for tiers below the host."""
        is_for_disk = self._given_up or self._forgotten or self._num_resets
        return bool(is_for_disk or self._questions)

    def take(self, reports: tuple[LoadReport, ...]) -> Commands:
        """The commands that leave with this step, and `reports`."""
        loads, stores = tuple(self._loads), tuple(self._stores)
        self._loads.clear()
        self._stores.clear()
        if not self._has_commands:
            return Commands(loads, stores, reports)
        given_up, questions = tuple(self._given_up), tuple(self._questions)
        self._given_up.clear()
        self._questions.clear()
        return Commands(loads, stores, reports, given_up, questions, self._take_disk())

    def _take_disk(self) -> DiskCommands | None:
        told = DiskCommands(tuple(self._forgotten), self._num_resets)
        self._forgotten.clear()
        self._num_resets = 0
        return None if told == DiskCommands() else told

    def forget(self, slots: Iterable[int]) -> None:
        """No restart must find what these slots of the disk hold."""
        self._forgotten += slots

    def reset(self, num_resets: int) -> None:
        """No restart must find what was planned before this reset of the disk."""
        self._num_resets = num_resets

    def ask(self, number: int, labels: tuple[CellLabel, ...]) -> None:
        """How many of these cells has the remote store? The answer comes with the reports of a later step."""
        self._questions.append(Question(number, labels))

    def joined(self, reports: Reports) -> list[Completion]:
        """Jobs that are over on every rank now."""
        over: list[Completion] = []
        for rank, completions in sorted(reports.by_rank.items()):
            for completion in completions:
                told = self._tally.report(rank, completion)
                if told is not None:
                    over.append(told)
        return over


class TieredOutbox(Outbox):
    """Of an engine with tiers below the host, which have to know what is given up: what a store reads may change then,
    and a remote load writes to nothing any more."""

    def give_up(self, job_id: int) -> None:
        """In the step that says so, workers hear of it before they copy anything."""
        self._given_up.append(job_id)
