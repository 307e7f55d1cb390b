"""Attention components: what differs between full attention and a window, in one class each.

Full attention reads every block of a prefix. So a part holds the front of its run, and no match finds blocks behind a
gap. References chain: a lease counts on the last run of its path only, and a run with references counts once on the run
before it.

    part    [present .............)(nothing      )

A window (a sliding one, or the chunk of chunked local attention) reads the last blocks before a position. So a part
holds one stretch anywhere in its run. A lease counts on each run from the first unit that it pins of the band to the
end of its path.

    part    (nothing )[present ........)(nothing )
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

from .groups import Band, Layout
from .hops import Tier
from .intervals import outside
from .paths import Stretch, stretches
from .presence import covered, covered_stop
from .records import Job, Lease, Part, Run
from .tiers import TierBlocks

__all__ = ["Component", "FullComponent", "WindowComponent", "brings", "window_components"]


@dataclass(slots=True, eq=False)
class FullComponent:
    """Full attention. Every layout has this component; where all groups have windows, its band has no blocks."""

    band: Band

    def pin(self, blocks: TierBlocks, run: Run, is_use: bool) -> None:
        """Count a lease that ends at `run`: one more reference on each run back to the first that already had one.

        `is_use` also marks parts as in use (`last_use`), back to the first that already was: so are all before it."""
        current: Run | None = run
        is_new = True
        while current is not None and (is_new or is_use):
            part = current.parts[blocks.tier]
            if is_new:
                part.num_references += 1
                is_new = part.num_references == 1
                if is_new and part.blocks:
                    blocks.make_pinned(part)
            if is_use:
                is_use = part.last_use > 0 or not part.blocks
                part.last_use = 0
            current = current.before

    def unpin(self, blocks: TierBlocks, run: Run) -> list[Run]:
        """Remove the references of a lease that ended at `run`. Returns the runs left without any, last first."""
        let_go: list[Run] = []
        current: Run | None = run
        while current is not None:
            part = current.parts[blocks.tier]
            part.num_references -= 1
            if part.num_references:
                break
            let_go.append(current)
            blocks.let_go_of(part)
            current = current.before
        return let_go

    def head_references(self, num_references: int) -> int:
        """The references that the head gets when a run with `num_references` is split."""
        return min(1, num_references)  # leases stay with the tail, and a referenced tail counts once on the head

    def follows(self, front: Part, back: Part) -> bool:
        """Whether `front` and `back` can be one part. `front` is the part of the run before; `back` has blocks."""
        return front.stop == back.first

    def leaves_gap(self, front: Part, back: Part) -> bool:
        """Whether `front` ends what the band holds on this path: it has blocks, and `back`, the part of the next run,
        has none. Joining both with a third part that has blocks would then leave a gap."""
        return False

    def first_brought(self, job: Job, part: Part) -> int:
        """The first unit that `job` may add to `part`. In full attention, jobs only append."""
        return part.stop

    def enter(self, part: Part, first: int, last: int, ids: array[int]) -> array[int]:
        """Publish `ids`, which begin at unit `first`, up to unit `last`. Takes none if a unit before `first` is missing
        or all units up to `last` are present. Returns the ids not used."""
        if not first <= part.stop < last:
            return ids
        before = part.run.before
        if first == part.run.start and before is not None and before.parts[part.tier].stop != before.stop:
            return ids
        skip = (part.stop - first) * part.width  # cached by another request meanwhile: that copy stays
        take = (last - first) * part.width
        if not skip and take == len(ids):
            part.append(ids, last)
            return array("i")
        part.append(ids[skip:take], last)
        return ids[:skip] + ids[take:]

    def fitting(self, start: int, stop: int, num_units: int) -> range:
        """The units of `[start, stop)` to store where there is room for `num_units`."""
        return range(start, min(stop, start + num_units))

    def lacking(self, run: Run, source: Tier, tier: Tier, start: int, stop: int) -> list[Stretch]:
        """Units before `stop` on the path of `run` that `source` holds and `tier` neither holds nor will get; last
        first. Goes back to unit `start`, and then on to the first run of which `tier` holds or will get something: of
        full attention, it then has all before that, too."""
        found: list[Stretch] = []
        current: Run | None = run
        while current is not None:
            part, there = current.parts[tier], min(current.parts[source].stop, stop)
            reached = part.stop if part.incoming is None else covered_stop(part)
            if reached < there:
                found.append((current, reached, there))
            if current.start < min(start, reached, stop):
                break
            current = current.before
        return found

    def expected_references(self, tier: Tier, runs: Iterable[Run], leases: Iterable[Lease]) -> Counter[Run]:
        """The references that each run must have, given all `leases` of one tier."""
        expected = Counter(lease.run for lease in leases)
        expected.update(run.before for run in runs if run.before is not None and run.parts[tier].num_references)
        return expected


@dataclass(slots=True, eq=False)
class WindowComponent:
    """One window band."""

    band: Band
    places: tuple[int, ...]
    """By tier: where `Run.parts` has the part of the band."""

    def pin(self, blocks: TierBlocks, run: Run, start: int, is_use: bool) -> None:
        """Count a lease on every run from unit `start` on, on the path of `run`."""
        current: Run | None = run
        place = self.places[blocks.tier]
        while current is not None and current.stop > start:
            part = current.parts[place]
            part.num_references += 1
            if part.num_references == 1 and part.blocks:
                blocks.make_pinned(part)
            if is_use:
                part.last_use = 0
            current = current.before

    def unpin(self, blocks: TierBlocks, run: Run, start: int) -> None:
        """The opposite of `pin`."""
        current: Run | None = run
        place = self.places[blocks.tier]
        while current is not None and current.stop > start:
            part = current.parts[place]
            part.num_references -= 1
            if not part.num_references:
                blocks.let_go_of(part)
            current = current.before

    def head_references(self, num_references: int) -> int:
        return num_references  # a lease begins where a run does: it covers both

    def follows(self, front: Part, back: Part) -> bool:
        return front.stop == back.first or not front.blocks

    def leaves_gap(self, front: Part, back: Part) -> bool:
        return bool(front.blocks) and not back.blocks

    def first_brought(self, job: Job, part: Part) -> int:
        return job.start

    def enter(self, part: Part, first: int, last: int, ids: array[int]) -> array[int]:
        """Publish `ids`, which begin at unit `first`, up to unit `last`: only if they adjoin what the part holds.
        Returns the ids not used."""
        if part.blocks and (last < part.first or first > part.stop):
            return ids
        known, width = part.enter(first, last, ids), part.width
        if not known and len(ids) == (last - first) * width:
            return array("i")
        return ids[(known.start - first) * width : (known.stop - first) * width] + ids[(last - first) * width :]

    def fitting(self, start: int, stop: int, num_units: int) -> range:
        return range(max(start, stop - num_units), stop)  # hits need the end of a window

    def lacking(self, run: Run, source: Tier, tier: Tier, start: int, stop: int) -> list[Stretch]:
        """Units of `[start, stop)` that `source` holds and `tier` neither holds nor will get; last first."""
        found: list[Stretch] = []
        current: Run | None = run
        here, there = self.places[source], self.places[tier]
        while current is not None and current.stop > start:
            part, other = current.parts[here], current.parts[there]
            first, last = max(start, part.first), min(stop, part.stop)
            if first < last and not other.first <= first < last <= other.stop:
                units = outside(*covered(other), first, last)
                found += [(current, one.start, one.stop) for one in reversed(units)]
            current = current.before
        return found

    def expected_references(self, tier: Tier, runs: Iterable[Run], leases: Iterable[Lease]) -> Counter[Run]:
        """The references that each run must have, given all `leases`. `ValueError` if a lease begins inside a run."""
        expected: Counter[Run] = Counter()
        for lease in leases:
            start = lease.starts[self.band.number - 1]
            covered = [run for run in lease.run.path() if run.stop > start]
            if any(run.start < start for run in covered):
                raise ValueError(f"a lease begins inside of a run: {lease}, {start}")
            expected.update(covered)
        return expected


Component: TypeAlias = FullComponent | WindowComponent


def brings(component: Component, job: Job, part: Part, run: Run) -> bool:
    """Whether `job` is unsettled and adds to `part`: the part of `run`, or one whose front is about to become that.
    False if `run` is not on the job's path: when a job settles, it clears `incoming` on its own path only."""
    first = component.first_brought(job, part)
    return not job.is_settled and any(over is run for over, _, _ in stretches(job.run, first, job.stop))


def window_components(layout: Layout, num_tiers: int) -> tuple[WindowComponent, ...]:
    places = ((band, range(band.number * num_tiers, (band.number + 1) * num_tiers)) for band in layout.windows)
    return tuple(WindowComponent(band, tuple(of_band)) for band, of_band in places)
