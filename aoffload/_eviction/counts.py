"""How often prefixes were requested: runs without blocks, bounded by the tokens that they keep.

Counts outlive the cached blocks, so they cannot be on the runs of the cache. The key of a run is made from the run
before it and its own first unit; a lookup compares the other tokens. A key is hashed only if its first unit is long.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Protocol

from .._common.prefix import TOKEN_BYTES, KeySpan
from .._kernel.layout import Layout
from .._kernel.tokens import TokenSequence

RUN_TOKENS = 256
"""Overhead of one run (about 1 KB), in tokens of 4 bytes."""
MAX_RUN_TOKENS = 2**14
"""Runs are merged up to this size, because merging copies their tokens."""
MAX_RECENT = 256
"""Prompts that `RecentPrompts` keeps."""
MAX_RECENT_TOKENS = 2**22

PLAIN_KEY_BYTES = 96
"""A key of at most this size, such as one with a unit of 16 tokens, is not hashed. A longer key is hashed."""
HASHED_KEY_BYTES = 17
"""Size of a hashed key. No plain key has this size, because tokens have 4 bytes each."""


@dataclass(slots=True, eq=False)
class CountedRun:
    """Tokens that were always requested together, and how often."""

    key: bytes
    number: bytes
    """A number that no other run has. The keys of the runs after this run contain it."""
    start: int
    stop: int
    tokens: bytes | memoryview
    spans: tuple[KeySpan, ...]
    num_uses: int = 0
    last_asked: int = 0
    """The time of the last request, by the clock of the caller; 0 if the caller has no clock."""
    idle_since: int = 0
    """For learned eviction: the time at which the last request for it ended; 0 while there is one."""
    bucket: int = 0
    """For learned eviction: its bucket in `ReturnTimes`."""
    before: CountedRun | None = None
    """The run before it, if `HitCounts` has one."""
    num_after: int = 0
    """Number of runs right after it."""

    def used(self, now: int) -> None:
        self.num_uses += 1
        self.last_asked = now


class RunWatcher(Protocol):
    """Receives the runs that `HitCounts` splits and forgets."""

    def was_split(self, counted: CountedRun, head: CountedRun) -> None:
        """`counted` was split: `head` has its first units from now on."""

    def was_merged(self, counted: CountedRun, head: CountedRun) -> None:
        """`head`, the run before `counted`, was merged into `counted`."""

    def was_forgotten(self, counted: CountedRun) -> None: ...


def _are_counted_alike(head: CountedRun, run: CountedRun) -> bool:
    return head.num_uses == run.num_uses


class HitCounts:
    """Hit counts of prefixes. The least recently requested run is forgotten first, and the end of a prefix before its
    start."""

    def __init__(
        self,
        layout: Layout,
        max_tokens: int,
        run_tokens: int = RUN_TOKENS,
        watcher: RunWatcher | None = None,
        count_alike: Callable[[CountedRun, CountedRun], bool] = _are_counted_alike,
    ) -> None:
        """`count_alike`: whether two runs that are requested together may be one run, because their counts mean the
        same."""  # fmt: skip
        self._unit_bytes = layout.unit_tokens * TOKEN_BYTES
        self._unit_tokens = layout.unit_tokens
        self._max_tokens = max_tokens
        self._run_tokens = run_tokens
        self._watcher = watcher
        self._count_alike = count_alike
        self._max_run_bytes = MAX_RUN_TOKENS * TOKEN_BYTES
        self._runs: OrderedDict[bytes, CountedRun] = OrderedDict()
        """Oldest first. A run is never older than the runs after it."""
        self._num_numbers = 0
        self.num_tokens = 0
        """Tokens kept, plus `run_tokens` for each run."""

    def __repr__(self) -> str:
        return f"<HitCounts {len(self._runs)} runs, {self.num_tokens}/{self._max_tokens} tokens>"

    def __len__(self) -> int:
        return len(self._runs)

    def see(self, sequence: TokenSequence, first: int, stop: int, now: int = 0) -> None:
        """Count one more request for units `[first, stop)` of `sequence`. Units before them are kept, not counted."""
        if first >= stop or (not first and self._was_seen_whole(sequence, stop, now)):
            return
        for counted in self.path(sequence, first, stop):
            counted.used(now)
        self.trim()

    def _was_seen_whole(self, sequence: TokenSequence, stop: int, now: int) -> bool:
        """Count one more request for the first `stop` units if they are one run, because most repeated prompts are one
        run."""
        run = self._runs.get(_key(sequence.root.digest, sequence.unit_record(0)))
        if run is None or run.stop != stop or sequence.common_stop(run, stop) != stop:
            return False
        self._runs.move_to_end(run.key)
        run.used(now)
        return True

    def path(self, sequence: TokenSequence, first: int, stop: int) -> Sequence[CountedRun]:
        """The runs with exactly the units `[first, stop)` of `sequence`. Inserts missing runs, and splits runs at
        `first` and `stop`. The runs become the most recently requested."""
        path: list[CountedRun] = []
        runs, position, before, last = self._runs, 0, sequence.root.digest, None
        while position < stop:
            key = _key(before, sequence.unit_record(position))
            run = runs.get(key)
            agreed = position if run is None else sequence.common_stop(run, stop)
            if run is None or agreed == position:
                run = self._insert(sequence, last, position, first if position < first else stop, key)
            else:
                if run.stop != agreed:
                    run = self._cut(run, agreed)
                if position < first < agreed:
                    path.append(self._cut(run, first))
                elif last is not None and not first and self._may_merge(last, run):
                    self._merge(last, run)
                    path.pop()
            path.append(run)
            position, before, last = run.stop, run.number, run
        self._asked_last(path)
        return [counted for counted in path if counted.start >= first] if first else path

    def path_from(self, before: Sequence[CountedRun], sequence: TokenSequence, stop: int) -> Sequence[CountedRun]:
        """As `path` from unit 0 on. `before`: an earlier answer for a prefix of `sequence`. It saves time if its runs
        have not changed since."""
        if not before or before[-1].stop > stop or not self._are_present(before):
            return self.path(sequence, 0, stop)
        found, last = list(before), before[-1]
        while last.stop < stop:
            key = _key(last.number, sequence.unit_record(last.stop))
            if key in self._runs:
                return self.path(sequence, 0, stop)
            last = self._insert(sequence, last, last.stop, stop, key)
            found.append(last)
        self._asked_last(found)
        return found

    def _are_present(self, path: Sequence[CountedRun]) -> bool:
        """Whether no run of `path` was split, merged or forgotten since."""
        runs, position = self._runs, 0
        for counted in path:
            if counted.start != position or runs.get(counted.key) is not counted:
                return False
            position = counted.stop
        return True

    def known(self, sequence: TokenSequence, stop: int) -> list[CountedRun]:
        """The runs with the units of `sequence` before `stop`, as far as they were seen. Splits a run where the
        sequence leaves it."""
        path: list[CountedRun] = []
        position, before = 0, sequence.root.digest
        while position < stop:
            run = self._runs.get(_key(before, sequence.unit_record(position)))
            agreed = position if run is None else sequence.common_stop(run, stop)
            if run is None or agreed == position:
                break
            if run.stop != agreed:
                run = self._cut(run, agreed)
            path.append(run)
            position, before = run.stop, run.number
        self._asked_last(path)
        return path

    def _asked_last(self, path: Sequence[CountedRun]) -> None:
        """Make the runs of `path` the newest. The first run becomes the newest of all, because no run may be older than
        the runs after it."""
        for counted in reversed(path):
            self._runs.move_to_end(counted.key)

    def trim(self) -> None:
        """Forget the oldest runs until the tokens kept are at most `max_tokens`."""
        while self.num_tokens > self._max_tokens:
            _, counted = self._runs.popitem(last=False)
            self.num_tokens -= self._cost(counted)
            if counted.before is not None:
                counted.before.num_after -= 1
            if self._watcher is not None:
                self._watcher.was_forgotten(counted)

    def stop_of(self, sequence: TokenSequence, limit: int, num_times: int) -> int:
        """The unit, at most `limit`, up to which `sequence` was seen at least `num_times`."""
        stop = 0
        before = sequence.root.digest
        while stop < limit:
            run = self._runs.get(_key(before, sequence.unit_record(stop)))
            if run is None or run.num_uses < num_times:
                break
            stop = sequence.common_stop(run, limit)
            if stop < run.stop:
                break
            before = run.number
        return stop

    def _cut(self, run: CountedRun, at: int) -> CountedRun:
        """Split `run` at unit `at`. Returns a new run with the units before `at`. `run` keeps the units from `at` on,
        and becomes the most recently requested run."""
        cut, tokens = (at - run.start) * self._unit_bytes, run.tokens
        head = CountedRun(
            run.key, self._new_number(), run.start, at, bytes(tokens[:cut]), run.spans, run.num_uses,
            run.last_asked, run.idle_since, run.bucket, run.before, 1,
        )  # fmt: skip
        run.before = head
        self._runs[head.key] = head
        record = bytes(tokens[cut : cut + self._unit_bytes]) + b"".join([span.record() for span in run.spans])
        run.start, run.tokens, run.key = at, bytes(tokens[cut:]), _key(head.number, record)
        self._runs[run.key] = run
        self.num_tokens += self._run_tokens
        if self._watcher is not None:
            self._watcher.was_split(run, head)
        return head

    def _may_merge(self, head: CountedRun, run: CountedRun) -> bool:
        """Whether `head` and `run`, the run after it, are requested together, and count the same."""
        return (
            head.last_asked == run.last_asked
            and head.num_after == 1
            and self._count_alike(head, run)
            and head.spans == run.spans
            and len(head.tokens) + len(run.tokens) <= self._max_run_bytes
        )

    def _merge(self, head: CountedRun, run: CountedRun) -> None:
        """Merge `head` into `run`, the run after it."""
        del self._runs[run.key]
        run.start, run.tokens, run.key = head.start, b"".join((head.tokens, run.tokens)), head.key
        run.before = head.before
        self._runs[run.key] = run
        self.num_tokens -= self._run_tokens
        if self._watcher is not None:
            self._watcher.was_merged(run, head)

    def _insert(
        self, sequence: TokenSequence, before: CountedRun | None, start: int, limit: int, key: bytes
    ) -> CountedRun:
        """Insert a run that begins at unit `start` and ends at `limit` at the latest. `path` passes its `first` as
        `limit`, because only the units from `first` on are counted."""
        stop = sequence.run_stop(start, limit)
        tokens, spans = sequence.shared_stretch(start, stop), sequence.spans_at(start)
        if before is not None:
            before.num_after += 1
        counted = CountedRun(key, self._new_number(), start, stop, tokens, spans, before=before)
        self._runs[key] = counted
        self.num_tokens += self._cost(counted)
        return counted

    def _new_number(self) -> bytes:
        self._num_numbers += 1
        return self._num_numbers.to_bytes(8, "little")

    def _cost(self, run: CountedRun) -> int:
        return (run.stop - run.start) * self._unit_tokens + self._run_tokens


def _key(before: bytes, unit: bytes) -> bytes:
    """The key of a run whose first unit is `unit`. `before` is the number of the run before it, or the digest of the
    root."""
    key = before + unit
    return key if len(key) <= PLAIN_KEY_BYTES else sha256(key).digest()[:HASHED_KEY_BYTES]


class RecentPrompts:
    """The prompts that were requested last, up to `MAX_RECENT`. The prompt that was requested first is dropped
    first."""

    def __init__(self) -> None:
        self._kept: OrderedDict[TokenSequence, int] = OrderedDict()
        """The number of tokens of each prompt."""
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
        """Remove and return the prompt that was requested last."""
        sequence, num_tokens = self._kept.popitem()
        self._num_tokens -= num_tokens
        return sequence

    def give_back(self, sequence: TokenSequence, *, as_last: bool) -> None:
        """Put back a prompt that `take` has returned. `as_last`: the prompt is dropped before all others, and taken
        after all others."""
        self._kept[sequence] = sequence.num_tokens
        self._num_tokens += sequence.num_tokens
        self._kept.move_to_end(sequence, last=not as_last)
