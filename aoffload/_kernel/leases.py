"""RequestLeases: the leases and block tables of a request, from its match until it gives everything back.

Windows: a request gives back the blocks that its windows have left behind.

Publishing on the device: making computed units findable, and making them private again.
"""

from __future__ import annotations

from array import array
from collections.abc import Container, Iterable
from dataclasses import dataclass

from .cache import PrefixCache
from .index import Hit, fetchable_path, find_hit, held_ids, stretches
from .layout import Band, without
from .plans import PrefixMatch
from .records import BlockTable, Part, Run, nulls
from .requests import Fetched, LedgerRequest
from .states import BELOW, RequestState, Tier

__all__ = [
    "RequestLeases",
    "first_published",
    "publish",
    "published_by",
    "read_by",
    "runs_from",
    "slide",
    "slide_off",
    "step_back",
    "take_private",
]


@dataclass(slots=True, eq=False)
class RequestLeases:
    """Leases of requests: on the device for the device hit, in the host for the units to load."""

    cache: PrefixCache
    num_fetched: int = 0
    """Host blocks that requests without block tables keep since they were fetched for them."""

    def pin(self, request: LedgerRequest, *, islands: bool = True) -> None:
        """Match and pin, in one step: nothing can be evicted in between. `islands`: see `find_hit`."""
        hit = self._find(request, islands=islands)
        self._take_leases(request, hit, islands=islands)
        unit, on_disk = self.cache.layout.unit_tokens, 0
        if self.cache.has_disk:
            on_disk = self.num_fetchable(request, hit.stop) * unit
        match = PrefixMatch(hit.device_stop * unit, (hit.stop - hit.device_stop) * unit, num_disk_tokens=on_disk)
        request.matched(hit.device_stop, hit.stop, match)

    def num_fetchable(self, request: LedgerRequest, hit_stop: int) -> int:
        """Units behind the hit of `request`, which ends at `hit_stop`, that a fetch would add."""
        if not self.cache.has_disk or request.epoch != self.cache.epoch:
            return 0
        layout, sequence = self.cache.layout, request.sequence
        limit = min((sequence.num_tokens - 1) // layout.unit_tokens, request.hit_limit)
        if hit_stop >= limit:
            return 0
        stop = fetchable_path(self.cache.index, sequence, layout, limit, request.hit_alignment)[1]
        return max(0, stop - hit_stop)

    def _find(self, request: LedgerRequest, *, islands: bool) -> Hit:
        if request.epoch != self.cache.epoch:
            return Hit(0, 0, ())
        layout = self.cache.layout
        limit = min((request.sequence.num_tokens - 1) // layout.unit_tokens, request.hit_limit)
        hit = find_hit(self.cache.index, request.sequence, layout, limit, request.hit_alignment, islands=islands)
        if request.state is RequestState.REQUEUED:
            # A requeued request does not load again. Otherwise two requests whose loads keep failing could take turns
            # forever: each gives up its blocks, which lets the other one try again.
            hit = Hit(hit.device_stop, hit.device_stop, hit.path)
        return hit

    def _take_leases(self, request: LedgerRequest, hit: Hit, *, islands: bool) -> None:
        if not hit.stop:
            return
        layout = self.cache.layout
        # Pin nothing behind the hit: a request must never wait for room that its own pins take.
        last = hit.path[-1]
        if last.stop != hit.stop:
            last = self.cache.cut(last, hit.stop)
        if hit.stop > hit.device_stop:
            self.keep(request, BELOW, last)
            if islands and layout.windows:
                # Behind the device hit, the device may hold window blocks that the host lacks: the load adopts them.
                request.reserve = self.cache.lease(Tier.DEVICE, last)
        if hit.device_stop:
            self.keep(request, Tier.DEVICE, self.cache.cut(last, hit.device_stop))

    def keep(self, request: LedgerRequest, tier: Tier, run: Run) -> None:
        """Pin in `tier` what the request reads or loads up to the end of `run`."""
        request.leases[tier] = self.cache.lease(tier, run)

    def follow(self, request: LedgerRequest, run: Run | None) -> None:
        """Move the end of the device lease to `run`, or take a device lease that ends there; None: end the lease. A new
        lease pins each window band from the start of its table on."""
        lease = request.leases.get(Tier.DEVICE)
        if lease is not None and run is not None:
            self.cache.move_lease(lease, run)
        elif lease is not None:
            del request.leases[Tier.DEVICE]
            self.cache.release(lease)
        elif run is not None:
            starts = [table.start for table in request.tables[1:]] if self.cache.windows else ()
            request.leases[Tier.DEVICE] = self.cache.lease(Tier.DEVICE, run, starts)

    def share(self, parent: LedgerRequest, child: LedgerRequest, run: Run) -> None:
        """Give `child`, a fork, a device lease like that of `parent`, but only to the end of `run`."""
        starts = [min(start, run.stop) for start in parent.leases[Tier.DEVICE].starts]
        child.leases[Tier.DEVICE] = self.cache.lease(Tier.DEVICE, run, starts)

    def forget_match(self, request: LedgerRequest) -> None:
        """Release the leases and clear the match; the request is matched again later. Does not free private blocks."""
        for lease in request.forgot_match():
            self.cache.release(lease)

    def keep_fetched(self, request: LedgerRequest, most: int) -> None:
        """Keep the host hit until the request has block tables, also while it gives its match up in the line for room:
        it was just fetched. At most `most` blocks are kept so, of all requests together; else it may be evicted."""
        self.end_fetched(request)
        lease = request.leases.get(BELOW)
        if lease is None:
            return
        num_blocks = self.num_fresh(request.published, request.hit_stop, request.hit_stop)
        if self.num_fetched + num_blocks <= most:
            self.num_fetched += num_blocks
            request.keeps_fetched(Fetched(self.cache.lease(BELOW, lease.run), num_blocks))

    def end_fetched(self, request: LedgerRequest) -> None:
        """Keep no longer what was fetched for the request."""
        fetched = request.take_fetched()
        if fetched is not None:
            self.num_fetched -= fetched.num_host_blocks
            self.cache.release(fetched.lease)

    def match_again(self, request: LedgerRequest, *, islands: bool = True) -> None:
        """Release the match, then match and pin what is cached by now."""
        assert request.may_match_again, "matched again under its block tables"
        self.forget_match(request)
        self.pin(request, islands=islands)

    def refresh_match(self, request: LedgerRequest) -> None:
        """Bring the match up to date. Keeps the leases if a new match would take the same ones, since the head of the
        line is examined often; with windows, matches again in any case."""
        if self.cache.layout.windows or not self._pins_just(request, self._find(request, islands=True)):
            self.match_again(request)

    @staticmethod
    def _pins_just(request: LedgerRequest, hit: Hit) -> bool:
        """Whether the leases are exactly those that `hit` would take."""
        if (request.published, request.hit_stop) != (hit.device_stop, hit.stop) or not request.leases:
            return False
        wanted: dict[Tier, Run] = {}
        if hit.stop > hit.device_stop:
            wanted[BELOW] = hit.run_at(hit.stop)
        if hit.device_stop:
            wanted[Tier.DEVICE] = hit.run_at(hit.device_stop)
        return wanted == {tier: lease.run for tier, lease in request.leases.items()}

    def end_host_lease(self, request: LedgerRequest) -> None:
        """Release the leases that only a load needs, the host lease and `reserve`: it is over, or there is none."""
        lease = request.leases.pop(BELOW, None)
        if lease is not None:
            self.cache.release(lease)
        if request.reserve is not None:
            self.cache.release(request.reserve)
            request.reserve = None

    def let_go(self, request: LedgerRequest) -> None:
        """Give back all blocks and leases of the request, in any state. Nothing is left when this call returns."""
        self.give_up_tables(request)
        self.forget_match(request)
        if request.fetched is not None:
            self.end_fetched(request)

    def give_up_tables(self, request: LedgerRequest) -> None:
        """Free the private blocks and drop the tables. Leases stay."""
        private = request.private_blocks()
        for table in request.tables:
            self.cache.last_uses.gave_up(request, table.ids)
        request.gave_up_tables()
        self.cache.give(Tier.DEVICE, private)

    # -- tables ---------------------------------------------------------------------------------------------------

    def num_fresh(self, device_stop: int, hit_stop: int, num_units: int) -> int:
        """How many new blocks tables of `num_units` units take behind the device hit. A window band takes none for
        units that will lie before its window once the host hit is loaded."""
        found = max(0, num_units - device_stop) * self.cache.layout.full.width
        for band in self.cache.layout.windows:
            found += max(0, num_units - max(device_stop, band.first_unit(hit_stop))) * band.width
        return found

    def without_islands(self, request: LedgerRequest, num_units: int) -> tuple[int, int]:
        """Try out a match without islands (see `find_hit`). Returns how many new blocks tables of `num_units` units
        would take with it, and by how many blocks room would grow if it replaced the present match. Changes nothing."""
        hit = self._find(request, islands=False)
        leases = [lease for lease in request.all_leases() if lease.tier is Tier.DEVICE]
        let_go = self.cache.pinned_by_none_but(leases)
        taken = [part for run in hit.path for part in run.parts_in(Tier.DEVICE) if not part.num_references]
        gained = sum(len(part.blocks) + len(part.tombstone_ids()) for part in let_go)
        gained -= sum(self._num_needed(part, hit.device_stop) for part in (*let_go, *taken))
        return self.num_fresh(hit.device_stop, hit.stop, num_units), gained

    def _num_needed(self, part: Part, stop: int) -> int:
        """Blocks of `part` that are needed to continue computing at unit `stop`."""
        band = self.cache.layout.bands[part.band]
        first = band.first_unit(stop)
        return len(range(max(part.first, first), min(part.stop, stop))) * part.width

    def num_kept(self, request: LedgerRequest) -> int:
        """How many blocks of the device hit the request needs to continue computing at the end of the device hit."""
        stop, bands = request.published, self.cache.layout.bands
        return sum((stop - band.first_unit(stop)) * band.width for band in bands)

    def start_tables(self, request: LedgerRequest, num_units: int, blocks: array[int]) -> None:
        """Set the block tables: the needed ids of the device hit, then `blocks`. Units behind the device hit and before
        the window of the host hit stay null; they get blocks if the load fails."""
        stop, taken = request.published, 0
        num_units = max(num_units, stop)  # a later match may have hit more than the request asked room for
        tables: list[BlockTable] = []
        for band in self.cache.layout.bands:
            start = band.first_unit(stop) if stop else 0
            fresh = min(num_units, max(stop, band.first_unit(request.hit_stop))) if band.number else stop
            count = (num_units - fresh) * band.width
            ids = blocks[taken : taken + count]
            taken += count
            if fresh:
                held = held_ids(request.device_run, Tier.DEVICE, band.number, start, stop)
                ids = nulls(start * band.width) + held + nulls((fresh - stop) * band.width) + ids
            tables.append(BlockTable(band.width, ids, start))
        request.given_tables(tuple(tables), num_units)
        if request.fetched is not None:
            self.end_fetched(request)  # its match pins what it loads

    def lengthen_tables(self, request: LedgerRequest, num_units: int, blocks: array[int]) -> None:
        """Append `blocks`, taken for the units up to `num_units`."""
        added = num_units - request.num_units
        if added > 0:
            for table, ids in zip(request.tables, self.cache.layout.deal(blocks, added), strict=True):
                table.extend(ids)
            request.given_tables(request.tables, num_units)


def slide(cache: PrefixCache, request: LedgerRequest) -> None:
    """Release the blocks that computing on from `num_computed_tokens` needs no more.

    Private blocks are freed; cached ones stay cached as long as there is room. Their positions become null. Does
    nothing in a step, which may still read them: the end of the step slides.
    """
    if not request.num_steps and request.tables:
        slide_off(cache, request)


def slide_off(cache: PrefixCache, request: LedgerRequest) -> None:
    """The same even in a step, at the end of a load: a step that overlaps it reads nothing that slides off."""
    for band in cache.layout.windows:
        table = request.tables[band.number]
        start = min(band.first_needed(request.num_computed_tokens), request.num_units)
        if start <= table.start:
            continue
        cache.last_uses.gave_up(request, table.at(table.start, start))
        cache.give(Tier.DEVICE, table.private(request.published, table.start, start))
        table.null(table.start, start)
        lease = request.leases.get(Tier.DEVICE)
        if lease is not None:
            cache.slide_lease(lease, band, start)
        request.slid(band.number, table.start, start)
        table.begin_at(start)


MAX_GROWN_BYTES = 2**14
"""A run with more token bytes does not grow: the next units begin another run. Both merge once they are unpinned."""


def publish(leases: RequestLeases, request: LedgerRequest, stop: int) -> None:
    """Make units `[request.published, stop)` findable and pin their path.

    Units that another request has cached meanwhile are pinned too, since later blocks follow them; the private copy
    stays until the request ends. If the cached copy is unused, the request's blocks replace it.
    """
    cache, sequence = leases.cache, request.sequence
    while (position := request.published) < stop:
        run = request.device_run
        if run is None or run.stop == position:
            following = cache.index.find(sequence, run, position)
            if following is None:
                _append(leases, request, run, sequence.run_stop(position, stop))
                continue
            run = following
        agreed = sequence.common_stop(run, stop)
        run = cache.cut(run, agreed)
        if _is_unused(run):
            _take_place(cache, request, run)
        leases.follow(request, run)
        _fill(cache, request, run, agreed)


def _is_unused(run: Run) -> bool:
    """Whether its device blocks are unpinned, and no job adds to them."""
    return not any(part.num_references or part.incoming is not None for part in run.parts_in(Tier.DEVICE))


def _take_place(cache: PrefixCache, request: LedgerRequest, run: Run) -> None:
    """Free the device blocks of `run`, so that it can get those of the request."""
    for band, table in enumerate(request.tables):
        if table.start <= run.start:  # else the request has no blocks for units that left its window
            cache.withdraw_part(run.part(Tier.DEVICE, band))


def _fill(cache: PrefixCache, request: LedgerRequest, run: Run, stop: int) -> None:
    """Give the path of `run` blocks for the units that it lacks up to `stop`. The others stay private duplicates."""
    for number, table in enumerate(request.tables):
        start = max(request.published, table.start)
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
    request.published_up_to(stop)


def _append(leases: RequestLeases, request: LedgerRequest, run: Run | None, stop: int) -> None:
    """These tokens are not in the index: grow the last run if only this request uses it, else insert a new one."""
    cache, sequence, position = leases.cache, request.sequence, request.published
    if run is not None and _may_grow(cache, run) and run.spans == sequence.spans_at(position):
        cache.index.grow(run, sequence, stop)
    else:
        run = cache.index.insert(sequence, run, position, stop)
        leases.follow(request, run)
    _fill(cache, request, run, stop)


def _may_grow(cache: PrefixCache, run: Run) -> bool:
    """Whether only this request uses `run`, it is short (growing copies tokens), and it ends at no maximum boundary."""
    return len(run.tokens) <= MAX_GROWN_BYTES and not cache.is_cut(run.stop) and _is_ours_alone(cache, run)


def _is_ours_alone(cache: PrefixCache, run: Run) -> bool:
    """Whether the growing request's lease is the only reference, so that no other reader sees the run change."""
    full = run.parts[Tier.DEVICE]
    if run.num_after or full.rank or (full.width and full.stop != run.stop):
        return False
    for part in run.parts:
        is_ours = part.tier is Tier.DEVICE
        if part.incoming is not None or part.num_references > is_ours:
            return False
        if is_ours and part.band and (not part.num_references or (part.blocks and part.stop != run.stop)):
            return False
    return True


def published_by(cache: PrefixCache, request: LedgerRequest, start: int) -> list[tuple[Band, Run]]:
    """The runs, band by band, that hold what the request itself has published from unit `start` on, without copies that
    others cached first. Splits runs where these units begin and end."""
    own = _own_units(cache, request, start)
    for at in {at for _, units in own for at in (units.start, units.stop)}:
        for run, _, _ in stretches(request.device_run, at, at + 1):
            if run.start < at:
                cache.split(run, at)
    return [(band, run) for band, units in own for run, _, _ in stretches(request.device_run, units.start, units.stop)]


def first_published(cache: PrefixCache, request: LedgerRequest, start: int) -> int:
    """The first unit from `start` on that the request itself has published; `request.published` if there is none."""
    return min((units.start for _, units in _own_units(cache, request, start)), default=request.published)


def _own_units(cache: PrefixCache, request: LedgerRequest, start: int) -> list[tuple[Band, range]]:
    ready = max(start, request.ready_stop)
    return [
        (band, units)
        for band, table in zip(cache.layout.bands, request.tables, strict=True)
        for units in without(table.duplicates, ready, request.published)
        if band.width
    ]


def runs_from(cache: PrefixCache, request: LedgerRequest, start: int, cut: Container[Run]) -> list[Run]:
    """The runs from unit `start` on that the request uses: those of its device lease or, without tables, the cached
    ones of the tokens that it had published when it gave them up. Splits at `start`, but no run in `cut`."""
    if request.tables:
        runs = request.device_run.whole_path() if request.device_run is not None else []
    else:
        runs = [run for run, _ in cache.index.walk(request.sequence, request.read_before)]
    for run in runs:
        if run.start < start < run.stop and run not in cut:
            cache.split(run, start)
    return [run for run in runs if run.stop > start]


def read_by(readers: Iterable[LedgerRequest], published: list[tuple[Band, Run]]) -> list[tuple[Band, Run]]:
    """Those of `published` whose blocks are in the tables of `readers`."""
    leases = [reader.leases[Tier.DEVICE] for reader in readers if reader.tables and Tier.DEVICE in reader.leases]
    paths = [(lease, set(lease.run.path())) for lease in leases]
    return [
        (band, run)
        for band, run in published
        if any(run in path and (not band.number or run.start >= lease.starts[band.number - 1]) for lease, path in paths)
    ]


def take_private(
    cache: PrefixCache, request: LedgerRequest, published: list[tuple[Band, Run]], shared: list[tuple[Band, Run]]
) -> None:
    """Make the withdrawn blocks of `published` private to the request again. The `shared` ones stay with their readers
    until these let go: there the request gets fresh blocks, for which there must be room."""
    for band, run in published:
        table = request.tables[band.number]
        if run.start < table.start:
            continue  # it has left the window
        if (band, run) in shared:
            cache.last_uses.gave_up(request, table.at(run.start, run.stop))
            table.put(run.start, cache.take(Tier.DEVICE, (run.stop - run.start) * band.width))
        else:
            run.part(Tier.DEVICE, band.number).disown(set(table.at(run.start, run.stop)))


def step_back(leases: RequestLeases, request: LedgerRequest, start: int) -> None:
    """Let the request compute again from unit `start` on: its blocks there are private, its lease ends there."""
    start = min(start, request.published)  # after a reset more may be computed than was published
    run = request.device_run
    leases.follow(request, leases.cache.cut(run, start) if run is not None and start else None)
    request.published_up_to(start)
    for table in request.tables:
        table.step_back(start)
