"""Forks: a new request goes on from where its parent is, and shares the blocks that are full."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field

from .._kernel.cache import PrefixCache
from .._kernel.index import held_ids, stretches
from .._kernel.layout import Band
from .._kernel.leases import RequestLeases
from .._kernel.moves import Moves
from .._kernel.plans import PrefixMatch
from .._kernel.records import BlockTable, nulls
from .._kernel.requests import LedgerRequest
from .._kernel.states import NoEpoch, Tier
from .._kernel.states import RequestState as State
from .._kernel.status import Fork
from .._kernel.waiting import Admission, is_waiting
from ..errors import OutOfBlocks, WrongState

__all__ = ["Forks", "taken_from"]


@dataclass(slots=True, eq=False)
class Forks:
    cache: PrefixCache
    request_leases: RequestLeases
    admission: Admission
    moves: Moves
    over: dict[LedgerRequest, None] = field(default_factory=dict)
    """Forks that are over while a request they were forked from is not. What they published depends on a copied block,
    which no path shows."""
    _over_of: dict[LedgerRequest, list[LedgerRequest]] = field(default_factory=dict)
    """The same by origin, so that the end of a request looks only at its own forks."""

    def leaving(self, request: LedgerRequest) -> None:
        """`request` is about to release everything: remember a fork that has published something to take back."""
        origins = [origin for origin in request.origins if not origin.is_over]
        if origins and (request.read_before or request.published > request.ready_stop):
            request.had_read(request.published)
            self.over[request] = None
            for origin in origins:
                self._over_of.setdefault(origin, []).append(request)

    def left(self, request: LedgerRequest) -> None:
        """`request` is over: forget its forks whose origins are all over, as nothing can be taken back from them."""
        for fork in self._over_of.pop(request, ()):
            if all(origin.is_over for origin in fork.origins):
                del self.over[fork]

    def check(self, parent: LedgerRequest) -> None:
        """Refuse to fork a request that waits for room, is in a step, or was invalidated."""
        if parent.waiter is not None:
            raise is_waiting(parent, "fork")
        if parent.num_steps:
            raise WrongState(f"fork: a step writes into the blocks of {parent}")
        if parent.epoch is NoEpoch.INVALIDATED:
            raise WrongState(f"fork: what {parent} has read was taken back: it has to be aborted")

    @staticmethod
    def twin(parent: LedgerRequest, name: str, ticket: int) -> LedgerRequest:
        """A new request with the same tokens and limits, which owns nothing yet."""
        sequence, epoch, limit = parent.sequence.copy(), parent.epoch, parent.hit_limit
        return LedgerRequest(
            name, sequence, epoch, ticket, limit, parent.hit_alignment,
            store_limit=parent.store_limit, ledger=parent.ledger, evictions_before=parent.evictions_before,
        )  # fmt: skip

    def shared_stop(self, parent: LedgerRequest) -> int:
        """The unit up to which `parent` can share its blocks: published, and not found corrupt since."""
        stop = parent.published
        for band, table in zip(self.cache.layout.bands, parent.tables, strict=True):
            for run, first, last in stretches(parent.device_run, table.start, stop) if band.width else ():
                part = run.part(Tier.DEVICE, band.number)
                if part.stop < last or part.first > first:
                    stop = min(stop, part.stop if part.first <= first else first)
        return stop

    def num_units(self, parent: LedgerRequest, num_tokens: int) -> int:
        """The units in the tables of a fork with room for `num_tokens`, at least for all known tokens."""
        return self.cache.layout.num_units(max(num_tokens, parent.sequence.num_tokens, parent.num_computed_tokens))

    def take(self, parent: LedgerRequest, shared: int, num_units: int) -> list[array[int]]:
        """Take the blocks of a fork's own, for each band from unit `shared` on; `OutOfBlocks` changes nothing."""
        bands, firsts = self.cache.layout.bands, [max(shared, table.start) for table in parent.tables]
        counts = [max(0, num_units - first) * band.width for band, first in zip(bands, firsts, strict=True)]
        room, capacity = self.admission.num_available, self.admission.capacity
        in_all = sum(num_units * table.width - table.start * table.width for table in parent.tables)
        if in_all > capacity:
            raise OutOfBlocks(in_all, capacity, retryable=False)
        behind = bool(self.admission.queue.extending)  # like an extension: ahead of allocations
        if behind or sum(counts) > room:
            raise OutOfBlocks(sum(counts), 0 if behind else room, retryable=True)
        found = []
        for band, first, count in zip(bands, firsts, counts, strict=True):
            before = nulls(band.width * (min(first, num_units) - shared))
            found.append(before + self.cache.take(Tier.DEVICE, count))
        return found

    def share(
        self, parent: LedgerRequest, child: LedgerRequest, shared: int, num_units: int, blocks: list[array[int]]
    ) -> Fork:
        """Give `child` a lease like the parent's up to unit `shared`, and `blocks` from there on."""
        if shared:
            self.request_leases.share(parent, child, self.cache.cut(parent.leases[Tier.DEVICE].run, shared))
        bands = self.cache.layout.bands
        tables = tuple(self._table(parent, child, band, shared, own) for band, own in zip(bands, blocks, strict=True))
        unit = self.cache.layout.unit_tokens
        child.given_tables(tables, num_units)
        parent.used_outside_of_steps()  # the engine copies from its blocks
        child.forked_from(parent, shared, PrefixMatch(shared * unit, 0))
        for state in (State.MATCHED, State.PINNED, State.ALLOCATED, State.RUNNING):
            self.moves.request(child, state)
        return Fork(child, self._copies(parent, child, shared))

    def _table(
        self, parent: LedgerRequest, child: LedgerRequest, band: Band, shared: int, own: array[int]
    ) -> BlockTable:
        start = parent.tables[band.number].start
        held = held_ids(child.device_run, Tier.DEVICE, band.number, start, shared)
        return BlockTable(band.width, nulls(min(start, shared) * band.width) + held + own, start)

    def _copies(self, parent: LedgerRequest, child: LedgerRequest, shared: int) -> tuple[tuple[int, int], ...]:
        """(source, destination) blocks that `parent` has computed and `child` does not share."""
        layout, found = self.cache.layout, list[tuple[int, int]]()
        tables = [layout.by_group([table.ids for table in request.tables]) for request in (parent, child)]
        for group, old, new in zip(layout.groups, *tables, strict=True):
            first = shared * (layout.unit_tokens // group.block_size)
            stop = -(-parent.num_computed_tokens // group.block_size)
            found += [pair for pair in zip(old[first:stop], new[first:stop], strict=True) if all(pair)]
        return tuple(found)


def taken_from(request: LedgerRequest, sources: Mapping[LedgerRequest, int], unit_tokens: int) -> list[int]:
    """The first wrong units that `request` copied when it was forked from `sources` (each with its first wrong
    token)."""
    copied = request.origins.items()
    return [sources[source] // unit_tokens for source, stop in copied if source in sources and stop > sources[source]]
