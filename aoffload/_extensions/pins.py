"""Pins: the cached part of a prompt stays cached until its pin ends.

A pin owns leases, as a request does, but it computes nothing and waits for nothing. Two rules keep pins from starving
requests:

- All pins together pin at most `max_share` of each tier. A block that several pins share counts once.
- If the head of the wait queue lacks blocks and only pins could free some, a pin ends (YIELDED): the one with the
  earliest deadline among those on blocks that nothing but pins protects.

A pin takes a lease in each tier that holds a part of the prompt: on the device up to the device hit, in the host up to
the end of the hit. In a window, a lease pins the units that the next request for the same prompt needs. That request
computes the last token again, so its hit may be a unit shorter, and its windows begin earlier.

Pins also end by their deadlines. The kernel reads no clock: the caller compares `next_lapse` and calls `lapse`.
"""

from __future__ import annotations

import itertools
from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass, field

from .._arguments import number_of, shown
from .._kernel.cache import PrefixCache
from .._kernel.index import Hit, find_hit, held_stop, stretches
from .._kernel.moves import Moves
from .._kernel.plans import PrefixMatch
from .._kernel.records import Lease, Part
from .._kernel.requests import Pin
from .._kernel.states import BELOW, PinState, Tier
from .._kernel.tokens import TokenSequence
from ..errors import InvalidArgument, OutOfBlocks


@dataclass(slots=True, frozen=True)
class _Wish:
    """A lease to take: in `tier`, up to unit `stop`, and in each window from its entry in `starts` on."""

    tier: Tier
    stop: int
    starts: list[int]


@dataclass(slots=True, eq=False)
class Pins:
    cache: PrefixCache
    moves: Moves
    max_share: float
    pins: list[Pin] = field(default_factory=list)
    """The held pins, by deadline, the earliest first."""
    num_pins: int = 0
    """Pins begun so far."""

    # -- beginning and end ----------------------------------------------------------------------------------------

    def pin(self, sequence: TokenSequence, expires_at: object, ledger: object) -> Pin:
        """Pin the cached part of `sequence`, whole units only. `OutOfBlocks` beyond the share changes nothing."""
        expiry = check_time("expires_at", expires_at)
        limit = sequence.num_tokens // self.cache.layout.unit_tokens
        hit, wishes = self._wishes(sequence, limit)
        self._check_share(hit, wishes)
        self.num_pins += 1
        pin = Pin(self.num_pins, sequence, expiry, ledger)
        self._take(pin, hit, wishes)
        insort(self.pins, pin, key=lambda held: held.expires_at)
        self.moves.pin(pin, PinState.HELD)
        return pin

    def end(self, pin: Pin, state: PinState) -> None:
        """End `pin` and release its leases."""
        self.moves.pin(pin, state)  # first: raises, with nothing changed, if it is over
        self.pins.remove(pin)
        self._let_go(pin)

    def end_all(self, state: PinState) -> None:
        for pin in tuple(self.pins):
            self.end(pin, state)

    def lapse(self, now: object) -> bool:
        """End every pin whose deadline has come. Returns whether there was one."""
        seconds = check_time("now", now)
        before = len(self.pins)
        while self.pins and self.pins[0].expires_at <= seconds:
            self.end(self.pins[0], PinState.LAPSED)
        return len(self.pins) < before

    def yield_one(self) -> bool:
        """End the pin with the earliest deadline among those on device blocks that only pins protect. Returns whether
        there was one."""
        leases = {pin: [lease for lease in pin.leases if lease.tier is Tier.DEVICE] for pin in self.pins}
        alone = self.cache.pinned_by_none_but(itertools.chain.from_iterable(leases.values()))
        kept = {part for part in alone if part.blocks or part.tombstones}
        for pin in self.pins:
            if any(part in kept for lease in leases[pin] for part in pinned_parts(lease)):
                self.end(pin, PinState.YIELDED)
                return True
        return False

    def renew(self) -> None:
        """Called after cached blocks were withdrawn: each pin on tombstones takes new leases on the blocks that are
        left, so that the tombstones are freed."""
        for pin in self.pins:
            if any(part.tombstones for lease in pin.leases for part in pinned_parts(lease)):
                limit = pin.match.num_tokens // self.cache.layout.unit_tokens
                self._let_go(pin)
                self._take(pin, *self._wishes(pin.sequence, limit))

    # -- leases ---------------------------------------------------------------------------------------------------

    def _wishes(self, sequence: TokenSequence, limit: int) -> tuple[Hit, list[_Wish]]:
        """The hit, and the leases to take: in each tier up to the end of the part that the tier holds."""
        cache = self.cache
        hit = find_hit(cache.index, sequence, cache.layout, limit)
        ends: list[tuple[Tier, int]] = []
        if hit.stop > hit.device_stop:
            ends.append((BELOW, hit.stop))
            if cache.layout.windows:  # window blocks that the device holds after the device hit
                ends.append((Tier.DEVICE, hit.stop))
        elif (host_stop := held_stop(cache.layout, hit.path, BELOW, 0, hit.stop)) > 0:
            ends.append((BELOW, host_stop))
        if hit.device_stop:
            ends.append((Tier.DEVICE, hit.device_stop))
        # A request for the same prompt computes the last token: its hit may be shorter, and its windows begin earlier.
        again, limit = hit, (sequence.num_tokens - 1) // cache.layout.unit_tokens
        if hit.stop > limit and cache.layout.windows:
            again = find_hit(cache.index, sequence, cache.layout, limit)
        starts = {Tier.DEVICE: again.device_stop or again.stop, BELOW: again.stop}
        window_starts = cache.layout.window_starts
        return hit, [_Wish(tier, stop, list(window_starts(min(stop, starts[tier])))) for tier, stop in ends]

    def _take(self, pin: Pin, hit: Hit, wishes: list[_Wish]) -> None:
        unit = self.cache.layout.unit_tokens
        pin.match = PrefixMatch(hit.device_stop * unit, (hit.stop - hit.device_stop) * unit)
        if not wishes:
            return
        # Pin the hit exactly, and no units that are published after it later.
        last = self.cache.cut(hit.path[-1], hit.stop)
        for wish in wishes:
            pin.leases.append(self.cache.lease(wish.tier, self.cache.cut(last, wish.stop), wish.starts))

    def _let_go(self, pin: Pin) -> None:
        for lease in pin.leases:
            self.cache.release(lease)
        pin.leases.clear()

    # -- the share ------------------------------------------------------------------------------------------------

    def _check_share(self, hit: Hit, wishes: list[_Wish]) -> None:
        for tier in self.cache.tiers:
            leases = [lease for pin in self.pins for lease in pin.leases if lease.tier is tier.tier]
            kept = {part for lease in leases for part in pinned_parts(lease)}
            bound = int(tier.pool.num_blocks * self.max_share)
            num_kept = sum(len(part.blocks) for part in kept)
            added = self._num_added(hit, [wish for wish in wishes if wish.tier is tier.tier], kept)
            if num_kept + added > bound:
                left = max(0, bound - num_kept)
                raise OutOfBlocks(added, left, retryable=added <= bound, argument="max_pinned_share")

    def _num_added(self, hit: Hit, wishes: list[_Wish], kept: set[Part]) -> int:
        """Blocks of one tier that `wishes` would pin and no other pin pins."""
        wanted: dict[Part, range] = {}
        for wish in wishes:
            for component, start in zip(self.cache.layout.components, (0, *wish.starts), strict=True):
                for run, first, stop in stretches(hit.path[-1], start, wish.stop):
                    part = run.part(wish.tier, component.number)
                    first, stop = max(first, part.first), min(stop, part.stop)
                    if part not in kept and first < stop:
                        before = wanted.get(part, range(first, stop))
                        wanted[part] = range(min(first, before.start), max(stop, before.stop))
        return sum(len(units) * part.width for part, units in wanted.items())


def pinned_parts(lease: Lease) -> Iterator[Part]:
    """Every part that `lease` pins: in full attention all, in a window from its start on."""
    for run in lease.run.path():
        for part, start in zip(run.parts_in(lease.tier), (0, *lease.starts), strict=True):
            if run.start >= start:
                yield part


def check_time(name: str, value: object) -> float:
    seconds = number_of(value)
    if seconds is None:
        raise InvalidArgument(name, f"must be a number of seconds, got {shown(value)}")
    return seconds
