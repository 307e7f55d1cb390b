"""The line for room: the waiters for device blocks, in order. `Admission` serves it.

Rules: all or nothing; `extend` goes before `allocate`; only the head of the allocations keeps pins while it waits; the
grant is in the waiter before any `wake` is called.

Admission: grants room, and serves the line at the end of every call that changes room.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter

from .._arguments import check_int
from ..errors import OutOfBlocks, WrongState
from .cache import PrefixCache
from .events import ExtensionRefused
from .leases import RequestLeases
from .moves import Moves
from .plans import Extension
from .requests import LedgerRequest, Waiter, call_all, nobody
from .states import RequestState as State
from .states import Tier, require

__all__ = ["Admission", "WaitQueue", "is_waiting"]


@dataclass(slots=True, eq=False)
class WaitQueue:
    """The waiters: extensions in order of arrival, allocations by ticket."""

    extending: list[Waiter] = field(default_factory=list)
    allocating: list[Waiter] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        return not self.extending and not self.allocating

    def join_extending(self, waiter: Waiter) -> None:
        self.extending.append(waiter)

    def join_allocating(self, waiter: Waiter) -> None:
        """Queue by ticket: a REQUEUED request gets its old place back."""
        insort(self.allocating, waiter, key=_ticket)

    def leave(self, waiter: Waiter) -> None:
        at = bisect_left(self.allocating, _ticket(waiter), key=_ticket)
        if at < len(self.allocating) and self.allocating[at] is waiter:
            del self.allocating[at]
        elif waiter in self.extending:
            self.extending.remove(waiter)


def _ticket(waiter: Waiter) -> int:
    return waiter.request.ticket


def is_waiting(request: LedgerRequest, call: str) -> WrongState:
    """The refusal of `call` while `request` waits for room."""
    return WrongState(f"{call}: {request} is waiting for room already")


_wake_of = attrgetter("wake")


@dataclass(slots=True, eq=False)
class Admission:
    """Decides which request gets device blocks, and when. No call waits, and a refused call takes nothing."""

    cache: PrefixCache
    request_leases: RequestLeases
    moves: Moves
    others_hold_room: Callable[[], bool]
    """Whether a job, a step or a request outside the line holds device blocks, which it will release some day."""
    yield_pin: Callable[[], bool] = lambda: False
    """Ends a pin that keeps device blocks. False: there is none. Called only if no other owner can make room."""
    queue: WaitQueue = field(default_factory=WaitQueue)
    _promised: int = 0
    """An upper bound of `num_least` for all waiters. If the capacity falls below it, some may no longer fit."""

    # -- what a request asks for ----------------------------------------------------------------------------------

    def allocate_nowait(self, request: LedgerRequest, num_tokens: object = None) -> None:
        """Take blocks for `num_tokens` (None: the prompt), all or nothing; `OutOfBlocks` changes nothing."""
        num_units = self._units_to_allocate(request, num_tokens)
        blocks = self._take_nowait(request, num_units, behind=bool(self.queue.allocating or self.queue.extending))
        self._allocated(request, num_units, blocks)

    def queue_allocation(
        self, request: LedgerRequest, num_tokens: object = None, wake: Callable[[], object] = nobody
    ) -> Waiter:
        """Join the line. `wake` is called once the waiter is granted or failed; then `accept` or `withdraw` it."""
        num_units = self._units_to_allocate(request, num_tokens)
        self._check_fits(request, num_units)
        waiter = Waiter(request, num_units, wake)
        self.wait_for_allocation(waiter)
        return waiter

    def _units_to_allocate(self, request: LedgerRequest, num_tokens: object) -> int:
        require(request, "allocate", State.PINNED)
        if request.waiter is not None:
            raise is_waiting(request, "allocate")
        wanted = request.sequence.num_tokens if num_tokens is None else check_int("num_tokens", num_tokens, 1)
        return max(self.cache.layout.num_units(wanted), request.published)

    def extend_nowait(self, request: LedgerRequest, num_tokens: object) -> Extension:
        """Extend the block table to `num_tokens` in all; `OutOfBlocks` changes nothing."""
        num_units = self._units_to_extend(request, num_tokens)
        before = request.num_units
        try:
            blocks = self._take_nowait(request, num_units, behind=bool(self.queue.extending))
        except OutOfBlocks as error:
            self.moves.note(ExtensionRefused(request, error.num_needed, error.num_available))
            raise
        self.request_leases.lengthen_tables(request, num_units, blocks)
        return self.extension(request, before)

    def queue_extension(
        self, request: LedgerRequest, num_tokens: object, wake: Callable[[], object] = nobody
    ) -> Waiter:
        """Join the line for more room, ahead of all allocations."""
        num_units = self._units_to_extend(request, num_tokens)
        self._check_fits(request, num_units)
        waiter = Waiter(request, num_units, wake)
        self._wait_for_extension(waiter)
        return waiter

    def _units_to_extend(self, request: LedgerRequest, num_tokens: object) -> int:
        require(request, "extend", State.ALLOCATED, State.RUNNING)
        if request.waiter is not None:
            raise is_waiting(request, "extend")
        return self.cache.layout.num_units(check_int("num_tokens", num_tokens, 1))

    def accept(self, waiter: Waiter) -> Extension:
        """Take what `waiter` was granted, or raise what it failed with."""
        request = waiter.request
        if request.waiter is not waiter or not waiter.is_over:
            raise WrongState(f"accept: {waiter} has nothing to accept")
        request.waiter = None
        if waiter.granted is None:
            if request.state is State.PINNED:
                self.request_leases.match_again(request)
            elif request.state is State.REQUEUED:
                self.moves.request(request, State.STRANDED)
            raise waiter.error  # type: ignore[misc]
        before = request.num_units
        if request.may_match_again:
            self._allocated(request, waiter.num_units, waiter.granted)
        else:
            self.request_leases.lengthen_tables(request, waiter.num_units, waiter.granted)
        return self.extension(request, before)

    def withdraw(self, waiter: Waiter) -> None:
        """Stop waiting: give back an unused grant. The caller serves the line."""
        request = waiter.request
        if request.waiter is not waiter:
            return
        if request.state is State.REQUEUED:
            raise WrongState(f"withdraw: {request} has let go of everything and waits to begin again: release it")
        self.leave(waiter)
        if request.state is State.PINNED:
            self.request_leases.match_again(request)

    def match_again(self, requests: Iterable[LedgerRequest]) -> None:
        """Match again those of `requests` that have no block tables yet: cached blocks were withdrawn. A request in the
        line is matched when the line is served; a grant not accepted yet goes back.

        All of them release their leases before one is matched. Tombstones are freed once their part has no reference,
        and a new lease would be one."""
        unread = [request for request in requests if request.may_match_again]
        for request in unread:
            self._forget_match(request)
            self.request_leases.end_fetched(request)
        for request in unread:
            waiter = request.waiter
            if waiter is None and request.state is State.PINNED:
                self.request_leases.pin(request)
            elif waiter is not None and waiter.granted is not None:  # granted for a longer hit: too few blocks now
                self.cache.give(Tier.DEVICE, waiter.take_back())
                self.wait_for_allocation(waiter)

    def _allocated(self, request: LedgerRequest, num_units: int, blocks: array[int]) -> None:
        self.request_leases.start_tables(request, num_units, blocks)
        request.computed(request.published * self.cache.layout.unit_tokens)
        self.moves.request(request, State.ALLOCATED)

    def extension(self, request: LedgerRequest, before: int) -> Extension:
        """The ids added from unit `before` on, and the positions that windows have left since the last `Extension`."""
        layout = self.cache.layout
        added = layout.by_group([table.at(before, request.num_units) for table in request.tables])
        nulled: list[list[int]] = [[] for _ in layout.groups]
        for band, start, stop in request.take_nulled():
            for group, positions in layout.positions(band, start, stop):
                nulled[group].extend(positions)
        return Extension(added, nulled)

    # -- room -----------------------------------------------------------------------------------------------------

    @property
    def num_available(self) -> int:
        return self.cache.tiers[Tier.DEVICE].num_available

    @property
    def capacity(self) -> int:
        return self.cache.tiers[Tier.DEVICE].capacity

    def num_missing(self, request: LedgerRequest, num_units: int) -> int:
        """Blocks that tables of `num_units` units still need."""
        if request.tables:
            return max(0, num_units - request.num_units) * self.cache.layout.width
        return self.request_leases.num_fresh(request.published, request.hit_stop, num_units)

    def num_needed(self, request: LedgerRequest, num_units: int) -> int:
        """Blocks that tables of `num_units` units need in all: those of the device hit count, but none that lie before
        the window of their band."""
        if request.tables:
            gone = sum(table.start * table.width for table in request.tables)
            return num_units * self.cache.layout.width - gone
        fresh = self.request_leases.num_fresh(request.published, request.hit_stop, num_units)
        return fresh + self.request_leases.num_kept(request)

    def check_could_fit(self, num_tokens: object) -> None:
        """Raise `OutOfBlocks` if no match could make `num_tokens` fit: their full attention alone is too much."""
        needed = self.cache.layout.num_units(check_int("num_tokens", num_tokens, 1)) * self.cache.layout.full.width
        if needed > self.capacity:
            raise OutOfBlocks(needed, self.capacity, retryable=False)

    def _check_fits(self, request: LedgerRequest, num_units: int) -> None:
        """Raise `OutOfBlocks` if the request, with its present match, could not fit even alone."""
        needed = self.num_needed(request, num_units)
        if needed > self.capacity:
            raise OutOfBlocks(needed, self.capacity, retryable=False)

    def _take_nowait(self, request: LedgerRequest, num_units: int, *, behind: bool) -> array[int]:
        """Take blocks for tables of `num_units`, or raise `OutOfBlocks`. `behind`: waiters in the line go first."""
        missing = self.num_missing(request, num_units)
        if behind or missing > self.cache.tiers[Tier.DEVICE].num_available:
            self._check_fits(request, num_units)
            if behind or not self._has_room(request, num_units):
                raise OutOfBlocks(
                    self.num_missing(request, num_units), 0 if behind else self.num_available, retryable=True
                )
            missing = self.num_missing(request, num_units)
        return self.cache.take(Tier.DEVICE, missing)

    def _has_room(self, request: LedgerRequest, num_units: int) -> bool:
        """Whether there is room for tables of `num_units`. If only the request's own pins behind its device hit are in
        the way, it is matched again without them: no request waits for its own pins. Without room, nothing changes."""
        if self.num_missing(request, num_units) <= self.num_available:
            return True
        if request.reserve is None or not request.may_match_again:
            return False
        missing, gained = self.request_leases.without_islands(request, num_units)
        if missing > self.num_available + gained:
            return False
        self.request_leases.match_again(request, islands=False)
        return self.num_missing(request, num_units) <= self.num_available

    # -- the line -------------------------------------------------------------------------------------------------

    def wait_for_allocation(self, waiter: Waiter) -> None:
        """Put `waiter` into the line of allocations, whose head alone keeps its pins. If quarantine has made the pool
        too small for `waiter`, it fails when the line is served next, whatever its place."""
        before = self.queue.allocating[0] if self.queue.allocating else waiter
        self._promised = max(self._promised, self.capacity, self.num_least(waiter))
        waiter.request.waiter = waiter
        self._joins(waiter)
        self.queue.join_allocating(waiter)
        head = self.queue.allocating[0]
        if head is not before:
            self._forget_match(before.request)
        if head is not waiter:
            self._forget_match(waiter.request)

    def _wait_for_extension(self, waiter: Waiter) -> None:
        self._promised = max(self._promised, self.capacity)
        waiter.request.waiter = waiter
        self._joins(waiter)
        self.queue.join_extending(waiter)

    def _joins(self, waiter: Waiter) -> None:
        if self.moves.clock is not None:
            waiter.joined(self.moves.clock())

    def _forget_match(self, request: LedgerRequest) -> None:
        """Release the pins of a request in the line; it is matched again when the line is served next."""
        self.request_leases.forget_match(request)
        if request.waiter is not None:
            request.waiter.changes_seen = -1

    def leave(self, waiter: Waiter) -> None:
        """Give back an unused grant, or give up the place in the line."""
        waiter.request.waiter = None
        if waiter.granted is not None:
            self.cache.give(Tier.DEVICE, waiter.give_back())
        else:
            self.queue.leave(waiter)

    def serve_queue(self, wakes: Iterable[Callable[[], object]] = ()) -> None:
        """Grant what can be granted, in order, then call what wakes the waiters, and `wakes`. The last thing in every
        ledger call that may change room or the line."""
        over: list[Waiter] = []
        if self.queue.allocating or self.queue.extending:
            self._serve(over)
        if self.moves.untold:
            self.moves.tell()
        rest = chain(map(_wake_of, over), wakes)
        try:
            for wake in rest:  # after all decisions: `wake` may call the ledger
                wake()
        except BaseException:
            call_all(rest)
            raise

    def _serve(self, over: list[Waiter]) -> None:
        """Grant what can be granted, and fail waiters that never can be; both are added to `over`."""
        if self.capacity < self._promised:
            self._fail_who_cannot_fit(over)
        self._promised = self.capacity
        while self.queue.extending:
            if not self._serve_extension(self.queue.extending[0], over):
                break
        while self.queue.allocating and not self.queue.extending:
            first = self.queue.allocating[0]
            if not self._serve_allocation(first, over) and not self._serve_alone(first, over):
                return

    def _serve_alone(self, first: Waiter, over: list[Waiter]) -> bool:
        """If only waiters and pins hold room, make room for `first`, the head of the allocations, or fail it. False:
        there are other owners, and `first` waits for them.

        The match of `first` is released before a pin is ended: that may free tombstones, or leave a pin as their last
        reference. If it frees nothing and there is no pin to end, `first` can never fit."""
        if self.others_hold_room():
            return False
        pool = self.cache.tiers[Tier.DEVICE].pool
        before = pool.num_free
        self._forget_match(first.request)
        if pool.num_free == before and not self.yield_pin():
            self.queue.allocating.pop(0)
            first.fail(OutOfBlocks(self.num_needed(first.request, first.num_units), self.capacity, retryable=False))
            over.append(first)
        return True

    def _serve_extension(self, waiter: Waiter, over: list[Waiter]) -> bool:
        """Grant the head of the extensions, or make progress for it. True: serve the head again, which may be another
        one now. False: the head waits."""
        missing = self.num_missing(waiter.request, waiter.num_units)
        if missing > self.num_available and self.queue.allocating:
            self._forget_match(self.queue.allocating[0].request)  # an allocation must not block an extension
        if missing <= self.num_available:
            self.queue.extending.pop(0)
            waiter.grant(self.cache.take(Tier.DEVICE, missing))
            over.append(waiter)
            return True
        if self.others_hold_room():
            return False
        if self.yield_pin():
            return True  # try again: there may be room
        # Only waiters hold room, so no more will come. The one that came last has the least to lose.
        youngest = self.queue.extending.pop()
        youngest.fail(
            OutOfBlocks(self.num_missing(youngest.request, youngest.num_units), self.num_available, retryable=True)
        )
        over.append(youngest)
        return youngest is waiter

    def _serve_allocation(self, waiter: Waiter, over: list[Waiter]) -> bool:
        """Grant the head of the allocations, or fail it if it can never fit. False: it waits."""
        request, device = waiter.request, self.cache.tiers[Tier.DEVICE]
        if waiter.changes_seen == device.num_changes and waiter.num_missing > device.num_available:
            return False  # its match would be the same
        self.request_leases.refresh_match(request)  # in the step that grants
        if self._has_room(request, waiter.num_units):
            self.queue.allocating.pop(0)
            waiter.grant(self.cache.take(Tier.DEVICE, self.num_missing(request, waiter.num_units)))
            over.append(waiter)
            return True
        if (needed := self.num_needed(request, waiter.num_units)) > self.capacity:  # it fitted only with a longer hit
            self.queue.allocating.pop(0)
            waiter.fail(OutOfBlocks(needed, self.capacity, retryable=False))
            over.append(waiter)
            return True
        if not self.cache.layout.windows:  # with windows, host blocks and the request's own pins matter, too
            waiter.num_missing, waiter.changes_seen = self.num_missing(request, waiter.num_units), device.num_changes
        return False

    def num_least(self, waiter: Waiter) -> int:
        """The fewest blocks that the request of `waiter` needs, whatever its hit."""
        if waiter.request.tables:
            return self.num_needed(waiter.request, waiter.num_units)
        return waiter.num_units * self.cache.layout.full.width

    def _fail_who_cannot_fit(self, over: list[Waiter]) -> None:
        """Quarantine took room: fail every waiter that can no longer fit, whatever its place in the line."""
        for queue in (self.queue.extending, self.queue.allocating):
            for waiter in tuple(queue):
                needed = self.num_least(waiter)
                if needed > self.capacity:
                    queue.remove(waiter)
                    waiter.fail(OutOfBlocks(needed, self.capacity, retryable=False))
                    over.append(waiter)
