"""The state that a refused call must not change, and the reported events, compared with the ledger."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from aoffload._common.tiers import Tier
from aoffload._extensions.assembly import AnyLedger, Ledger
from aoffload._extensions.overlap import OverlapMoved
from aoffload._extensions.pins import PinMoved, PinState
from aoffload._extensions.transfers import CacheTransferMoved, CacheTransferState
from aoffload._kernel.cache import PrefixCache
from aoffload._kernel.events import Event, JobMoved, RequestMoved
from aoffload._kernel.records import Checkpoints, LedgerRequest, Part
from aoffload._kernel.states import JobState, RequestState
from aoffload._kernel.waiting import WaitQueue
from aoffload._runtime.runtime import AnyRuntime
from aoffload.testing.violations import Violation

__all__ = ["RecordedEvents", "picture"]


def picture(ledger: AnyLedger) -> tuple[Any, ...]:
    """Everything that a call may change, except counters and how the index is cut into runs."""
    wait_queue = ledger.admission.queue if isinstance(ledger, Ledger) else WaitQueue()
    return (
        [
            (tier.pool.num_free, tier.num_cached, tier.num_quarantined, _in_order(tier.order))
            for tier in ledger.cache.tiers
        ],
        ledger.cache.epoch,
        [_of_request(record) for record in ledger.live_requests.values()],
        [(record.request_id, record.num_steps) for record in ledger.closing if record.num_steps],
        [(job.job_id, job.state, len(job.claims)) for job in ledger.jobs.unsettled.values()],
        [(pin.pin_id, pin.state) for pin in ledger.pins.held],
        [(waiter.request.ticket, waiter.num_units) for waiter in (*wait_queue.extending, *wait_queue.allocating)],
        len(ledger.transfers.under_way),
    )


def _in_order(order: Any) -> list[int]:
    return [block_id for part in order for block_id in part.blocks]


def _of_request(record: LedgerRequest) -> tuple[Any, ...]:
    waiter = record.waiter
    return (
        record.request_id, record.state, record.match, record.epoch, record.sequence.num_tokens,
        [table.ids.tobytes() for table in record.tables], record.num_units, record.published, record.ready_stop,
        record.num_computed_tokens, record.has_committed, record.num_steps,
        [(tier, lease.run.stop, list(lease.starts)) for tier, lease in record.leases.items()],
        None if record.reserve is None else record.reserve.run.stop,
        None if waiter is None else (waiter.granted, waiter.error),
        None if record.load is None else sorted(job.job_id for job in record.load.jobs),
        _of_checkpoints(record.checkpoints),
    )  # fmt: skip


def _of_checkpoints(found: Checkpoints | None) -> tuple[Any, ...]:
    if found is None:
        return ()
    ids = (found.incoming, found.resume, found.written)
    return (
        [(at, one.tobytes()) for at, one in found.planned.items()],
        [one.tobytes() for one in ids],
        [*found.published],
    )


class RecordedEvents:
    """Remembers what it was told, as an observer and as a watcher of blocks."""

    def __init__(self) -> None:
        self.states: dict[Any, Any] = {}
        """The last reported state of everything that is not over."""
        self.counts: Counter[str] = Counter()
        self.num_cached: Counter[tuple[Tier, int]] = Counter()
        """Cached units as reported, by tier and component."""
        self._epoch = 0
        self.problem = ""
        self.answered: Callable[[LedgerRequest], None] = lambda record: None
        """Called when a request got its blocks, or when its load is over."""

    def observe(self, event: Event) -> None:
        match event:
            case RequestMoved(record, old, new):
                self._moved(record, old, new, RequestState.QUEUED, (RequestState.DONE, RequestState.ABORTED))
                is_loaded = new is RequestState.RUNNING and old in (RequestState.LOADING, RequestState.DRAINING)
                if new is RequestState.ALLOCATED or is_loaded:
                    self.answered(record)
            case JobMoved(job, old_job, new_job):
                last = (JobState.COMPLETED, JobState.FAILED, JobState.DISCARDED)
                self._moved(job, old_job, new_job, JobState.QUEUED, last)
            case PinMoved(pin, old_pin, new_pin):
                ends = tuple(state for state in PinState if state is not PinState.HELD)
                self._moved(pin, old_pin, new_pin, PinState.NEW, ends)
            case CacheTransferMoved(transfer, old_one, new_one):
                over = (CacheTransferState.DONE, CacheTransferState.CANCELLED)
                self._moved(transfer, old_one, new_one, CacheTransferState.NEW, over)
            case OverlapMoved():
                self.counts[event.new.value] += 1

    def _moved(self, entity: Any, old: Any, new: Any, first: Any, last: tuple[Any, ...]) -> None:
        self.counts[new.value] += 1
        if self.states.get(entity, first) is not old:
            self.problem = self.problem or f"{entity} left {old}, and was told to be {self.states.get(entity)}"
        self.states[entity] = new
        if new in last:
            del self.states[entity]

    # -- as a watcher of blocks -----------------------------------------------------------------------------------

    def part_changed(self, part: Part, first: int, stop: int) -> None:
        if part.run.epoch == self._epoch:
            self.num_cached[part.tier, part.component] += (part.stop - part.first) - (stop - first)

    def all_cleared(self, epoch: int) -> None:
        self._epoch = epoch
        self.num_cached.clear()

    # -- compared with the ledger ---------------------------------------------------------------------------------

    def check(self, runtime: AnyRuntime) -> None:
        """The reported states and counts are those of the ledger."""
        if self.problem:
            raise Violation("told otherwise", self.problem)
        for record in runtime.ledger.live_requests.values():
            if self.states.get(record) is not record.state:
                raise Violation("told otherwise", f"{record!r} was told to be {self.states.get(record)}")
        cached = _cached(runtime.ledger.cache)
        if +cached != +self.num_cached:
            raise Violation("told otherwise", f"units cached, by part: {dict(cached)}, told: {dict(self.num_cached)}")


def _cached(cache: PrefixCache) -> Counter[tuple[Tier, int]]:
    found: Counter[tuple[Tier, int]] = Counter()
    for run in cache.index.runs.values():
        for part in run.parts:
            found[part.tier, part.component] += (part.stop - part.first) if part.width else 0
    return found
