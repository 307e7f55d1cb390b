"""Stores: what of a holding's path is offered to the host, and the room it gets there."""

from __future__ import annotations

from array import array
from collections.abc import Iterator

import attrs

from .cache import PrefixCache
from .groups import Band
from .jobs import JobBook
from .observer import Moves
from .owners import Holding
from .paths import Stretch, stretches
from .plan import Direction, Tier
from .records import Job, Run

__all__ = ["Stores", "first_stored"]


@attrs.define(eq=False)
class Stores:
    """Best effort: never waits for room, and what is refused is offered again."""

    cache: PrefixCache
    jobs: JobBook
    moves: Moves

    def offer(self, holding: Holding | None, run: Run, first: int, stop: int, *, with_windows: bool) -> list[Job]:
        """Store what the host lacks of the path of `run` up to unit `stop`, from unit `first` on and before it as far
        as something is missing; of bands of limited reach, if asked for, what a hit near `stop` needs. For `holding`,
        or for nobody in particular."""
        if not self.cache.tiers[Tier.HOST].pool.num_blocks:
            return []
        jobs: list[Job] = []
        spine = self.cache.layout.spine
        missing = _unstored(run, first, stop) if spine.width else []
        for over in _together(missing) if missing else ():
            jobs += self.store(holding, spine, over)
        for band in self.cache.layout.windows if with_windows else ():
            end = self.last_end(holding, stop)
            for over in _together(_unstored_window(run, band, first_stored(band, end), stop)):
                jobs += self.store(holding, band, over)
        return jobs

    def last_end(self, holding: Holding | None, stop: int) -> int:
        """The last unit at which a hit of the same tokens, asked for in the same way, could end: before the last token,
        on the grid of whoever asks."""
        if holding is None:
            return stop
        most = min(stop, (holding.sequence.num_tokens - 1) // self.cache.layout.unit_tokens)
        return most - most % holding.hit_alignment

    def store(
        self, holding: Holding | None, band: Band, over: list[Stretch], source_ids: array[int] | None = None
    ) -> list[Job]:
        """Store `over`, as far as the host has room; from `source_ids`, where the blocks are an engine's."""
        # Pinned before room is made: what is stored must not evict the prefix it hangs on.
        host, end = self.cache.tiers[Tier.HOST], over[-1].run
        pin = self.cache.lease(Tier.HOST, end, [end.stop for _ in self.cache.layout.windows])
        start, wanted = over[0].start, over[-1].stop - over[0].start
        num_units = min(wanted, host.room // band.width)
        jobs: list[Job] = []
        if num_units:
            # Of a window its end is what hits need.
            first = start + wanted - num_units if band.number else start
            stop = first + num_units
            blocks = self.cache.take(Tier.HOST, num_units * band.width)
            run = self.cache.cut(stretches(pin.run, first, stop)[-1].run, stop)
            if source_ids is not None:
                source_ids = source_ids[(first - start) * band.width : (stop - start) * band.width]
            jobs = self.jobs.plan(holding, Direction.STORE, run, band, first, stop, blocks, source_ids=source_ids)
        if num_units < wanted:
            self.moves.store_skipped(holding, (wanted - num_units) * band.width, "host_full")
        self.cache.release(pin)
        return jobs


def _unstored(run: Run, first: int, stop: int) -> list[Stretch]:
    """What the device holds of the spine up to unit `stop` and the host neither has nor gets, last first.

    Looks at everything from unit `first` on, and before it as far as something is missing."""
    found: list[Stretch] = []
    current: Run | None = run
    while current is not None:
        host, there = current.parts[Tier.HOST], min(current.parts[Tier.DEVICE].stop, stop)
        covered = host.stop if host.incoming is None else host.covered_stop
        if covered < there:
            found.append(Stretch(current, covered, there))
        if current.start < min(first, covered, stop):
            break
        current = current.before
    return found


def _unstored_window(run: Run, band: Band, start: int, stop: int) -> list[Stretch]:
    """The same of a band of limited reach, in units `[start, stop)`."""
    found: list[Stretch] = []
    for current in run.path():
        if current.stop <= start:
            break
        device = current.part(Tier.DEVICE, band.number)
        first, last = max(start, device.first), min(device.stop, stop)
        for missing in _without(first, last, current.part(Tier.HOST, band.number).covered):
            found.append(Stretch(current, missing.start, missing.stop))
    return found


def first_stored(band: Band, end: int) -> int:
    """The first unit of a band of limited reach that is stored for a hit that ends at unit `end`: what it needs, or a
    little before, as the next turn of a conversation does."""
    needed = band.first_needed(end * band.unit_tokens)
    return max(0, needed - band.margin(end - needed))


def _without(start: int, stop: int, covered: tuple[int, int]) -> list[range]:
    """What of `[start, stop)` lies outside of `covered`, last first."""
    first, last = covered
    if first == last:
        return [range(start, stop)] if start < stop else []
    parts = (range(max(start, last), stop), range(start, min(stop, first)))
    return [part for part in parts if part]


def _together(found: list[Stretch]) -> Iterator[list[Stretch]]:
    """Stretches, last first, as what lies without a gap, in prefix order."""
    together: list[Stretch] = []
    for stretch in reversed(found):
        if together and together[-1].stop != stretch.start:
            yield together
            together = []
        together.append(stretch)
    if together:
        yield together
