"""How full the pools are, as far as the events tell.

No event carries the counts of a pool. Sums of other counts are less exact; `DERIVED` says so to the reader.
"""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from .._kernel.states import TIERS, Tier
from .links import name_of
from .runtimes import RuntimeLife
from .timelines import JobTimeline

__all__ = ["DERIVED", "MEASURES", "TABLES", "Usage", "UsageBook", "filled", "filling"]

DERIVED = (
    "Derived, since no event carries the counts of a pool. Device: blocks in the tables of requests and prefetches, "
    "as many as each was given at its start. What several share counts once for each of them, so the sum may be larger "
    "than the pool; what decoding adds is not in it. Every other tier: blocks that landed copies have filled there, "
    "and on a disk those that an earlier process has left, at most the pool; what was dropped since then is not known. "
    "Of device blocks that are an engine's own, only those that are being loaded are known."
)


def filling(tier: Tier) -> str:
    """Its measure: blocks that launched jobs write to."""
    return f"{name_of(tier)}_filling"


def filled(tier: Tier) -> str:
    """Its measure: blocks that landed copies have filled; at most this many are in use."""
    return f"{name_of(tier)}_filled"


TABLES = "device_tables"
"""The measure of the device: blocks in tables."""
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
        """So many more blocks of `tier` are filled. Copies into other tiers take nothing from it."""
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
