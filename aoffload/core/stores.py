"""Stores: what of a path is stored, and the host blocks for it."""

from __future__ import annotations

from array import array
from collections.abc import Iterator

import attrs

from .cache import PrefixCache
from .groups import Band
from .jobs import JobBook
from .observer import Moves
from .owners import Holding
from .paths import Stretch
from .plan import Tier
from .records import Job, Run

__all__ = ["Stores", "first_stored"]


@attrs.define(eq=False)
class Stores:
    """Best effort: never waits for room. Blocks that find none are offered again later."""

    cache: PrefixCache
    jobs: JobBook
    moves: Moves
    source: Tier
    destination: Tier

    def offer(self, holding: Holding | None, run: Run, first: int, stop: int, *, with_windows: bool) -> list[Job]:
        """Store what `destination` lacks of the path of `run` up to unit `stop`, from unit `first` on and before it as
        far as something is missing; `with_windows`: also what a hit near `stop` needs of window bands. `holding` is
        None for a write-back."""
        source, destination = self.source, self.destination
        if not self.cache.tiers[destination].pool.num_blocks:
            return []
        jobs: list[Job] = []
        full = self.cache.layout.full
        missing = self.cache.full.lacking(run, source, destination, first, stop) if full.width else []
        for over in _together(missing) if missing else ():
            jobs += self.store(holding, full, over)
        if with_windows and self.cache.windows:
            end = self.last_end(holding, stop)
            for window in self.cache.windows:
                missing = window.lacking(run, source, destination, first_stored(window.band, end), stop)
                for over in _together(missing) if missing else ():
                    jobs += self.store(holding, window.band, over)
        return jobs

    def last_end(self, holding: Holding | None, stop: int) -> int:
        """The last unit that a repeated request could hit: one token short, rounded down to its `hit_alignment`."""
        if holding is None:
            return stop
        most = min(stop, (holding.sequence.num_tokens - 1) // self.cache.layout.unit_tokens)
        return most - most % holding.hit_alignment

    def store(
        self, holding: Holding | None, band: Band, over: list[Stretch], source_ids: array[int] | None = None
    ) -> list[Job]:
        """Store `over`, as far as `destination` has room; from `source_ids`, where the blocks are an engine's."""
        # Pinned before room is made: the store must not evict the prefix before it.
        there, (_, start, _), (end, _, stop) = self.cache.tiers[self.destination], over[0], over[-1]
        pin = self.cache.lease(self.destination, end, [end.stop for _ in self.cache.layout.windows])
        wanted = stop - start
        units = self.cache.components[band.number].fitting(start, stop, there.room // band.width)
        jobs: list[Job] = []
        is_handed = False
        if units:
            blocks = self.cache.take(self.destination, len(units) * band.width)
            run = self.cache.cut(pin.run, units.stop)
            if source_ids is not None:
                source_ids = source_ids[(units.start - start) * band.width : (units.stop - start) * band.width]
            is_handed = run is pin.run and not self.cache.windows
            jobs = self.jobs.plan(
                holding, self.source, self.destination, run, band, units.start, units.stop, blocks, (), source_ids,
                pin if is_handed else None,
            )  # fmt: skip
        if len(units) < wanted:
            self.moves.told.store_skipped(
                holding, (wanted - len(units)) * band.width, f"{self.destination.name.lower()}_full"
            )
        if not is_handed:
            self.cache.release(pin)
        return jobs


def first_stored(band: Band, end: int) -> int:
    """The first unit of a window band that is stored for a hit that ends at unit `end`: with a margin, since the next
    turn of a conversation may match somewhat earlier."""
    needed = band.first_unit(end)
    return max(0, needed - band.margin(end - needed))


def _together(found: list[Stretch]) -> Iterator[list[Stretch]]:
    """Group stretches, given last first, into lists without gaps, in prefix order."""
    together: list[Stretch] = []
    for stretch in reversed(found):
        if together and together[-1][2] != stretch[1]:
            yield together
            together = []
        together.append(stretch)
    if together:
        yield together
