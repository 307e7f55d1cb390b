"""A holding: everything one request owns, in one place, given back in one call.

Its block table, by units:

    0            published              load.stop                    len(table)
    |---------------|-----------------------|----------------------------|
    | leased: the   | in flight: the jobs   | private: nobody else can   |
    | cached path   | own these blocks (0   | read these; the request    |
    | (duplicates   | in the table until    | computes them              |
    | are private)  | the load settles)     |                            |

Without a load in flight the private part begins at `published`.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import TYPE_CHECKING

import attrs

from .index import Run
from .lease import Lease
from .lifecycle import RequestState
from .matching import NO_MATCH, PrefixMatch
from .plan import Tier
from .tokens import TokenSequence

if TYPE_CHECKING:
    from .jobs import Job
    from .waiting import Waiter

__all__ = ["Extension", "Holding", "Load"]


@attrs.frozen
class Extension:
    """What `extend` changed in the block tables, a list per group."""

    added: list[list[int]]
    """Ids appended."""
    nulled: list[list[int]]
    """Positions that became null because their group needs them no more."""


@attrs.define(eq=False)
class Load:
    """A load that a holding waits for, up to unit `stop`."""

    stop: int
    wake: Callable[[], object]
    jobs: set[Job] = attrs.field(factory=set)
    """Jobs not settled yet, its own and shared ones."""


@attrs.define(eq=False, repr=False)
class Holding:
    request_id: str
    sequence: TokenSequence
    epoch: int
    ticket: int
    """Its place in the line for room, kept when it has to queue again."""
    hit_limit: int
    """Units that a match may cover, and what they must be a multiple of."""
    ledger: object = attrs.field(kw_only=True)
    """Who admitted it: no other ledger takes it."""
    hit_alignment: int
    state: RequestState = RequestState.QUEUED
    reason: str = ""
    """Why it was aborted."""
    match: PrefixMatch = NO_MATCH
    hit_stop: int = 0
    table: array[int] = attrs.field(factory=lambda: array("i"))
    leases: dict[Tier, Lease] = attrs.field(factory=dict)
    published: int = 0
    duplicates: list[range] = attrs.field(factory=list)
    """Units below `published` whose blocks in the table are private: somebody else had cached them first."""
    ready_stop: int = 0
    """Units that were ready before anything was computed: hits, and what was loaded."""
    num_computed_tokens: int = 0
    has_committed: bool = False
    load: Load | None = None
    has_lost_load: bool = False
    """A load failed and there was no room to compute instead, so it began again: this time it computes."""
    waiter: Waiter | None = None
    num_steps: int = 0
    """Forwards that touch its blocks now. It gives nothing back before they end."""

    def __repr__(self) -> str:
        return f"<Holding {self.request_id!r} {self.state.name} {len(self.table)} blocks>"

    def __str__(self) -> str:
        return f"request {self.request_id}"

    @property
    def is_over(self) -> bool:
        return self.state in (RequestState.DONE, RequestState.ABORTED)

    @property
    def device_run(self) -> Run | None:
        """Where the path that it leases on the device ends."""
        lease = self.leases.get(Tier.DEVICE)
        return None if lease is None else lease.run

    @property
    def holds_room(self) -> bool:
        granted = self.waiter is not None and bool(self.waiter.granted)
        return bool(self.table) or granted or Tier.DEVICE in self.leases

    def private_blocks(self, width: int) -> array[int]:
        """The ids that are its own: nobody else reads or frees them."""
        start = self.published if self.load is None else self.load.stop
        private = self.table[start * width :]
        for units in self.duplicates:
            private.extend(self.table[units.start * width : units.stop * width])
        return private
