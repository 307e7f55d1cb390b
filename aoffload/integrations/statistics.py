"""What an engine counts."""

from __future__ import annotations

from collections.abc import Iterable

import attrs

from .sequence import PromptTable

__all__ = ["EngineStatistics", "Peaks"]


@attrs.frozen(kw_only=True)
class EngineStatistics:
    """Counts since the engine was opened, for every request, also those that did not finish."""

    num_steps: int
    num_prefilled_tokens: int
    num_decoded_tokens: int
    num_waiting: int
    """Requests that wait for a place."""
    num_prefilling: int
    num_decoding: int
    num_head_starts: int
    """Prompts whose first slice was computed while what lies before it was still being loaded…"""
    num_head_starts_used: int
    """…and those of them that were good for something: the load landed, and the client was still there."""
    num_made_way: int
    """Tries that gave up their room to an older request and began again."""
    peak_pinned_blocks: int
    """The most device blocks that were in use at once, of the runtime's own count."""
    peak_null_blocks: int
    """The most blocks that windows have saved at once: null positions in the tables of live requests."""
    num_blocks_at_peak: int
    """All positions of those tables then, the null ones too: the blocks they would take without windows. A prefix that
    two requests share counts in both."""


@attrs.define(eq=False)
class Peaks:
    """What the device held at most, looked at in every step."""

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
