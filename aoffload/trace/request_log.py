"""Request logs: all events with one id, by request. An id may be used again once its request is over."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

import attrs

from .events import Event, EventReader, FieldError, Kind
from .lines import LogLines
from .progress import Progress
from .runtimes import RuntimeLife, Runtimes
from .wording import counted, plain

__all__ = ["RequestLog", "UnknownError", "find_request_logs"]

MAX_SIMILAR = 5
_OVER = {"done", "aborted", "cancelled"}
_TIMELINES = (Kind.REQUEST, Kind.PREFETCH, Kind.DEMOTION)


class UnknownError(Exception):
    """The log has no request, or no runtime, of that name."""


@attrs.define(eq=False)
class RequestLog:
    """All events of one request, from its match to the last event of its jobs, which may follow its end."""

    runtime: RuntimeLife
    events: list[Event] = attrs.field(factory=list)
    job_ids: set[int] = attrs.field(factory=set)
    is_over: bool = False

    @property
    def start_s(self) -> float:
        return self.events[0].at_s


@attrs.define(eq=False)
class _Search:
    """Reads the log for one id."""

    request_id: str
    runtimes: Runtimes = attrs.field(factory=Runtimes)
    found: list[RequestLog] = attrs.field(factory=list)
    similar: dict[str, None] = attrs.field(factory=dict)
    """Ids that contain the one that was asked for, in the order of the log."""

    def look_at(self, event: Event) -> None:
        """Keep the event if it has the id. May raise `FieldError`."""
        if event.meaning.kind is Kind.RUNTIME:
            self._look_at_runtime(event)
            return
        name = event.fields.get("request_id")
        if name != self.request_id:
            self._compare(name)
            return
        self._log_of(event, self.runtimes.of(event)).events.append(event)

    def _look_at_runtime(self, event: Event) -> None:
        if event.meaning.state == "closed":
            self.runtimes.closed(event)
        else:
            self.runtimes.opened(event)

    def _compare(self, name: object) -> None:
        if type(name) is str and len(self.similar) < MAX_SIMILAR and self.request_id in name:
            self.similar[name] = None

    def _log_of(self, event: Event, runtime: RuntimeLife) -> RequestLog:
        mine = [request_log for request_log in self.found[-MAX_SIMILAR:] if request_log.runtime is runtime]
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


def find_request_logs(log: Path, request_id: str, progress: TextIO) -> Sequence[RequestLog]:
    """The requests of an id, in the order of the log. Raises `OSError`, or `UnknownError`, which names similar ids."""
    search = _Search(request_id)
    reader = EventReader(LogLines(log, Progress(progress)))
    for event in reader:
        try:
            search.look_at(event)
        except FieldError:
            reader.leave_out(event)
    if not search.found:
        raise UnknownError(_nothing_found(log, request_id, search, reader))
    return search.found


def _nothing_found(log: Path, request_id: str, search: _Search, reader: EventReader) -> str:
    problem = f"no request {plain(request_id)!r} in {counted(reader.num_events, 'event')} of {log}"
    return f"{problem}; similar: {', '.join(map(plain, search.similar))}" if search.similar else problem
