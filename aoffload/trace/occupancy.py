"""How full the pools are, as far as the events tell.

No event carries the counts of a pool. Sums of other counts are less exact; `DERIVED` says so to the reader.
"""

from __future__ import annotations

import attrs

from ..core.plan import Direction
from .runtimes import RuntimeLife
from .timelines import JobTimeline

__all__ = ["DERIVED", "MEASURES", "Usage", "UsageBook"]

DERIVED = (
    "Derived, since no event carries the counts of a pool. Device: blocks in the tables of requests and prefetches, "
    "as many as each was given at its start. What several share counts once for each of them, so the sum may be larger "
    "than the pool; what decoding adds is not in it. Host: blocks that landed stores have filled, at most the pool; "
    "what was dropped since then is not known. Of device blocks that are an engine's own, only those that are being "
    "loaded are known."
)
MEASURES = ("tables", "loading", "stored", "storing")


@attrs.frozen
class Usage:
    """Blocks of one runtime at one time."""

    tables: int = 0
    """Device blocks in tables."""
    loading: int = 0
    """Blocks of launched loads."""
    stored: int = 0
    """Host blocks that stores have filled; at most this many are in use."""
    storing: int = 0
    """Blocks of launched stores."""


@attrs.define(eq=False)
class UsageBook:
    """Adds up the usage of each runtime."""

    _usages: dict[int, Usage] = attrs.field(factory=dict)

    def of(self, runtime: RuntimeLife) -> Usage:
        return self._usages.get(runtime.number, Usage())

    def table_changed(self, runtime: RuntimeLife, num_blocks: int) -> Usage:
        """Add `num_blocks`, which may be negative, to the blocks in tables."""
        usage = self.of(runtime)
        return self._put(runtime, attrs.evolve(usage, tables=usage.tables + num_blocks))

    def job_launched(self, job: JobTimeline) -> Usage:
        return self._put(job.runtime, self._under_way(job, job.num_blocks))

    def job_ended(self, job: JobTimeline) -> Usage:
        usage = self._under_way(job, -job.num_blocks)
        if job.direction is Direction.STORE and job.outcome == "completed":
            room = job.runtime.num_host_blocks or usage.stored + job.num_blocks
            usage = attrs.evolve(usage, stored=min(room, usage.stored + job.num_blocks))
        return self._put(job.runtime, usage)

    def closed(self, runtime: RuntimeLife) -> Usage:
        self._usages.pop(runtime.number, None)
        return Usage()

    def _under_way(self, job: JobTimeline, num_blocks: int) -> Usage:
        usage = self.of(job.runtime)
        if job.direction is Direction.LOAD:
            return attrs.evolve(usage, loading=usage.loading + num_blocks)
        return attrs.evolve(usage, storing=usage.storing + num_blocks)

    def _put(self, runtime: RuntimeLife, usage: Usage) -> Usage:
        self._usages[runtime.number] = usage
        return usage
