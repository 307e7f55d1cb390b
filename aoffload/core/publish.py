"""Publishing on the device: making what a request computed findable, and taking it back."""

from __future__ import annotations

from array import array
from collections.abc import Iterator

from .cache import PrefixCache
from .holding import Holding
from .index import Run, stretches
from .plan import Tier

__all__ = ["publish", "step_back", "unpublish"]


def publish(cache: PrefixCache, holding: Holding, stop: int) -> None:
    """Make units `[holding.published, stop)` findable and pin their path.

    What somebody cached meanwhile is pinned too, since later blocks hang on it; the private copy stays until close.
    """
    sequence = holding.sequence
    while (position := holding.published) < stop:
        run = holding.device_run
        if run is None or run.stop == position:
            following = cache.index.find(sequence, run, position)
            if following is None:
                _append(cache, holding, run, sequence.uniform_stop(position, stop))
                continue
            run = following
        agreed = sequence.common_stop(run, stop)
        run = cache.cut(run, agreed)
        _pin(cache, holding, run)
        _fill(cache, holding, run, agreed)


def _pin(cache: PrefixCache, holding: Holding, run: Run) -> None:
    lease = holding.leases.get(Tier.DEVICE)
    if lease is None:
        holding.leases[Tier.DEVICE] = cache.lease(Tier.DEVICE, run)
    else:
        cache.move_lease(lease, run)


def _fill(cache: PrefixCache, holding: Holding, run: Run, stop: int) -> None:
    """Hand blocks to a run that exists, from where it has none; the ones before stay private duplicates."""
    part, width, position = run.parts[Tier.DEVICE], cache.layout.width, holding.published
    present = min(part.stop, stop)
    if present > position:
        holding.duplicates.append(range(position, present))
    if present < stop:
        part.blocks.extend(holding.table[present * width : stop * width])
        part.stop = stop
    holding.published = stop


def _append(cache: PrefixCache, holding: Holding, run: Run | None, stop: int) -> None:
    """Nobody has these tokens: grow the last run if it is ours alone, else start a new one."""
    sequence, position = holding.sequence, holding.published
    if run is not None and _is_ours_alone(run) and run.spans == sequence.spans_at(position):
        cache.index.grow(run, sequence, stop)
    else:
        run = cache.index.insert(sequence, run, position, stop)
        _pin(cache, holding, run)
    _fill(cache, holding, run, stop)


def _is_ours_alone(run: Run) -> bool:
    """Whether the growing request's lease is the sole reference: nobody would see the run change under it."""
    if run.num_after or run.parts[Tier.DEVICE].num_references != 1 or run.parts[Tier.DEVICE].stop != run.stop:
        return False
    return all(not p.num_references and p.incoming is None for p in run.parts[1:]) and run.parts[0].incoming is None


def unpublish(cache: PrefixCache, holding: Holding, start: int) -> set[Run]:
    """Make the units from `start` on that `holding` itself has published unfindable, in every tier.

    Its blocks are private again, like duplicates. Returns the runs taken back: whoever leases one has matched bytes
    that were never right. What somebody else cached is somebody else's, and stays.
    """
    mine = list(_own_units(holding, max(start, holding.ready_stop)))
    for units in mine:
        for at in (units.start, units.stop):
            for stretch in stretches(holding.device_run, at, at + 1):
                if stretch.run.start < at:
                    cache.split(stretch.run, at)
    wrong = {stretch.run for units in mine for stretch in stretches(holding.device_run, units.start, units.stop)}
    for run in wrong:
        part = run.parts[Tier.DEVICE]
        part.blocks, part.stop = array("i"), run.start  # pinned by its own lease, and in its own table
        cache.withdraw(run)
    holding.duplicates += mine
    return wrong


def _own_units(holding: Holding, start: int) -> Iterator[range]:
    for units in sorted(holding.duplicates, key=lambda units: units.start):
        if units.start > start:
            yield range(start, units.start)
        start = max(start, units.stop)
    if start < holding.published:
        yield range(start, holding.published)


def step_back(cache: PrefixCache, holding: Holding, start: int) -> None:
    """Let `holding` compute again from unit `start` on: what it has there is private, its lease ends before."""
    start = min(start, holding.published)  # after a reset more may be computed than was published
    path = stretches(holding.device_run, 0, start)
    lease = holding.leases.get(Tier.DEVICE)
    if lease is not None and path:
        cache.move_lease(lease, cache.cut(path[-1].run, start))
    elif lease is not None:
        cache.release(holding.leases.pop(Tier.DEVICE))
    holding.published = start
    kept = (range(units.start, min(units.stop, start)) for units in holding.duplicates)
    holding.duplicates = [units for units in kept if units]
