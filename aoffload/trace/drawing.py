"""The page's data as columns, filled while the log is read."""

from __future__ import annotations

import base64
import json
import sys
import zlib
from array import array
from collections.abc import Iterator
from typing import Any

import attrs

from .._common.tiers import TIERS, Tier
from .._extensions.pins import PinState
from .._extensions.transfers import CacheTransferState
from .._kernel.states import JobState, Outcome, RequestState
from .book import ALARMS, MEASURES, STEP_WORDS, TABLES, Listener, Usage, filled, filling
from .events import Event, Kind
from .sentences import note_of
from .timelines import (
    FACTS,
    FETCHING,
    LINKS,
    UNFINISHED,
    HopRow,
    JobTimeline,
    RuntimeLife,
    Timeline,
    name_of,
    pool_field,
)
from .wording import plain

# -- columns ---------------------------------------------------------------------------------------------------------
#
# Columns of numbers or text for the page: compressed while they grow, so that a long log needs little memory.

_MAX_TEXTS, _ONE_OF_MANY = 4_096, "(one of many)"
_VALUES_AT_ONCE = 8_192
_TYPES = {"B": "u1", "H": "u2", "I": "u4", "d": "f8"}
_LIMITS = {"B": 0xFF, "H": 0xFFFF, "I": 0xFFFF_FFFF}


@attrs.define(eq=False)
class _Deflated:
    """Compresses bytes as they are added."""

    _compressor: Any = attrs.field(factory=lambda: zlib.compressobj(6))
    _output: bytearray = attrs.field(factory=bytearray)

    def add(self, data: bytes) -> None:
        self._output += self._compressor.compress(data)

    def finish(self) -> str:
        """Base64 of a zlib stream. Nothing can be added after that."""
        self._output += self._compressor.flush()
        return base64.b64encode(self._output).decode()


@attrs.define(eq=False)
class NumberColumn:
    """`typecode` as for `array`: B, H, I (counts, limited to the type's largest) or d."""

    typecode: str
    num_values: int = 0
    _values: array[Any] = attrs.field(init=False)
    _deflated: _Deflated = attrs.field(factory=_Deflated)

    def __attrs_post_init__(self) -> None:
        self._values = array(self.typecode)

    def append(self, value: float) -> None:
        limit = _LIMITS.get(self.typecode)
        self._values.append(value if limit is None else min(int(value), limit))
        self.num_values += 1
        if len(self._values) >= _VALUES_AT_ONCE:
            self._flush()

    def finish(self) -> dict[str, Any]:
        """The column in the page's format."""
        self._flush()
        return {"type": _TYPES[self.typecode], "length": self.num_values, "data": self._deflated.finish()}

    def _flush(self) -> None:
        if sys.byteorder == "big":
            self._values.byteswap()
        self._deflated.add(self._values.tobytes())
        del self._values[:]


@attrs.define(eq=False)
class TextColumn:
    """Texts, stored as a JSON array."""

    num_values: int = 0
    _deflated: _Deflated = attrs.field(factory=_Deflated)

    def append(self, text: str) -> None:
        self._deflated.add((("," if self.num_values else "[") + json.dumps(text)).encode())
        self.num_values += 1

    def finish(self) -> dict[str, Any]:
        self._deflated.add(b"]" if self.num_values else b"[]")
        return {"type": "text", "length": self.num_values, "data": self._deflated.finish()}


@attrs.define(eq=False)
class Vocabulary:
    """Repeated texts by number. New texts beyond the limit share one entry."""

    texts: list[str] = attrs.field(factory=list)
    _numbers: dict[str, int] = attrs.field(factory=dict)

    def number(self, text: str) -> int:
        if text not in self._numbers:
            if len(self.texts) >= _MAX_TEXTS and text != _ONE_OF_MANY:
                return self.number(_ONE_OF_MANY)
            self._numbers[text] = len(self.texts)
            self.texts.append(text)
        return self._numbers[text]


# -- series ----------------------------------------------------------------------------------------------------------
#
# A count over time in bounded memory: values close together in time are merged.

MAX_BUCKETS = 4_096
_FIRST_WIDTH_S = 1e-6


@attrs.frozen
class Point:
    at_s: float
    value: int


@attrs.define
class _Bucket:
    first_s: float
    peak: int
    last_s: float
    last: int


@attrs.define(eq=False)
class Series:
    """Buckets of time. When there are too many, each becomes twice as wide. Each stores its highest and its last
    value."""

    _width_s: float = _FIRST_WIDTH_S
    _buckets: dict[int, _Bucket] = attrs.field(factory=dict)
    _value: int = -1

    def add(self, at_s: float, value: int) -> None:
        """The count is `value` from now on. Times do not decrease."""
        if value == self._value:
            return
        self._value = value
        key = int(at_s / self._width_s)
        bucket = self._buckets.get(key)
        if bucket is not None:
            bucket.peak, bucket.last_s, bucket.last = max(bucket.peak, value), at_s, value
            return
        self._buckets[key] = _Bucket(at_s, value, at_s, value)
        while len(self._buckets) > MAX_BUCKETS:
            self._widen()

    def points(self) -> Iterator[Point]:
        """The points in the order of time. Each holds until the next one."""
        for bucket in self._buckets.values():
            yield Point(bucket.first_s, bucket.peak)
            if bucket.last != bucket.peak:
                yield Point(bucket.last_s, bucket.last)

    def _widen(self) -> None:
        self._width_s *= 2
        buckets: dict[int, _Bucket] = {}
        for bucket in self._buckets.values():
            key = int(bucket.first_s / self._width_s)
            wider = buckets.get(key)
            if wider is None:
                buckets[key] = bucket
            else:
                wider.peak, wider.last_s, wider.last = max(wider.peak, bucket.peak), bucket.last_s, bucket.last
        self._buckets = buckets


# -- drawing ---------------------------------------------------------------------------------------------------------

MAX_DRAWN = 500_000
"""Bound on timelines, and on jobs, on a page, because browsers cannot handle many more. The others are only counted."""
KINDS = (Kind.REQUEST, Kind.PREFETCH, Kind.DEMOTION, Kind.FETCH, Kind.PIN, Kind.STEP)
MAX_NAMED = 4
MAX_NOTES = 500
"""Bound on alarms, switches of the eviction order and similar notes. The first ones are shown, the others only
counted."""
_NOT_KNOWN = 0xFFFF_FFFF
"""The value of a fact that no event had."""
_FIXED_WORDS = (
    *(state.value for states in (RequestState, JobState, PinState, CacheTransferState) for state in states),
    *STEP_WORDS, FETCHING, UNFINISHED, Outcome.REFUSED.value, "",
)  # fmt: skip
"""Words that the page's scripts look for. They have a number before the log's reasons and errors use up the numbers."""


def _columns(**typecodes: str) -> dict[str, NumberColumn]:
    return {name: NumberColumn(typecode) for name, typecode in typecodes.items()}


@attrs.define(eq=False)
class Drawing(Listener):
    """Collects the data of the page. Times are seconds since 1970 as doubles, precise to about a microsecond."""

    num_left_out: int = 0
    _names: TextColumn = attrs.field(factory=TextColumn)
    _owners: TextColumn = attrs.field(factory=TextColumn)
    _words: Vocabulary = attrs.field(factory=Vocabulary)
    """States, outcomes, reasons and errors."""
    _timelines: dict[str, NumberColumn] = attrs.field(
        factory=lambda: _columns(
            number="I", kind="B", runtime="H", lane="I", moves="I", outcome="H", reason="H", **dict.fromkeys(FACTS, "I")
        )
    )
    _moves: dict[str, NumberColumn] = attrs.field(factory=lambda: _columns(state="H", at_s="d"))
    _jobs: dict[str, NumberColumn] = attrs.field(
        factory=lambda: _columns(
            job_id="d", link="B", runtime="H", lane="I", outcome="H", error="H", timeline="I", num_blocks="I",
            num_bytes="d", launched_s="d", ended_s="d", copy_s="d",
        )
    )  # fmt: skip
    num_notes_left_out: int = 0
    _notes: list[dict[str, Any]] = attrs.field(factory=list)
    _usages: dict[int, dict[str, Series]] = attrs.field(factory=dict)

    def __attrs_post_init__(self) -> None:
        for word in _FIXED_WORDS:
            self._words.number(word)

    def timeline_over(self, timeline: Timeline) -> None:
        columns = self._timelines
        if columns["number"].num_values >= MAX_DRAWN:
            self.num_left_out += 1
            return
        self._names.append(timeline.name if timeline.kind is not Kind.STEP else _about_step(timeline))
        number = self._words.number
        columns["number"].append(timeline.number)
        columns["kind"].append(KINDS.index(timeline.kind))
        columns["runtime"].append(timeline.runtime.number)
        columns["lane"].append(timeline.lane)
        columns["moves"].append(len(timeline.states))
        columns["outcome"].append(number(timeline.outcome))
        columns["reason"].append(number(timeline.reason))
        for fact in FACTS:
            columns[fact].append(timeline.facts.get(fact, _NOT_KNOWN))
        for state, at_s in zip(timeline.states, timeline.times_s, strict=True):
            self._moves["state"].append(number(state))
            self._moves["at_s"].append(at_s)

    def job_over(self, job: JobTimeline) -> None:
        columns = self._jobs
        if columns["job_id"].num_values >= MAX_DRAWN:
            self.num_left_out += 1
            return
        self._owners.append("" if job.owner_number else job.owner)
        values = {
            "job_id": job.job_id,
            "link": LINKS.index(job.link),
            "runtime": job.runtime.number,
            "lane": job.lane,
            "outcome": self._words.number(job.outcome),
            "error": self._words.number(job.error),
            "timeline": job.owner_number,
            "num_blocks": job.num_blocks,
            "num_bytes": job.num_bytes,
            "launched_s": job.launched_s,
            "ended_s": job.ended_s,
            "copy_s": job.copy_s,
        }
        for name, value in values.items():
            columns[name].append(value)

    def told(self, event: Event, runtime: RuntimeLife) -> None:
        if event.meaning.kind not in (*ALARMS, Kind.EVICTION, Kind.WEIGHTS, Kind.QUOTA):
            return
        text = note_of(event)
        if len(self._notes) < MAX_NOTES:
            self._notes.append({"at_s": event.at_s, "runtime": runtime.number, "text": text})
        else:
            self.num_notes_left_out += 1

    def usage_changed(self, runtime: RuntimeLife, at_s: float, usage: Usage) -> None:
        series = self._usages.get(runtime.number)
        if series is None:
            series = self._usages[runtime.number] = {measure: Series() for measure in MEASURES}
        for measure, counts in series.items():
            counts.add(at_s, usage[measure])

    def finish(self) -> dict[str, Any]:
        """The data in the page's format. Nothing can be added after that."""
        return {
            "kinds": [kind.value for kind in KINDS],
            "links": [_hop(link) for link in LINKS],
            "tiers": [_tier(row.tier) for row in TIERS],
            "timelines": {"name": self._names.finish(), **_finish(self._timelines)},
            "moves": _finish(self._moves),
            "jobs": {"owner": self._owners.finish(), **_finish(self._jobs)},
            "words": self._words.texts,
            "notes": self._notes,
            "num_notes_left_out": self.num_notes_left_out,
            "usages": {str(number): _usage(series) for number, series in self._usages.items()},
        }


def _hop(link: HopRow) -> dict[str, str]:
    return {"name": link.name, "tier": name_of(link.tier), "direction": link.direction.value}


def _tier(tier: Tier) -> dict[str, str]:
    """The plot of a tier: the field of a runtime with its pool, and the measures of the area and of the curve."""
    area = TABLES if tier is Tier.DEVICE else filled(tier)
    return {"name": name_of(tier), "pool": pool_field(tier), "area": area, "line": filling(tier)}


def _about_step(step: Timeline) -> str:
    """The number of a step and a few of its requests, ended ones first."""
    over = [f"{name} (over)" for name in step.kept]
    names = over + [plain(name) for name in step.members if plain(name) not in step.kept]
    rest = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return f"{step.name} of {', '.join(names[:MAX_NAMED])}{rest}" if names else step.name


def _finish(columns: dict[str, NumberColumn]) -> dict[str, Any]:
    return {name: column.finish() for name, column in columns.items()}


def _usage(series: dict[str, Series]) -> dict[str, Any]:
    found = {}
    for measure, counts in series.items():
        times, values = NumberColumn("d"), NumberColumn("I")
        for point in counts.points():
            times.append(point.at_s)
            values.append(point.value)
        found[measure] = {"at_s": times.finish(), "value": values.finish()}
    return found
