"""The oracles: what must hold after every step, and what must hold when everything is over.

Wrong bytes, blocks in the wrong hands and matches that cannot be are noticed where they happen (`memory.py`,
`engine.py`); here is what can be seen by looking at the ledger from outside.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import attrs

from ..core.matching import find_hit
from ..core.plan import Tier
from ..core.tokens import TokenSequence
from ..errors import IntegrityError, OutOfBlocks
from ..prefix import Prefix
from ..runtime import OffloadRuntime
from .engine import Ask, SimulatedEngine
from .faults import Faults
from .violations import Violation

__all__ = ["Oracles"]

CHANGING = (
    "admit", "allocate_nowait", "queue_allocation", "extend_nowait", "queue_extension", "accept", "withdraw",
    "plan_load", "abandon_load", "launch", "settle", "discard", "commit", "invalidate", "step", "release", "reset",
)  # fmt: skip
REFUSING = ("allocate_nowait", "extend_nowait", "queue_allocation", "queue_extension")


@attrs.define(eq=False)
class Oracles:
    """Watches one runtime."""

    runtime: OffloadRuntime
    engine: SimulatedEngine
    faults: Faults
    num_checks: int = 0
    num_timeouts: int = 0
    is_cut_short: bool = False
    """Closing was itself cancelled, so it did not wait for the copies in flight."""
    _version: int = 0
    _checked: int = -1

    def attach(self) -> None:
        """Have every call that changes the ledger noticed, and every refusal compared with what was before it."""
        ledger: Any = self.runtime.ledger
        for name in CHANGING:
            setattr(ledger, name, self._noticed(getattr(ledger, name), name))

    def _noticed(self, call: Callable[..., Any], name: str) -> Callable[..., Any]:
        @functools.wraps(call)
        def noticed(*args: Any, **kwargs: Any) -> Any:
            self._version += 1
            if name == "abandon_load":
                self.num_timeouts += 1
            before = self.runtime.ledger.statistics() if name in REFUSING else None
            try:
                return call(*args, **kwargs)
            except OutOfBlocks:
                if before is not None and self.runtime.ledger.statistics() != before:
                    raise Violation("a refusal changed a count", f"{name}: {before} before") from None
                raise

        return noticed

    # -- after every step -----------------------------------------------------------------------------------------

    def check(self) -> None:
        """The laws of conservation, and that nobody waits for what is there."""
        if self._version == self._checked and not self.runtime.ledger._closing:
            return
        self._checked = self._version
        self.num_checks += 1
        try:
            self.runtime.ledger.check_integrity()
        except IntegrityError as error:
            raise Violation("conservation", str(error)) from None
        self._check_counts()
        self._check_line()
        self._check_timeouts()

    def _check_counts(self) -> None:
        statistics = self.runtime.ledger.statistics()
        for tier in (statistics.device, statistics.host):
            if min(attrs.astuple(tier)) < 0:
                raise Violation("a negative count", repr(tier))

    def _check_line(self) -> None:
        admission = self.runtime.ledger.admission
        line = admission.line
        if line.extending:
            first = line.extending[0]
            if admission.num_missing(first.holding, first.num_units) <= admission.room:
                raise Violation("a wait without a need", f"{first} waits and there is room")
            if not admission.others_hold_room():
                raise Violation("a wait without a need", f"{first} waits, and only waiters hold room")
        elif line.allocating:
            first = line.allocating[0]
            present = first.holding.published
            missing = max(0, first.num_units - self._device_hit(first.holding)) * self._width
            if admission.num_missing(first.holding, first.num_units) <= admission.room:
                raise Violation("a wait without a need", f"{first} waits and there is room")
            if missing <= admission.room - self._evictable_of(first.holding, present):
                raise Violation("a wait without a need", f"{first} waits; matched again it would fit")

    @property
    def _width(self) -> int:
        return self.runtime.ledger.layout.width

    def _device_hit(self, holding: Any) -> int:
        cache = self.runtime.ledger.cache
        if holding.epoch != cache.epoch:
            return 0
        limit = min((holding.sequence.num_tokens - 1) // cache.layout.unit_tokens, holding.hit_limit)
        return find_hit(cache.index, holding.sequence, limit).narrow(limit, holding.hit_alignment).device_stop

    def _evictable_of(self, holding: Any, pinned_stop: int) -> int:
        """Blocks of its own hit that it doesn't pin yet: room that it would take away from itself."""
        return max(0, self._device_hit(holding) - pinned_stop) * self._width

    def _check_timeouts(self) -> None:
        if self.num_timeouts and not self.faults.may_time_out:
            raise Violation("a timeout without a fault", f"{self.num_timeouts} so far")

    # -- when everything is over ----------------------------------------------------------------------------------

    def check_at_rest(self) -> None:
        """Nobody is served and nothing is under way: nothing is pinned, waited for or known of any more."""
        self._checked = -1
        self.check()
        found = self.runtime.statistics()
        pinned = (found.device.num_pinned, found.host.num_pinned)
        if (found.num_requests, found.num_waiting, found.num_jobs, *pinned) != (0, 0, 0, 0, 0):
            raise Violation("a leak", f"at rest: {found}")
        if len(self.runtime._requests):
            raise Violation("a leak", f"requests are still known: {list(self.runtime._requests)}")
        if not self.may_quarantine and (found.device.num_quarantined or found.host.num_quarantined):
            raise Violation("a leak", f"quarantined without a fault: {found}")

    @property
    def may_quarantine(self) -> bool:
        return self.is_cut_short or self.faults.may_take_room

    def check_hits(self, asks: list[Ask]) -> None:
        """At rest, exactly what lies in memory hits: the device from the start on, behind it the host."""
        lost_bytes = {"rot", "early", "flip"} & set(self.faults.fired)
        for ask in asks:
            expected = self._expected_hit(ask)
            found = self._found_hit(ask)
            if found != expected and not lost_bytes and not self.engine.num_invalidations:
                raise Violation("what may hit", f"{found} units of {ask.tokens} hit, memory says {expected}")

    def _found_hit(self, ask: Ask) -> tuple[int, int]:
        root = self.runtime._prefix(ask.tokens, ask.salt, ask.adapter, ()).root
        cache = self.runtime.ledger.cache
        sequence = TokenSequence(Prefix.of(root, ask.tokens, ()), cache.layout.unit_tokens)
        hit = find_hit(cache.index, sequence, len(ask.tokens) // cache.layout.unit_tokens)
        return hit.device_stop, hit.stop

    def _expected_hit(self, ask: Ask) -> tuple[int, int]:
        num_units = len(ask.tokens) // self.runtime.ledger.layout.unit_tokens
        device = self._present(ask, Tier.DEVICE, 0, num_units)
        return device, self._present(ask, Tier.HOST, device, num_units)

    def _present(self, ask: Ask, tier: Tier, start: int, stop: int) -> int:
        """Up to where every unit from `start` on is in memory, whole, and in somebody's hands."""
        memory = self.engine.device if tier is Tier.DEVICE else self.engine.transport.host
        quarantined = {
            block_id
            for job in self.runtime.ledger.jobs.quarantined.values()
            if job.plan.destination is tier
            for block_id in job.plan.destination_ids
        }
        for unit in range(start, stop):
            if not all(set(memory.holders(tag)) - quarantined for tag in self._tags_of(ask, unit)):
                return unit
        return stop

    def _tags_of(self, ask: Ask, unit: int) -> list[int]:
        unit_tokens = self.runtime.ledger.layout.unit_tokens
        found: list[int] = []
        for group, config in enumerate(self.runtime.config.groups):
            for end in range(unit * unit_tokens + config.block_size, (unit + 1) * unit_tokens + 1, config.block_size):
                found.append(self.engine.tags.of(self.engine.identity(ask, group, ask.tokens[:end])))
        return found
