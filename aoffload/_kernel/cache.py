"""The prefix cache: the cached stretches of prompts (runs), the leases that protect them, and eviction.

**Leases.** A lease keeps blocks of one tier from eviction: those on the path from a start to the run at which the lease
ends. Each component has a start of its own. The lease is counted in the part of every run on this path
(`Part.num_references`), so taking or releasing it costs one step for each of these runs.

In full attention the start is unit 0. Here lease a ends at unit 48 and lease b at unit 50:

    run                [0,40) <- [40,48) <- [48,50)
    references            2         2          1        a and b, a and b, b

So an unpinned run never has a pinned run after it. That is why eviction, which takes the tail of an unpinned run, never
leaves a suffix without its prefix.

A window needs only the last blocks before a position. So in a window component the start is the unit where the window
begins. Blocks that have left the window stay cached until their space is needed, and a prompt that ends there may still
hit.

A checkpoint of a recurrent state lies in the last unit before a position, and is all that a hit there needs of its
component. So a lease pins the part of the run that ends there, and none before.

    full attention   part    [present .............)(nothing      )     a gap would hide all blocks after it
    window           part    (nothing )[present ........)(nothing )     one stretch for each run
    recurrent state  part    (nothing              )[checkpoint )       the same

**Splits and merges.** The runs of an index form a tree. A run is split where a prompt leaves it, or where a lease needs
only its front:

    before    [0,40) <- [40,50)                      a prompt agrees with this path up to unit 44
    after     [0,40) <- [40,44) <- [44,50)
                               <- [44,60)            the other units of the prompt

A lease refers to a run object. A split puts a new head before that run, so a lease never releases the wrong blocks. One
run for each block would make the index slow, so runs are merged again. But only a release merges, and only runs that it
leaves without a reference: two neighbours whose last leases ended at different times stay two runs.

**Eviction** (`take`) frees the tail of the oldest part in the eviction order of the tier, as many units as are needed.
Only unpinned parts are in the order, so eviction never ends a lease. Each part is evicted for itself: the other
components and tiers of its run keep their blocks. A release adds the end of a path to the order first, so children go
before their parents. A run without any block and without child runs leaves the index (`tidy`).
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from .._common.tiers import HIT_TIERS, Tier
from ..errors import LeaseError
from .index import RunIndex, Stretch, covered, stretches
from .layout import Component, Layout, outside
from .pools import LastUses, TierBlocks
from .protocols import BlockWatcher, EvictionOrder, Watchers
from .records import NO_LIMIT, Job, Lease, Part, Run
from .states import NoEpoch
from .tokens import TokenSequence, max_run_units


@dataclass(slots=True, eq=False)
class ComponentManager:
    """The parts of one component: how leases count on them, and how blocks enter them.

    Full attention is the component whose first needed unit is always 0. In addition, its blocks are a *prefix*: what
    comes after a gap is never found."""

    component: Component
    is_prefix: bool
    places: Sequence[int]
    """By tier: the index into `Run.parts` of the part of this component."""

    def pin(self, blocks: TierBlocks, run: Run, start: int, is_use: bool) -> None:
        """Count a lease on every run from unit `start` on, on the path of `run`. `is_use` also marks the parts as in
        use (`last_use`)."""
        current: Run | None = run
        place = self.places[blocks.tier]
        while current is not None and current.stop > start:
            part = current.parts[place]
            num_references = part.num_references
            part.num_references = num_references + 1
            if not num_references and part.blocks:
                blocks.make_pinned(part)
            if is_use:
                part.last_use = 0
            current = current.before

    def unpin(self, blocks: TierBlocks, run: Run, start: int) -> list[Run]:
        """The opposite of `pin`. Returns the runs whose parts are left without a reference, last first."""
        unpinned: list[Run] = []
        current: Run | None = run
        place = self.places[blocks.tier]
        while current is not None and current.stop > start:
            part = current.parts[place]
            num_references = part.num_references - 1
            part.num_references = num_references
            if not num_references:
                unpinned.append(current)
                blocks.make_unpinned(part)
            current = current.before
        return unpinned

    def may_join(self, front: Part, back: Part, *, is_tail: bool) -> bool:
        """Whether the parts of a run and of the next one can be one part without a gap. If `back` has no blocks and is
        not the tail of the merge, a part after it may have some."""
        if back.blocks:
            return front.stop == back.first or (not self.is_prefix and not front.blocks)
        return is_tail or self.is_prefix or not front.blocks

    def enter(self, part: Part, first: int, last: int, ids: array[int]) -> array[int]:
        """Publish `ids`, which begin at unit `first`, up to unit `last`: only if they adjoin what the part holds and,
        in a prefix, if nothing before them is missing. Returns the ids not used. Units that the part holds already
        stay, because another request may use them."""
        if part.blocks and (last < part.first or first > part.stop):
            return ids
        if self.is_prefix:
            before = part.run.before
            if first > part.stop:
                return ids
            if first == part.run.start and before is not None and before.parts[part.tier].stop != before.stop:
                return ids
        known, width = part.enter(first, last, ids), part.width
        if not known and len(ids) == (last - first) * width:
            return array("i")
        return ids[(known.start - first) * width : (known.stop - first) * width] + ids[(last - first) * width :]

    def fitting(self, start: int, stop: int, num_units: int) -> range:
        """The units of `[start, stop)` to store if there are free blocks for `num_units` only. Hits need the front of a
        prefix, and the end of a window."""
        if self.is_prefix:
            return range(start, min(stop, start + num_units))
        return range(max(start, stop - num_units), stop)

    def lacking(self, run: Run, source: Tier, tier: Tier, start: int, stop: int) -> list[Stretch]:
        """Units of `[start, stop)` on the path of `run` that `source` holds and `tier` neither holds nor will get; last
        first. In a prefix, also the units before `start`, back to the first run of which `tier` holds or will get
        units, because it then has all units before them, too, unless one was corrupt."""
        found: list[Stretch] = []
        here, there, goes_on = self.places[source], self.places[tier], self.is_prefix
        current: Run | None = run
        while current is not None and (current.stop > start or goes_on):
            part, other = current.parts[here], current.parts[there]
            held_first, held_stop = (other.first, other.stop) if other.incoming is None else covered(other)
            first, last = part.first, part.stop
            if first < start and not self.is_prefix:
                first = start
            if last > stop:
                last = stop
            if first < last and not held_first <= first < last <= held_stop:
                units = outside(held_first, held_stop, first, last)
                found += [(current, one.start, one.stop) for one in reversed(units)]
            goes_on = self.is_prefix and held_stop <= current.start
            current = current.before
        return found


def brings(job: Job, run: Run) -> bool:
    """Whether `job` is unsettled and adds units of `run`. False if `run` is not on the job's path, because a settled
    job clears `incoming` on its own path only."""
    return not job.is_settled and any(each is run for each, _, _ in stretches(job.run, job.start, job.stop))


def _incoming_before(part: Part, head: Run, at: int) -> Job | None:
    """The `incoming` of the part of `head`, when `part` is split at unit `at`: the last unsettled job that adds units
    before `at`."""
    job = part.incoming
    while job is not None and job.start >= at:
        job = job.predecessor
    return job if job is not None and brings(job, head) else None


class PrefixCache:
    """The cached runs, their blocks in every tier, and the leases on them. Never waits, and never raises for lack of
    blocks: callers check `TierBlocks.num_available` first."""

    def __init__(
        self,
        layout: Layout,
        tiers: tuple[TierBlocks, ...],
        new_order: Callable[[Tier], EvictionOrder],
        last_uses: LastUses,
    ) -> None:
        self.layout = layout
        self.tiers = tiers
        places = range(len(tiers) * len(layout.components))
        self.managers = tuple(
            [
                ComponentManager(each, not each.number, tuple(places[each.number * len(tiers) :]))
                for each in layout.components
            ]
        )
        """One per component."""
        self._windows_first = (*self.managers[1:], self.managers[0])
        self.index = RunIndex(layout, 0, [tier.tier for tier in tiers])
        self._max_run_units = max_run_units(layout.unit_tokens)
        self.last_uses = last_uses
        self._new_order = new_order
        self._watchers: tuple[BlockWatcher, ...] = ()
        self.epoch = self.index.epoch
        """Counts resets. Runs of another epoch are not findable."""
        self.has_lower_tiers = len(tiers) > len(HIT_TIERS)
        """Whether the index knows tiers that serve no hit. Their KV must be fetched first."""

    def is_cut(self, position: int) -> bool:
        """Whether unit `position` is a maximum boundary: no run crosses it."""
        return position % self._max_run_units == 0

    def split(self, run: Run, at: int) -> Run:
        """Split `run` at unit `at`. Returns the head. Leases that pinned the run pin both."""
        start = run.start
        head = self.index.split_head(run, at)
        parts = [self._divide(head, start, part, at) for part in run.parts]
        self.index.enter_parts(head, parts)
        return head

    def _divide(self, head: Run, start: int, part: Part, at: int) -> Part:
        """Split `part` at unit `at`. Returns the part of the head; `part` keeps the rest."""
        num_references = part.num_references  # leases begin only where runs begin: each covers head and tail
        incoming = _incoming_before(part, head, at)
        if part.incoming is not None and part.incoming.stop <= at:
            part.incoming = None
        front = part.cut_off(head, start, at, num_references, incoming)
        if front.blocks and not num_references:
            order = self.tiers[part.tier].order
            order.add_newer(front, part)  # right after the tail, which must be evicted first
            if not part.blocks:
                order.remove(part)
        return front

    def cut(self, run: Run, at: int) -> Run:
        """The run that ends at unit `at` on the path of `run`. Splits or shortens the run there, so that a lease on the
        result never pins units that are published after `at` later."""
        while run.start >= at:
            assert run.before is not None, "not on the path"
            run = run.before
        if run.stop == at:
            return run
        if run.num_after or any(part.num_references or covered(part)[1] > at for part in run.parts):
            return self.split(run, at)
        self.index.shorten(run, at)  # no tier holds a block after `at`: a tail would be useless
        return run

    def shift_boundary(self, run: Run, at: int, tier: Tier, component: Component) -> bool:
        """Move the units before `at` to the run before `run`; False if that run cannot take them. Called when a lease
        unpins these units in `tier` and `component`. A split instead would leave one run for each block that a sliding
        window has left."""
        head = run.before
        if head is None or self.is_cut(head.stop) or not self._may_take_over(head, run, tier, component):
            return False
        for front, back in zip(head.parts, run.parts, strict=True):
            self._take_over(self.tiers[back.tier], front, back, at)
        self.index.shift_boundary(head, run, at)
        return True

    def _may_take_over(self, head: Run, run: Run, tier: Tier, component: Component) -> bool:
        """Whether `head` can take units of `run`, its only child: no job adds to either, and in every tier and
        component the same leases pin both, except that in `tier` and `component` exactly one lease pins `run` and none
        pins `head`."""
        if head.num_after != 1 or head.spans != run.spans or head.epoch != self.index.epoch:
            return False
        for front, back in zip(head.parts, run.parts, strict=True):
            if front.incoming is not None or back.incoming is not None or front.rank != back.rank:
                return False
            if not self.managers[back.component].may_join(front, back, is_tail=True):
                return False
            if back.component == component.number and back.tier is tier:  # the caller unpins these units
                if (front.num_references, back.num_references) != (0, 1):
                    return False
            elif front.num_references != back.num_references:
                return False
        return True

    @staticmethod
    def _take_over(tier: TierBlocks, front: Part, back: Part, at: int) -> None:
        """Move the blocks of `back` before unit `at` to `front`."""
        was_empty = not front.blocks
        count = back.hand_over(front, at)
        if front.tombstones and not front.num_references:
            tier.pool.give(front.take_tombstones())
        if not count:
            return
        if back.num_references:
            if not front.num_references:
                tier.num_cached += count
                if was_empty:
                    tier.order.add(front)
            return
        if was_empty and not front.num_references:
            tier.order.add_newer(front, back)
        if not back.blocks:
            tier.order.remove(back)

    def merge(self, unpinned: list[Run]) -> list[Run]:
        """Merge runs that were unpinned together, because prompts that diverge would fragment the index. Takes them
        last first, and returns those that remain."""
        left = [unpinned[0]]
        heads: list[Run] = []
        for head in unpinned[1:]:
            if self._can_join(head, heads[-1] if heads else left[-1], left[-1]):
                heads.append(head)
                continue
            if heads:
                self._join(heads, left[-1])
                heads = []
            left.append(head)
        if heads:
            self._join(heads, left[-1])
        return left

    def _can_join(self, head: Run, back: Run, tail: Run) -> bool:
        """Whether `head` and `back`, which is `tail` or is about to be merged into it, can be one run: `head` has no
        other child, and merging keeps the eviction order."""
        if head.num_after != 1 or head.epoch != self.index.epoch or head.spans != back.spans:
            return False
        if self.is_cut(head.stop):
            return False
        for front, following in zip(head.parts, back.parts, strict=True):
            if front.num_references or following.num_references or front.rank != following.rank:
                return False
            if front.incoming is not None or following.incoming is not None:
                return False
            if not self.managers[following.component].may_join(front, following, is_tail=back is tail):
                return False
            order = self.tiers[front.tier].order
            if following.blocks and front.blocks and not order.are_adjacent(following, front):
                return False
        return True

    def _join(self, heads: list[Run], tail: Run) -> None:
        """Merge `heads`, nearest first, into `tail`."""
        for number, part in enumerate(tail.parts):
            self._join_parts(self.tiers[part.tier], [head.parts[number] for head in heads], part)
        self.index.absorb(tail, heads)
        for part in tail.parts:
            part.begin_at(tail.start)

    @staticmethod
    def _join_parts(tier: TierBlocks, fronts: list[Part], part: Part) -> None:
        held = [front for front in fronts if front.blocks]
        if held and not part.blocks:
            tier.order.add_newer(part, held[0])  # it takes the place of the nearest
        for front in reversed(held):
            tier.order.remove(front)
        part.join(fronts)

    def tidy(self, run: Run) -> None:
        """Remove a run that holds nothing, or drop its tokens that no tier holds if these are half of it or more."""
        if run.epoch != self.index.epoch or run.num_after:
            return
        start = held = run.start
        num_units = run.stop - start
        for part in run.parts:
            if part.num_references or part.incoming is not None or (part.stop - start) * 2 > num_units:
                return
            if part.stop > held:
                held = part.stop
        if held == start:
            self.index.remove(run)
        else:
            self.index.shorten(run, held)

    def watch(self, watcher: BlockWatcher) -> None:
        """Report to `watcher` every change of the cached blocks, except in tiers whose blocks belong to others
        (`TierBlocks.is_outside`)."""
        self._watch((*self._watchers, watcher))

    def unwatch(self, watcher: BlockWatcher) -> None:
        self._watch(tuple([other for other in self._watchers if other is not watcher]))

    def _watch(self, watchers: tuple[BlockWatcher, ...]) -> None:
        self._watchers = watchers
        for tier in self.tiers:
            tier.watcher = None if tier.is_outside or not watchers else Watchers(watchers)

    # -- leases ---------------------------------------------------------------------------------------------------

    def lease(self, tier: Tier, run: Run, starts: Sequence[int] | None = None, *, is_use: bool = True) -> Lease:
        """Pin the path of `run` in `tier`: of each component the units from its entry in `starts` on. By default, those
        needed to continue computing at the end of `run`.

        Without `is_use`, the lease does not refresh LRU positions: at its release, blocks that no other lease has used
        meanwhile return to their old place in the eviction order. Stores lease their sources so, because lazy stores
        would reverse the order otherwise."""
        if starts is None:
            pinned = self.layout.starts(run.stop) if self.layout.partial else [0]
            if self.layout.recurrent is not None:
                pinned[-1] = run.start  # its checkpoint is the last unit of `run`: split nothing off for it
        else:
            pinned = [*starts]
        blocks, stop = self.tiers[tier], run.stop
        for number, manager in enumerate(self.managers):
            start = pinned[number]
            if start < stop:
                if start:
                    self.split_path(run, start)
                manager.pin(blocks, run, start, is_use)
        return Lease(tier, run, pinned)

    def release(self, lease: Lease) -> None:
        """End a lease. Blocks that no other lease pins become evictable, the tail of the path first."""
        if lease.released:
            raise LeaseError(f"{lease.tier.name} lease on {lease.run} released twice")
        lease.released = True
        blocks, run, starts = self.tiers[lease.tier], lease.run, lease.starts
        unpinned: list[Run] = []
        for manager in self._windows_first:  # full attention is the last: it unpins the whole path, which is merged
            start = starts[manager.component.number]
            if start < run.stop:
                unpinned = manager.unpin(blocks, run, start)
        for left in self.merge(unpinned) if len(unpinned) > 1 else unpinned:
            # `tidy` would keep a run whose part is whole; a run without parts was removed.
            if left.parts and left.parts[lease.tier].stop < left.stop:
                self.tidy(left)

    def move_lease(self, lease: Lease, run: Run) -> None:
        """Move the end of `lease` forward or back to `run`, which is on the same path."""
        if lease.run is run:
            return
        blocks, old = self.tiers[lease.tier], lease.run
        unpinned: list[Run] = []
        for manager in self._windows_first:
            start = lease.starts[manager.component.number]
            if run.stop > old.stop:
                manager.pin(blocks, run, max(start, old.stop), is_use=True)
            else:
                unpinned = manager.unpin(blocks, old, max(start, run.stop))
        stop = run.stop
        lease.run = run
        lease.starts = [start if start < stop or start == NO_LIMIT else stop for start in lease.starts]
        for left in self.merge(unpinned) if len(unpinned) > 1 else unpinned:
            if left.parts and left.parts[lease.tier].stop < left.stop:
                self.tidy(left)

    def unpin_before(self, lease: Lease, component: Component, start: int) -> None:
        """Unpin the units of `component` before `start`. They stay cached until their blocks are needed."""
        if lease.starts[component.number] >= start:
            return
        manager, blocks = self.managers[component.number], self.tiers[lease.tier]
        for current in reversed(_between(lease.run, lease.starts[component.number], start)):
            if current.stop <= start:
                manager.unpin(blocks, current, current.start)
            elif not self.shift_boundary(current, start, lease.tier, component):
                head = self.split(current, start)
                manager.unpin(blocks, head, head.start)
        lease.starts[component.number] = start

    def last_checkpoint(self, tier: Tier, run: Run) -> int:
        """The start of the last run on the path of `run` of which `tier` holds a checkpoint, or will get one. The end
        of `run` if there is none."""
        assert self.layout.recurrent is not None
        place = run.place(tier, self.layout.recurrent.number)
        for current in run.path():
            first, stop = covered(current.parts[place])
            if first < stop:
                return current.start
        return run.stop

    def pin_from(self, lease: Lease, component: Component, start: int) -> None:
        """Pin the units of `component` from `start` on, of which `lease` pins none (`NO_LIMIT`)."""
        self.managers[component.number].pin(self.tiers[lease.tier], lease.run, start, is_use=True)
        lease.starts[component.number] = start

    def unpin_all(self, lease: Lease, component: Component) -> None:
        """Unpin all units of `component`, and pin none when `lease` moves. They stay cached until their blocks are
        needed."""
        start, lease.starts[component.number] = lease.starts[component.number], NO_LIMIT
        if start < lease.run.stop:
            self.managers[component.number].unpin(self.tiers[lease.tier], lease.run, start)

    def pinned_by_none_but(self, leases: Iterable[Lease]) -> list[Part]:
        """The parts that only `leases`, all of one tier, pin: those that would become evictable without them."""
        counts: Counter[Part] = Counter()
        for lease in leases:
            for number, start in enumerate(lease.starts):
                for run in _between(lease.run, start, lease.run.stop):
                    counts[run.part(lease.tier, number)] += 1
        return [part for part, count in counts.items() if count == part.num_references]

    def split_path(self, run: Run, at: int) -> None:
        """Split a run on the path of `run`, so that one begins at unit `at`, which lies on it."""
        current: Run | None = run
        while current is not None and current.start > at:
            current = current.before
        if current is not None and current.start < at:
            self.split(current, at)

    def path_to(self, sequence: TokenSequence, stop: int) -> Run:
        """The run of the index that ends at unit `stop` of `sequence`; inserts what is missing."""
        last, position = None, 0
        for run, agreed in list(self.index.walk(sequence, stop)):
            last, position = self.cut(run, agreed), agreed
        return self.insert_after(last, sequence, position, stop)

    def insert_after(self, last: Run | None, sequence: TokenSequence, start: int, stop: int, key: bytes = b"") -> Run:
        """Insert units `[start, stop)` of `sequence`, none of which the index has, after `last`; `key`: the key of the
        first run, if it is known. Returns the last run. The caller must lease the runs, because `tidy` removes runs
        that hold nothing."""
        while start < stop:
            upto = sequence.run_stop(start, stop)
            last = self.index.insert(sequence, last, start, upto, key)
            start, key = upto, b""
        assert last is not None, "a path to nowhere"
        return last

    # -- blocks ---------------------------------------------------------------------------------------------------

    def take(self, tier: Tier, num_blocks: int) -> array[int]:
        """Take `num_blocks` blocks of `tier`. If too few are free, evict the tails of the oldest parts. The caller has
        checked `num_available`."""
        blocks = self.tiers[tier]
        pool = blocks.pool
        while (short := num_blocks - pool.num_free) > 0:
            part = blocks.order.oldest()
            assert part is not None, "more blocks than `num_available`"
            num_units, width = part.stop - part.first, part.width
            if num_units * width > short:  # its tail is enough
                num_units = -(-short // width)
            blocks.trim(part, num_units)
            blocks.num_evicted += num_units * width
            run = part.run
            if (part.stop - run.start) * 2 <= run.stop - run.start:  # `tidy` would keep a run with more than half left
                self.tidy(run)
        return pool.take(num_blocks)

    def give(self, tier: Tier, block_ids: array[int]) -> None:
        if block_ids:
            self.tiers[tier].pool.give(block_ids)

    def forget(self, part: Part, position: int) -> None:
        """Withdraw the unit at `position` of `part`, because its bytes are wrong. `part` has references, so the blocks
        become a tombstone.

        The units after it in the run are split off and keep their blocks. A match finds them again once the gap is
        filled.
        """
        run = part.run
        if position + 1 < run.stop and part.stop > position + 1:
            part = self.split(run, position + 1).part(part.tier, part.component)
        first, stop = part.first, part.stop
        part.entomb(position, part.truncate(position))
        self.tiers[part.tier].part_changed(part, first, stop)

    def new_orders(self) -> list[EvictionOrder]:
        """An empty eviction order for each tier, for `reset`. Passes on the exception of a program's factory."""
        return [self._new_order(tier.tier) for tier in self.tiers]

    def reset(self, orders: Iterable[EvictionOrder]) -> None:
        """Swap the index for an empty one of the next epoch. Unpinned blocks are freed at once, pinned ones when their
        lease ends (`TierBlocks.make_unpinned`)."""
        self.epoch += 1
        self.index = RunIndex(self.layout, self.epoch, self.index.tiers)
        for tier, order in zip(self.tiers, orders, strict=True):
            for part in list(tier.order):
                tier.pool.give(part.clear())
            tier.order = order
            tier.all_cleared(self.epoch)
        # All tiers but an engine-owned device, which is the first, have the same watcher: call it once.
        if (watcher := self.tiers[-1].watcher) is not None:
            watcher.all_cleared(self.epoch)

    def reset_tier(self, tier: Tier, unsettled: Iterable[Job]) -> None:
        """Make all blocks of one tier unfindable: unpinned blocks are freed at once, pinned ones when their lease ends.
        The epoch stays, because the runs remain in the other tiers. `unsettled` must contain every unsettled job: those
        that copy to this tier will publish nothing."""
        for job in unsettled:
            if job.plan.destination is tier and job.epoch == self.epoch:
                self._invalidate(job)
        runs = list(self.index.runs.values())
        for run in runs:
            for part in run.parts_in(tier):
                self.withdraw_part(part)
        self.tiers[tier].count_reset()
        for run in runs:
            self.tidy(run)

    def withdraw_part(self, part: Part) -> None:
        """Make the blocks of `part` unfindable: they are freed or, if it is pinned, become a tombstone."""
        tier, part.incoming = self.tiers[part.tier], None
        first, stop = part.first, part.stop
        if part.blocks and not part.num_references:
            block_ids = part.clear()
            tier.num_cached -= len(block_ids)
            tier.order.remove(part)
            tier.pool.give(block_ids)
        elif part.blocks:
            part.entomb(first, part.clear())
        if first < stop and part.run.epoch == self.epoch:  # else a reset has reported it already
            tier.part_changed(part, first, stop)

    def withdraw_checkpoint(self, run: Run, position: int, unsettled: Iterable[Job]) -> None:
        """Withdraw the checkpoint at unit `position`, on the path of `run`, from all tiers, because its bytes are
        wrong. Jobs that copy it publish nothing. `unsettled`: see `withdraw_all`."""
        recurrent = self.layout.recurrent
        assert recurrent is not None
        holders = [holder for holder, _, _ in stretches(run, position - 1, position)]
        for job in unsettled:
            is_of_it = job.component == recurrent.number and job.start < position <= job.stop
            if is_of_it and any(each in holders for each, _, _ in stretches(job.run, position - 1, position)):
                self._invalidate(job)
        for holder in holders:
            for part in holder.parts[recurrent.number * holder.num_tiers :]:
                if part.first < position <= part.stop:
                    self.tiers[part.tier].invalidated(part.blocks)
                    self.withdraw_part(part)

    def withdraw_all(self, wrong: Iterable[Run], unsettled: Iterable[Job]) -> None:
        """Withdraw the `wrong` runs, of any epoch, and all runs after them in the index, whichever request has computed
        them. A run after a wrong one would be findable again once the wrong one is computed anew. `unsettled` must
        contain every unsettled job: those that bring units of the withdrawn runs will publish nothing.

        The caller passes the jobs because `Part.incoming` does not lead to all of them: a job that copies again from a
        gap on replaces the jobs that bring the units after the gap."""
        for tier in self.tiers:
            tier.free_blocks_invalidated()
        heads = set(wrong)
        after = [run for run in self.index.runs.values() if not heads.isdisjoint(run.path())] if heads else []
        withdrawn = heads.union(after)
        for job in unsettled:
            brought = stretches(job.run, job.start, job.stop) if job.destination_lease is not None else ()
            if any(run in withdrawn for run, _, _ in brought):
                self._invalidate(job)
        for run in (*(run for run in wrong if run.epoch != self.epoch), *after):
            for part in run.parts:
                self.tiers[part.tier].invalidated(part.blocks)
                self.withdraw_part(part)
        for run in after:
            self.tidy(run)

    def _invalidate(self, job: Job) -> None:
        """Let an unsettled job publish nothing."""
        job.epoch = NoEpoch.INVALIDATED
        if job.parked is not None:  # it has landed, so a restart could find its blocks
            self.tiers[job.plan.destination].invalidated(job.plan.destination_ids)


def _between(run: Run, start: int, stop: int) -> list[Run]:
    """The runs on the path of `run` that overlap units `[start, stop)`, last first."""
    found: list[Run] = []
    for current in run.path():
        if current.stop <= start:
            break
        if current.start < stop:
            found.append(current)
    return found
