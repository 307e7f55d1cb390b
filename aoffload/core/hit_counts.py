"""How often prefixes were requested: an index of runs without blocks, bounded by the tokens that it keeps.

Counts outlive the cached blocks, so they cannot be on the runs of the cache. A digest per block would cost a hash of
every block at each request; runs are compared as bytes and hashed once, as in the cache.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from .groups import Layout
from .index import RunIndex
from .records import Run
from .tokens import TokenSequence

__all__ = ["CountedRun", "HitCounts", "RecentPrompts", "RunWatcher"]

RUN_TOKENS = 256
"""Overhead of one run (about 1 KB), in tokens of 4 bytes."""
MAX_RECENT = 256
"""Prompts that `RecentPrompts` keeps."""
MAX_RECENT_TOKENS = 2**22


@dataclass(slots=True, eq=False)
class CountedRun:
    run: Run
    num_uses: int = 0
    last_asked: int = 0
    """By a clock of whoever counts times, too."""
    salt: int = 0
    """What tells runs apart, and not the parts of one that was split."""

    def used(self, now: int) -> None:
        self.num_uses += 1
        self.last_asked = now


class RunWatcher(Protocol):
    """Receives what becomes of the runs of `HitCounts`."""

    def was_split(self, counted: CountedRun, head: CountedRun) -> None:
        """`head` has the units before the start of `counted`, which had them until now."""

    def was_forgotten(self, counted: CountedRun) -> None: ...


class HitCounts:
    """Hit counts of prefixes. The least recently seen is forgotten first, the end of a prefix before its start."""

    def __init__(
        self, layout: Layout, max_tokens: int, run_tokens: int = RUN_TOKENS, watcher: RunWatcher | None = None
    ) -> None:
        bare = Layout(layout.groups, layout.unit_tokens, (), layout.places, (), layout.width, layout.full)
        self._index = RunIndex(bare, epoch=0, tiers=())
        self._unit_tokens = layout.unit_tokens
        self._max_tokens = max_tokens
        self._run_tokens = run_tokens
        self._watcher = watcher
        self._counts: OrderedDict[Run, CountedRun] = OrderedDict()
        """Oldest first. A run is never older than the runs behind it."""
        self.num_tokens = 0
        """Tokens kept, plus `run_tokens` for each run."""

    def __repr__(self) -> str:
        return f"<HitCounts {len(self._counts)} runs, {self.num_tokens}/{self._max_tokens} tokens>"

    def __len__(self) -> int:
        return len(self._counts)

    def see(self, sequence: TokenSequence, first: int, stop: int, now: int = 0) -> None:
        """Count one more request for units `[first, stop)` of `sequence`. Units before them are kept, not counted."""
        if first < stop:
            for counted in self.path(sequence, first, stop):
                counted.used(now)
            self.trim()

    def path(self, sequence: TokenSequence, first: int, stop: int) -> Sequence[CountedRun]:
        """The counts of units `[first, stop)` of `sequence`, in runs of their own, which become the latest."""
        path: list[CountedRun] = []
        counts, position, run = self._counts, 0, None
        while position < stop:
            key = sequence.key_at(sequence.root.hasher if run is None else run.hash_after, position)
            found = self._index.runs.get(key)
            agreed = position if found is None else sequence.common_stop(found, stop)
            if found is None or agreed == position:
                upto = sequence.run_stop(position, first if position < first else stop)
                path.append(self._insert(sequence, run, position, upto, key))
            else:
                run = self._cut(found, agreed)
                if position < first < agreed:
                    path.append(counts[self._cut(run, first)])
                path.append(counts[run])
            run = path[-1].run
            position = run.stop
        for counted in reversed(path):
            counts.move_to_end(counted.run)
        return [counted for counted in path if counted.run.start >= first] if first else path

    def trim(self) -> None:
        """Forget what is too much."""
        while self.num_tokens > self._max_tokens:
            self._forget(next(iter(self._counts)))

    def stop_of(self, sequence: TokenSequence, limit: int, num_times: int) -> int:
        """The unit, at most `limit`, up to which `sequence` was seen at least `num_times`."""
        stop = 0
        for run, agreed in self._index.walk(sequence, limit):
            if self._counts[run].num_uses < num_times:
                break
            stop = agreed
        return stop

    def _cut(self, run: Run, at: int) -> Run:
        """The run that ends at unit `at` of `run`, which is split there if it goes on."""
        if run.stop == at:
            return run
        counted = self._counts[run]
        head = self._index.split_head(run, at)
        self._counts[head] = before = CountedRun(head, counted.num_uses, counted.last_asked, counted.salt)
        self.num_tokens += self._run_tokens
        if self._watcher is not None:
            self._watcher.was_split(counted, before)
        return head

    def _insert(self, sequence: TokenSequence, before: Run | None, start: int, stop: int, key: bytes) -> CountedRun:
        """Runs with the units before `first` are apart from those behind it: only these are counted."""
        run = self._index.insert(sequence, before, start, stop, key)
        self._counts[run] = counted = CountedRun(run, salt=key[0])
        self.num_tokens += self._cost(run)
        return counted

    def _forget(self, run: Run) -> None:
        del self._index.runs[run.key]
        if run.before is not None:
            run.before.num_after -= 1
        counted = self._counts.pop(run)
        self.num_tokens -= self._cost(run)
        if self._watcher is not None:
            self._watcher.was_forgotten(counted)

    def _cost(self, run: Run) -> int:
        return (run.stop - run.start) * self._unit_tokens + self._run_tokens


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
