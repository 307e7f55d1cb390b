"""The index by runs: which tokens are cached, and in which blocks of which tier (design, section 8b).

A run is a stretch of blocks that were always touched together. `before` is the run that its prefix ends with, so the
path of a run is found without the index. The index is one dict: digest of a run's first unit -> run.

What a run holds in one tier is one part for each band of groups:

    run      [start ............................. stop)
    spine    [blocks, from the start on )
    window           [blocks, wherever    )               a band of limited reach
"""

from __future__ import annotations

from array import array
from collections.abc import Container, Iterator
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import attrs

from ..prefix import TOKEN_BYTES, Hasher, KeySpan, Root
from .groups import Layout
from .plan import Tier
from .tokens import TokenSequence, hash_run

if TYPE_CHECKING:
    from .jobs import Job

__all__ = ["NUM_TIERS", "Part", "Run", "RunIndex", "Stretch", "held_ids", "stretches"]

NUM_TIERS = len(Tier)


@attrs.frozen
class Condemned:
    """Blocks that a part has held from unit `start` on, and that nobody finds there any more."""

    start: int
    ids: array[int]

    def units(self, width: int) -> list[Condemned]:
        """The same, unit by unit."""
        count = len(self.ids) // width
        return [Condemned(self.start + at, self.ids[at * width : (at + 1) * width]) for at in range(count)]


@attrs.define(eq=False, repr=False, weakref_slot=False)
class Part:
    """What one run holds of one band in one tier: the blocks of `[first, stop)`. The spine's begin at the run's start;
    a part without blocks is at the run's start, too."""

    width: ClassVar[int] = 0
    """Ids for each unit. The parts of one band have a class of their own that says so: there are many parts."""

    run: Run
    first: int
    stop: int
    blocks: array[int] = attrs.field(factory=lambda: array("i"))
    """`width` ids for each unit; len(blocks) == (stop - first) * width."""
    num_references: int = 0
    """Of the spine: leases that end at this run + runs right behind it that are referenced. Of a window: leases that
    cover this run. 0: evictable, and in the order."""
    incoming: Job | None = None
    """The last job in flight that adds to this part."""
    condemned: tuple[Condemned, ...] = ()
    """Forgotten blocks that references still protect; free when they are gone."""
    last_use: int = 0
    """When the last one who used it let go, as its order counts; 0 while somebody uses it."""
    older: Part | None = None
    newer: Part | None = None

    def __str__(self) -> str:
        return f"{self.stop - self.first}/{self.num_references}"

    @property
    def covered_stop(self) -> int:
        """Up to where the tier holds this run, or will when the jobs in flight have landed."""
        return self.stop if self.incoming is None else max(self.stop, self.stop_of(self.incoming))

    def stop_of(self, job: Job) -> int:
        """Up to where `job`, which adds to this part, does so: it may go on behind it."""
        return min(job.stop, self.run.stop)

    @property
    def covered(self) -> tuple[int, int]:
        """From where up to where the tier holds this run, or will; first == last if it does not."""
        job, first, stop = self.incoming, self.first, self.stop
        if job is None:
            return first, stop
        last_stop = self.stop_of(job)
        if not self.blocks:
            first, stop = max(self.run.start, job.start), last_stop
        while job is not None and not job.is_settled and job.stop > self.run.start:
            first = min(first, max(self.run.start, job.start))
            job = job.predecessor
        return first, max(stop, last_stop)

    def ids(self, start: int, stop: int) -> array[int]:
        """The ids of units `[start, stop)`, which lie in this part."""
        return self.blocks[(start - self.first) * self.width : (stop - self.first) * self.width]

    def append(self, ids: array[int], stop: int) -> None:
        """Let the part go on with `ids` up to unit `stop`."""
        if self.blocks:
            self.blocks.extend(ids)
        else:
            self.blocks = ids[:]  # of just this size: an array that was extended keeps room for more
        self.stop = stop

    def drop_behind(self, stop: int) -> array[int]:
        """Let the part end at `stop`; the blocks that were behind it."""
        keep = max(0, stop - self.first) * self.width
        dropped = self.blocks[keep:]
        del self.blocks[keep:]
        self.stop = stop
        if not self.blocks:
            self.first = self.stop = self.run.start
        return dropped

    def clear(self) -> array[int]:
        """Let the part hold nothing; what it has held."""
        return self.drop_behind(self.first)

    def condemn(self, start: int, ids: array[int]) -> None:
        """Forget `ids`, which it has held from unit `start` on, without freeing them."""
        self.condemned = (*self.condemned, Condemned(start, ids))

    def condemned_ids(self) -> array[int]:
        return sum((one.ids for one in self.condemned), array("i"))

    def divide_condemned(self, at: int) -> tuple[Condemned, ...]:
        """Keep those from unit `at` on; the others, which go when the references to another run do."""
        units = [unit for one in self.condemned for unit in one.units(self.width)]
        self.condemned = tuple([unit for unit in units if unit.start >= at])
        return tuple([unit for unit in units if unit.start < at])

    def disown(self, ids: Container[int]) -> None:
        """Know nothing more of `ids`, which are condemned here and another's from now on."""
        units = [unit for one in self.condemned for unit in one.units(self.width)]
        self.condemned = tuple([unit for unit in units if unit.ids[0] not in ids])


@attrs.define(eq=False, repr=False, weakref_slot=False)
class Run:
    key: bytes
    before: Run | None
    start: int
    stop: int
    tokens: bytes
    spans: tuple[KeySpan, ...]
    hash_before: Hasher
    epoch: int
    root: Root
    parts: tuple[Part, ...] = ()
    """Band by band, in each the tiers: `parts[tier]` is the spine's."""
    offered_stop: int = 0
    """Up to where somebody wants it in the host before it is lost; what lies before it on its path, too."""
    num_after: int = 0
    """Runs whose `before` is this one. A run stays as long as anything hangs on it."""
    _hash_after: Hasher | None = None

    def __repr__(self) -> str:
        held = " ".join(f"{Tier(i % NUM_TIERS).name.lower()}={part}" for i, part in enumerate(self.parts))
        return f"<Run [{self.start},{self.stop}) {held}>"

    @property
    def hash_after(self) -> Hasher:
        if self._hash_after is None:
            unit_bytes = len(self.tokens) // (self.stop - self.start)
            self._hash_after = hash_run(self.hash_before, self.tokens, self.spans, unit_bytes)
        return self._hash_after

    def part(self, tier: Tier, band: int) -> Part:
        return self.parts[band * NUM_TIERS + tier]

    def whole_path(self) -> list[Run]:
        """All runs before this one, and this one, in prefix order."""
        if self.before is None:
            return [self]
        return [*self.path()][::-1]

    def path(self) -> Iterator[Run]:
        """This run and all before it, last first."""
        run: Run | None = self
        while run is not None:
            yield run
            run = run.before

    def holds_nothing(self) -> bool:
        return not self.num_after and all(
            not part.blocks and not part.num_references and part.incoming is None for part in self.parts
        )


class Stretch(NamedTuple):
    """Units `[start, stop)` of one run."""

    run: Run
    start: int
    stop: int


def stretches(run: Run | None, start: int, stop: int) -> list[Stretch]:
    """Units `[start, stop)` of the path of `run`, by runs, in prefix order."""
    if run is not None and run.start <= start < stop <= run.stop:  # as most do
        return [Stretch(run, start, stop)]
    found: list[Stretch] = []
    for current in run.path() if run is not None else ():
        if current.stop <= start:
            break
        if current.start < stop:
            found.append(Stretch(current, max(start, current.start), min(stop, current.stop)))
    found.reverse()
    return found


def held_ids(over: list[Stretch], tier: Tier, band: int) -> array[int]:
    """The ids of the blocks that `tier` holds of `band` over stretches; all of them have to be there."""
    if len(over) == 1:
        run, start, stop = over[0]
        return run.part(tier, band).ids(start, stop)
    ids = array("i")
    for stretch in over:
        ids.extend(stretch.run.part(tier, band).ids(stretch.start, stretch.stop))
    return ids


class RunIndex:
    """All findable runs of one epoch."""

    def __init__(self, layout: Layout, epoch: int) -> None:
        self.epoch = epoch
        self.runs: dict[bytes, Run] = {}
        kinds = [type("Part", (Part,), {"__slots__": (), "width": band.width}) for band in layout.bands]
        self._part_kinds: tuple[type[Part], ...] = tuple(kind for kind in kinds for _ in Tier)
        self._unit_bytes = layout.unit_tokens * TOKEN_BYTES

    def __repr__(self) -> str:
        return f"<RunIndex epoch={self.epoch} {len(self.runs)} runs>"

    def find(self, sequence: TokenSequence, before: Run | None, position: int) -> Run | None:
        """The run that goes on where `before` ends (at `position`) with the tokens of `sequence`."""
        hasher = sequence.root.hasher if before is None else before.hash_after
        return self.runs.get(sequence.key_at(hasher, position))

    def walk(self, sequence: TokenSequence, limit: int) -> Iterator[tuple[Run, int]]:
        """Each run on the path of `sequence` up to unit `limit`, with the position up to where they agree."""
        position = 0
        before: Run | None = None
        while position < limit:
            run = self.find(sequence, before, position)
            if run is None:
                return
            stop = sequence.common_stop(run, limit)
            if stop == run.start:
                return
            yield run, stop
            if stop < run.stop:
                return
            position, before = stop, run

    def insert(self, sequence: TokenSequence, before: Run | None, start: int, stop: int) -> Run:
        """A new run behind `before`; the caller has looked that there is none."""
        hasher = sequence.root.hasher if before is None else before.hash_after
        key = sequence.key_at(hasher, start)
        tokens, spans, root = sequence.stretch(start, stop), sequence.spans_at(start), sequence.root
        run = Run(key, before, start, stop, tokens, spans, hasher, self.epoch, root)
        run._hash_after = sequence.hasher_at(stop)
        run.parts = tuple([kind(run, start, start) for kind in self._part_kinds])
        if before is not None:
            before.num_after += 1
        self.runs[key] = run
        return run

    def grow(self, run: Run, sequence: TokenSequence, stop: int) -> None:
        """Let `run` reach to `stop` in place."""
        added = sequence.stretch(run.stop, stop)
        run._hash_after = hash_run(run.hash_after, added, run.spans, self._unit_bytes)
        run.tokens += added
        run.stop = stop

    def split_head(self, run: Run, at: int) -> Run:
        """Cut `run` at unit `at`: a new head is put before it, the tail keeps its identity (leases hold run objects).

        Tokens and place only; the parts are the cache's to divide.
        """
        cut = (at - run.start) * self._unit_bytes
        front = run.tokens[:cut]
        head = Run(run.key, run.before, run.start, at, front, run.spans, run.hash_before, run.epoch, run.root)
        head.num_after, head.offered_stop = 1, min(at, run.offered_stop)
        run.before = head
        self._begin_at(run, head, at)
        if run.epoch == self.epoch:
            self.runs[head.key] = head
            self.runs[run.key] = run
        return head

    def move_border(self, head: Run, run: Run, at: int) -> None:
        """Let `head`, which nothing else follows, go on to unit `at`, where `run` begins from now on. Tokens and place
        only."""
        moved = run.tokens[: (at - run.start) * self._unit_bytes]
        head._hash_after = hash_run(head.hash_after, moved, head.spans, self._unit_bytes)
        head.tokens += moved
        head.stop = at
        head.offered_stop = max(head.offered_stop, min(at, run.offered_stop))
        was_findable = self.runs.get(run.key) is run
        if was_findable:
            del self.runs[run.key]
        self._begin_at(run, head, at)
        if was_findable:
            self.runs[run.key] = run

    def _begin_at(self, run: Run, head: Run, at: int) -> None:
        """Let `run` begin at unit `at`, where `head` ends."""
        run.hash_before = head.hash_after
        run.tokens = run.tokens[(at - run.start) * self._unit_bytes :]
        run.start = at
        probe = run.hash_before.copy()
        probe.update(run.tokens[: self._unit_bytes] + b"".join(span.record() for span in run.spans))
        run.key = probe.digest()

    def absorb(self, run: Run, heads: list[Run]) -> None:
        """Join `heads` (the runs right before `run`, nearest first) into `run`: the opposite of a split."""
        first = heads[-1]
        for head in heads:
            del self.runs[head.key]
            head.parts = ()  # see `remove`
        del self.runs[run.key]
        run.offered_stop = max(run.offered_stop, *(head.offered_stop for head in heads))
        run.tokens = b"".join([head.tokens for head in reversed(heads)] + [run.tokens])
        run.key, run.before, run.start, run.hash_before = first.key, first.before, first.start, first.hash_before
        self.runs[run.key] = run

    def shorten(self, run: Run, stop: int) -> None:
        """Drop tokens that no tier holds: a short run must not keep a long buffer alive."""
        run.tokens = run.tokens[: (stop - run.start) * self._unit_bytes]
        run.stop, run.offered_stop = stop, min(stop, run.offered_stop)
        run._hash_after = None

    def remove(self, run: Run) -> None:
        """Take a run that holds nothing out of the index, and those before it that were only kept for it."""
        current: Run | None = run
        # Only what is still in it: one removal may have taken along a run that is tidied up next.
        while current is not None and current.holds_nothing() and self.runs.get(current.key) is current:
            del self.runs[current.key]
            current.parts = ()  # they refer back to it: its tokens would stay until a full collection
            current = current.before
            if current is not None:
                current.num_after -= 1
