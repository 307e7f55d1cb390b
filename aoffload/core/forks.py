"""Forks: another request that goes on where one has come to, with the same blocks as far as they are full."""

from __future__ import annotations

from array import array
from collections.abc import Mapping

import attrs

from ..errors import OutOfBlocks, WrongState
from .admission import Admission
from .answer import PrefixMatch
from .cache import PrefixCache
from .groups import Band
from .lifecycle import RequestState
from .observer import Moves
from .owners import Holding
from .paths import stretches
from .plan import Tier
from .records import NoIndex
from .request_leases import RequestLeases
from .table import BlockTable
from .waiting import require_idle

__all__ = ["Fork", "Forks", "taken_from"]

_S = RequestState


@attrs.frozen
class Fork:
    """A request that has come from another one, and what the engine has to copy before either of the two goes on."""

    holding: Holding
    copies: tuple[tuple[int, int], ...]
    """Device blocks, each with the one it is to be copied to: those that are not full, and whatever else could not be
    shared."""


@attrs.define(eq=False)
class Forks:
    cache: PrefixCache
    request_leases: RequestLeases
    admission: Admission
    moves: Moves
    over: dict[Holding, None] = attrs.field(factory=dict)
    """Forks that are over, as long as somebody they come from is not: what they have published hangs on a block that
    was copied, and no path says so."""
    _over_of: dict[Holding, list[Holding]] = attrs.field(factory=dict)
    """The same by whom they come from, so that the end of a request costs what it has left behind, not all that is."""

    def leaving(self, holding: Holding) -> None:
        """`holding` is about to let go of everything. A fork that has published nothing leaves nothing to take back."""
        origins = [origin for origin in holding.origins if not origin.is_over]
        if origins and (holding.read_before or holding.published > holding.ready_stop):
            holding.had_read(holding.published)
            self.over[holding] = None
            for origin in origins:
                self._over_of.setdefault(origin, []).append(holding)

    def left(self, holding: Holding) -> None:
        """`holding` is over: forget the forks that nobody can take anything back from any more."""
        for fork in self._over_of.pop(holding, ()):
            if all(origin.is_over for origin in fork.origins):
                del self.over[fork]

    def check(self, parent: Holding) -> None:
        """Refuse to fork what is being written, or waits, or has read what was wrong."""
        require_idle(parent, "fork")
        if parent.num_steps:
            raise WrongState(f"fork: a step writes into the blocks of {parent}")
        if parent.epoch is NoIndex.INVALIDATED:
            raise WrongState(f"fork: what {parent} has read was taken back: it has to be aborted")

    @staticmethod
    def twin(parent: Holding, name: str, ticket: int) -> Holding:
        """A holding of the same tokens, with nothing in it yet."""
        sequence, epoch, limit = parent.sequence.copy(), parent.epoch, parent.hit_limit
        return Holding(
            name, sequence, epoch, ticket, limit, parent.hit_alignment,
            store_limit=parent.store_limit, ledger=parent.ledger,
        )  # fmt: skip

    def shared_stop(self, parent: Holding) -> int:
        """Up to which unit `parent` can share its blocks: what is published, and was not found corrupt since."""
        stop = parent.published
        for band, table in zip(self.cache.layout.bands, parent.tables, strict=True):
            for stretch in stretches(parent.device_run, table.start, stop) if band.width else ():
                part = stretch.run.part(Tier.DEVICE, band.number)
                if part.stop < stretch.stop or part.first > stretch.start:
                    stop = min(stop, part.stop if part.first <= stretch.start else stretch.start)
        return stop

    def first_own(self, parent: Holding, shared: int) -> list[int]:
        """For each band the unit from which on a fork needs blocks of its own."""
        return [max(shared, table.start) for table in parent.tables]

    def num_units(self, parent: Holding, num_tokens: int) -> int:
        """What the tables of a fork reach to, if there is to be room for `num_tokens`: at least what is known."""
        return self.cache.layout.num_units(max(num_tokens, parent.sequence.num_tokens, parent.num_computed_tokens))

    def take(self, parent: Holding, shared: int, num_units: int) -> list[array[int]]:
        """Blocks of our own for a fork, for each band those from unit `shared` on; `OutOfBlocks` changes nothing."""
        bands, firsts = self.cache.layout.bands, self.first_own(parent, shared)
        counts = [max(0, num_units - first) * band.width for band, first in zip(bands, firsts, strict=True)]
        room, capacity = self.admission.room, self.admission.capacity
        in_all = sum(num_units * table.width - table.start * table.width for table in parent.tables)
        if in_all > capacity:
            raise OutOfBlocks(in_all, capacity, retryable=False)
        behind = bool(self.admission.line.extending)  # as an extension, which goes before who has nothing yet
        if behind or sum(counts) > room:
            raise OutOfBlocks(sum(counts), 0 if behind else room, retryable=True)
        found = []
        for band, first, count in zip(bands, firsts, counts, strict=True):
            nulls = array("i", bytes(4 * band.width * (min(first, num_units) - shared)))
            found.append(nulls + self.cache.take(Tier.DEVICE, count))
        return found

    def share(self, parent: Holding, child: Holding, shared: int, num_units: int, blocks: list[array[int]]) -> Fork:
        """Let `child` lease what `parent` does up to unit `shared`, and have `blocks` from there on."""
        if shared:
            lease = parent.leases[Tier.DEVICE]
            run = self.cache.cut(stretches(lease.run, shared - 1, shared)[0].run, shared)
            self.request_leases.share(parent, child, run)
        bands = self.cache.layout.bands
        tables = tuple(self._table(parent, child, band, shared, own) for band, own in zip(bands, blocks, strict=True))
        unit = self.cache.layout.unit_tokens
        child.given_tables(tables, num_units)
        child.forked_from(parent, shared, PrefixMatch(shared * unit, 0))
        for state in (_S.MATCHED, _S.PINNED, _S.ALLOCATED, _S.RUNNING):
            self.moves.request(child, state)
        return Fork(child, self._copies(parent, child, shared))

    def _table(self, parent: Holding, child: Holding, band: Band, shared: int, own: array[int]) -> BlockTable:
        start = parent.tables[band.number].start
        table = BlockTable(band.width, start=start)
        table.append_null(min(start, shared))
        for stretch in stretches(child.device_run, start, shared) if band.width else ():
            table.extend(stretch.run.part(Tier.DEVICE, band.number).ids(stretch.start, stretch.stop))
        table.extend(own)
        return table

    def _copies(self, parent: Holding, child: Holding, shared: int) -> tuple[tuple[int, int], ...]:
        """What `parent` has computed and `child` does not share, block by block."""
        layout, found = self.cache.layout, list[tuple[int, int]]()
        tables = [layout.by_group([table.ids for table in holding.tables]) for holding in (parent, child)]
        for group, old, new in zip(layout.groups, *tables, strict=True):
            first = shared * (layout.unit_tokens // group.block_size)
            stop = -(-parent.num_computed_tokens // group.block_size)
            found += [pair for pair in zip(old[first:stop], new[first:stop], strict=True) if all(pair)]
        return tuple(found)


def taken_from(holding: Holding, sources: Mapping[Holding, int], unit_tokens: int) -> list[int]:
    """The first unit that `holding` has of what each of `sources` computed from some token on: copied when it was
    forked."""
    copied = holding.origins.items()
    return [sources[source] // unit_tokens for source, stop in copied if source in sources and stop > sources[source]]
