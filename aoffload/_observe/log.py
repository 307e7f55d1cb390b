"""One structlog event for every state change and every settled job of a ledger, and of what copies for it
(docs/tracing.md lists them). `Telemetry` has those of a runtime beside them.

Any logger that binds and takes fields will do: structlog is imported where none is given.

The log of a runtime.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from traceback import format_exception
from typing import Any, Concatenate, ParamSpec, TypeVar

import attrs

from .._arguments import check_has, check_type
from .._kernel.ledger import Ledger
from .._kernel.plans import PrefixMatch
from .._kernel.records import Job
from .._kernel.requests import CacheTransfer, Demotion, Fetch, LedgerRequest, LoadOverlap, Pin, Prefetch, Step
from .._kernel.states import CacheTransferState, JobState, Outcome, OverlapState, PinState, RequestState, Tier
from .._kernel.status import HintEnd, Holder, RequestStatus, TierEviction
from .._transfer.breaker import Closed, StorageMove
from .._transfer.transport import PinProgress
from ..errors import InvalidArgument

__all__ = ["LedgerLog", "Telemetry", "default_logger", "harmless"]


_REQUEST_EVENTS = {state: f"request_{state.value}" for state in RequestState}
_JOB_EVENTS = {state: f"job_{state.value}" for state in JobState}
_PIN_EVENTS = {state: f"pin_{state.value}" for state in PinState}
_PREFETCH_EVENTS = {state: f"prefetch_{state.value}" for state in CacheTransferState}
_DEMOTION_EVENTS = {state: f"demotion_{state.value}" for state in CacheTransferState}
_FETCH_EVENTS = {state: f"fetch_{state.value}" for state in CacheTransferState}
_OVERLAP_EVENTS = {state: f"load_overlap_{state.value}" for state in OverlapState}
_DEBUG, _INFO, _WARNING = 10, 20, 30
_REQUEST_LEVELS = {**dict.fromkeys(RequestState, _DEBUG), RequestState.DONE: _INFO, RequestState.ABORTED: _INFO}
_JOB_LEVELS = {**dict.fromkeys(JobState, _DEBUG), JobState.FAILED: _WARNING}


Arguments = ParamSpec("Arguments")
Log = TypeVar("Log", bound="LedgerLog")


def harmless(report: Callable[Concatenate[Log, Arguments], None]) -> Callable[Concatenate[Log, Arguments], None]:
    """Swallow what a logger raises (a full disk, say): the ledger reports in the middle of a change."""

    @functools.wraps(report)
    def guarded(self: Log, /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> None:
        try:
            report(self, *args, **kwargs)
        except BaseException:  # noqa: BLE001 - counted; must not reach the ledger
            self.num_lost_events += 1

    return guarded


def default_logger() -> Any:
    """The program's structlog logger. If structlog is not configured, one that prints only warnings to stderr."""
    try:
        import structlog  # only here: a program that wants no log, or has a logger of its own, may lack it
    except ModuleNotFoundError as error:
        raise InvalidArgument("logger", "must be given: there is no default one, structlog is not installed") from error
    if structlog.is_configured():
        return structlog.get_logger("aoffload")
    return structlog.wrap_logger(
        structlog.PrintLogger(sys.stderr),
        processors=[structlog.processors.add_log_level, structlog.processors.KeyValueRenderer()],
        wrapper_class=structlog.make_filtering_bound_logger(_WARNING),
    )


def _levels_heard(logger: Any) -> Callable[[int], bool]:
    """A function that tells whether `logger` emits a level. Loggers that cannot tell get every event.

    It is called for each event, since levels may change. `is_enabled_for` is looked up at the class: an instance may
    take any attribute name for a level, and write an event when it is called.
    """
    is_enabled_for = getattr(type(logger), "is_enabled_for", None)
    try:
        is_enabled_for(logger, _DEBUG)  # type: ignore[misc]
    except Exception:  # noqa: BLE001 - the logger has none, or the one it wraps
        return lambda level: True
    return logger.is_enabled_for  # type: ignore[no-any-return]


def _below_host(found: PrefixMatch) -> dict[str, int]:
    """What a fetch would add; most logs are of runtimes without anything below host memory."""
    return {"num_disk_tokens": found.num_disk_tokens} if found.num_disk_tokens else {}


class LedgerLog:
    """An observer that writes a ledger's events to `logger`, and what a `CopyQueue` reports.

    `logger` is structlog's, or another one that has `bind` and takes an event and its fields; by default the program's
    own structlog logger. What it raises is counted and dropped. A filtered event costs one check of its level.
    """

    def __init__(self, logger: Any = None) -> None:
        if logger is not None:
            check_has("logger", logger, "structlog logger", "bind")
        bound = default_logger() if logger is None else logger
        # Bound once: an unbound structlog proxy would look its configuration up at every event.
        self.logger = bound.bind()
        self._is_heard = _levels_heard(self.logger)
        self.num_lost_events = 0
        """Events lost because the logger raised."""

    def request_moved(self, record: LedgerRequest, old: RequestState, reason: str) -> None:
        # `harmless` written out: requests and jobs have the most events, and these are mostly filtered.
        try:
            if self._is_heard(_REQUEST_LEVELS[record.state]):
                self._tell_of_request(record, old, reason)
        except BaseException:  # noqa: BLE001 - see `harmless`
            self.num_lost_events += 1

    def _tell_of_request(self, record: LedgerRequest, old: RequestState, reason: str) -> None:
        state, log = record.state, self.logger
        event, name = _REQUEST_EVENTS[state], record.request_id
        if state is RequestState.MATCHED:
            found = record.match
            log.debug(
                event,
                request_id=name,
                num_tokens=record.sequence.num_tokens,
                num_device_tokens=found.num_device_tokens,
                num_host_tokens=found.num_host_tokens,
                answer=found.answer.value,
                **_below_host(found),
            )
        elif state is RequestState.ALLOCATED:
            found = record.match  # a request that waited for room was matched again at the grant
            log.debug(
                event,
                request_id=name,
                num_blocks=record.num_blocks,
                num_device_tokens=found.num_device_tokens,
                num_host_tokens=found.num_host_tokens,
                **_below_host(found),
            )
        elif state is RequestState.RUNNING:
            ready, lost = record.num_computed_tokens, record.num_lost_tokens
            log.debug(event, request_id=name, num_ready_tokens=ready, num_lost_tokens=lost)
        elif state is RequestState.DONE:
            log.info(event, request_id=name, num_computed_tokens=record.num_computed_tokens)
        elif state is RequestState.ABORTED:
            log.info(event, request_id=name, reason=reason, previous=old.value)
        else:
            log.debug(event, request_id=name)

    def job_moved(self, job: Job, old: JobState, reason: str) -> None:
        try:
            if self._is_heard(_JOB_LEVELS[job.state]):
                self._tell_of_job(job)
        except BaseException:  # noqa: BLE001 - see `harmless`
            self.num_lost_events += 1

    def _tell_of_job(self, job: Job) -> None:
        plan = job.plan
        event, completion = _JOB_EVENTS[job.state], job.completion
        about: dict[str, Any] = {
            "job_id": plan.job_id,
            "direction": plan.direction.value,
            "source": plan.source.name.lower(),
            "destination": plan.destination.name.lower(),
            "num_blocks": plan.num_blocks,
            "request_id": job.request_id,
        }
        if completion is not None:
            about |= {"outcome": completion.outcome.value, "num_bytes": completion.num_bytes}
            about["duration_s"] = round(completion.duration_s, 6)
        if job.state is JobState.FAILED:
            # What is refused is no news: `storage_left_alone` has said why, and there may be one for each cell.
            is_refused = completion is not None and completion.outcome is Outcome.REFUSED
            log = self.logger.debug if is_refused else self.logger.warning
            log(event, error=completion.error if completion is not None else "", **about)
        else:
            self.logger.debug(event, **about)

    @harmless
    def store_skipped(self, record: LedgerRequest | None, num_blocks: int, reason: str) -> None:
        request_id = "" if record is None else record.request_id
        self.logger.debug("store_skipped", request_id=request_id, num_blocks=num_blocks, reason=reason)

    @harmless
    def pin_moved(self, pin: Pin, old: PinState) -> None:
        log = self.logger.info if pin.state in (PinState.YIELDED, PinState.DROPPED) else self.logger.debug
        log(_PIN_EVENTS[pin.state], pin_id=pin.pin_id, num_tokens=pin.match.num_tokens)

    @harmless
    def cache_transfer_moved(self, transfer: CacheTransfer, old: CacheTransferState) -> None:
        name = transfer.request.request_id
        if isinstance(transfer, Prefetch):
            event, num_tokens = _PREFETCH_EVENTS[transfer.state], transfer.num_tokens
            self.logger.debug(event, request_id=name, num_blocks=transfer.num_blocks, num_tokens=num_tokens)
        elif isinstance(transfer, Demotion):
            self.logger.debug(_DEMOTION_EVENTS[transfer.state], request_id=name, num_blocks=transfer.num_blocks)
        elif isinstance(transfer, Fetch):
            waiter = {} if transfer.for_request is None else {"waiter": transfer.for_request.request_id}
            self.logger.debug(_FETCH_EVENTS[transfer.state], request_id=name, num_blocks=transfer.num_blocks, **waiter)

    @harmless
    def overlap_moved(self, overlap: LoadOverlap, old: OverlapState) -> None:
        log = self.logger.info if overlap.state is OverlapState.INVALID else self.logger.debug
        log(_OVERLAP_EVENTS[overlap.state], request_id=overlap.request.request_id, num_tokens=overlap.num_tokens)

    @harmless
    def loads_paused(self, num_quarantined: int) -> None:
        self.logger.error("loads_paused", num_quarantined=num_quarantined)

    @harmless
    def loads_resumed(self, num_quarantined: int) -> None:
        self.logger.warning("loads_resumed", num_quarantined=num_quarantined)

    def step_begun(self, step: Step) -> None:
        try:
            if self._is_heard(_DEBUG):
                ids = [record.request_id for record in step.requests]
                num_blocks = sum(record.num_blocks for record in step.requests)
                self.logger.debug("step_begun", step_id=step.step_id, request_ids=ids, num_blocks=num_blocks)
        except BaseException:  # noqa: BLE001 - see `harmless`
            self.num_lost_events += 1

    def step_ended(self, step: Step) -> None:
        try:
            if self._is_heard(_DEBUG):
                over = [record.request_id for record in step.requests if record.is_over]
                self.logger.debug("step_ended", step_id=step.step_id, over=over)
        except BaseException:  # noqa: BLE001 - see `harmless`
            self.num_lost_events += 1

    @harmless
    def extension_refused(self, record: LedgerRequest, num_needed: int, num_available: int) -> None:
        room = {"num_needed": num_needed, "num_available": num_available}
        self.logger.debug("extension_refused", request_id=record.request_id, **room)

    @harmless
    def eviction_switched(self, tier: TierEviction) -> None:
        self.logger.info(
            "eviction_switched",
            tier=tier.tier.name.lower(),
            order=tier.rule.value,
            learned_hits=round(tier.learned_hits, 1),
            lru_hits=round(tier.lru_hits, 1),
            num_switches=tier.num_switches,
            num_evicted_learned=tier.num_evicted_learned,
            num_evicted_lru=tier.num_evicted_lru,
        )

    @harmless
    def hint_given(self, hint_id: int, category: str, num_tokens: int) -> None:
        self.logger.debug("hint_given", hint_id=hint_id, category=category, num_tokens=num_tokens)

    @harmless
    def hint_ended(self, hint_id: int, category: str, end: HintEnd) -> None:
        self.logger.debug("hint_ended", hint_id=hint_id, category=category, outcome=end.value)

    @harmless
    def slow_wait(self, status: RequestStatus) -> None:
        biggest = f"{status.held_by[0].kind} {status.held_by[0].name}" if status.held_by else "nobody"
        self.logger.warning(
            "slow_wait",
            request_id=status.request_id,
            num_blocks=status.num_missing,
            waited_s=round(status.waited_s or 0.0, 3),
            place=status.place,
            holder=biggest,
            holders=[str(holder) for holder in status.held_by],
        )

    @harmless
    def slow_step(self, step: Holder) -> None:
        self.logger.warning(
            "slow_step",
            step_id=int(step.name),
            num_blocks=step.num_blocks,
            open_s=round(step.age_s or 0.0, 3),
            request_ids=list(step.request_ids),
            over=list(step.over),
        )

    @harmless
    def transport_stalled(self, source: Tier, destination: Tier, num_jobs: int) -> None:
        link = {"source": source.name.lower(), "destination": destination.name.lower()}
        self.logger.error("transport_stalled", **link, num_jobs=num_jobs)

    @harmless
    def transport_recovered(self, source: Tier, destination: Tier) -> None:
        link = {"source": source.name.lower(), "destination": destination.name.lower()}
        self.logger.warning("transport_recovered", **link)

    @harmless
    def transport_failed(self, error: BaseException) -> None:
        self.logger.error("transport_failed", error=repr(error))

    @harmless
    def worker_failed(self, error: BaseException) -> None:
        # As text: not every logger knows what an exception is.
        self.logger.error("worker_failed", error=repr(error), traceback="".join(format_exception(error)))

    @harmless
    def cache_turned_off(self, reason: str) -> None:
        self.logger.error("cache_turned_off", reason=reason)

    def ledger_opened(self, ledger: Ledger) -> None:
        """Call it once `ledger` is made: readers of the log learn where it begins, and the sizes of its pools."""
        # Where an engine has the device blocks, the pool counts what copies hold: nothing yet.
        tiers = check_type("ledger", ledger, Ledger).cache.tiers
        self._opened("ledger_opened", {f"num_{tier.tier.name.lower()}_blocks": tier.pool.num_blocks for tier in tiers})

    def ledger_closed(self, ledger: Ledger) -> None:
        """Call it when nothing is launched for `ledger` any more."""
        self._closed("ledger_closed", len(check_type("ledger", ledger, Ledger).jobs.quarantined))

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
    def request_cancelled(self, record: LedgerRequest, reason: str) -> None:
        self.logger.info("request_cancelled", request_id=record.request_id, reason=reason)

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
        self, num_device_blocks: int, num_host_blocks: int, layout: str, *, engine_blocks: bool = False
    ) -> None:
        """`layout`: the KV regions as they are understood; empty where a transport of the program's own has them.
        `engine_blocks`: the device blocks are an engine's."""
        sizes = {"num_device_blocks": num_device_blocks, "num_host_blocks": num_host_blocks}
        self._opened("runtime_opened", {**sizes, "engine_blocks": engine_blocks, "layout": layout})

    def runtime_closed(self, num_quarantined_jobs: int) -> None:
        self._closed("runtime_closed", num_quarantined_jobs)
