"""The figures of a summary, updated while the log is read."""

from __future__ import annotations

import heapq
import math

import attrs

from .book import Listener
from .events import Event, Kind
from .sentences import answer_to_hint, quota, ruling, storage
from .timelines import LINKS, UNFINISHED, HopRow, JobTimeline, RuntimeLife, Timeline

# -- durations -------------------------------------------------------------------------------------------------------
#
# Percentiles of many durations in little memory.

_EXACT = 4_096
"""Up to this many durations are stored exactly."""
_GROWTH = math.log(1.01)
"""Each bucket is one percent wider than the one before, so its middle is within half a percent of its values."""
_FLOOR_S = 1e-7


@attrs.define(eq=False)
class Durations:
    """Exact for a few thousand durations. Beyond that, a histogram with percentiles within half a percent."""

    num: int = 0
    total_s: float = 0.0
    max_s: float = 0.0
    _values: list[float] = attrs.field(factory=list)
    _buckets: dict[int, int] = attrs.field(factory=dict)

    def add(self, seconds: float) -> None:
        self.num += 1
        self.total_s += seconds
        self.max_s = max(self.max_s, seconds)
        if self.num <= _EXACT:
            self._values.append(seconds)
            return
        for value in self._values:
            self._count(value)
        self._values.clear()
        self._count(seconds)

    def percentile(self, percent: float) -> float:
        """The smallest duration that `percent` percent of all durations do not exceed."""
        rank = max(1, math.ceil(self.num * percent / 100))
        if not self.num or rank == self.num:
            return self.max_s
        if self._values:
            return sorted(self._values)[rank - 1]
        for bucket in sorted(self._buckets):
            rank -= self._buckets[bucket]
            if rank <= 0:
                return min(self.max_s, 0.0 if bucket < 0 else _FLOOR_S * math.exp((bucket + 0.5) * _GROWTH))
        return self.max_s

    def _count(self, seconds: float) -> None:
        bucket = int(math.log(seconds / _FLOOR_S) / _GROWTH) if seconds > _FLOOR_S else -1
        self._buckets[bucket] = self._buckets.get(bucket, 0) + 1


# -- tally -----------------------------------------------------------------------------------------------------------
#
# Counts by name, for names from a log: a bounded number of names, and the rest together.

MAX_NAMES = 1_000
MAX_LENGTH = 200
OTHERS = "(others)"


@attrs.define(eq=False)
class Tally:
    _counts: dict[str, int] = attrs.field(factory=dict)

    def add(self, name: str, count: int = 1) -> None:
        name = name[:MAX_LENGTH]
        if name not in self._counts and len(self._counts) >= MAX_NAMES:
            name = OTHERS
        self._counts[name] = self._counts.get(name, 0) + count

    def count(self, name: str) -> int:
        return self._counts.get(name, 0)

    @property
    def total(self) -> int:
        return sum(self._counts.values())

    def highest_first(self) -> list[tuple[str, int]]:
        """Names and counts, highest first. Equal counts are ordered by name."""
        return sorted(self._counts.items(), key=lambda item: (-item[1], item[0]))


# -- figures ---------------------------------------------------------------------------------------------------------

NUM_SLOWEST = 10
NUM_OPEN = 10


@attrs.define(eq=False)
class JobFigures:
    """All jobs of one link."""

    outcomes: Tally = attrs.field(factory=Tally)
    num_blocks: int = 0
    """Blocks of completed jobs; `num_bytes` likewise."""
    num_bytes: int = 0
    copies: Durations = attrs.field(factory=Durations)
    """Durations of the copies alone."""
    spans: Durations = attrs.field(factory=Durations)
    """Durations from launch to settlement."""

    def add(self, job: JobTimeline) -> None:
        self.outcomes.add(job.outcome)
        if job.outcome == "completed":
            self.num_blocks += job.num_blocks
            self.num_bytes += job.num_bytes
            self.copies.add(job.copy_s)
            self.spans.add(max(0.0, job.ended_s - job.launched_s))


@attrs.define(eq=False)
class Figures(Listener):
    """Collects the figures. Memory does not grow with the length of the log."""

    wanted: str = ""
    """The runtime to report on, by name or number. Empty for all of them."""
    outcomes: dict[Kind, Tally] = attrs.field(factory=dict)
    in_state: dict[str, Durations] = attrs.field(factory=dict)
    """Durations of requests by state. A state that is entered twice counts twice."""
    steps: Durations = attrs.field(factory=Durations)
    refusals: Tally = attrs.field(factory=Tally)
    """Extensions that found too few free blocks."""
    declines: Tally = attrs.field(factory=Tally)
    """Loads and fetches that were not worth their time."""
    num_open: int = 0
    """Requests and steps that have not ended."""
    until_running: Durations = attrs.field(factory=Durations)
    """Durations from the match until the request runs for the first time."""
    in_all: Durations = attrs.field(factory=Durations)
    tokens: Tally = attrs.field(factory=Tally)
    """Sums of the facts of requests that got blocks."""
    aborts: Tally = attrs.field(factory=Tally)
    skipped_fetches: Tally = attrs.field(factory=Tally)
    """Skipped fetches by disabled tier."""
    switches: Tally = attrs.field(factory=Tally)
    """Switches by tier and new eviction order."""
    weights: Tally = attrs.field(factory=Tally)
    quotas: Tally = attrs.field(factory=Tally)
    hints: Tally = attrs.field(factory=Tally)
    """Answers to hints of clients by verb, outcome and reason."""
    skipped_stores: Tally = attrs.field(factory=Tally)
    skipped_blocks: Tally = attrs.field(factory=Tally)
    alarms: Tally = attrs.field(factory=Tally)
    jobs: dict[HopRow, JobFigures] = attrs.field(factory=lambda: {link: JobFigures() for link in LINKS})
    _slowest: list[tuple[float, int, Timeline]] = attrs.field(factory=list)
    _open: list[tuple[float, int, Timeline]] = attrs.field(factory=list)

    def slowest(self) -> list[Timeline]:
        """Requests that have ended, slowest first."""
        return _longest_first(self._slowest)

    def still_open(self) -> list[Timeline]:
        """Requests and steps that have not ended, longest open first."""
        return _longest_first(self._open)

    def timeline_over(self, timeline: Timeline) -> None:
        if not self.is_wanted(timeline.runtime):
            return
        self.outcomes.setdefault(timeline.kind, Tally()).add(timeline.outcome)
        if timeline.outcome == UNFINISHED and timeline.kind in (Kind.REQUEST, Kind.STEP):
            self.num_open += 1
            _keep(self._open, timeline, NUM_OPEN)
        if timeline.kind is Kind.REQUEST:
            self._add_request(timeline)
        elif timeline.kind is Kind.STEP:
            self.steps.add(timeline.duration_s)

    def job_over(self, job: JobTimeline) -> None:
        if not self.is_wanted(job.runtime):
            return
        self.jobs[job.link].add(job)
        if job.outcome == "failed":
            self.alarms.add(f"{job.link.name} failed: {job.error or 'no error given'}")

    def told(self, event: Event, runtime: RuntimeLife) -> None:
        counted, name, number = self._counted(event)  # read in any case: a field may be wrong
        if self.is_wanted(runtime):
            counted.add(name)
            if event.meaning.kind is Kind.SKIPPED_STORE:
                self.skipped_blocks.add(name, number)

    def _counted(self, event: Event) -> tuple[Tally, str, int]:
        """The tally that counts `event`, the name to count, and a number of the event."""
        state = event.meaning.state
        match event.meaning.kind:
            case Kind.REFUSAL:
                return self.refusals, state, event.count("num_needed")
            case Kind.DECLINED:
                return self.declines, state, event.count("num_tokens")
            case Kind.SKIPPED_FETCH:
                return self.skipped_fetches, event.text("tier"), 1
            case Kind.EVICTION:
                return self.switches, ruling(event), 1
            case Kind.WEIGHTS:
                return self.weights, state, 1
            case Kind.QUOTA:
                return self.quotas, quota(event), 1
            case Kind.HINT:
                return self.hints, answer_to_hint(event), 1
            case Kind.SKIPPED_STORE:
                return self.skipped_stores, event.text("reason"), event.count("num_blocks")
            case _:
                return self.alarms, _alarm(event), 1

    def is_wanted(self, runtime: RuntimeLife) -> bool:
        """Whether its figures are among these."""
        return not self.wanted or runtime.is_called(self.wanted)

    def _add_request(self, timeline: Timeline) -> None:
        for interval in timeline.intervals():
            self.in_state.setdefault(interval.state, Durations()).add(interval.duration_s)
        self.in_all.add(timeline.duration_s)
        if "running" in timeline.states:
            self.until_running.add(timeline.times_s[timeline.states.index("running")] - timeline.start_s)
        if "num_blocks" in timeline.facts:
            for fact, count in timeline.facts.items():
                self.tokens.add(fact, count)
        if timeline.outcome == "aborted":
            self.aborts.add(f"{timeline.reason} while {timeline.last_state()}")
        if timeline.outcome != UNFINISHED:
            _keep(self._slowest, timeline, NUM_SLOWEST)


def _alarm(event: Event) -> str:
    """A description of an event that needs attention, with its error."""
    error = event.fields.get("error") or event.fields.get("reason")
    if event.name == "slow_wait":
        error = f"{event.text('holder')} holds most"
    elif event.name == "slow_step":
        error = f"step {event.count('step_id')} holds {event.count('num_blocks')} blocks"
    elif event.meaning.state.startswith("storage_"):
        error = storage(event) + (f": {error}" if error else "")
    return f"{event.name}: {error}" if error else event.name


def _keep(longest: list[tuple[float, int, Timeline]], timeline: Timeline, number: int) -> None:
    """Add `timeline` to the heap of the `number` longest ones."""
    entry = (timeline.duration_s, -timeline.number, timeline)
    if len(longest) < number:
        heapq.heappush(longest, entry)
    else:
        heapq.heappushpop(longest, entry)


def _longest_first(heap: list[tuple[float, int, Timeline]]) -> list[Timeline]:
    return [timeline for _, _, timeline in sorted(heap, key=lambda entry: (-entry[0], entry[1]))]
