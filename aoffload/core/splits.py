"""Node split and merge: where runs begin and end. A run is split where a prompt leaves it or a lease needs less of it,
merged again when nothing needs the boundary, and hands over to the run before what has left a window.
"""

from __future__ import annotations

from .components import Component, FullComponent, brings, window_components
from .groups import Band, Layout
from .index import RunIndex
from .plan import Tier
from .records import Job, Part, Run
from .tiers import TierBlocks
from .tokens import max_run_units

__all__ = ["SplitsAndMerges"]


class SplitsAndMerges:
    """What a prefix cache does to the borders of its runs. Whatever was pinned, findable or in flight stays so."""

    def __init__(self, layout: Layout, tiers: tuple[TierBlocks, ...]) -> None:
        self.layout = layout
        self.tiers = tiers
        self.full = FullComponent(layout.full)
        self.windows = window_components(layout)
        self.components: tuple[Component, ...] = (self.full, *self.windows)
        """Band by band."""
        self.index = RunIndex(layout, epoch=0)
        self._max_run_units = max_run_units(layout.unit_tokens)

    def is_cut(self, position: int) -> bool:
        """Whether no run goes over unit `position`: the longest runs end there."""
        return position % self._max_run_units == 0

    def split(self, run: Run, at: int) -> Run:
        """Cut `run` at unit `at` and return the head. Whatever pinned the run pins both."""
        start = run.start
        head = self.index.split_head(run, at)
        parts = [self._divide(head, start, part, at) for part in run.parts]
        self.index.enter_parts(head, parts)
        return head

    def _divide(self, head: Run, start: int, part: Part, at: int) -> Part:
        """The part of the head that is cut off at `at`; `part` keeps what lies behind."""
        component = self.components[part.band]
        num_references = component.head_references(part.num_references)
        incoming = _incoming_before(component, part, head, at)
        if part.incoming is not None and part.incoming.stop <= at:
            part.awaits(None)
        front = part.cut_off(head, start, at, num_references, incoming)
        if front.blocks and not num_references:
            order = self.tiers[part.tier].order
            order.add_newer(front, part)  # the head outlives its tail: next in the order, right behind it
            if not part.blocks:
                order.remove(part)
        return front

    def cut(self, run: Run, at: int) -> Run:
        """The run that ends at unit `at` of `run`, so that a lease on it pins exactly what is used: whatever is
        published behind `at` later must be nobody's pin but its publisher's."""
        if run.stop == at:
            return run
        if run.num_after or any(part.num_references or part.covered_stop > at for part in run.parts):
            return self.split(run, at)
        self.index.shorten(run, at)  # nothing lies behind: a tail of its own would be kept for nothing
        return run

    def shift_boundary(self, run: Run, at: int, band: Band) -> bool:
        """Whether the run before could take over what lies before `at`, where `band` alone is let go of. A window
        that moves on with every block would leave a run behind for each of them."""
        head = run.before
        if head is None or self.is_cut(head.stop) or not self._may_take_over(head, run, band):
            return False
        for front, back in zip(head.parts, run.parts, strict=True):
            self._take_over(self.tiers[back.tier], front, back, at)
        self.index.shift_boundary(head, run, at)
        return True

    def _may_take_over(self, head: Run, run: Run, band: Band) -> bool:
        """Whether `head` is nobody's end, and whoever pins anything of it pins the same of `run`; but for `band`, of
        which one lease alone pins `run`."""
        if head.num_after != 1 or head.spans != run.spans or head.epoch != self.index.epoch:
            return False
        for front, back in zip(head.parts, run.parts, strict=True):
            component = self.components[back.band]
            if front.incoming is not None or back.incoming is not None:
                return False
            if back.blocks and not component.follows(front, back):
                return False
            if back.band == band.number and back.tier is Tier.DEVICE:  # what the lease leaves
                if (front.num_references, back.num_references) != (0, 1):
                    return False
            elif front.num_references != component.head_references(back.num_references):
                return False
        return True

    @staticmethod
    def _take_over(tier: TierBlocks, front: Part, back: Part, at: int) -> None:
        """Move what `back` holds before `at` to `front`."""
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
        """Join runs that were let go of together, or divergent prompts would shatter the index; the runs left."""
        left = [let_go[0]]
        heads: list[Run] = []
        for head in let_go[1:]:
            if self._can_join(head, heads[-1] if heads else left[-1], left[-1]):
                heads.append(head)
                continue
            self._join(heads, left[-1])
            heads = []
            left.append(head)
        self._join(heads, left[-1])
        return left

    def _can_join(self, head: Run, back: Run, tail: Run) -> bool:
        """Whether `head` and `back`, which is joined with `tail`, are one run: nothing else hangs on the head, and
        joining changes no order."""
        if head.num_after != 1 or head.epoch != self.index.epoch or head.spans != back.spans:
            return False
        if self.is_cut(head.stop):
            return False
        for front, behind in zip(head.parts, back.parts, strict=True):
            component = self.components[behind.band]
            if front.num_references or behind.num_references:
                return False
            if front.incoming is not None or behind.incoming is not None:
                return False
            if behind.blocks and not component.follows(front, behind):
                return False
            if behind.blocks and front.blocks and behind.newer is not front:
                return False
            if back is not tail and component.is_end(front, behind):
                return False
        return True

    def _join(self, heads: list[Run], tail: Run) -> None:
        """Join `heads`, nearest first, into `tail`."""
        if not heads:
            return
        for number, part in enumerate(tail.parts):
            self._join_parts(self.tiers[part.tier], [head.parts[number] for head in heads], part)
        self.index.absorb(tail, heads)
        for part in tail.parts:
            if not part.blocks:
                part.empty_at(tail.start)

    @staticmethod
    def _join_parts(tier: TierBlocks, fronts: list[Part], part: Part) -> None:
        held = [front for front in fronts if front.blocks]
        if held and not part.blocks:
            tier.order.add_newer(part, held[0])  # it takes the place of the nearest
        for front in reversed(held):
            tier.order.remove(front)
        part.join(fronts)

    def tidy(self, run: Run) -> None:
        """Forget a run that holds nothing, and tokens that no tier holds any more."""
        if run.epoch != self.index.epoch or run.num_after:
            return
        held = run.start
        for part in run.parts:
            if part.num_references or part.incoming is not None:
                return
            if part.stop > held:
                held = part.stop
        if held == run.start:
            self.index.remove(run)
        elif (held - run.start) * 2 <= run.stop - run.start:
            self.index.shorten(run, held)


def _incoming_before(component: Component, part: Part, head: Run, at: int) -> Job | None:
    """The last job in flight that adds to what `head` takes of `part`, which is divided at unit `at`."""
    job = part.incoming
    while job is not None and job.start >= at:
        job = job.predecessor
    return job if job is not None and brings(component, job, part, head) else None
