"""The oracles: what must hold after every step, and what must hold when everything is over.

Wrong bytes, blocks in the wrong hands and matches that cannot be are noticed where they happen (`memory.py`,
`engine.py`); here is what can be seen by looking at the ledger from outside.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import attrs

from ..core.lifecycle import JobState, RequestState
from ..core.matching import find_hit
from ..core.plan import Completion, Direction, Outcome, Tier
from ..core.tokens import TokenSequence
from ..core.waiting import Waiter
from ..errors import IntegrityError, OutOfBlocks
from ..runtime import OffloadRuntime
from .engine import Ask, SimulatedEngine
from .faults import Faults
from .transport import SimulatedTransport
from .violations import Violation

__all__ = ["Oracles"]

CHANGING = (
    "admit", "allocate_nowait", "queue_allocation", "extend_nowait", "queue_extension", "accept", "withdraw",
    "plan_load", "abandon_load", "launch", "settle", "discard", "commit", "invalidate", "step", "release", "reset",
    "pin", "unpin", "lapse", "drop_pins", "prefetch", "demote", "cancel", "cancel_errands",
)  # fmt: skip
REFUSING = ("allocate_nowait", "extend_nowait", "queue_allocation", "queue_extension", "pin")


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
            line = self.runtime.ledger.admission.line
            extending, allocating = tuple(line.extending), tuple(line.allocating)
            try:
                found = self._settle(call, args[0]) if name == "settle" else call(*args, **kwargs)
                self._check_turns(name, extending, allocating)
                return found
            except OutOfBlocks:
                if before is not None and self.runtime.ledger.statistics() != before:
                    raise Violation("a refusal changed a count", f"{name}: {before} before") from None
                raise

        return noticed

    def _check_turns(self, name: str, extending: tuple[Waiter, ...], allocating: tuple[Waiter, ...]) -> None:
        """Extensions before allocations, each in its order; nobody new before them; the youngest gives way."""
        line = self.runtime.ledger.admission.line
        if name == "allocate_nowait" and (extending or allocating):
            raise Violation("out of turn", "room was taken past a line")
        waits_on = [waiter for waiter in extending if waiter in line.extending]
        if waits_on and any(waiter.granted is not None and waiter.granted for waiter in allocating):
            raise Violation("out of turn", f"an allocation was granted before {waits_on[0]}")
        for queue, now in ((extending, line.extending), (allocating, line.allocating)):
            granted = [index for index, waiter in enumerate(queue) if waiter.granted]
            if granted and any(waiter in now for waiter in queue[: granted[-1]]):
                raise Violation("out of turn", f"{queue[granted[-1]]} was granted before another")
        for index, waiter in enumerate(extending):
            if waiter.error is not None and waiter.error.retryable and any(w in waits_on for w in extending[index:]):
                raise Violation("out of turn", f"{waiter} gave way before a younger one")

    def _settle(self, call: Callable[..., Any], completion: Completion) -> Any:
        """A transient failure of a load forgets nothing that is in host memory."""
        ledger = self.runtime.ledger
        job = ledger.jobs.unsettled.get(completion.job_id)
        host = ledger.cache.tiers[Tier.HOST].pool
        before = host.num_free
        result = call(completion)
        is_transient = completion.outcome in (Outcome.FAILED, Outcome.UNPROVEN)
        is_load = job is not None and job.plan.direction is Direction.LOAD and job.epoch == ledger.cache.epoch
        is_spoiled = any(self.faults.fired[kind] for kind in ("rot", "flip", "early"))  # what is bad goes when it may
        if is_transient and is_load and not is_spoiled and host.num_free != before:
            raise Violation("forgotten for nothing", f"{completion} freed {host.num_free - before} host blocks")
        return result

    def check_launch(self, transport: SimulatedTransport) -> None:
        """Nothing is launched by a runtime that closes, nor above its bounds; a job above the bound goes alone."""
        if not self.runtime._is_open:
            raise Violation("launched while closing", repr(self.runtime))
        config, num_bytes = self.runtime.config, self.runtime.worker._num_bytes
        in_flight = sum(copy.plan.num_blocks for copy in transport.in_flight.values()) * transport.block_bytes
        if self.faults.fired:
            return
        if len(transport.in_flight) >= config.max_jobs_in_flight:
            raise Violation("too much in flight", f"{len(transport.in_flight)} jobs before this one")
        if transport.in_flight and num_bytes > config.bytes_in_flight:
            raise Violation("too much in flight", f"{num_bytes} bytes with this one, {in_flight} before it")

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
        self._check_jobs()
        self._check_pins()
        self._check_line()
        self._check_timeouts()

    def _check_counts(self) -> None:
        statistics = self.runtime.ledger.statistics()
        for tier in (statistics.device, statistics.host):
            if min(attrs.astuple(tier)) < 0:
                raise Violation("a negative count", repr(tier))

    def _check_jobs(self) -> None:
        """Nothing is stored twice at a time, and no load is queued that nobody waits for."""
        storing: set[int] = set()
        for job in self.runtime.ledger.jobs.unsettled.values():
            if job.plan.direction is Direction.LOAD:
                if job.state is JobState.QUEUED and not job.claims:
                    raise Violation("a load for nobody", repr(job))
            elif not storing.isdisjoint(job.plan.source_ids):
                raise Violation("stored twice", repr(job))
            elif job.epoch == self.runtime.ledger.cache.epoch:  # what is doomed may be computed, and stored, again
                storing.update(job.plan.source_ids)

    def _check_pins(self) -> None:
        """Host pins end when the load does."""
        for holding in self.runtime.ledger.holdings.values():
            if holding.state is RequestState.RUNNING and (Tier.HOST in holding.leases or holding.reserve is not None):
                raise Violation("a leak", f"{holding} still pins what was to be loaded")
            waits = holding.waiter is not None
            matched = holding.match.num_tokens and holding.epoch == self.runtime.ledger.cache.epoch
            if holding.state is RequestState.PINNED and matched and not waits and not holding.leases:
                raise Violation("a match without a pin", repr(holding))

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
        return find_hit(cache.index, holding.sequence, cache.layout, limit, holding.hit_alignment).device_stop

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
        if found.num_pins or self.runtime.ledger._errands.under_way:
            raise Violation("a leak", f"at rest: {found.num_pins} pins, {list(self.runtime.ledger._errands.under_way)}")
        if len(self.runtime._requests):
            raise Violation("a leak", f"requests are still known: {list(self.runtime._requests)}")
        if not self.may_quarantine and (found.device.num_quarantined or found.host.num_quarantined):
            raise Violation("a leak", f"quarantined without a fault: {found}")

        self._check_proofs()
        self._check_reachable()

    def _check_proofs(self) -> None:
        """Whose end was proven, however late, is in quarantine no more; what was found corrupt is forgotten."""
        ledger, transport = self.runtime.ledger, self.engine.transport
        worker = self.runtime.worker
        ignored = transport.proven & (set(ledger.jobs.quarantined) | worker._overdue)
        if worker._num_bytes or worker._in_flight:
            raise Violation("a leak", f"{worker._num_bytes} bytes count as in flight")
        if ignored:
            raise Violation("a proof was ignored", f"jobs {sorted(ignored)}")
        kept = [b for b, generation in transport.corrupt if self._is_findable(b, generation)]
        if kept:
            raise Violation("a bad entry was kept", f"host blocks {kept}")

    def _is_findable(self, host_id: int, generation: int) -> bool:
        host = self.engine.transport.host
        return host.is_owned[host_id] and host.generation[host_id] == generation

    def _check_reachable(self) -> None:
        """Unless something failed: a prefix loses its tail before its head, so no tier holds a tail without one."""
        if self.faults.fired or self.engine.num_invalidations:
            return
        for run in self.runtime.ledger.cache.index.runs.values():
            for tier in Tier:
                before = run.before.parts[tier] if run.before is not None else None
                if run.parts[tier].blocks and before is not None and before.stop < before.run.stop:
                    raise Violation("a tail without its head", f"{run} behind {run.before}")

    @property
    def may_quarantine(self) -> bool:
        return self.is_cut_short or self.faults.may_take_room

    def check_hits(self, asks: list[Ask]) -> None:
        """At rest, exactly what lies in memory hits: the device from the start on, behind it the host."""
        lost_bytes = {"rot", "early", "flip"} & set(self.faults.fired)
        for ask in asks:
            expected = self._expected_hit(ask)
            found = self._found_hit(ask)
            if lost_bytes or self.engine.num_invalidations:
                continue
            # Without full attention nothing may be needed for a hit, but that somebody has had these tokens.
            is_right = found == expected if self.runtime.ledger.layout.spine.width else found <= expected
            if not is_right:
                raise Violation("what may hit", f"{found} units of {ask.tokens} hit, memory says {expected}")

    def _found_hit(self, ask: Ask) -> tuple[int, int]:
        cache = self.runtime.ledger.cache
        prefix = self.runtime._prefix(ask.tokens, ask.salt, ask.adapter, ask.key_spans)
        sequence = TokenSequence(prefix, cache.layout.unit_tokens)
        hit = find_hit(cache.index, sequence, cache.layout, len(ask.tokens) // cache.layout.unit_tokens)
        return hit.device_stop, hit.stop

    def _expected_hit(self, ask: Ask) -> tuple[int, int]:
        """By a search over all lengths."""
        ends = range(len(ask.tokens) // self.runtime.ledger.layout.unit_tokens, -1, -1)
        held = {tier: self._held(ask, tier) for tier in Tier}
        stop = next(end for end in ends if self._may_end(end, held, tuple(Tier)))
        return next(end for end in range(stop, -1, -1) if self._may_end(end, held, (Tier.DEVICE,))), stop

    def _may_end(self, stop: int, held: dict[Tier, set[tuple[int, int]]], tiers: tuple[Tier, ...]) -> bool:
        """Whether each group has what it needs of the first `stop` units: of full attention the device from the start
        on and the host behind it, of the others anywhere."""
        layout = self.runtime.ledger.layout
        needed = [
            (group, unit)
            for group, (band, _) in enumerate(layout.places)
            for unit in range(layout.bands[band].first_needed(stop * layout.unit_tokens), stop)
        ]
        if not all(any(place in held[tier] for tier in tiers) for place in needed):
            return False
        spine = [group for group, (band, _) in enumerate(layout.places) if not band]
        on_device = [all((group, unit) in held[Tier.DEVICE] for group in spine) for unit in range(stop)]
        near = on_device.index(False) if False in on_device else stop
        behind = [(group, unit) for group in spine for unit in range(near, stop)]
        return not behind or (Tier.HOST in tiers and held[Tier.HOST].issuperset(behind))

    def _held(self, ask: Ask, tier: Tier) -> set[tuple[int, int]]:
        """The units of each group that are in memory, whole, and in somebody's hands."""
        memory = self.engine.device if tier is Tier.DEVICE else self.engine.transport.host
        quarantined = {
            block_id
            for job in self.runtime.ledger.jobs.quarantined.values()
            if job.plan.destination is tier
            for block_id in job.plan.destination_ids
        }
        layout = self.runtime.ledger.layout
        return {
            (group, unit)
            for group in range(len(layout.groups))
            for unit in range(len(ask.tokens) // layout.unit_tokens)
            if all(set(memory.holders(tag)) - quarantined for tag in self._tags_of(ask, group, unit))
        }

    def _tags_of(self, ask: Ask, group: int, unit: int) -> list[int]:
        layout = self.runtime.ledger.layout
        size = layout.groups[group].block_size
        ends = range(unit * layout.unit_tokens + size, (unit + 1) * layout.unit_tokens + 1, size)
        return [self.engine.tags.of(self.engine.identity(ask, group, ask.tokens[:end])) for end in ends]
