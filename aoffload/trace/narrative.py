"""`request ID`: the timeline of one request in plain words."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import TextIO

from .._extensions.transfers import CacheTransferState
from .._kernel.states import RequestState
from .events import Event, FieldError, Kind
from .request_log import RequestLog, UnknownError, find_request_logs
from .runtimes import RuntimeLife
from .sentences import sentence
from .summary import STATES, meaning
from .table import text_table
from .timelines import FETCHING
from .wording import counted, date_and_time, duration, plain, share, time_of_day

__all__ = ["UnknownError", "narrative"]

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
    """Where its time went, and remarks on what the log lacks."""
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
