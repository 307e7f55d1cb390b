"""What the two halves of the connector say to each other, in what vLLM carries between its processes anyway."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from .._tiers.disk.forgetting import DiskTrouble
from ..ledger import CellLabel, Completion, RestoredRun, TransferPlan

__all__ = [
    "NOTHING", "AdapterSeen", "AdapterUse", "CellsFound", "Commands", "DiskCommands", "FirstForward", "LoadReport",
    "Question", "ReadingOver", "Refusing", "Reports", "ResetOver", "Said",
]  # fmt: skip


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
