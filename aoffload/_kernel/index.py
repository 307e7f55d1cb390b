"""The index: which tokens are cached, in which blocks of which tier, and how much of a prompt that is. It stores runs:
stretches of prompts.

A *run* is a stretch of units that were always used together. One dict leads from the digest of the prefix up to and
including a run's first unit to the run. `before` links a run to the run that its prefix ends with. So a prompt is
looked up with one hash for each run, not for each block: the tokens of the rest of the run are compared as bytes.

    prompt   [ a a a a | b b b | c c . . . ]
    runs     [0 ...... 4) <- [4 ... 7) <- [7 .. 9)        c agrees with the first two units of its run only

For each tier and component, a run has one *part*: the blocks that the tier holds of the run.

    run      [start ............................. stop)
    full     [blocks, from the start on )                  a hit reads all blocks before its end
    window           [blocks, anywhere    )                a hit reads the last blocks before its end
    state                               [checkpoint)       a hit reads the checkpoint at its end

**A match** (`find_hit`) walks the path of a prompt once. In full attention it takes device blocks up to the first that
the device lacks, and host blocks after it. With windows or a recurrent state the hit ends at the last position at which
every component has the blocks that it needs, in either tier. Jobs under way will add blocks to a part
(`Part.incoming`): `covered` counts them, a match does not.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from .._common.prefix import TOKEN_BYTES
from .._common.tiers import BELOW, DEVICE, HIT_TIERS, Tier
from .layout import Component, Layout
from .records import Job, Part, Run
from .tokens import TokenSequence, hash_run


class RunIndex:
    """All findable runs of one epoch."""

    def __init__(self, layout: Layout, epoch: int, tiers: Sequence[Tier]) -> None:
        self.epoch = epoch
        self.tiers = tiers
        self.runs: dict[bytes, Run] = {}
        self._places = [(tier, component.number, component.width) for component in layout.components for tier in tiers]
        self.unit_tokens = layout.unit_tokens
        self._unit_bytes = layout.unit_tokens * TOKEN_BYTES

    def __repr__(self) -> str:
        return f"<RunIndex epoch={self.epoch} {len(self.runs)} runs>"

    def find(self, sequence: TokenSequence, before: Run | None, position: int) -> Run | None:
        """The child of `before`, which ends at unit `position`, whose first unit has the tokens of `sequence`."""
        key = sequence.keys.get(position)
        if key is None:
            hasher = sequence.root.hasher if before is None else before.hash_after
            key = sequence.key_at(hasher, position)
            if (position + 1) * self.unit_tokens <= sequence.num_tokens:  # else more tokens of the unit may follow
                sequence.keys[position] = key
        return self.runs.get(key)

    def walk(self, sequence: TokenSequence, limit: int) -> Iterator[tuple[Run, int]]:
        """Each run on the path of `sequence` up to unit `limit`, with the unit up to which both agree."""
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

    def insert(self, sequence: TokenSequence, before: Run | None, start: int, stop: int, key: bytes = b"") -> Run:
        """Insert a run after `before`. The caller has checked that there is none yet; `key`: its key, if known."""
        hasher = sequence.root.hasher if before is None else before.hash_after
        key = key or sequence.keys.get(start) or sequence.key_at(hasher, start)
        tokens, spans, root = sequence.shared_stretch(start, stop), sequence.spans_at(start), sequence.root
        run = Run(key, before, start, stop, tokens, spans, hasher, self.epoch, root, len(self.tiers))
        run._hash_after = sequence.hasher_at(stop)
        run.parts = tuple([Part(*place, run, start, start) for place in self._places])
        if before is not None:
            before.num_after += 1
        self.runs[key] = run
        return run

    def grow(self, run: Run, sequence: TokenSequence, stop: int) -> None:
        """Extend `run` in place up to unit `stop`."""
        added = sequence.stretch(run.stop, stop)
        run._hash_after = hash_run(run.hash_after, added, run.spans, self._unit_bytes)
        run.tokens = b"".join((run.tokens, added))
        run.stop = stop

    def split_head(self, run: Run, at: int) -> Run:
        """Split `run` at unit `at`: the head is a new run, the tail stays the same object, which leases refer to.

        Divides the tokens only; `PrefixCache` divides the parts.
        """
        cut = (at - run.start) * self._unit_bytes
        front = bytes(run.tokens[:cut])
        head = Run(
            run.key, run.before, run.start, at, front, run.spans, run.hash_before, run.epoch, run.root, run.num_tiers
        )
        head.num_after, head.offered_stop = 1, min(at, run.offered_stop)
        run.before = head
        self._begin_at(run, head, at)
        if run.epoch == self.epoch:
            self.runs[head.key] = head
            self.runs[run.key] = run
        return head

    @staticmethod
    def enter_parts(run: Run, parts: list[Part]) -> None:
        """Set the parts of a new run."""
        run.parts = tuple(parts)

    def shift_boundary(self, head: Run, run: Run, at: int) -> None:
        """Move the boundary between `head` and `run`, its only child, to unit `at`. Moves the tokens only;
        `PrefixCache` moves the blocks."""
        moved = bytes(run.tokens[: (at - run.start) * self._unit_bytes])
        head._hash_after = hash_run(head.hash_after, moved, head.spans, self._unit_bytes)
        head.tokens = b"".join((head.tokens, moved))
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
        run.tokens = bytes(run.tokens[(at - run.start) * self._unit_bytes :])
        run.start = at
        probe = run.hash_before.copy()
        probe.update(run.tokens[: self._unit_bytes])
        if run.spans:
            probe.update(b"".join([span.record() for span in run.spans]))
        run.key = probe.digest()

    def absorb(self, run: Run, heads: list[Run]) -> None:
        """Merge `heads` (the runs right before `run`, nearest first) into `run`: the opposite of a split."""
        first = heads[-1]
        for head in heads:
            del self.runs[head.key]
            head.parts = ()  # see `remove`
        del self.runs[run.key]
        run.offered_stop = max(run.offered_stop, *(head.offered_stop for head in heads))
        run.tokens = b"".join([head.tokens for head in reversed(heads)] + [run.tokens])
        run.key, run.before, run.start, run.hash_before = first.key, first.before, first.start, first.hash_before
        self.runs[run.key] = run
        for head in heads:
            head.before = run  # a path from a reference to a head leads to the run that has its units now

    def shorten(self, run: Run, stop: int) -> None:
        """Drop the tokens from unit `stop` on, of which no tier holds KV, because they only use memory."""
        run.tokens = bytes(run.tokens[: (stop - run.start) * self._unit_bytes])
        run.stop, run.offered_stop = stop, min(stop, run.offered_stop)
        run._hash_after = None

    def remove(self, run: Run) -> None:
        """Remove a run that holds nothing, and the runs before it that were kept for it only."""
        current: Run | None = run
        # The loop skips runs that are not in the index any more: an earlier removal may have included them.
        while current is not None and current.holds_nothing() and self.runs.get(current.key) is current:
            del self.runs[current.key]
            current.parts = ()  # parts refer back to the run: its tokens would stay until a full garbage collection
            current = current.before
            if current is not None:
                current.num_after -= 1


Stretch: TypeAlias = tuple[Run, int, int]
"""`(run, start, stop)`: units `[start, stop)` of one run. A list of them, in prefix order, is named `pieces`."""


def stretches(run: Run | None, start: int, stop: int) -> list[Stretch]:
    """Units `[start, stop)` of the path of `run`, by runs, in prefix order."""
    if start >= stop:
        return []
    if run is not None and run.start <= start and stop <= run.stop:  # the common case
        return [(run, start, stop)]
    found: list[Stretch] = []
    while run is not None and run.stop > start:
        if run.start < stop:
            first, last = run.start, run.stop
            found.append((run, first if first > start else start, last if last < stop else stop))
        run = run.before
    found.reverse()
    return found


def branch_points(run: Run, first: int, stop: int) -> list[int]:
    """The units of `[first, stop)` at which other prompts leave the path of `run`: a run of the path ends there, and
    further runs follow it."""
    found: list[int] = []
    before = run.before
    while before is not None and before.stop >= first:
        if before.num_after > 1 and before.stop < stop:
            found.append(before.stop)
        before = before.before
    return found


def held_ids(run: Run | None, tier: Tier, component: int, start: int, stop: int) -> array[int]:
    """The block ids of units `[start, stop)` of the path of `run`, all of which `tier` holds in `component`."""
    if run is not None and run.start <= start < stop <= run.stop:  # the common case
        part = run.parts[component * run.num_tiers + tier]
        return part.blocks[(start - part.first) * part.width : (stop - part.first) * part.width]
    ids = array("i")
    for each, first, last in stretches(run, start, stop):
        part = each.parts[component * each.num_tiers + tier]
        ids.extend(part.blocks[(first - part.first) * part.width : (last - part.first) * part.width])
    return ids


def present_stop(path: Sequence[Run], tier: Tier, start: int, stop: int) -> int:
    """End of the units from `start` on, at most `stop`, that `tier` holds without a gap, in full attention; `start` if
    it holds none there."""
    first = start
    for run in path:
        if run.stop > start:
            reached = run.parts[tier].stop
            if run.start >= stop or reached <= start:
                break
            start = reached
            if start < run.stop:
                break
    return min(start, stop) if start > first else first


def held_stop(
    layout: Layout, path: Sequence[Run], tier: Tier, start: int, stop: int, alignment: int = 1, given: int = 0
) -> int:
    """The last unit, at most `stop`, at which a request could go on computing with the blocks of `tier` alone. Checks
    every component, but full attention only from unit `start` on. `alignment` and `given`: see `accepted`."""
    if layout.full.width:
        stop = present_stop(path, tier, start, stop)
    return accepted(layout, path, stop, (tier,), alignment, given=given)


def accepted(
    layout: Layout,
    path: Sequence[Run],
    stop: int,
    tiers: Sequence[Tier],
    alignment: int = 1,
    device_limit: int | None = None,
    given: int = 0,
) -> int:
    """The last position, at most `stop` and a multiple of `alignment`, for which `tiers` hold what every window and the
    recurrent state need.

    `path` is in prefix order; the caller has found full attention to be present up to `stop`. Of the device, only units
    before `device_limit` count (None: all). Units before `given` count as present."""
    stop -= stop % alignment
    if not layout.partial:
        return stop
    held = _Held(path, tiers, stop if device_limit is None else device_limit, given)
    while True:
        stop -= stop % alignment
        lower = stop
        for component in layout.partial:
            lower = held.accepted(component, lower)
        if lower == stop:
            return stop
        stop = lower


@dataclass(slots=True, frozen=True)
class _Held:
    """The blocks of windows and recurrent states that `tiers` hold on a path."""

    path: Sequence[Run]
    tiers: Sequence[Tier]
    device_limit: int
    given: int

    def accepted(self, component: Component, stop: int) -> int:
        """The last position, at most `stop`, for which everything that `component` needs is present.

        A later position never reads further back. So if a missing unit is needed at `stop`, it is needed at every
        position between the unit and `stop`. The next candidate lies before the missing unit: the last end of held
        units, or the last position at which the component needs nothing (`Component.free_unit`), whichever is later."""
        while stop > self.given:
            missing = self._last_missing(component, max(self.given, component.first_unit(stop)), stop)
            if missing is None:
                return stop
            stop = max(self._present_before(component, missing), component.free_unit(missing))
        return stop

    def _last_missing(self, component: Component, start: int, stop: int) -> int | None:
        """The last unit of `[start, stop)` that none of `tiers` holds. `stop` moves back over the held units."""
        for run in reversed(self.path):
            place = component.number * run.num_tiers
            while start < stop and run.start < stop:
                first = stop
                for tier in self.tiers:
                    part = run.parts[place + tier]
                    is_held = part.first < stop <= part.stop and (tier is not DEVICE or stop <= self.device_limit)
                    if is_held and part.first < first:
                        first = part.first
                if first == stop:
                    return stop - 1
                stop = first
        return None if stop <= start else stop - 1

    def _present_before(self, component: Component, position: int) -> int:
        """The last end of held units at or before `position`; 0 if there is none."""
        for run in reversed(self.path):
            if run.start < position:
                ends = [min(units.stop, position) for units in self._units(component, run) if units.start < position]
                if ends:
                    return max(ends)
        return 0

    def _units(self, component: Component, run: Run) -> list[range]:
        """The units of `run` that each of `tiers` holds of `component`; nothing for a tier that holds none."""
        found: list[range] = []
        for tier in self.tiers:
            part = run.part(tier, component.number)
            stop = min(part.stop, self.device_limit) if tier is DEVICE else part.stop
            if part.first < stop:
                found.append(range(part.first, stop))
        return found


def jobs_bringing(pieces: list[Stretch], tier: Tier, start: int) -> tuple[list[Job], int]:
    """The unsettled jobs that bring full attention of the `pieces` of a path to `tier`, from unit `start` on without
    a gap, and the end of these units. A job may bring more units after that end, on another branch.
    """
    found: dict[Job, None] = {}
    position = start
    for run, _, stop in pieces:
        if stop <= position:
            continue
        part = run.parts[tier]
        chain: list[Job] = []
        job = part.incoming
        while job is not None and not job.is_settled and job.stop > start:
            chain.append(job)
            job = job.predecessor
        if not chain or chain[-1].start > position:  # a gap before these jobs: they will publish nothing
            break
        found.update(dict.fromkeys(chain))
        position = min(chain[0].stop, stop)
        if position < stop:
            break
    return list(found), position


def jobs_into(part: Part) -> Iterator[Job]:
    """The unsettled jobs that add to `part`, the one planned last first."""
    job = part.incoming
    while job is not None and not job.is_settled and job.stop > part.run.start:
        yield job
        job = job.predecessor


def covered(part: Part) -> tuple[int, int]:
    """(first, stop) of the units that the tier holds of the run or that jobs in flight will add; equal if none."""
    if part.incoming is None:
        return part.first, part.stop
    run = part.run
    if not part.component:  # full attention: the job that was planned last reaches furthest
        return part.first, max(part.stop, min(part.incoming.stop, run.stop))
    first, stop = (part.first, part.stop) if part.blocks else (run.stop, run.start)
    for job in jobs_into(part):  # the one planned last may bring the front of a window
        first, stop = min(first, max(run.start, job.start)), max(stop, min(job.stop, run.stop))
    return first, stop


class Hit:
    """The result of a match, in units."""

    __slots__ = ("device_stop", "full_stop", "path", "stop")

    def __init__(self, device_stop: int, stop: int, path: tuple[Run, ...], full_stop: int = 0) -> None:
        self.device_stop = device_stop
        """End of the device hit: the last position at which a request could go on computing with the device alone."""
        self.stop = stop
        """End of the hit, with both tiers together."""
        self.path = path
        """The matched runs in prefix order, as far as a hit tier holds full attention. They may end after `stop`."""
        self.full_stop = full_stop
        """End of the units of which the hit tiers hold full attention. Only with windows or a recurrent state may it
        lie after `stop`."""

    def run_at(self, position: int) -> Run:
        """The run that holds the unit before `position`."""
        for run in reversed(self.path):
            if run.start < position:
                return run
        raise ValueError(f"no run of the hit lies before unit {position}")


def find_hit(
    index: RunIndex,
    sequence: TokenSequence,
    layout: Layout,
    limit: int,
    alignment: int = 1,
    *,
    islands: bool = True,
) -> Hit:
    """Match at most `limit` units of `sequence`; the hit ends at a multiple of `alignment`. Pins and splits nothing.

    In full attention, the hit takes device blocks up to the first that the device lacks, and host blocks after it. The
    hit ends at the last position at which every other component has the blocks that it needs, in either tier. Device
    blocks after the device hit are *islands*: a hit may need them in a window or as a checkpoint. Without `islands`,
    they count in no component.
    """
    path, device_stop, stop = _full_path(index, sequence, layout, limit)
    if not layout.partial:
        stop -= stop % alignment
        return Hit(min(device_stop, stop), stop, path)
    full_stop = stop
    if islands:
        stop = accepted(layout, path, stop, HIT_TIERS, alignment)
        return Hit(accepted(layout, path, min(device_stop, stop), (DEVICE,)), stop, path, full_stop)
    near = device_stop
    # The device hit ends no later than the hit, and device blocks after the device hit do not count: shorten both in
    # turn until they agree.
    while True:
        near = accepted(layout, path, near, (DEVICE,))
        reached = present_stop(path, BELOW, near, stop) if layout.full.width else stop
        reached = accepted(layout, path, reached, HIT_TIERS, alignment, device_limit=near)
        if near <= reached:
            return Hit(near, reached, path, full_stop)
        near = reached


def is_branch_point(index: RunIndex, sequence: TokenSequence, hit: Hit) -> bool:
    """Whether the index has other tokens than `sequence` after `hit.full_stop`: other prompts diverge there."""
    stop, last = hit.full_stop, hit.path[-1] if hit.path else None
    if last is None or not stop:
        return False
    most = sequence.num_tokens // index.unit_tokens
    if last.stop > stop:
        return stop < most and sequence.common_stop(last, min(last.stop, most)) == stop
    own = index.find(sequence, last, stop) if stop < most else None
    return last.num_after > (own is not None)


def lower_path(
    index: RunIndex, sequence: TokenSequence, layout: Layout, limit: int, alignment: int = 1
) -> tuple[list[Run], int]:
    """The path of `sequence`, and the unit, at most `limit`, up to which a request would hit after a fetch: the tiers
    below the device together hold full attention up to there, and all tiers together what the windows need. Full
    attention on the device does not count, because a fetch fills the host without a gap."""
    path: list[Run] = []
    stop, below = 0, index.tiers[BELOW:]
    has_full = layout.full.width > 0
    for run, agreed in index.walk(sequence, limit):
        path.append(run)
        stop = min(max([run.parts[tier].stop for tier in below]), agreed) if has_full else agreed
        if stop < run.stop:
            break
    return path, accepted(layout, path, stop, index.tiers, alignment)


def _full_path(
    index: RunIndex, sequence: TokenSequence, layout: Layout, limit: int
) -> tuple[tuple[Run, ...], int, int]:
    """The matched path, the end of the full attention that the device holds, and its end in device and host together.
    If no group has full attention, both are the end of the path."""
    device_stop = stop = 0
    path: list[Run] = []
    has_full = layout.full.width > 0
    position = 0
    before: Run | None = None
    while position < limit:  # `RunIndex.walk`, without a generator
        run = index.find(sequence, before, position)
        if run is None:
            break
        agreed = sequence.common_stop(run, limit)
        if agreed == run.start:
            break
        path.append(run)
        stop = agreed
        if has_full:
            reached = run.parts[BELOW].stop
            if device_stop == run.start:
                device_stop = run.parts[DEVICE].stop
                if device_stop > agreed:
                    device_stop = agreed
                if device_stop > reached:
                    reached = device_stop
            if reached < agreed:
                stop = reached
        elif device_stop == run.start:
            device_stop = agreed
        if stop < run.stop:
            break
        position, before = stop, run
    return tuple(path), device_stop, stop
