"""Run split and merge. A run is split where a prompt leaves it or a lease needs only its front, and merged again when
nothing needs the boundary. Units that have left a window move to the run before.
"""

from __future__ import annotations

from .components import Component, FullComponent, brings, window_components
from .groups import Band, Layout
from .hops import Tier
from .index import RunIndex
from .presence import covered_stop
from .records import Job, Part, Run
from .tiers import TierBlocks
from .tokens import max_run_units

__all__ = ["SplitsAndMerges"]


class SplitsAndMerges:
    """Moves the boundaries of runs. What was pinned, findable or in flight stays so."""

    def __init__(self, layout: Layout, tiers: tuple[TierBlocks, ...]) -> None:
        self.layout = layout
        self.tiers = tiers
        self.full = FullComponent(layout.full)
        self.windows = window_components(layout, len(tiers))
        self.components: tuple[Component, ...] = (self.full, *self.windows)
        """One per band."""
        self.index = RunIndex(layout, 0, [tier.tier for tier in tiers])
        self._max_run_units = max_run_units(layout.unit_tokens)

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
        component = self.components[part.band]
        num_references = component.head_references(part.num_references)
        incoming = _incoming_before(component, part, head, at)
        if part.incoming is not None and part.incoming.stop <= at:
            part.awaits(None)
        front = part.cut_off(head, start, at, num_references, incoming)
        if front.blocks and not num_references:
            order = self.tiers[part.tier].order
            order.add_newer(front, part)  # right behind the tail, which must be evicted first
            if not part.blocks:
                order.remove(part)
        return front

    def cut(self, run: Run, at: int) -> Run:
        """The run that ends at unit `at` of the path of `run`, which is shortened or split there: a lease on it never
        pins what is published behind `at` later."""
        while run.start >= at:
            assert run.before is not None, "not on the path"
            run = run.before
        if run.stop == at:
            return run
        if run.num_after or any(part.num_references or covered_stop(part) > at for part in run.parts):
            return self.split(run, at)
        self.index.shorten(run, at)  # nothing is held behind `at`: a tail would be useless
        return run

    def shift_boundary(self, run: Run, at: int, tier: Tier, band: Band) -> bool:
        """Move the units before `at`, which a lease unpins in `tier` and `band` alone, to the run before; False if that
        cannot take them. Splits instead would leave one run per block behind a sliding window."""
        head = run.before
        if head is None or self.is_cut(head.stop) or not self._may_take_over(head, run, tier, band):
            return False
        for front, back in zip(head.parts, run.parts, strict=True):
            self._take_over(self.tiers[back.tier], front, back, at)
        self.index.shift_boundary(head, run, at)
        return True

    def _may_take_over(self, head: Run, run: Run, tier: Tier, band: Band) -> bool:
        """Whether `head` can take units of `run`, its only child: no job adds to either, and every lease pins both
        alike, except that one lease alone pins the blocks of `run` in `tier` and `band`."""
        if head.num_after != 1 or head.spans != run.spans or head.epoch != self.index.epoch:
            return False
        for front, back in zip(head.parts, run.parts, strict=True):
            component = self.components[back.band]
            if front.incoming is not None or back.incoming is not None or front.ring != back.ring:
                return False
            if back.blocks and not component.follows(front, back):
                return False
            if back.band == band.number and back.tier is tier:  # here the lease slides
                if (front.num_references, back.num_references) != (0, 1):
                    return False
            elif front.num_references != component.head_references(back.num_references):
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

    def merge(self, let_go: list[Run]) -> list[Run]:
        """Merge runs that were unpinned together, or divergent prompts would fragment the index. Returns the rest."""
        left = [let_go[0]]
        heads: list[Run] = []
        for head in let_go[1:]:
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
        for front, behind in zip(head.parts, back.parts, strict=True):
            component = self.components[behind.band]
            if front.num_references or behind.num_references or front.ring != behind.ring:
                return False
            if front.incoming is not None or behind.incoming is not None:
                return False
            if behind.blocks and not component.follows(front, behind):
                return False
            if behind.blocks and front.blocks and behind.newer is not front:
                return False
            if back is not tail and component.leaves_gap(front, behind):
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


def _incoming_before(component: Component, part: Part, head: Run, at: int) -> Job | None:
    """The last job in flight that adds to what `head` gets of `part`, which is split at unit `at`."""
    job = part.incoming
    while job is not None and job.start >= at:
        job = job.predecessor
    return job if job is not None and brings(component, job, part, head) else None
