"""The oracle for pins, prefetches and demotions."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import attrs

from .._common.prefix import Prefix
from .._common.tiers import Tier
from .._extensions.assembly import Ledger
from .._extensions.pins import Pin, PinState
from .._extensions.prefetch import Demotion, Prefetch
from .._extensions.transfers import CacheTransferState
from .._kernel.index import Hit, find_hit, held_stop
from .._kernel.records import Part
from .._kernel.states import Direction, JobState
from .._kernel.tokens import TokenSequence
from .._runtime.runtime import AnyRuntime
from .faults import Faults
from .serving import SimulatedEngine
from .violations import Violation

__all__ = ["PinOracle"]

Call = Callable[..., Any]


@attrs.frozen
class _Kept:
    """The part of a prompt that was cached when it was pinned."""

    prefix: Prefix
    num_tokens: int
    """Tokens that the same prompt would have matched."""
    host_stop: int
    """Units that host memory alone could have served."""


@attrs.define(eq=False)
class PinOracle:
    """Watches the pins, prefetches and demotions of one runtime."""

    runtime: AnyRuntime
    engine: SimulatedEngine
    faults: Faults
    now: Callable[[], float]
    _kept: dict[Pin, _Kept] = attrs.field(factory=dict)

    def attach(self) -> None:
        """Wrap the ledger's calls. It must come before every other wrapper, because these checks need the bare
        calls."""
        ledger: Any = self.runtime.ledger
        ledger.pins.hold = self._around(ledger.pins.hold, self._pin)
        ledger.settle = self._around(ledger.settle, self._settle)
        if not isinstance(self.runtime.ledger, Ledger):
            return  # an engine's blocks: there is no queue, and only loads and offers copy to or from them
        ledger.transfers.prefetch = self._around(ledger.transfers.prefetch, self._prefetch)
        ledger.transfers.demote = self._around(ledger.transfers.demote, self._demote)
        for name in ("queue_extension", "release", "withdraw"):
            setattr(ledger, name, self._around(getattr(ledger, name), self._pump))
        ledger.pins.release = self._around(ledger.pins.release, self._pump)
        ledger.hooks.ask_blocks = tuple(self._around(ask, self._yield) for ask in ledger.hooks.ask_blocks)

    @staticmethod
    def _around(call: Call, watch: Call) -> Call:
        return functools.wraps(call)(functools.partial(watch, call))

    # -- pins -----------------------------------------------------------------------------------------------------

    def _pin(self, call: Call, prefix: Prefix, **options: Any) -> Pin:
        kept = self._what_is_there(prefix)
        pin: Pin = call(prefix, **options)
        self._kept[pin] = kept
        for tier in self.runtime.ledger.cache.tiers:
            parts = {part for held in self._held() for part in _parts(held, tier.tier)}
            num_kept = sum(len(part.blocks) for part in parts)
            if num_kept > int(tier.pool.num_blocks * self.runtime.config.max_pinned_share):
                raise Violation("more than its share", f"pins keep {num_kept} blocks of {tier.tier.name}")
        return pin

    def _what_is_there(self, prefix: Prefix) -> _Kept:
        ledger = self.runtime.ledger
        sequence = ledger.sequence_of(prefix)
        hit = find_hit(ledger.cache.index, sequence, ledger.layout, prefix.num_tokens // ledger.layout.unit_tokens)
        return _Kept(prefix, ledger.lookup(prefix).num_tokens, self._in_host(hit))

    def _in_host(self, hit: Hit) -> int:
        """The unit up to which host memory alone could serve `hit`."""
        return held_stop(self.runtime.ledger.layout, hit.path, Tier.HOST, 0, hit.stop)

    def _yield(self, call: Call) -> bool:
        """Check that a pin ends early only if no other holder could free blocks, and that it frees some, unless another
        pin holds the same blocks."""
        admission = self.runtime.ledger.admission
        if admission.others_hold_blocks():
            raise Violation("a pin ended for nothing", "somebody else will let go of room")
        parts = {pin: set(_parts(pin, Tier.DEVICE)) for pin in self._held()}
        room = admission.num_available
        found: bool = call()
        for pin in parts:
            shared = any(parts[pin] & parts[other] for other in self._held())
            if pin.state is PinState.YIELDED and admission.num_available == room and not shared:
                raise Violation("a pin ended for nothing", f"{pin} kept no room from anybody")
        return found

    def _held(self) -> list[Pin]:
        return list(self.runtime.ledger.pins.held)

    def _pump(self, call: Call, *args: Any, **options: Any) -> Any:
        """Check that no extension fails while the end of some pin would free blocks."""
        extending = tuple(self.runtime.ledger.admission.queue.extending)
        result = call(*args, **options)
        for waiter in extending:
            if waiter.error is not None and waiter.error.retryable and (pin := self._in_the_way()):
                raise Violation("starved by a pin", f"{waiter} failed, and {pin} keeps room")
        return result

    def _in_the_way(self) -> Pin | None:
        """A pin whose end would free blocks."""
        ending = Counter(part for pin in self._held() for part in _parts(pin, Tier.DEVICE))
        for pin in self._held():
            for part in _parts(pin, Tier.DEVICE):
                if part.blocks and part.num_references == ending[part]:
                    return pin
        return None

    # -- transfers --------------------------------------------------------------------------------------------------

    def _prefetch(self, call: Call, *args: Any) -> Prefetch:
        ledger = self.runtime.ledger
        has_line = not ledger.admission.queue.is_empty
        prefetch: Prefetch = call(*args)
        if has_line and prefetch.num_blocks:
            raise Violation("out of turn", f"{prefetch} took {prefetch.num_blocks} blocks past a line")
        transfers = ledger.transfers.under_way.values()
        taken = sum(transfer.num_blocks for transfer in transfers if isinstance(transfer, Prefetch))
        # Earlier prefetches may exceed the share if a quarantine has reduced the capacity since.
        if prefetch.num_blocks and taken > int(ledger.admission.capacity * self.runtime.config.max_prefetch_share):
            raise Violation("more than its share", f"prefetches take {taken} blocks")
        return prefetch

    def _demote(self, call: Call, prefix: Prefix, *args: Any) -> Demotion:
        before = self._there(self.runtime.ledger.sequence_of(prefix))
        demotion: Demotion = call(prefix, *args)
        self._check_nothing_is_lost(demotion, before)
        return demotion

    def _settle(self, call: Call, *args: Any) -> Any:
        """Check that a demotion that ends with this completion loses no possible hit."""
        transfers = [one for one in self.runtime.ledger.transfers.under_way.values() if isinstance(one, Demotion)]
        before = [self._there(transfer.request.sequence) for transfer in transfers]
        result = call(*args)
        for transfer, stop in zip(transfers, before, strict=True):
            self._check_nothing_is_lost(transfer, stop)
        return result

    def _there(self, sequence: TokenSequence) -> int:
        """The number of units of `sequence` that could hit."""
        ledger = self.runtime.ledger
        limit = sequence.num_tokens // ledger.layout.unit_tokens
        return find_hit(ledger.cache.index, sequence, ledger.layout, limit).stop

    def _check_nothing_is_lost(self, transfer: Demotion, before: int) -> None:
        now = self._there(transfer.request.sequence)
        if transfer.num_blocks and transfer.is_over and now < before and not self.faults.fired:
            raise Violation("a demotion that loses", f"{transfer}: {now} units hit, {before} did before")

    # -- after every step -----------------------------------------------------------------------------------------

    def check(self) -> None:
        self._check_pins()
        for transfer in self.runtime.ledger.transfers.under_way.values():
            if transfer.state is not CacheTransferState.MOVING:
                raise Violation("a leak", f"{transfer!r} is over and still under way")
        ledger = self.runtime.ledger
        loads = {record.load for record in (*ledger.live_requests.values(), *ledger.transfers.under_way)}
        for job in ledger.jobs.unsettled.values():
            if job.plan.direction is Direction.LOAD and job.state is JobState.QUEUED and job.claims.keys() - loads:
                raise Violation("a load for nobody", f"{job} is queued for a load whose owner is over")

    def _check_pins(self) -> None:
        is_calm = not (self.faults.fired or self.engine.num_invalidations)
        for pin in self._held():
            if self.runtime._session.is_open and pin.expires_at < self.now() and not self.faults.fired:
                raise Violation("a pin past its time", f"{pin!r} was to end at {pin.expires_at}")
            if is_calm:
                self._check_kept(pin, self._kept[pin])

    def _check_kept(self, pin: Pin, kept: _Kept) -> None:
        now = self._what_is_there(kept.prefix)
        if now.num_tokens < kept.num_tokens or now.host_stop < kept.host_stop:
            raise Violation("a pin that keeps nothing", f"{pin!r}: {kept} when it began, {now} now")


def _parts(pin: Pin, tier: Tier) -> Iterator[Part]:
    """Every part that `pin` holds in `tier`."""
    for lease in pin.leases:
        for run in lease.run.path() if lease.tier is tier else ():
            for part, start in zip(run.parts_in(tier), lease.starts, strict=True):
                if run.start >= start:
                    yield part
