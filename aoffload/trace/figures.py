"""The figures of a summary, updated while the log is read."""

from __future__ import annotations

import heapq

import attrs

from .durations import Durations
from .events import Event, Kind
from .links import LINKS, HopRow
from .listener import Listener
from .runtimes import RuntimeLife
from .sentences import ruling, storage
from .tally import Tally
from .timelines import UNFINISHED, JobTimeline, Timeline

__all__ = ["NUM_OPEN", "NUM_SLOWEST", "Figures", "JobFigures"]

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
    """The runtime to look at, by name or number; empty for all of them."""
    outcomes: dict[Kind, Tally] = attrs.field(factory=dict)
    in_state: dict[str, Durations] = attrs.field(factory=dict)
    """Durations of requests by state; a state that is entered twice counts twice."""
    steps: Durations = attrs.field(factory=Durations)
    num_refused: int = 0
    """Extensions that found no room."""
    declines: Tally = attrs.field(factory=Tally)
    """Loads and fetches that were not worth their time."""
    num_open: int = 0
    """Requests and steps that are not over."""
    num_pending: int = 0
    """Matches that were answered with pending."""
    until_running: Durations = attrs.field(factory=Durations)
    """Durations from the match until the request runs for the first time."""
    in_all: Durations = attrs.field(factory=Durations)
    tokens: Tally = attrs.field(factory=Tally)
    """Sums of the facts of requests that were given blocks."""
    aborts: Tally = attrs.field(factory=Tally)
    skipped_fetches: Tally = attrs.field(factory=Tally)
    """By the tier that is left alone."""
    switches: Tally = attrs.field(factory=Tally)
    """By tier and the order that rules from then on."""
    hints: Tally = attrs.field(factory=Tally)
    skipped_stores: Tally = attrs.field(factory=Tally)
    skipped_blocks: Tally = attrs.field(factory=Tally)
    alarms: Tally = attrs.field(factory=Tally)
    jobs: dict[HopRow, JobFigures] = attrs.field(factory=lambda: {link: JobFigures() for link in LINKS})
    _slowest: list[tuple[float, int, Timeline]] = attrs.field(factory=list)
    _open: list[tuple[float, int, Timeline]] = attrs.field(factory=list)

    def slowest(self) -> list[Timeline]:
        """Requests that are over, the slowest first."""
        return _longest_first(self._slowest)

    def still_open(self) -> list[Timeline]:
        """Requests and steps that are not over, those that are open for the longest first."""
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

    def refused(self, event: Event, runtime: RuntimeLife) -> None:
        event.count("num_needed")
        self.num_refused += self.is_wanted(runtime)

    def declined(self, event: Event, runtime: RuntimeLife) -> None:
        event.count("num_tokens")
        if self.is_wanted(runtime):
            self.declines.add(event.meaning.state)

    def fetch_skipped(self, event: Event, runtime: RuntimeLife) -> None:
        tier = event.text("tier")
        if self.is_wanted(runtime):
            self.skipped_fetches.add(tier)

    def eviction_switched(self, event: Event, runtime: RuntimeLife) -> None:
        words = ruling(event)
        if self.is_wanted(runtime):
            self.switches.add(words)

    def hint(self, event: Event, runtime: RuntimeLife) -> None:
        what = "given" if event.meaning.state == "given" else event.text("outcome")
        if self.is_wanted(runtime):
            self.hints.add(what)

    def store_skipped(self, event: Event, runtime: RuntimeLife) -> None:
        reason, num_blocks = event.text("reason"), event.count("num_blocks")
        if not self.is_wanted(runtime):
            return
        self.skipped_stores.add(reason)
        self.skipped_blocks.add(reason, num_blocks)

    def alarm(self, event: Event, runtime: RuntimeLife) -> None:
        if not self.is_wanted(runtime):
            return
        error = event.fields.get("error") or event.fields.get("reason")
        if event.name == "slow_wait":
            error = f"{event.text('holder')} holds most"
        elif event.name == "slow_step":
            error = f"step {event.count('step_id')} holds {event.count('num_blocks')} blocks"
        elif event.meaning.state.startswith("storage_"):
            error = storage(event) + (f": {error}" if error else "")
        self.alarms.add(f"{event.name}: {error}" if error else event.name)

    def is_wanted(self, runtime: RuntimeLife) -> bool:
        """Whether its figures are among these."""
        return not self.wanted or runtime.is_called(self.wanted)

    def _add_request(self, timeline: Timeline) -> None:
        for interval in timeline.intervals():
            self.in_state.setdefault(interval.state, Durations()).add(interval.duration_s)
        self.in_all.add(timeline.duration_s)
        self.num_pending += timeline.facts.get("num_pending", 0)
        if "running" in timeline.states:
            self.until_running.add(timeline.times_s[timeline.states.index("running")] - timeline.start_s)
        if "num_blocks" in timeline.facts:
            for fact, count in timeline.facts.items():
                self.tokens.add(fact, count)
        if timeline.outcome == "aborted":
            self.aborts.add(f"{timeline.reason} while {timeline.last_state()}")
        if timeline.outcome != UNFINISHED:
            _keep(self._slowest, timeline, NUM_SLOWEST)


def _keep(longest: list[tuple[float, int, Timeline]], timeline: Timeline, number: int) -> None:
    """Add `timeline` to the heap of the `number` longest ones."""
    entry = (timeline.duration_s, -timeline.number, timeline)
    if len(longest) < number:
        heapq.heappush(longest, entry)
    else:
        heapq.heappushpop(longest, entry)


def _longest_first(heap: list[tuple[float, int, Timeline]]) -> list[Timeline]:
    return [timeline for _, _, timeline in sorted(heap, key=lambda entry: (-entry[0], entry[1]))]
