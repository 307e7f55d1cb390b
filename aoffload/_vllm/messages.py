"""Messages between the two halves of the connector. They travel in the objects that vLLM sends between its processes in
any case."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import attrs

from .._tiers.disk.plans import DiskTrouble
from .._transfer.ranks.transport import JobTally
from ..ledger import CellLabel, Completion, RestoredRun, TransferPlan
from ..transport import Fence


@attrs.frozen
class LoadReport:
    """The load of a request has ended. In the step that carries this report, every worker reports it to vLLM."""

    request_id: str
    is_lost: bool = False
    """All of the load is lost, so the request begins again."""
    invalid_block_ids: tuple[int, ...] = ()
    """The end of the load is lost. vLLM computes from the first of these blocks on."""


@attrs.frozen
class AdapterUse:
    """The weights of a LoRA adapter for which a copy or a forward was planned."""

    adapter: int
    """vLLM's `lora_int_id`."""
    serials: dict[int, int]
    """By rank, the number of changes of the weights so far."""
    key: str
    """A key for the weights of all ranks."""


@attrs.frozen
class FirstForward:
    """The first forward of a request over its loaded KV. If the weights have changed, its result is discarded."""

    use: AdapterUse
    block_ids: tuple[int, ...]


@attrs.frozen
class DiskCommands:
    """Commands to the disk, in the one worker that has it. The worker obeys them before it copies anything of the
    step."""

    forgotten: tuple[int, ...] = ()
    """Slots that no restart may find."""
    num_resets: int = 0
    """Not 0: no restart may find copies that were planned before this reset."""


@attrs.frozen
class Question:
    """To the remote store, in the one worker that has it: how many of these cells does it have, counted from the first
    one?"""

    number: int
    labels: tuple[CellLabel, ...]


@attrs.frozen
class ReadingOver:
    """The worker has read the blocks that an earlier process left on disk."""

    problem: str
    """Why it could not read all of them; empty if it could."""


@attrs.frozen
class ResetOver:
    """The disk has completed a reset."""

    num_resets: int
    problem: str
    """Why it could not; empty if it could."""


@attrs.frozen
class CellsFound:
    """The answer to a `Question`."""

    number: int
    num_cells: int


@attrs.frozen
class Refusing:
    """Whether the remote store is disabled for now, because it failed lately."""

    loads: bool = False
    stores: bool = False


@attrs.frozen
class AdapterSeen:
    """A report of a rank: the new weights that it has loaded for an adapter."""

    rank: int
    adapter: int
    serial: int
    digest: str


@attrs.frozen
class WeightsSeen:
    """The answer of a rank to the question `Commands.weights_asked`."""

    rank: int
    number: int
    """The number of the question."""
    num_sleeps: int
    """How often the rank has slept since its last answer."""
    is_same: bool
    """Whether all KV that the rank has stored was computed with the weights that the model has now."""


Said = RestoredRun | ReadingOver | ResetOver | DiskTrouble | CellsFound | Refusing | AdapterSeen | WeightsSeen
"""Reports of a worker, apart from completions."""


@attrs.frozen
class Commands:
    """Commands from the scheduler to all workers, once per step."""

    loads: tuple[TransferPlan, ...] = ()
    stores: tuple[TransferPlan, ...] = ()
    """Copied after the forward of the step."""
    reports: tuple[LoadReport, ...] = ()
    given_up: tuple[int, ...] = ()
    """Jobs that were given up: others may write to their sources from now on."""
    questions: tuple[Question, ...] = ()
    disk: DiskCommands | None = None
    uses: Mapping[int, AdapterUse] = {}
    """By job, the adapter weights for which the copy was planned. It has only jobs whose KV depends on an adapter."""
    forwards: tuple[FirstForward, ...] = ()
    weights_asked: int = 0
    """The number of the question whether the model has the same weights; 0: the step asks nothing."""


NOTHING = Commands()


@attrs.frozen
class Reports:
    """From the workers to the scheduler: copies that have ended, by rank."""

    by_rank: dict[int, tuple[Completion, ...]]
    gone: str = ""
    """Why a rank can copy nothing any more; empty while all ranks can."""
    said: tuple[Said, ...] = ()

    def joined(self, other: Reports) -> Reports:
        by_rank = dict(self.by_rank)
        for rank, completions in other.by_rank.items():
            by_rank[rank] = by_rank.get(rank, ()) + completions
        return Reports(by_rank, self.gone or other.gone, self.said + other.said)


# -- outbox ----------------------------------------------------------------------------------------------------------
#
# The scheduler's end of the copies. Plans leave with the next step. A copy has ended when it has ended on every rank.


class OneRank:
    """Takes the place of a `JobTally` if there is one rank: the rank's report is the completion of the job."""

    def begin(self, job_id: int, num_blocks: int) -> None:
        pass

    def report(self, rank: int, completion: Completion) -> Completion:
        return completion


class Outbox:
    """The transport of a `CopyQueue` in the scheduler. The step that carries a plan to the workers is the plan's
    fence."""

    def __init__(self, num_ranks: int) -> None:
        self._tally = JobTally(num_ranks) if num_ranks > 1 else OneRank()
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
        """Whether there are commands for tiers below the host."""
        is_for_disk = self._given_up or self._forgotten or self._num_resets
        return bool(is_for_disk or self._questions)

    def take(self, reports: tuple[LoadReport, ...]) -> Commands:
        """The commands that leave with this step, together with `reports`."""
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
        """No restart may find the contents of these slots of the disk."""
        self._forgotten += slots

    def reset(self, num_resets: int) -> None:
        """No restart may find copies that were planned before this reset of the disk."""
        self._num_resets = num_resets

    def ask(self, number: int, labels: tuple[CellLabel, ...]) -> None:
        """Ask how many of these cells the remote store has. The answer comes with the reports of a later step."""
        self._questions.append(Question(number, labels))

    def joined(self, reports: Reports) -> list[Completion]:
        """Completions of the jobs that have now ended on every rank."""
        over: list[Completion] = []
        for rank, completions in sorted(reports.by_rank.items()):
            for completion in completions:
                told = self._tally.report(rank, completion)
                if told is not None:
                    over.append(told)
        return over


class TieredOutbox(Outbox):
    """For an engine with tiers below the host. These have to know which jobs are given up: a store may then read
    changed bytes, and a remote load must not write any more."""

    def give_up(self, job_id: int) -> None:
        """Workers learn it in the same step, before they copy anything of that step."""
        self._given_up.append(job_id)
