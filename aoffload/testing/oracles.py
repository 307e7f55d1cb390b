"""The oracles: laws that must hold after every step, and laws that must hold at the end.

Wrong bytes, wrong owners and impossible matches are found where they happen (`memory.py`, `engine.py`). The laws here
are checked by inspecting the ledger from outside.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import attrs

from .._common.tiers import HIT_TIERS, Tier
from .._extensions.assembly import Ledger
from .._kernel.index import stretches
from .._kernel.plans import Completion
from .._kernel.records import Job, LedgerRequest, Run, Waiter
from .._kernel.states import Direction, JobState, Outcome, RequestState
from .._kernel.waiting import WaitQueue
from .._runtime.runtime import AnyRuntime
from ..errors import IntegrityError, OutOfBlocks
from .asks import Ask
from .disk_oracle import DiskOracle
from .faults import Faults
from .line_oracle import LineOracle
from .pin_oracle import PinOracle
from .rest import Rest
from .serving import SimulatedEngine
from .violations import Violation
from .waits import Waits
from .watched import CHANGING, ENDING, REFUSING, WAKING, owner_of

__all__ = ["Oracles"]


@attrs.define(eq=False)
class Oracles:
    """Watches one runtime."""

    runtime: AnyRuntime
    engine: SimulatedEngine
    faults: Faults
    waits: Waits
    keeping: PinOracle
    num_checks: int = 0
    num_timeouts: int = 0
    broken: list[Violation] = attrs.field(factory=list)
    """Violations found inside a call. The first ends the run."""
    stride: int = 1
    """Checks happen after every `stride` changes of the ledger, and always at rest."""
    also: list[Callable[[], None]] = attrs.field(factory=list)
    """Further laws, which are checked with the others."""
    is_hasty: bool = False
    """Whether its timeouts are so short that a copy without a fault may exceed them."""
    is_cut_short: bool = False
    """Whether closing was itself cancelled, so it did not wait for the copies in flight."""
    _given_up: list[Completion] = attrs.field(factory=list)
    """UNPROVEN completions of unsettled jobs."""
    _told_corrupt: set[int] = attrs.field(factory=set)
    """Jobs whose CORRUPT completion reached the ledger. A cancelled worker passes none on."""
    _version: int = 0
    _checked: int = -1
    _line: LineOracle = attrs.field(init=False)
    _disk: DiskOracle = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self._line, self._disk = LineOracle(self.runtime), DiskOracle(self.runtime, self.engine, self.faults)

    @property
    def _is_outside(self) -> bool:
        return bool(self.runtime.ledger.cache.tiers[Tier.DEVICE].is_outside)

    @property
    def _queue(self) -> WaitQueue:
        """The wait queue. It is empty if an engine owns the device blocks."""
        ledger = self.runtime.ledger
        return ledger.admission.queue if isinstance(ledger, Ledger) else WaitQueue()

    def attach(self) -> None:
        """Wrap every call that changes the ledger: count it, and check that a refusal changes no statistics."""
        self.keeping.attach()
        ledger: Any = self.runtime.ledger
        for verb in CHANGING:
            owner, name = owner_of(ledger, verb), verb.rpartition(".")[2]
            if owner is not None:
                setattr(owner, name, self._kept(self._noticed(getattr(owner, name), verb)))
        transport: Any = self.engine.transport
        transport.launch = self._kept(transport.launch)

    def _kept(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """`call`, with its violations recorded, because its caller may suppress every exception."""

        @functools.wraps(call)
        def kept(*args: Any, **kwargs: Any) -> Any:
            try:
                return call(*args, **kwargs)
            except Violation as violation:
                self.broken.append(violation)
                raise

        return kept

    def _noticed(self, call: Callable[..., Any], name: str) -> Callable[..., Any]:
        @functools.wraps(call)
        def noticed(*args: Any, **kwargs: Any) -> Any:
            self._version += 1
            if name == "abandon_load":
                self.num_timeouts += 1
            if name in WAKING and callable(args[-1]):
                args = (*args[:-1], self.waits.watched(args[0], args[-1]))
            before = self.runtime.ledger.statistics() if name in REFUSING else None
            line = self._queue
            extending, allocating = tuple(line.extending), tuple(line.allocating)
            try:
                found = self._call(call, name, args, kwargs)
                self._check_turns(name, extending, allocating)
                if name in ENDING and self.faults.fire("bug"):
                    raise RuntimeError(f"a bug in {name}")
                return found
            except OutOfBlocks as error:
                if before is not None and self.runtime.ledger.statistics() != before:
                    raise Violation("a refusal changed a count", f"{name}: {before} before") from None
                self._check_refusal(name, error)
                raise

        return noticed

    def _call(self, call: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if name == "settle":
            return self._settle(call, args[0])
        had_load = name == "plan_load" and args[0].load is not None
        num_timeouts = self.num_timeouts
        found = call(*args, **kwargs)
        if name == "preemption.preempt":
            self.num_timeouts = num_timeouts  # the request gave up its own load, which is no timeout
        if name == "plan_load" and not had_load and args[0].load is not None:
            self.waits.load_begun(args[0])
        if name == "preemption.resume":
            self.waits.has_resumed(args[0])
        if name in ("admit", "match_again", "fetches.match_again", "preemption.resume"):
            self._check_match(found if name == "admit" else args[0])
        if name == "fetches.fetch":
            self._disk.fetched(found)
        return found

    def _check_refusal(self, name: str, error: OutOfBlocks) -> None:
        """Check that a call is refused free blocks only if other requests wait before it."""
        ledger = self.runtime.ledger
        if not isinstance(ledger, Ledger):
            return
        admission = ledger.admission
        is_behind = admission.queue.extending or (name == "allocate_nowait" and admission.queue.allocating)
        if name.endswith("_nowait") and not is_behind and error.num_needed <= admission.num_available:
            raise Violation(
                "a wait without a need", f"{name} was refused {error.num_needed} of {admission.num_available} blocks"
            )

    def _check_match(self, record: LedgerRequest) -> None:
        """Check that the match is cached now: in every component, the matched tiers have the units that computing reads
        next."""
        for tiers, tier, stop in (
            ((Tier.DEVICE,), Tier.DEVICE, record.published),
            (HIT_TIERS, Tier.HOST, record.hit_stop),
        ):
            if stop and tier in record.leases:
                self._check_held(record, record.leases[tier].run, tiers, stop)

    def _check_held(self, record: LedgerRequest, run: Run, tiers: tuple[Tier, ...], stop: int) -> None:
        for component in self.runtime.ledger.layout.components:
            needed = max(
                component.first_needed(stop * component.unit_tokens), record.given_tokens // component.unit_tokens
            )
            for over, first, last in stretches(run, needed, stop) if component.width else ():
                parts = [over.part(tier, component.number) for tier in tiers]
                if any(len(part.blocks) != (part.stop - part.first) * part.width for part in parts):
                    raise Violation("a match of nothing", f"{record} matched {stop} units, and {over} is there")
                held = {unit for part in parts for unit in range(part.first, part.stop)}
                if not held.issuperset(range(first, last)):
                    raise Violation("a match of nothing", f"{record} matched {stop} units, and {over} is there")

    def _check_turns(self, name: str, extending: tuple[Waiter, ...], allocating: tuple[Waiter, ...]) -> None:
        """Check that extensions are granted before allocations, each in their order, that no newcomer overtakes the
        wait queue, and that the youngest extension gives way."""
        line = self._queue
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
        """Check that a transient failure of a load frees no host block."""
        ledger = self.runtime.ledger
        job = ledger.jobs.unsettled.get(completion.job_id)
        host = ledger.cache.tiers[Tier.HOST].pool
        before = host.num_free
        parked = job.parked if job is not None else None
        if completion.outcome is Outcome.UNPROVEN and job is not None:
            self._given_up.append(completion)
        if completion.outcome is Outcome.CORRUPT and job is not None:
            self._told_corrupt.add(completion.job_id)
        result = call(completion)
        if job is not None and parked is not None and job.parked is not parked:
            raise Violation("settled twice", f"{completion} took the place of {parked}")
        is_transient = completion.outcome in (Outcome.FAILED, Outcome.UNPROVEN, Outcome.REFUSED)
        is_load = job is not None and job.plan.destination is Tier.DEVICE and job.epoch == ledger.cache.epoch
        is_load = is_load and not self.engine.num_resets_of_tiers  # reset blocks are freed with their last reader
        is_load = is_load and not (
            self._is_outside and self.engine.num_invalidations
        )  # likewise: it withdraws from the host
        is_spoiled = any(self.faults.fired[kind] for kind in ("rot", "flip", "early"))  # then bad blocks are freed
        if is_transient and is_load and not is_spoiled and host.num_free != before:
            raise Violation("forgotten for nothing", f"{completion} freed {host.num_free - before} host blocks")
        return result

    # -- after every step -----------------------------------------------------------------------------------------

    def check(self) -> None:
        """Check the conservation laws, and that no request waits while enough blocks are free."""
        if broken := self.broken + self.waits.broken:
            raise broken[0]
        if self._version - self._checked < self.stride and (self.stride > 1 or not self.runtime.ledger.closing):
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
        self.keeping.check()
        self._disk.check()
        self._line.check()
        self._check_timeouts()
        for law in self.also:
            law()

    def _check_counts(self) -> None:
        statistics = self.runtime.ledger.statistics()
        for tier in (statistics.device, statistics.host, *([statistics.disk] if statistics.disk else ())):
            if min(attrs.astuple(tier)) < 0:
                raise Violation("a negative count", repr(tier))

    def _check_jobs(self) -> None:
        """Check that no block is in two stores at a time, that no store follows a gap, and that no load without a claim
        is queued."""
        storing: set[tuple[Tier, int]] = set()
        for job in self.runtime.ledger.jobs.unsettled.values():
            if job.plan.direction is Direction.LOAD:
                if job.state is JobState.QUEUED and not job.claims:
                    raise Violation("a load for nobody", repr(job))
                continue
            sources = {(job.plan.source, block_id) for block_id in job.plan.source_ids}
            if not storing.isdisjoint(sources) and not self._shares_blocks:
                raise Violation("stored twice", repr(job))
            if self._is_behind_a_gap(job):
                raise Violation("a store behind a gap", f"{job} has evicted what it hangs on")
            if job.epoch == self.runtime.ledger.cache.epoch:  # other jobs do not count: they publish nothing
                storing.update(sources)

    @property
    def _shares_blocks(self) -> bool:
        """Whether prefixes that diverge inside a unit may share a block: one of an engine whose blocks are shorter than
        a unit."""
        layout = self.runtime.ledger.layout
        return self._is_outside and any(group.block_size < layout.unit_tokens for group in layout.groups)

    def _is_behind_a_gap(self, job: Job) -> bool:
        """Whether units before this store are neither in host memory nor being stored there. Always False after a copy
        may have failed, after an invalidation, and without LRU eviction."""
        remote = self.engine.transport.remote
        is_lost = remote is not None and remote.num_failed > 0  # a store evicts without a fault
        has_failed = self.faults.fired or self.engine.num_invalidations or self.is_hasty or is_lost
        is_disturbed = has_failed or self.runtime.config.eviction != "lru" or job.plan.source is not Tier.DEVICE
        if is_disturbed or job.epoch != self.runtime.ledger.cache.epoch or job.component:
            return False
        if job.predecessor is not None and not job.predecessor.is_settled:
            return False
        over = stretches(job.run, 0, job.start)
        return any(run.parts[Tier.HOST].stop < stop for run, _, stop in over)

    def _check_pins(self) -> None:
        """Check that a preempted request has no device lease, a running one no host lease, and a matched one has its
        leases."""
        for record in self.runtime.ledger.live_requests.values():
            if record.state is RequestState.PREEMPTED and Tier.DEVICE in record.leases:
                raise Violation("a leak", f"{record} still pins device blocks")
            if record.state is RequestState.RUNNING and (Tier.HOST in record.leases or record.reserve is not None):
                raise Violation("a leak", f"{record} still pins what was to be loaded")
            waits = record.waiter is not None
            matched = record.match.num_tokens > record.given_tokens and record.epoch == self.runtime.ledger.cache.epoch
            if record.state is RequestState.PINNED and matched and not waits and not record.leases:
                raise Violation("a match without a pin", repr(record))

    def _check_timeouts(self) -> None:
        if self.num_timeouts and not (self.faults.may_time_out or self.is_hasty):
            raise Violation("a timeout without a fault", f"{self.num_timeouts} so far")

    # -- at the end -----------------------------------------------------------------------------------------------

    def check_at_rest(self, asks: list[Ask]) -> None:
        """The laws for a runtime that serves no request and copies nothing."""
        self._checked = -self.stride
        self.check()
        rest = Rest(self.runtime, self.engine, self.faults)
        rest.check_empty()
        if not (self.is_cut_short or self.faults.may_take_room or self.is_hasty):
            rest.check_nothing_is_lost()
            if self._given_up:
                raise Violation("given up for nothing", f"{self._given_up[0]}")
        rest.check_proofs()
        rest.check_forgotten(self._told_corrupt)
        self._disk.check_at_rest(self._told_corrupt)
        if not self.is_hasty:
            rest.check_reachable()
        rest.check_hits(asks)
