"""Lending: how an engine's block ids come into a request's table, and how they are found not to belong there."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence

import attrs

from ..errors import InvalidArgument, WrongState
from .admission import Admission
from .arguments import check_int
from .cache import UNPUBLISHABLE, PrefixCache
from .groups import Band, Layout
from .holding import Extension, Holding
from .index import Part, Run
from .jobs import JobBook
from .lent import LentBlocks
from .lifecycle import Moves, RequestState, require
from .pins import Pins
from .plan import Tier
from .publish import publish
from .table import BlockTable, within, without

__all__ = ["Lending", "check_lent_tokens"]

_S = RequestState


@attrs.frozen
class _Places:
    """Where block ids are to stand: units `[first, stop)` of the tables of `holding`, of which the engine has computed
    those before `computed`."""

    holding: Holding
    first: int
    stop: int
    computed: int
    starts: Sequence[int]
    """For each band: what is before has left the window, and is null."""
    fillers: Sequence[int]
    """For each band: from `computed` up to here the null block may stand, since a host hit makes it unneeded."""


@attrs.define(eq=False)
class Lending:
    cache: PrefixCache
    pins: Pins
    moves: Moves
    jobs: JobBook
    admission: Admission
    num_rows: int
    holders: Callable[[], Iterable[Holding]]
    """Everybody who may have blocks."""

    def lend(
        self,
        holding: Holding,
        block_ids: Sequence[Sequence[int]],
        num_tokens: int | None = None,
        num_device_tokens: int | None = None,
    ) -> None:
        """Begin the tables of `holding` with `block_ids`; whatever is wrong with them changes nothing."""
        blocks = self._blocks("lend")
        if not holding.lacks_blocks:
            require(holding, "lend", _S.PINNED)
        layout, sequence = self.cache.layout, holding.sequence
        wanted = sequence.num_tokens if num_tokens is None else check_int("num_tokens", num_tokens, 1)
        computed = holding.lent_stop
        if num_device_tokens is not None:
            computed = check_lent_tokens(num_device_tokens, sequence.num_tokens) // layout.unit_tokens
        num_units = max(layout.num_units(wanted), computed)
        hit_stop = max(holding.hit_stop, computed)  # as it was told; a load of what has gone since ends without it
        if computed != holding.lent_stop:
            hit_stop = self.pins.find_behind(holding, computed).stop
        starts, fillers = ([b.first_needed(at * b.unit_tokens) for b in layout.bands] for at in (computed, hit_stop))
        ids = self._checked(block_ids, _Places(holding, 0, num_units, computed, starts, fillers))
        # Nothing is refused from here on.
        if computed != holding.lent_stop:
            holding.lent_stop = computed
            self.pins.match_again(holding)
        for band, found in enumerate(ids):
            blocks.lend(holding, band, 0, found)
        tables = zip(layout.bands, ids, starts, strict=True)
        holding.tables = tuple(BlockTable(band.width, found, start) for band, found, start in tables)
        holding.num_units = num_units
        self._computed(holding, computed)

    def _computed(self, holding: Holding, num_units: int) -> None:
        """The engine has computed the first `num_units` already: they are there as if `holding` had."""
        if holding.epoch == self.cache.epoch:
            for stop in sorted({*(table.start for table in holding.tables), num_units}):
                publish(self.cache, holding, stop)  # the lease on a window begins where a run does
        holding.ready_stop = num_units
        holding.num_computed_tokens = num_units * self.cache.layout.unit_tokens
        if holding.state is _S.PINNED:
            self.moves.request(holding, _S.ALLOCATED)

    def lend_more(self, holding: Holding, block_ids: Sequence[Sequence[int]], num_tokens: int) -> Extension:
        """Append `block_ids` to the tables of `holding`, which reach to `num_tokens` in all then."""
        require(holding, "lend_more", _S.ALLOCATED, _S.RUNNING)
        before = holding.num_units
        num_units = max(before, self.cache.layout.num_units(check_int("num_tokens", num_tokens, 1)))
        ids = self.take_in(holding, "lend_more", block_ids, before, num_units, [0 for _ in self.cache.layout.bands])
        for table, found in zip(holding.tables, ids, strict=True):
            table.ids.extend(found)
        holding.num_units = num_units
        return self.admission.extension(holding, before)

    def take_in(
        self,
        holding: Holding,
        call: str,
        block_ids: Sequence[Sequence[int]],
        first: int,
        stop: int,
        starts: Sequence[int],
    ) -> list[array[int]]:
        """Take `block_ids`, which nobody has yet, for units `[first, stop)` of `holding`; the ids for each band."""
        blocks = self._blocks(call)
        ids = self._checked(block_ids, _Places(holding, first, stop, 0, starts, starts))
        for band, found in zip(self.cache.layout.bands, ids, strict=True):
            blocks.lend(holding, band.number, first * band.width, found)
        return ids

    def _blocks(self, call: str) -> LentBlocks:
        pool = self.cache.tiers[Tier.DEVICE].pool
        if not isinstance(pool, LentBlocks):
            raise WrongState(f"{call}: this ledger has device blocks of its own: it takes no others")
        return pool

    # -- what may be lent -----------------------------------------------------------------------------------------

    def _checked(self, block_ids: Sequence[Sequence[int]], places: _Places) -> list[array[int]]:
        """`block_ids` by bands, or `InvalidArgument`."""
        ids = by_band(self.cache.layout, self._by_group(block_ids, places.stop - places.first))
        given = [block_id for found in ids for block_id in found if block_id]
        for table in places.holding.tables:
            given.extend(filter(None, table.ids))
        if len(set(given)) != len(given):
            raise InvalidArgument("block_ids", "name a block twice for one request")
        doubtful = self.jobs.doubtful_ids(Tier.DEVICE)
        agreed: dict[Holding, int] = {}
        for band, found in zip(self.cache.layout.bands, ids, strict=True):
            for index, block_id in enumerate(found, places.first * band.width):
                if block_id:
                    self._check_block(places, band.number, index, block_id, doubtful, agreed)
                else:
                    _check_null(places, band.number, index // band.width)
        for other, stop in agreed.items():
            if not places.holding.sequence.agrees(other.sequence, stop):
                raise InvalidArgument("block_ids", f"name a block that was lent to {other}, for other tokens")
        return ids

    def _by_group(self, block_ids: Sequence[Sequence[int]], num_units: int) -> list[array[int]]:
        layout = self.cache.layout
        try:
            found = [array("i", ids) for ids in block_ids]
        except (TypeError, OverflowError):
            raise InvalidArgument("block_ids", "must be a list of block ids for each group") from None
        wanted = [num_units * (layout.unit_tokens // group.block_size) for group in layout.groups]
        if [len(ids) for ids in found] != wanted:
            raise InvalidArgument("block_ids", f"must be {wanted} ids, group by group; got {[len(i) for i in found]}")
        for block_id in (block_id for ids in found for block_id in ids if not 0 <= block_id < self.num_rows):
            raise InvalidArgument("block_ids", f"must lie in [0, {self.num_rows}), got {block_id}")
        return found

    def _check_block(
        self, places: _Places, band: int, index: int, block_id: int, doubtful: set[int], agreed: dict[Holding, int]
    ) -> None:
        unit = index // self.cache.layout.bands[band].width
        if unit < places.starts[band]:
            raise InvalidArgument("block_ids", f"name block {block_id} where the window is past: must be null (0)")
        lent = self._blocks("lend").find(block_id)
        if lent is None:
            return
        if block_id in doubtful:
            raise InvalidArgument("block_ids", f"name block {block_id}, which a copy may still write to")
        if unit >= places.computed:
            raise InvalidArgument("block_ids", f"name block {block_id}, which is lent to {lent.holding} already")
        stop = _token_stop(self.cache.layout.bands[band], index)
        if (lent.band, lent.index) != (band, index) or stop > lent.holding.num_computed_tokens:
            raise InvalidArgument("block_ids", f"name block {block_id}, which {lent.holding} has not computed for this")
        agreed[lent.holding] = max(agreed.get(lent.holding, 0), stop)

    # -- going back -----------------------------------------------------------------------------------------------

    def hand_over(self, left: Run) -> None:
        """Somebody has let go of the path of `left`. Where all who still lease it have copies of their own, one of
        these takes the place of the leaver's block, which goes back."""
        keepers = [(held, set(held.device_run.path())) for held in self.holders() if held.tables and held.device_run]
        if not any(table.duplicates for held, _ in keepers for table in held.tables):
            return
        for run in left.path():
            on_it = [held for held, path in keepers if run in path]
            for band in self.cache.layout.bands:
                part = run.part(Tier.DEVICE, band.number) if run.parts else None
                if part is not None and part.blocks:
                    self._replace(part, [held.tables[band.number] for held in on_it], on_it)

    def _replace(self, part: Part, tables: list[BlockTable], keepers: list[Holding]) -> None:
        named: list[range] = []
        for table, held in zip(tables, keepers, strict=True):
            start, stop = max(part.first, table.start), min(part.stop, held.published)
            named += [range(start, stop)] if held.epoch == UNPUBLISHABLE else without(table.duplicates, start, stop)
        for table in tables:
            for units in within(table.duplicates, max(part.first, table.start), part.stop):
                for free in without(named, units.start, units.stop):
                    _swap(self.cache, part, table, free)
                    named.append(free)


def check_lent_tokens(num_device_tokens: object, num_tokens: int) -> int:
    """Tokens that an engine has computed already: one is always left."""
    return check_int("num_device_tokens", num_device_tokens, 0, max(0, num_tokens - 1))


def _check_null(places: _Places, band: int, unit: int) -> None:
    if unit < places.starts[band] or places.computed <= unit < places.fillers[band]:
        return
    raise InvalidArgument("block_ids", f"name the null block for unit {unit}, which has to be computed or read")


def _token_stop(band: Band, index: int) -> int:
    """Up to where the tokens go of which the id at `index` of a table holds the KV."""
    unit, place = divmod(index, band.width)
    for size in band.block_sizes:
        if place < band.unit_tokens // size:
            return unit * band.unit_tokens + (place + 1) * size
        place -= band.unit_tokens // size
    raise AssertionError("no such place")


def _swap(cache: PrefixCache, part: Part, table: BlockTable, units: range) -> None:
    """Let `part` name the blocks that `table` has for `units`, which are no duplicates any more."""
    at = (units.start - part.first) * part.width
    left, mine = part.ids(units.start, units.stop), table.at(units.start, units.stop)
    part.blocks[at : at + len(mine)] = mine
    gaps = [piece for own in table.duplicates for piece in without([units], own.start, own.stop)]
    table.duplicates = gaps
    cache.give(Tier.DEVICE, left)


def by_band(layout: Layout, ids: Sequence[array[int]]) -> list[array[int]]:
    """A list per group, of whole units, as one for each band: the opposite of `Layout.by_group`."""
    found = [array("i") for _ in layout.bands]
    if len(layout.groups) == 1:
        found[layout.places[0][0]] = ids[0]
        return found
    sizes = [layout.unit_tokens // group.block_size for group in layout.groups]
    for unit in range(len(ids[0]) // sizes[0]):
        for own, size, (number, _) in zip(ids, sizes, layout.places, strict=True):
            found[number].extend(own[unit * size : (unit + 1) * size])
    return found
