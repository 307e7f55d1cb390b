"""What the two halves of the connector say to each other, in what vLLM carries between its processes anyway."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import attrs

from .._tiers.disk.plans import DiskTrouble
from .._transfer.ranks.transport import JobTally
from ..ledger import CellLabel, Completion, RestoredRun, TransferPlan
from ..transport import Fence


@attrs.frozen
class LoadReport:
    """The load of a request is over: every worker tells vLLM so, in the step that carries this."""

    request_id: str
    is_lost: bool = False
    """All of it is lost: the request begins again."""
    invalid_block_ids: tuple[int, ...] = ()
    """The end of it is lost: computing goes on at the first of these blocks."""


@attrs.frozen
class AdapterUse:
    """The weights of a LoRA adapter for which a copy or a forward was planned."""

    adapter: int
    """vLLM's `lora_int_id`."""
    serials: dict[int, int]
    """By rank: the number of changes of the weights so far."""
    key: str
    """A key for the weights of all ranks."""


@attrs.frozen
class FirstForward:
    """The first forward of a request over its loaded KV. If the weights have changed, the result does not count."""

    use: AdapterUse
    block_ids: tuple[int, ...]


@attrs.frozen
class DiskCommands:
    """To the disk of the one worker that has it, before anything of the step is copied."""

    forgotten: tuple[int, ...] = ()
    """Slots that no restart must find."""
    num_resets: int = 0
    """Not 0: no restart must find what was planned before this reset."""


@attrs.frozen
class Question:
    """To the remote store of the one worker that has it: how many of these cells has it, from the first one on?"""

    number: int
    labels: tuple[CellLabel, ...]


@attrs.frozen
class ReadingOver:
    """What an earlier process has left is read."""

    problem: str
    """Why it was not read to its end; empty if it was."""


@attrs.frozen
class ResetOver:
    """A reset has reached the disk."""

    num_resets: int
    problem: str
    """Why it has not; empty if it has."""


@attrs.frozen
class CellsFound:
    """The answer to a `Question`."""

    number: int
    num_cells: int


@attrs.frozen
class Refusing:
    """The remote store is better left alone for now, or no longer: it has failed lately."""

    loads: bool = False
    stores: bool = False


@attrs.frozen
class AdapterSeen:
    """A report of a rank: the new weights that it has loaded for an adapter."""

    rank: int
    adapter: int
    serial: int
    digest: str


Said = RestoredRun | ReadingOver | ResetOver | DiskTrouble | CellsFound | Refusing | AdapterSeen
"""Reports of a worker, apart from completions."""


@attrs.frozen
class Commands:
    """From the scheduler to all workers, once per step."""

    loads: tuple[TransferPlan, ...] = ()
    stores: tuple[TransferPlan, ...] = ()
    """Copied when the forward of the step is over."""
    reports: tuple[LoadReport, ...] = ()
    given_up: tuple[int, ...] = ()
    """Jobs that nobody waits for any more: others may write to their sources from now on."""
    questions: tuple[Question, ...] = ()
    disk: DiskCommands | None = None
    uses: Mapping[int, AdapterUse] = {}
    """By job: the adapter weights for which a copy was planned, if its KV depends on an adapter."""
    forwards: tuple[FirstForward, ...] = ()


NOTHING = Commands()


@attrs.frozen
class Reports:
    """From the workers to the scheduler: copies that are over, by rank."""

    by_rank: dict[int, tuple[Completion, ...]]
    gone: str = ""
    """Why a rank copies nothing any more; empty while all of them do."""
    said: tuple[Said, ...] = ()

    def joined(self, other: Reports) -> Reports:
        by_rank = dict(self.by_rank)
        for rank, completions in other.by_rank.items():
            by_rank[rank] = by_rank.get(rank, ()) + completions
        return Reports(by_rank, self.gone or other.gone, self.said + other.said)


# -- outbox ----------------------------------------------------------------------------------------------------------
#
# The scheduler's end of the copies: plans leave with the next step, and come back when every rank is done.


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
