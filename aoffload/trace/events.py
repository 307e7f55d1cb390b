"""Events: the lines of a log, with fields that are checked on use, and counts of the lines that are left out."""

from __future__ import annotations

import datetime
import enum
import gzip
import json
import sys
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, cast

import attrs

from .._extensions.overlap import OverlapState
from .._extensions.pins import PinState
from .._extensions.transfers import CacheTransferState
from .._kernel.states import JobState, RequestState
from .output import Progress
from .wording import counted, plain

# -- lines -----------------------------------------------------------------------------------------------------------
#
# The lines of a log, one after the other, in bounded memory however long the log or a line is.

MAX_LINE_BYTES = 1 << 20
"""No event is that long. A longer line is cut, so it is not JSON and counts as such."""
LINES_PER_UPDATE = 2048
GZIP = b"\x1f\x8b"
"""The first bytes of a compressed log, whatever its name is."""


@attrs.define(eq=False)
class LogLines:
    """Iterates over the lines of `path`, which may be compressed with gzip, or of standard input for `-`."""

    path: Path
    progress: Progress
    num_lines: int = 0
    """Lines read so far, which is the number of the current line."""
    num_bytes: int = 0

    def __iter__(self) -> Iterator[bytes]:
        try:
            if str(self.path) == "-":
                yield from self._lines(sys.stdin.buffer)
                return
            with self.path.open("rb") as file:
                if file.peek(len(GZIP)).startswith(GZIP):
                    yield from self._unpacked(file)
                    return
                self.progress.total_bytes = self.path.stat().st_size
                yield from self._lines(file)
        finally:
            self.progress.line.clear()

    def _unpacked(self, file: BinaryIO) -> Iterator[bytes]:
        """If the compressed data is cut off, the last line has no newline."""
        try:
            with gzip.open(file) as unpacked:
                yield from self._lines(cast(BinaryIO, unpacked))
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            self.num_lines += 1
            yield f"the compressed log is cut off: {error}".encode()

    def _lines(self, file: BinaryIO) -> Iterator[bytes]:
        while line := file.readline(MAX_LINE_BYTES):
            self.num_lines += 1
            self.num_bytes += len(line)
            if len(line) == MAX_LINE_BYTES and not line.endswith(b"\n"):
                line = self._without_rest(line, file)
            if self.num_lines % LINES_PER_UPDATE == 0:
                self.progress.update(self.num_bytes, self.num_lines)
            yield line

    def _without_rest(self, line: bytes, file: BinaryIO) -> bytes:
        """Skip the rest of a line that is too long. The line ends with a newline only if it had one, because a log may
        be cut off."""
        while rest := file.readline(MAX_LINE_BYTES):
            self.num_bytes += len(rest)
            if rest.endswith(b"\n"):
                return line[:-1] + b"\n"
        return line


# -- parse errors ----------------------------------------------------------------------------------------------------
#
# Parse errors and foreign events: lines left out, counted by reason, with an example of each.

MAX_EXAMPLE = 60


class ParseError(enum.Enum):
    """Why a line was left out, in words for `1 line ...`."""

    NOT_JSON = "no JSON"
    CUT_OFF = "cut off: the last line has no end"
    NO_EVENT = "JSON, but no event"
    NO_TIME = "without a timestamp that can be read"
    MALFORMED = "one of our events with a field missing or of another type"
    FOREIGN = "an event of another logger"


@attrs.define
class _Count:
    num_lines: int
    first_line: int
    example: str


@attrs.define(eq=False)
class ParseErrors:
    """Counts of the lines left out, in bounded memory."""

    _counts: dict[ParseError, _Count] = attrs.field(factory=dict)

    def add(self, parse_error: ParseError, line_number: int, example: str) -> None:
        """Count a line. The first of each kind is stored as the example."""
        count = self._counts.get(parse_error)
        if count is None:
            self._counts[parse_error] = _Count(1, line_number, plain(example[:MAX_EXAMPLE]))
        else:
            count.num_lines += 1

    def num_lines(self, parse_error: ParseError) -> int:
        return self._counts[parse_error].num_lines if parse_error in self._counts else 0

    def sentences(self) -> list[str]:
        """One sentence for each kind that occurred."""
        return [
            f"{counted(count.num_lines, 'line')} left out: {parse_error.value} "
            f"(first: line {count.first_line}, {example})"
            for parse_error in ParseError
            if (count := self._counts.get(parse_error)) is not None and (example := count.example or "empty")
        ]


# -- events ----------------------------------------------------------------------------------------------------------

MAX_TIME_S = 250_000_000_000.0
"""The year 9892: later times cannot be shown as a date."""


class Kind(enum.Enum):
    """The subject of an event."""

    REQUEST = "request"
    PREFETCH = "prefetch"
    DEMOTION = "demotion"
    FETCH = "fetch"
    DECLINED = "declined"
    """A request does without a fetch, because computing is faster."""
    SKIPPED_FETCH = "skipped fetch"
    """A request does without a fetch, because the tier fails and is disabled for a while."""
    EVICTION = "eviction"
    """A tier with learned eviction uses another order."""
    WEIGHTS = "weights"
    """The engine computes with other weights."""
    QUOTA = "quota"
    """A quota begins or ceases to cut the stores of a tenant."""
    HINT = "hint"
    """The answer to a hint of a client."""
    TIER = "tier"
    """A tier below host memory: opened, or read back."""
    PIN = "pin"
    JOB = "job"
    STEP = "step"
    EARLY_START = "early_start"
    CANCELLATION = "cancellation"
    """Cancellation of a request. Its task may take some time to leave."""
    REFUSAL = "refusal"
    """A call of a request found too few free blocks, and changed nothing."""
    SKIPPED_STORE = "store"
    RUNTIME = "runtime"
    OPENING = "opening"
    """Progress of a runtime that is not open yet."""
    ALARM = "alarm"
    NOTE = "note"
    """An event of another logger, about a request of a runtime."""

    __hash__ = object.__hash__  # the one of enums is Python code, too slow for every event


@attrs.frozen
class Meaning:
    kind: Kind
    state: str
    """The state that was entered, for kinds with states. Otherwise a name for the event."""


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
        "weights_changed": Meaning(Kind.WEIGHTS, "changed"),
        "quota_reached": Meaning(Kind.QUOTA, "reached"),
        "quota_cleared": Meaning(Kind.QUOTA, "left"),
        "hint_answered": Meaning(Kind.HINT, "answered"),
        "fetch_declined": Meaning(Kind.DECLINED, "fetch"),
        "load_declined": Meaning(Kind.DECLINED, "load"),
    }  # fmt: skip


MEANINGS: Mapping[str, Meaning] = _meanings()
"""The meaning of every event of aoffload/_observe/log.py, by name. A test compares the two."""


@attrs.frozen(eq=False)
class Event:
    name: str
    at_s: float
    """Seconds since 1970."""
    fields: dict[str, Any]
    meaning: Meaning

    def count(self, name: str) -> int:
        """A field that has to be an integer of at least 0."""
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

    def content(self) -> str:
        """The number of lines, and how many of them are JSON. If none of these has the keys of an event, also that."""
        counts = {error: self.parse_errors.num_lines(error) for error in ParseError}
        num_json = self.lines.num_lines - counts[ParseError.NOT_JSON] - counts[ParseError.CUT_OFF]
        lacks_keys = 0 < num_json == counts[ParseError.NO_EVENT] + counts[ParseError.NO_TIME]
        keys = ", none with the keys `event` and `timestamp` (ISO 8601 or seconds since 1970)" if lacks_keys else ""
        return f"{counted(self.lines.num_lines, 'line')}, {num_json:,} of them JSON{keys}"

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
