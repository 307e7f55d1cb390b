"""Pins: a pin keeps the cached part of a prompt cached until the pin ends.

A pin owns leases, like a request, but computes nothing and waits for nothing. Two rules prevent pins from starving
requests:

- All pins together pin at most `max_share` of each tier. A block that several pins share counts once.
- If the head of the wait queue lacks blocks and only pins could free some, one pin ends (YIELDED). It is the pin with
  the earliest deadline among the pins on blocks that only pins protect.

A pin takes a lease in each tier that holds a part of the prompt: on the device up to the device hit, in the host up to
the end of the hit. In a window, a lease pins the units that the next request for the same prompt needs. That request
computes the last token again, so its hit may be a unit shorter, and its windows begin earlier.

Pins also end at their deadlines. The ledger does not read the time: the caller reads `next_lapse` and calls `lapse`.
"""

from __future__ import annotations

import itertools
import math
from bisect import insort
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import attrs

from .._common.arguments import shown
from .._common.prefix import Prefix
from .._common.tiers import BELOW, HIT_TIERS, Tier
from .._kernel.base import CacheBase, check_time
from .._kernel.events import Event
from .._kernel.extension import LedgerExtension
from .._kernel.index import Hit, find_hit, held_stop, stretches
from .._kernel.plans import NO_MATCH, PrefixMatch
from .._kernel.records import Lease, Part
from .._kernel.states import Plain, State
from .._kernel.tokens import TokenSequence
from ..errors import ExtensionError, InvalidArgument, OutOfBlocks


class PinState(Plain):
    """The states of a pin (docs/lifecycle.md)."""

    NEW = "new"
    HELD = "held"
    RELEASED = "released"
    LAPSED = "lapsed"
    YIELDED = "yielded"
    DROPPED = "dropped"


PIN_MOVES: Mapping[State, frozenset[State]] = {
    PinState.NEW: frozenset({PinState.HELD}),
    PinState.HELD: frozenset({PinState.RELEASED, PinState.LAPSED, PinState.YIELDED, PinState.DROPPED}),
    PinState.RELEASED: frozenset(),
    PinState.LAPSED: frozenset(),
    PinState.YIELDED: frozenset(),
    PinState.DROPPED: frozenset(),
}


@dataclass(slots=True, eq=False, repr=False)
class Pin:
    """A pin of `Pins.hold`. It ends by `release`, by `drop`, by a reset, at its deadline, or by yielding to a
    request."""

    pin_id: int
    sequence: TokenSequence
    expires_at: float
    """The deadline, by the same clock as the times that the caller passes to `Ledger.lapse`."""
    ledger: Any
    state: PinState = PinState.NEW
    match: PrefixMatch = NO_MATCH
    """The cached prefix that the pin protects, or has protected."""
    leases: list[Lease] = field(default_factory=list)
    since_s: float = 0.0
    """The time at which the pin entered its state; 0 if the ledger has no clock."""

    def __repr__(self) -> str:
        return f"<Pin {self.pin_id} {self.state.name} {self.match.num_tokens} tokens>"

    def __str__(self) -> str:
        return f"pin {self.pin_id}"

    @property
    def has_lapsed(self) -> bool:
        """Whether the pin ended at its deadline."""
        return self.state is PinState.LAPSED


@attrs.frozen
class PinMoved(Event):
    """A pin is held, or has ended."""

    pin: Pin
    old: PinState
    new: PinState


@dataclass(slots=True, frozen=True)
class _Wish:
    """A lease to take in `tier`, up to unit `stop`. In each component it begins at the entry in `starts`."""

    tier: Tier
    stop: int
    starts: list[int]


class Pins(LedgerExtension):
    """Keeps cached prompts from eviction (`Ledger.pins`)."""

    def __init__(self) -> None:
        self.held: list[Pin] = []
        """The held pins, by deadline, the earliest first."""
        self.num_pins = 0
        """Pins begun so far."""

    def on_attach(self, ledger: CacheBase) -> None:
        self._ledger, self.cache, self.moves = ledger, ledger.cache, ledger.moves
        self.max_share = ledger.config.max_pinned_share

    # -- the verbs ------------------------------------------------------------------------------------------------

    def hold(self, prefix: Prefix, *, expires_at: float = math.inf) -> Pin:
        """Pin the cached part of `prefix` until `release`, or until `lapse` of the ledger is called with `expires_at`
        or a later time. `OutOfBlocks` if all pins together would pin more than `max_pinned_share` of a tier."""
        pin = self._pin(self._ledger.sequence_of(prefix), expires_at)
        try:
            self._ledger.end_call()
        except ExtensionError:  # the caller gets no pin
            self.release(pin)
            raise
        return pin

    def release(self, pin: Pin) -> None:
        """End a pin. Does nothing if the pin has ended for another reason; a second `release` raises."""
        if not isinstance(pin, Pin) or pin.ledger is not self._ledger:
            raise InvalidArgument("pin", f"was not made by this ledger: {shown(pin)}")
        self._ledger.hooks.refuse_verb()
        if pin.state in (PinState.HELD, PinState.RELEASED):
            self._end(pin, PinState.RELEASED)
            self._ledger.end_call()

    def drop(self) -> None:
        """End every pin (DROPPED)."""
        self._ledger.hooks.refuse_verb()
        self.end_all(PinState.DROPPED)
        self._ledger.end_call()

    # -- pins that end by themselves ------------------------------------------------------------------------------

    def ask_next_lapse(self) -> float:
        return self.held[0].expires_at if self.held else math.inf

    def on_lapse(self, now: float) -> None:
        while self.held and self.held[0].expires_at <= now:
            self._end(self.held[0], PinState.LAPSED)

    def on_resetting(self, tier: Tier | None) -> None:
        if tier is None or tier in HIT_TIERS:  # pins have no leases in other tiers
            self.end_all(PinState.DROPPED)

    def ask_blocks(self) -> bool:
        """End the pin with the earliest deadline among those on device blocks that only pins protect. Returns whether
        there was one."""
        leases = {pin: [lease for lease in pin.leases if lease.tier is Tier.DEVICE] for pin in self.held}
        alone = self.cache.pinned_by_none_but(itertools.chain.from_iterable(leases.values()))
        kept = {part for part in alone if part.blocks or part.tombstones}
        for pin in self.held:
            if any(part in kept for lease in leases[pin] for part in pinned_parts(lease)):
                self._end(pin, PinState.YIELDED)
                return True
        return False

    def on_withdrawn(self) -> None:
        """Each pin on withdrawn blocks takes new leases on the blocks that are still cached, so that the withdrawn
        blocks become free."""
        for pin in self.held:
            if any(part.tombstones for lease in pin.leases for part in pinned_parts(lease)):
                limit = pin.match.num_tokens // self.cache.layout.unit_tokens
                self._let_go(pin)
                self._take(pin, *self._wishes(pin.sequence, limit))

    def report_leases(self) -> Iterator[Lease]:
        for pin in self.held:
            yield from pin.leases

    def grow(self, pin: Pin) -> None:
        """Pin the units of the prompt of `pin` that are cached by now. `OutOfBlocks` changes nothing. May be called
        inside of an `on_` hook."""
        limit = pin.sequence.num_tokens // self.cache.layout.unit_tokens
        hit, wishes = self._wishes(pin.sequence, limit)
        if hit.stop * self.cache.layout.unit_tokens > pin.match.num_tokens:
            self._check_share(hit, wishes, self.held, self.max_share, "max_pinned_share")
            self._let_go(pin)
            self._take(pin, *self._wishes(pin.sequence, limit))

    # -- beginning and end ----------------------------------------------------------------------------------------

    def _pin(self, sequence: TokenSequence, expires_at: object) -> Pin:
        """Pin the cached units of `sequence`. `OutOfBlocks` changes nothing; it is raised if pins would exceed their
        share."""
        expiry = check_time("expires_at", expires_at)
        limit = sequence.num_tokens // self.cache.layout.unit_tokens
        hit, wishes = self._wishes(sequence, limit)
        self._check_share(hit, wishes, self.held, self.max_share, "max_pinned_share")
        self.num_pins += 1
        pin = Pin(self.num_pins, sequence, expiry, self._ledger)
        self._take(pin, hit, wishes)
        insort(self.held, pin, key=lambda held: held.expires_at)
        self._move(pin, PinState.HELD)
        return pin

    def _end(self, pin: Pin, state: PinState) -> None:
        """End `pin` and release its leases."""
        self._move(pin, state)  # first, because it raises if the pin is over
        self.held.remove(pin)
        self._let_go(pin)

    def end_all(self, state: PinState) -> None:
        """End every held pin. No verb: a verb of the ledger calls it."""
        for pin in tuple(self.held):
            self._end(pin, state)

    def _move(self, pin: Pin, state: PinState) -> None:
        old = self.moves.other(pin, state, PIN_MOVES)
        if self.moves.clock is not None:
            pin.since_s = self.moves.clock()
        self.moves.note(PinMoved(pin, old, state))

    # -- leases ---------------------------------------------------------------------------------------------------

    def _wishes(self, sequence: TokenSequence, limit: int) -> tuple[Hit, list[_Wish]]:
        """The hit, and the leases to take. In each tier, the lease ends where the units that the tier holds end."""
        cache = self.cache
        hit = find_hit(cache.index, sequence, cache.layout, limit)
        ends: list[tuple[Tier, int]] = []
        if hit.stop > hit.device_stop:
            ends.append((BELOW, hit.stop))
            if cache.layout.partial:  # the device may hold blocks of windows, or the checkpoint, after the device hit
                ends.append((Tier.DEVICE, hit.stop))
        elif (host_stop := held_stop(cache.layout, hit.path, BELOW, 0, hit.stop)) > 0:
            ends.append((BELOW, host_stop))
        if hit.device_stop:
            ends.append((Tier.DEVICE, hit.device_stop))
        # A request for the same prompt computes the last token, so its hit may be shorter, and its windows may begin
        # earlier.
        again, limit = hit, (sequence.num_tokens - 1) // cache.layout.unit_tokens
        if hit.stop > limit and cache.layout.partial:
            again = find_hit(cache.index, sequence, cache.layout, limit)
        starts = {Tier.DEVICE: again.device_stop or again.stop, BELOW: again.stop}
        return hit, [_Wish(tier, stop, cache.layout.starts(min(stop, starts[tier]))) for tier, stop in ends]

    def _take(self, pin: Pin, hit: Hit, wishes: list[_Wish]) -> None:
        unit = self.cache.layout.unit_tokens
        pin.match = PrefixMatch(hit.device_stop * unit, (hit.stop - hit.device_stop) * unit)
        if not wishes:
            return
        # Pin only the hit, and not units that are published after it later.
        last = self.cache.cut(hit.path[-1], hit.stop)
        for wish in wishes:
            pin.leases.append(self.cache.lease(wish.tier, self.cache.cut(last, wish.stop), wish.starts))

    def _let_go(self, pin: Pin) -> None:
        for lease in pin.leases:
            self.cache.release(lease)
        pin.leases.clear()

    # -- the share ------------------------------------------------------------------------------------------------

    def check_share(self, sequence: TokenSequence, among: Collection[Pin], max_share: float, argument: str) -> None:
        """`OutOfBlocks`, naming `argument`, if the pins `among` and a further one of `sequence` would keep more than
        `max_share` of a tier. Changes nothing."""
        hit, wishes = self._wishes(sequence, sequence.num_tokens // self.cache.layout.unit_tokens)
        self._check_share(hit, wishes, among, max_share, argument)

    def _check_share(
        self, hit: Hit, wishes: list[_Wish], among: Collection[Pin], max_share: float, argument: str
    ) -> None:
        for tier in self.cache.tiers:
            kept = parts_under(lease for pin in among for lease in pin.leases if lease.tier is tier.tier)
            bound = int(tier.pool.num_blocks * max_share)
            num_kept = sum(len(part.blocks) for part in kept)
            added = self._num_added(hit, [wish for wish in wishes if wish.tier is tier.tier], kept)
            if num_kept + added > bound:
                left = max(0, bound - num_kept)
                raise OutOfBlocks(added, left, retryable=added <= bound, argument=argument)

    def _num_added(self, hit: Hit, wishes: list[_Wish], kept: set[Part]) -> int:
        """Number of blocks of one tier that `wishes` would pin and no other pin pins."""
        wanted: dict[Part, range] = {}
        for wish in wishes:
            for component, start in zip(self.cache.layout.components, wish.starts, strict=True):
                for run, first, stop in stretches(hit.path[-1], start, wish.stop):
                    part = run.part(wish.tier, component.number)
                    first, stop = max(first, part.first), min(stop, part.stop)
                    if part not in kept and first < stop:
                        before = wanted.get(part, range(first, stop))
                        wanted[part] = range(min(first, before.start), max(stop, before.stop))
        return sum(len(units) * part.width for part, units in wanted.items())


def parts_under(leases: Iterable[Lease]) -> set[Part]:
    """Every part that `leases`, all of one tier, pin. Walks a path that several leases share only once."""
    found: set[Part] = set()
    for lease in leases:
        first_window = min(lease.starts[1:], default=lease.run.stop)
        for run in lease.run.path():
            parts = run.parts_in(lease.tier)
            if parts[0] in found and run.stop <= first_window:
                break  # so are all parts before it
            found.update([part for part, start in zip(parts, lease.starts, strict=True) if run.start >= start])
    return found


def pinned_parts(lease: Lease) -> Iterator[Part]:
    """Every part that `lease` pins: all parts in full attention, and in a window the parts from its start on."""
    for run in lease.run.path():
        for part, start in zip(run.parts_in(lease.tier), lease.starts, strict=True):
            if run.start >= start:
                yield part
