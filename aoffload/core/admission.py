"""Admission: matching and pinning in one step, granting room, and the one pump behind everything that changes room."""

from __future__ import annotations

from array import array
from collections.abc import Callable

import attrs

from ..errors import OutOfBlocks
from .cache import PrefixCache
from .holding import Holding
from .index import stretches
from .matching import Hit, PrefixMatch, find_hit
from .plan import Tier
from .waiting import Line, Waiter

__all__ = ["Admission"]


@attrs.define(eq=False)
class Admission:
    """Who gets device blocks, and when. Granting never waits, and refusing changes no count."""

    cache: PrefixCache
    others_hold_room: Callable[[], bool]
    """Whether anybody who does not wait holds device blocks (and will let go of them some day)."""
    line: Line = attrs.field(factory=Line)

    @property
    def room(self) -> int:
        return self.cache.tiers[Tier.DEVICE].room

    @property
    def capacity(self) -> int:
        return self.cache.tiers[Tier.DEVICE].capacity

    # -- match and pin --------------------------------------------------------------------------------------------

    def pin(self, holding: Holding) -> None:
        """Match and pin, in one step: nothing can be evicted in between."""
        if holding.epoch != self.cache.epoch:
            hit = Hit(0, 0, ())
        else:
            limit = min((holding.sequence.num_tokens - 1) // self.cache.layout.unit_tokens, holding.hit_limit)
            found = find_hit(self.cache.index, holding.sequence, limit)
            hit = found.narrow(limit, holding.hit_alignment)
        self._take_leases(holding, hit)
        unit = self.cache.layout.unit_tokens
        holding.published = holding.ready_stop = hit.device_stop
        holding.hit_stop = hit.stop
        holding.match = PrefixMatch(hit.device_stop * unit, (hit.stop - hit.device_stop) * unit)

    def _take_leases(self, holding: Holding, hit: Hit) -> None:
        if not hit.stop:
            return
        # Exactly what is used is pinned: a request must never be short of room because of what it pins itself.
        last = self.cache.cut(hit.run_at(hit.stop), hit.stop)
        if hit.stop > hit.device_stop:
            holding.leases[Tier.HOST] = self.cache.lease(Tier.HOST, last)
        if hit.device_stop:
            on_device = next(run for run in last.path() if run.start < hit.device_stop)
            run = self.cache.cut(on_device, hit.device_stop)
            holding.leases[Tier.DEVICE] = self.cache.lease(Tier.DEVICE, run)

    def unpin(self, holding: Holding) -> None:
        """Let go of the leases. Private blocks are another matter."""
        for tier in tuple(holding.leases):
            self.cache.release(holding.leases.pop(tier))

    def let_go(self, holding: Holding) -> None:
        """Give back everything the holding owns; synchronous, complete, whatever its state."""
        private = holding.private_blocks(self.cache.layout.width)
        holding.table, holding.duplicates, holding.load = array("i"), [], None
        self.cache.give(Tier.DEVICE, private)
        self.unpin(holding)
        holding.published = holding.ready_stop = holding.hit_stop = 0

    # -- room -----------------------------------------------------------------------------------------------------

    def num_missing(self, holding: Holding, num_units: int) -> int:
        """Blocks that a table of `num_units` units still needs."""
        present = len(holding.table) if holding.table else holding.published * self.cache.layout.width
        return max(0, num_units * self.cache.layout.width - present)

    def check_fits(self, num_units: int) -> None:
        """Refuse what could not fit if everybody else let go."""
        needed = num_units * self.cache.layout.width
        if needed > self.capacity:
            raise OutOfBlocks(needed, self.capacity, retryable=False)

    def take_nowait(self, holding: Holding, num_units: int, *, behind: bool) -> array[int]:
        """Room for a table of `num_units`, or `OutOfBlocks`; `behind`: somebody has been waiting for it longer."""
        self.check_fits(num_units)
        missing = self.num_missing(holding, num_units)
        if behind or missing > self.room:
            raise OutOfBlocks(missing, 0 if behind else self.room, retryable=True)
        return self.cache.take(Tier.DEVICE, missing)

    def start_table(self, holding: Holding, blocks: array[int]) -> None:
        """The block table: the ids of the device hit, then `blocks`."""
        holding.table = self.ready_ids(holding, 0, holding.published)
        holding.table.extend(blocks)

    def ready_ids(self, holding: Holding, start: int, stop: int) -> array[int]:
        """The ids of units `[start, stop)` of the path that `holding` leases on the device."""
        width, ids = self.cache.layout.width, array("i")
        for stretch in stretches(holding.device_run, start, stop):
            first = stretch.run.start
            ids.extend(
                stretch.run.parts[Tier.DEVICE].blocks[(stretch.start - first) * width : (stretch.stop - first) * width]
            )
        return ids

    # -- the line -------------------------------------------------------------------------------------------------

    def wait_for_allocation(self, waiter: Waiter) -> None:
        """Join the line; only its head keeps pins."""
        before = self.line.allocating[0] if self.line.allocating else waiter
        waiter.holding.waiter = waiter
        self.line.join_allocating(waiter)
        head = self.line.allocating[0]
        if head is not before:
            self.unpin_waiting(before.holding)
        if head is not waiter:
            self.unpin_waiting(waiter.holding)

    def unpin_waiting(self, holding: Holding) -> None:
        self.unpin(holding)
        holding.published = holding.ready_stop = holding.hit_stop = 0

    def wait_for_extension(self, waiter: Waiter) -> None:
        waiter.holding.waiter = waiter
        self.line.join_extending(waiter)

    def leave(self, waiter: Waiter) -> None:
        """Withdraw: an unused grant goes back, a place in the line is given up. The caller pumps."""
        waiter.holding.waiter = None
        if waiter.granted is not None:
            self.cache.give(Tier.DEVICE, waiter.granted)
            waiter.granted = array("i")
        else:
            self.line.leave(waiter)

    def pump(self) -> None:
        """Grant what can be granted, in order. Called after everything that changes room."""
        while self.line.extending:
            if not self._serve_extension(self.line.extending[0]):
                break
        while self.line.allocating and not self.line.extending:
            if not self._serve_allocation(self.line.allocating[0]):
                return

    def _serve_extension(self, waiter: Waiter) -> bool:
        """Whether the head of the extensions is over, one way or the other."""
        if self._fails_for_good(waiter, self.line.extending):
            return True
        missing = self.num_missing(waiter.holding, waiter.num_units)
        if missing > self.room and self.line.allocating:
            self.unpin_waiting(self.line.allocating[0].holding)  # who has nothing yet must not block who has
        if missing <= self.room:
            self.line.extending.pop(0)
            waiter.grant(self.cache.take(Tier.DEVICE, missing))
            return True
        if self.others_hold_room():
            return False
        # Only waiters hold room: nobody will ever let go. The one that came last has the least to lose.
        youngest = self.line.extending.pop()
        youngest.fail(OutOfBlocks(self.num_missing(youngest.holding, youngest.num_units), self.room, retryable=True))
        return youngest is waiter

    def _serve_allocation(self, waiter: Waiter) -> bool:
        if self._fails_for_good(waiter, self.line.allocating):
            return True
        holding = waiter.holding
        self.unpin_waiting(holding)
        self.pin(holding)  # what was cached or evicted meanwhile counts: matched again in the step that grants
        missing = self.num_missing(holding, waiter.num_units)
        if missing > self.room:
            return False
        self.line.allocating.pop(0)
        waiter.grant(self.cache.take(Tier.DEVICE, missing))
        return True

    def _fails_for_good(self, waiter: Waiter, queue: list[Waiter]) -> bool:
        """Room was lost to quarantine: fail who can no longer fit."""
        needed = waiter.num_units * self.cache.layout.width
        if needed <= self.capacity:
            return False
        queue.pop(0)
        waiter.fail(OutOfBlocks(needed, self.capacity, retryable=False))
        return True
