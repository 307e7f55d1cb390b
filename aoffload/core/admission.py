"""Admission: granting room, and the one way out of everything that changes room: the line is served."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable

import attrs

from ..errors import OutOfBlocks, WrongState
from .arguments import check_int
from .cache import PrefixCache
from .lifecycle import RequestState, require
from .observer import Moves
from .owners import Extension, Holding, Waiter, nobody
from .plan import Tier
from .request_leases import RequestLeases
from .waiting import Line, require_idle

__all__ = ["Admission"]

_S = RequestState


@attrs.define(eq=False)
class Admission:
    """Who gets device blocks, and when. Granting never waits, and refusing changes no count."""

    cache: PrefixCache
    request_leases: RequestLeases
    moves: Moves
    others_hold_room: Callable[[], bool]
    """Whether anybody who does not wait holds device blocks (and will let go of them some day)."""
    yield_pin: Callable[[], bool] = lambda: False
    """Ends a pin that keeps device blocks; whether there was one. Only asked where nobody else could make room."""
    line: Line = attrs.field(factory=Line)
    _promised: int = 0
    """The capacity that everybody in the line was checked against."""

    # -- what a request asks for ----------------------------------------------------------------------------------

    def allocate_nowait(self, holding: Holding, num_tokens: int | None = None) -> None:
        """Room for `num_tokens` (the prompt's, if None), all or nothing; `OutOfBlocks` changes nothing."""
        num_units = self._units_to_allocate(holding, num_tokens)
        blocks = self._take_nowait(holding, num_units, behind=bool(self.line.allocating or self.line.extending))
        self._allocated(holding, num_units, blocks)

    def queue_allocation(
        self, holding: Holding, num_tokens: int | None = None, wake: Callable[[], object] = nobody
    ) -> Waiter:
        """Join the line for room; `wake` is called once the waiter is over. Then `accept` or `withdraw` it."""
        num_units = self._units_to_allocate(holding, num_tokens)
        self._check_fits(holding, num_units)
        waiter = Waiter(holding, num_units, wake)
        self.wait_for_allocation(waiter)
        return waiter

    def _units_to_allocate(self, holding: Holding, num_tokens: int | None) -> int:
        require(holding, "allocate", _S.PINNED)
        require_idle(holding, "allocate")
        wanted = holding.sequence.num_tokens if num_tokens is None else check_int("num_tokens", num_tokens, 1)
        return max(self.cache.layout.num_units(wanted), holding.published)

    def extend_nowait(self, holding: Holding, num_tokens: int) -> Extension:
        """Room for `num_tokens` in all; `OutOfBlocks` changes nothing."""
        num_units = self._units_to_extend(holding, num_tokens)
        before = holding.num_units
        blocks = self._take_nowait(holding, num_units, behind=bool(self.line.extending))
        self.request_leases.lengthen_tables(holding, num_units, blocks)
        return self.extension(holding, before)

    def queue_extension(self, holding: Holding, num_tokens: int, wake: Callable[[], object] = nobody) -> Waiter:
        """Join the line for more room, before everybody who has none yet."""
        num_units = self._units_to_extend(holding, num_tokens)
        self._check_fits(holding, num_units)
        waiter = Waiter(holding, num_units, wake)
        self._wait_for_extension(waiter)
        return waiter

    def _units_to_extend(self, holding: Holding, num_tokens: int) -> int:
        require(holding, "extend", _S.ALLOCATED, _S.RUNNING)
        require_idle(holding, "extend")
        return self.cache.layout.num_units(check_int("num_tokens", num_tokens, 1))

    def accept(self, waiter: Waiter) -> Extension:
        """Take what `waiter` was granted, or raise what it failed with."""
        holding = waiter.holding
        if holding.waiter is not waiter or not waiter.is_over:
            raise WrongState(f"accept: {waiter} has nothing to accept")
        holding.waiter = None
        if waiter.granted is None:
            if holding.state is _S.PINNED:
                self.request_leases.match_again(holding)
            elif holding.state is _S.REQUEUED:
                self.moves.request(holding, _S.STRANDED)
            raise waiter.error  # type: ignore[misc]
        before = holding.num_units
        if holding.may_match_again:
            self._allocated(holding, waiter.num_units, waiter.granted)
        else:
            self.request_leases.lengthen_tables(holding, waiter.num_units, waiter.granted)
        return self.extension(holding, before)

    def withdraw(self, waiter: Waiter) -> None:
        """Stop waiting: an unused grant goes back, and whoever waits behind gets its chance."""
        holding = waiter.holding
        if holding.waiter is not waiter:
            return
        if holding.state is _S.REQUEUED:
            raise WrongState(f"withdraw: {holding} has let go of everything and waits to begin again: release it")
        self.leave(waiter)
        if holding.state is _S.PINNED:
            self.request_leases.match_again(holding)

    def match_again(self, holdings: Iterable[Holding]) -> None:
        """What `holdings` have matched, and not yet read, is gone.

        All of them let go before one is matched again: it would protect what nobody finds any more from being freed."""
        unread = [holding for holding in holdings if holding.may_match_again]
        for holding in unread:
            self._forget_match(holding)
        for holding in unread:
            waiter = holding.waiter
            if waiter is None and holding.state is _S.PINNED:
                self.request_leases.pin(holding)
            elif waiter is not None and waiter.granted is not None:  # it was too little now
                self.cache.give(Tier.DEVICE, waiter.take_back())
                self.wait_for_allocation(waiter)

    def _allocated(self, holding: Holding, num_units: int, blocks: array[int]) -> None:
        self.request_leases.start_tables(holding, num_units, blocks)
        holding.computed(holding.published * self.cache.layout.unit_tokens)
        self.moves.request(holding, _S.ALLOCATED)

    def extension(self, holding: Holding, before: int) -> Extension:
        """What was added behind `before` units, and what became null since this was told last."""
        layout = self.cache.layout
        added = layout.by_group([table.at(before, holding.num_units) for table in holding.tables])
        nulled: list[list[int]] = [[] for _ in layout.groups]
        for band, start, stop in holding.take_nulled():
            for group, positions in layout.positions(band, start, stop):
                nulled[group].extend(positions)
        return Extension(added, nulled)

    # -- room -----------------------------------------------------------------------------------------------------

    @property
    def room(self) -> int:
        return self.cache.tiers[Tier.DEVICE].room

    @property
    def capacity(self) -> int:
        return self.cache.tiers[Tier.DEVICE].capacity

    def num_missing(self, holding: Holding, num_units: int) -> int:
        """Blocks that a table of `num_units` units still needs."""
        if holding.tables:
            return max(0, num_units - holding.num_units) * self.cache.layout.width
        return self.request_leases.num_fresh(holding.published, holding.hit_stop, num_units)

    def num_needed(self, holding: Holding, num_units: int) -> int:
        """Blocks that a table of `num_units` units takes: less what has left the windows, or never was in them."""
        if holding.tables:
            gone = sum(table.start * table.width for table in holding.tables)
            return num_units * self.cache.layout.width - gone
        fresh = self.request_leases.num_fresh(holding.published, holding.hit_stop, num_units)
        return fresh + self.request_leases.num_kept(holding)

    def check_could_fit(self, num_tokens: int) -> None:
        """Refuse what no match could make fit."""
        needed = self.cache.layout.num_units(check_int("num_tokens", num_tokens, 1)) * self.cache.layout.full.width
        if needed > self.capacity:
            raise OutOfBlocks(needed, self.capacity, retryable=False)

    def _check_fits(self, holding: Holding, num_units: int) -> None:
        """Refuse what could not fit if everybody else let go."""
        needed = self.num_needed(holding, num_units)
        if needed > self.capacity:
            raise OutOfBlocks(needed, self.capacity, retryable=False)

    def _take_nowait(self, holding: Holding, num_units: int, *, behind: bool) -> array[int]:
        """Room for a table of `num_units`, or `OutOfBlocks`; `behind`: somebody has been waiting for it longer."""
        missing = self.num_missing(holding, num_units)
        if behind or missing > self.room:
            self._check_fits(holding, num_units)
            if behind or not self._has_room(holding, num_units):
                raise OutOfBlocks(self.num_missing(holding, num_units), 0 if behind else self.room, retryable=True)
            missing = self.num_missing(holding, num_units)
        return self.cache.take(Tier.DEVICE, missing)

    def _has_room(self, holding: Holding, num_units: int) -> bool:
        """Whether a table of `num_units` can be had now; if need be without what `holding` itself pins on the device
        behind its device hit, so that its own pins never keep it waiting. Where there is no room, nothing changes."""
        if self.num_missing(holding, num_units) <= self.room:
            return True
        if holding.reserve is None or not holding.may_match_again:
            return False
        missing, gained = self.request_leases.without_islands(holding, num_units)
        if missing > self.room + gained:
            return False
        self.request_leases.match_again(holding, islands=False)
        return self.num_missing(holding, num_units) <= self.room

    # -- the line -------------------------------------------------------------------------------------------------

    def wait_for_allocation(self, waiter: Waiter) -> None:
        """Join the line; only its head keeps pins. Who has lost room to quarantine meanwhile, and can never fit now,
        hears so when the line is served next, wherever it stands."""
        before = self.line.allocating[0] if self.line.allocating else waiter
        self._promised = max(self._promised, self.capacity, self.num_least(waiter))
        waiter.holding.waiter = waiter
        self.line.join_allocating(waiter)
        head = self.line.allocating[0]
        if head is not before:
            self._forget_match(before.holding)
        if head is not waiter:
            self._forget_match(waiter.holding)

    def _wait_for_extension(self, waiter: Waiter) -> None:
        self._promised = max(self._promised, self.capacity)
        waiter.holding.waiter = waiter
        self.line.join_extending(waiter)

    def _forget_match(self, holding: Holding) -> None:
        """Let it pin nothing while it waits; it is matched again when the line is served next."""
        self.request_leases.forget_match(holding)
        if holding.waiter is not None:
            holding.waiter.changes_seen = -1

    def leave(self, waiter: Waiter) -> None:
        """Withdraw: an unused grant goes back, a place in the line is given up."""
        waiter.holding.waiter = None
        if waiter.granted is not None:
            self.cache.give(Tier.DEVICE, waiter.give_back())
        else:
            self.line.leave(waiter)

    def serve_line(self, wakes: Iterable[Callable[[], object]] = ()) -> None:
        """The way out of each call of the ledger that may change room, or what is asked of it: grant what can be
        granted, in order, then wake."""
        over: list[Waiter] = []
        if self.line.allocating or self.line.extending:
            self._serve(over)
        for waiter in over:  # now that all is decided: who is woken may call the ledger
            waiter.wake()
        for wake in wakes:
            wake()

    def _serve(self, over: list[Waiter]) -> None:
        """Grant what can be granted, and fail who can never be; they are added to `over`."""
        if self.capacity < self._promised:
            self._fail_who_cannot_fit(over)
        self._promised = self.capacity
        while self.line.extending:
            if not self._serve_extension(self.line.extending[0], over):
                break
        while self.line.allocating and not self.line.extending:
            first = self.line.allocating[0]
            if not self._serve_allocation(first, over) and not self._serve_alone(first, over):
                return

    def _serve_alone(self, first: Waiter, over: list[Waiter]) -> bool:
        """Whether something has changed for who is first in line where nobody else holds room: a pin yields, since pins
        promise nothing to whom nobody else can make room. Without one it will never fit, and hears so.

        Its own match goes first. That may free blocks that nobody finds any more, and a pin on the same blocks is then
        their last reference."""
        if self.others_hold_room():
            return False
        pool = self.cache.tiers[Tier.DEVICE].pool
        before = pool.num_free
        self._forget_match(first.holding)
        if pool.num_free == before and not self.yield_pin():
            self.line.allocating.pop(0)
            first.fail(OutOfBlocks(self.num_needed(first.holding, first.num_units), self.capacity, retryable=False))
            over.append(first)
        return True

    def _serve_extension(self, waiter: Waiter, over: list[Waiter]) -> bool:
        """Whether the head of the extensions is over, one way or the other."""
        missing = self.num_missing(waiter.holding, waiter.num_units)
        if missing > self.room and self.line.allocating:
            self._forget_match(self.line.allocating[0].holding)  # who has nothing yet must not block who has
        if missing <= self.room:
            self.line.extending.pop(0)
            waiter.grant(self.cache.take(Tier.DEVICE, missing))
            over.append(waiter)
            return True
        if self.others_hold_room():
            return False
        if self.yield_pin():
            return True  # looked at again: there may be room now
        # Only waiters hold room: nobody will ever let go. The one that came last has the least to lose.
        youngest = self.line.extending.pop()
        youngest.fail(OutOfBlocks(self.num_missing(youngest.holding, youngest.num_units), self.room, retryable=True))
        over.append(youngest)
        return youngest is waiter

    def _serve_allocation(self, waiter: Waiter, over: list[Waiter]) -> bool:
        holding, device = waiter.holding, self.cache.tiers[Tier.DEVICE]
        if waiter.changes_seen == device.num_changes and waiter.num_missing > device.room:
            return False  # it would hit what it hit before
        self.request_leases.keep_match(holding)  # in the step that grants
        if self._has_room(holding, waiter.num_units):
            self.line.allocating.pop(0)
            waiter.grant(self.cache.take(Tier.DEVICE, self.num_missing(holding, waiter.num_units)))
            over.append(waiter)
            return True
        if (needed := self.num_needed(holding, waiter.num_units)) > self.capacity:  # a hit had made it fit
            self.line.allocating.pop(0)
            waiter.fail(OutOfBlocks(needed, self.capacity, retryable=False))
            over.append(waiter)
            return True
        if not self.cache.layout.windows:  # there the host counts as well, and what it pins itself
            waiter.num_missing, waiter.changes_seen = self.num_missing(holding, waiter.num_units), device.num_changes
        return False

    def num_least(self, waiter: Waiter) -> int:
        """Blocks that it takes at least, whatever will hit."""
        if waiter.holding.tables:
            return self.num_needed(waiter.holding, waiter.num_units)
        return waiter.num_units * self.cache.layout.full.width

    def _fail_who_cannot_fit(self, over: list[Waiter]) -> None:
        """Room was lost to quarantine: whoever can no longer fit hears of it now, wherever in the line."""
        for queue in (self.line.extending, self.line.allocating):
            for waiter in tuple(queue):
                needed = self.num_least(waiter)
                if needed > self.capacity:
                    queue.remove(waiter)
                    waiter.fail(OutOfBlocks(needed, self.capacity, retryable=False))
                    over.append(waiter)
