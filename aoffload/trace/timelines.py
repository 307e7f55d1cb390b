"""Timelines of one request, prefetch, demotion, pin, step or job, from its first event to its last."""

from __future__ import annotations

from collections.abc import Iterator

import attrs

from .events import Kind
from .links import HopRow
from .runtimes import RuntimeLife

__all__ = ["FACTS", "FETCHING", "UNFINISHED", "Interval", "JobTimeline", "Timeline"]

UNFINISHED = "unfinished"
"""The outcome of a timeline or job without a last event."""
FETCHING = "fetching"
"""Of a request: PINNED, while it waits for a fetch from below host memory."""
FACTS = (
    "num_tokens",
    "num_device_tokens",
    "num_host_tokens",
    "num_disk_tokens",
    "num_blocks",
    "num_ready_tokens",
    "num_lost_tokens",
    "num_computed_tokens",
    "num_pending",
    "num_kept_blocks",
    "num_declined_tokens",
    "num_skipped_fetches",
)
"""Counts that events carry. The last event that has one counts: a request is matched again when its turn comes. Except
for `num_pending`: how many matches were answered with pending, `num_kept_blocks`: blocks that a step still held when
the request was over, `num_declined_tokens`: those of the last load or fetch that was not worth its time, and
`num_skipped_fetches`: those of tiers that were left alone."""


@attrs.frozen
class Interval:
    """A stretch of time in one state."""

    state: str
    start_s: float
    stop_s: float

    @property
    def duration_s(self) -> float:
        return self.stop_s - self.start_s


@attrs.define(eq=False)
class Timeline:
    """A timeline. States are those of docs/lifecycle.md, in lower case."""

    number: int
    """In order of their beginnings, from 1."""
    kind: Kind
    name: str
    """The request id; for a pin or a step its number."""
    runtime: RuntimeLife
    lane: int
    states: list[str]
    times_s: list[float]
    """When each state was entered; the last one is where it ended."""
    outcome: str = UNFINISHED
    reason: str = ""
    facts: dict[str, int] = attrs.field(factory=dict)
    num_held_blocks: int = 0
    """Blocks in its tables at present."""
    members: list[str] = attrs.field(factory=list)
    """Of a step: the ids of its requests."""
    cancelled: str = ""
    """Of a request that is not over: why it was cancelled."""
    in_steps: list[str] = attrs.field(factory=list)
    """Of a request that is not over: the open steps that it is in."""
    kept: dict[str, int] = attrs.field(factory=dict)
    """Of a step: those of its requests that are over, and how many blocks it still holds of each."""

    @property
    def start_s(self) -> float:
        return self.times_s[0]

    @property
    def stop_s(self) -> float:
        return self.times_s[-1]

    @property
    def duration_s(self) -> float:
        return self.stop_s - self.start_s

    def intervals(self) -> Iterator[Interval]:
        """One for each state it was in, those of no length included."""
        for at in range(len(self.states) - 1):
            yield Interval(self.states[at], self.times_s[at], self.times_s[at + 1])

    def last_state(self) -> str:
        """The state before it ended."""
        return self.states[-2] if len(self.states) > 1 else ""

    @property
    def last_state_s(self) -> float:
        """Seconds in that state."""
        return self.times_s[-1] - self.times_s[-2] if len(self.states) > 1 else 0.0

    def title(self) -> str:
        """What it is called among others."""
        return f"{self.kind.value} {self.name}" if self.kind in (Kind.PIN, Kind.STEP) else self.name


@attrs.define(eq=False)
class JobTimeline:
    job_id: int
    link: HopRow
    num_blocks: int
    owner: str
    """The id of the request, prefetch or demotion that began it; empty for stores of a lazy policy."""
    owner_number: int
    """The number of that timeline; zero if there is none."""
    runtime: RuntimeLife
    lane: int
    launched_s: float
    ended_s: float
    outcome: str = UNFINISHED
    num_bytes: int = 0
    copy_s: float = 0.0
    """Duration of the copy itself, as the transport measured it."""
    error: str = ""
