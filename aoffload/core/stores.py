"""Stores: what of a holding's path is offered to the host, and the room it gets there."""

from __future__ import annotations

from collections.abc import Iterator

import attrs

from .cache import PrefixCache
from .groups import Band
from .holding import Holding
from .index import Run, Stretch, stretches
from .jobs import Job, JobBook
from .lifecycle import Moves
from .plan import Direction, Tier

__all__ = ["Stores"]


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
            jobs += self._store(holding, spine, over)
        for band in self.cache.layout.windows if with_windows else ():
            end = self._last_end(holding, stop)
            for over in _together(_unstored_window(run, band, end, stop)):
                jobs += self._store(holding, band, over)
        return jobs

    def _last_end(self, holding: Holding | None, stop: int) -> int:
        """The last unit at which a hit of the same tokens, asked for in the same way, could end: before the last token,
        on the grid of whoever asks."""
        if holding is None:
            return stop
        most = min(stop, (holding.sequence.num_tokens - 1) // self.cache.layout.unit_tokens)
        return most - most % holding.hit_alignment

    def _store(self, holding: Holding | None, band: Band, over: list[Stretch]) -> list[Job]:
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
            jobs = self.jobs.plan(holding, Direction.STORE, run, band, first, stop, blocks)
        if num_units < wanted:
            self.moves.observer.store_skipped(holding, (wanted - num_units) * band.width, "host_full")
        self.cache.release(pin)
        return jobs


def _unstored(run: Run, first: int, stop: int) -> list[Stretch]:
    """What the device holds of the spine up to unit `stop` and the host neither has nor gets, last first.

    Looks at everything from unit `first` on, and before it as far as something is missing."""
    found: list[Stretch] = []
    current: Run | None = run
    while current is not None:
        covered, there = current.parts[Tier.HOST].covered_stop, min(current.parts[Tier.DEVICE].stop, stop)
        if covered < there:
            found.append(Stretch(current, covered, there))
        if current.start < min(first, covered, stop):
            break
        current = current.before
    return found


def _unstored_window(run: Run, band: Band, end: int, stop: int) -> list[Stretch]:
    """The same of a band of limited reach, up to unit `stop`: of what a hit needs that ends at unit `end` or later, or
    a little before, as the next turn of a conversation does."""
    start = band.first_needed(end * band.unit_tokens)
    start = max(0, start - band.margin(end - start))
    found: list[Stretch] = []
    for current in run.path():
        if current.stop <= start:
            break
        device = current.part(Tier.DEVICE, band.number)
        first, last = max(start, device.first), min(device.stop, stop)
        for missing in _without(first, last, current.part(Tier.HOST, band.number).covered):
            found.append(Stretch(current, missing.start, missing.stop))
    return found


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
