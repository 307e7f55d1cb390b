"""Offers: stores from an engine's blocks, which the engine names in its tables.

Best effort: blocks without room in the host, or beyond the limit in flight, are skipped. The observer is told, and the
next offer tries them again.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TypeAlias

import attrs

from ..errors import InvalidArgument
from .cache import PrefixCache
from .commits import is_at_end
from .engine_blocks import EngineTier
from .engine_ids import EngineIds, Find, NamedRows, has_null
from .groups import Band
from .intervals import without
from .jobs import JobBook
from .observer import Moves
from .owners import Holding
from .paths import stretches
from .plan import Tier
from .policy import StorePolicy
from .presence import covered
from .records import Job, Run
from .stores import Stores, first_stored
from .tokens import TokenSequence

__all__ = ["EngineOffers", "Offer"]

Path: TypeAlias = Sequence[tuple[Run, int]]
"""Runs of the index, each with the unit up to which its tokens are those of a request."""


@attrs.frozen
class Offer:
    """Engine blocks for the units of `band` from `start` on."""

    band: Band
    start: int
    blocks: array[int]

    @property
    def stop(self) -> int:
        return self.start + len(self.blocks) // self.band.width


@attrs.define(eq=False)
class EngineOffers:
    cache: PrefixCache
    jobs: JobBook
    stores: Stores
    moves: Moves
    policy: StorePolicy
    device: EngineTier
    max_blocks_in_flight: int

    def wanted(self, holding: Holding, ids: EngineIds, unwritten: Mapping[int, range], *, is_last: bool) -> list[Offer]:
        """Blocks that the policy wants, the host lacks and the engine has. Changes nothing, except that the last offer
        tells the policy what was generated, once all `ids` are checked. `unwritten`: for each band, units whose blocks
        were never written."""
        if holding.epoch != self.cache.epoch or not holding.store_limit:
            return []
        if is_last:
            ids.check(holding.published)
            self.policy.seen(holding, holding.sequence.num_prompt_units, holding.published)
        stop = min(holding.published, holding.store_limit, self.policy.wanted_stop(holding))
        if not stop or not self.cache.tiers[Tier.HOST].pool.num_blocks:
            return []
        path = list(self.cache.index.walk(holding.sequence, stop))
        find = partial(self.device.find, holding.request_id)
        found = list(self._of_full(path, stop, ids, find))
        if is_last or is_at_end(holding) or stop == holding.store_limit:
            end = self.stores.last_end(holding, stop)
            for band in self.cache.layout.windows:
                nobodys = unwritten.get(band.number, range(0))
                lacking = _lacking(path, band, first_stored(band, end), stop)
                units = [part for one in lacking for part in without([nobodys], one.start, one.stop)]
                found += self._of_window(band, units, ids, find)
        return found

    def check_sources(self, found: Sequence[Offer], num_rows: int) -> None:
        """Refuse a block that is named twice, or that a load may still write to."""
        if not found:
            return
        named = NamedRows.of(num_rows, [offer.blocks for offer in found])
        if not named.are_distinct:
            raise InvalidArgument("block_ids", "names a block twice")
        if wrong := named.shared_with(self.jobs.ids_being_written(Tier.DEVICE)):
            raise InvalidArgument("block_ids", f"names block {wrong}, which a copy may still write to")

    def _of_full(self, path: Path, stop: int, ids: EngineIds, find: Find) -> Iterator[Offer]:
        """Full attention, up to the first null block: blocks behind a gap are never found."""
        full = self.cache.layout.full
        for units in _lacking(path, full, 0, stop) if full.width else ():
            blocks = ids.with_found(full, units.start, units.stop, find)
            if has_null(blocks):
                named = blocks.index(0) // full.width
                if named:
                    yield Offer(full, units.start, blocks[: named * full.width])
                return
            yield Offer(full, units.start, blocks)

    @staticmethod
    def _of_window(band: Band, lacking: Iterable[range], ids: EngineIds, find: Find) -> Iterator[Offer]:
        """A window band, without units that have a null block."""
        for units in lacking:
            blocks = ids.with_found(band, units.start, units.stop, find)
            nulls = [units.start + at // band.width for at, block_id in enumerate(blocks) if not block_id]
            for named in without([range(unit, unit + 1) for unit in nulls], units.start, units.stop):
                first = (named.start - units.start) * band.width
                yield Offer(band, named.start, blocks[first : first + len(named) * band.width])

    def store(self, holding: Holding, found: list[Offer]) -> list[Job]:
        jobs: list[Job] = []
        run = self._path(holding.sequence, max(offer.stop for offer in found))
        pin = self.cache.lease(Tier.HOST, run, [run.stop for _ in self.cache.layout.windows], is_use=False)
        for offer in found:
            taken = self._bounded(offer)
            if len(taken.blocks) < len(offer.blocks):
                self.moves.store_skipped(holding, len(offer.blocks) - len(taken.blocks), "in_flight")
            if taken.blocks:
                over = stretches(pin.run, taken.start, taken.stop)
                jobs += self.stores.store(holding, taken.band, over, taken.blocks)
        self.cache.release(pin)
        return jobs

    def _bounded(self, offer: Offer) -> Offer:
        """The front of `offer` that may be in flight; of a window all or nothing, since a part of it is of no use."""
        in_flight = self.jobs.num_stored_now()
        num_units = max(0, self.max_blocks_in_flight - in_flight) // offer.band.width
        if offer.start + num_units >= offer.stop or (offer.band.number and not in_flight):
            return offer
        num_units = 0 if offer.band.number else max(num_units, 0 if in_flight else 1)
        return Offer(offer.band, offer.start, offer.blocks[: num_units * offer.band.width])

    def _path(self, sequence: TokenSequence, stop: int) -> Run:
        """The run of the index that ends at unit `stop` of `sequence`; inserts what is missing."""
        last, position = None, 0
        for run, agreed in list(self.cache.index.walk(sequence, stop)):
            last, position = self.cache.cut(run, agreed), agreed
        while position < stop:
            end = sequence.run_stop(position, stop)
            last = self.cache.index.insert(sequence, last, position, end)
            position = end
        assert last is not None, "a path to nowhere"
        return last


def _lacking(path: Path, band: Band, start: int, stop: int) -> list[range]:
    """Units `[start, stop)` of `band` that the host neither holds nor will get from jobs under way."""
    position, held = 0, list[range]()
    for run, agreed in path:
        first, last = covered(run.part(Tier.HOST, band.number))
        held.append(range(first, min(last, agreed)))
        position = agreed
    assert position <= stop, "a path beyond what was asked for"
    return without([units for units in held if units], start, stop)
