"""The log: one structlog event for every state change and every settled job (docs/tracing.md lists them).

`LedgerLog` is an observer: it writes the events of a ledger and of its copy queue. `Telemetry` adds the events that
only a runtime has, such as the opening of a disk. These are method calls, because no ledger reports them.

`loggers` says which loggers there may be. A filtered event costs one check of its level.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from traceback import format_exception
from typing import Any, Concatenate, ParamSpec, TypeVar

import attrs

from .._common.tiers import Tier
from .._eviction.status import EvictionSwitched
from .._extensions.assembly import AnyLedger, check_ledger
from .._extensions.hints import HintAnswered
from .._extensions.overlap import OverlapMoved, OverlapState
from .._extensions.pins import PinMoved, PinState
from .._extensions.prefetch import Demotion, Prefetch
from .._extensions.quotas import QuotaCleared, QuotaReached
from .._extensions.status import SlowStep, SlowWait
from .._extensions.transfers import CacheTransferMoved, CacheTransferState, Fetch
from .._extensions.weights import WeightsChanged
from .._host_cache.events import LoadsPaused, LoadsResumed
from .._kernel.events import (
    CacheTurnedOff,
    Event,
    ExtensionRefused,
    JobMoved,
    RequestCancelled,
    RequestMoved,
    StepBegun,
    StepEnded,
    StoreSkipped,
    TransportRecovered,
    TransportStalled,
    WorkerFailed,
)
from .._kernel.plans import PrefixMatch
from .._kernel.states import JobState, Outcome, RequestState
from .._transfer.breaker import Closed, StorageMove
from .._transfer.transport import PinProgress
from .loggers import bound_logger, takes_exceptions

_REQUEST_EVENTS = {state: f"request_{state.value}" for state in RequestState}
_JOB_EVENTS = {state: f"job_{state.value}" for state in JobState}
_PIN_EVENTS = {state: f"pin_{state.value}" for state in PinState}
_PREFETCH_EVENTS = {state: f"prefetch_{state.value}" for state in CacheTransferState}
_DEMOTION_EVENTS = {state: f"demotion_{state.value}" for state in CacheTransferState}
_FETCH_EVENTS = {state: f"fetch_{state.value}" for state in CacheTransferState}
_OVERLAP_EVENTS = {state: f"load_overlap_{state.value}" for state in OverlapState}
_DEBUG, _INFO, _WARNING = 10, 20, 30
_REQUEST_LEVELS = {**dict.fromkeys(RequestState, _DEBUG), RequestState.DONE: _INFO, RequestState.ABORTED: _INFO}
_LEVELS: dict[type[Event], int] = dict.fromkeys(
    (StoreSkipped, CacheTransferMoved, StepBegun, StepEnded, ExtensionRefused, HintAnswered), _DEBUG
)
"""Events that always have this level. A filtered one costs one check."""
_JOB_LEVELS = {**dict.fromkeys(JobState, _DEBUG), JobState.FAILED: _WARNING}


Arguments = ParamSpec("Arguments")
Log = TypeVar("Log", bound="LedgerLog")


def harmless(report: Callable[Concatenate[Log, Arguments], None]) -> Callable[Concatenate[Log, Arguments], None]:
    """Suppress exceptions of the logger (a full disk, for example), because the ledger reports in the middle of a
    change."""

    @functools.wraps(report)
    def guarded(self: Log, /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> None:
        try:
            report(self, *args, **kwargs)
        except BaseException:  # noqa: BLE001 - counted; must not reach the ledger
            self.num_lost_events += 1

    return guarded


def _below_host(found: PrefixMatch) -> dict[str, int]:
    """The tokens that a fetch would add. Most logs come from runtimes without tiers below the host, and omit the
    field."""
    return {"num_disk_tokens": found.num_lower_tokens} if found.num_lower_tokens else {}


def _request_moved(log: Any, event: RequestMoved) -> None:
    state, match = event.new, event.match
    name, about = _REQUEST_EVENTS[state], event.request.request_id
    if state is RequestState.MATCHED:
        log.debug(
            name,
            request_id=about,
            num_tokens=event.request.sequence.num_tokens,
            num_device_tokens=match.num_device_tokens,
            num_host_tokens=match.num_host_tokens,
            answer=match.answer.value,
            **_below_host(match),
        )
    elif state is RequestState.ALLOCATED:  # a request that waited for blocks was matched again at the grant
        log.debug(
            name,
            request_id=about,
            num_blocks=event.num_blocks,
            num_device_tokens=match.num_device_tokens,
            num_host_tokens=match.num_host_tokens,
            **_below_host(match),
        )
    elif state is RequestState.RUNNING:
        ready, lost = event.num_computed_tokens, event.num_lost_tokens
        log.debug(name, request_id=about, num_ready_tokens=ready, num_lost_tokens=lost)
    elif state is RequestState.DONE:
        log.info(name, request_id=about, num_computed_tokens=event.num_computed_tokens)
    elif state is RequestState.ABORTED:
        log.info(name, request_id=about, reason=event.reason, previous=event.old.value)
    else:
        log.debug(name, request_id=about)


def _job_moved(log: Any, event: JobMoved) -> None:
    plan, completion = event.job.plan, event.job.completion
    name = _JOB_EVENTS[event.new]
    about: dict[str, Any] = {
        "job_id": plan.job_id,
        "direction": plan.direction.value,
        "source": plan.source.name.lower(),
        "destination": plan.destination.name.lower(),
        "num_blocks": plan.num_blocks,
        "request_id": event.job.request_id,
    }
    if completion is not None and event.new is not JobState.LAUNCHED:
        about |= {"outcome": completion.outcome.value, "num_bytes": completion.num_bytes}
        about["duration_s"] = round(completion.duration_s, 6)
    if event.new is JobState.FAILED:
        # Refused copies are not logged: `storage_left_alone` has given the reason, and there may be one for each cell.
        is_refused = completion is not None and completion.outcome is Outcome.REFUSED
        write = log.debug if is_refused else log.warning
        write(name, error=completion.error if completion is not None else "", **about)
    else:
        log.debug(name, **about)


def _store_skipped(log: Any, event: StoreSkipped) -> None:
    request_id = "" if event.request is None else event.request.request_id
    log.debug("store_skipped", request_id=request_id, num_blocks=event.num_blocks, reason=event.reason)


def _pin_moved(log: Any, event: PinMoved) -> None:
    write = log.info if event.new in (PinState.YIELDED, PinState.DROPPED) else log.debug
    write(_PIN_EVENTS[event.new], pin_id=event.pin.pin_id, num_tokens=event.pin.match.num_tokens)


def _cache_transfer_moved(log: Any, event: CacheTransferMoved) -> None:
    transfer, name = event.transfer, event.transfer.request.request_id
    if isinstance(transfer, Prefetch):
        about = {"num_blocks": transfer.num_blocks, "num_tokens": transfer.num_tokens}
        log.debug(_PREFETCH_EVENTS[event.new], request_id=name, **about)
    elif isinstance(transfer, Demotion):
        log.debug(_DEMOTION_EVENTS[event.new], request_id=name, num_blocks=transfer.num_blocks)
    elif isinstance(transfer, Fetch):
        waiter = {} if transfer.for_request is None else {"waiter": transfer.for_request.request_id}
        log.debug(_FETCH_EVENTS[event.new], request_id=name, num_blocks=transfer.num_blocks, **waiter)


def _overlap_moved(log: Any, event: OverlapMoved) -> None:
    write = log.info if event.new is OverlapState.INVALID else log.debug
    overlap = event.overlap
    write(_OVERLAP_EVENTS[event.new], request_id=overlap.request.request_id, num_tokens=overlap.num_tokens)


def _step_begun(log: Any, event: StepBegun) -> None:
    ids = [request.request_id for request in event.step.requests]
    log.debug("step_begun", step_id=event.step.step_id, request_ids=ids, num_blocks=event.num_blocks)


def _extension_refused(log: Any, event: ExtensionRefused) -> None:
    free = {"num_needed": event.num_needed, "num_available": event.num_available}
    log.debug("extension_refused", request_id=event.request.request_id, **free)


def _eviction_switched(log: Any, event: EvictionSwitched) -> None:
    tier = event.tier
    log.info(
        "eviction_switched",
        tier=tier.tier.name.lower(),
        order=tier.rule.value,
        learned_hits=round(tier.learned_hits, 1),
        lru_hits=round(tier.lru_hits, 1),
        num_switches=tier.num_switches,
        num_evicted_learned=tier.num_evicted_learned,
        num_evicted_lru=tier.num_evicted_lru,
    )


def _hint_answered(log: Any, event: HintAnswered) -> None:
    log.debug(
        "hint_answered",
        verb=event.verb.value,
        outcome=event.outcome.value,
        reason=event.reason.value,
        num_tokens=event.num_tokens,
    )


def _slow_wait(log: Any, event: SlowWait) -> None:
    status = event.status
    biggest = f"{status.held_by[0].kind} {status.held_by[0].name}" if status.held_by else "nobody"
    log.warning(
        "slow_wait",
        request_id=status.request_id,
        num_blocks=status.num_missing,
        waited_s=round(status.waited_s or 0.0, 3),
        place=status.place,
        holder=biggest,
        holders=[str(holder) for holder in status.held_by],
    )


def _slow_step(log: Any, event: SlowStep) -> None:
    step = event.step
    log.warning(
        "slow_step",
        step_id=int(step.name),
        num_blocks=step.num_blocks,
        open_s=round(step.age_s or 0.0, 3),
        request_ids=list(step.request_ids),
        over=list(step.over),
    )


def _link(event: TransportStalled | TransportRecovered) -> dict[str, str]:
    return {"source": event.source.name.lower(), "destination": event.destination.name.lower()}


def _worker_failed(log: Any, event: WorkerFailed) -> None:
    # As text, because not every logger can format an exception. `logging` can, and gets it, too.
    about = {"exc_info": event.error} if takes_exceptions(log) else {}
    log.error("worker_failed", error=repr(event.error), traceback="".join(format_exception(event.error)), **about)


WRITERS: dict[type[Event], Callable[[Any, Any], None]] = {
    RequestMoved: _request_moved,
    JobMoved: _job_moved,
    StoreSkipped: _store_skipped,
    PinMoved: _pin_moved,
    CacheTransferMoved: _cache_transfer_moved,
    OverlapMoved: _overlap_moved,
    LoadsPaused: lambda log, event: log.error("loads_paused", num_quarantined=event.num_quarantined),
    LoadsResumed: lambda log, event: log.warning("loads_resumed", num_quarantined=event.num_quarantined),
    StepBegun: _step_begun,
    StepEnded: lambda log, event: log.debug("step_ended", step_id=event.step.step_id, over=list(event.over)),
    ExtensionRefused: _extension_refused,
    EvictionSwitched: _eviction_switched,
    WeightsChanged: lambda log, event: log.info("weights_changed", old=event.previous, new=event.epoch),
    QuotaReached: lambda log, event: log.info(
        "quota_reached", account=event.account, tier=event.tier.name.lower(), limit=event.limit
    ),
    QuotaCleared: lambda log, event: log.info("quota_cleared", account=event.account, tier=event.tier.name.lower()),
    HintAnswered: _hint_answered,
    RequestCancelled: lambda log, event: log.info(
        "request_cancelled", request_id=event.request.request_id, reason=event.reason
    ),
    SlowWait: _slow_wait,
    SlowStep: _slow_step,
    TransportStalled: lambda log, event: log.error("transport_stalled", **_link(event), num_jobs=event.num_jobs),
    TransportRecovered: lambda log, event: log.warning("transport_recovered", **_link(event)),
    WorkerFailed: _worker_failed,
    CacheTurnedOff: lambda log, event: log.error("cache_turned_off", reason=event.reason),
}
"""The function that writes each event. Other events are not logged."""


class LedgerLog:
    """An observer that writes a ledger's events, and the reports of its `CopyQueue`, to `logger`.

    `logger` is structlog's logger, another one that has `bind` and takes an event and its fields, or a `logging.Logger`
    or `logging.LoggerAdapter`. With `logging`, the fields of an event are attributes of its `LogRecord` (`extra`). A
    field with the name of an attribute that each record has, such as `name`, becomes `name_`. The default is the
    program's own structlog logger. Exceptions of the logger are counted and dropped. A filtered event costs one check
    of its level.
    """

    def __init__(self, logger: Any = None) -> None:
        self.logger, self._is_heard = bound_logger(logger)
        self.num_lost_events = 0
        """Events lost because the logger raised."""

    def wants_move(self, kind: type[Event], state: Any) -> bool:
        """Whether a move to `state` would be written. See `Observer`."""
        try:
            return self._is_heard(_REQUEST_LEVELS[state] if kind is RequestMoved else _JOB_LEVELS[state])
        except BaseException:  # noqa: BLE001 - as in `observe`
            self.num_lost_events += 1
            return False

    def observe(self, event: Event) -> None:
        """Write `event`, unless its level is filtered. Exceptions of the logger are counted."""
        kind = type(event)
        if kind is RequestMoved:
            level = _REQUEST_LEVELS[event.new]  # type: ignore[attr-defined]
        elif kind is JobMoved:
            level = _JOB_LEVELS[event.new]  # type: ignore[attr-defined]
        else:
            level = _LEVELS.get(kind, _WARNING)
        try:
            if self._is_heard(level) and (write := WRITERS.get(kind)) is not None:
                write(self.logger, event)
        except BaseException:  # noqa: BLE001 - counted; must not reach the ledger
            self.num_lost_events += 1

    def ledger_opened(self, ledger: AnyLedger) -> None:
        """Call this after you have made `ledger`. The log then shows where the ledger begins, and the sizes of its
        pools."""
        # If an engine has the device blocks, the pool counts only blocks that copies hold, and there are none yet.
        tiers = [tier for tier in check_ledger("ledger", ledger).cache.tiers if not tier.is_absent]
        self._opened("ledger_opened", {f"num_{tier.tier.name.lower()}_blocks": tier.pool.num_blocks for tier in tiers})

    def ledger_closed(self, ledger: AnyLedger) -> None:
        """Call this when no copy can be launched for `ledger` any more."""
        self._closed("ledger_closed", len(check_ledger("ledger", ledger).jobs.quarantined))

    @harmless
    def transport_failed(self, error: BaseException) -> None:
        self.logger.error("transport_failed", error=repr(error))

    @harmless
    def _opened(self, event: str, fields: dict[str, Any]) -> None:
        self.logger.info(event, **fields)

    @harmless
    def _closed(self, event: str, num_quarantined_jobs: int) -> None:
        log = self.logger.error if num_quarantined_jobs else self.logger.debug
        log(event, num_quarantined_jobs=num_quarantined_jobs)


class Telemetry(LedgerLog):
    """The log of a runtime: its ledger's events and its own."""

    @harmless
    def host_memory_page_locked(self, progress: PinProgress) -> None:
        self.logger.info("host_memory_page_locked", **attrs.asdict(progress))

    @harmless
    def disk_opened(self, path: str, num_slots: int) -> None:
        self.logger.info("disk_opened", path=path, num_slots=num_slots)

    @harmless
    def disk_restored(self, num_blocks: int, duration_s: float) -> None:
        self.logger.info("disk_restored", num_blocks=num_blocks, duration_s=round(duration_s, 6))

    @harmless
    def fetch_declined(self, request_id: str, num_tokens: int, fetch_s: float) -> None:
        self.logger.debug("fetch_declined", request_id=request_id, num_tokens=num_tokens, fetch_s=round(fetch_s, 6))

    @harmless
    def fetch_skipped(self, request_id: str, tier: Tier) -> None:
        self.logger.debug("fetch_skipped", request_id=request_id, tier=tier.name.lower())

    @harmless
    def storage_moved(self, moved: StorageMove) -> None:
        about: dict[str, Any] = {"tier": moved.tier.name.lower(), "use": moved.use.value, "node": moved.node}
        move = moved.move
        if isinstance(move, Closed):
            about |= {"after_s": round(move.after_s, 3), "num_refused": move.num_refused}
            self.logger.warning("storage_back", **about)
            return
        about |= {"for_s": move.for_s, "num_failures": move.num_failures, "num_refused": move.num_refused}
        log = self.logger.warning if move.is_first else self.logger.info
        log("storage_left_alone", **about, error=move.error)

    @harmless
    def load_declined(self, request_id: str, num_tokens: int, load_s: float, compute_s: float) -> None:
        seconds = {"load_s": round(load_s, 6), "compute_s": round(compute_s, 6)}
        self.logger.debug("load_declined", request_id=request_id, num_tokens=num_tokens, **seconds)

    @harmless
    def remote_opened(self, store: str, is_encrypted: bool, cell_tokens: int) -> None:
        self.logger.info("remote_opened", store=store, is_encrypted=is_encrypted, cell_tokens=cell_tokens)

    @harmless
    def remote_turned_off(self, reason: str) -> None:
        self.logger.warning("remote_turned_off", reason=reason)

    @harmless
    def disk_records_dropped(self, reason: str) -> None:
        self.logger.warning("disk_records_dropped", reason=reason)

    @harmless
    def disk_turned_off(self, reason: str) -> None:
        self.logger.error("disk_turned_off", reason=reason)

    def runtime_opened(
        self,
        num_device_blocks: int,
        num_host_blocks: int,
        layout: str,
        *,
        engine_blocks: bool = False,
        own: Mapping[Tier, int] | None = None,
    ) -> None:
        """`layout`: a description of the KV regions. Empty if your own transport has them. `engine_blocks`: whether an
        engine owns the device blocks. `own`: number of blocks of your own tiers."""
        sizes = {"num_device_blocks": num_device_blocks, "num_host_blocks": num_host_blocks}
        sizes |= {f"num_{tier.name.lower()}_blocks": number for tier, number in (own or {}).items()}
        self._opened("runtime_opened", {**sizes, "engine_blocks": engine_blocks, "layout": layout})

    def runtime_closed(self, num_quarantined_jobs: int) -> None:
        self._closed("runtime_closed", num_quarantined_jobs)
