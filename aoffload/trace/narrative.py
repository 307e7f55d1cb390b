"""`request ID`: the timeline of one request in plain words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice, pairwise
from pathlib import Path
from typing import TextIO

import attrs

from .._common.commands import ProgressLine
from .._extensions.transfers import CacheTransferState
from .._kernel.states import RequestState
from .events import Event, EventReader, FieldError, Kind, LogLines
from .output import Progress, text_table
from .sentences import sentence
from .summary import STATES, meaning
from .timelines import FETCHING, RuntimeLife, Runtimes
from .wording import counted, date_and_time, duration, plain, share, time_of_day

# -- request log -----------------------------------------------------------------------------------------------------
#
# Request logs: all events with one id, by request. An id may be used again after its request has ended.

MAX_SIMILAR = 50
"""Bound on similar ids in an answer."""
MAX_COMPARED = 10_000
"""Bound on ids that are stored in order to count the others."""
MAX_AT_ONCE = 5
"""Bound on open requests of one id, in several runtimes."""
_OVER = {"done", "aborted", "cancelled"}
_TIMELINES = (Kind.REQUEST, Kind.PREFETCH, Kind.DEMOTION, Kind.FETCH)


class UnknownError(Exception):
    """The log has no request, or no runtime, of that name."""


@attrs.define(eq=False)
class RequestLog:
    """All events of one request, from its match to the last event of its jobs, which may follow its end."""

    runtime: RuntimeLife
    events: list[Event] = attrs.field(factory=list)
    job_ids: set[int] = attrs.field(factory=set)
    is_over: bool = False
    num_steps: int = 0
    longest_step_s: float = 0.0
    """Duration of the longest step that has ended."""
    open_steps: dict[int, float] = attrs.field(factory=dict)
    """By number, the start of each step that has not ended. The step holds the request's blocks, whatever the request
    does."""
    until_s: float = 0.0
    """The end of the log, or the time given in its place."""

    @property
    def start_s(self) -> float:
        return self.events[0].at_s


@attrs.define(eq=False)
class _Search:
    """Reads the log for one id."""

    request_id: str
    runtimes: Runtimes = attrs.field(factory=Runtimes)
    found: list[RequestLog] = attrs.field(factory=list)
    until_s: float | None = None
    """Later events are left out."""
    last_s: float = 0.0
    similar: dict[str, None] = attrs.field(factory=dict)
    """Ids that contain the requested one, in the order of the log."""

    def look_at(self, event: Event) -> None:
        """Record the event if it has the id. May raise `FieldError`."""
        if event.meaning.kind is Kind.RUNTIME:
            self._look_at_runtime(event)
            return
        name = event.fields.get("request_id")
        if event.meaning.kind is Kind.STEP or event.name == "slow_step":
            self._look_at_step(event, self.runtimes.of(event))
            return
        if event.meaning.kind is Kind.FETCH and event.fields.get("waiter") == self.request_id:
            self._look_at_fetch(event, self.runtimes.of(event))
            return
        if name != self.request_id:
            self._compare(name)
            return
        self._log_of(event, self.runtimes.of(event)).events.append(event)

    def _look_at_runtime(self, event: Event) -> None:
        if event.meaning.state == "closed":
            self.runtimes.closed(event)
        else:
            self.runtimes.opened(event)

    def _look_at_step(self, event: Event, runtime: RuntimeLife) -> None:
        """Track steps. Only steps that are long, or that end after the request, are reported."""
        step_id = event.count("step_id")
        if event.meaning.state != "ended" and self.request_id not in event.texts("request_ids"):
            return
        mine = [request_log for request_log in self.found if request_log.runtime is runtime]
        if event.meaning.state == "begun" and mine:
            mine[-1].open_steps[step_id] = event.at_s
            mine[-1].num_steps += 1
        for request_log in mine:
            if step_id not in request_log.open_steps:
                continue
            if event.meaning.kind is Kind.ALARM:
                request_log.events.append(event)
            elif event.meaning.state == "ended":
                seconds = event.at_s - request_log.open_steps.pop(step_id)
                request_log.longest_step_s = max(request_log.longest_step_s, seconds)
                if request_log.is_over:
                    request_log.events.append(event)

    def _look_at_fetch(self, event: Event, runtime: RuntimeLife) -> None:
        """A fetch has a name of its own. The request waits for it."""
        mine = [request_log for request_log in self.found if request_log.runtime is runtime]
        if mine and not mine[-1].is_over:
            mine[-1].events.append(event)

    def _compare(self, name: object) -> None:
        if type(name) is str and len(self.similar) < MAX_COMPARED and self.request_id in name:
            self.similar[name] = None

    def _log_of(self, event: Event, runtime: RuntimeLife) -> RequestLog:
        mine = [request_log for request_log in self.found[-MAX_AT_ONCE:] if request_log.runtime is runtime]
        if event.meaning.kind is Kind.JOB:
            job_id = event.count("job_id")
            mine = [request_log for request_log in mine if job_id in request_log.job_ids] or mine
            request_log = mine[-1] if mine else self._begin(runtime)
            request_log.job_ids.add(job_id)
            return request_log
        begins_timeline = event.meaning.kind in _TIMELINES and bool(mine) and mine[-1].is_over
        request_log = mine[-1] if mine and not begins_timeline else self._begin(runtime)
        request_log.is_over = request_log.is_over or (event.meaning.kind in _TIMELINES and event.meaning.state in _OVER)
        return request_log

    def _begin(self, runtime: RuntimeLife) -> RequestLog:
        self.found.append(RequestLog(runtime))
        return self.found[-1]


def find_request_logs(
    log: Path, request_id: str, progress: TextIO, until_s: float | None = None
) -> Sequence[RequestLog]:
    """The requests of an id, in the order of the log. Raises `OSError`, or `UnknownError`, which names similar ids."""
    search = _Search(request_id, until_s=until_s)
    reader = EventReader(LogLines(log, Progress(ProgressLine(progress))))
    for event in reader:
        if until_s is not None and event.at_s > until_s:
            continue
        search.last_s = max(search.last_s, event.at_s)
        try:
            search.look_at(event)
        except FieldError:
            reader.leave_out(event)
    for request_log in search.found:
        closed = request_log.runtime.closed_s
        request_log.until_s = max(search.last_s, until_s or 0.0) if closed is None else closed
    if not search.found:
        raise UnknownError(_nothing_found(log, request_id, search, reader))
    return search.found


def _nothing_found(log: Path, request_id: str, search: _Search, reader: EventReader) -> str:
    problem = f"no request {plain(request_id)!r} in {counted(reader.num_events, 'event')} of {log}"
    if not search.similar:
        return problem
    names, rest = ", ".join(map(plain, islice(search.similar, MAX_SIMILAR))), len(search.similar) - MAX_SIMILAR
    at_least = "at least " if len(search.similar) >= MAX_COMPARED else ""
    return f"{problem}; similar: {names}{f' and {at_least}{rest:,} more' if rest > 0 else ''}"


# -- narrative -------------------------------------------------------------------------------------------------------

NOTEWORTHY_S = 0.0005
"""Pauses of at least this many seconds are shown."""


def narrative(log: Path, request_id: str, progress: TextIO, until_s: float | None = None) -> Iterator[str]:
    """Lines of text. Raises `OSError` or `UnknownError`."""
    request_logs = find_request_logs(log, request_id, progress, until_s)
    if len(request_logs) > 1:
        yield f"{counted(len(request_logs), 'request')} had the id {plain(request_id)}"
        yield ""
    for at, request_log in enumerate(request_logs):
        if at:
            yield ""
        yield from _tell(request_log, request_id)


def _tell(request_log: RequestLog, request_id: str) -> Iterator[str]:
    yield f"{plain(request_id)}, {date_and_time(request_log.start_s)} UTC, {request_log.runtime.describe()}"
    rows, previous = [], request_log.start_s
    for event in request_log.events:
        waited = event.at_s - previous
        pause = f"+{duration(waited)}" if waited >= NOTEWORTHY_S else ""
        rows.append([f"  {time_of_day(event.at_s)}", pause, _say(event, request_log.runtime)])
        previous = event.at_s
    yield from text_table(rows, 3)
    yield from _closing(request_log)


def _say(event: Event, runtime: RuntimeLife) -> str:
    try:
        return sentence(event, is_engine_owned=runtime.is_engine_owned)
    except FieldError as error:
        return f"{event.name}, without a {error} that can be read"


def _doing(request_log: RequestLog, state: str) -> str:
    if state == RequestState.RUNNING.value and not request_log.open_steps:
        return " in no step"
    return f" ({meaning(state, request_log.runtime)})" if state in STATES else ""


def _state(event: Event) -> str:
    """The state of the request since `event`, which may be of a fetch that it waits for."""
    if event.meaning.kind is not Kind.FETCH:
        return event.meaning.state
    return FETCHING if event.meaning.state == CacheTransferState.MOVING.value else RequestState.PINNED.value


def _closing(request_log: RequestLog) -> Iterator[str]:
    """A summary of the request's times, and remarks on events missing in the log."""
    moves = [event for event in request_log.events if event.meaning.kind in (Kind.REQUEST, Kind.FETCH)]
    if not any(event.meaning.kind is Kind.REQUEST for event in moves):
        return
    stop_s = moves[-1].at_s if request_log.is_over else max(request_log.until_s, moves[-1].at_s)
    whole = stop_s - moves[0].at_s
    sums: dict[str, float] = {}
    for event, following in pairwise(moves):
        sums[_state(event)] = sums.get(_state(event), 0.0) + following.at_s - event.at_s
    now = _state(moves[-1])
    if not request_log.is_over:
        sums[now] = sums.get(now, 0.0) + stop_s - moves[-1].at_s
    parts = [
        f"{state} {duration(seconds)} ({share(seconds, whole)})"
        for state, seconds in sorted(sums.items(), key=lambda item: -item[1])
        if seconds > 0.0
    ]
    yield ""
    yield f"  {duration(whole)} in all{': ' if parts else ''}{', '.join(parts)}"
    if moves[0].name != "request_matched":
        yield "  Its beginning is not in this log."
    if request_log.num_steps:
        longest = f", the longest {duration(request_log.longest_step_s)}" if request_log.longest_step_s else ""
        yield f"  {counted(request_log.num_steps, 'step')}{longest}"
    if not request_log.is_over:
        since = duration(stop_s - moves[-1].at_s)
        yield f"  It is not over at {time_of_day(stop_s)}: {now} for {since}{_doing(request_log, now)}."
    for step_id, begun_s in request_log.open_steps.items():
        held = duration(request_log.until_s - begun_s)
        still = "is over, but its blocks are not free" if request_log.is_over else "computes"
        yield f"  Step {step_id} holds its blocks for {held} and has not ended: the request {still}."
    if "loading" in sums and not any(event.fields.get("direction") == "load" for event in request_log.events):
        yield "  It loaded without a job of its own: another request had begun to bring the same blocks."
