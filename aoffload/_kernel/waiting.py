"""The wait queue: it decides which waiting request gets device blocks, and when.

No call waits. A request that finds too few free blocks leaves a `Waiter` in the queue. `serve_queue` grants blocks to
waiters; every ledger call that may change the free blocks or the queue ends with it.

**All or nothing.** A waiter gets all blocks that it lacks at once, or none. An allocation holds no blocks while it
waits, so two allocations never wait for each other.

**Order.** There are two lists. A request without block tables waits in the list of allocations (`allocate`). A request
that wants longer tables (`extend`) waits in the list of table extensions, which goes first, because such a request
holds blocks and releases them sooner if it computes on. Table extensions are served in order of arrival, allocations by
ticket, the order of admission: a request whose load fell short gets its old place back. Only the head of a list is
granted, so small requests do not overtake a large one for ever.

**Matches while waiting.** A match leases blocks. Only the head of the allocations keeps its match, which is refreshed
before each decision. The others release theirs, and each is matched again once it is the head. Even the head releases
its match if a table extension lacks blocks.

**Who fails, and who yields.** If the head lacks blocks and an owner outside the queue holds some (a job, a step, a
running request), the head waits, because that owner ends some day and its end serves the queue. Otherwise only waiters
and features such as pins hold blocks, and waiting would never end:

    1. A feature gives up device blocks (`ask_blocks`), such as those of a pin, and the head is served again.
    2. If none does and a table extension is the head, the one that came last fails (`retryable`): it has the least to
       lose, and its request then releases its blocks or is preempted.
    3. If none does and an allocation is the head, the allocation fails: it would not fit even if it were alone.

Quarantine makes the pool smaller. When that happens, every waiter that can no longer fit fails, whatever its place.

**Why the loop ends.** Each turn of the loops in `_serve` takes a waiter out of the queue, makes a feature give up
blocks, or frees tombstones that only the match of the head kept and that no match finds again; otherwise it is the last
turn. No turn adds a waiter, nor anything that a feature keeps.

**The grant comes before the wake.** `granted` or `error` is set, and the waiter has left the queue, before any `wake`
is called, because `wake` may call the ledger. The waiter owns the blocks of its grant until `accept` or `withdraw`.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter

from .._common.arguments import check_int
from .._common.tiers import DEVICE
from ..errors import OutOfBlocks, WrongState
from .cache import PrefixCache
from .events import ExtensionRefused
from .hooks import GuardedHook, Hooks
from .leases import RequestLeases
from .moves import Moves
from .plans import Extension
from .records import LedgerRequest, Waiter, call_all, do_nothing
from .states import ALLOCATED, PINNED, REQUEUED, RUNNING, STRANDED, require


@dataclass(slots=True, eq=False)
class WaitQueue:
    extending: list[Waiter] = field(default_factory=list)
    """In order of arrival."""
    allocating: list[Waiter] = field(default_factory=list)
    """By ticket: in the order of admission."""

    @property
    def is_empty(self) -> bool:
        return not self.extending and not self.allocating


def _ticket(waiter: Waiter) -> int:
    return waiter.request.ticket


def waiting_error(request: LedgerRequest, call: str) -> WrongState:
    """The error that refuses `call` while `request` waits for device blocks."""
    return WrongState(f"{call}: {request} is waiting for blocks already")


_wake_of = attrgetter("wake")


@dataclass(slots=True, eq=False)
class Admission:
    """Decides which request gets device blocks, and when. No call waits, and a refused call takes nothing."""

    cache: PrefixCache
    request_leases: RequestLeases
    moves: Moves
    others_hold_blocks: Callable[[], bool]
    """Whether an owner outside the queue (a job, a step, a request) holds device blocks: its end serves the queue."""
    hooks: Hooks
    queue: WaitQueue = field(default_factory=WaitQueue)
    _promised: int = 0
    """An upper bound of `num_least` of all waiters. If the capacity falls below it, a waiter may no longer fit."""

    # -- verbs ----------------------------------------------------------------------------------------------------

    def allocate_nowait(self, request: LedgerRequest, num_tokens: object = None) -> None:
        """Take blocks for `num_tokens` (None: the prompt), all or nothing; `OutOfBlocks` changes nothing."""
        num_units = self._units_to_allocate(request, num_tokens)
        would_overtake = bool(self.queue.allocating or self.queue.extending)
        missing = self.request_leases.num_fresh(request, request.published, request.hit_stop, num_units)
        if would_overtake or missing > self.cache.tiers[DEVICE].num_available:
            if (error := self._never_fits(request, num_units)) is not None:
                raise error
            if would_overtake or not self._has_blocks(request, num_units):
                missing = self.num_missing(request, num_units)
                raise OutOfBlocks(missing, 0 if would_overtake else self.num_available, retryable=True)
            missing = self.num_missing(request, num_units)
        self.request_leases.start_tables(request, num_units, self.cache.take(DEVICE, missing))
        self.moves.request(request, ALLOCATED)

    def queue_allocation(
        self, request: LedgerRequest, num_tokens: object = None, wake: Callable[[], object] = do_nothing
    ) -> Waiter:
        """Join the queue. `wake` is called once the waiter is granted or failed; then `accept` or `withdraw` it."""
        num_units = self._units_to_allocate(request, num_tokens)
        if (error := self._never_fits(request, num_units)) is not None:
            raise error
        waiter = Waiter(request, num_units, wake)
        self.enqueue(waiter)
        return waiter

    def _units_to_allocate(self, request: LedgerRequest, num_tokens: object) -> int:
        if request.state is not PINNED:
            require(request, "allocate", PINNED)
        if request.waiter is not None:
            raise waiting_error(request, "allocate")
        wanted = request.sequence.num_tokens if num_tokens is None else check_int("num_tokens", num_tokens, 1)
        return max(self.cache.layout.num_units(wanted), request.published)

    def extend_nowait(self, request: LedgerRequest, num_tokens: object) -> Extension:
        """Extend the block tables to `num_tokens` in all; `OutOfBlocks` changes nothing."""
        num_units = self._units_to_extend(request, num_tokens)
        would_overtake, before = bool(self.queue.extending), request.num_units
        missing = self.num_missing(request, num_units)
        if would_overtake or missing > self.num_available:
            error = self._never_fits(request, num_units)
            if error is None:
                error = OutOfBlocks(missing, 0 if would_overtake else self.num_available, retryable=True)
            self.moves.note(ExtensionRefused(request, error.num_needed, error.num_available))
            raise error
        if num_units > before:
            self.request_leases.lengthen_tables(request, num_units, self.cache.take(DEVICE, missing))
        return self._extension(request, before)

    def queue_extension(
        self, request: LedgerRequest, num_tokens: object, wake: Callable[[], object] = do_nothing
    ) -> Waiter:
        """Join the queue for more blocks, ahead of all allocations."""
        num_units = self._units_to_extend(request, num_tokens)
        if (error := self._never_fits(request, num_units)) is not None:
            raise error
        request.waiter = waiter = Waiter(request, num_units, wake)
        if self.moves.clock is not None:
            waiter.joined_s = self.moves.clock()
        self._promised = max(self._promised, self.capacity)
        self.queue.extending.append(waiter)
        return waiter

    def _units_to_extend(self, request: LedgerRequest, num_tokens: object) -> int:
        if request.state is not RUNNING:
            require(request, "extend", ALLOCATED, RUNNING)
        if request.waiter is not None:
            raise waiting_error(request, "extend")
        return self.cache.layout.num_units(check_int("num_tokens", num_tokens, 1))

    def enqueue(self, waiter: Waiter) -> None:
        """Put `waiter` into the queue of allocations, at the place of its ticket. Only the head keeps its match. If
        quarantine has made the pool too small for `waiter`, it fails when the queue is served next."""
        allocating, request = self.queue.allocating, waiter.request
        before = allocating[0] if allocating else waiter
        self._promised = max(self._promised, self.capacity, self.num_least(waiter))
        request.waiter = waiter
        if waiter.joined_s is None and self.moves.clock is not None:
            waiter.joined_s = self.moves.clock()
        insort(allocating, waiter, key=_ticket)
        head = allocating[0]
        if head is not before:
            self._forget_match(before.request)
        if head is not waiter:
            self._forget_match(request)

    def accept(self, waiter: Waiter) -> Extension:
        """Take the blocks that `waiter` was granted, or raise the error that it failed with."""
        request = waiter.request
        if request.waiter is not waiter or not waiter.is_over:
            raise WrongState(f"accept: {waiter} has nothing to accept")
        request.waiter = None
        if waiter.granted is None:
            if request.state is PINNED:
                self.request_leases.match_again(request)
            elif request.state is REQUEUED:
                self.moves.request(request, STRANDED)
            raise waiter.error  # type: ignore[misc]
        before = request.num_units
        if request.may_match_again:
            self.request_leases.start_tables(request, waiter.num_units, waiter.granted)
            self.moves.request(request, ALLOCATED)
        else:
            self.request_leases.lengthen_tables(request, waiter.num_units, waiter.granted)
        return self._extension(request, before)

    def _extension(self, request: LedgerRequest, before: int) -> Extension:
        """The ids added from unit `before` on, and the positions that windows have left since the last `Extension`."""
        layout = self.cache.layout
        added = layout.by_group([table.at(before, request.num_units) for table in request.tables])
        nulled: list[list[int]] = [[] for _ in layout.groups]
        left, request.nulled = request.nulled, []
        for component, start, stop in left:
            for group, positions in layout.positions(component, start, stop):
                nulled[group].extend(positions)
        return Extension(added, nulled)

    def withdraw(self, waiter: Waiter) -> None:
        """Stop waiting: give back an unused grant. The caller serves the queue."""
        request = waiter.request
        if request.waiter is not waiter:
            return
        if request.state is REQUEUED:
            raise WrongState(f"withdraw: {request} has given up its blocks and waits for others (REQUEUED): release it")
        self.leave(waiter)
        if request.state is PINNED:
            self.request_leases.match_again(request)

    def leave(self, waiter: Waiter) -> None:
        """Give back an unused grant, or give up the place in the queue."""
        waiter.request.waiter = None
        if waiter.granted is not None:
            self.cache.give(DEVICE, waiter.granted)
            waiter.granted = array("i")  # the waiter stays over
            return
        allocating = self.queue.allocating
        at = bisect_left(allocating, _ticket(waiter), key=_ticket)
        if at < len(allocating) and allocating[at] is waiter:
            del allocating[at]
        elif waiter in self.queue.extending:
            self.queue.extending.remove(waiter)

    def match_again(self, requests: Iterable[LedgerRequest]) -> None:
        """Match again those of `requests` that have no block tables yet: cached blocks were invalidated. A request in
        the queue is matched when the queue is served; a grant that was not accepted yet goes back.

        All of them release their leases before the first is matched again, because tombstones are freed only when their
        part has no reference, and a new lease is a reference."""
        unread = [request for request in requests if request.may_match_again]
        for request in unread:
            self._forget_match(request)
        for request in unread:
            waiter = request.waiter
            if waiter is None and request.state is PINNED:
                self.request_leases.pin(request)
            elif waiter is not None and waiter.granted is not None:  # granted for a longer hit: too few blocks now
                granted, waiter.granted = waiter.granted, None
                self.cache.give(DEVICE, granted)
                self.enqueue(waiter)

    def _forget_match(self, request: LedgerRequest) -> None:
        """Release the match. If the request is in the queue, it is matched again when the queue is served next."""
        self.request_leases.forget_match(request)
        if request.waiter is not None:
            request.waiter.changes_seen = -1

    # -- serving the queue ----------------------------------------------------------------------------------------

    def serve_queue(self, wakes: Iterable[Callable[[], object]] = ()) -> None:
        """Grant what can be granted, in order, then call the `wake` of each waiter that is over, then `wakes`."""
        if self.queue.allocating or self.queue.extending or wakes:
            over: list[Waiter] = []
            rest = chain(map(_wake_of, over), wakes)
            try:
                if self.queue.allocating or self.queue.extending:
                    self._serve(over)
                self.moves.report()
                for wake in rest:  # after all decisions: `wake` may call the ledger
                    wake()
            except BaseException:
                call_all(rest)
                raise
        else:  # the common case
            self.moves.report()
        if self.hooks.error is not None:
            self.hooks.fail()

    def _serve(self, over: list[Waiter]) -> None:
        """Grant what can be granted, and fail waiters that never can be; both are added to `over`."""
        extending, allocating = self.queue.extending, self.queue.allocating
        device, capacity = self.cache.tiers[DEVICE], self.capacity
        if capacity < self._promised:  # quarantine has made the pool smaller: a waiter may no longer fit
            for waiters in (extending, allocating):
                for waiter in tuple(waiters):
                    if (needed := self.num_least(waiter)) > capacity:
                        waiters.remove(waiter)
                        waiter.error = OutOfBlocks(needed, capacity, retryable=False)
                        over.append(waiter)
        self._promised = capacity

        while extending:
            waiter = extending[0]
            missing = self.num_missing(waiter.request, waiter.num_units)
            if missing > device.num_available and allocating:
                self._forget_match(allocating[0].request)  # an allocation must not block an extension
            if missing <= device.num_available:
                waiter.granted = self.cache.take(DEVICE, missing)
                extending.pop(0)
                over.append(waiter)
                continue
            if self.others_hold_blocks():
                break
            if self._ask_blocks():
                continue
            # Only waiters hold blocks, so no block will become free. The waiter that came last has the least to lose.
            # Once it has failed, the loop ends, because its request now holds blocks outside the queue.
            youngest = extending.pop()
            missing = self.num_missing(youngest.request, youngest.num_units)
            youngest.error = OutOfBlocks(missing, device.num_available, retryable=True)
            over.append(youngest)
            break

        while allocating and not extending:
            waiter = allocating[0]
            request = waiter.request
            if waiter.changes_seen != device.num_changes or waiter.num_missing <= device.num_available:
                self.request_leases.refresh_match(request)  # in the step that grants
                if self._has_blocks(request, waiter.num_units):
                    waiter.granted = self.cache.take(DEVICE, self.num_missing(request, waiter.num_units))
                    allocating.pop(0)
                    over.append(waiter)
                    continue
                if (error := self._never_fits(request, waiter.num_units)) is not None:  # it fitted with a longer hit
                    allocating.pop(0)
                    waiter.error = error
                    over.append(waiter)
                    continue
                if not self.cache.layout.partial:  # else host blocks and the request's own pins matter, too
                    missing = self.num_missing(request, waiter.num_units)
                    waiter.num_missing, waiter.changes_seen = missing, device.num_changes
            if self.others_hold_blocks():
                break
            # Only waiters and pins hold blocks. The head releases its match before a pin ends: that may free
            # tombstones, or leave a pin as their last reference.
            before = device.pool.num_free
            self._forget_match(request)
            if device.pool.num_free == before and not self._ask_blocks():
                allocating.pop(0)
                needed = self.num_needed(request, waiter.num_units)
                waiter.error = OutOfBlocks(needed, capacity, retryable=False)
                over.append(waiter)

    def _ask_blocks(self) -> bool:
        """Ask extensions to free device blocks, because no other owner can. False: none did."""
        device = self.cache.tiers[DEVICE]
        for ask in self.hooks.ask_blocks:
            before = device.num_available
            if ask() and (device.num_available > before or not isinstance(ask, GuardedHook)):
                return True  # a program's extension that has freed nothing would make `_serve` go on for ever
        return False

    # -- counting blocks ------------------------------------------------------------------------------------------

    @property
    def num_available(self) -> int:
        return self.cache.tiers[DEVICE].num_available

    @property
    def capacity(self) -> int:
        return self.cache.tiers[DEVICE].capacity

    def num_missing(self, request: LedgerRequest, num_units: int) -> int:
        """Blocks that tables of `num_units` units still need."""
        if request.tables:
            return max(0, num_units - request.num_units) * self.cache.layout.width
        return self.request_leases.num_fresh(request, request.published, request.hit_stop, num_units)

    def num_needed(self, request: LedgerRequest, num_units: int) -> int:
        """Blocks that tables of `num_units` units need in all: the needed blocks of the device hit count, but no
        block before a window."""
        if request.tables:
            gone = sum(table.start * table.width for table in request.tables)
            return num_units * self.cache.layout.width - gone
        stop, components = request.published, self.cache.layout.components
        fresh = self.request_leases.num_fresh(request, stop, request.hit_stop, num_units)
        return fresh + sum((stop - component.first_unit(stop)) * component.width for component in components)

    def check_could_fit(self, num_tokens: object) -> None:
        """Raise `OutOfBlocks` if no match could make `num_tokens` fit: their full attention alone is too much."""
        needed = self.cache.layout.num_units(check_int("num_tokens", num_tokens, 1)) * self.cache.layout.full.width
        if needed > self.capacity:
            raise OutOfBlocks(needed, self.capacity, retryable=False)

    def num_least(self, waiter: Waiter) -> int:
        """The fewest blocks that the request of `waiter` needs with any hit."""
        if waiter.request.tables:
            return self.num_needed(waiter.request, waiter.num_units)
        return waiter.num_units * self.cache.layout.full.width

    def _never_fits(self, request: LedgerRequest, num_units: int) -> OutOfBlocks | None:
        """The error for a request that could not fit even alone, with its present match; None if it could."""
        needed = self.num_needed(request, num_units)
        if needed > self.capacity and self._hit_is_too_large(request, num_units):
            needed = num_units * self.cache.layout.width
        return OutOfBlocks(needed, self.capacity, retryable=False) if needed > self.capacity else None

    def _hit_is_too_large(self, request: LedgerRequest, num_units: int) -> bool:
        """Whether the tables of `request` never fit together with the checkpoint of its hit."""
        has_one = request.checkpoints is not None and request.hit_stop > 0 and not request.tables
        return has_one and self.num_needed(request, num_units) > self.capacity

    def _has_blocks(self, request: LedgerRequest, num_units: int) -> bool:
        """Whether blocks for tables of `num_units` are available. If only the request's own pins after its device hit
        (`reserve`) are in the way, it is matched again without them: no request waits for its own pins. If the
        checkpoint of its hit takes the room that its tables need, it does without the hit."""
        if self.num_missing(request, num_units) <= self.num_available:
            return True
        if self._hit_is_too_large(request, num_units):
            missing, gained = self.request_leases.without_hit(request, num_units)
            if missing > self.num_available + gained:
                return False
            self.request_leases.match_again(request, reads_cache=False)
            return self.num_missing(request, num_units) <= self.num_available
        if request.reserve is None:
            return False
        missing, gained = self.request_leases.without_islands(request, num_units)
        if missing > self.num_available + gained:
            return False
        self.request_leases.match_again(request, islands=False)
        return self.num_missing(request, num_units) <= self.num_available
