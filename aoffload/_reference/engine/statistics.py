"""Counters of an engine."""

from __future__ import annotations

from collections.abc import Iterable

import attrs

from .sequence import PromptTable

__all__ = ["EngineStatistics", "Peaks"]


@attrs.frozen(kw_only=True)
class EngineStatistics:
    """Counts since the engine was opened, over all requests, unfinished ones included."""

    num_steps: int
    num_prefilled_tokens: int
    num_decoded_tokens: int
    num_waiting: int
    """Requests that wait for a place."""
    num_prefilling: int
    num_decoding: int
    num_head_starts: int
    """Prompts whose first slice was computed while their cached prefix was still loading."""
    num_head_starts_used: int
    """Those of them whose result was used: the load succeeded, and the client was still there."""
    num_made_way: int
    """Tries that gave up their room to an older request and began again."""
    peak_pinned_blocks: int
    """Peak of `num_pinned`, the runtime's count of device blocks in use."""
    peak_null_blocks: int
    """Peak of the blocks saved by windows: null entries in the block tables of live requests."""
    num_blocks_at_peak: int
    """All entries of those tables at that peak, null ones included: the blocks they would take without windows. A
    prefix shared by two requests counts in both."""


@attrs.define(eq=False)
class Peaks:
    """Peak use of the device, sampled in every step but head starts."""

    num_pinned: int = 0
    num_nulls: int = 0
    num_positions: int = 0

    def observe(self, num_pinned: int, tables: Iterable[PromptTable]) -> None:
        self.num_pinned = max(self.num_pinned, num_pinned)
        num_nulls = num_positions = 0
        for table in tables:
            num_nulls += table.num_nulls
            num_positions += table.num_positions
        if num_nulls > self.num_nulls:
            self.num_nulls, self.num_positions = num_nulls, num_positions
