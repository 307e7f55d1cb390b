"""Assembles events into request timelines. A timeline that has ended goes to the listener and is forgotten."""

from __future__ import annotations

import heapq
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from typing import TypeVar

import attrs

from .._common.tiers import TIERS, Tier
from .._extensions.pins import PinState
from .._extensions.transfers import CacheTransferState
from .._kernel.plans import Answer
from .._kernel.states import REQUEST_MOVES, JobState, Outcome, RequestState
from .events import Event, Kind
from .timelines import FACTS, FETCHING, UNFINISHED, HopRow, JobTimeline, RuntimeLife, Timeline, link_of, name_of
from .wording import plain

# -- lanes -----------------------------------------------------------------------------------------------------------
#
# Lanes: places items that overlap in time in as few rows as possible.


@attrs.define(eq=False)
class Lanes:
    """An item takes the lowest free row when it begins."""

    num_lanes: int = 0
    _free: list[int] = attrs.field(factory=list)

    def take(self) -> int:
        if self._free:
            return heapq.heappop(self._free)
        self.num_lanes += 1
        return self.num_lanes - 1

    def give(self, lane: int) -> None:
        heapq.heappush(self._free, lane)


# -- occupancy -------------------------------------------------------------------------------------------------------
#
# Occupancy of the pools, as far as it follows from the events.
#
# No event carries the counts of a pool. Sums of other counts are less exact, and `DERIVED` tells the reader so.

DERIVED = (
    "Estimated, because no event carries the counts of a pool. Device: the blocks in the tables of requests and "
    "prefetches, as allocated at the start. A block that several requests share counts once for each of them, so the "
    "sum can be larger than the pool. Blocks that decoding adds are not counted. Other tiers: the blocks that copies "
    "have filled, and on a disk also those that an earlier process left, at most the pool. Blocks that were evicted "
    "since then are not subtracted. If an engine owns the device blocks, only those that are being loaded are known."
)


def filling(tier: Tier) -> str:
    """The measure for blocks of `tier` that launched jobs write to."""
    return f"{name_of(tier)}_filling"


def filled(tier: Tier) -> str:
    """The measure for blocks of `tier` that landed copies have filled. At most this many are in use."""
    return f"{name_of(tier)}_filled"


TABLES = "device_tables"
"""The measure of the device: blocks in block tables."""
_BELOW_DEVICE = tuple(row.tier for row in TIERS if row.above is not None)
MEASURES = (TABLES, *(filling(row.tier) for row in TIERS), *map(filled, _BELOW_DEVICE))

Usage = Mapping[str, int]
"""Blocks of one runtime at one time, by measure."""
_NOTHING: Usage = dict.fromkeys(MEASURES, 0)


@attrs.define(eq=False)
class UsageBook:
    """Adds up the usage of each runtime."""

    _usages: dict[int, Usage] = attrs.field(factory=dict)

    def of(self, runtime: RuntimeLife) -> Usage:
        return self._usages.get(runtime.number, _NOTHING)

    def table_changed(self, runtime: RuntimeLife, num_blocks: int) -> Usage:
        """Add `num_blocks`, which may be negative, to the blocks in tables."""
        return self._add(runtime, {TABLES: num_blocks})

    def job_launched(self, job: JobTimeline) -> Usage:
        return self._add(job.runtime, {filling(job.link.destination): job.num_blocks})

    def job_ended(self, job: JobTimeline) -> Usage:
        there = job.link.destination
        usage = self._add(job.runtime, {filling(there): -job.num_blocks})
        return self.landed(job.runtime, there, job.num_blocks) if job.outcome == "completed" else usage

    def landed(self, runtime: RuntimeLife, tier: Tier, num_blocks: int) -> Usage:
        """Add `num_blocks` to the filled blocks of `tier`. Copies into other tiers do not reduce this number."""
        if tier not in _BELOW_DEVICE:
            return self.of(runtime)
        before, pool = self.of(runtime)[filled(tier)], runtime.pools.get(tier, 0)
        return self._add(runtime, {filled(tier): min(num_blocks, max(0, pool - before)) if pool else num_blocks})

    def closed(self, runtime: RuntimeLife) -> Usage:
        self._usages.pop(runtime.number, None)
        return _NOTHING

    def _add(self, runtime: RuntimeLife, changes: Usage) -> Usage:
        usage = dict(self.of(runtime))
        for measure, num_blocks in changes.items():
            usage[measure] += num_blocks
        self._usages[runtime.number] = usage
        return usage


# -- listener --------------------------------------------------------------------------------------------------------
#
# The interface of reports that are made while a log is read.


class Listener:
    """Receives each timeline when it has ended, so only open timelines are stored. The methods here do nothing."""

    def runtime_opened(self, runtime: RuntimeLife) -> None:
        """Also called for a runtime whose beginning is not in the log."""

    def timeline_over(self, timeline: Timeline) -> None: ...

    def job_over(self, job: JobTimeline) -> None: ...

    def usage_changed(self, runtime: RuntimeLife, at_s: float, usage: Usage) -> None: ...

    def told(self, event: Event, runtime: RuntimeLife) -> None:
        """An event that begins and ends nothing: of a kind in `TOLD`, or an alarm."""


TOLD = (
    Kind.DECLINED, Kind.SKIPPED_FETCH, Kind.EVICTION, Kind.WEIGHTS, Kind.QUOTA, Kind.HINT, Kind.REFUSAL,
    Kind.SKIPPED_STORE,
    Kind.ALARM,
)  # fmt: skip
ALARMS = (Kind.ALARM, Kind.RUNTIME)
"""Kinds of events that need attention. A listener receives only those events of a runtime that report a close with
copies in quarantine."""


# -- book ------------------------------------------------------------------------------------------------------------

MAX_OPEN = 200_000
"""Bound on open timelines, and on open jobs. A log with more was cut. The oldest count as unfinished."""

_LAST_STATES = {
    *(state.value for state, targets in REQUEST_MOVES.items() if not targets),
    *(state.value for state in (PinState.RELEASED, PinState.LAPSED, PinState.YIELDED, PinState.DROPPED)),
    *(state.value for state in (CacheTransferState.DONE, CacheTransferState.CANCELLED)),
}
_PREEMPTED, _MATCHED = RequestState.PREEMPTED.value, RequestState.MATCHED.value
_PINNED = RequestState.PINNED.value
_MATCHED_AGAIN = {state.value for state, targets in REQUEST_MOVES.items() if RequestState.MATCHED in targets}
_MATCHED_AGAIN.add(FETCHING)
_PENDING = Answer.PENDING.value
_LAUNCHED, _DISCARDED = JobState.LAUNCHED.value, JobState.DISCARDED.value
_REFUSED = Outcome.REFUSED.value
STEP_WORDS = _STEP, _BEGUN, _ENDED = "step", "begun", "ended"
_FIRST_STATES = {_MATCHED, CacheTransferState.MOVING.value, PinState.HELD.value, _BEGUN}
_OWNERS = (Kind.REQUEST, Kind.PREFETCH, Kind.DEMOTION, Kind.FETCH)
_TRANSFERS = (Kind.PREFETCH, Kind.DEMOTION, Kind.FETCH)
_HOLD_TABLES = (Kind.REQUEST, Kind.PREFETCH)
"""Kinds of timelines whose blocks are on the device."""
_TABLE_STATES = {RequestState.ALLOCATED.value, CacheTransferState.MOVING.value}

LaneKey = tuple[int, Kind | HopRow]
"""The number of a runtime, and the use of its lanes: requests and all that is drawn among them, steps, or one link."""
TimelineKey = tuple[int, Kind, str]
JobKey = tuple[int, int]
Key = TypeVar("Key")
Kept = TypeVar("Kept")


def _lanes_of(kind: Kind) -> Kind:
    return Kind.STEP if kind is Kind.STEP else Kind.REQUEST


@attrs.define(eq=False)
class TimelineBook:
    """The open timelines and jobs. Memory grows with the number that is open at once, not with the length of the
    log."""

    listener: Listener
    num_timelines: int = 0
    num_early: int = 0
    """Timelines whose beginning is not in the log."""
    lanes: defaultdict[LaneKey, Lanes] = attrs.field(factory=lambda: defaultdict(Lanes))
    # Ordered, because removing the first entry of a plain dict repeatedly takes longer each time.
    _timelines: OrderedDict[TimelineKey, Timeline] = attrs.field(factory=OrderedDict)
    _jobs: OrderedDict[JobKey, JobTimeline] = attrs.field(factory=OrderedDict)
    _usages: UsageBook = attrs.field(factory=UsageBook)
    _steps_of: dict[TimelineKey, list[Timeline]] = attrs.field(factory=dict)
    """The open steps of each request, by the key of the request."""

    def timeline_moved(self, event: Event, runtime: RuntimeLife) -> None:
        """An event of a request, a prefetch, a fetch, a demotion or a pin."""
        kind, state = event.meaning.kind, event.meaning.state
        name = str(event.count("pin_id")) if kind is Kind.PIN else event.text("request_id")
        waiter = event.text("waiter") if "waiter" in event.fields else ""
        facts = {fact: event.count(fact) for fact in FACTS if fact in event.fields}
        reason, previous = "", ""
        if state == RequestState.ABORTED.value:
            reason, previous = event.text("reason"), event.text("previous")
        # All fields are read above, so no `FieldError` is raised from here on.
        key = (runtime.number, kind, name)
        timeline = self._timelines.get(key)
        if timeline is not None and state == _MATCHED and timeline.states[-1] not in _MATCHED_AGAIN:
            self._give_up(key)  # the log lacks its end, or the id was used twice
            timeline = None
        timeline = timeline or self._begin(key, event, runtime, previous)
        if waiter:
            self._wait_for_fetch((runtime.number, Kind.REQUEST, waiter), state, runtime.last_s)
        timeline.states.append(state)
        timeline.times_s.append(runtime.last_s)
        timeline.facts |= facts
        if event.fields.get("answer") == _PENDING:
            timeline.facts["num_pending"] = timeline.facts.get("num_pending", 0) + 1
        if state in _LAST_STATES:
            self._keep_in_step(key, timeline)
        self._hold(timeline, state)
        if state in _LAST_STATES:
            timeline.outcome, timeline.reason = state, plain(reason)
            self._end(key)

    def _wait_for_fetch(self, key: TimelineKey, state: str, at_s: float) -> None:
        """The request `key` waits while a fetch for it is in progress. After the fetch it returns to its previous
        state."""
        timeline = self._timelines.get(key)
        if timeline is None or timeline.states[-1] not in (_PINNED, FETCHING):
            return
        now = FETCHING if state == CacheTransferState.MOVING.value else _PINNED
        if timeline.states[-1] != now:
            timeline.states.append(now)
            timeline.times_s.append(at_s)

    def tier_changed(self, event: Event, runtime: RuntimeLife) -> None:
        """The disk was opened, or read back. Blocks of a remote store cannot be counted."""
        if event.name == "disk_opened":
            runtime.pools[Tier.DISK] = event.count("num_slots")
        elif event.name == "disk_restored":
            num_blocks = event.count("num_blocks")
            self._report(runtime, self._usages.landed(runtime, Tier.DISK, num_blocks))

    def request_cancelled(self, event: Event, runtime: RuntimeLife) -> None:
        name, reason = event.text("request_id"), plain(event.text("reason"))
        timeline = self._timelines.get((runtime.number, Kind.REQUEST, name))
        if timeline is not None:
            timeline.cancelled = reason

    def fetch_missed(self, event: Event, runtime: RuntimeLife) -> None:
        """A request computes tokens that it could load or fetch, or that a disabled tier may have."""
        is_declined = event.meaning.kind is Kind.DECLINED
        fact, value = ("num_declined_tokens", event.count("num_tokens")) if is_declined else ("num_skipped_fetches", 1)
        timeline = self._timelines.get((runtime.number, Kind.REQUEST, event.text("request_id")))
        if timeline is not None:
            timeline.facts[fact] = value

    def step_moved(self, event: Event, runtime: RuntimeLife) -> None:
        key = (runtime.number, Kind.STEP, str(event.count("step_id")))
        if event.meaning.state == _BEGUN:
            members, facts = event.texts("request_ids"), {"num_blocks": event.count("num_blocks")}
            if key in self._timelines:
                self._give_up(key)
            step = self._begin(key, event, runtime, "")
            step.members, step.facts = members, facts
            for name in members:
                self._steps_of.setdefault((runtime.number, Kind.REQUEST, name), []).append(step)
        else:
            step = self._timelines.get(key) or self._begin(key, event, runtime, "")
            step.outcome = _ENDED
        step.states.append(_STEP if event.meaning.state == _BEGUN else _ENDED)
        step.times_s.append(runtime.last_s)
        if step.outcome == _ENDED:
            self._end(key)

    def _keep_in_step(self, key: TimelineKey, timeline: Timeline) -> None:
        """A request has ended. If it is in a step, that step holds its blocks until the step ends."""
        steps = self._steps_of.pop(key, None)
        if steps:
            timeline.facts["num_kept_blocks"] = timeline.num_held_blocks
            steps[-1].kept[timeline.name] = timeline.num_held_blocks
            steps[-1].num_held_blocks += timeline.num_held_blocks
            timeline.num_held_blocks = 0

    def _let_go(self, key: TimelineKey, step: Timeline) -> None:
        """A step has ended. Blocks that only the step has held are free."""
        for name in step.members:
            of = (key[0], Kind.REQUEST, name)
            steps = [other for other in self._steps_of.get(of, ()) if other is not step]
            if steps:
                self._steps_of[of] = steps
            else:
                self._steps_of.pop(of, None)

    def job_moved(self, event: Event, runtime: RuntimeLife) -> None:
        state = event.meaning.state
        key = (runtime.number, event.count("job_id"))
        if state == _LAUNCHED:
            self._launch(key, event, runtime)
            return
        # A discarded job was never launched, so it has no duration. Nor has a job launched before the log begins.
        num_bytes, copy_s = 0, 0.0
        if state != _DISCARDED:
            num_bytes = event.count("num_bytes") if "num_bytes" in event.fields else 0
            copy_s = event.seconds("duration_s") if "duration_s" in event.fields else 0.0
        error = event.fields.get("error", "")
        if event.fields.get("outcome") == _REFUSED:
            state = _REFUSED  # not a failure of the job: its link is disabled after earlier failures
        if key not in self._jobs:
            self._launch(key, event, runtime)
        job = self._jobs[key]
        job.outcome, job.num_bytes, job.copy_s, job.error = state, num_bytes, copy_s, plain(str(error))
        job.ended_s = runtime.last_s
        self._end_job(key)

    def runtime_over(self, runtime: RuntimeLife, until_s: float | None = None) -> None:
        """End the open timelines and jobs of the runtime as unfinished, at `until_s` or at its last event, because
        their end is not in the log."""
        runtime.last_s = max(runtime.last_s, until_s or 0.0)
        for key in [key for key in self._timelines if key[0] == runtime.number]:
            self._give_up(key)
        for job_key in [key for key in self._jobs if key[0] == runtime.number]:
            self._give_up_job(job_key)
        self._report(runtime, self._usages.closed(runtime))

    def _begin(self, key: TimelineKey, event: Event, runtime: RuntimeLife, previous: str) -> Timeline:
        self.num_timelines += 1
        lane = self.lanes[runtime.number, _lanes_of(key[1])].take()
        timeline = Timeline(self.num_timelines, key[1], plain(key[2]), runtime, lane, [], [])
        state = event.meaning.state
        if state not in _FIRST_STATES and key[1] not in _TRANSFERS:
            self.num_early += 1
        if previous:  # its beginning is missing, but its previous state is known
            timeline.states.append(plain(previous))
            timeline.times_s.append(runtime.last_s)
        self._make_room(self._timelines, self._give_up)
        self._timelines[key] = timeline
        return timeline

    def _hold(self, timeline: Timeline, state: str) -> None:
        """Update the number of blocks in its tables for its new state."""
        num_blocks = timeline.num_held_blocks
        if state in _TABLE_STATES and timeline.kind in _HOLD_TABLES:
            num_blocks = timeline.facts.get("num_blocks", 0)
        elif state in _LAST_STATES or state == _PREEMPTED:
            num_blocks = 0
        if num_blocks != timeline.num_held_blocks:
            usage = self._usages.table_changed(timeline.runtime, num_blocks - timeline.num_held_blocks)
            timeline.num_held_blocks = num_blocks
            self._report(timeline.runtime, usage)

    def _give_up(self, key: TimelineKey) -> None:
        """End a timeline as unfinished, at the last event of its runtime."""
        timeline = self._timelines[key]
        timeline.in_steps = [step.name for step in self._steps_of.get(key, ())]
        timeline.states.append(UNFINISHED)
        timeline.times_s.append(timeline.runtime.last_s)
        if timeline.num_held_blocks:
            self._report(timeline.runtime, self._usages.table_changed(timeline.runtime, -timeline.num_held_blocks))
        self._end(key)

    def _end(self, key: TimelineKey) -> None:
        timeline = self._timelines.pop(key)
        self.lanes[key[0], _lanes_of(key[1])].give(timeline.lane)
        if key[1] is Kind.STEP:
            self._let_go(key, timeline)
            if timeline.outcome == _ENDED and timeline.num_held_blocks:
                self._report(timeline.runtime, self._usages.table_changed(timeline.runtime, -timeline.num_held_blocks))
        else:
            self._steps_of.pop(key, None)
        self.listener.timeline_over(timeline)

    def _launch(self, key: JobKey, event: Event, runtime: RuntimeLife) -> None:
        link = link_of(event)
        num_blocks, owner = event.count("num_blocks"), event.text("request_id")
        if key in self._jobs:
            self._give_up_job(key)
        self._make_room(self._jobs, self._give_up_job)
        found = (self._timelines.get((runtime.number, kind, owner)) for kind in _OWNERS)
        number = next((timeline.number for timeline in found if timeline is not None), 0) if owner else 0
        lane, at_s = self.lanes[runtime.number, link].take(), runtime.last_s
        job = JobTimeline(key[1], link, num_blocks, plain(owner), number, runtime, lane, at_s, at_s)
        self._jobs[key] = job
        self._report(runtime, self._usages.job_launched(job))

    def _give_up_job(self, key: JobKey) -> None:
        self._jobs[key].ended_s = self._jobs[key].runtime.last_s
        self._end_job(key)

    def _end_job(self, key: JobKey) -> None:
        job = self._jobs.pop(key)
        self.lanes[key[0], job.link].give(job.lane)
        self._report(job.runtime, self._usages.job_ended(job))
        self.listener.job_over(job)

    def _report(self, runtime: RuntimeLife, usage: Usage) -> None:
        self.listener.usage_changed(runtime, runtime.last_s, usage)

    @staticmethod
    def _make_room(kept: OrderedDict[Key, Kept], give_up: Callable[[Key], None]) -> None:
        if len(kept) >= MAX_OPEN:
            give_up(next(iter(kept)))
