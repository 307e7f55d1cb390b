"""How often prefixes were requested: an index of runs without blocks, bounded by the tokens that it keeps.

Counts outlive the cached blocks, so they cannot be on the runs of the cache. A digest per block would cost a hash of
every block at each request; runs are compared as bytes and hashed once, as in the cache.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace

from .groups import Layout
from .index import RunIndex
from .records import Run
from .tokens import TokenSequence

__all__ = ["HitCounts", "RecentPrompts"]

RUN_TOKENS = 256
"""Overhead of one run (about 1 KB), in tokens of 4 bytes."""
MAX_RECENT = 256
"""Prompts that `RecentPrompts` keeps."""
MAX_RECENT_TOKENS = 2**22


class HitCounts:
    """Hit counts of prefixes. The least recently seen is forgotten first, the end of a prefix before its start."""

    def __init__(self, layout: Layout, max_tokens: int) -> None:
        self._index = RunIndex(replace(layout, bands=()), epoch=0, tiers=())
        self._unit_tokens = layout.unit_tokens
        self._max_tokens = max_tokens
        self._counts: OrderedDict[Run, int] = OrderedDict()
        """Oldest first. A run is never older than the runs behind it."""
        self.num_tokens = 0
        """Tokens kept, plus `RUN_TOKENS` for each run."""

    def __repr__(self) -> str:
        return f"<HitCounts {len(self._counts)} runs, {self.num_tokens}/{self._max_tokens} tokens>"

    def see(self, sequence: TokenSequence, first: int, stop: int) -> None:
        """Count one more request for units `[first, stop)` of `sequence`. Units before them are kept, not counted."""
        if first >= stop:
            return
        path: list[Run] = []
        for found, agreed in self._index.walk(sequence, stop):
            run = found if found.stop == agreed else self._cut(found, agreed)
            if run.start < first < run.stop:
                path.append(self._cut(run, first))
            path.append(run)
        for border in (first, stop):  # units before `first` are in runs of their own
            if not path or path[-1].stop < border:
                path += self._insert(sequence, path[-1] if path else None, border)
        for run in path:
            if run.start >= first:
                self._counts[run] += 1
        for run in reversed(path):
            self._counts.move_to_end(run)
        while self.num_tokens > self._max_tokens:
            self._forget(next(iter(self._counts)))

    def stop_of(self, sequence: TokenSequence, limit: int, num_times: int) -> int:
        """The unit, at most `limit`, up to which `sequence` was seen at least `num_times`."""
        stop = 0
        for run, agreed in self._index.walk(sequence, limit):
            if self._counts[run] < num_times:
                break
            stop = agreed
        return stop

    def _cut(self, run: Run, at: int) -> Run:
        """The run that ends at unit `at` of `run`, which is split there if it goes on."""
        if run.stop == at:
            return run
        head = self._index.split_head(run, at)
        self._counts[head] = self._counts[run]
        self.num_tokens += RUN_TOKENS
        return head

    def _insert(self, sequence: TokenSequence, before: Run | None, stop: int) -> list[Run]:
        added: list[Run] = []
        position = 0 if before is None else before.stop
        while position < stop:
            before = self._index.insert(sequence, before, position, sequence.run_stop(position, stop))
            added.append(before)
            self._counts[before] = 0
            self.num_tokens += self._cost(before)
            position = before.stop
        return added

    def _forget(self, run: Run) -> None:
        del self._index.runs[run.key]
        if run.before is not None:
            run.before.num_after -= 1
        del self._counts[run]
        self.num_tokens -= self._cost(run)

    def _cost(self, run: Run) -> int:
        return (run.stop - run.start) * self._unit_tokens + RUN_TOKENS


class RecentPrompts:
    """What was asked for lately, within bounds: the prompt that was asked for first is dropped first."""

    def __init__(self) -> None:
        self._kept: OrderedDict[TokenSequence, int] = OrderedDict()
        """With the tokens that each counts for."""
        self._num_tokens = 0
        self.num_added = 0

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, sequence: TokenSequence) -> None:
        self._num_tokens += sequence.num_tokens - self._kept.pop(sequence, 0)
        self._kept[sequence] = sequence.num_tokens
        self.num_added += 1
        while len(self._kept) > MAX_RECENT or (self._num_tokens > MAX_RECENT_TOKENS and len(self._kept) > 1):
            self._num_tokens -= self._kept.popitem(last=False)[1]

    def take(self) -> TokenSequence:
        """Remove the one that was asked for last, and return it."""
        sequence, num_tokens = self._kept.popitem()
        self._num_tokens -= num_tokens
        return sequence

    def give_back(self, sequence: TokenSequence, *, as_last: bool) -> None:
        """Keep one that was taken; `as_last`: it is the next to be dropped, and the last to be taken."""
        self._kept[sequence] = sequence.num_tokens
        self._num_tokens += sequence.num_tokens
        self._kept.move_to_end(sequence, last=not as_last)
