"""What the two halves of the connector say to each other, in what vLLM carries between its processes anyway."""

from __future__ import annotations

import attrs

from ...ledger import Completion, TransferPlan

__all__ = ["NOTHING", "Commands", "LoadReport", "Reports"]


@attrs.frozen
class LoadReport:
    """The load of a request is over: every worker tells vLLM so, in the step that carries this."""

    request_id: str
    is_lost: bool = False
    """All of it is lost: the request begins again."""
    invalid_block_ids: tuple[int, ...] = ()
    """The end of it is lost: computing goes on at the first of these blocks."""


@attrs.frozen
class Commands:
    """From the scheduler to all workers, once per step."""

    loads: tuple[TransferPlan, ...] = ()
    stores: tuple[TransferPlan, ...] = ()
    """Copied when the forward of the step is over."""
    reports: tuple[LoadReport, ...] = ()


NOTHING = Commands()


@attrs.frozen
class Reports:
    """From the workers to the scheduler: copies that are over, by rank."""

    by_rank: dict[int, tuple[Completion, ...]]
    gone: str = ""
    """Why a rank copies nothing any more; empty while all of them do."""

    def joined(self, other: Reports) -> Reports:
        by_rank = dict(self.by_rank)
        for rank, completions in other.by_rank.items():
            by_rank[rank] = by_rank.get(rank, ()) + completions
        return Reports(by_rank, self.gone or other.gone)
