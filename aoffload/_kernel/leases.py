"""The leases and the block tables of a request, from the match until the request gives everything back.

**Leases.** A match pins its hit in the same call, so nothing of a hit can be evicted between the match and the
load. A request has at most one lease per tier, on a path of the index:

    state of the request | device lease                     | host lease
    PINNED, ALLOCATED    | up to `published` (device hit)   | up to `hit_stop`, if it ends after the device hit
    (waiting, not head)  | none                             | none
    LOADING, DRAINING    | up to the end of the load        | the same, until the load is over
    RUNNING              | up to `published`, which grows   | none
    PREEMPTED            | none                             | up to `published` at the preemption

With windows, a matched request may have a second device lease, `reserve`: after the device hit, the device may hold
window blocks that the host lacks, and the load adopts them. In a window a lease pins a suffix of the path, and the
suffix moves forward with the window.

**No request waits for its own pins.** A match pins nothing after the hit. If only `reserve` is in the way of the blocks
that a request needs, the request is matched again without it (`islands=False`).

**Tables.** A request with device blocks has one block table a component, and it is not matched again until it gives the
blocks up. The tables name cached blocks for the first `published` units, and private blocks for the others. Null
entries are units before a window, or units that a load brings in blocks of its jobs.

**Publishing** turns private blocks into cached ones, one run of the index at a time:

- No run has the next tokens: the request's last run grows, or a new run is inserted, and holds the request's blocks.
- A run has them, and its device copy is in use: the request leases that copy and keeps its own blocks private
  (duplicates).
- A run has them, but its device copy is unused or missing: the copy is freed, and the request's blocks take its place.

A request that has to compute again steps back: its blocks from some unit on are private once more, and its lease ends
there.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from .._common.tiers import BELOW, Tier
from .cache import PrefixCache
from .hooks import Hooks
from .index import Hit, find_hit, held_ids, lower_path, stretches
from .plans import PrefixMatch
from .records import BlockTable, LedgerRequest, Part, Run, nulls
from .states import RequestState


@dataclass(slots=True, eq=False)
class RequestLeases:
    """Takes and ends the leases of requests, and makes their block tables."""

    cache: PrefixCache
    hooks: Hooks

    def pin(self, request: LedgerRequest, *, islands: bool = True) -> None:
        """Match the known tokens of `request` and lease the hit, in one call. `islands`: see `find_hit`."""
        cache, unit, lower = self.cache, self.cache.layout.unit_tokens, 0
        hit = self._find(request, islands=islands)
        if hit.stop:
            last = hit.path[-1]
            if last.stop != hit.stop:  # pin nothing after the hit: a request must not wait for its own pins
                last = cache.cut(last, hit.stop)
            if hit.stop > hit.device_stop:
                request.leases[BELOW] = cache.lease(BELOW, last)
                if islands and cache.layout.windows:
                    request.reserve = cache.lease(Tier.DEVICE, last)
            if hit.device_stop:
                request.leases[Tier.DEVICE] = cache.lease(Tier.DEVICE, cache.cut(last, hit.device_stop))
        if cache.has_lower_tiers:
            lower = self.num_lower_units(request, hit.stop) * unit
        request.published = request.ready_stop = hit.device_stop
        request.hit_stop, num_host_tokens = hit.stop, (hit.stop - hit.device_stop) * unit
        request.match = PrefixMatch(hit.device_stop * unit, num_host_tokens, num_lower_tokens=lower)
        for hook in self.hooks.on_matched:
            hook(request)

    def num_lower_units(self, request: LedgerRequest, hit_stop: int) -> int:
        """Units that a fetch would add to the hit of `request`, which ends at `hit_stop`."""
        if not self.cache.has_lower_tiers or request.epoch != self.cache.epoch:
            return 0
        layout, sequence = self.cache.layout, request.sequence
        limit = min((sequence.num_tokens - 1) // layout.unit_tokens, request.hit_limit)
        if hit_stop >= limit:
            return 0
        stop = lower_path(self.cache.index, sequence, layout, limit, request.hit_alignment)[1]
        return max(0, stop - hit_stop)

    def _find(self, request: LedgerRequest, *, islands: bool) -> Hit:
        if request.epoch != self.cache.epoch:
            return Hit(0, 0, ())
        layout = self.cache.layout
        limit = min((request.sequence.num_tokens - 1) // layout.unit_tokens, request.hit_limit)
        hit = find_hit(self.cache.index, request.sequence, layout, limit, request.hit_alignment, islands=islands)
        if request.state is RequestState.REQUEUED:
            # A requeued request does not load again. Otherwise two requests whose loads keep failing could alternate
            # for ever, because each gives up its blocks, which lets the other one try again.
            hit = Hit(hit.device_stop, hit.device_stop, hit.path)
        return hit

    def lease_device_to(self, request: LedgerRequest, run: Run | None) -> None:
        """Let the device lease of `request` end at `run`: move it, or take a new one. None: end it. In a window, a new
        lease pins the units from the start of the table on."""
        lease = request.leases.get(Tier.DEVICE)
        if lease is not None and run is not None:
            self.cache.move_lease(lease, run)
        elif lease is not None:
            del request.leases[Tier.DEVICE]
            self.cache.release(lease)
        elif run is not None:
            starts = [table.start for table in request.tables]
            request.leases[Tier.DEVICE] = self.cache.lease(Tier.DEVICE, run, starts)

    def forget_match(self, request: LedgerRequest) -> None:
        """Release the leases and clear the match. Private blocks stay."""
        leases = request.all_leases()
        request.leases, request.reserve = {}, None
        request.published = request.ready_stop = request.hit_stop = 0
        for lease in leases:
            self.cache.release(lease)

    def match_again(self, request: LedgerRequest, *, islands: bool = True) -> None:
        """Release the match, then match and pin what is cached by now."""
        assert request.may_match_again, "matched again under its block tables"
        self.forget_match(request)
        self.pin(request, islands=islands)

    def refresh_match(self, request: LedgerRequest) -> None:
        """Bring the match up to date. Without windows, a request whose leases are exactly those that a new match would
        take keeps them, because the head of the wait queue is examined often."""
        if not self.cache.layout.windows and request.leases:
            hit, wanted = self._find(request, islands=True), dict[Tier, Run]()
            if hit.stop > hit.device_stop:
                wanted[BELOW] = hit.run_at(hit.stop)
            if hit.device_stop:
                wanted[Tier.DEVICE] = hit.run_at(hit.device_stop)
            is_same = (request.published, request.hit_stop) == (hit.device_stop, hit.stop)
            if is_same and wanted == {tier: lease.run for tier, lease in request.leases.items()}:
                return
        self.match_again(request)

    def end_host_lease(self, request: LedgerRequest) -> None:
        """Release the leases that only a load needs, the host lease and `reserve`."""
        lease = request.leases.pop(BELOW, None)
        if lease is not None:
            self.cache.release(lease)
        if request.reserve is not None:
            self.cache.release(request.reserve)
            request.reserve = None

    def release_all(self, request: LedgerRequest) -> None:
        """Give back all blocks and leases of the request, in any state. The request owns nothing afterwards."""
        self.give_up_tables(request)
        self.forget_match(request)

    def give_up_tables(self, request: LedgerRequest) -> None:
        """Free the private blocks and drop the tables. Leases stay."""
        private = request.private_blocks()
        for table in request.tables:
            self.cache.last_uses.gave_up(request, table.ids)
        request.tables, request.num_units, request.load, request.nulled = (), 0, None, []
        self.cache.give(Tier.DEVICE, private)

    # -- tables ---------------------------------------------------------------------------------------------------

    def num_fresh(self, device_stop: int, hit_stop: int, num_units: int) -> int:
        """Number of new blocks that tables of `num_units` units take after the device hit. A window takes none for
        units that it will have left once the host hit is loaded."""
        found = 0
        for component in self.cache.layout.components:
            found += max(0, num_units - max(device_stop, component.first_unit(hit_stop))) * component.width
        return found

    def without_islands(self, request: LedgerRequest, num_units: int) -> tuple[int, int]:
        """Try a match without islands (see `find_hit`). Returns the number of new blocks that tables of `num_units`
        units would take with it, and the number of blocks that would become available if it replaced the present match.
        Changes nothing."""
        hit = self._find(request, islands=False)
        leases = [lease for lease in request.all_leases() if lease.tier is Tier.DEVICE]
        unpinned = self.cache.pinned_by_none_but(leases)
        taken = [part for run in hit.path for part in run.parts_in(Tier.DEVICE) if not part.num_references]
        gained = sum(len(part.blocks) + len(part.tombstone_ids()) for part in unpinned)
        gained -= sum(self._num_needed(part, hit.device_stop) for part in (*unpinned, *taken))
        return self.num_fresh(hit.device_stop, hit.stop, num_units), gained

    def _num_needed(self, part: Part, stop: int) -> int:
        """Blocks of `part` that are needed to continue computing at unit `stop`."""
        component = self.cache.layout.components[part.component]
        first = component.first_unit(stop)
        return len(range(max(part.first, first), min(part.stop, stop))) * part.width

    def start_tables(self, request: LedgerRequest, num_units: int, blocks: array[int]) -> None:
        """Set the block tables: the needed ids of the device hit, then `blocks`. Units after the device hit and before
        the window of the host hit stay null; they get blocks if the load fails."""
        stop, taken = request.published, 0
        num_units = max(num_units, stop)  # a later match may have hit more units than the request wanted tables for
        tables: list[BlockTable] = []
        for component in self.cache.layout.components:
            start = component.first_unit(stop) if stop else 0
            fresh_start = min(num_units, max(stop, component.first_unit(request.hit_stop)))
            count = (num_units - fresh_start) * component.width
            ids = blocks[taken : taken + count]
            taken += count
            if fresh_start:
                held = held_ids(request.device_run, Tier.DEVICE, component.number, start, stop)
                ids = nulls(start * component.width) + held + nulls((fresh_start - stop) * component.width) + ids
            tables.append(BlockTable(component.width, ids, start))
        request.tables, request.num_units = tuple(tables), num_units
        request.num_computed_tokens = stop * self.cache.layout.unit_tokens
        for hook in self.hooks.on_allocated:
            hook(request)

    def lengthen_tables(self, request: LedgerRequest, num_units: int, blocks: array[int]) -> None:
        """Append `blocks`, taken for the units up to `num_units`."""
        added = num_units - request.num_units
        if added > 0:
            for table, ids in zip(request.tables, self.cache.layout.deal(blocks, added), strict=True):
                table.ids.extend(ids)
            request.num_units = num_units


def slide_windows(cache: PrefixCache, request: LedgerRequest, *, after_load: bool = False) -> None:
    """Release the blocks that the windows have left at `num_computed_tokens`.

    Private blocks are freed, and cached blocks are unpinned. Their positions in the tables become null. Does nothing
    during a step, which may still read the blocks: the end of the step calls it again. `after_load`: at the end of a
    load, a step that overlaps the load reads none of these blocks, because it computes at the end of the load.
    """
    if (request.num_steps and not after_load) or not request.tables:
        return
    for component in cache.layout.windows:
        table = request.tables[component.number]
        start = min(component.first_needed(request.num_computed_tokens), request.num_units)
        if start <= table.start:
            continue
        cache.last_uses.gave_up(request, table.at(table.start, start))
        cache.give(Tier.DEVICE, table.private(request.published, table.start, start))
        table.null(table.start, start)
        lease = request.leases.get(Tier.DEVICE)
        if lease is not None:
            cache.unpin_before(lease, component, start)
        request.nulled.append((component.number, table.start, start))
        table.start = start


MAX_GROWN_BYTES = 2**14
"""A run with more token bytes does not grow, because growing copies them: the next units begin another run. Both merge
once they are unpinned."""


def publish(leases: RequestLeases, request: LedgerRequest, stop: int) -> None:
    """Make units `[request.published, stop)` findable and pin their path.

    Units that another request has cached meanwhile are pinned too, because the later units of the request follow them
    in the index. The request keeps its private copy of them until it ends. If the cached copy is unused, the request's
    blocks replace it instead.
    """
    cache, sequence = leases.cache, request.sequence
    while (position := request.published) < stop:
        run = request.device_run
        if run is None or run.stop == position:
            following = cache.index.find(sequence, run, position)
            if following is None:  # no run has these tokens
                upto = sequence.run_stop(position, stop)
                if run is not None and run.spans == sequence.spans_at(position) and _may_grow(cache, run):
                    cache.index.grow(run, sequence, upto)
                else:
                    run = cache.index.insert(sequence, run, position, upto)
                    leases.lease_device_to(request, run)
                _fill(cache, request, run, upto)
                continue
            run = following
        agreed = sequence.common_stop(run, stop)
        run = cache.cut(run, agreed)
        parts = run.parts_in(Tier.DEVICE)
        if not any(part.num_references or part.incoming is not None for part in parts):
            # The device copy is unused, and no job adds to it: free it, so that the request's blocks take its place.
            for part, table in zip(parts, request.tables, strict=True):
                if table.start <= run.start:  # else the request has no blocks for units that left its window
                    cache.withdraw_part(part)
        leases.lease_device_to(request, run)
        _fill(cache, request, run, agreed)


def _fill(cache: PrefixCache, request: LedgerRequest, run: Run, stop: int) -> None:
    """Publish blocks of the request's tables for the units before `stop` that the path of `run` lacks on the device.
    The blocks of other units stay private: duplicates."""
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
                table.duplicates.append(known)
            if before != (part.first, part.stop):
                cache.tiers[Tier.DEVICE].part_changed(part, *before)
    request.published = stop


def _may_grow(cache: PrefixCache, run: Run) -> bool:
    """Whether `run` may get more units in place: it is short, because growing copies its tokens, it ends at no maximum
    boundary, and the growing request's lease is its only reference, so that no other reader sees it change."""
    if len(run.tokens) > MAX_GROWN_BYTES or cache.is_cut(run.stop):
        return False
    full = run.parts[Tier.DEVICE]
    if run.num_after or full.rank or (full.width and full.stop != run.stop):
        return False
    for part in run.parts:
        is_ours = part.tier is Tier.DEVICE
        if part.incoming is not None or part.num_references > is_ours:
            return False
        if is_ours and part.component and (not part.num_references or (part.blocks and part.stop != run.stop)):
            return False
    return True


def step_back(leases: RequestLeases, request: LedgerRequest, start: int) -> None:
    """Let the request compute again from unit `start` on: its blocks there are private, its lease ends there."""
    start = min(start, request.published)  # after a reset, more may be computed than is published
    run = request.device_run
    leases.lease_device_to(request, leases.cache.cut(run, start) if run is not None and start else None)
    request.published = start
    for table in request.tables:
        table.step_back(start)
