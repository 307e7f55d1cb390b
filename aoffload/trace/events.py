"""Events: the lines of a log, with fields that are checked when they are used."""

from __future__ import annotations

import datetime
import enum
import json
from collections.abc import Iterator, Mapping
from typing import Any

import attrs

from .._extensions.overlap import OverlapState
from .._extensions.pins import PinState
from .._extensions.transfers import CacheTransferState
from .._kernel.states import JobState, RequestState
from .lines import LogLines
from .parse_errors import ParseError, ParseErrors

__all__ = ["MEANINGS", "NOTE", "FieldError", "Event", "EventReader", "Kind", "Meaning", "time_of"]

MAX_TIME_S = 250_000_000_000.0
"""The year 9892: later times cannot be shown as a date."""


class Kind(enum.Enum):
    """What an event is about."""

    REQUEST = "request"
    PREFETCH = "prefetch"
    DEMOTION = "demotion"
    FETCH = "fetch"
    DECLINED = "declined"
    """A fetch that a request does without, since computing is sooner."""
    SKIPPED_FETCH = "skipped fetch"
    """A fetch that a request does without, since the tier fails and is left alone."""
    EVICTION = "eviction"
    """Another order rules in a tier whose eviction learns."""
    HINT = "hint"
    TIER = "tier"
    """A tier below host memory: opened, or read back."""
    PIN = "pin"
    JOB = "job"
    STEP = "step"
    EARLY_START = "early_start"
    CANCELLATION = "cancellation"
    """Of a request, whose task may take its time to leave."""
    REFUSAL = "refusal"
    """A call of a request that had no room, and changed nothing."""
    SKIPPED_STORE = "store"
    RUNTIME = "runtime"
    OPENING = "opening"
    """Progress of a runtime that is not open yet."""
    ALARM = "alarm"
    NOTE = "note"
    """An event of another logger, about a request of a runtime."""

    __hash__ = object.__hash__  # that of enums is Python code, too slow for every event


@attrs.frozen
class Meaning:
    kind: Kind
    state: str
    """The state that was entered, for kinds with states; else what happened."""


class FieldError(Exception):
    """A field is missing, or its type or value is wrong."""


NOTE = Meaning(Kind.NOTE, "")


def _meanings() -> dict[str, Meaning]:
    found = {f"request_{state.value}": Meaning(Kind.REQUEST, state.value) for state in RequestState}
    found |= {f"job_{state.value}": Meaning(Kind.JOB, state.value) for state in JobState}
    found |= {f"pin_{state.value}": Meaning(Kind.PIN, state.value) for state in PinState}
    found |= {f"load_overlap_{state.value}": Meaning(Kind.EARLY_START, state.value) for state in OverlapState}
    for kind in (Kind.PREFETCH, Kind.DEMOTION, Kind.FETCH):
        found |= {f"{kind.value}_{state.value}": Meaning(kind, state.value) for state in CacheTransferState}
    for face in ("runtime", "ledger"):
        found |= {f"{face}_{state}": Meaning(Kind.RUNTIME, state) for state in ("opened", "closed")}
    alarms = (
        "transport_stalled", "transport_recovered", "transport_failed", "worker_failed", "cache_turned_off",
        "loads_paused", "loads_resumed", "slow_wait", "slow_step", "disk_turned_off", "disk_records_dropped",
        "remote_turned_off", "storage_left_alone", "storage_back",
    )  # fmt: skip
    return found | {name: Meaning(Kind.ALARM, name) for name in alarms} | {
        "store_skipped": Meaning(Kind.SKIPPED_STORE, "skipped"),
        "step_begun": Meaning(Kind.STEP, "begun"),
        "step_ended": Meaning(Kind.STEP, "ended"),
        "request_cancelled": Meaning(Kind.CANCELLATION, "cancelled"),
        "extension_refused": Meaning(Kind.REFUSAL, "extension"),
        "host_memory_page_locked": Meaning(Kind.OPENING, "page-locked"),
        "disk_opened": Meaning(Kind.TIER, "opened"),
        "disk_restored": Meaning(Kind.TIER, "restored"),
        "remote_opened": Meaning(Kind.TIER, "remote"),
        "fetch_skipped": Meaning(Kind.SKIPPED_FETCH, "skipped"),
        "eviction_switched": Meaning(Kind.EVICTION, "switched"),
        "hint_given": Meaning(Kind.HINT, "given"),
        "hint_ended": Meaning(Kind.HINT, "ended"),
        "fetch_declined": Meaning(Kind.DECLINED, "fetch"),
        "load_declined": Meaning(Kind.DECLINED, "load"),
    }  # fmt: skip


MEANINGS: Mapping[str, Meaning] = _meanings()
"""The meaning of every event of aoffload/telemetry.py, by name; a test compares the two."""


@attrs.frozen(eq=False)
class Event:
    name: str
    at_s: float
    """Seconds since 1970."""
    fields: dict[str, Any]
    meaning: Meaning

    def count(self, name: str) -> int:
        """A field that has to be a whole number, zero or more."""
        value = self.fields.get(name)
        if type(value) is not int or not 0 <= value < 1 << 53:
            raise FieldError(name)
        return value

    def text(self, name: str) -> str:
        value = self.fields.get(name)
        if type(value) is not str:
            raise FieldError(name)
        return value

    def texts(self, name: str) -> list[str]:
        value = self.fields.get(name)
        if type(value) is not list or any(type(one) is not str for one in value):
            raise FieldError(name)
        return value

    def seconds(self, name: str) -> float:
        value: Any = self.fields.get(name)
        if type(value) not in (int, float) or not 0.0 <= value < MAX_TIME_S:
            raise FieldError(name)
        return float(value)


@attrs.define(eq=False)
class EventReader:
    """Iterates over the events of aoffload, and over others with a request id. Counts all other lines."""

    lines: LogLines
    parse_errors: ParseErrors = attrs.field(factory=ParseErrors)
    num_events: int = 0
    """Events of aoffload."""

    def __iter__(self) -> Iterator[Event]:
        for line in self.lines:
            event = self._parse(line)
            if event is not None:
                yield event

    def leave_out(self, event: Event) -> None:
        """Count an event of aoffload as malformed after all."""
        self.num_events -= 1
        self.parse_errors.add(ParseError.MALFORMED, self.lines.num_lines, event.name)

    def _parse(self, line: bytes) -> Event | None:
        try:
            fields = json.loads(line)
        except (ValueError, RecursionError):
            self._count(ParseError.NOT_JSON if line.endswith(b"\n") else ParseError.CUT_OFF, line)
            return None
        name = fields.get("event") if type(fields) is dict else None
        if type(name) is not str:
            self._count(ParseError.NO_EVENT, line)
            return None
        meaning = MEANINGS.get(name, NOTE)
        at_s = time_of(fields.get("timestamp"))
        if meaning is NOTE:
            self.parse_errors.add(ParseError.FOREIGN, self.lines.num_lines, name)
            return Event(name, at_s, fields, NOTE) if at_s is not None and "request_id" in fields else None
        if at_s is None:
            self._count(ParseError.NO_TIME, line)
            return None
        self.num_events += 1
        return Event(name, at_s, fields, meaning)

    def _count(self, parse_error: ParseError, line: bytes) -> None:
        self.parse_errors.add(parse_error, self.lines.num_lines, line[:80].decode(errors="replace").strip())


def time_of(value: Any) -> float | None:
    """ISO 8601 or seconds since 1970, as structlog's TimeStamper writes them; UTC if it names no zone."""
    if type(value) is str:
        try:
            moment = datetime.datetime.fromisoformat(value)
        except ValueError:
            return None
        value = (moment if moment.tzinfo is not None else moment.replace(tzinfo=datetime.UTC)).timestamp()
    if type(value) not in (int, float) or not 0.0 <= value < MAX_TIME_S:
        return None  # also other types, and nan
    return float(value)
