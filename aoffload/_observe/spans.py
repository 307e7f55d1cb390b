"""Spans of OpenTelemetry: one for each request, and one for each copy.

    aoffload.request     from its admission to its end. Its parent is the span that was current when it began
      aoffload.fetch     a fetch that the request waits for, with its copies as children
      aoffload.load      a copy that the request waits for
    aoffload.store       a trace of its own, with a link to the request, because the store outlives the request

A copy that several requests wait for is a child of the request that began it. The other requests are linked to the
copy, and the copy to them. Prefetches and demotions have a span each, with their copies as children.

A job has only the id of its request, and ids are unique only among live requests. Job ids ascend, so a job that was
planned before a request began is not its job. A store is therefore linked to the request that caused it, or to none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import attrs
from opentelemetry.context import Context
from opentelemetry.trace import (
    Link,
    Span,
    SpanContext,
    Status,
    StatusCode,
    TracerProvider,
    get_tracer,
    set_span_in_context,
)

from .. import PrefixMatch, RequestState, __version__
from .._common.arguments import check_has
from .._kernel.records import Job, Load
from ..ledger import (
    CacheTransferMoved,
    CacheTransferState,
    Completion,
    Direction,
    Event,
    Fetch,
    JobMoved,
    JobState,
    LedgerRequest,
    Outcome,
    RequestCancelled,
    RequestMoved,
)

Fields = Mapping[str, str | int | float]
_S = RequestState
_FAULTS = ("abandoned", "deadline", "error", "prefix_invalidated")
"""Reasons of an abort that are errors, up to their colon. A client that leaves is none."""
MAX_OVER = 1024
"""Bound on the requests that are over and that stores may still name."""


@attrs.define(eq=False)
class _Waiting:
    """A request, or a cache transfer, whose span is open."""

    record: LedgerRequest
    span: Span
    last_job: int
    """The job planned last when it began: later ones may be its own."""
    load: Load | None = None


class Spans:
    """One of the `observers` of one runtime, or of one `Ledger` or `HostCache`: reports requests and copies as spans of
    OpenTelemetry. The names of attributes are those of the log's fields after `aoffload.`: ids, sizes, times and
    reasons, and neither tokens nor salts.

    `tracer_provider`: whose spans they are. The default is the program's global one.
    """

    def __init__(self, tracer_provider: TracerProvider | None = None) -> None:
        if tracer_provider is not None:
            check_has("tracer_provider", tracer_provider, "TracerProvider", "get_tracer")
        self._tracer = get_tracer("aoffload", __version__, tracer_provider)
        self._live: dict[LedgerRequest, _Waiting] = {}
        """Also the records of cache transfers."""
        self._by_id: dict[str, _Waiting] = {}
        """Live requests only."""
        self._over: dict[str, tuple[int, SpanContext]] = {}
        """The last request of each id that is over, the oldest first: `last_job` and its span."""
        self._loads: dict[Load, _Waiting] = {}
        self._jobs: dict[Job, Span] = {}
        self._last: Event | None = None
        self.num_failures = 0
        """Spans whose end raised in `close`. `Observers` and runtimes count the exceptions of `observe`."""

    def __repr__(self) -> str:
        return f"<Spans {self.num_open} open>"

    @property
    def num_open(self) -> int:
        """Spans that have not ended."""
        return len(self._live) + len(self._jobs)

    def observe(self, event: Event) -> None:
        report = _REPORTED.get(type(event))
        if report is None or event is self._last:  # the same object again: this observer was given twice
            return
        self._last = event
        report(self, event)

    def close(self) -> None:
        """End all open spans, with the outcome `closed`. Only needed for a ledger that is dropped before its requests
        and copies are over. An exception of a processor is counted and dropped, and the other spans end all the same.
        """
        spans = [*self._jobs.values(), *(one.span for one in self._live.values())]
        for found in (self._jobs, self._live, self._by_id, self._over, self._loads):
            found.clear()
        self._last = None
        for span in spans:
            try:
                _end(span, {"outcome": "closed"})
            except BaseException:  # noqa: BLE001 - counted, as an exception of `observe` is
                self.num_failures += 1

    # -- requests -----------------------------------------------------------------------------------------------------

    def request_moved(self, event: RequestMoved) -> None:
        record, state = event.request, event.new
        if event.old is _S.QUEUED:
            fields: Fields = {"request_id": record.request_id, "num_tokens": record.sequence.num_tokens}
            self._by_id[record.request_id] = self._begin("request", record, fields)
        one = self._live.get(record)
        if one is None:  # it began before this observer, or its span did not
            return
        self._waits_no_longer(one)
        if state in (_S.DONE, _S.ABORTED):
            self._request_over(one, event)
            return
        one.span.add_event(state.value)
        if state in (_S.MATCHED, _S.ALLOCATED):  # a request that waited for blocks was matched again at the grant
            one.span.set_attributes(_named(_found(event.match)))
        elif state is _S.LOADING:
            self._waits(one)
        elif state is _S.RUNNING:
            ready = {"num_ready_tokens": event.num_computed_tokens, "num_lost_tokens": event.num_lost_tokens}
            one.span.set_attributes(_named(ready))

    def _request_over(self, one: _Waiting, event: RequestMoved) -> None:
        name, reason = one.record.request_id, event.reason
        del self._live[one.record]
        if self._by_id.get(name) is one:
            del self._by_id[name]
            self._over.pop(name, None)
            self._over[name] = one.last_job, one.span.get_span_context()
            if len(self._over) > MAX_OVER:
                del self._over[next(iter(self._over))]
        fields: Fields = {"reason": reason} if reason else {"num_computed_tokens": event.num_computed_tokens}
        fault = reason if reason.partition(":")[0] in _FAULTS else ""
        _end(one.span, {"outcome": event.new.value, **fields}, fault)

    def request_cancelled(self, event: RequestCancelled) -> None:
        one = self._live.get(event.request)
        if one is not None:
            one.span.add_event("cancelled", _named({"reason": event.reason}))

    def transfer_moved(self, event: CacheTransferMoved) -> None:
        transfer, state = event.transfer, event.new
        record = transfer.request
        if state is CacheTransferState.MOVING:
            waiter = transfer.for_request if isinstance(transfer, Fetch) else None
            above = None if waiter is None else self._live.get(waiter)
            kind, fields = type(transfer).__name__.lower(), {"request_id": record.request_id}
            self._waits(self._begin(kind, record, fields, above))
        elif (one := self._live.pop(record, None)) is not None:
            self._waits_no_longer(one)
            _end(one.span, {"outcome": state.value})

    # -- requests and transfers ---------------------------------------------------------------------------------------

    def _begin(self, kind: str, record: LedgerRequest, fields: Fields, above: _Waiting | None = None) -> _Waiting:
        """A span below that of `above`; below the caller's, if None."""
        if (known := self._live.get(record)) is not None:
            return known
        context = None if above is None else set_span_in_context(above.span)
        span = self._tracer.start_span(f"aoffload.{kind}", context, attributes=_named(fields))
        self._live[record] = one = _Waiting(record, span, record.ledger.jobs.last_id)
        return one

    def _waits(self, one: _Waiting) -> None:
        """It waits for the jobs of its load, of which others may have begun some."""
        load = one.record.load
        if load is None:  # it was over within the same call
            return
        one.load = load
        self._loads[load] = one
        for job in load.jobs:
            if (span := self._jobs.get(job)) is not None:
                _link(span, one.span)

    def _waits_no_longer(self, one: _Waiting) -> None:
        if one.load is not None:
            self._loads.pop(one.load, None)
            one.load = None

    # -- copies -------------------------------------------------------------------------------------------------------

    def job_moved(self, event: JobMoved) -> None:
        job = event.job
        if event.new is JobState.LAUNCHED:
            if job not in self._jobs:
                self._job_launched(job)
        elif (span := self._jobs.pop(job, None)) is not None and job.completion is not None:
            _end(span, _outcome(job.completion), _fault(job.completion))

    def _job_launched(self, job: Job) -> None:
        direction = job.plan.direction
        waiting = [self._loads[load] for load in job.claims if load in self._loads]
        above = next((one for one in waiting if one.record.request_id == job.request_id), None)
        if above is None and waiting and direction is Direction.LOAD:
            above = waiting[0]  # the request that began it has left
        cause = None if above is not None else self._context_of(job)
        span = self._tracer.start_span(
            f"aoffload.{direction.value}",
            Context() if above is None else set_span_in_context(above.span),  # not below the task that launches it
            links=[] if cause is None else [Link(cause)],
            attributes=_named(_copy(job)),
        )
        self._jobs[job] = span
        for one in waiting:
            if one is not above:
                _link(span, one.span)

    def _context_of(self, job: Job) -> SpanContext | None:
        """The span of the request that caused `job`."""
        one = self._by_id.get(job.request_id)
        if one is not None and job.job_id > one.last_job:
            return one.span.get_span_context()
        last_job, context = self._over.get(job.request_id, (job.job_id, None))
        return context if job.job_id > last_job else None


def _named(fields: Fields) -> dict[str, str | int | float]:
    return {f"aoffload.{name}": _text(value) if isinstance(value, str) else value for name, value in fields.items()}


def _text(text: str) -> str:
    """`text` as an exporter can encode it. A lone surrogate, as in the name of a file, would cost it a whole batch."""
    return text.encode("utf-8", "backslashreplace").decode()


def _found(match: PrefixMatch) -> Fields:
    return {
        "num_device_tokens": match.num_device_tokens,
        "num_host_tokens": match.num_host_tokens,
        "num_disk_tokens": match.num_lower_tokens,
    }


def _copy(job: Job) -> Fields:
    plan = job.plan
    link = {"source": plan.source.name.lower(), "destination": plan.destination.name.lower()}
    return {"job_id": plan.job_id, "num_blocks": plan.num_blocks, **link}


def _outcome(done: Completion) -> Fields:
    return {"outcome": done.outcome.value, "num_bytes": done.num_bytes, "duration_s": done.duration_s}


def _fault(done: Completion) -> str:
    """Why a copy has failed. A refused copy has not failed: its storage is suspended, so nothing was copied."""
    return "" if done.outcome in (Outcome.LANDED, Outcome.REFUSED) else done.error or done.outcome.value


def _link(one: Span, other: Span) -> None:
    """Each of the spans names the other, because a reader may begin with either of them."""
    one.add_link(other.get_span_context())
    other.add_link(one.get_span_context())


def _end(span: Span, fields: Fields, fault: str = "") -> None:
    """End `span`, whatever becomes of its attributes: a processor may raise."""
    try:
        span.set_attributes(_named(fields))
        if fault:
            span.set_status(Status(StatusCode.ERROR, _text(fault)))
    finally:
        span.end()


_REPORTED: dict[type[Event], Callable[[Spans, Any], None]] = {
    RequestMoved: Spans.request_moved,
    RequestCancelled: Spans.request_cancelled,
    CacheTransferMoved: Spans.transfer_moved,
    JobMoved: Spans.job_moved,
}
"""All other events are nothing for spans."""
