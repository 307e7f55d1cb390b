"""Stores: what of a path is stored, and the host blocks for it."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .cache import PrefixCache
from .groups import Band
from .hops import Tier
from .jobs import JobBook
from .observer import Moves
from .owners import Holding
from .paths import Stretch
from .plan import CellLabel
from .records import Job, Run
from .table import NO_LIMIT

__all__ = ["Stores", "first_stored", "left_of"]


@dataclass(slots=True, eq=False)
class Stores:
    """Best effort: never waits for room. Blocks that find none are offered again later."""

    cache: PrefixCache
    jobs: JobBook
    moves: Moves
    source: Tier
    destination: Tier

    def offer(
        self, holding: Holding | None, run: Run, first: int, stop: int, *, with_windows: bool, most: int = NO_LIMIT
    ) -> list[Job]:
        """Store what `destination` lacks of the path of `run` up to unit `stop`, from unit `first` on and before it as
        far as something is missing; `with_windows`: also what a hit near `stop` needs of window bands. At most `most`
        blocks. `holding` is None for a write-back."""
        source, destination = self.source, self.destination
        if not self.cache.tiers[destination].pool.num_blocks:
            return []
        jobs: list[Job] = []
        full = self.cache.layout.full
        missing = self.cache.full.lacking(run, source, destination, first, stop) if full.width else []
        for over in _together(missing) if missing else ():
            jobs += self.store(holding, full, over, most=left_of(most, jobs))
        if with_windows and self.cache.windows:
            end = self.last_end(holding, stop)
            for window in self.cache.windows:
                missing = window.lacking(run, source, destination, first_stored(window.band, end), stop)
                for over in _together(missing) if missing else ():
                    jobs += self.store(holding, window.band, over, most=left_of(most, jobs))
        return jobs

    def last_end(self, holding: Holding | None, stop: int) -> int:
        """The last unit that a repeated request could hit: one token short, rounded down to its `hit_alignment`."""
        if holding is None:
            return stop
        most = min(stop, (holding.sequence.num_tokens - 1) // self.cache.layout.unit_tokens)
        return most - most % holding.hit_alignment

    def store(
        self,
        holding: Holding | None,
        band: Band,
        over: list[Stretch],
        source_ids: array[int] | None = None,
        most: int = NO_LIMIT,
        cells: Sequence[CellLabel] = (),
    ) -> list[Job]:
        """Store `over`, as far as `destination` has room and at most `most` blocks; from `source_ids`, where the blocks
        are an engine's, or from `cells` of a remote store."""
        # Pinned before room is made: the store must not evict the prefix before it.
        there, (_, start, _), (end, _, stop) = self.cache.tiers[self.destination], over[0], over[-1]
        pin = self.cache.lease(self.destination, end, [end.stop for _ in self.cache.layout.windows])
        wanted, fit, allowed = stop - start, there.room // band.width, most // band.width
        units = self.cache.components[band.number].fitting(start, stop, fit if fit < allowed else allowed)
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
                pin if is_handed else None, cells,
            )  # fmt: skip
        if fit < wanted:
            reason = f"{self.destination.name.lower()}_full"
            self.moves.told.store_skipped(holding, (wanted - fit) * band.width, reason)
        if not is_handed:
            self.cache.release(pin)
        return jobs


def left_of(most: int, jobs: list[Job]) -> int:
    """What is left of `most` blocks behind `jobs`."""
    return most if most == NO_LIMIT else most - sum(job.plan.num_blocks for job in jobs)


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
