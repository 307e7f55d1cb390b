"""The leases and the block tables of a request. The request takes them at its match, and gives them back at its end.

**Leases.** A match pins its hit in the same call, so nothing of a hit can be evicted between the match and the
load. A request has at most one lease per tier, on a path of the index:

    state of the request | device lease                     | host lease
    PINNED, ALLOCATED    | up to `published` (device hit)   | up to `hit_stop`, if it ends after the device hit
    (waiting, not head)  | none                             | none
    LOADING, DRAINING    | up to the end of the load        | the same, until the load is over
    RUNNING              | up to `published`, which grows   | none
    PREEMPTED            | none                             | up to `published` at the preemption

With windows or a recurrent state, a matched request may have a second device lease, `reserve`: after the device hit,
the device may hold blocks that the host lacks, and the load adopts them. In a window a lease pins a suffix of the path,
and the suffix moves forward with the window.

**No request waits for its own pins.** A match pins nothing after the hit. If only `reserve` is in the way of the blocks
that a request needs, the request is matched again without it (`islands=False`).

**Tables.** A request with device blocks has one block table a component, and it is not matched again until it gives the
blocks up. The tables name cached blocks for the first `published` units, and private blocks for the others. Null
entries are units before a window, or units that a load brings in blocks of its jobs.

**Checkpoints.** A model with a recurrent state also takes blocks for the checkpoints that the request is going to write
(`Checkpoints`): one at the end of the prompt, because the next turn of a conversation continues there, and one at the
*branch*, where the cached KV of the prompt goes further than the deepest checkpoint and the index goes on with other
tokens, because other prompts leave the path there. They are planned only as far as they fit beside the tables of the
request: a request without checkpoints computes as well. Their blocks are counted with those of the tables, all or
nothing.

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

from .._common.tiers import BELOW, DEVICE, Tier
from .cache import PrefixCache
from .hooks import Hooks
from .index import Hit, find_hit, held_ids, is_branch_point, lower_path, stretches
from .plans import PrefixMatch
from .records import NO_LIMIT, BlockTable, Checkpoints, LedgerRequest, Part, Run, nulls
from .states import REQUEUED


@dataclass(slots=True, eq=False)
class RequestLeases:
    """Takes and ends the leases of requests, and makes their block tables."""

    cache: PrefixCache
    hooks: Hooks

    def pin(self, request: LedgerRequest, *, islands: bool = True, reads_cache: bool = True) -> None:
        """Match the known tokens of `request` and lease the hit, in one call. `islands`: see `find_hit`. Without
        `reads_cache`, the request gets no hit."""
        cache, unit, lower = self.cache, self.cache.layout.unit_tokens, 0
        hit = self._find(request, islands=islands) if reads_cache else Hit(0, 0, ())
        if cache.layout.recurrent is not None:
            if request.checkpoints is None:
                request.checkpoints = Checkpoints()
            # What a preempted request has computed itself is kept by a checkpoint, too.
            is_branch = request.has_committed or is_branch_point(cache.index, request.sequence, hit)
            request.checkpoints.branch_stop = hit.full_stop if is_branch else 0
        if hit.stop:
            last = hit.path[-1]
            if last.stop != hit.stop:  # pin nothing after the hit: a request must not wait for its own pins
                last = cache.cut(last, hit.stop)
            if hit.stop > hit.device_stop:
                request.leases[BELOW] = cache.lease(BELOW, last)
                if islands and cache.layout.partial:
                    request.reserve = cache.lease(DEVICE, last)
            if hit.device_stop:
                request.leases[DEVICE] = cache.lease(DEVICE, cache.cut(last, hit.device_stop))
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
        if request.state is REQUEUED:
            # A requeued request does not load again. Otherwise two requests whose loads keep failing could alternate
            # for ever, because each gives up its blocks, which lets the other one try again.
            hit = Hit(hit.device_stop, hit.device_stop, hit.path, hit.full_stop)
        return hit

    def lease_device_to(self, request: LedgerRequest, run: Run | None) -> None:
        """Let the device lease of `request` end at `run`: move it, or take a new one. None: end it. In a window, a new
        lease pins the units from the start of the table on, and all checkpoints: `slide_windows` unpins them."""
        lease = request.leases.get(DEVICE)
        if lease is not None and run is not None:
            self.cache.move_lease(lease, run)
        elif lease is not None:
            del request.leases[DEVICE]
            self.cache.release(lease)
        elif run is not None:
            starts = [table.start for table in request.tables]
            if self.cache.layout.recurrent is not None:
                starts.append(0)
            request.leases[DEVICE] = self.cache.lease(DEVICE, run, starts)

    def forget_match(self, request: LedgerRequest) -> None:
        """Release the leases and clear the match. Private blocks stay."""
        leases = request.all_leases()
        request.leases, request.reserve = {}, None
        request.published = request.ready_stop = request.hit_stop = 0
        for lease in leases:
            self.cache.release(lease)

    def match_again(self, request: LedgerRequest, *, islands: bool = True, reads_cache: bool = True) -> None:
        """Release the match, then match and pin what is cached by now; see `pin`."""
        assert request.may_match_again, "matched again under its block tables"
        self.forget_match(request)
        self.pin(request, islands=islands, reads_cache=reads_cache)

    def refresh_match(self, request: LedgerRequest) -> None:
        """Bring the match up to date. With full attention alone, a request whose leases are exactly those that a new
        match would take keeps them, because the head of the wait queue is examined often."""
        if not self.cache.layout.partial and request.leases:
            hit, wanted = self._find(request, islands=True), dict[Tier, Run]()
            if hit.stop > hit.device_stop:
                wanted[BELOW] = hit.run_at(hit.stop)
            if hit.device_stop:
                wanted[DEVICE] = hit.run_at(hit.device_stop)
            is_same = (request.published, request.hit_stop) == (hit.device_stop, hit.stop)
            if is_same and wanted == {tier: lease.run for tier, lease in request.leases.items()}:
                return
        self.match_again(request)

    def end_host_lease(self, request: LedgerRequest) -> None:
        """Release what only a load needs: the host lease, `reserve`, and blocks for a checkpoint that it does not
        bring."""
        if request.checkpoints is not None and request.checkpoints.incoming:
            self.cache.give(DEVICE, request.checkpoints.incoming)
            request.checkpoints.incoming = array("i")
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
        if request.checkpoints is not None:
            self.cache.last_uses.gave_up(request, request.checkpoints.ids())
            request.checkpoints.clear()
        request.tables, request.num_units, request.load, request.nulled = (), 0, None, []
        self.cache.give(DEVICE, private)

    # -- tables ---------------------------------------------------------------------------------------------------

    def num_fresh(self, request: LedgerRequest, device_stop: int, hit_stop: int, num_units: int) -> int:
        """Number of new blocks that `request` takes for tables of `num_units` units, after a device hit up to
        `device_stop` in a hit up to `hit_stop`. A window takes none for units that it will have left once the host hit
        is loaded. With a recurrent state, also the blocks of the checkpoint to load and of the planned ones."""
        layout, found = self.cache.layout, 0
        for component in layout.paged:
            start = component.first_unit(hit_stop)
            if start < device_stop:
                start = device_stop
            if start < num_units:
                found += (num_units - start) * component.width
        if layout.recurrent is not None:
            width, num_planned = layout.recurrent.width, len(self.planned(request, hit_stop))
            if hit_stop > device_stop:
                found += width
            room = self.cache.tiers[DEVICE].capacity - found - device_stop * layout.width
            if device_stop:
                room -= width  # the checkpoint of the hit
            found += max(0, min(num_planned, room // width)) * width
        return found

    def planned(self, request: LedgerRequest, hit_stop: int) -> list[int]:
        """The positions at which `request` should write checkpoints after a hit up to `hit_stop`, the most important
        first: where the prompt ends for a repeated request, which computes at least one token, and the branch."""
        assert request.checkpoints is not None
        end = (request.sequence.num_prompt_tokens - 1) // self.cache.layout.unit_tokens
        found: list[int] = []
        for position in (end, request.checkpoints.branch_stop):
            position -= position % request.hit_alignment
            if position > hit_stop and position not in found:
                found.append(position)
        return found

    def without_islands(self, request: LedgerRequest, num_units: int) -> tuple[int, int]:
        """Try a match without islands (see `find_hit`). Returns the number of new blocks that tables of `num_units`
        units would take with it, and the number of blocks that would become available if it replaced the present match.
        Changes nothing."""
        hit = self._find(request, islands=False)
        leases = [lease for lease in request.all_leases() if lease.tier is DEVICE]
        unpinned = self.cache.pinned_by_none_but(leases)
        taken = [part for run in hit.path for part in run.parts_in(DEVICE) if not part.num_references]
        gained = sum(len(part.blocks) + len(part.tombstone_ids()) for part in unpinned)
        gained -= sum(self._num_needed(part, hit.device_stop) for part in (*unpinned, *taken))
        return self.num_fresh(request, hit.device_stop, hit.stop, num_units), gained

    def without_hit(self, request: LedgerRequest, num_units: int) -> tuple[int, int]:
        """Number of new blocks that tables of `num_units` units take without a hit, and number of blocks that would
        become available if `request` gave up its match."""
        leases = [lease for lease in request.all_leases() if lease.tier is DEVICE]
        unpinned = self.cache.pinned_by_none_but(leases)
        gained = sum(len(part.blocks) + len(part.tombstone_ids()) for part in unpinned)
        return self.num_fresh(request, 0, 0, num_units), gained

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
        for component in self.cache.layout.paged:
            start, width = component.first_unit(stop) if stop else 0, component.width
            fresh_start = min(num_units, max(stop, component.first_unit(request.hit_stop)))
            count = (num_units - fresh_start) * width
            ids = blocks[taken : taken + count]
            taken += count
            if fresh_start:
                held = held_ids(request.device_run, DEVICE, component.number, start, stop)
                ids = nulls(start * width) + held + nulls((fresh_start - stop) * width) + ids
            tables.append(BlockTable(width, ids, start))
        request.tables, request.num_units = tuple(tables), num_units
        request.num_computed_tokens = stop * self.cache.layout.unit_tokens
        if request.checkpoints is not None:
            self._start_checkpoints(request, request.checkpoints, blocks[taken:])
        for hook in self.hooks.on_allocated:
            hook(request)

    def _start_checkpoints(self, request: LedgerRequest, checkpoints: Checkpoints, blocks: array[int]) -> None:
        """Divide `blocks` among the checkpoint of the host hit, and the planned ones as far as they go."""
        assert self.cache.layout.recurrent is not None
        width, at = self.cache.layout.recurrent.width, 0
        if request.hit_stop > request.published:
            checkpoints.incoming, at = blocks[:width], width
        for position in self.planned(request, request.hit_stop):
            if at < len(blocks):
                checkpoints.planned[position] = blocks[at : at + width]
                at += width
        checkpoints.resume = checkpoint_ids(self.cache, request, request.published)

    def plan_again(self, request: LedgerRequest) -> None:
        """Plan the checkpoints between `ready_stop` and the end of the hit, because the load of `request` has fallen
        short. Only as far as there are blocks: the request does not wait for them."""
        checkpoints, recurrent = request.checkpoints, self.cache.layout.recurrent
        assert checkpoints is not None and recurrent is not None
        for position in self.planned(request, request.ready_stop):
            is_new = position not in checkpoints.planned
            if is_new and recurrent.width <= self.cache.tiers[DEVICE].num_available:
                checkpoints.planned[position] = self.cache.take(DEVICE, recurrent.width)

    def lengthen_tables(self, request: LedgerRequest, num_units: int, blocks: array[int]) -> None:
        """Append `blocks`, taken for the units up to `num_units`."""
        added = num_units - request.num_units
        if added > 0:
            for table, ids in zip(request.tables, self.cache.layout.deal(blocks, added), strict=True):
                table.ids.extend(ids)
            request.num_units = num_units


def checkpoint_ids(cache: PrefixCache, request: LedgerRequest, position: int) -> array[int]:
    """The device blocks of the checkpoint at unit `position`, up to which `request` has hit or loaded."""
    assert cache.layout.recurrent is not None
    return held_ids(request.device_run, DEVICE, cache.layout.recurrent.number, position - 1, position)


def slide_windows(cache: PrefixCache, request: LedgerRequest, *, after_load: bool = False) -> None:
    """Release the blocks that the windows have left at `num_computed_tokens`, and the checkpoints that are read or
    written by then.

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
        cache.give(DEVICE, table.private(request.published, table.start, start))
        table.null(table.start, start)
        lease = request.leases.get(DEVICE)
        if lease is not None:
            cache.unpin_before(lease, component, start)
        request.nulled.append((component.number, table.start, start))
        table.start = start
    if request.checkpoints is not None:
        _release_checkpoints(cache, request, request.checkpoints)


def _release_checkpoints(cache: PrefixCache, request: LedgerRequest, checkpoints: Checkpoints) -> None:
    """Release the checkpoints that `request` has passed: it has continued from one, and has written others or has left
    them out. Published ones stay cached."""
    unit, recurrent = cache.layout.unit_tokens, cache.layout.recurrent
    assert recurrent is not None
    if request.num_computed_tokens == request.ready_stop * unit:
        return  # it has computed nothing yet
    for position in [at for at in checkpoints.planned if at * unit <= request.num_computed_tokens]:
        left_out = checkpoints.planned.pop(position)
        cache.last_uses.gave_up(request, left_out)
        cache.give(DEVICE, left_out)
    if checkpoints.resume or checkpoints.written:
        cache.last_uses.gave_up(request, checkpoints.resume + checkpoints.written)
        checkpoints.resume, checkpoints.written = array("i"), array("i")
    lease = request.leases.get(DEVICE)
    if lease is not None and lease.starts[recurrent.number] != NO_LIMIT:
        cache.unpin_all(lease, recurrent)


MAX_GROWN_BYTES = 2**14
"""A run with more token bytes does not grow, because growing copies them: the next units begin another run. Both merge
once they are unpinned."""


def publish(leases: RequestLeases, request: LedgerRequest, stop: int) -> None:
    """Make units `[request.published, stop)` findable in all block tables, and pin their path.

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
        assert agreed > position, "a run that does not begin with these tokens"
        run = cache.cut(run, agreed)
        parts = run.parts_in(DEVICE)
        if not any(part.num_references or part.incoming is not None for part in parts):
            # The device copy is unused, and no job adds to it: free it, so that the request's blocks take its place.
            for part, table in zip(parts[: len(request.tables)], request.tables, strict=True):
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
            part = current.part(DEVICE, number)
            # A run holds one stretch of a window: units that do not adjoin it get a run of their own.
            if part.blocks and last < part.first:
                part = cache.split(current, last).part(DEVICE, number)
            elif part.blocks and first > part.stop:
                cache.split(current, first)
            before = (part.first, part.stop) if part.blocks else (first, first)
            known = part.enter(first, last, table.at(first, last))
            if known:
                table.duplicates.append(known)
            if before != (part.first, part.stop):
                cache.tiers[DEVICE].part_changed(part, *before)
    request.published = stop


def _may_grow(cache: PrefixCache, run: Run) -> bool:
    """Whether `run` may get more units in place: it is short, because growing copies its tokens, it ends at no maximum
    boundary, and the growing request's lease is its only reference, so that no other reader sees it change."""
    if len(run.tokens) > MAX_GROWN_BYTES or cache.is_cut(run.stop):
        return False
    recurrent = cache.layout.recurrent
    full = run.parts[DEVICE]
    if run.num_after or full.rank or (full.width and full.stop != run.stop):
        return False
    for part in run.parts:
        is_ours = part.tier is DEVICE
        if part.incoming is not None or part.num_references > is_ours:
            return False
        if not is_ours or not part.component:
            continue
        if recurrent is not None and part.component == recurrent.number:
            if part.blocks:  # a run ends at its checkpoint, where later prompts leave it
                return False
        elif not part.num_references or (part.blocks and part.stop != run.stop):
            return False
    return True


def publish_checkpoint(cache: PrefixCache, request: LedgerRequest, position: int) -> None:
    """Make the checkpoint at unit `position` findable, which `request` has written, and pin it. If the device has that
    checkpoint already, its copy stays, and that of the request is freed like one that was left out."""
    checkpoints, lease, recurrent = request.checkpoints, request.leases[DEVICE], cache.layout.recurrent
    assert checkpoints is not None and recurrent is not None
    run = next(run for run, _, _ in stretches(lease.run, position - 1, position))
    if position < run.stop:  # a run ends at its checkpoint
        run = cache.split(run, position)
    part = run.part(DEVICE, recurrent.number)
    if part.blocks and position - 1 > part.stop:  # a run holds one stretch
        cache.split(run, position - 1)
    if lease.starts[recurrent.number] > run.start:
        if lease.starts[recurrent.number] != NO_LIMIT:
            cache.unpin_all(lease, recurrent)
        cache.pin_from(lease, recurrent, run.start)
    before = (part.first, part.stop) if part.blocks else (position - 1, position - 1)
    if not part.enter(position - 1, position, checkpoints.planned[position]):
        checkpoints.written.extend(checkpoints.planned.pop(position))
        checkpoints.published.append(position)
        cache.tiers[DEVICE].part_changed(part, *before)


def step_back(leases: RequestLeases, request: LedgerRequest, start: int) -> None:
    """Let the request compute again from unit `start` on: its blocks there are private, its lease ends there."""
    start = min(start, request.published)  # after a reset, more may be computed than is published
    run = request.device_run
    leases.lease_device_to(request, leases.cache.cut(run, start) if run is not None and start else None)
    request.published = start
    for table in request.tables:
        table.step_back(start)
