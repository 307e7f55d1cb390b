"""The prefix cache: the index together with the blocks of every tier, and the references between them.

References are counted per run and tier. A lease counts on the run it ends at; a run that is referenced counts once on
the run before it. So a path is pinned from its end to the root, taking a lease costs as many steps as there are runs
not pinned yet, and an unpinned run never has a pinned one behind it:

    root <- [0,40) <- [40,48) <- [48,50)      leases: a ends at 48, b at 50
              1          1+1         1        a's own lease on [40,48), and [48,50) behind it
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import TYPE_CHECKING

from .eviction import EvictionOrder
from .groups import Layout
from .index import Part, Run, RunIndex
from .lease import Lease
from .plan import Tier
from .tiers import TierBlocks

if TYPE_CHECKING:
    from .jobs import Job

__all__ = ["UNPUBLISHABLE", "PrefixCache"]

UNPUBLISHABLE = -1
"""The epoch of jobs and holdings whose bytes turned out to be wrong: no index has it."""


class PrefixCache:
    """What is cached where. Never blocks, never raises for want of room: callers look at `room` first."""

    def __init__(self, layout: Layout, tiers: tuple[TierBlocks, ...], new_order: Callable[[], EvictionOrder]) -> None:
        self.layout = layout
        self.tiers = tiers
        self.index = RunIndex(layout, epoch=0, num_tiers=len(tiers))
        self._new_order = new_order

    @property
    def epoch(self) -> int:
        return self.index.epoch

    # -- leases ---------------------------------------------------------------------------------------------------

    def lease(self, tier: Tier, run: Run) -> Lease:
        """Pin the path of `run` in `tier`."""
        self._reference(self.tiers[tier], run)
        return Lease(tier, run)

    def release(self, lease: Lease) -> None:
        """End a lease; what nobody else pins becomes evictable, the tail as the oldest."""
        lease.spend()
        self._dereference(self.tiers[lease.tier], lease.run)

    def move_lease(self, lease: Lease, run: Run) -> None:
        """Let `lease` end at `run` instead: on the same path, further on or further back."""
        if lease.run is run:
            return
        self._reference(self.tiers[lease.tier], run)
        old, lease.run = lease.run, run
        self._dereference(self.tiers[lease.tier], old)

    @staticmethod
    def _reference(tier: TierBlocks, run: Run) -> None:
        current: Run | None = run
        while current is not None:
            part = current.parts[tier.tier]
            part.num_references += 1
            if part.num_references > 1:
                return
            if part.blocks:
                tier.make_pinned(part)
            current = current.before

    def _dereference(self, tier: TierBlocks, run: Run) -> None:
        let_go: list[Run] = []
        current: Run | None = run
        while current is not None:
            part = current.parts[tier.tier]
            part.num_references -= 1
            if part.num_references:
                break
            let_go.append(current)
            self._unpin(tier, current, part)
            current = current.before
        for left in self._merge(let_go) if len(let_go) > 1 else let_go:
            self.tidy(left)

    def _unpin(self, tier: TierBlocks, run: Run, part: Part) -> None:
        if part.condemned is not None:
            tier.pool.give(part.condemned)
            part.condemned = None
        if not part.blocks:
            return
        if run.epoch == self.index.epoch:
            tier.make_evictable(part)
            return
        tier.pool.give(part.blocks)  # a reset has made it unfindable meanwhile
        part.blocks, part.stop = array("i"), run.start

    # -- runs -----------------------------------------------------------------------------------------------------

    def split(self, run: Run, at: int) -> Run:
        """Cut `run` at unit `at` and return the head. Whatever pinned the run pins both."""
        width = self.layout.width
        head = self.index.split_head(run, at)
        parts: list[Part] = []
        for tier, part in zip(self.tiers, run.parts, strict=True):
            cut = (min(at, part.stop) - head.start) * width
            front = Part(head, min(at, part.stop), part.blocks[:cut])
            # The leases stay with the tail, which now counts once on the head.
            front.num_references = 1 if part.num_references else 0
            self._divide_incoming(front, part, at)
            if not part.num_references:
                self._divide_place(tier, front, part, cut)
            else:
                del part.blocks[:cut]
            part.stop = max(part.stop, at)
            parts.append(front)
        head.parts = tuple(parts)
        return head

    def cut(self, run: Run, at: int) -> Run:
        """The run that ends at unit `at` of `run`, so that a lease on it pins exactly what is used: whatever is
        published behind `at` later must be nobody's pin but its publisher's."""
        if run.stop == at:
            return run
        if run.num_after or any(part.num_references or part.covered_stop > at for part in run.parts):
            return self.split(run, at)
        self.index.shorten(run, at)  # nothing lies behind: a tail of its own would be kept for nothing
        return run

    @staticmethod
    def _divide_incoming(front: Part, back: Part, at: int) -> None:
        if back.incoming is None:
            return
        job: Job | None = back.incoming
        while job is not None and job.start >= at:  # only a job that brings something to the head will clear it there
            job = job.predecessor
        if back.stop < at and job is not None and not job.is_settled and job.stop > back.stop:
            front.incoming, front.incoming_stop = job, min(at, job.stop)
        if back.incoming_stop <= at:
            back.incoming, back.incoming_stop = None, 0

    @staticmethod
    def _divide_place(tier: TierBlocks, front: Part, back: Part, cut: int) -> None:
        """The head outlives its tail: next in the order, right behind it."""
        if not back.blocks:
            return
        tier.order.add_newer(front, back)
        del back.blocks[:cut]
        if not back.blocks:
            tier.order.remove(back)

    def _merge(self, let_go: list[Run]) -> list[Run]:
        """Join runs that were let go of together, or divergent prompts would shatter the index; the runs left."""
        left = [let_go[0]]
        heads: list[Run] = []
        for head in let_go[1:]:
            if self._can_join(head, heads[-1] if heads else left[-1]):
                heads.append(head)
                continue
            self._join(heads, left[-1])
            heads = []
            left.append(head)
        self._join(heads, left[-1])
        return left

    def _can_join(self, head: Run, tail: Run) -> bool:
        """Whether the two are one run: nothing else hangs on the head, and joining changes no order."""
        if head.num_after != 1 or head.epoch != self.index.epoch or head.spans != tail.spans:
            return False
        for front, back in zip(head.parts, tail.parts, strict=True):
            if front.num_references or back.num_references or front.incoming is not None or back.incoming is not None:
                return False
            if back.blocks and (front.stop != head.stop or back.newer is not front):
                return False
        return True

    def _join(self, heads: list[Run], tail: Run) -> None:
        """Join `heads`, nearest first, into `tail`."""
        if not heads:
            return
        for index, (tier, part) in enumerate(zip(self.tiers, tail.parts, strict=True)):
            fronts = [head.parts[index] for head in heads]
            if not part.blocks:
                # The nearest head with blocks takes the tail's place in the order; the ones before it follow.
                place = next((front for front in fronts if front.blocks), None)
                if place is not None:
                    tier.order.add_newer(part, place)
                    part.stop = place.stop
            blocks = array("i")
            for front in reversed(fronts):
                if front.blocks:
                    blocks.extend(front.blocks)
                    tier.order.remove(front)
            part.blocks = blocks + part.blocks
        self.index.absorb(tail, heads)
        for part in tail.parts:
            part.stop = tail.start + len(part.blocks) // self.layout.width

    def tidy(self, run: Run) -> None:
        """Forget a run that holds nothing, and tokens that no tier holds any more."""
        if run.epoch != self.index.epoch or run.num_after:
            return
        held = run.start
        for part in run.parts:
            if part.num_references or part.incoming is not None:
                return
            held = max(held, part.stop)
        if held == run.start:
            self.index.remove(run)
        elif (held - run.start) * 2 <= run.stop - run.start:
            self.index.shorten(run, held)

    # -- blocks ---------------------------------------------------------------------------------------------------

    def take(self, tier: Tier, num_blocks: int) -> array[int]:
        """`num_blocks` blocks of `tier`, evicting as many as it takes; the caller has looked at `room`."""
        blocks = self.tiers[tier]
        while (short := num_blocks - blocks.pool.num_free) > 0:
            part = blocks.order.oldest()
            assert part is not None, "room was promised"
            num_units = min(-(-short // self.layout.width), part.stop - part.run.start)
            blocks.trim(part, num_units, self.layout.width)
            blocks.num_evicted += num_units * self.layout.width
            self.tidy(part.run)
        return blocks.pool.take(num_blocks)

    def give(self, tier: Tier, block_ids: array[int]) -> None:
        if block_ids:
            self.tiers[tier].pool.give(block_ids)

    def forget(self, tier: Tier, run: Run, position: int) -> None:
        """Drop the block at `position` of a referenced run from `tier`: what is there is wrong.

        What lies behind it in the run stays, cut off, and can be reached again once the gap is filled.
        """
        if position + 1 < run.stop and run.parts[tier].stop > position + 1:
            run = self.split(run, position + 1)
        part = run.parts[tier]
        keep = (position - run.start) * self.layout.width
        bad = part.blocks[keep:]
        del part.blocks[keep:]
        part.stop = position
        part.condemned = bad if part.condemned is None else part.condemned + bad

    def reset(self) -> None:
        """Swap the index: nothing cached so far is findable any more; what is pinned stays until it is let go of."""
        self.index = RunIndex(self.layout, self.index.epoch + 1, len(self.tiers))
        for tier in self.tiers:
            for part in list(tier.order):
                tier.pool.give(part.blocks)
                part.blocks, part.stop = array("i"), part.run.start
            tier.order = self._new_order()
            tier.num_cached = 0

    def withdraw(self, run: Run) -> None:
        """Make every block of `run` unfindable and free it once no reference protects it; what is in flight to it
        publishes nothing."""
        for tier, part in zip(self.tiers, run.parts, strict=True):
            job = part.incoming
            while job is not None and job.stop > run.start:
                job.epoch = UNPUBLISHABLE
                job = job.predecessor
            if part.blocks:
                if part.num_references:
                    part.condemned = part.blocks if part.condemned is None else part.condemned + part.blocks
                else:
                    tier.make_pinned(part)
                    tier.pool.give(part.blocks)
            part.blocks, part.stop = array("i"), run.start

    def withdraw_behind(self, wrong: set[Run]) -> None:
        """Withdraw what hangs on `wrong` runs, whoever computed it: once they are right again it could be reached."""
        if not wrong:
            return
        behind = [run for run in self.index.runs.values() if run not in wrong and not wrong.isdisjoint(run.path())]
        for run in behind:
            self.withdraw(run)
        for run in behind:
            self.tidy(run)
