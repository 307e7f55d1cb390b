"""Publishing on the device: making computed units findable, and making them private again."""

from __future__ import annotations

from collections.abc import Container, Iterable

from .cache import PrefixCache
from .groups import Band
from .hops import Tier
from .intervals import without
from .owners import Holding
from .paths import stretches
from .records import Run
from .request_leases import RequestLeases

__all__ = ["first_published", "publish", "published_by", "read_by", "runs_from", "step_back", "take_private"]


MAX_GROWN_BYTES = 2**14
"""A run with more token bytes does not grow: the next units begin another run. Both merge once they are unpinned."""


def publish(leases: RequestLeases, holding: Holding, stop: int) -> None:
    """Make units `[holding.published, stop)` findable and pin their path.

    Units that another request has cached meanwhile are pinned too, since later blocks follow them; the private copy
    stays until the request ends. If the cached copy is unused, the request's blocks replace it.
    """
    cache, sequence = leases.cache, holding.sequence
    while (position := holding.published) < stop:
        run = holding.device_run
        if run is None or run.stop == position:
            following = cache.index.find(sequence, run, position)
            if following is None:
                _append(leases, holding, run, sequence.run_stop(position, stop))
                continue
            run = following
        agreed = sequence.common_stop(run, stop)
        run = cache.cut(run, agreed)
        if _is_unused(run):
            _take_place(cache, holding, run)
        leases.follow(holding, run)
        _fill(cache, holding, run, agreed)


def _is_unused(run: Run) -> bool:
    """Whether its device blocks are unpinned, and no job adds to them."""
    return not any(part.num_references or part.incoming is not None for part in run.parts_in(Tier.DEVICE))


def _take_place(cache: PrefixCache, holding: Holding, run: Run) -> None:
    """Free the device blocks of `run`, so that it can get those of the request."""
    for band, table in enumerate(holding.tables):
        if table.start <= run.start:  # else the request has no blocks for units that left its window
            cache.withdraw_part(run.part(Tier.DEVICE, band))


def _fill(cache: PrefixCache, holding: Holding, run: Run, stop: int) -> None:
    """Give the path of `run` blocks for the units that it lacks up to `stop`. The others stay private duplicates."""
    for number, table in enumerate(holding.tables):
        start = max(holding.published, table.start)
        for current, first, last in stretches(run, start, stop) if table.width else ():
            part = current.part(Tier.DEVICE, number)
            # A run holds one stretch of a window: units that do not adjoin it get a run of their own.
            if part.blocks and last < part.first:
                part = cache.split(current, last).part(Tier.DEVICE, number)
            elif part.blocks and first > part.stop:
                cache.split(current, first)
            before = (part.first, part.stop) if part.blocks else (first, first)
            known = part.enter(first, last, table.at(first, last))
            if known:
                table.has_duplicates(known)
            if before != (part.first, part.stop):
                cache.tiers[Tier.DEVICE].part_changed(part, *before)
    holding.published_up_to(stop)


def _append(leases: RequestLeases, holding: Holding, run: Run | None, stop: int) -> None:
    """These tokens are not in the index: grow the last run if only this request uses it, else insert a new one."""
    cache, sequence, position = leases.cache, holding.sequence, holding.published
    if run is not None and _may_grow(cache, run) and run.spans == sequence.spans_at(position):
        cache.index.grow(run, sequence, stop)
    else:
        run = cache.index.insert(sequence, run, position, stop)
        leases.follow(holding, run)
    _fill(cache, holding, run, stop)


def _may_grow(cache: PrefixCache, run: Run) -> bool:
    """Whether only this request uses `run`, it is short (growing copies tokens), and it ends at no maximum boundary."""
    return len(run.tokens) <= MAX_GROWN_BYTES and not cache.is_cut(run.stop) and _is_ours_alone(cache, run)


def _is_ours_alone(cache: PrefixCache, run: Run) -> bool:
    """Whether the growing request's lease is the only reference, so that no other reader sees the run change."""
    full = run.parts[Tier.DEVICE]
    if run.num_after or full.ring or (full.width and full.stop != run.stop):
        return False
    for part in run.parts:
        is_ours = part.tier is Tier.DEVICE
        if part.incoming is not None or part.num_references > is_ours:
            return False
        if is_ours and part.band and (not part.num_references or (part.blocks and part.stop != run.stop)):
            return False
    return True


def published_by(cache: PrefixCache, holding: Holding, start: int) -> list[tuple[Band, Run]]:
    """The runs, band by band, that hold what the request itself has published from unit `start` on, without copies that
    others cached first. Splits runs where these units begin and end."""
    own = _own_units(cache, holding, start)
    for at in {at for _, units in own for at in (units.start, units.stop)}:
        for run, _, _ in stretches(holding.device_run, at, at + 1):
            if run.start < at:
                cache.split(run, at)
    return [(band, run) for band, units in own for run, _, _ in stretches(holding.device_run, units.start, units.stop)]


def first_published(cache: PrefixCache, holding: Holding, start: int) -> int:
    """The first unit from `start` on that the request itself has published; `holding.published` if there is none."""
    return min((units.start for _, units in _own_units(cache, holding, start)), default=holding.published)


def _own_units(cache: PrefixCache, holding: Holding, start: int) -> list[tuple[Band, range]]:
    ready = max(start, holding.ready_stop)
    return [
        (band, units)
        for band, table in zip(cache.layout.bands, holding.tables, strict=True)
        for units in without(table.duplicates, ready, holding.published)
        if band.width
    ]


def runs_from(cache: PrefixCache, holding: Holding, start: int, cut: Container[Run]) -> list[Run]:
    """The runs from unit `start` on that the request uses: those of its device lease or, without tables, the cached
    ones of the tokens that it had published when it gave them up. Splits at `start`, but no run in `cut`."""
    if holding.tables:
        runs = holding.device_run.whole_path() if holding.device_run is not None else []
    else:
        runs = [run for run, _ in cache.index.walk(holding.sequence, holding.read_before)]
    for run in runs:
        if run.start < start < run.stop and run not in cut:
            cache.split(run, start)
    return [run for run in runs if run.stop > start]


def read_by(readers: Iterable[Holding], published: list[tuple[Band, Run]]) -> list[tuple[Band, Run]]:
    """Those of `published` whose blocks are in the tables of `readers`."""
    leases = [reader.leases[Tier.DEVICE] for reader in readers if reader.tables and Tier.DEVICE in reader.leases]
    paths = [(lease, set(lease.run.path())) for lease in leases]
    return [
        (band, run)
        for band, run in published
        if any(run in path and (not band.number or run.start >= lease.starts[band.number - 1]) for lease, path in paths)
    ]


def take_private(
    cache: PrefixCache, holding: Holding, published: list[tuple[Band, Run]], shared: list[tuple[Band, Run]]
) -> None:
    """Make the withdrawn blocks of `published` private to the request again. The `shared` ones stay with their readers
    until these let go: there the request gets fresh blocks, for which there must be room."""
    for band, run in published:
        table = holding.tables[band.number]
        if run.start < table.start:
            continue  # it has left the window
        if (band, run) in shared:
            cache.last_uses.gave_up(holding, table.at(run.start, run.stop))
            table.put(run.start, cache.take(Tier.DEVICE, (run.stop - run.start) * band.width))
        else:
            run.part(Tier.DEVICE, band.number).disown(set(table.at(run.start, run.stop)))


def step_back(leases: RequestLeases, holding: Holding, start: int) -> None:
    """Let the request compute again from unit `start` on: its blocks there are private, its lease ends there."""
    start = min(start, holding.published)  # after a reset more may be computed than was published
    run = holding.device_run
    leases.follow(holding, leases.cache.cut(run, start) if run is not None and start else None)
    holding.published_up_to(start)
    for table in holding.tables:
        table.step_back(start)
