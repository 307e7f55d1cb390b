"""Request logs: all events with one id, by request. An id may be used again once its request is over."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import TextIO

import attrs

from .events import Event, EventReader, FieldError, Kind
from .lines import LogLines
from .progress import Progress
from .runtimes import RuntimeLife, Runtimes
from .wording import counted, plain

__all__ = ["RequestLog", "UnknownError", "find_request_logs"]

MAX_SIMILAR = 50
"""Ids that an answer names."""
MAX_COMPARED = 10_000
"""Ids that are remembered, to count the others."""
MAX_AT_ONCE = 5
"""Requests of one id, in several runtimes, that may be under way at once."""
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
    """Of those that have ended."""
    open_steps: dict[int, float] = attrs.field(factory=dict)
    """Steps that have not ended, each with when it began: they hold its blocks, whatever it does."""
    until_s: float = 0.0
    """The end of the log, or what was taken for it."""

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
    """Ids that contain the one that was asked for, in the order of the log."""

    def look_at(self, event: Event) -> None:
        """Keep the event if it has the id. May raise `FieldError`."""
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
        """Keep count of steps. Only those are told that are long, or end after the request."""
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
        """A fetch of its own name, which the request waits for."""
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
    reader = EventReader(LogLines(log, Progress(progress)))
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
