"""One pass over a log, from its first line to its last."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TextIO

import attrs

from .._common.commands import ProgressLine
from .book import TOLD, Listener, TimelineBook
from .events import Event, EventReader, FieldError, Kind, LogLines
from .output import Progress
from .timelines import RuntimeLife, Runtimes
from .wording import counted, date_and_time, duration, plain


class EmptyLogError(Exception):
    """The log has no event of aoffload. The message says how many of its lines are JSON, and whether the keys of an
    event are missing in all of them."""


@attrs.define(eq=False)
class Scan:
    """Reads `path` and calls `listener`. Afterwards it can describe the log as a whole."""

    path: Path
    listener: Listener
    reader: EventReader
    book: TimelineBook
    runtimes: Runtimes = attrs.field(factory=Runtimes)
    first_s: float = 0.0
    last_s: float = 0.0
    num_back: int = 0
    """Events that are older than the one before them."""
    until_s: float | None = None
    """Later events are left out, and open timelines last until this time. None: until the last event."""
    num_later: int = 0
    """Events that are later than `until_s`."""
    _previous_s: float = 0.0
    _headless: RuntimeLife | None = None
    """The runtime that was open when the log began."""
    _takers: dict[Kind, Callable[[Event, RuntimeLife], None]] = attrs.field(init=False)
    """The handler of the events of each kind. Events of other kinds are dropped."""

    def __attrs_post_init__(self) -> None:
        book = self.book
        timelines = (Kind.REQUEST, Kind.PREFETCH, Kind.FETCH, Kind.DEMOTION, Kind.PIN)
        self._takers = dict.fromkeys(timelines, book.timeline_moved) | {
            Kind.TIER: book.tier_changed,
            Kind.DECLINED: book.fetch_missed,
            Kind.SKIPPED_FETCH: book.fetch_missed,
            Kind.JOB: book.job_moved,
            Kind.STEP: book.step_moved,
            Kind.CANCELLATION: book.request_cancelled,
            Kind.EARLY_START: lambda event, _: event.count("num_tokens"),  # checked: it changes no state of its request
        }

    @classmethod
    def of(cls, path: Path, listener: Listener, progress: TextIO, until_s: float | None = None) -> Scan:
        reader = EventReader(LogLines(path, Progress(ProgressLine(progress))))
        return cls(path, listener, reader, TimelineBook(listener), until_s=until_s)

    @property
    def duration_s(self) -> float:
        return self.last_s - self.first_s

    def run(self) -> None:
        """Raises `OSError` for a log that cannot be read, `EmptyLogError` for one without an event of aoffload."""
        for event in self.reader:
            if self.until_s is not None and event.at_s > self.until_s:
                self._leave_out_later(event)
            elif event.meaning.kind is not Kind.NOTE:
                self._look_at_time(event)
                try:
                    self._take(event)
                except FieldError:
                    self.reader.leave_out(event)
        if not self.reader.num_events:
            raise EmptyLogError(self.reader.content())
        self.last_s = max(self.last_s, self.until_s or 0.0)
        for runtime in self.runtimes.lives:
            self.book.runtime_over(runtime, self.last_s if runtime.closed_s is None else None)

    def _leave_out_later(self, event: Event) -> None:
        if event.meaning.kind is not Kind.NOTE:
            self.reader.num_events -= 1
            self.num_later += 1

    def remarks(self) -> list[str]:
        """Remarks for the reader on the quality of the log."""
        found = self.reader.parse_errors.sentences()
        if self.num_back:
            found.append(
                f"{counted(self.num_back, 'event')} older than the one before: merged logs, or a clock put back"
            )
        if self.num_later:
            found.append(f"{counted(self.num_later, 'event')} left out: later than --until")
        if self.book.num_early:
            early = counted(self.book.num_early, "timeline", "timelines")
            found.append(f"{early} without a beginning: a log from the middle, or of a level above debug")
        if self.runtimes.num_reopened:
            found.append(
                f"{counted(self.runtimes.num_reopened, 'runtime')} opened before the last one had closed: "
                "a program that died, or two with one logger (bind a field to tell them apart)"
            )
        return found

    def title(self) -> str:
        """One line with the number of events and their time span."""
        first, last = date_and_time(self.first_s), date_and_time(self.last_s)
        same_day = first[: len("2026-01-01 ")]
        span = f"{first} to {last.removeprefix(same_day)} UTC ({duration(self.duration_s)})"
        return f"{plain(self.path.name)}: {counted(self.reader.num_events, 'event')}, {span}"

    def _look_at_time(self, event: Event) -> None:
        at_s = event.at_s
        self.num_back += at_s < self._previous_s
        self.first_s = min(self.first_s or at_s, at_s)
        self.last_s = max(self.last_s, at_s)
        self._previous_s = at_s

    def _take(self, event: Event) -> None:
        kind = event.meaning.kind
        if kind is Kind.RUNTIME:
            self._take_runtime(event)
            return
        if kind is Kind.OPENING:
            return  # of a runtime that the log has not mentioned yet
        runtime = self.runtimes.of(event)
        if len(self.runtimes.lives) == 1 and not runtime.was_opened and runtime is not self._headless:
            self._headless = runtime
            self.listener.runtime_opened(runtime)
        if take := self._takers.get(kind):
            take(event, runtime)
        if kind in TOLD:
            self.listener.told(event, runtime)

    def _take_runtime(self, event: Event) -> None:
        if event.meaning.state == "closed":
            closed = self.runtimes.closed(event)
            if event.fields.get("num_quarantined_jobs"):
                self.listener.told(event, closed)
            self.book.runtime_over(closed)
            return
        opened, replaced = self.runtimes.opened(event)
        if replaced is not None:
            self.book.runtime_over(replaced)
            replaced.closed_s = replaced.last_s
        self.listener.runtime_opened(opened)
